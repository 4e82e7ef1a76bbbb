"""The thread of a process that watches its waits for other ranks.

Owns the thread, the reports that ranks exchange outside their collectives, and the warnings of long waits. It uses the
rendezvous store of torch.distributed, never a process group, which may hang. No result depends on the clock here: a
wait is ended by the timeout of torch.distributed, or because ranks wait for each other.

    look      reports the position of this rank; reads a stack only if no wait has begun since the last look
    warning   once, about a wait that has lasted for a period (`ELIXIR_WAIT_SECONDS`), with the positions of the other
              ranks; if the wait fails, its error contains them too
    deadlock  a rank that has waited for a second in a numbered collective (`Series`) reports it. If ranks wait for each
              other (`deadlock_of`), each ends its own wait with an OutOfStepError

A stopped or dead process stops reporting; a rank in an endless loop continues, and its reports show its position.
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
from elixir_moe.errors import ConfigError
from elixir_moe.torch_private import default_store

PERIOD = "ELIXIR_WAIT_SECONDS"
"""The environment variable for the period: seconds after which a waiting rank warns."""
_DEFAULT_SECONDS = "30"
_LOOKS = 4
"""Looks in a period; several, so that ranks have reported their positions before a waiting rank reads them."""
_STANDING_SECONDS = 1.0
"""Time after which a rank checks whether its wait can end."""
_ANSWER_SECONDS = 2.0
"""Longest wait for the store."""
_MOST = 64
"""Most ranks whose positions are read for a warning."""
_AT_WORK = "at work"
T = TypeVar("T")


def watch() -> None:
    """Starts to report long waits. Does nothing if there is no other rank.

    Raises:
        ConfigError: `ELIXIR_WAIT_SECONDS` is not a number above 0.
    """
    text = os.environ.get(PERIOD, _DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(
            f"{PERIOD}={text!r}: expected a number above 0, the seconds after which a waiting rank warns; leave it out "
            f"for {_DEFAULT_SECONDS}, set inf for never"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        _THREAD.seconds = seconds
        WAITS.find_deadlock = _THREAD.find_deadlock
        _THREAD.start()


def last_seen(ranks: Sequence[int]) -> dict[int, str]:
    """Returns the last reported position of each rank that has reported one. Takes 2 s at most."""
    try:
        reports = [] if (line := _THREAD.line) is None else line.reports(ranks)
    except (RuntimeError, TimeoutError):  # the store, or its host, is gone
        reports = []
    return {rank: report.partition(" ")[2] for rank, report in zip(ranks, reports, strict=False) if report}


class _Line:
    """A separate connection to a store, on its own thread, because a store whose host is stopped never answers."""

    def __init__(self, store: Any, name: str, rank: int, ranks: int) -> None:
        """`name` is the prefix of all keys."""
        self.rank, self.ranks, self._name = rank, ranks, name
        try:
            self._store = store.clone()
        except RuntimeError:  # its host has ended: no reports arrive
            self._store = dist.HashStore()
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._questions: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        self._open: Future[Any] = Future()
        """The last question not answered in time; `ask` does not wait until it is answered."""
        self._open.cancel()
        threading.Thread(target=self._run, name="elixir-waits-store", daemon=True).start()

    def ask(self, question: Callable[[Any], T]) -> T:
        """Returns ``question(store)``.

        Raises:
            TimeoutError: the store does not answer; the question is dropped.
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

    def report(self, place: str) -> None:
        """Reports the position of this rank; each report is different, so that others see that it lives."""
        self.ask(lambda store: store.set(f"{self._name} {self.rank}", f"{time.monotonic_ns()} {place}"))

    def reports(self, ranks: Sequence[int]) -> list[str]:
        """Returns the last report of each rank; empty if there is none."""
        return self.ask(lambda store: [_value(store, f"{self._name} {rank}") for rank in ranks])

    def exchange_waits(self, wait: RankWait) -> dict[int, RankWait]:
        """Reports the wait of this rank; returns the waits that the ranks have reported."""
        ranks = sorted({*wait.ranks[:_MOST], *range(min(self.ranks, _MOST))})

        def exchange(store: Any) -> dict[int, str]:
            store.set(f"{self._name} standing {self.rank}", json.dumps(asdict(wait)))
            return {rank: _value(store, f"{self._name} standing {rank}") for rank in ranks}

        found = self.ask(exchange)
        return {rank: RankWait(**json.loads(text)) for rank, text in found.items() if text} | {self.rank: wait}

    def end_wait(self) -> None:
        """Reports that the wait of this rank has ended."""
        self.ask(lambda store: store.set(f"{self._name} standing {self.rank}", ""))

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
    """The thread that reports the position of this rank, warns of long waits and ends deadlocks."""

    def __init__(self) -> None:
        self.seconds = math.inf
        """The period of warnings."""
        self.line: _Line | None = None
        """The connection to the other ranks, once there are any."""
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
        """The wait of this rank that was reported to the others."""

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="elixir-waits", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread must not outlive the interpreter

    def _stop(self) -> None:
        self._closing.set()
        assert self._thread is not None
        self._thread.join(2 * _ANSWER_SECONDS)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closing.wait(min(self.seconds / _LOOKS, _STANDING_SECONDS)):
            self._connect()
            if self.line is None:
                continue
            self._end_deadlocks()
            if time.monotonic() - looked >= self.seconds / _LOOKS:
                looked = time.monotonic()
                self._look()

    def _end_deadlocks(self) -> None:
        """Ends the waits that can never end, once they have lasted for a second."""
        stood, self._stood = self._stood, set(list(WAITS.open.values()))
        told = self._told
        if told is not None and told not in self._stood and not told.deadlock and self.line is not None:
            with suppress(RuntimeError, TimeoutError):  # as below
                self.line.end_wait()
                self._told = None
        for wait in self._stood & stood:
            wait.deadlock = wait.deadlock or self.find_deadlock(wait)
            if wait.deadlock and wait.turn is not None and wait in WAITS.open.values():
                wait.turn.series.end()

    def find_deadlock(self, wait: Wait) -> str:
        """Explains why a wait can never end; empty if it may. Takes 2 s at most."""
        line = self.line
        mine = None if line is None else WAITS.rank_wait(wait, line.ranks)
        if line is None or mine is None:
            return ""
        try:
            self._told = wait
            return deadlock_of(line.rank, line.exchange_waits(mine))
        except (RuntimeError, TimeoutError):  # the store, or its host, is gone
            return ""

    def _look(self) -> None:
        assert self.line is not None
        begun, self._begun = self._begun, WAITS.begun
        # Only for a rank that makes no progress: reading a stack keeps its tensors in use meanwhile, and a block in use
        # is replaced by new memory.
        place = describe_waits() if begun == self._begun else _AT_WORK
        with suppress(RuntimeError, TimeoutError):  # the store's host has ended, or hangs
            self.line.report(place)
        now = time.monotonic()
        self._since = {wait: self._since.get(wait, now) for wait in list(WAITS.open.values())}
        for wait, since in self._since.items():
            if now - since >= self.seconds:
                told, wait.found = bool(wait.found), f"Last seen: {_others(wait, self.line)}. "
                if not told and wait in WAITS.open.values():
                    warnings.warn(
                        f"rank {self.line.rank} has waited for {self.seconds:g} s "
                        f"{f'in {wait.what}' if place == _AT_WORK else place}. {wait.found}It continues to wait until "
                        f"the timeout of torch.distributed: {RULE}",
                        stacklevel=1,
                    )

    def _connect(self) -> None:
        """Connects to the store of torch.distributed, and reconnects after it was restarted."""
        try:
            store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
        except ValueError:  # torch.distributed has been ended
            self._use(None, lambda: None)
            return
        if store is not self._store():
            self._use(_Line(store, "elixir waits", rank, ranks), weakref.ref(store))

    def _use(self, line: _Line | None, store: Callable[[], Any]) -> None:
        if self.line is not None:
            self.line.close()
        self.line, self._store = line, store


_THREAD = _Thread()


def _others(wait: Wait, line: _Line) -> str:
    others = [rank for rank in wait.ranks or range(line.ranks) if rank != line.rank][:_MOST]
    heard, by_place = last_seen(others), dict[str, list[int]]()
    for rank in others:
        by_place.setdefault(heard.get(rank, "nowhere yet"), []).append(rank)
    return "; ".join(f"{named(at)} {place}" for place, at in by_place.items())
