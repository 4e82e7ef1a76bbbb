"""A thread on each rank that watches the training: whether it waits, for which ranks, and whether they live.

Owns a rank's messages to the others (a heartbeat every second with its position, and its failure), the share of time it
waits, and the end of a rank whose peers are gone. Uses the store with which the ranks met, never a process group, which
may hang.

The position of a rank is read from the stack of its main thread, or of the thread on which autograd runs backward on a
GPU, so the training neither reports it nor slows down.
Heartbeats of a stopped or dead process cease; those of a rank in an endless loop continue, and show its position.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from elixir_moe.distributed.waits import Whereabouts, place_here
from elixir_moe.errors import ElixirError

_SAMPLE_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 2.0
"""Time for a rank to fail by itself before the watchdog ends it."""
_ANSWER_SECONDS = 2.0
"""Time to wait for an answer of the store."""
_BROKEN = ("gloo", "onnection", "Timed out", "timed out", "Broken pipe", "Socket")
T = TypeVar("T")


def is_broken_collective(error: BaseException) -> bool:
    """Whether the error, or its cause, is a collective that failed because peers are gone or late."""
    if isinstance(error, ElixirError):
        return error.__cause__ is not None and is_broken_collective(error.__cause__)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)
    )


class _Line:
    """Queries the store on its own thread, because a store whose host is stopped never answers."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._open: Future[Any] = Future()
        """The last question not answered in time; `ask` does not wait until it is answered."""
        self._open.cancel()
        threading.Thread(target=self._run, name="elixir-store", daemon=True).start()

    def ask(self, question: Callable[[], T]) -> T:
        """Returns or raises what `question` does. Raises TimeoutError without an answer, and drops the question."""
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(_ANSWER_SECONDS if self._open.done() else 0)
        except TimeoutError:
            if not answer.cancel():
                self._open = answer
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s") from None

    def close(self) -> None:
        """Ends the thread after the pending questions, if they are ever answered."""
        self._questions.put(None)

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except RuntimeError as error:
                    answer.set_exception(error)


class Watchdog:
    """A context that watches the training of this rank.

    Args:
        store: store of the process group; may be None in a world of one.
        rank: rank of this process.
        ranks: number of ranks.
        timeout_seconds: longest time in one phase.
        end: called on the thread, with the reason, when the process must end although its main thread is blocked.
        look: called on the thread every second, with a function that answers questions to the store, as `ask` does.
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
        """The store, for messages of the main thread outside the process groups."""
        self._store: Any = None
        if store is not None and ranks > 1:  # without the keys of earlier runs in these processes
            number, self._shared = store.add(f"runs of rank {rank}", 1), store.clone()
            self._store = dist.PrefixStore(f"run {number}", self._shared)
        self._line = _Line()
        self._rank, self._ranks, self._timeout = rank, ranks, timeout_seconds
        self._end, self._look = end, look
        self._phase, self._since = "the start", math.inf  # no limit: it depends on the size of the model
        self._samples = self._waits = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elixir-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
            with contextlib.suppress(TimeoutError):
                self.ask(self._tell)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._line.close()

    def at(self, phase: str) -> None:
        """The main thread begins `phase`: restarts the clock."""
        self._phase, self._since = phase, time.monotonic()

    def pause(self) -> None:
        """Stops the clock: the next phase may take any time."""
        self._since = math.inf

    def waited(self) -> float:
        """The fraction of samples since the last call in which the training was in a collective."""
        share = self._waits / self._samples if self._samples else 0.0
        self._samples = self._waits = 0
        return share

    def ask(self, question: Callable[[], T]) -> T:
        """The result of `question`, which talks to a store. Raises TimeoutError if the store does not answer."""
        return self._line.ask(question)

    def failed(self, text: str) -> None:
        """Tells the others that this rank is about to end, and why."""
        if self._store is not None:
            told = f"rank {self._rank} has failed: {text}"
            with contextlib.suppress(RuntimeError, TimeoutError):  # the store's host may be what has failed
                self.ask(lambda: self._store.compare_set("failed", "", told))

    def explain(self) -> str:
        """After the failure of a collective: which ranks failed or stopped, and where the others are. Takes 2 s."""
        if self._store is None:
            return ""
        try:
            before = self.ask(self._beats)
            self._closing.wait(2 * _BEAT_SECONDS)
            now, told = self.ask(self._beats), self.ask(self._told)
        except (RuntimeError, TimeoutError) as error:
            return _silent(error)
        return "; ".join([*([told] if told else []), *self._findings(before, now)])

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._closing.wait(_SAMPLE_SECONDS):
            self._samples += 1
            self._waits += self._place().waiting
            if self._store is None or time.monotonic() - beat < _BEAT_SECONDS:
                continue
            beat = time.monotonic()
            try:
                self.ask(self._tell)
                self._look(lambda question: self.ask(lambda: question(self._shared)))
                told = self.ask(self._told)
                if told:
                    self._give_up(told)
            except TimeoutError:  # the store may be slow: the clock decides
                pass
            except dist.DistBackendError as error:  # of what `look` did, not of the store
                self._give_up(str(error))
            except RuntimeError as error:
                self._give_up(_silent(error))
            if time.monotonic() - self._since > self._timeout + _GRACE_SECONDS:
                self._late()

    def _place(self) -> Whereabouts:
        return place_here()

    def _tell(self) -> None:
        place = self._place()
        verb = "waits in" if place.waiting else "runs"
        self._store.set(f"beat {self._rank}", f"{time.monotonic_ns()} {self._phase}, {verb} {place.what}")

    def _told(self) -> str:
        """The message of a rank about to end, with its reason; empty if there is none."""
        return self._store.get("failed").decode(errors="replace") if self._store.check(["failed"]) else ""

    def _late(self) -> None:
        text = f"{self._phase} has taken {self._timeout:.0f} s, in {self._place().what}"
        found = self.explain()
        self.failed(text)
        self._leave(f"{text}. {found}")

    def _give_up(self, reason: str) -> None:
        """The main thread should fail by itself, since a peer is gone; if it does not, ends the process."""
        place = self._place()
        if not self._closing.wait(_GRACE_SECONDS):
            self._leave(f"{self._phase}, in {place.what}: {reason}")

    def _leave(self, reason: str) -> None:
        if not self._closing.is_set():
            self._end(reason)

    def _beats(self) -> list[str]:
        return [self._beat(rank) for rank in range(self._ranks)]

    def _beat(self, rank: int) -> str:
        key = f"beat {rank}"
        beat: bytes = self._store.get(key) if self._store.check([key]) else b"0 never heard of"
        return beat.decode(errors="replace")

    def _findings(self, before: list[str], now: list[str]) -> Iterator[str]:
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            where = new.partition(" ")[2]
            if rank == self._rank:
                continue
            if old == new:
                yield f"rank {rank} is stopped or dead; it was last seen in {where}"
            else:
                yield f"rank {rank} lives: {where}"


def _silent(error: Exception) -> str:
    why = str(error).splitlines()[0]
    return f"the store that brought the ranks together, of rank 0 or of its launcher, does not answer: {why}"
