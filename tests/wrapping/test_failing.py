"""A `wrap` that fails on one rank fails on all, frees all that it made, and says what the model is then."""

import gc
import os
import re
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.memory.blocks import Block
from elixir_moe.memory.disk import DiskFile
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.optim import optimizer as optimizer_module
from elixir_moe.optim import shard_update
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.wrapping.agreement import check_device_memory
from tests.runtime.test_habits import D, Net, adamw, mean_square
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def when(makes: Any, fails: Callable[..., bool]) -> Callable[..., Any]:
    """`makes`, which is out of memory where the library calls it and `fails`."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("elixir_moe.") and fails(*args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return makes(*args, **kwargs)

    return make


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def with_dtype(dtype: torch.dtype) -> Callable[..., bool]:
    return lambda *args, **kwargs: kwargs.get("dtype") == dtype


_fill = ShardState.fill


def fill(shard: ShardState, values: torch.Tensor, start: int = 0) -> None:
    if shard.spec.index == 2:
        raise OSError(5, "Input/output error")
    _fill(shard, values, start)


def of_integers(*args: Any, **_: Any) -> bool:
    return args[0].dtype == torch.int64


IN_TIME = {
    "shards": (torch, "empty", when(torch.empty, with_dtype(torch.bfloat16)), "host memory: cannot allocate .* shards"),
    "blocks": (torch, "zeros", when(torch.zeros, with_dtype(torch.uint8)), "device memory: cannot allocate .* a block"),
    "passage": (
        torch,
        "empty",
        when(torch.empty, with_dtype(torch.uint8)),
        "cannot allocate .* for weights on their way",
    ),
    "buffers": (torch.Tensor, "to", when(torch.Tensor.to, of_integers), "cannot allocate 24 B for buffer 'counts'"),
}
"""Failures before the first weight moves: (owner, name, what it is replaced by, message)."""
TOO_LATE = {
    "disk": (ShardState, "fill", fill, "Input/output error"),
    "moments": (shard_update, "_zeros", out_of_memory, "cannot allocate .* for the moments"),
    "threads": (optimizer_module, "ThreadPoolExecutor", out_of_memory, "out of memory"),
}
"""The same after it."""


def held() -> dict[str, Any]:
    """What a wrap that has failed must have given back; `wait` for other ranks has a thread for the process."""
    gc.collect()
    kinds = (ShardState, Block, Chunk, DiskFile, ControlGroups)
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("elixir-") and "waits" not in t.name],
        "objects": [type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds)],
    }


def has_more(after: Any, before: Any) -> bool:
    """Whether something was added: an earlier wrap may end what it left to threads meanwhile."""
    return bool(Counter(after) - Counter(before)) if isinstance(after, list) else after > before


def wrap(model: nn.Module) -> Any:
    plan = em.Plan.offload(rcache_blocks=4, chunk_numel=600, disk_chunks=1, disk=tempfile.gettempdir())
    return em.wrap(model, adamw(model), plan=plan, compute_dtype=torch.bfloat16)


def built(sharded: bool) -> nn.Module:
    torch.manual_seed(3)
    with em.sharded_init() if sharded else nullcontext():
        model = Net()
        model.register_buffer("counts", torch.arange(3))
    return model


def fail(name: str, sharded: bool) -> dict[str, Any]:
    """What a wrap that fails on the last rank says and leaves, and how another one ends."""
    first, optimizer = wrap(built(False))  # what only a first wrap makes is there
    optimizer.close()
    del first, optimizer
    model, before, after = built(sharded), held(), None
    owner, attribute, broken, _ = (IN_TIME | TOO_LATE)[name]
    with ExitStack() as stack:
        if dist.get_rank() == dist.get_world_size() - 1:
            stack.enter_context(mock.patch.object(owner, attribute, broken))
        try:
            wrap(model)
        except em.TierError as error:
            caught, after = (type(error).__name__, str(error)), held()  # though the error is still there
        except em.ElixirError as error:
            caught = type(error).__name__, str(error)
    after = after or held()
    left = {key: (before[key], after[key]) for key in before if has_more(after[key], before[key])}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    hooks += sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    try:
        found, wanted = trained(model), trained(built(False))
        again = [name for name, value in wanted.items() if not torch.equal(value, found[name])]
    except em.LayoutError as error:
        again = [str(error)]
    return {"error": caught, "left": left, "hooks": hooks, "again": again}


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    model, optimizer = wrap(model)
    mean_square(model, torch.ones(4, D, dtype=torch.bfloat16)).backward()
    optimizer.step()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.parametrize("name", with_further(IN_TIME, ("blocks", "buffers")))
def test_a_wrap_that_runs_out_of_memory_leaves_the_model_as_it_was(name: str, ranks: Ranks) -> None:
    for found in ranks(2).run(fail, name, False):
        kind, text = found["error"]
        assert kind == "TierError" and re.match(r"\[rank 1\] .*" + IN_TIME[name][3], text), text
        assert (found["left"], found["hooks"], found["again"]) == ({}, 0, [])


@pytest.mark.parametrize("name", with_further(TOO_LATE, ("moments",)))
def test_a_wrap_that_fails_when_weights_have_moved_leaves_a_model_on_meta(name: str, ranks: Ranks) -> None:
    for found in ranks(2).run(fail, name, False):
        kind, text = found["error"]
        assert kind.endswith("Error") and re.search(r"\[rank 1\] .*" + TOO_LATE[name][3], text), text
        assert (found["left"], found["hooks"]) == ({}, 0)
        assert "on the meta device" in found["again"][0]


class Rooted(torch.Tensor):
    """A buffer that cannot be moved."""

    def to(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("it stays")


def keep_a_buffer() -> dict[str, Any]:
    model = built(False)
    counts = model.counts
    if dist.get_rank() == 1:
        model.counts = counts.as_subclass(Rooted)
    with pytest.raises(em.ElixirError) as error:
        wrap(model)
    model.counts = counts
    found, wanted = trained(model), trained(built(False))
    again = [name for name, value in wanted.items() if not torch.equal(value, found[name])]
    return {"error": f"{type(error.value).__name__}: {error.value}", "again": again}


def test_a_buffer_that_cannot_be_moved_costs_nothing(ranks: Ranks) -> None:
    for found in ranks(2).run(keep_a_buffer):
        assert found["error"] == (
            "ConfigError: [rank 1] buffer 'counts', of Rooted, cannot be moved to cpu (NotImplementedError: it stays): "
            "register a plain tensor"
        )
        assert found["again"] == []


@pytest.mark.parametrize("name", with_further(TOO_LATE, ("disk",)))
def test_a_model_without_memory_can_be_wrapped_again_after_any_failure(name: str, ranks: Ranks) -> None:
    for found in ranks(2).run(fail, name, True):
        assert (found["left"], found["hooks"], found["again"]) == ({}, 0, [])


def gpu(free: int, plan: em.Plan, one_memory: bool = False) -> str:
    """The error of the check, with a stub for the GPU; nothing if the plan fits."""
    model, optimizer = em.wrap(net := Net(), adamw(net), plan=plan)
    size = em.inspect(model).footprint
    optimizer.close()
    try:
        with (
            mock.patch("elixir_moe.wrapping.agreement.device_left", return_value=("GPU-1", free)),
            mock.patch("elixir_moe.wrapping.agreement.is_one_memory", return_value=one_memory),
        ):
            check_device_memory(torch.device("cuda", 0), size, Net().parameters())
    except em.TierError as error:
        return str(error)
    return ""


def test_a_plan_is_compared_with_the_free_memory_of_the_gpu_that_ranks_share(ranks: Ranks) -> None:
    plan = em.Plan.zero3(rcache_blocks=12, chunk_numel=600)
    for text in ranks(2).run(gpu, 1000, plan):
        assert re.match(
            r"device memory: the plan needs [\d.]+ KiB for 2 ranks on GPU-1 of .*, 1000 B are left \([\d.]+ KiB", text
        ), text
    assert ranks(2).run(gpu, 1 << 30, plan) == ["", ""]


def test_in_one_memory_the_bytes_of_device_and_host_are_one_need(ranks: Ranks) -> None:
    plan = em.Plan.offload(rcache_blocks=12, chunk_numel=600)
    device, host = ranks(2).run(needed, plan)[0]
    between = 2 * device + host  # of two ranks
    assert ranks(2).run(gpu, between, plan) == ["", ""]
    for text in ranks(2).run(gpu, between, plan, True):
        assert text.startswith("device memory: the plan needs"), text
    assert ranks(2).run(gpu, 2 * (device + host), plan, True) == ["", ""]


def needed(plan: em.Plan) -> tuple[int, int]:
    """(rank) Bytes of the plan on the device and in host memory."""
    model, optimizer = em.wrap(net := Net(), adamw(net), plan=plan)
    size = em.inspect(model).footprint
    optimizer.close()
    return size.device_bytes, size.host_bytes


def warned(plan: em.Plan) -> list[str]:
    """(rank) Warnings of `wrap` on a GPU that has the memory of its host."""
    net = Net()
    with (
        mock.patch("elixir_moe.wrapping.checks.is_one_memory", return_value=True),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        _, optimizer = em.wrap(net, adamw(net), plan=plan)
    optimizer.close()
    return [text for warning in seen if "one memory" in (text := str(warning.message))]


def test_offload_within_one_memory_is_named_as_pointless(ranks: Ranks) -> None:
    (text,) = ranks(1).run(warned, em.Plan.offload(chunk_numel=600))[0]
    assert "chunks kept in host memory free nothing on the device" in text and "em.Plan.zero3()" in text
    assert ranks(1).run(warned, em.Plan.zero3(chunk_numel=600)) == [[]]


class Unready(nn.Linear):
    """Cannot say its extra state on the second rank."""

    def get_extra_state(self) -> int:
        """Raises on the second rank."""
        return 1 // (1 - dist.get_rank())

    def set_extra_state(self, state: int) -> None:
        """Takes it."""


def describe_on_one_rank() -> str:
    """(rank) The message of a wrap that fails on the second rank, behind which another works."""
    with pytest.raises(em.ElixirError) as error:
        wrap(Unready(2, 2))
    _, optimizer = wrap(nn.Linear(2, 2))
    optimizer.close()
    return str(error.value)


def test_extra_state_that_one_rank_lacks_is_told_to_all(ranks: Ranks) -> None:
    assert every("ZeroDivisionError" in said for said in ranks(2).run(describe_on_one_rank))
