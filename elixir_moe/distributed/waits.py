"""The open waits of this process for other ranks, and the time that waits take.

Owns the list of open waits, the numbers of collectives, and the waiting time of a step. A wait ends with its
collective, by the timeout of torch.distributed, or because ranks wait for each other
(`deadlock_of`). `watchdog` reports long waits, and ends deadlocks.

The library waits for collectives only inside a `Wait`, which costs two updates of a dict.
"""

import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.accelerator import current_stream, is_accelerator, timing_event
from elixir_moe.errors import ElixirError, OutOfStepError

_MOST = 64
"""Most ranks that a message lists."""
RULE = "every rank must call the same modules, and read the same parameters, in the same order"
_Moment = Any
"""An event of a GPU's stream; on a CPU, seconds by the host's clock."""


class Wait:
    """A context in which this thread waits for other ranks. A RuntimeError in it becomes an ElixirError with `what`."""

    __slots__ = ("begun", "deadlock", "found", "ranks", "turn", "what")

    def __init__(self, what: str, ranks: Sequence[int] | None = None, turn: "Turn | None" = None) -> None:
        """`what` describes the collective, `ranks` take part in it (by default the world), `turn` is its number."""
        self.what = what
        self.ranks = ranks
        self.turn = turn
        self.deadlock = ""
        """Which rank waits for which, if the collective can never end; else empty."""
        self.found = ""
        """The waits of the other ranks, once this one has lasted for a second or failed."""
        self.begun: _Moment | None = None

    def __enter__(self) -> None:
        WAITS.open[threading.get_ident()] = self
        if WAITS.timer is not None:
            self.begun = WAITS.timer.begun()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        WAITS.open.pop(threading.get_ident(), None)
        if self.begun is not None and WAITS.timer is not None and error is None:
            WAITS.timer.ended(self.begun)
        if isinstance(error, RuntimeError):
            if not self.deadlock:
                WAITS.ask_others(self)
            if self.deadlock:
                raise OutOfStepError(self.deadlock) from error
            raise ElixirError(
                f"{self.what} failed on rank {dist.get_rank()}: {error}. {self.found}Another rank has stopped, or runs "
                f"other modules: {RULE}"
            ) from error


def wait_for_event(event: torch.Event, stream: torch.Stream) -> None:
    """Orders `stream`, the current one, after `event`, the end of a collective. The host does not wait."""
    begun = None if WAITS.timer is None else WAITS.timer.begun()
    stream.wait_event(event)
    if begun is not None and WAITS.timer is not None:
        WAITS.timer.ended(begun)


