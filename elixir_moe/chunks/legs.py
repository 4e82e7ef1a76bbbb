"""The legs of a step whose micro-batches pass each layer together, found in the events of one micro-batch.

A leg is what a micro-batch runs between two turns: in forward, from the gather of some weights up to the next; in
backward, the same in reverse. Owns the places where forward may hand its turn on, and the split of a backward into
legs. Pure: `chunks.replay` plays the legs, and `runtime.hooks` hands turns on by the same rule.

A turn is never handed on inside a checkpointed region, only before its first gather: backward recomputes a region as a
whole, and would otherwise keep those of all micro-batches at once.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from elixir_moe.chunks.events import ENTER, LEAVE, REACH, READ, UNPACK, ModuleInfo, StepEvent


class Legs:
    """The legs of one micro-batch's step."""

    def __init__(self, modules: Sequence[ModuleInfo], events: Sequence[StepEvent]) -> None:
        self.modules = modules
        first = next((at for at, event in enumerate(events) if not event.is_forward), len(events))
        self.forward, self.backward = events[:first], events[first:]
        region = _regions(self.backward)
        self.region_at: list[int | None] = []
        """For each event of forward: the checkpointed region it is in, if any."""
        self.is_apart: list[bool] = []
        """For each event of forward: whether it is in a reentrant checkpoint, which autograd does not record."""
        self._left: defaultdict[int, list[int]] = defaultdict(list)
        """By module: the positions at which its runs end in forward."""
        self._begun: defaultdict[int, list[int]] = defaultdict(list)
        """By module: the positions at which its runs begin in forward."""
        self._read: defaultdict[int, list[int]] = defaultdict(list)
        """By parameter: the positions at which a function reads it outside its module."""
        self._apart: set[int] = set()
        """Parameters that run without gradients in forward: each recomputed run brings a gradient of its own."""
        around: list[int | None] = [None]
        for position, event in enumerate(self.forward):
            if event.kind is ENTER:
                around.append(region.get(event.module, around[-1]))
                self._begun[event.module].append(position)
                if not event.with_grad and event.module in region:
                    self._apart.update(modules[event.module].params)
            self.region_at.append(around[-1])
            self.is_apart.append(around[-1] is not None and not event.with_grad)
            if event.kind is LEAVE:
                around.pop()
                self._left[event.module].append(position)
            elif event.kind is READ:
                for param in event.params:
                    self._read[param].append(position)

    def comes_apart(self, event: StepEvent) -> bool:
        """Whether the gradients of an event come from each micro-batch by itself, and not as one sum of all."""
        return self._apart.issuperset(event.params)

    def numbers(self, starts: Sequence[int]) -> list[int]:
        """Returns for each event of forward the number of its leg, as backward has them; legs begin at `starts`.

        A reentrant checkpoint makes its node of autograd before its region runs: if a turn is handed on inside, in the
        leg before.
        """
        apart = self.is_apart
        numbers = [bisect_right(starts, position) for position in range(len(apart))]
        return [n - (n > 0 and apart[position] and apart[starts[n - 1]]) for position, n in enumerate(numbers)]

    def split(self, leg_of: Sequence[int]) -> Iterator[list[tuple[int, StepEvent]]]:
        """Yields the (position, event) pairs of each leg of backward, the last leg of forward first.

        `leg_of`: for each event of forward, the number of its leg.
        """
        now, leg = leg_of[-1], list[tuple[int, StepEvent]]()
        for position, event in enumerate(self.backward):
            belongs = max((n for at in self._forward_of(event) if (n := leg_of[at]) <= now), default=now)
            if belongs < now:
                yield leg
                now, leg = belongs, []
            leg.append((position, event))
        yield leg

    def _forward_of(self, event: StepEvent) -> Sequence[int]:
        """The positions in forward that an event of backward may belong to; none if it belongs to the one before."""
        if event.kind is REACH:
            return [] if event.run < 0 else [self._left[event.module][event.run]]
        if event.kind is ENTER:
            return self._begun[event.module]
        return self._read[event.params[0]] if event.kind is UNPACK else []


def _regions(backward: Sequence[StepEvent]) -> dict[int, int]:
    """{module: number of the region with which backward runs it again}."""
    region: dict[int, int] = {}
    number, again = 0, False
    for event in backward:
        number += again and not event.in_backward
        again = event.in_backward
        if event.recomputes:
            region.setdefault(event.module, number)
    return region
