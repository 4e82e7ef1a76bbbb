"""What every byte of memory was last used for, and by which lane: finds uses that nothing orders.

Owns vector clocks and the record of uses. A lane is whatever runs in an order of its own: a stream of the device, a
thread of the host. Knows nothing of torch.

A lane's clock says, for every lane, how many of its operations are known to have ended. Two uses of the same bytes, one
of them a write, must be ordered: the later one's clock covers the earlier one. Memory that dies is used again by the
lane that allocated it, so that lane's clock must cover every use.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = Mapping[str, int]


class Lane:
    """Operations that run one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = {name: 0}

    def after(self, clock: Clock) -> None:
        """Orders what comes next behind all that `clock` covers."""
        for name, tick in clock.items():
            if tick > self.clock.get(name, 0):
                self.clock[name] = tick

    def tick(self) -> int:
        """Begins an operation; returns its number."""
        self.clock[self.name] += 1
        return self.clock[self.name]

    def now(self) -> Clock:
        """What has ended when all that was given to the lane so far has."""
        return dict(self.clock)


class Use(NamedTuple):
    """One use of some bytes."""

    start: int
    stop: int
    lane: str
    tick: int
    writes: bool
    what: str


@dataclass(slots=True, eq=False)
class Span:
    """One allocation."""

    start: int
    stop: int
    host: bool
    owner: Lane
    """The lane that may use the bytes again once the allocation is dead."""
    uses: list[Use] = field(default_factory=list)
    lent: list[Lane] = field(default_factory=list)
    """Lanes that are waited for before the bytes are used again (`record_stream`)."""


class Memory:
    """All allocations, and the races found. For any thread."""

    def __init__(self) -> None:
        self._races: list[str] = []
        self._starts: list[int] = []
        self._spans: dict[int, Span] = {}
        self._lock = threading.RLock()
        self._dead: deque[tuple[Span, Clock, Container[str]]] = deque()
        """Allocations that have died since the last look: a finalizer may run in the middle of any line."""

    @property
    def races(self) -> list[str]:
        """The races found so far."""
        with self._looking():
            return self._races

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with self._lock:
            while self._dead:
                self._bury(*self._dead.popleft())
            yield

    def span_at(self, address: int) -> Span | None:
        """The allocation that holds the byte at `address`."""
        with self._looking():
            return self._span_at(address)

    def _span_at(self, address: int) -> Span | None:
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        span = self._spans[self._starts[place]]
        return span if address < span.stop else None

    def allocate(self, start: int, nbytes: int, *, host: bool, owner: Lane) -> Span:
        """Records an allocation; forgets those in whose place it lies."""
        with self._looking():
            for old in list(self._within(start, start + nbytes)):
                self._forget(old)
            span = self._spans[start] = Span(start, start + nbytes, host, owner)
            self._starts.insert(bisect_right(self._starts, start), start)
            return span

    def use(self, lane: Lane, start: int, stop: int, *, writes: bool, what: str) -> None:
        """Records a use by the operation that `lane` has begun last."""
        with self._looking():
            self._use(lane, start, stop, writes, what)

    def _use(self, lane: Lane, start: int, stop: int, writes: bool, what: str) -> None:
        span = self._span_at(start)
        assert span is not None, f"{what} uses memory that nobody has allocated"
        kept = []
        for use in span.uses:
            if use.stop <= start or stop <= use.start:
                kept.append(use)
                continue
            if (writes or use.writes) and lane.clock.get(use.lane, 0) < use.tick:
                self._races.append(f"{what} on {lane.name} is not ordered behind {use.what} on {use.lane}")
            covered = start <= use.start and use.stop <= stop
            if not (covered and (writes or (use.lane == lane.name and not use.writes))):
                kept.append(use)
        kept.append(Use(start, stop, lane.name, lane.clock[lane.name], writes, what))
        span.uses = kept

    def die(self, span: Span, clock: Clock, done: Container[str] = ()) -> None:
        """Records that an allocation is dead, of which later uses of the bytes know `clock`; uses on `done` ended."""
        self._dead.append((span, clock, done))

    def _bury(self, span: Span, clock: Clock, done: Container[str]) -> None:
        for use in span.uses:
            if use.lane not in done and clock.get(use.lane, 0) < use.tick:
                self._races.append(
                    f"memory dies on {span.owner.name} that {use.what} on {use.lane} may not be done with"
                )
        self._forget(span)

    def _forget(self, span: Span) -> None:
        """Drops an allocation, if it is still the one at its place."""
        if self._spans.get(span.start) is span:
            del self._spans[span.start]
            self._starts.remove(span.start)

    def _within(self, start: int, stop: int) -> Iterator[Span]:
        for first in self._starts:
            span = self._spans[first]
            if span.start < stop and start < span.stop:
                yield span
