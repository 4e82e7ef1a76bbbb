"""Which modules unshard together: the units, and the schedule to expect of them.

Owns the walk over a model that finds them. Every rank enters the units in the same order, or there would be no telling
which gather comes next; that is the one thing to get right here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from elixir_moe.chunks.layout import ChunkSpec
from elixir_moe.chunks.policy import Entry, Schedule, Verb
from elixir_moe.parallel.annotate import pattern_of
from elixir_moe.parallel.pattern import EXPERT_AXIS


@dataclass(slots=True, eq=False)
class Unit:
    """A module that unshards as one: every rank enters it, so every rank takes part in its gathers."""

    name: str
    module: nn.Module
    slots: list[tuple[int, int]]
    """(chunk, index in the chunk) of its parameters."""
    chunks: tuple[int, ...]


def find_units(model: nn.Module, slot_of: dict[nn.Parameter, tuple[int, int]]) -> Iterator[Unit]:
    """The modules that unshard as one, outermost first.

    Each module that owns parameters is a unit, with one exception: a list of alike modules inside another list, or with
    all parameters sharded over experts, is taken for experts, of which each rank may run others. Its owner then is one
    unit with all that is beneath it, so that gathers do not depend on routing.
    """

    def walk(module: nn.Module, name: str, in_list: bool) -> Iterator[Unit]:
        chooses = any(_may_choose(child, in_list) for child in module.children())
        own = list(module.parameters(recurse=chooses))
        slots = [slot_of[p] for p in dict.fromkeys(own) if p in slot_of]
        if slots:
            yield Unit(name, module, slots, tuple(sorted({chunk for chunk, _ in slots})))
        if not chooses:
            for child_name, child in module.named_children():
                inner = in_list or isinstance(child, (nn.ModuleList, nn.ModuleDict))
                yield from walk(child, f"{name}.{child_name}".lstrip("."), inner)

    yield from walk(model, "", False)


def _may_choose(module: nn.Module, in_list: bool) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    kinds = {type(child) for child in module.children()}
    alike = len(kinds) == 1 and len(list(module.children())) > 1
    patterns = [pattern_of(p) for p in module.parameters()]
    experts = bool(patterns) and all(p is not None and EXPERT_AXIS in dict(p.shard) for p in patterns)
    return alike and (in_list or experts)


def expected_schedule(model: nn.Module, units: Sequence[Unit], chunks: Sequence[ChunkSpec]) -> Schedule:
    """What the first step will ask of the cache if modules run once each, in order of registration.

    Backward visits units in the reverse of the order forward left them; a unit holds its chunks until everything
    entered behind it is done, and a chunk is freed when the last of its parameters has its gradient. What it cannot
    know, such as checkpointed regions, only asks for more blocks.
    """
    calls = _calls(model, {id(unit.module): unit for unit in units})
    cached = {id(unit): tuple(c for c in unit.chunks if not chunks[c].resident) for unit in units}
    awaited = {c.index: {i for i, _ in enumerate(c.slots)} for c in chunks if c.key.trainable and not c.resident}
    sizes = {chunk: len(slots) for chunk, slots in awaited.items()}
    numbered = [(entered, Verb.ACQUIRE, unit) for entered, _, unit in calls]
    numbered += [(left, Verb.RELEASE, unit) for _, left, unit in calls]
    entries = [Entry(verb, cached[id(unit)]) for _, verb, unit in sorted(numbered, key=lambda item: item[0])]
    open_units: list[tuple[int, Unit]] = []
    gone: set[int] = set()
    backward: list[tuple[int, int, Unit | None]] = [*sorted(calls, key=lambda call: -call[1]), (-1, -1, None)]
    for entered, left, unit in backward:
        for done, other in [(e, u) for e, u in open_units if e > left]:
            open_units.remove((done, other))
            entries += _gradients(other, awaited, sizes, gone)
            entries.append(Entry(Verb.RELEASE, tuple(c for c in cached[id(other)] if c not in gone)))
        if unit is not None:
            entries.append(Entry(Verb.ACQUIRE, cached[id(unit)]))
            open_units.append((entered, unit))
            if left == entered + 1:  # nothing runs inside it: its gradients come at once
                entries += _gradients(unit, awaited, sizes, gone)
    return Schedule([entry for entry in entries if entry.chunks])


def _gradients(unit: Unit, awaited: dict[int, set[int]], sizes: dict[int, int], gone: set[int]) -> Iterator[Entry]:
    for chunk, index in unit.slots:
        if index in awaited.get(chunk, ()):
            if len(awaited[chunk]) == sizes[chunk]:
                yield Entry(Verb.HOLD, (chunk,))
            awaited[chunk].discard(index)
            if not awaited[chunk]:
                gone.add(chunk)
                yield Entry(Verb.FREE, (chunk,))


def _calls(model: nn.Module, units: dict[int, Unit]) -> list[tuple[int, int, Unit]]:
    """(number at entry, number at exit, unit) if every module ran once, in order of registration."""
    calls: list[tuple[int, int, Unit]] = []
    clock = 0

    def visit(module: nn.Module) -> None:
        nonlocal clock
        unit = units.get(id(module))
        entered = clock = clock + (unit is not None)
        for child in module.children():
            visit(child)
        if unit is not None:
            clock += 1
            calls.append((entered, clock, unit))

    visit(model)
    return calls
