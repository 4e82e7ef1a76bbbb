"""The thread of a process that watches its waits for other ranks, and the end of a run whose ranks are gone.

Owns the thread, what ranks tell each other beside their collectives, the warnings of long waits, and the limits of a
run. It uses the store with which the ranks met, never a process group, which may hang. No result depends on the clock
here. A wait is ended by the timeout of torch.distributed, or because ranks wait for each other.

    look      tells the others the position of this rank; a stack is read only if no wait has begun since the last look
    warning   of a wait that has lasted for a period (`ELIXIR_WAIT_SECONDS`), once, with the positions of the others;
              if the wait fails, its error has them too
    deadlock  a rank that has waited for a second in a collective with a number (`Series`) says so. Where ranks wait for
              each other (`deadlock_of`), each ends its own wait by an OutOfStepError
    a run     in a `Watchdog` looks every second, and ends the process if a rank has failed or a phase takes longer than
              the timeout, and the main thread does not fail by itself

Words of a stopped or dead process cease; those of a rank in an endless loop continue, and show its position.
"""

import atexit
import json
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from elixir_moe.distributed.waits import RULE, WAITS, RankWait, Wait, deadlock_of, describe_waits, named
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.torch_private import default_store

PERIOD = "ELIXIR_WAIT_SECONDS"
"""The environment variable for the period: seconds after which a waiting rank warns."""
_DEFAULT_SECONDS = "30"
_LOOKS = 4
"""Looks in a period; several, so that ranks have written their positions before a waiting rank reads them."""
_RUN_LOOK_SECONDS = 1.0
_STANDING_SECONDS = 1.0
"""Time after which a rank asks whether its wait can end."""
_GRACE_SECONDS = 2.0
"""Time for a rank to fail by itself before its run ends it."""
_ANSWER_SECONDS = 2.0
"""Longest wait for the store."""
_MOST = 64
"""Most ranks whose positions are read for a warning."""
_AT_WORK = "at work"
_BROKEN = ("gloo", "onnection", "Timed out", "timed out", "Broken pipe", "Socket")
T = TypeVar("T")


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
        _THREAD.seconds = seconds
        WAITS.find_deadlock = _THREAD.find_deadlock
        _THREAD.start()


def last_seen(ranks: Sequence[int]) -> dict[int, str]:
    """The last reported position of each rank; ranks that have reported none are left out. Takes 2 s at most."""
    try:
        words = [] if (line := _THREAD.line) is None else line.words(ranks)
    except (RuntimeError, TimeoutError):  # the store, or its host, is gone
        words = []
    return {rank: word.partition(" ")[2] for rank, word in zip(ranks, words, strict=False) if word}


def is_broken_collective(error: BaseException) -> bool:
    """Whether the error, or its cause, is a collective that failed because peers are gone or late."""
    if isinstance(error, ElixirError):
        return error.__cause__ is not None and is_broken_collective(error.__cause__)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)
    )


class _Line:
    """A connection of its own to a store, on its own thread, because a store whose host is stopped never answers."""

    def __init__(self, store: Any, name: str, rank: int, ranks: int) -> None:
        """`name` begins all keys."""
        self.rank, self.ranks, self._name = rank, ranks, name
        try:
            self._store = store.clone()
        except RuntimeError:  # its host has ended: nobody is heard
            self._store = dist.HashStore()
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._questions: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        self._open: Future[Any] = Future()
        """The last question not answered in time; `ask` does not wait until it is answered."""
        self._open.cancel()
        threading.Thread(target=self._run, name="elixir-waits-store", daemon=True).start()

    def ask(self, question: Callable[[Any], T]) -> T:
        """The result of ``question(store)``.

        Raises:
            TimeoutError: there is no answer; the question is dropped.
            RuntimeError: the store is gone.
        """
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(_ANSWER_SECONDS if self._open.done() else 0)
        except TimeoutError:
            if not answer.cancel():
                self._open = answer
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s") from None

    def tell(self, place: str) -> None:
        """Leaves word of this rank: another one each time, so that others see that it lives."""
        self.ask(lambda store: store.set(f"{self._name} {self.rank}", f"{time.monotonic_ns()} {place}"))

    def words(self, ranks: Sequence[int]) -> list[str]:
        """The last word of each rank; empty if there is none."""
        return self.ask(lambda store: [_value(store, f"{self._name} {rank}") for rank in ranks])

    def stand(self, standing: RankWait) -> dict[int, RankWait]:
        """Tells the others where this rank stands; returns where each rank stands, if it does."""
        ranks = sorted({*standing.ranks[:_MOST], *range(min(self.ranks, _MOST))})

        def exchange(store: Any) -> dict[int, str]:
            store.set(f"{self._name} standing {self.rank}", json.dumps(asdict(standing)))
            return {rank: _value(store, f"{self._name} standing {rank}") for rank in ranks}

        said = self.ask(exchange)
        return {rank: RankWait(**json.loads(text)) for rank, text in said.items() if text} | {self.rank: standing}

    def move_on(self) -> None:
        """Tells the others that this rank stands no more."""
        self.ask(lambda store: store.set(f"{self._name} standing {self.rank}", ""))

    def fail(self, text: str) -> None:
        """Tells the others that this rank is about to end, and why, unless another one has."""
        self.ask(lambda store: store.compare_set(f"{self._name} failed", "", f"rank {self.rank} has failed: {text}"))

    def failure(self) -> str:
        """The message of a rank about to end, with its reason; empty if there is none."""
        return self.ask(lambda store: _value(store, f"{self._name} failed"))

    def close(self) -> None:
        """Ends the thread after the pending questions, if they are ever answered."""
        self._questions.put(None)

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self._store))
                except RuntimeError as error:
                    answer.set_exception(error)


