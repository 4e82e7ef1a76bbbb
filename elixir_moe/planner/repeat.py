"""Identical layers: the ones that a trace may skip, and the events that fill the gap.

Owns the comparison of layers, the shortened lists of layers, and the repetition of a period's events. Never runs a
layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from elixir_moe.chunks.events import READ, StepEvent
from elixir_moe.parallel.rules import pattern_of
from elixir_moe.planner.events import Cost, CostEvent, TraceEvent, steps_of

_LONGEST_PERIOD = 4
_FEWEST_PERIODS = 4
"""Three periods are traced, so a shorter run is not worth cutting."""


class Names:
    """The names of modules and parameters, by the numbers in events."""

    def __init__(self, modules: Sequence[str], params: Sequence[str]) -> None:
        self.params = params
        self._modules = modules
        self._module_of = {name: number for number, name in enumerate(modules)}
        self._param_of = {name: index for index, name in enumerate(params)}

    def moved(self, event: StepEvent, rename: Callable[[str], str]) -> StepEvent:
        """Returns the event for the module and parameters with the new names; keeps numbers without a new name."""
        module = event.module
        if module >= 0:
            module = self._module_of.get(rename(self._modules[module]), module)
        params = (self._param_of.get(rename(self.params[p]), p) for p in event.params)
        return replace(event, module=module, params=tuple(params))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A run of identical layers in a list; only the first two periods and the last one are traced."""

    layers: nn.ModuleList
    name: str
    """The list's name in the model."""
    start: int
    """Index of the first layer."""
    period: int
    """Number of layers after which the run repeats."""
    periods: int

    @property
    def boundaries(self) -> list[tuple[nn.Module, nn.Module]]:
        """(first, last) layer of each traced period."""
        starts = [self.start + k * self.period for k in (0, 1, self.periods - 1)]
        return [(self.layers[s], self.layers[s + self.period - 1]) for s in starts]

    def _layer(self, period: int, j: int) -> str:
        return f"{self.name}.{self.start + period * self.period + j}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Removes the periods between the second and the last from the list while open."""
        everything = dict(self.layers._modules)
        gone = range(self.start + 2 * self.period, self.start + (self.periods - 1) * self.period)
        kept = [layer for i, layer in enumerate(everything.values()) if i not in gone]
        self.layers._modules = {str(i): layer for i, layer in enumerate(kept)}
        try:
            yield
        finally:
            self.layers._modules = everything

    def moved(self, events: Sequence[TraceEvent], periods: Mapping[int, int], names: Names) -> list[TraceEvent]:
        """Returns the events with layers of period `p` replaced by those of period ``periods[p]``."""
        layers = {self._layer(p, j): self._layer(q, j) for p, q in periods.items() for j in range(self.period)}

        def rename(name: str) -> str:
            for old, new in layers.items():
                if name == old or name.startswith(old + "."):
                    return new + name[len(old) :]
            return name

        def move(event: TraceEvent) -> TraceEvent:
            if isinstance(event, StepEvent):
                return names.moved(event, rename)
            return replace(event, name=rename(event.name)) if event.name else event

        return [move(event) for event in events]


