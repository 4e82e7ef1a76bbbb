"""Plans that say bytes, or leave a number open: what they come to, that they are exact, and what they refuse."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.ledger import footprint
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec, Precision
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.chunks.resolve import resolve_counts
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D = 64
LAYERS = 16
CHUNK = D * D
ONE_CHUNK_GATHERED = 4 * CHUNK
"""Bytes of a block."""


class Deep(nn.Module):
    """A chunk for each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def trained(plan: em.Plan | None) -> tuple[em.Plan, dict[str, Any]]:
    """(rank) Some steps: the plan that ran, and the weights, which are those of plain torch without a plan."""
    model: nn.Module = Deep()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # which keeps rounding small
    found = em.Plan.ddp()
    if plan is not None:
        model, optimizer = em.wrap(model, optimizer, plan=plan)
        found = em.inspect(model).plan
    rows = torch.randn(3, 4, D, generator=torch.Generator().manual_seed(1))
    world, rank = (dist.get_world_size(), dist.get_rank()) if plan is not None else (1, 0)
    for batch in rows:
        model(batch.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if plan is None else em.full_state_dict(model, all_ranks=True)
    if plan is not None:
        assert em.inspect(model).held_bytes["device"] <= em.inspect(model).footprint.device_bytes
        optimizer.close()
    return found, {name: value.clone() for name, value in state.items()}


def refusal(plan: em.Plan) -> tuple[str, str]:
    """(rank) What `wrap` says to it."""
    model = Deep()
    with pytest.raises(em.ElixirError) as told:
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    return type(told.value).__name__, str(told.value)


def state_bytes(world: int, arrays: int = 4) -> int:
    """Bytes of a chunk's state on one of `world` ranks: compute shard, master shard and two moments."""
    return 4 * arrays * CHUNK // world


PLANS: dict[str, tuple[em.Plan, dict[str, Any]]] = {
    "zero3 alone": (em.Plan.zero3(chunk_numel=CHUNK), {"rcache_blocks": 4, "offloaded": False}),
    "offload alone": (em.Plan.offload(chunk_numel=CHUNK), {"rcache_blocks": 4, "device_chunks": 0, "disk_chunks": 0}),
    "an rCache in bytes": (
        em.Plan.zero3(rcache=5 * ONE_CHUNK_GATHERED + 7, chunk_numel=CHUNK),
        {"rcache_blocks": 5, "rcache_bytes": None},
    ),
    "an rCache of any size": (em.Plan.zero3(rcache="1 GiB", chunk_numel=CHUNK), {"rcache_blocks": LAYERS + 1}),
    "all blocks": (em.Plan.offload(rcache_blocks="all", chunk_numel=CHUNK), {"rcache_blocks": "all"}),
    "two chunks on the device": (
        em.Plan.offload(device=2 * state_bytes(2) + 1, chunk_numel=CHUNK),
        {"device_chunks": 2, "device_bytes": None},
    ),
    "all chunks on the device": (em.Plan.offload(device="1 GiB", chunk_numel=CHUNK), {"device_chunks": LAYERS}),
}


@pytest.mark.parametrize("name", PLANS)
def test_sizes_become_counts(name: str, ranks: Ranks) -> None:
    plan, wanted = PLANS[name]
    _, expected = trained(None)
    for found, state in ranks(2).run(trained, plan):
        assert {key: getattr(found, key) for key in wanted} == wanted
        assert em.Plan.from_json(found.to_json()) == found
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=2e-6)  # sums of two halves, three steps of Adam


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_what_host_memory_does_not_take_is_on_disk(share: float, ranks: Ranks, tmp_path: Path) -> None:
    """The buffers through which the disk is read are in host memory too."""
    from elixir_moe.chunks.ledger import DISK_THREADS, record_bytes

    whole = LAYERS * state_bytes(2)
    buffers = DISK_THREADS * record_bytes(CHUNK // 2, Precision().arrays(2))
    allowed = int(share * whole)
    plan = em.Plan.offload(host=allowed, disk=tmp_path, chunk_numel=CHUNK)
    _, expected = trained(None)
    saved = 3 * 4 * CHUNK // 2
    on_disk = 0 if share == 1 else -(-(whole - allowed + buffers) // saved)
    for found, state in ranks(2).run(trained, plan):
        assert (found.disk_chunks, found.host_bytes) == (on_disk, None)
        assert found.disk == (str(tmp_path) if on_disk else None)
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=2e-6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("async_sums", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_no_fewer_chunks_on_disk_would_fit(whole: bool, async_sums: bool) -> None:
    """`resolve_counts` against the footprint of every number of chunks on disk; `async_sums`: as with a GPU."""
    kept = ChunkGroupKey(ranks=(0, 1), dtype=torch.bfloat16, trainable=True, divisor=2)
    numel = 1 << 21
    params = [
        ParamSpec(name=str(i), shape=(numel,), key=replace(kept, trainable=i % 5 > 0, divisor=2)) for i in range(40)
    ]
    plan = em.Plan.offload(rcache_blocks=2, disk="/tmp", chunk_numel=numel, values_on_disk=whole)
    sizes = []
    for count in range(len(params) + 1):
        tried = replace(plan, disk_chunks=count, values_on_disk=whole) if count else em.Plan.offload(chunk_numel=numel)
        tried = replace(tried, rcache_blocks=2)
        sizes.append(footprint(tried, tried.layout(params), over_gloo=True, async_sums=async_sums).host_bytes)
    assert len(set(sizes)) > len(params) // 2
    for allowed in [*sizes, *(size - 1 for size in sizes)]:
        fits = [count for count, nbytes in enumerate(sizes) if nbytes <= allowed]
        asked = partial(resolve_counts, moments=2, free_host_bytes=allowed, async_sums=async_sums)
        if fits:
            assert asked(plan, params, StepOrder((), (), {})).disk_chunks == fits[0]
        else:
            with pytest.raises(em.TierError, match="are needed even with chunks on disk"):
                asked(plan, params, StepOrder((), (), {}))


def test_free_host_memory_is_enough_for_little(ranks: Ranks, tmp_path: Path) -> None:
    for found, _ in ranks(2).run(trained, em.Plan.offload(disk=tmp_path, chunk_numel=CHUNK)):
        assert (found.disk_chunks, found.disk) == (0, None)


def test_what_is_too_small_says_what_it_takes(ranks: Ranks, tmp_path: Path) -> None:
    for kind, message in ranks(2).run(refusal, em.Plan.zero3(rcache=ONE_CHUNK_GATHERED - 1, chunk_numel=CHUNK)):
        assert kind == "PlanError" and "needs 1 blocks of 16.00 KiB at once: give at least 16.00 KiB" in message
    for kind, message in ranks(2).run(refusal, em.Plan.offload(host=100, disk=tmp_path, chunk_numel=CHUNK)):
        assert kind == "TierError" and "are needed even with chunks on disk" in message


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (12, 12),
        ("0", 0),
        ("7 B", 7),
        ("12 B", 12),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("3 MiB", 3 << 20),
        ("1 TB", 10**12),
    ],
)
def test_sizes_as_texts(size: int | str, nbytes: int) -> None:
    assert em.Plan.zero3(rcache=size).rcache_bytes == nbytes


@pytest.mark.parametrize("size", ["7", " 2.5 ", "20000000000"])
def test_a_text_without_a_unit_is_asked_back(size: str) -> None:
    number = size.strip()
    with pytest.raises(em.PlanError, match=f"has no unit.*'{number} GiB'"):
        em.Plan.offload(device=size)


@pytest.mark.parametrize(
    "size", [-1, 1.5, True, "much", "1 GiB 2", "-3 MiB", "1e3 MiB", "GiB", b"1 B", [], "9" * 400 + " GiB"]
)
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(em.PlanError, match="expected bytes"):
        em.Plan.offload(device=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rcache": "1 GiB", "rcache_blocks": 3}, "rcache=1.00 GiB and rcache_blocks=3: give one of them"),
        ({"rcache": "1 GiB", "rcache_blocks": "all"}, "rcache_blocks=all: give one of them"),
        ({"device": "1 GiB", "device_chunks": 3}, "device=1.00 GiB and device_chunks=3: give one of them"),
        ({"rcache_blocks": "most"}, "rcache_blocks='most': expected a whole number of at least 1 or all or None"),
    ],
)
def test_sizes_and_counts_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(em.PlanError, match=message):
        em.Plan.offload(**options)


def test_a_settled_plan_is_taken_as_it_is(ranks: Ranks) -> None:
    (found, _), _ = ranks(2).run(trained, em.Plan.offload(device="33 kB", chunk_numel=CHUNK))
    for again, _ in ranks(2).run(trained, replace(found)):
        assert again == found
