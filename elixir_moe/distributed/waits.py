"""What this process waits for, and the thread that says so when a wait lasts.

Owns the list of open waits, where each thread is, and what the ranks tell each other of it. Decides nothing: a wait
ends when its collective does, or by the timeout of torch.distributed, and no result depends on the clock here.

Every collective that the library waits for is waited for inside a `Wait`, which costs two entries in a dict. One thread
a process looks at them a few times in a period (`ELIXIR_WAIT_SECONDS`). A rank that has neither begun nor ended a wait
between two looks leaves word of where it is in the store that brought the ranks together, never through a process
group: those are what may hang. A rank in one wait for a whole period warns once, with what the others have left there;
if the wait fails, its error says the same.
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

import torch.distributed as dist

from elixir_moe.errors import ConfigError, ElixirError

PERIOD = "ELIXIR_WAIT_SECONDS"
"""The environment variable: after how many seconds a rank that waits says so."""
_DEFAULT_SECONDS = "30"
_LOOKS = 4
"""In a period: others have left word before a rank that began to wait with them asks."""
_ANSWER_SECONDS = 2.0
"""How long the store is waited for."""
_MOST = 64
"""Ranks that are asked, and chunks' ranks that are named."""
_COLLECTIVES = ("distributed_c10d.py",)
_AROUND = ("c10d_logger.py", "contextlib.py", os.path.join("distributed", "all_ranks.py"))
_LIBRARY = os.path.join("elixir_moe", "")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_RULE = "every rank must call the same modules, and read the same parameters, in the same order"


class Wait:
    """A context in which this thread waits for other ranks. A failure in it is an ElixirError that says in what."""

    __slots__ = ("found", "ranks", "what")

    def __init__(self, what: str, ranks: Sequence[int] | None = None) -> None:
        """`what` is waited for: a collective, in words, over `ranks`, or all of the world."""
        self.what = what
        self.ranks = ranks
        self.found = ""
        """Where the others were, once it has lasted for a period."""

    def __enter__(self) -> None:
        _WATCH.begun += 1
        _WATCH.open[threading.get_ident()] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _WATCH.open.pop(threading.get_ident(), None)
        if isinstance(error, RuntimeError):
            raise ElixirError(
                f"{self.what} failed on rank {dist.get_rank()}: {error}. {self.found}Another rank has stopped, or runs "
                f"other modules: {_RULE}"
            ) from error


class Issued:
    """How many collectives a rank has issued in one communicator; told as long as the communicator lives."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.over = f"over {named(ranks)}"
        self.gathers = self.reductions = 0
        _WATCH.issued = (*(known for known in _WATCH.issued if known() is not None), weakref.ref(self))

    def gather(self, of: str) -> str:
        """One more gather: in words."""
        self.gathers += 1
        return f"gather {self.gathers} {self.over}, that of {of}"

    def reduction(self, of: str) -> str:
        """One more reduction: in words."""
        self.reductions += 1
        return f"reduction {self.reductions} {self.over}, that of {of}"

    def __str__(self) -> str:
        return f"{self.gathers} gathers and {self.reductions} reductions {self.over} issued"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a thread is."""

    waiting: bool
    """In a collective."""
    what: str
    """The collective, or the line of code."""


def place_of(thread: int | None) -> Whereabouts:
    """Reads a thread's stack: the collective it waits in, or its innermost line outside of installed packages."""
    line = "no line of Python"
    function = ""
    wait = _WATCH.open.get(thread or 0)
    frame = sys._current_frames().get(thread or 0)
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
    """From now on a wait that lasts is said. Does nothing where there is no other rank.

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
    """Where ranks have last left word that they are, "" if at work; without those that nothing is heard of.

    Takes 2 s at most.
    """
    return _WATCH.ask(ranks)


class _Watch:
    """The open waits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.begun = 0
        """Waits, so far."""
        self.open: dict[int, Wait] = {}
        """By thread."""
        self.issued: tuple[weakref.ref[Issued], ...] = ()
        self._seconds = 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ages: dict[Wait, int] = {}
        """At how many looks in a row a wait was open."""
        self._begun = -1
        """`begun` at the last look."""
        self._store: Any = lambda: None
        """A weak reference to the one the ranks talk through: whoever ends torch.distributed ends it."""
        self._mouth: Any = None
        """A connection of its own to it, which only tells, and so waits for no answer."""
        self._ear: Any = None
        """Another one, which asks."""
        self._rank = self._ranks = 0
        self._told = ""
        """What this rank has left word of."""
        self._asking: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        """Looks at the waits from now on, or in another rhythm than before."""
        self._seconds = seconds
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="elixir-waits", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a thread must not outlive the interpreter

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """As `last_seen`; on a thread of its own, since a store whose host stands still never answers."""
        heard: dict[int, str] = {}
        ear = self._ear
        if ear is None or (self._asking is not None and self._asking.is_alive()):
            return heard

        def listen() -> None:
            for rank in ranks[:_MOST]:
                try:
                    heard[rank] = ear.get(str(rank)).decode(errors="replace")
                except RuntimeError:  # it never wrapped a model, or the store is gone: nothing is heard of it
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
        # Of a rank that stands still alone: whoever reads a stack keeps its tensors in use meanwhile, and a block in
        # use is replaced by new memory.
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
        """Whether there are other ranks; those of another start than before have another store."""
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
            except RuntimeError:  # its host has ended already: waits are said without the others' places
                return True
            self._tell("")  # of an earlier start there may be more
        return True

    def _tell(self, place: str) -> None:
        if place != self._told and self._mouth is not None:
            self._told = place
            try:
                self._mouth.set(str(self._rank), place)
            except RuntimeError:  # its host has ended, and nobody can be told any more
                self._mouth = None

    def _place(self) -> str:
        waits = list(self.open.items())
        frames = sys._current_frames()
        places = [f"in {wait.what}{_caller(frames.get(thread))}" for thread, wait in waits]
        if not places:
            place = place_of(threading.main_thread().ident)
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
