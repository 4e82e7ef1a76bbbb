"""Simulates a recorded step on rCaches of many sizes: in C++ if it was built, else by `chunks.cache_policy`.

Owns the schedule in the form of the native code. The decisions are those of `cache_policy.simulate` without prefetch,
which moves gathers but never adds one; a test compares them load by load. Source: Elixir v2, A.2.
"""

from array import array
from itertools import accumulate, chain

from elixir_moe.chunks.cache_policy import Load, Schedule, Verb, gradients_of, simulate

try:
    from elixir_moe import _native
except ImportError:  # a source tree that was never built: the search takes several times as long
    _native = None  # type: ignore[assignment]

_NUMBER = {Verb.ACQUIRE: 0, Verb.RELEASE: 1}


class Simulator:
    """Simulates one schedule on any number of blocks."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        entries = schedule.entries
        self._verbs = array("B", [_NUMBER[entry.verb] for entry in entries])
        self._starts = array("i", accumulate((len(entry.chunks) for entry in entries), initial=0))
        items = list(chain.from_iterable(entry.chunks for entry in entries))
        self._count = max((max(item, gradients_of(item)) for item in items), default=-1) + 1
        self._chunks = array("i", [item if item >= 0 else self._count + gradients_of(item) for item in items])

    def loads(self, blocks: int) -> list[Load]:
        """The loads of one step, in order, on a cache of `blocks` blocks that is empty at first.

        Raises:
            PlanError: there are too few blocks.
        """
        if _native is not None and not self._schedule.kept and len(self._verbs):
            count = self._count
            found = _native.simulate(self._verbs, self._starts, self._chunks, count, blocks)
            if found is not None:
                return [
                    Load(item if item < count else gradients_of(item - count), block, None if out < 0 else out, False)
                    for item, block, out in found
                ]
        return simulate(self._schedule, blocks, prefetch=0)[1]
