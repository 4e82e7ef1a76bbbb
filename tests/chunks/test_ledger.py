"""One ledger of the bytes: against one made afresh, what wrapped models hold, and counts found by trying every one."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.ledger import Footprint, Ledger, footprint
from elixir_moe.chunks.packing import Layout, build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec, Precision
from elixir_moe.chunks.plan import Plan, Tier
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.chunks.residence import Residence
from elixir_moe.chunks.resolve import resolve_counts
from elixir_moe.names import Master, Moments
from tests.support.cases import with_further
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
FP32, BF16 = torch.float32, torch.bfloat16
WIDTH = 32

KEYS = [
    ChunkGroupKey(ranks=ranks, dtype=dtype, trainable=trainable, divisor=2, reduce_dtype=summed)
    for ranks, dtype, trainable in product([(0,), (0, 1), (0, 1, 2)], [FP32, BF16], [True, False])
    for summed in dict.fromkeys([FP32, dtype])
]
KEYS += [
    ChunkGroupKey(ranks=(0, 1), dtype=BF16, trainable=True, divisor=2, precision=Precision(master=master, moments=kept))
    for master, kept in product(get_args(Master), get_args(Moments))
]
PARAMS = st.lists(
    st.builds(
        ParamSpec,
        name=st.just("p"),
        shape=st.tuples(st.sampled_from([0, 1, 300, 1000, 5000])),
        key=st.sampled_from(KEYS),
        tied=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=10,
)
LAYOUTS = st.builds(build_layout, PARAMS, st.sampled_from([5000, 7000]), scatter=st.booleans())
OPTIONS = st.fixed_dictionaries(
    {
        "moments": st.integers(0, 3),
        "over_gloo": st.booleans(),
        "async_sums": st.sampled_from([None, True, False]),
        "values_on_disk": st.booleans(),
        "values_on_device": st.booleans(),
    }
)


def read(ledger: Ledger) -> tuple[Footprint, int, int, int]:
    return ledger.footprint(3), ledger.cached, ledger.block_bytes, ledger.arriving_bytes


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, OPTIONS, st.data())
def test_moves_come_to_a_ledger_made_afresh(layout: Layout, options: dict[str, Any], data: st.DataObject) -> None:
    chunks = range(len(layout.chunks))
    tiers = [data.draw(st.sampled_from(Tier)) for _ in chunks]
    ledger = Ledger(layout, tiers, **options)
    for index, tier in data.draw(st.lists(st.tuples(st.sampled_from(chunks), st.sampled_from(Tier)), max_size=20)):
        ledger.move(index, tier)
        tiers[index] = tier
        assert read(ledger) == read(Ledger(layout, tiers, **options))


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, st.integers(0, 10), st.integers(0, 10), st.booleans())
def test_a_placed_layout_has_the_same_bytes(layout: Layout, device: int, disk: int, over_gloo: bool) -> None:
    plan = Plan.offload(rcache_blocks="all", device_chunks=device, disk_chunks=disk)
    placed = plan.place(layout)
    ledger = Ledger.of(plan, layout, moments=2, over_gloo=over_gloo)
    assert ledger.footprint(plan.blocks(placed)) == footprint(plan, placed, over_gloo=over_gloo)
    assert (ledger.cached, ledger.block_bytes) == (len(placed.cached), placed.block_bytes)
    size = ledger.footprint()
    own = [chunk for chunk in placed.chunks if chunk.residence is Residence.RESIDENT]
    overwriting = sorted(
        (chunk.nbytes for chunk in placed.chunks if chunk.residence is Residence.IN_PLACE), reverse=True
    )
    assert size.resident_bytes == sum(chunk.nbytes for chunk in own)
    assert size.gradient_bytes == sum(chunk.nbytes for chunk in own if chunk.key.trainable) + sum(overwriting[:5])


# ------------------------------------------------------------------------------------------- what a wrapped model holds


class Net(nn.Module):
    """Layers of drawn widths, some frozen, one used twice, and experts of single ranks. All are used in every step."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        experts = em.expert_mesh(mesh_of_world(), dist.get_world_size())
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False) if rng.random() < 0.5 else None
        self.experts = em.MoE(d_model=WIDTH, d_hidden=WIDTH, num_experts=2, top_k=2, mesh=experts)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width := rng.choice([8, 40, 100])), nn.Tanh(), nn.Linear(width, WIDTH))
            for _ in range(rng.randint(1, 4))
        )
        for layer in self.layers[1:]:
            layer.requires_grad_(rng.random() < 0.7)
        em.annotate(
            self,
            {
                "experts.experts.*": em.Pattern(experts, replicate=("edp",), shard={"ep": 0}),
                "*": em.Pattern(mesh_of_world(), replicate=("dp",)),
            },
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out, aux = self.experts(x)
        x = x + out + aux.to(x.dtype)
        for layer in self.layers:
            x = x + layer(x if self.twice is None else self.twice(x))
        return x if self.twice is None else self.twice(x)


def drawn_plan(rng: random.Random, folder: str) -> Plan:
    numel = rng.choice([None, 4000, 5000, 9000])
    kind = rng.choice(["ddp", "zero2", "zero3", "offload", "offload", "offload", "offload"])
    if kind != "offload":
        return {"ddp": Plan.ddp(), "zero2": Plan.zero2(chunk_numel=numel), "zero3": Plan.zero3(chunk_numel=numel)}[kind]
    disk = rng.choice([0, 1, 3, 99])
    whole = disk > 0 and rng.random() < 0.5
    return Plan.offload(
        chunk_numel=numel,
        rcache_blocks=rng.choice([None, "all"]),
        device_chunks=rng.randint(0, 4),
        disk_chunks=disk,
        values_on_disk=whole,
        values_on_device=not whole and rng.random() < 0.5,
        disk=folder if disk else None,
    )


def held_and_planned(
    folder: str, seeds: Iterable[int], narrow: bool = False
) -> Iterator[tuple[int, dict[str, int], dict[str, int]]]:
    """For each seed: what a model holds on this rank after two steps, and what the ledger of its plan says.

    `narrow`: with master weights or moments in fewer bytes, which are in memory.
    """
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        model: nn.Module = Net(rng)
        plan, backwards, dtype = drawn_plan(rng, folder), rng.randint(1, 3), rng.choice([FP32, BF16])
        adam = narrow or plan.disk is not None or rng.random() < 0.8
        if narrow:
            master, moments = rng.choice([("bf16", "int8"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "int8")])
            memory = {"disk": None, "disk_chunks": 0, "values_on_disk": False}
            plan, dtype = replace(plan, **memory, master=master, moments=moments), BF16
        inner = torch.optim.AdamW if adam else torch.optim.SGD
        model, optimizer = em.wrap(
            model, inner([p for p in model.parameters() if p.requires_grad], lr=1e-3), plan=plan, compute_dtype=dtype
        )
        for _ in range(2):
            for _ in range(backwards):
                model(torch.randn(6, WIDTH, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = em.inspect(model)
        size = footprint(
            seen.plan, seen.layout, moments=2 * adam, over_gloo=dist.get_world_size() > 1, async_sums=False
        )
        assert size == seen.footprint
        device, host = size.memory_bytes(backwards)
        yield seed, seen.held_bytes, {"device": device, "host": host, "disk": size.disk_bytes}
        optimizer.close()


def compared(
    folder: str, seeds: Iterable[int], narrow: bool = False
) -> list[tuple[int, dict[str, int], dict[str, int]]]:
    """(rank) As `held_and_planned`."""
    return list(held_and_planned(folder, seeds, narrow))


QUICK = [0, 1, 4, 5, 10, 14, 17, 21, 25, 34, 35, 48, 53, 59]
"""Seeds with every kind of plan, in both dtypes."""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seeds", with_further([QUICK, list(range(100))], [QUICK]), ids=["quick", "further"])
def test_the_ledger_is_what_is_held(world: int, seeds: list[int], ranks: Ranks, tmp_path: Any) -> None:
    for found in ranks(world).run(compared, str(tmp_path), seeds):
        for seed, held, planned in found:
            assert held == planned, seed


@pytest.mark.parametrize("seeds", with_further([QUICK[:8], list(range(100))], [QUICK[:8]]), ids=["quick", "further"])
def test_narrow_state_is_what_is_held(seeds: list[int], ranks: Ranks, tmp_path: Any) -> None:
    for found in ranks(2).run(compared, str(tmp_path), seeds, narrow=True):
        for seed, held, planned in found:
            assert held == planned, seed


# --------------------------------------------------------------------------------------------- counts and brute force


@settings(max_examples=200, deadline=None)
@given(PARAMS, OPTIONS, st.data())
def test_the_most_chunks_that_fit_stay_on_the_device(
    params: list[ParamSpec], options: dict[str, Any], data: st.DataObject
) -> None:
    plan = Plan.offload(rcache_blocks="all", chunk_numel=5000)
    chunks = len(plan.layout(params).chunks)
    sizes = []
    for count in range(chunks + 1):
        tried = replace(plan, device_chunks=count)
        size = footprint(tried, tried.layout(params), moments=options["moments"], over_gloo=True)
        sizes.append(size.shard_bytes["device"])
    allowed = data.draw(st.sampled_from(sizes)) + data.draw(st.integers(0, 1))
    asked = replace(plan, device_bytes=allowed)
    found = resolve_counts(asked, params, StepOrder((), (), {}), moments=options["moments"], free_host_bytes=0)
    assert found.device_chunks == max(count for count, nbytes in enumerate(sizes) if nbytes <= allowed)


@settings(max_examples=200, deadline=None)
@given(PARAMS, OPTIONS, st.integers(0, 3), st.data())
def test_the_fewest_chunks_that_do_not_fit_are_on_disk(
    params: list[ParamSpec], options: dict[str, Any], device: int, data: st.DataObject
) -> None:
    whole, moments, async_sums = options["values_on_disk"], options["moments"], bool(options["async_sums"])
    plan = Plan.offload(rcache_blocks="all", chunk_numel=5000, device_chunks=device, disk="/tmp", values_on_disk=whole)
    layout = plan.layout(params)
    sizes = []
    for count in range(max(0, len(layout.chunks) - device) + 1):
        on_disk = {"disk_chunks": count} if count else {"disk_chunks": 0, "disk": None, "values_on_disk": False}
        size = footprint(replace(plan, **on_disk), layout, moments=moments, over_gloo=True, async_sums=async_sums)
        sizes.append(size.host_bytes)
    allowed = data.draw(st.sampled_from(sizes)) - data.draw(st.integers(0, 1))
    fits = [count for count, nbytes in enumerate(sizes) if nbytes <= allowed]

    def found() -> Plan:
        return resolve_counts(
            plan, params, StepOrder((), (), {}), moments=moments, free_host_bytes=allowed, async_sums=async_sums
        )

    if fits:
        assert found().disk_chunks == fits[0]
    else:
        with pytest.raises(em.TierError, match="are needed even with chunks on disk"):
            found()
