"""The description of a model and of one step, before packing.

Owns `ModuleInfo` and `StepEvent`, and the order in which a step uses parameters. Pure: `planner.trace` and
`runtime.units` record events, and `chunks.replay` plays them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleInfo:
    """A callable module with parameters, its own or those of modules inside it."""

    params: tuple[int, ...]
    """Indices of its own parameters."""
    parent: int | None
    """Number of the innermost module around it, smaller than its own; None for an outermost module."""
    shared: bool = False
    """The module is inside several others."""
    compiled: bool = False
    """torch.compile traces the module, whose parameters it needs gathered wherever the module is called."""
    rank_dependent: bool = False
    """Ranks may use different parameters of the module: experts."""
    saves_no_weights: bool = False
    """Autograd saves none of its own parameters: backward reads them again."""
    recomputed: bool = False
    """Backward runs all that is inside the module again at once, and so needs all of it at once.

    A traced backward shows it; else the module itself tells."""


class EventKind(Enum):
    """The kind of an event of a step. The first three happen in forward, and in backward where it is recomputed."""

    ENTER = auto()
    """A call enters a module."""
    LEAVE = auto()
    """The call leaves it."""
    READ = auto()
    """A function reads parameters outside the modules they belong to."""
    REACH = auto()
    """Backward comes to the outputs of a module."""
    UNPACK = auto()
    """An operator in backward wants a parameter that it has saved."""
    EXPECT = auto()
    """The gradients of parameters may come from now on, in any order. Only an assumed backward has it."""
    ACCUMULATE = auto()
    """A gradient is complete."""


ENTER, LEAVE, READ, REACH, UNPACK, EXPECT, ACCUMULATE = EventKind


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One event of a step, in order of time."""

    kind: EventKind
    module: int = -1
    """The module that is entered, left or reached."""
    params: tuple[int, ...] = ()
    """Indices of the parameters that are read, unpacked or complete."""
    with_grad: bool = True
    """Autograd records what begins or ends."""
    in_backward: bool = False
    """A call or read happens in backward, which recomputes a checkpointed region."""
    run: int = 0
    """For `REACH`: how many runs of the module forward had left before; -1 for a run that backward has recomputed."""
    same_operator: bool = False
    """For `UNPACK`: the operator is that of the event of this kind before."""

    @property
    def recomputes(self) -> bool:
        """Whether backward enters a module again."""
        return self.kind is ENTER and self.in_backward

    @property
    def is_forward(self) -> bool:
        """Whether the event is part of a forward."""
        return self.kind in (ENTER, LEAVE, READ) and not self.in_backward


def by_first_use(
    modules: Sequence[ModuleInfo], events: Sequence[StepEvent], count: int
) -> tuple[list[int], tuple[ModuleInfo, ...], tuple[StepEvent, ...]]:
    """(order, modules, events): all `count` parameters in order of first use in forward, unused ones last.

    The parameters of modules and events are renumbered to positions in that order. If the events have a backward, it
    says which modules are recomputed.
    """
    entered = [event for event in events if event.kind in (ENTER, READ) and not event.in_backward]
    used = [p for event in entered for p in (event.params if event.kind is READ else modules[event.module].params)]
    moved = {old: new for new, old in enumerate(dict.fromkeys([*used, *range(count)]))}
    again = _recomputed(modules, events) if has_backward(events) else {n for n, p in enumerate(modules) if p.recomputed}
    return (
        list(moved),
        tuple(
            replace(module, params=tuple(moved[i] for i in module.params), recomputed=number in again)
            for number, module in enumerate(modules)
        ),
        renumbered(events, moved),
    )


def has_backward(events: Iterable[StepEvent]) -> bool:
    """Whether events include a backward."""
    return not all(event.is_forward for event in events)


def _recomputed(modules: Sequence[ModuleInfo], events: Iterable[StepEvent]) -> set[int]:
    """The modules that lie in one recomputed region, with all that is inside them.

    A region begins inside the hooks of a module or around them: in the former case, only the modules inside run again.
    """
    inside: dict[int, set[int]] = {}
    for number, module in enumerate(modules):
        if module.parent is not None:
            inside.setdefault(module.parent, set()).add(number)
    found, region = set[int](), set[int]()
    for event in events:
        if event.recomputes:
            region.add(event.module)
        elif region and not event.in_backward:
            around = {modules[number].parent for number in region}
            while around:
                outer = around.pop()
                if outer is not None and outer not in region and inside[outer] <= region:
                    region.add(outer)
                    around.add(modules[outer].parent)
            found |= region
            region = set()
    return found


def renumbered(events: Iterable[StepEvent], moved: Mapping[int, int] | Sequence[int]) -> tuple[StepEvent, ...]:
    """The events with each parameter's index `i` replaced by ``moved[i]``."""
    return tuple(
        replace(event, params=tuple(moved[p] for p in event.params)) if event.params else event for event in events
    )
