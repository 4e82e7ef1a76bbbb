"""How long a rank is busy although all ranks wait."""

import threading
from types import SimpleNamespace

import pytest
import torch

from elixir_moe.distributed.collectives import Work
from elixir_moe.distributed.waits import BusyTime, Wait

CUDA = torch.device("cuda", 0)


class Stream:
    """A stream whose clock stands where the work that was issued to it will have ended; in milliseconds."""

    def __init__(self) -> None:
        self.now = self.known = 0.0
        """`known`: up to then, the host has waited for it."""

    def wait_event(self, event: "Event") -> None:
        self.now = max(self.now, event.time)

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    device = CUDA


class Event:
    """A moment on a stream."""

    time: float
    stream: Stream

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream) -> None:
        self.time, self.stream = stream.now, stream

    def elapsed_time(self, other: "Event") -> float:
        assert other.time <= other.stream.known
        return other.time - self.time

    def synchronize(self) -> None:
        self.stream.known = self.time


class Gpu:
    """One rank's GPU in the place of torch.cuda's: a stream for compute and one for gathers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute, self.gather = Stream(), Stream()
        self.current = self.compute
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: self.current)

    def step(self, busy: float, slowest: float) -> float | None:
        """The busy seconds of a step of so many milliseconds of compute, whose gather the slowest rank ends late."""
        timer = BusyTime(CUDA)
        timer.start()
        self.compute.now += busy
        self.gather.now = max(self.gather.now, slowest)
        work = Work()
        work.mark(self.gather)  # type: ignore[arg-type]
        work.wait()  # the host goes on; it sees the wait in `.item()` alone, which no sample of its stack can tell
        return timer.stop()


def test_a_slow_rank_is_found_although_every_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks take 3 s for the step, and only one of them works for so long."""
    assert [Gpu(monkeypatch).step(busy, slowest=3000.0) for busy in (1000.0, 3000.0, 1500.0)] == [1.0, 3.0, 1.5]


def test_a_wait_of_the_host_counts_as_far_as_the_gpu_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the agreement at the beginning of a backward, or an exchange of tokens."""
    gpu = Gpu(monkeypatch)
    timer = BusyTime(CUDA)
    timer.start()
    gpu.compute.now += 1000
    with Wait("the agreement"):
        gpu.compute.now += 500  # the stream has run dry, and so has the event behind it
    gpu.current = gpu.gather
    with Wait("a fetch"):  # on another stream, beside compute
        gpu.gather.now += 7000
    gpu.current = gpu.compute
    assert timer.stop() == 1.0
    with Wait("the next step"):
        gpu.compute.now += 100


def test_on_a_cpu_the_waits_of_the_thread_that_works_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    timer = BusyTime(torch.device("cpu"))

    def wait(seconds: float) -> None:
        with Wait("anything"):
            clock.now += seconds

    def save() -> None:
        wait(7.0)

    timer.start()
    clock.now += 1
    wait(5.0)
    saving = threading.Thread(target=save)
    saving.start()
    saving.join()
    assert timer.stop() == 8.0
    wait(1.0)
