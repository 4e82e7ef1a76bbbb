"""The open waits of this process for other ranks, the thread that reports long ones, and the time they take on a GPU.

Owns the list of open waits, the position of each thread, the exchange of positions between ranks, and the time in which
a GPU's stream waits. Decides nothing: a wait ends with its collective, or by the timeout of torch.distributed, and no
result depends on the clock here.

The library waits for collectives only inside a `Wait`, which costs two updates of a dict. One thread for each process
looks at the open waits a few times in a period (`ELIXIR_WAIT_SECONDS`). A rank that has begun no wait between two looks
writes its position to the store of torch.distributed. Positions never go through a process group, which may hang. A
rank in one wait for a whole period warns once, with the positions of the others; if the wait fails, its error has them
too.
"""

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.errors import ConfigError, ElixirError

PERIOD = "ELIXIR_WAIT_SECONDS"
"""The environment variable for the period: seconds after which a waiting rank warns."""
_DEFAULT_SECONDS = "30"
_LOOKS = 4
"""Looks in a period; several, so that ranks have written their positions before a waiting rank reads them."""
_ANSWER_SECONDS = 2.0
"""Longest wait for the store."""
_MOST = 64
"""Most ranks whose positions are read, and most ranks that a message lists."""
_COLLECTIVES = ("distributed_c10d.py",)
_AROUND = ("c10d_logger.py", "contextlib.py", os.path.join("distributed", "all_ranks.py"))
_LIBRARY = os.path.join("elixir_moe", "")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_RULE = "every rank must call the same modules, and read the same parameters, in the same order"


class Wait:
    """A context in which this thread waits for other ranks. A RuntimeError in it becomes an ElixirError with `what`."""

    __slots__ = ("begun", "found", "ranks", "what")

    def __init__(self, what: str, ranks: Sequence[int] | None = None) -> None:
        """`what` is the collective in words; `ranks` take part in it, by default the world."""
        self.what = what
        self.ranks = ranks
        self.found = ""
        """Positions of the other ranks, once the wait has lasted for a period."""
        self.begun: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        _WATCH.begun += 1
        _WATCH.open[threading.get_ident()] = self
        if _WATCH.timer is not None:
            self.begun = _WATCH.timer.begun()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _WATCH.open.pop(threading.get_ident(), None)
        if self.begun is not None and _WATCH.timer is not None and error is None:
            _WATCH.timer.ended(self.begun)
        if isinstance(error, RuntimeError):
            raise ElixirError(
                f"{self.what} failed on rank {dist.get_rank()}: {error}. {self.found}Another rank has stopped, or runs "
                f"other modules: {_RULE}"
            ) from error


