"""Which modules unshard together: the units.

Owns the walk over a model that finds them. Every rank enters the units in the same order, or there would be no telling
which gather comes next; that is the one thing to get right here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

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
