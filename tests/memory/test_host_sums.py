"""Sums in host memory beside backward: their order, their waits and their errors. `tests.lanes` finds races."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch

from elixir_moe.chunks.ledger import SUMS_IN_FLIGHT, footprint
from elixir_moe.chunks.plan import Plan
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.shard_state import ShardState
from tests.chunks.test_plan import tiny_layout
from tests.memory.test_shards import CPU, NUMEL, gradient, shard_of

DTYPES = (torch.bfloat16, torch.float32)


class Copy:
    """Stands for the event of a copy, which ends when the test says so."""

    ended = threading.Event()
    error: BaseException | None = None

    def __init__(self, device: torch.device, *, blocking: bool) -> None:
        assert blocking, "the thread sleeps while it waits"

    def synchronize(self) -> None:
        """As of torch."""
        Copy.ended.wait()
        error, Copy.error = Copy.error, None
        if error is not None:
            raise error


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostSums]:
    """On a device whose copies have ended, until ``Copy.ended.clear()``."""
    monkeypatch.setattr("elixir_moe.memory.host_sums.recorded_event", Copy)
    Copy.ended.set()
    made = HostSums(4 * NUMEL, CPU)
    yield made
    Copy.ended.set()
    made.close()


def add_beside(shard: ShardState, sums: HostSums) -> None:
    """From now on the shard's gradients are added beside backward."""
    assert shard._sum is not None
    shard._sum.host_sums = sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_have_the_bits_of_sums_in_turn(dtype: torch.dtype, threads: int, sums: HostSums) -> None:
    sums._parts = threads
    beside, in_turn = shard_of(dtype), shard_of(dtype)
    add_beside(beside, sums)
    for step in range(3):
        for micro in range(2 * SUMS_IN_FLIGHT):
            for shard in (beside, in_turn):
                shard.add_gradient(gradient(dtype, 10 * step + micro))
        sums.finish()
        assert torch.equal(beside.gradient(), in_turn.gradient())
        for shard in (beside, in_turn):
            shard.clear_gradient()


def test_only_a_full_ring_blocks(sums: HostSums, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, full = sums._finish_oldest, []

    def finish_oldest() -> None:
        full.append(True)
        Copy.ended.set()
        finish()

    monkeypatch.setattr(sums, "_finish_oldest", finish_oldest)
    Copy.ended.clear()
    total = torch.zeros(NUMEL)
    for micro in range(SUMS_IN_FLIGHT):
        sums.add(total, torch.ones(NUMEL), first=micro == 0, after=None)
    assert not full and not total.any()
    assert sums.nbytes == SUMS_IN_FLIGHT * 4 * NUMEL
    sums.add(total, torch.ones(NUMEL), first=False, after=None)
    assert full
    sums.finish()
    assert (total == SUMS_IN_FLIGHT + 1).all()


class Awaited(Future[None]):
    """The result of an addition; notes who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        self.asked.append("result")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked.append("exception")
        return super().exception(timeout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use", ["gradient", "clear_gradient", "updated"])
def test_whoever_uses_a_sum_waits(dtype: torch.dtype, use: str) -> None:
    shard, awaited = shard_of(dtype), Awaited()
    for seed in range(2):
        shard.add_gradient(gradient(dtype, seed))
    shard._gate.adding = awaited
    getattr(shard, use)()
    assert awaited.asked


def test_values_keep_their_place_and_wait_for_no_sum(sums: HostSums) -> None:
    shard = shard_of(torch.bfloat16)
    add_beside(shard, sums)
    for seed in range(2):
        shard.add_gradient(gradient(torch.bfloat16, seed))
    shard.updated()
    Copy.ended.clear()
    shard.add_gradient(gradient(torch.bfloat16, 2))
    assert shard.values() is shard.storage and not shard.gradient_moves
    adding = shard._gate.adding
    assert adding is not None and not adding.done()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_addition_that_fails_is_told_until_the_gradient_is_cleared(dtype: torch.dtype, sums: HostSums) -> None:
    shard = shard_of(dtype)
    add_beside(shard, sums)
    shard.add_gradient(gradient(dtype, 0))
    Copy.error = RuntimeError("the device is gone")
    for seed in (1, 2):
        shard.add_gradient(gradient(dtype, seed))
    with pytest.raises(RuntimeError, match="the device is gone"):
        sums.finish()
    with pytest.raises(RuntimeError, match="the device is gone"):
        shard.gradient()
    sums.finish()  # as `zero_grad` does: the second addition, to a sum that lacks the first, is not told of again
    shard.clear_gradient()
    shard.add_gradient(gradient(dtype, 3))
    sums.finish()
    assert torch.equal(shard.gradient().float(), gradient(dtype, 3).float())


def test_the_buffers_are_counted() -> None:
    layout, plan = tiny_layout(), Plan.offload(rcache_blocks=2, device_chunks=1)
    with_gpu, without = (footprint(plan, layout, over_gloo=True, async_sums=async_sums) for async_sums in (True, False))
    more = with_gpu.accumulator_bytes["host"] - without.accumulator_bytes["host"]
    assert more == SUMS_IN_FLIGHT * 32 * 2 == 3 * 64
    assert footprint(Plan.zero2(), layout, over_gloo=False).accumulator_bytes["host"] == 0


def test_gradients_on_their_way_are_in_buffers_of_their_own(sums: HostSums) -> None:
    Copy.ended.clear()
    seen: list[float] = []
    for number in range(SUMS_IN_FLIGHT):
        sums.submit(torch.full((NUMEL,), float(number)), lambda copy: seen.append(copy[-1].item()), after=None)
    Copy.ended.set()
    sums.finish()
    assert seen == [float(number) for number in range(SUMS_IN_FLIGHT)]


def test_an_addition_that_an_interrupt_kept_from_being_noted_is_waited_for(sums: HostSums) -> None:
    Copy.ended.clear()
    seen: list[float] = []
    sums.submit(torch.ones(NUMEL), lambda copy: seen.append(copy[-1].item()), after=None)
    sums._running.clear()
    submit = sums._thread.submit

    def told(*task: Any) -> "Future[Any]":
        Copy.ended.set()  # whoever waits has asked
        return submit(*task)

    with mock.patch.object(sums._thread, "submit", told):
        sums.finish()
    assert seen == [1.0]


class Interrupted(Future[None]):
    """Whoever waits for it is interrupted."""

    def result(self, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    def exception(self, timeout: float | None = None) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_buffers_are_awaited_forgets_no_addition(sums: HostSums) -> None:
    sums.submit(torch.ones(NUMEL), lambda copy: None, after=None)
    sums._running.extend(Interrupted() for _ in range(SUMS_IN_FLIGHT))
    sums._running.popleft().result()
    with pytest.raises(KeyboardInterrupt):
        sums.submit(torch.ones(NUMEL), lambda copy: None, after=None)
    assert len(sums._running) == SUMS_IN_FLIGHT