def wait_for_event(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Orders `stream`, the current one, behind `event`, the end of a collective. The host does not wait."""
    begun = None if _WATCH.timer is None else _WATCH.timer.begun()
    stream.wait_event(event)
    if begun is not None and _WATCH.timer is not None:
        _WATCH.timer.ended(begun)


class BusyTime:
    """The time a GPU's stream takes for some work, without that in which it waits for other ranks; nothing on a CPU.

    Every rank of a step with collectives takes as long as the slowest, also where the host only sees itself wait for
    its GPU (`.item()`). So events are recorded on the stream around the work and around each wait in it. A wait of the
    host counts as far as the stream has run out of work meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._start: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """The work begins, on the current stream."""
        if self._device.type == "cuda":
            self._stream, self._waits = torch.cuda.current_stream(self._device), []
            self._start = self._now()
            _WATCH.timer = self

    def stop(self) -> float | None:
        """The work is issued: waits for its end and returns the busy seconds; None on a CPU."""
        if self._start is None:
            return None
        _WATCH.timer = None
        end = self._now()
        end.synchronize()
        waited = sum(begun.elapsed_time(ended) for begun, ended in self._waits)
        return (self._start.elapsed_time(end) - waited) / 1000

    def begun(self) -> torch.cuda.Event | None:
        """A wait begins; None if the thread works on another stream, whose waits delay nothing by themselves."""
        return self._now() if torch.cuda.current_stream(self._device) == self._stream else None

    def ended(self, begun: torch.cuda.Event) -> None:
        """The wait has ended that began with the event `begun`."""
        self._waits.append((begun, self._now()))

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class Issued:
    """The number of collectives a rank has issued in one communicator; reported as long as the communicator lives."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.over = f"over {named(ranks)}"
        self.gathers = self.reductions = 0
        _WATCH.issued = (*(known for known in _WATCH.issued if known() is not None), weakref.ref(self))

    def gather(self, of: str) -> str:
        """Counts one more gather; returns it in words."""
        self.gathers += 1
        return f"gather {self.gathers} {self.over}, that of {of}"

    def reduction(self, of: str) -> str:
        """Counts one more reduction; returns it in words."""
        self.reductions += 1
        return f"reduction {self.reductions} {self.over}, that of {of}"

    def __str__(self) -> str:
        return f"{self.gathers} gathers and {self.reductions} reductions {self.over} issued"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The position of a thread."""

    waiting: bool
    """The thread is in a collective."""
    what: str
    """The collective, or the line of code."""


def place_here() -> Whereabouts:
    """The position of the training: that of the main thread, or of a thread of autograd that works for it.

    On a GPU, autograd runs backward on threads of its own while the main thread stands still. They are seen while they
    run hooks of the library. Python has not started them, so their stacks do not begin in `threading`.
    """
    main = threading.main_thread().ident
    frames = _frames()
    others = [thread for thread, frame in frames.items() if thread != main and _is_autograd(frame)]
    places = [_place(frames.get(thread), _WATCH.open.get(thread)) for thread in others]
    return next((place for place in places if place.waiting), next(iter(places), place_of(main)))


def _frames() -> dict[int, FrameType]:
    """The frames of the other threads.

    Its own would be a cycle with what it finds, which would keep the tensors in all frames until the next collection of
    garbage.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def _is_autograd(frame: FrameType) -> bool:
    names = [frame.f_code.co_filename]
    while frame.f_back is not None:
        frame = frame.f_back
        names.append(frame.f_code.co_filename)
    return not names[-1].endswith("threading.py") and any(_LIBRARY in name for name in names)


def place_of(thread: int | None) -> Whereabouts:
    """The collective in which a thread waits, or its innermost line outside of installed packages, from its stack."""
    return _place(sys._current_frames().get(thread or 0), _WATCH.open.get(thread or 0))


def _place(frame: FrameType | None, wait: Wait | None) -> Whereabouts:
    line = "no line of Python"
    function = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES):
            function = code.co_name
        elif function and not code.co_filename.endswith(_AROUND):
            return Whereabouts(True, f"{function}, called in {_where(frame)}")
        elif wait is not None and not function:
            return Whereabouts(True, wait.what)
        elif "site-packages" not in code.co_filename and "<" not in code.co_filename:
            return Whereabouts(False, _where(frame))
        frame = frame.f_back
    return Whereabouts(bool(function), function or line)


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, or the first of many."""
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST]))}{more}"