def _value(store: Any, key: str) -> str:
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


class _Thread:
    """The thread."""

    def __init__(self) -> None:
        self.seconds = math.inf
        """The period of warnings."""
        self.run: Watchdog | None = None
        self.line: _Line | None = None
        """The connection to the other ranks: that of the run, if there is one."""
        self.looking = threading.Lock()
        """Held during a look."""
        self.wake = threading.Event()
        """Set to look at once."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Callable[[], Any] = lambda: None
        """A weak reference to the store of the line, which ends with torch.distributed."""
        self._since: dict[Wait, float] = {}
        """The time at which each open wait was first seen."""
        self._begun = -1
        """`WAITS.begun` at the last look."""
        self._stood: set[Wait] = set()
        """The waits that were open a second ago."""
        self._told: Wait | None = None
        """The wait in which the others believe this rank to stand."""

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="elixir-waits", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread must not outlive the interpreter

    def _stop(self) -> None:
        self._closing.set()
        self.wake.set()
        assert self._thread is not None
        self._thread.join(2 * _ANSWER_SECONDS)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            seconds = self.seconds / _LOOKS if self.run is None else _RUN_LOOK_SECONDS
            at_once = self.wake.wait(min(seconds, _STANDING_SECONDS))
            self.wake.clear()
            with self.looking:
                if self.run is None:
                    self._connect()
                if self.line is None:
                    continue
                self._end_deadlocks()
                if at_once or time.monotonic() - looked >= seconds:
                    looked = time.monotonic()
                    self._look()

    def _end_deadlocks(self) -> None:
        """Ends the waits that can never end, once they have lasted for a second."""
        stood, self._stood = self._stood, set(list(WAITS.open.values()))
        told = self._told
        if told is not None and told not in self._stood and not told.deadlock and self.line is not None:
            with suppress(RuntimeError, TimeoutError):  # as below
                self.line.move_on()
                self._told = None
        for wait in self._stood & stood:
            wait.deadlock = wait.deadlock or self.find_deadlock(wait)
            if wait.deadlock and wait.turn is not None and wait in WAITS.open.values():
                wait.turn.series.end()

    def find_deadlock(self, wait: Wait) -> str:
        """Why a wait can never end, in words; empty if it may. Takes 2 s at most."""
        line = self.line
        standing = None if line is None else WAITS.rank_wait(wait, line.ranks)
        if line is None or standing is None:
            return ""
        try:
            self._told = wait
            return deadlock_of(line.rank, line.stand(standing))
        except (RuntimeError, TimeoutError):  # the store, or its host, is gone
            return ""

    def _look(self) -> None:
        assert self.line is not None
        begun, self._begun = self._begun, WAITS.begun
        # Only for a rank that stands still: reading a stack keeps its tensors in use meanwhile, and a block in use is
        # replaced by new memory.
        place = describe_waits() if begun == self._begun else _AT_WORK
        if self.run is not None:
            self.run.look(place)
        else:
            with suppress(RuntimeError, TimeoutError):  # the store's host has ended, or hangs
                self.line.tell(place)
        now = time.monotonic()
        self._since = {wait: self._since.get(wait, now) for wait in list(WAITS.open.values())}
        for wait, since in self._since.items():
            if now - since >= self.seconds:
                told, wait.found = bool(wait.found), f"Last seen: {_others(wait, self.line)}. "
                if not told and wait in WAITS.open.values():
                    warnings.warn(
                        f"rank {self.line.rank} has waited for {self.seconds:g} s "
                        f"{f'in {wait.what}' if place == _AT_WORK else place}. {wait.found}It goes on waiting, until "
                        f"the timeout of torch.distributed: {RULE}",
                        stacklevel=1,
                    )

    def take(self, run: "Watchdog | None", line: _Line | None, store: Any = None) -> None:
        """From now on, tells and asks on `line`, to `store`, and looks after `run`; not during a look."""
        if self.line is not None:
            self.line.close()
        self.run, self.line = run, line
        self._store = (lambda: None) if store is None else weakref.ref(store)

    def _connect(self) -> None:
        """Outside of runs, connects to the store of torch.distributed; again after a restart of it."""
        try:
            store: Any = default_store()
            rank, ranks = dist.get_rank(), dist.get_world_size()
        except ValueError:  # torch.distributed has been ended
            self.take(None, None)
            return
        if store is not self._store():
            self.take(None, _Line(store, "elixir waits", rank, ranks), store)


_THREAD = _Thread()


def _others(wait: Wait, line: _Line) -> str:
    others = [rank for rank in wait.ranks or range(line.ranks) if rank != line.rank][:_MOST]
    heard, by_place = last_seen(others), dict[str, list[int]]()
    for rank in others:
        by_place.setdefault(heard.get(rank, "nowhere yet"), []).append(rank)
    return "; ".join(f"{named(at)} {place}" for place, at in by_place.items())


class Watchdog:
    """A context in which the ranks of a run end together: none waits for another longer than the timeout.

    Args:
        store: store of torch.distributed, for messages of the main thread outside the process groups.
        rank: rank of this process.
        ranks: number of ranks; in a world of one there is nothing to watch.
        timeout_seconds: longest time in one phase; that of the collectives.
        end: called on the thread, with the reason, when the process must end although its main thread is
            blocked.
        look: called on that thread every second, with `ask`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        timeout_seconds: float,
        end: Callable[[str], None],
        look: Callable[[Callable[[Callable[[Any], Any]], Any]], None] = lambda _: None,
    ) -> None:
        self.store = store
        self._line: _Line | None = None
        if ranks > 1:  # without the keys of earlier runs in these processes
            self._line = _Line(store, f"run {store.add(f'runs of rank {rank}', 1)}", rank, ranks)
        self._timeout, self._end, self._also = timeout_seconds, end, look
        self._phase, self._since = "the start", math.inf  # no limit: it depends on the size of the model
        self._closing = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._line is not None:
            with _THREAD.looking:
                _THREAD.take(self, self._line)
            _THREAD.start()
            _THREAD.wake.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._line is not None:
            with _THREAD.looking:
                _THREAD.take(None, None)

    def at(self, phase: str) -> None:
        """The main thread begins `phase`: restarts the clock."""
        self._phase, self._since = phase, time.monotonic()

    def pause(self) -> None:
        """Stops the clock: the next phase may take any time."""
        self._since = math.inf

    def ask(self, question: Callable[[Any], T]) -> T:
        """The result of ``question(store)``. Raises TimeoutError if the store does not answer."""
        return question(self.store) if self._line is None else self._line.ask(question)

    def failed(self, text: str) -> None:
        """Tells the others that this rank is about to end, and why."""
        if self._line is not None:
            with suppress(RuntimeError, TimeoutError):  # the store's host may be what has failed
                self._line.fail(text)

    def explain(self) -> str:
        """After the failure of a collective: which ranks failed or stopped, and where the others are. Takes 2 s."""
        if self._line is None:
            return ""
        everyone = range(self._line.ranks)
        try:
            before = self._line.words(everyone)
            self._closing.wait(2 * _RUN_LOOK_SECONDS)
            now, told = self._line.words(everyone), self._line.failure()
        except (RuntimeError, TimeoutError) as error:
            return _silent(error)
        found = [told] if told else []
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            if rank != self._line.rank:
                where = new.partition(" ")[2] or "no place at all"
                stopped = f"rank {rank} is stopped or dead; it was last seen in {where}"
                found.append(stopped if old == new else f"rank {rank} lives: {where}")
        return "; ".join(found)

    def look(self, place: str) -> None:
        """Tells the others the position of this rank, and ends the process if the run cannot go on; on the thread."""
        assert self._line is not None
        try:
            self._line.tell(f"{self._phase}, {place}")
            self._also(self.ask)
            told = self._line.failure()
            if told:
                self._give_up(place, told)
        except TimeoutError:  # the store may be slow: the clock decides
            pass
        except dist.DistBackendError as error:  # of what `look` did, not of the store
            self._give_up(place, str(error))
        except RuntimeError as error:
            self._give_up(place, _silent(error))
        if time.monotonic() - self._since > self._timeout + _GRACE_SECONDS:
            text = f"{self._phase} has taken {self._timeout:.0f} s, {describe_waits()}"
            found = self.explain()
            self.failed(text)
            self._leave(f"{text}. {found}")

    def _give_up(self, place: str, reason: str) -> None:
        """The main thread should fail by itself, since a peer is gone; if it does not, ends the process."""
        if not self._closing.wait(_GRACE_SECONDS):
            self._leave(f"{self._phase}, {place}: {reason}")

    def _leave(self, reason: str) -> None:
        if not self._closing.is_set():
            self._end(reason)


def _silent(error: Exception) -> str:
    why = str(error).splitlines()[0]
    return f"the store that brought the ranks together, of rank 0 or of its launcher, does not answer: {why}"
