"""What counts as out of memory, how ranks that wait on their GPUs learn of it, and what is tried next."""

import errno
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elixir_moe.distributed import collectives
from elixir_moe.distributed.collectives import abort_nccl
from elixir_moe.errors import ElixirError, TierError
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_moe.memory.slabs import Slab, Tier
from elixir_tools import settings
from elixir_tools.train import memory
from elixir_tools.train.config import TrainConfig

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


def caused(error: ElixirError, cause: BaseException) -> ElixirError:
    error.__cause__ = cause
    return error


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        dist.DistBackendError(NCCL),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        caused(ElixirError("the making of process groups failed"), dist.DistBackendError(NCCL)),
    ],
    ids=str,
)
def test_what_is_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistNetworkError("The client socket has timed out after 60000ms"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. Workers are out of shared memory."),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory"),
        TierError("out of memory even with 1 micro-batch"),
        caused(ElixirError("a gather failed: out of memory, says its text"), RuntimeError("Connection closed by peer")),
    ],
    ids=str,
)
def test_what_is_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_a_slab_names_only_what_memory_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another failure of the device keeps its own text."""

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        Slab(8, torch.float32, Tier.DEVICE, torch.device("cpu"))


class Gloo:
    """A backend that is left alone: it has none of NCCL's functions."""

    def name(self) -> str:
        return "gloo"


class Nccl:
    """A backend as NCCL's, which notes what is asked of it."""

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def name(self) -> str:
        return "nccl"

    def _group_start(self) -> None:
        self._log.append("start")

    def _group_end(self) -> None:
        self._log.append("end")

    def abort(self) -> None:
        self._log.append(f"abort {self._number}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked of two process groups on NCCL, each with a gloo backend beside it."""
    said: list[str] = []
    groups = []
    for number in range(2):
        served = {"cpu": Gloo(), "cuda": Nccl(said, number)}
        groups.append(SimpleNamespace(_device_types=("cpu", "cuda"), _get_backend=served.__getitem__))
    monkeypatch.setattr(collectives.dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    yield said


def test_all_collectives_are_aborted_at_once(log: list[str]) -> None:
    abort_nccl()
    assert log == ["start", "abort 0", "abort 1", "end"]


@pytest.mark.fault(20)
def test_a_rank_that_hangs_on_its_gpu_is_freed_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits, as in `.item()`, until the thread has aborted what its GPU waits for.

    Once for each message, so that the process groups made afterwards live while it still stands.
    """
    freed, seen, store = threading.Semaphore(0), threading.Semaphore(0), dist.HashStore()

    def look(own: dist.Store) -> Any:
        seen.release()
        return memory_who(own)

    memory_who = memory.who
    monkeypatch.setattr(memory, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(memory, "who", look)
    monkeypatch.setattr(memory, "abort_nccl", freed.release)
    with memory.aborting(store):
        for _ in range(2):
            memory.say_so(store, 1, redoable=True)
            assert freed.acquire(timeout=60)
            looks(seen, 3)
            assert not freed.acquire(blocking=False)
            store.set(memory._KEY, "")
            looks(seen, 3)


def looks(seen: threading.Semaphore, number: int) -> None:
    """Waits for `number` further looks into the store."""
    while seen.acquire(blocking=False):
        pass
    for _ in range(number):
        assert seen.acquire(timeout=60)


class Stopped(dist.HashStore):  # type: ignore[misc]  # torch's stubs forget it
    """A store whose host stands still: it answers once the test is over."""

    over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.over.wait(60) and super().check(keys)


def test_a_store_that_never_answers_holds_no_rank_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ANSWER_SECONDS", 0.001)
    store = Stopped()
    assert memory.ask(lambda: memory.who(store)) is None
    store.over.set()


def test_groups_are_aborted_before_they_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroyed alone, they would wait for what is under way."""
    order: list[str] = []
    monkeypatch.setattr(memory, "abort_nccl", lambda: order.append("abort"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("destroy"))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: order.append("init"))
    for name, value in (("get_backend_config", "nccl"), ("get_rank", 0), ("get_world_size", 2), ("new_group", None)):
        monkeypatch.setattr(dist, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(memory, "world_timeout", lambda: collectives.timedelta(seconds=60))
    store = dist.HashStore()
    store.set("here 1 1", "")
    memory.regroup(store, 1)
    assert order == ["abort", "destroy", "init"]


def test_a_smaller_setting_validates_the_same_rows() -> None:
    """In more batches, each of which has fewer rows."""
    run = {"out": "x", "global_batch": 8, "accumulation": 2, "eval_batches": 3}
    config = settings.build(TrainConfig, {"model": {}, "plan": {"kind": "ddp"}, "run": run})
    found: Any = SimpleNamespace(plan=SimpleNamespace(blocks=lambda layout: 1), layout=None, schedule=None)
    scarcity = memory.Scarcity(config)
    for batches, rows in ((6, 2), (12, 1)):
        next_one = scarcity.next(found, 8, 2)
        assert (next_one.run.eval_batches, next_one.micro_batch) == (batches, rows)