def watch() -> None:
    """Starts to report long waits. Does nothing if there is no other rank.

    Raises:
        ConfigError: `ELIXIR_WAIT_SECONDS` is no number above 0.
    """
    text = os.environ.get(PERIOD, _DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(
            f"{PERIOD}={text!r}: expected a number above 0, the seconds after which a rank that waits says so; leave "
            f"it out for {_DEFAULT_SECONDS}, set inf for never"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        _WATCH.start(seconds)


def last_seen(ranks: Sequence[int]) -> dict[int, str]:
    """The last reported position of each rank, "" if at work; ranks that have reported none are left out.

    Takes 2 s at most.
    """
    return _WATCH.ask(ranks)


class _Watch:
    """The open waits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.begun = 0
        """Number of waits begun so far."""
        self.open: dict[int, Wait] = {}
        """The open wait of each thread."""
        self.issued: tuple[weakref.ref[Issued], ...] = ()
        self.timer: BusyTime | None = None
        """What times the waits of a GPU's stream at present."""
        self._seconds = 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ages: dict[Wait, int] = {}
        """Number of looks at which each open wait was seen."""
        self._begun = -1
        """`begun` at the last look."""
        self._store: Any = lambda: None
        """A weak reference to the store of torch.distributed, which ends with torch.distributed."""
        self._mouth: Any = None
        """A connection of its own to the store, which only writes, and so waits for no answer."""
        self._ear: Any = None
        """Another connection, which reads."""
        self._rank = self._ranks = 0
        self._told = ""
        """The position that this rank has reported last."""
        self._asking: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        """Starts the thread that looks at the waits, or changes its period."""
        self._seconds = seconds
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="elixir-waits", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a thread must not outlive the interpreter

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """As `last_seen`; reads on a thread of its own, since a store whose host hangs never answers."""
        heard: dict[int, str] = {}
        ear = self._ear
        if ear is None or (self._asking is not None and self._asking.is_alive()):
            return heard

        def listen() -> None:
            for rank in ranks[:_MOST]:
                try:
                    heard[rank] = ear.get(str(rank)).decode(errors="replace")
                except RuntimeError:  # the rank never wrapped a model, or the store is gone
                    continue

        self._asking = threading.Thread(target=listen, name="elixir-waits-ask", daemon=True)
        self._asking.start()
        self._asking.join(_ANSWER_SECONDS)
        return dict(heard)

    def _stop(self) -> None:
        self._closing.set()
        assert self._thread is not None
        self._thread.join(2 * _ANSWER_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(min(self._seconds / _LOOKS, threading.TIMEOUT_MAX)):
            self._look()
        self._mouth = self._ear = None

    def _look(self) -> None:
        if not self._connect():
            return
        begun, self._begun = self._begun, self.begun
        # Only for a rank that stands still: reading a stack keeps its tensors in use meanwhile, and a block in use is
        # replaced by new memory.
        place = self._place() if begun == self._begun else ""
        self._tell(place)
        self._ages = {wait: self._ages.get(wait, 0) + 1 for wait in list(self.open.values())}
        for wait, age in self._ages.items():
            if age > _LOOKS:
                wait.found = f"Last seen: {self._others(wait)}. "
            if age == _LOOKS + 1 and wait in self.open.values():
                warnings.warn(
                    f"rank {self._rank} has waited for {self._seconds:g} s {place or f'in {wait.what}'}. {wait.found}"
                    f"It goes on waiting, until the timeout of torch.distributed: {_RULE}",
                    stacklevel=1,
                )

    def _connect(self) -> bool:
        """Whether torch.distributed runs; connects to its store, again after a restart of torch.distributed."""
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            rank, ranks = dist.get_rank(), dist.get_world_size()
        except ValueError:  # torch.distributed has been ended
            self._store, self._mouth, self._ear = lambda: None, None, None
            return False
        if store is not self._store():
            self._store, self._rank, self._ranks, self._told = weakref.ref(store), rank, ranks, "?"
            self._mouth = self._ear = None
            try:
                self._mouth, self._ear = (dist.PrefixStore("elixir waits", store.clone()) for _ in range(2))
                self._ear.set_timeout(timedelta(seconds=_ANSWER_SECONDS / 2))
            except RuntimeError:  # the store's host has ended: waits are reported without positions
                return True
            self._tell("")  # an earlier start may have left a position
        return True

    def _tell(self, place: str) -> None:
        if place != self._told and self._mouth is not None:
            self._told = place
            try:
                self._mouth.set(str(self._rank), place)
            except RuntimeError:  # the store's host has ended
                self._mouth = None

    def _place(self) -> str:
        waits = list(self.open.items())
        frames = _frames()
        places = [f"in {wait.what}{_caller(frames.get(thread))}" for thread, wait in waits]
        if not places:
            place = place_here()
            places = [f"{'in' if place.waiting else 'at'} {place.what}"]
        counts = [str(issued) for known in self.issued if (issued := known()) is not None]
        return ", ".join(places) + (f", with {', '.join(counts)}" if counts else "")

    def _others(self, wait: Wait) -> str:
        others = [rank for rank in wait.ranks or range(self._ranks) if rank != self._rank]
        heard = self.ask(others)
        by_place: dict[str, list[int]] = {}
        for rank in others[:_MOST]:
            by_place.setdefault(heard[rank] or "at work" if rank in heard else "nowhere yet", []).append(rank)
        return "; ".join(f"{named(at)} {place}" for place, at in by_place.items())


_WATCH = _Watch()


def _caller(frame: FrameType | None) -> str:
    """The innermost line outside of this library and of installed packages."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and "<" not in name and not name.startswith(_PACKAGE):
            return f", called in {_where(frame)}"
        frame = frame.f_back
    return ""


def _where(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    short = name[name.rindex(_LIBRARY) :] if _LIBRARY in name else os.path.basename(name)
    return f"{short}:{frame.f_lineno} ({frame.f_code.co_name})"
