"""The seconds of a step in which fetches, compute and updates in host memory wait for each other.

Owns the timeline: one bus fetches chunks in the order of the rCache's decisions, one device computes, one thread of the
host updates. Pure: the rCache decides as in the runtime (`chunks.cache_policy`), and `cost` has the seconds of each
fetch and update.

The host is taken to run ahead of the device, as with a GPU: it asks for each fetch before the device is ready for it.
"""

import math
from collections.abc import Sequence, Set

from elixir_moe.chunks.cache_policy import (
    ACQUIRE,
    RELEASE,
    WARM_UP_STEPS,
    CacheRequest,
    CacheState,
    Load,
    Schedule,
    gradients_of,
)

_ROUNDING = 1e-9
"""The part of a timeline that may be rounding."""


class Timeline:
    """The bus, the device and the thread that updates, from the start of training on."""

    def __init__(self, fetch_seconds: Sequence[float], near: Set[int] = frozenset()) -> None:
        """`fetch_seconds`: for each chunk; 0 if it does not cross the bus. Chunks `near` cross it once a step."""
        self.computed = 0.0
        """The time at which the device has done all of its work so far."""
        self._fetch_seconds = fetch_seconds
        self._near = near
        self._there: set[int] = set()
        """Chunks near that have crossed the bus in this step."""
        self._fetched = 0.0
        """The time from which on the bus is free."""
        self._arrival: dict[int, float] = {}
        """{chunk: the time at which its weights are, or will be, in their block}."""
        self._block_of: dict[int, int] = {}
        self._left: dict[int, float] = {}
        """{block: the time at which its last readers end}."""
        self._updated: dict[int, float] = {}
        """{chunk: the time at which the last update of its shard ends}."""
        self._update_end = 0.0
        """The time from which on the updating thread is free."""

    def request(self, request: CacheRequest, loads: Sequence[Load], seconds: float = 0.0) -> None:
        """Computes for `seconds`; then the rCache gets the request and decides on the loads.

        A fetch begins when the bus is free, nothing reads the block any more, and the chunk has been updated. Compute
        waits for what it acquires.
        """
        self.computed += seconds
        if request.verb is RELEASE:
            for chunk in request.chunks:
                self._left[self._block_of[chunk]] = self.computed
        for load in loads:
            self._arrival[load.chunk] = max(self._left.get(load.block, 0.0), self._updated.get(load.chunk, 0.0))
            self._block_of[load.chunk] = load.block
            if load.chunk >= 0 and self._fetch_seconds[load.chunk] and load.chunk not in self._there:
                begin = max(self._arrival[load.chunk], self._fetched)
                self._fetched = self._arrival[load.chunk] = begin + self._fetch_seconds[load.chunk]
                self._there |= self._near & {load.chunk}
        if request.verb is ACQUIRE:
            self.computed = max(self.computed, *(self._arrival[chunk] for chunk in request.chunks))

    def update(self, updates: Sequence[tuple[int, float]]) -> None:
        """Updates chunks one after another from now on, behind earlier updates; `updates` are (chunk, seconds)."""
        end = max(self.computed, self._update_end)
        for chunk, seconds in updates:
            end += seconds
            self._updated[chunk] = end
        self._update_end = end

    def end_step(self) -> None:
        """Ends a step: chunks near have been updated, and cross the bus again."""
        self._there.clear()


def elapsed_seconds(
    schedule: Schedule,
    compute_seconds: Sequence[float],
    fetch_seconds: Sequence[float],
    blocks: int,
    backwards: int = 1,
    updates: Sequence[tuple[int, float]] = (),
    *,
    in_backward: bool = False,
    near: Set[int] = frozenset(),
    most: float = math.inf,
) -> float:
    """Returns the seconds from the end of one step's last backward to that of the next; infinity if more than `most`.

    The `schedule` is that of one forward and backward, of which a step has `backwards`. There are compute seconds
    before each request and after the last, fetch seconds for each chunk, 0 if it does not cross the bus, and (chunk,
    seconds) of each update in host memory. Updates begin behind backward or, with `in_backward`, once a chunk's
    gradients leave their block in a step's last backward. Chunks `near` cross the bus once a step.
    """
    cache, timeline = CacheState(blocks, schedule), Timeline(fetch_seconds, near)
    each = sum(compute_seconds)

    def play(waiting: dict[int, float] | None = None, end: float = math.inf) -> bool:
        """Plays a backward with its forward; the updates that are `waiting` for their gradients begin in it.

        Returns whether it can end by `end`, which it is not played to if not.
        """
        left = end - each
        for entry, seconds in zip(schedule.entries, compute_seconds, strict=False):
            left += seconds
            if timeline.computed + seconds > left:
                return False
            ask = cache.acquire if entry.verb is ACQUIRE else cache.release
            timeline.request(entry, ask(entry.chunks), seconds)
            if waiting and entry.verb is RELEASE:
                done = [gradients_of(chunk) for chunk in entry.chunks if gradients_of(chunk) in waiting]
                timeline.update([(chunk, waiting.pop(chunk)) for chunk in done])
        timeline.computed += compute_seconds[-1]
        cache.rewind()
        return timeline.computed <= end

    for _ in range(WARM_UP_STEPS if schedule.kept or updates else 0):
        waiting = dict(updates) if in_backward else {}
        play(waiting)
        timeline.update([update for update in updates if not in_backward or update[0] in waiting])
        timeline.end_step()
        cache.drop([chunk for chunk in cache.chunks if chunk not in schedule.kept])
    began = timeline.computed
    end = began + most * (1 + _ROUNDING)
    for later in reversed(range(backwards)):
        if not play(end=end - later * each):
            return math.inf
    return timeline.computed - began
