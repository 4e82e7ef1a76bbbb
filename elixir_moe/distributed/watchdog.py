"""The thread of a process that watches its waits for other ranks.

Owns the thread, the waits that ranks report outside their collectives, and the warnings of long waits. It uses the
rendezvous store of torch.distributed, never a process group, which may hang. No result depends on the clock here: a
wait is ended by the timeout of torch.distributed, or because ranks wait for each other (`deadlock_of`).
docs/waiting.md has what a user sees.
"""

import atexit
import json
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from elixir_moe.distributed.waits import RULE, WAITS, RankWait, Wait, deadlock_of, named
from elixir_moe.errors import ConfigError
from elixir_moe.torch_private import default_store

PERIOD = "ELIXIR_WAIT_SECONDS"
"""The environment variable for the period: seconds after which a waiting rank warns."""
_DEFAULT_SECONDS = "30"
_LOOKS = 4
"""Looks in a period; several, so that ranks have reported their waits before a waiting rank reads them."""
_STANDING_SECONDS = 1.0
"""Time after which a rank reports its wait, and checks whether it can end."""
_ANSWER_SECONDS = 2.0
"""Longest wait for the store."""
_MOST = 64
"""Most ranks whose waits are read."""
T = TypeVar("T")


def watch() -> None:
    """Starts to report long waits, if there are other ranks. Raises ConfigError for a wrong `ELIXIR_WAIT_SECONDS`."""
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
        WAITS.ask_others = _THREAD.ask_others
        _THREAD.start()


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
        """Returns ``question(store)``. Raises TimeoutError without an answer, and RuntimeError if the store is gone."""
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(_ANSWER_SECONDS if self._open.done() else 0)
        except TimeoutError:
            if not answer.cancel():
                self._open = answer
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s") from None

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
    """The thread that reports the waits of this rank, warns of long ones and ends deadlocks."""

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
        self._warned: Wait | None = None
        """The last wait that caused a warning."""
        self._reported: Wait | None = None
        """The wait of this rank that was reported to the others."""

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="elixir-waits", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread must not outlive the interpreter

    def _stop(self) -> None:
        self._closing.set()
        assert self._thread is not None
        self._thread.join(2 * _ANSWER_SECONDS)

    def _watch(self) -> None:
        while not self._closing.wait(min(self.seconds / _LOOKS, _STANDING_SECONDS)):
            self._connect()
            if self.line is not None:
                self._look(self.line)

    def _look(self, line: _Line) -> None:
        now = time.monotonic()
        self._since = {wait: self._since.get(wait, now) for wait in list(WAITS.open.values())}
        reported = self._reported
        if reported is not None and reported not in self._since and not reported.deadlock:
            with suppress(RuntimeError, TimeoutError):  # the store, or its host, is gone
                line.end_wait()
                self._reported = None
        for wait, since in self._since.items():
            if since == now:
                continue
            if not wait.deadlock:
                self.ask_others(wait)
            if wait.deadlock and wait.turn is not None and wait in WAITS.open.values():
                wait.turn.series.end()
            elif now - since >= self.seconds and wait is not self._warned and wait in WAITS.open.values():
                self._warned = wait
                warnings.warn(
                    f"rank {line.rank} has waited for {self.seconds:g} s in {wait.what}. {wait.found}It continues to "
                    f"wait until the timeout of torch.distributed: {RULE}",
                    stacklevel=1,
                )

    def ask_others(self, wait: Wait) -> None:
        """Notes in a wait what the other ranks wait for, and why it can never end, if so. Takes 2 s at most."""
        line = self.line
        mine = None if line is None else WAITS.rank_wait(wait, line.ranks)
        if line is None or mine is None:
            return
        with suppress(RuntimeError, TimeoutError):  # the store, or its host, is gone
            self._reported = wait
            standing = line.exchange_waits(mine)
            wait.deadlock = deadlock_of(line.rank, standing)
            wait.found = others_in_words(mine, line.rank, standing)

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


def others_in_words(mine: RankWait, rank: int, standing: Mapping[int, RankWait]) -> str:
    """The waits of the ranks that `mine` waits for, in words."""
    by_wait = dict[str, list[int]]()
    for other in [other for other in mine.ranks if other != rank][:_MOST]:
        what = f"in {standing[other].what}" if other in standing else "no wait of the library"
        by_wait.setdefault(what, []).append(other)
    return "".join(f"Reported by {named(ranks)}: {what}. " for what, ranks in by_wait.items())
