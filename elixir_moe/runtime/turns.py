"""Forwards that take turns: one thread for each micro-batch, of which one runs at a time.

Owns the threads, which live on from step to step, and whose turn it is. Knows nothing of models:
`elixir_moe.accumulate` says what the threads run, and `hooks` where a turn is handed on.

Threads, since each then has torch's modes for itself: gradients, autocast, saved-tensor hooks, checkpointed regions.
Whoever holds the turn hands it on when its forward ends, however it ends. After a first error, each other forward ends
where it gets its turn: with `Ended`, which no ``except Exception`` catches. Only the caller's thread gets the user's
interrupts, and it waits for nothing but the end of threads, so nothing can wait forever.
"""

import contextvars
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Ended(BaseException):
    """Raised in a forward that is given up because another one has failed."""


class Threads:
    """Threads that run one job after another. They end with `end`, or when nothing refers to this object any more.

    They are kept from one step to the next, for torch keeps things for each thread: the plans of cuDNN's attention,
    which take 60 ms to make, and the number of the next node of autograd.
    """

    def __init__(self) -> None:
        self._jobs: list[SimpleQueue[Callable[[], None] | None]] = []
        self._process = os.getpid()

    def start(self, number: int, job: Callable[[], None]) -> None:
        """Runs `job`, which must not raise, on thread `number` when its earlier jobs have ended."""
        if self._process != os.getpid():  # a forked process has no threads but one
            self._jobs, self._process = [], os.getpid()
        while len(self._jobs) <= number:
            jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            name = f"micro-batch {len(self._jobs)}"
            threading.Thread(target=_serve, args=(jobs,), name=name, daemon=True).start()
            weakref.finalize(self, jobs.put, None)
            self._jobs.append(jobs)
        self._jobs[number].put(job)

    def end(self) -> None:
        """Ends all threads when their jobs have ended; `start` makes new ones."""
        ended, self._jobs = self._jobs, []
        for jobs in ended:
            jobs.put(None)


def _serve(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # whatever it refers to is not kept until the next one


class Turns(Generic[T]):
    """The forwards of several micro-batches, which take turns."""

    def __init__(
        self,
        threads: Threads,
        forwards: Sequence[Callable[[], T]],
        resume: Callable[[int], None],
        suspend: Callable[[int], None],
    ) -> None:
        """`resume` is called with the number of a forward whenever its turn begins, `suspend` when it ends.

        Both run on the forward's thread.
        """
        self._threads, self._forwards = threads, forwards
        self._resume, self._suspend = resume, suspend
        self._wakes: list[SimpleQueue[None]] = [SimpleQueue() for _ in forwards]
        """One for each thread, which looks at `_turn` whenever something is put into it."""
        self._lock = threading.Lock()
        """Guards `_turn` and `_running`; the caller's thread never takes it."""
        self._turn = -1
        self._running = set(range(len(forwards)))
        self._ending = False
        self._caller = threading.get_ident()
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._numbers: dict[int, int] = {}
        """{thread: its forward}."""
        self._ended: list[threading.Event] = []
        """One for each forward that was started, set when it has done all its work."""

    def run(self) -> list[T]:
        """Runs all forwards; returns their results. Raises the first error of any, after all have ended."""
        for number, forward in enumerate(self._forwards):
            ended = threading.Event()
            self._threads.start(number, partial(contextvars.copy_context().run, self._run, number, forward, ended))
            self._ended.append(ended)  # one that an interrupt keeps from here ends by itself: it gets no turn
        self._turn = 0
        self._wakes[0].put(None)
        self._join()
        if self._errors:
            raise self._errors[0]
        return [self._results[number] for number in range(len(self._forwards))]

    def end(self) -> None:
        """Gives up all forwards that have not ended; returns when their threads have.

        The one whose turn it is runs on until it would hand its turn on.
        """
        assert not self.is_mine(), "`Phase.require` refuses this"
        self._ending = True
        for wake in self._wakes:
            wake.put(None)
        self._join()

    def _join(self) -> None:
        """Waits for the end of all forwards that were started."""
        for ended in self._ended:
            ended.wait()

    def is_mine(self) -> bool:
        """Whether the caller runs in one of the forwards."""
        return threading.get_ident() in self._numbers

    def is_callers(self) -> bool:
        """Whether the caller runs on the thread that waits for the forwards, which an interrupt may have stopped."""
        return threading.get_ident() == self._caller

    def hand_on(self) -> None:
        """Hands the caller's turn on; returns when it has come round again."""
        number = self._numbers[threading.get_ident()]
        if self._ending:
            raise Ended
        with self._lock:
            following = self._following(number)
            if following == number:
                return
            self._suspend(number)
            self._turn = following
        self._wakes[following].put(None)
        self._wait(number)

    def _following(self, number: int) -> int:
        """The forward whose turn comes after that of forward `number`."""
        return min((n for n in self._running if n > number), default=min(self._running, default=-1))

    def _wait(self, number: int) -> None:
        """Waits for the turn of a forward that has begun."""
        while self._turn != number:
            self._wakes[number].get()
        if self._ending:
            raise Ended
        self._resume(number)

    def _run(self, number: int, forward: Callable[[], T], ended: threading.Event) -> None:
        self._numbers[threading.get_ident()] = number
        try:
            while self._turn != number and not self._ending:  # nothing has begun, so nothing need end in order
                self._wakes[number].get()
            if not self._ending:
                self._resume(number)
                self._results[number] = forward()
                self._suspend(number)
        except Ended:
            pass
        except BaseException as error:
            # A suspended checkpoint in a frame would remove its hooks from the thread that ends it: that is this one.
            traceback.clear_frames(error.__traceback__)
            self._errors.append(error)
            self._ending = True
        finally:
            self._end(number)
            ended.set()

    def _end(self, number: int) -> None:
        with self._lock:
            self._running.discard(number)
            following = self._following(number) if self._turn == number else -1
            if following >= 0:
                self._turn = following
        if following >= 0:
            self._wakes[following].put(None)
        self._numbers.pop(threading.get_ident())