class BusyTime:
    """Measures the time of some work without its waits for other ranks.

    In a step with collectives every rank takes as long as the slowest, even if the host only waits for its own GPU
    (`.item()`). So on a GPU, events are recorded on the stream around the work and around each wait in it; a wait of
    the host counts only while the stream has no other work. On a CPU, the host's clock is read instead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._where: Any = None
        """The stream of the work; on a CPU, its thread."""
        self._waits: list[tuple[_Moment, _Moment]] = []

    def start(self) -> None:
        """Begins to measure, on this thread and the current stream."""
        self._where, self._waits = self._here(), []
        self._start = self._now()
        WAITS.timer = self

    def stop(self) -> float:
        """Waits for the end of the issued work and returns its busy seconds."""
        WAITS.timer = None
        end = self._now()
        if is_accelerator(self._device):
            end.synchronize()
        return self._seconds(self._start, end) - sum(self._seconds(*wait) for wait in self._waits)

    def begun(self) -> _Moment | None:
        """Notes the beginning of a wait; None on another stream or thread, whose waits do not delay the work."""
        return self._now() if self._here() == self._where else None

    def ended(self, begun: _Moment) -> None:
        """Notes the end of the wait that began at `begun`."""
        self._waits.append((begun, self._now()))

    def _here(self) -> Any:
        return current_stream(self._device) if is_accelerator(self._device) else threading.get_ident()

    def _now(self) -> _Moment:
        if not is_accelerator(self._device):
            return time.perf_counter()
        event = timing_event(self._device)
        event.record(self._where)
        return event

    def _seconds(self, begun: _Moment, ended: _Moment) -> float:
        return begun.elapsed_time(ended) / 1000 if is_accelerator(self._device) else ended - begun


class Series:
    """The collectives of one kind that all of `ranks` issue in one order, each on one thread at a time."""

    def __init__(self, kind: str, ranks: Sequence[int], end: Callable[[], None]) -> None:
        """`end`, which any thread may call, makes the running collectives of this rank fail."""
        made = f"{kind} {zlib.crc32(repr(list(ranks)).encode()):x}"
        WAITS.made[made] += 1
        self.name = f"{made} {WAITS.made[made]}"
        """A unique name, equal on all ranks."""
        self.end = end
        self.issued = 0
        """Number of collectives that this rank has issued."""
        WAITS.series = (*(known for known in WAITS.series if known() is not None), weakref.ref(self))

    def next(self) -> "Turn":
        """Counts a collective that is about to be issued."""
        self.issued += 1
        return Turn(self, self.issued)


@dataclass(frozen=True, slots=True)
class Turn:
    """One collective of a series."""

    series: Series
    number: int


class Issued:
    """Counts the collectives that a rank has issued in one communicator."""

    def __init__(self, ranks: Sequence[int], end: Callable[[], None]) -> None:
        """`end`: as for `Series`."""
        self.over = f"over {named(ranks)}"
        self._gathers, self._reductions = (Series(kind, ranks, end) for kind in ("gathers", "reductions"))

    def gather(self, of: str) -> tuple[str, Turn]:
        """Counts a gather; returns its description and its number."""
        turn = self._gathers.next()
        return f"gather {turn.number} {self.over}, that of {of}", turn

    def reduction(self, of: str) -> tuple[str, Turn]:
        """Counts a reduction; returns its description and its number."""
        turn = self._reductions.next()
        return f"reduction {turn.number} {self.over}, that of {of}", turn


@dataclass(frozen=True, slots=True)
class RankWait:
    """The wait of a rank, as reported to the other ranks."""

    what: str
    ranks: Sequence[int]
    series: str
    """That of its collective; empty if it is in none, and the wait is in no deadlock."""
    number: int
    issued: Mapping[str, int]
    """{series: number of collectives that this rank has issued}."""

    def waits_for(self, other: "RankWait") -> bool:
        """Whether the other rank has not issued the collective; a rank that does not know the series may have."""
        return other.issued.get(self.series, self.number) < self.number


def deadlock_of(mine: int, standing: Mapping[int, RankWait]) -> str:
    """Explains why rank `mine` can never continue; empty if it may.

    A deadlocked rank waits in a collective that another deadlocked rank has not issued. That one would have to leave
    its own wait first, and none can be the first to leave. So the result does not depend on when each rank reported.
    """
    blockers = {
        rank: [other for other in place.ranks if other in standing and place.waits_for(standing[other])]
        for rank, place in standing.items()
    }
    found = set(standing)
    while free := {rank for rank in found if found.isdisjoint(blockers[rank])}:
        found -= free
    if mine not in found:
        return ""
    rank = min(found)
    other = next(other for other in blockers[rank] if other in found)
    more = f" ({len(found)} ranks wait for each other)" if len(found) > 2 else ""
    return (
        f"rank {rank} waits in {standing[rank].what}, which rank {other} has not begun: it waits in "
        f"{standing[other].what}{more}. {RULE[0].upper()}{RULE[1:]}, and every rank's loss must depend on the same "
        f"parameters; start all ranks again"
    )


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, or the first of many."""
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST]))}{more}"


class Waits:
    """The current waits of this process."""

    def __init__(self) -> None:
        self.open: dict[int, Wait] = {}
        """The open wait of each thread."""
        self.series: tuple[weakref.ref[Series], ...] = ()
        self.exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, Series] = weakref.WeakKeyDictionary()
        """The exchanges of tokens over each process group."""
        self.callers: set[int] = set()
        """The threads that have called wrapped models."""
        self.made: Counter[str] = Counter()
        """{kind and ranks: number of series made}."""
        self.ask_others: Callable[[Wait], None] = lambda wait: None
        """Notes in a wait what the other ranks wait for, and whether it can never end; set by `watchdog`."""
        self.timer: BusyTime | None = None
        """The measurement in progress, if any."""

    def rank_wait(self, wait: Wait, world: int) -> RankWait | None:
        """Describes a wait for the other ranks.

        None if several threads train, each its own model: a wait of one does not block the others.
        """
        if len(self.callers) > 1:
            return None
        issued = {series.name: series.issued for known in self.series if (series := known()) is not None}
        name, number = ("", 0) if wait.turn is None else (wait.turn.series.name, wait.turn.number)
        return RankWait(wait.what, list(wait.ranks or range(world)), name, number, issued)


WAITS = Waits()
