"""What is asked of the cache, in order, and what it has decided that is not carried out yet.

Owns the record of a step's requests, from which the schedule is made, and the last one that ended: modules that follow
each other mostly want the same chunks, and the cache is told neither of the end of the one nor of the beginning of the
next. To it, they are one.
"""

from collections import deque
from collections.abc import Collection, Iterable

from elixir_moe.chunks.policy import ACQUIRE, FREE, HOLD, RELEASE, CacheState, Entry, Load, Schedule, Verb

_MISSES_BEFORE_NEW_SCHEDULE = 3
_LONGEST_TRACE = 1 << 20
"""Where recording stops, for programs that run forward for ever and never backward."""


class Requests:
    """The requests of one wrapped model on one rank."""

    def __init__(self, cache: CacheState, kept: Collection[int]) -> None:
        """`kept` are the chunks that updates leave alone."""
        self._cache = cache
        self._kept = kept
        self._rounds_missed = 0
        self.trace: list[tuple[Verb, tuple[int, ...]]] = []
        """Those of the training step under way, as `policy` understands them."""
        self.decided: deque[Load] = deque()
        """Loads to be carried out, the first first."""
        self._ended: tuple[tuple[int, ...], bool] | None = None

    def go_on(self, chunks: tuple[int, ...], *, tracked: bool) -> bool:
        """Whether a request for `chunks` has just ended: then it has not, and they are held still."""
        if self._ended != (chunks, tracked):
            return False
        self._ended = None
        return True

    def acquire(self, chunks: tuple[int, ...], *, tracked: bool) -> None:
        """Holds `chunks`; as `CacheState.acquire`."""
        self.settle()
        self._note(ACQUIRE, chunks, tracked)
        self.decided += self._cache.acquire(chunks, tracked=tracked)

    def release(self, chunks: tuple[int, ...], *, tracked: bool) -> None:
        """Ends one hold on each of `chunks`, unless the next request is for them again."""
        self.settle()
        self._ended = chunks, tracked

    def holds(self, chunk: int) -> bool:
        """Whether somebody has asked for `chunk` and still uses it.

        Who finds that nobody does asks for it himself, even if it is in a block: what a step asks for would depend on
        the cache otherwise, and would not be the same in the next one.
        """
        ended = self._ended is not None and chunk in self._ended[0]
        return self._cache.holds(chunk) > ended

    def settle(self) -> None:
        """Tells the cache what has ended."""
        if self._ended is not None:
            chunks, tracked = self._ended
            self._ended = None
            self._note(RELEASE, chunks, tracked)
            self.decided += self._cache.release(chunks, tracked=tracked)

    def hold(self, chunk: int) -> None:
        """As `CacheState.hold`."""
        self._note(HOLD, (chunk,), tracked=True)
        self.decided += self._cache.hold(chunk)

    def free(self, chunk: int) -> None:
        """As `CacheState.free`."""
        self.settle()
        self._note(FREE, (chunk,), tracked=True)
        self.decided += self._cache.free(chunk)

    def drop(self, chunks: Iterable[int]) -> None:
        """As `CacheState.drop`."""
        self.settle()
        self._cache.drop(chunks)

    def forget(self) -> None:
        """Nothing is held or decided any more."""
        self._ended = None
        self.decided.clear()

    def learn(self) -> bool:
        """A step's requests are over: they are the schedule if there was none, or several steps in a row missed it.

        Returns whether there is a new schedule.
        """
        trace, self.trace = self.trace, []
        self._rounds_missed = 0 if self._cache.rewind() else self._rounds_missed + 1
        if self._cache.schedule is not None and self._rounds_missed < _MISSES_BEFORE_NEW_SCHEDULE:
            return False
        self._cache.follow(Schedule([Entry(*request) for request in trace], kept=self._kept))
        self._rounds_missed = 0
        return True

    def rewind(self) -> None:
        """Another step begins."""
        self.trace.clear()
        self._cache.rewind()

    def _note(self, verb: Verb, chunks: tuple[int, ...], tracked: bool) -> None:
        if tracked and len(self.trace) < _LONGEST_TRACE:
            self.trace.append((verb, chunks))
