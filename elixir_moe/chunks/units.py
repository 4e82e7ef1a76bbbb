"""Which modules unshard as one unit.

Owns the choice of units from a description of the modules, under any layout. Pure: the runtime hooks the chosen units,
and `chunks.replay` counts with them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from elixir_moe.chunks.events import ModuleInfo
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.residence import CACHED, IN_PLACE
from elixir_moe.chunks.step_machine import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """A module that unshards as one, and the parameters it unshards."""

    module: int
    params: tuple[int, ...]
    whole: bool
    """The unit includes all modules inside the module."""
    rank_dependent: bool = False
    """Ranks may have gradients for different parameters of the unit."""
    saves_no_weights: bool = False
    """Autograd saves none of its parameters."""


def choose_units(
    modules: Sequence[ModuleInfo], chunk_of: Mapping[int, int], *, whole_layers: bool = True
) -> list[UnitSpec | None]:
    """The unit of each module, outermost first; None if nothing is gathered for the module by itself.

    A unit is the largest module whose parameters lie in a single moving chunk: any piece of it would gather all of it.
    A module with several such chunks is a unit for its own parameters only, and the modules inside it are considered in
    turn. With whole layers, a module without tiles that backward recomputes is a unit in any case: its chunks are held
    together then. A module inside several others, or a compiled one, is never part of a larger unit: a step may call it
    without that.
    """
    chunks: list[set[int]] = [{chunk_of[p] for p in module.params if p in chunk_of} for module in modules]
    params: list[list[int]] = [list(module.params) for module in modules]
    joins = [True] * len(modules)
    rank_dependent = [module.rank_dependent for module in modules]
    saves_no_weights = [module.saves_no_weights or not module.params for module in modules]
    in_turn = _with_tiles(modules)
    for number in reversed(range(len(modules))):
        parent = modules[number].parent
        if parent is not None:
            if len(chunks[parent]) < 2:
                chunks[parent] |= chunks[number]
            joins[parent] &= joins[number] and not (modules[number].shared or modules[number].compiled)
            rank_dependent[parent] |= rank_dependent[number]
            saves_no_weights[parent] &= saves_no_weights[number]
            params[parent] += params[number]
    units: list[UnitSpec | None] = []
    for number, module in enumerate(modules):
        around = None if module.parent is None else units[module.parent]
        if around is not None and around.whole:
            units.append(around)
        elif joins[number] and (
            len(chunks[number]) < 2 or (whole_layers and module.recomputed and not in_turn[number])
        ):
            mine = tuple(sorted(set(params[number])))
            traits = {"rank_dependent": rank_dependent[number], "saves_no_weights": saves_no_weights[number]}
            units.append(UnitSpec(module=number, params=mine, whole=True, **traits))
        elif module.params:
            traits = {"rank_dependent": module.rank_dependent, "saves_no_weights": module.saves_no_weights}
            units.append(UnitSpec(module=number, params=module.params, whole=False, **traits))
        else:
            units.append(None)
    return units


def _with_tiles(modules: Sequence[ModuleInfo]) -> list[bool]:
    """Whether each module has tiles inside, which are gathered one after the other also where they run again."""
    found = [module.saves_no_weights and bool(module.params) for module in modules]
    for number in reversed(range(len(modules))):
        if (parent := modules[number].parent) is not None:
            found[parent] |= found[number]
    return found


def regions_of(modules: Sequence[ModuleInfo]) -> dict[int, int]:
    """{parameter: the outermost module around it that backward recomputes at once, a unit in any chunks}."""
    tiles = _with_tiles(modules)
    region: list[int | None] = []
    found: dict[int, int] = {}
    for number, module in enumerate(modules):
        around = None if module.parent is None else region[module.parent]
        region.append(number if around is None and module.recomputed and not tiles[number] else around)
        if (mine := region[number]) is not None:
            found.update(dict.fromkeys(module.params, mine))
    return found


def moving_chunks(layout: Layout) -> dict[int, int]:
    """{parameter: chunk} for the chunks that use the rCache or are overwritten by their gradients."""
    return {
        slot.param: chunk.index
        for chunk in layout.chunks
        if chunk.residence in (CACHED, IN_PLACE)
        for slot in chunk.slots
    }


def chosen_units(modules: Sequence[ModuleInfo], layout: Layout) -> list[UnitSpec | None]:
    """The unit of each module of a packed model; see `choose_units`."""
    return choose_units(modules, moving_chunks(layout), whole_layers=layout.whole_layers)


def units_moved(chosen: Sequence[UnitSpec | None], layout: Layout) -> int:
    """The number of units that gather anything, of those chosen for the layout."""
    return len(units_with(chosen, moving_chunks(layout)))


def units_with(chosen: Sequence[UnitSpec | None], params: Collection[int]) -> set[UnitSpec]:
    """The units that have any of these parameters."""
    return {unit for unit in set(chosen) if unit is not None and any(p in params for p in unit.params)}


def units_of(chosen: Sequence[UnitSpec | None], layout: Layout, label: Callable[[int], str]) -> dict[int, Unit]:
    """{module: its unit} for the modules that unshard as one; `label` names a module in messages."""
    slot_of = {slot.param: (chunk.index, i) for chunk in layout.chunks for i, slot in enumerate(chunk.slots)}
    specs = dict.fromkeys(spec for spec in chosen if spec is not None)
    return {
        s.module: Unit(
            label(s.module), tuple(slot_of[p] for p in s.params), s.rank_dependent, saves_no_weights=s.saves_no_weights
        )
        for s in specs
    }
