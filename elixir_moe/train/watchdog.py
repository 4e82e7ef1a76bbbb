"""A thread beside the training of each rank: is it waiting, for whom, and does anybody still live there?

Owns what a rank tells the others of itself (a beat a second, where it is, and its end), the share of time it waits, and
the end of a rank whose peers are gone. Talks through the store that brought the ranks together, never through a process
group: those are what may hang.

Where a rank is, is read off the stack of its main thread, so nothing needs to announce itself and nothing is slower for
being watched. A stopped or dead process stops beating; a rank in an endless loop beats, and its place gives it away.
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

from elixir_moe.distributed.waits import Whereabouts, place_of
from elixir_moe.errors import ElixirError

_SAMPLE_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 2.0
"""How long a rank that should meet an error by itself is given for it."""
_ANSWER_SECONDS = 2.0
"""How long the store is waited for."""
_BROKEN = ("gloo", "onnection", "Timed out", "timed out", "Broken pipe", "Socket")
T = TypeVar("T")


def is_broken_collective(error: BaseException) -> bool:
    """Whether a collective failed, its peers being gone or late: as torch raises it, or as the library passes it on."""
    if isinstance(error, ElixirError):
        return error.__cause__ is not None and is_broken_collective(error.__cause__)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)
    )


class _Line:
    """Asks the store on a thread of its own: one whose host is stopped never answers."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._open: Future[Any] = Future()
        """The last one that was not answered in time; `ask` waits no more until it has been."""
        self._open.cancel()
        threading.Thread(target=self._run, name="elixir-store", daemon=True).start()

    def ask(self, question: Callable[[], T]) -> T:
        """What `question` returns or raises. Raises TimeoutError when there is no answer, and forgets the question."""
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(_ANSWER_SECONDS if self._open.done() else 0)
        except TimeoutError:
            if not answer.cancel():
                self._open = answer
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s") from None

    def close(self) -> None:
        """Nothing will be asked any more: the thread ends after what has been, if that is ever answered."""
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
    """Watches the main thread of this rank; a context.

    Args:
        store: of the process group; None in a world of one, where there is nobody to tell.
        rank: of this process.
        ranks: how many there are.
        timeout_seconds: how long a rank may stay in one phase.
        end: called on the thread when the process must end though its main thread does not return: with the reason.
    """

    def __init__(self, store: Any, rank: int, ranks: int, timeout_seconds: float, end: Callable[[str], None]) -> None:
        self.store = store
        """For others: what the main thread says and hears beside the process groups."""
        self._store: Any = None
        if store is not None and ranks > 1:  # what an earlier run in these processes has left there is not ours
            self._store = dist.PrefixStore(f"run {store.add(f'runs of rank {rank}', 1)}", store.clone())
        self._line = _Line()
        self._rank, self._ranks, self._timeout, self._end = rank, ranks, timeout_seconds, end
        self._main = threading.main_thread().ident
        self._phase, self._since = "the start", math.inf  # which is as long as the model is large
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
        """The main thread begins `phase`: the clock starts anew."""
        self._phase, self._since = phase, time.monotonic()

    def pause(self) -> None:
        """What the main thread begins may take as long as it does."""
        self._since = math.inf

    def waited(self) -> float:
        """Share of its samples since the last call in which the main thread was in a collective."""
        share = self._waits / self._samples if self._samples else 0.0
        self._samples = self._waits = 0
        return share

    def ask(self, question: Callable[[], T]) -> T:
        """What `question`, which talks to a store, returns. Raises TimeoutError when the store's host is stopped."""
        return self._line.ask(question)

    def failed(self, text: str) -> None:
        """Tells the others that this rank is about to end, and why."""
        if self._store is not None:
            told = f"rank {self._rank} has failed: {text}"
            with contextlib.suppress(RuntimeError, TimeoutError):  # the store's host may be what has failed
                self.ask(lambda: self._store.compare_set("failed", "", told))

    def explain(self) -> str:
        """After the failure of a collective: which ranks have ended, stand still, or are elsewhere. Takes 2 s."""
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
                told = self.ask(self._told)
                if told:
                    self._give_up(told)
            except TimeoutError:  # it may be slow: the clock decides
                pass
            except RuntimeError as error:
                self._give_up(_silent(error))
            if time.monotonic() - self._since > self._timeout + _GRACE_SECONDS:
                self._late()

    def _place(self) -> Whereabouts:
        return place_of(self._main)

    def _tell(self) -> None:
        place = self._place()
        verb = "waits in" if place.waiting else "runs"
        self._store.set(f"beat {self._rank}", f"{time.monotonic_ns()} {self._phase}, {verb} {place.what}")

    def _told(self) -> str:
        """Which rank has said that it is about to end, and why; nothing if none has."""
        return self._store.get("failed").decode(errors="replace") if self._store.check(["failed"]) else ""

    def _late(self) -> None:
        text = f"{self._phase} has taken {self._timeout:.0f} s, in {self._place().what}"
        found = self.explain()
        self.failed(text)
        self._leave(f"{text}. {found}")

    def _give_up(self, reason: str) -> None:
        """The main thread should fail by itself, its peer being gone; where it cannot, the process ends here."""
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