def cuts_of(model: nn.Module) -> list[Cut]:
    """Returns the run of identical layers in each list that saves most; skips lists inside such a run."""
    found: list[Cut] = []

    def walk(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            inner = f"{name}.{child_name}".lstrip(".")
            run = _longest_run(_signatures(list(child))) if isinstance(child, nn.ModuleList) else None
            if run is not None and isinstance(child, nn.ModuleList):
                start, period, periods = run
                found.append(Cut(layers=child, name=inner, start=start, period=period, periods=periods))
            else:
                walk(child, inner)

    walk(model, "")
    return found


def with_all_periods(events: Sequence[TraceEvent], cuts: Sequence[Cut], names: Names) -> list[TraceEvent] | None:
    """Returns the events as if every layer had been traced; None if the traced periods do not determine the others."""
    replaced: list[tuple[int, int, list[TraceEvent]]] = []
    for number, cut in enumerate(cuts):
        where: dict[tuple[str, int], int] = {}
        for position, event in enumerate(events):
            if isinstance(event, CostEvent) and event.kind is Cost.BOUNDARY and event.nbytes // 3 == number:
                if (event.name, event.nbytes % 3) in where:
                    return None  # a layer runs twice
                where[event.name, event.nbytes % 3] = position
        order = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1), ("backward", 0)]
        if sorted(where, key=where.__getitem__) != order or _read_elsewhere(events, cut, where, names):
            return None
        extra = range(2, cut.periods - 1)
        forward = events[where["forward", 1] : where["forward", 2]]
        backward = events[where["backward", 1] : where["backward", 0]]
        # Hooks on an output that is also an inner module's run before the boundary: they belong to the period before.
        last = cut.moved(events[where["backward", 2] : where["backward", 1]], {1: cut.periods - 2}, names)
        between = [m for k in reversed(extra) for m in cut.moved(backward, {1: k, 0: k - 1}, names)]
        forwards = [m for k in extra for m in cut.moved(forward, {1: k}, names)]
        replaced.append((where["forward", 2], where["forward", 2], forwards))
        replaced.append((where["backward", 2], where["backward", 1], [*last, *between]))
    whole = list(events)
    for start, stop, instead in sorted(replaced, key=lambda item: -item[0]):
        whole[start:stop] = instead
    return whole


def _read_elsewhere(events: Sequence[TraceEvent], cut: Cut, where: Mapping[tuple[str, int], int], names: Names) -> bool:
    """Whether parameters of a traced period are read outside it: then those of other periods may be read there too."""
    for number, period in enumerate((0, 1, cut.periods - 1)):
        first = cut.start + period * cut.period
        prefixes = tuple(f"{cut.name}.{layer}." for layer in range(first, first + cut.period))
        inside = range(where["forward", number], where.get(("forward", number + 1), len(events)))
        mine = {index for index, name in enumerate(names.params) if name.startswith(prefixes)}
        outside = (event for position, event in enumerate(events) if position not in inside)
        if any(
            not mine.isdisjoint(event.params) for event in steps_of(outside) if event.kind is READ and event.is_forward
        ):
            return True
    return False


def _longest_run(signatures: Sequence[Any]) -> tuple[int, int, int] | None:
    """(start, period, periods) of the run that saves the most layers; None if there is none."""
    best: tuple[int, tuple[int, int, int]] | None = None
    for period in range(1, _LONGEST_PERIOD + 1):
        start = 0
        while start + period < len(signatures):
            stop = start + period
            while stop < len(signatures) and signatures[stop] == signatures[stop - period]:
                stop += 1
            periods = (stop - start) // period
            saved = (periods - 3) * period
            if periods >= _FEWEST_PERIODS and (best is None or saved > best[0]):
                best = saved, (start, period, periods)
            start = max(start + 1, stop - period)
    return None if best is None else best[1]


def _signatures(layers: Sequence[nn.Module]) -> list[Any]:
    """Returns all that the execution of each layer may depend on, except settings that only number the layers."""
    plain = (bool, int, float, str)
    settings = [
        {(name, key): v for name, m in layer.named_modules() for key, v in vars(m).items() if isinstance(v, plain)}
        for layer in layers
    ]
    counting = {
        key
        for key, value in (settings[0] if settings else {}).items()
        if type(value) is int and all(s.get(key) == value + i for i, s in enumerate(settings))
    }
    return [
        (
            {key: value for key, value in mine.items() if key not in counting},
            [(name, type(module)) for name, module in layer.named_modules()],
            [(name, p.shape, p.dtype, p.requires_grad, pattern_of(p)) for name, p in layer.named_parameters()],
            [(name, b.shape, b.dtype) for name, b in layer.named_buffers()],
        )
        for layer, mine in zip(layers, settings, strict=True)
    ]
