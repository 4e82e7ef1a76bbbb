"""The device memory of micro-batches that pass each layer together, from the trace of one.

Owns the peak as a function of their number. While one micro-batch runs a leg between two turns, each other one has what
it keeps where the leg begins or ends: inputs of checkpointed regions, say, but nothing that the leg frees. A gradient
of a parameter that backward makes is there once for all, as a sum in fp32; one that forward makes, as a fused loss does
for its head, is there for each micro-batch until its backward. Pure.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elixir_moe.chunks.events import ACCUMULATE, LEAVE, READ, ModuleInfo, StepEvent
from elixir_moe.chunks.legs import Legs
from elixir_moe.planner.events import Cost, CostEvent, TraceEvent, kept_regions

Peaks = tuple[tuple[int, int], ...]
"""(bytes with one micro-batch, bytes of each further one) of some legs: the peak is the most of any."""
_SUM_BYTES = 4
"""Bytes of an element in fp32."""


def pass_peaks(
    modules: Sequence[ModuleInfo], events: Sequence[TraceEvent], steps: Sequence[StepEvent], numels: Mapping[int, int]
) -> list[Peaks]:
    """Returns the peaks with the inputs of the first n checkpointed regions in host memory, for each n from 0 on.

    `steps` are the `events` of modules and parameters, numbered as in `modules`; `numels` are elements by trainable
    parameter.
    """
    memory, position = _Memory(), 0
    turns = set(_turns(Legs(modules, steps)))
    for event in events:
        if isinstance(event, CostEvent):
            memory.hear(event)
            continue
        if position in turns:
            memory.begin_leg()
        if event.kind is ACCUMULATE:
            memory.sum_gradients([numels[p] for p in steps[position].params])
        position += 1
    return list(memory.peaks(kept_regions(events)))


def _turns(legs: Legs) -> Iterator[int]:
    """Yields the positions of events with which a micro-batch gets its turn, if every module's weights are gathered."""
    starts: list[int] = []
    region: int | None = None
    for position, (event, inside) in enumerate(zip(legs.forward, legs.region_at, strict=True)):
        gathers = event.kind is READ or (event.kind is not LEAVE and bool(legs.modules[event.module].params))
        if inside != region if inside is not None else gathers:
            starts.append(position)
        region = inside
    yield from starts
    if legs.forward and legs.backward:
        _, *others = legs.split(legs.numbers(starts))
        yield from (len(legs.forward) + leg[0][0] for leg in others)


@dataclass(slots=True)
class _Memory:
    """Counts the memory of a step, by its legs."""

    live: list[int] = field(default_factory=lambda: [0])
    """Bytes after each event of memory."""
    lasting: list[int] = field(default_factory=lambda: [0])
    """Bytes without gradients of parameters, likewise."""
    first: list[int] = field(default_factory=lambda: [0])
    """For each leg, where it begins in `live`."""
    _sums: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """{leg: bytes of sums}."""
    _widened: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """{leg: bytes of its largest gradient in fp32, which is made to be added}."""
    _opened: defaultdict[int, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    """{bytes of gradients: legs of backward in which such gradients were made; None for forward}."""
    _since: int | None = None
    """The leg of backward that made the gradient that is accumulated next, if it is known."""
    _in_backward: bool = False

    def hear(self, event: CostEvent) -> None:
        if event.kind is Cost.LOSS:
            self.begin_leg()
            self._in_backward = True
        if event.kind is not Cost.MEMORY:
            return
        self.live.append(self.live[-1] + event.nbytes)
        summed = event.of_gradient and self._in_backward
        if event.of_gradient and event.nbytes > 0:
            self._opened[event.nbytes].append(self._leg if summed else None)
        elif event.of_gradient:
            self._since = self._opened[-event.nbytes].pop()
            summed = self._since is not None
        self.lasting.append(self.lasting[-1] + event.nbytes * (not summed))

    @property
    def _leg(self) -> int:
        return len(self.first) - 1

    def begin_leg(self) -> None:
        """Begins a leg behind the last event."""
        self.first.append(len(self.live) - 1)

    def sum_gradients(self, numels: Sequence[int]) -> None:
        """Gradients of so many elements are complete when this leg of all micro-batches is."""
        for leg in range(self._leg if self._since is None else self._since, self._leg + 1):
            self._sums[leg] += _SUM_BYTES * sum(numels)
        self._widened[self._leg] = max(self._widened[self._leg], *(_SUM_BYTES * numel for numel in numels))
        self._since = None

    def peaks(self, kept: Sequence[tuple[int, int, int]]) -> Iterator[Peaks]:
        """Yields `pass_peaks`; `kept` is `kept_regions` of the events."""
        own, others = torch.tensor(self.live), torch.tensor(self.lasting)
        ends = torch.tensor([*self.first[1:], len(self.live) - 1])
        first = torch.tensor(self.first)
        sums = torch.tensor([self._sums[leg] + self._widened[leg] for leg in range(len(self.first))])
        leg_of = torch.searchsorted(first, torch.arange(len(own)), right=True) - 1
        for region in range(-1, len(kept)):
            if region >= 0:
                nbytes, _, asked = kept[region]
                since = kept[region + 1][1] if region + 1 < len(kept) else asked
                own[since:asked] -= nbytes
                others[since:asked] -= nbytes
            most = torch.zeros_like(first).scatter_reduce(0, leg_of, own, "amax") + sums
            yield _most(most.tolist(), torch.maximum(others[first], others[ends]).tolist())


def _most(one: Sequence[int], further: Sequence[int]) -> Peaks:
    """The legs whose bytes no other leg exceeds for every number of micro-batches."""
    found: list[tuple[int, int]] = []
    for line in sorted(zip(one, further, strict=True), reverse=True):
        if not found or line[1] > found[-1][1]:
            found.append(line)
    return tuple(found)
