"""How weights move to their shards: what is copied from where, and how much memory that takes."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_moe as em
from elixir_moe.chunks.packing import build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.all_ranks import Deferred
from elixir_moe.memory import slabs
from elixir_moe.memory.build import build_shards
from elixir_moe.memory.slabs import copy_on_host
from elixir_moe.wrapping.materialize import _move_in, _Sources

CUDA = torch.device("cuda")

PEAKS = """
from pathlib import Path
import torch
from torch import nn
import elixir_moe as em
from elixir_moe.wrapping import materialize
from benchmarks.memory import status_mib

em.init_mesh(device_type="cpu")
materialize._RETURN_BYTES = 64 << 20
del (freed := [torch.zeros(24 << 20, dtype=torch.uint8)])[:]  # blocks of this size are no longer mapped one by one
for count, rows in ((4, 8192), (64, 512)):
    undrawn = [nn.utils.skip_init(nn.Linear, 4096, rows, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    blocks = [block.requires_grad_(False) for block in undrawn]
    for block in blocks:
        block.weight.fill_(1)
    model = nn.Sequential(*blocks, nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[-1].parameters())
    wrap = lambda: em.wrap(model, optimizer, plan=em.Plan.offload(rcache_blocks=2, chunk_numel=4096 * 8192))
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    _, sharded = wrap()
    print(status_mib("VmHWM") - before)
    sharded.close()
"""
"""Prints the MiB that `wrap` takes at most, for 256 MiB of frozen weights in chunks of 64 MiB and two such blocks."""


def test_a_frozen_model_is_never_in_memory_twice() -> None:
    """Neither as a few large tensors nor as many small ones, which the C library would keep."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    large, small = map(float, done.stdout.split())
    blocks, chunk = 128, 64
    assert large < blocks + 1.5 * chunk
    assert small < blocks + 2.5 * chunk  # what was freed is given back chunk by chunk


class Copied(TorchDispatchMode):
    """Notes between which devices is copied, and what is made."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, str]] = []
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::copy_":
            self.copies.append((args[1].device.type, args[0].device.type))
        elif name in ("aten::zeros", "aten::empty", "aten::_to_copy"):
            self.made.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trainable", [False, True])
def test_weights_of_one_rank_go_straight_to_their_home(trainable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, from host memory to host memory; a device pass would need copies down and up."""
    monkeypatch.setattr("elixir_moe.memory.slabs.page_lock", lambda memory: True)
    monkeypatch.setattr("elixir_moe.memory.values.page_lock", lambda memory: True)
    key = ChunkGroupKey(ranks=(0,), dtype=torch.bfloat16, trainable=trainable, divisor=1)
    params = [ParamSpec(name=str(i), shape=(3, 5), key=key) for i in range(2)]
    (chunk,) = build_layout(params, 1 << 10).chunks
    (shard,) = build_shards([(chunk, Tier.HOST)], CUDA)
    weights = [nn.Parameter(torch.randn(5, 3).t()), nn.Parameter(torch.randn(3, 5))]
    sources = _Sources(None, Deferred("moved"), SimpleNamespace(device=torch.device("meta")))  # type: ignore[arg-type]
    alone: Any = SimpleNamespace(size=1, rank=0, index=0)
    with Copied() as copied:
        _move_in(chunk, dict(zip(chunk.slots, weights, strict=True)), shard, alone, sources, most=100)
    assert set(copied.copies) == {("cpu", "cpu")} and not copied.made
    assert len(copied.copies) == 2 + trainable  # a master, and the values from it
    expected = torch.zeros(chunk.numel)
    for slot, weight in zip(chunk.slots, weights, strict=True):
        expected[slot.start : slot.stop] = weight.detach().flatten()
    assert torch.equal(shard.values(), expected.bfloat16())
    if trainable:
        assert torch.equal(shard.weights().read(), expected)


@pytest.mark.parametrize("shape", [(), (2,), (7, 3), (4, 2, 3)])
def test_a_copy_on_many_threads_is_the_same(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_moe.memory.slabs._FOR_THREADS_BYTES", 0)
    monkeypatch.setattr("elixir_moe.memory.slabs.helpers", lambda threads: threads)
    values = torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    place = torch.zeros(shape, dtype=torch.bfloat16)
    copy_on_host(place, values, 3)
    assert torch.equal(place, values.bfloat16())


@pytest.mark.parametrize(("left", "refused"), [(100_000, True), (200_000, False)])
def test_frozen_chunks_need_the_memory_of_the_model_only_once(left: int, refused: bool) -> None:
    """Four chunks of 131 KB take the place of the model: what must be free are one chunk and the trained state."""
    em.init_mesh(device_type="cpu")
    layers = [nn.Linear(256, 256, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(2, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model[-1].parameters())
    plan = em.Plan.zero2()
    free = mock.patch("elixir_moe.wrapping.agreement.host_bytes_left", return_value=left)
    with free, pytest.raises(em.TierError) if refused else nullcontext():
        _, sharded = em.wrap(model, optimizer, plan=plan)
        sharded.close()


def test_memory_that_is_mapped_from_a_file_is_not_counted_as_freed(tmp_path: Path) -> None:
    """The system counts it as free already."""
    (tmp_path / "proc/self").mkdir(parents=True)
    status = tmp_path / "proc/self/status"
    assert slabs._anonymous_bytes(tmp_path) == 0
    status.write_text("Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t     12 kB\nRssFile:\t 800 kB\n")
    assert slabs._anonymous_bytes(tmp_path) == 12 * 1024
    frozen, trained = nn.Parameter(torch.ones(8), requires_grad=False), nn.Parameter(torch.ones(4))
    with mock.patch.object(slabs, "_anonymous_bytes", return_value=20):
        assert slabs.bytes_freed([frozen, trained]) == 20
    assert slabs.bytes_freed([frozen, trained]) == 32
    assert slabs.host_bytes_for_plan([frozen, trained], 2 * 64) == 2 * 64 + 32
    assert slabs.host_bytes_for_plan([frozen, trained], 2 * 63) == 2 * 63, "the trained state might not fit before"
