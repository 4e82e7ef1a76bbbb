"""The long-lived state of a chunk: what its shard holds when, and that too much is refused before it is allocated."""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.packing import build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Communicator, Work
from elixir_moe.errors import ElixirError, PlanError, TierError
from elixir_moe.memory.blocks import Block, ShardBlock
from elixir_moe.memory.build import build_shards
from elixir_moe.memory.shard_state import Contents, ShardState
from elixir_moe.memory.slabs import Slab, check_fits, host_bytes_left
from elixir_moe.runtime.chunk import Chunk, Placeholder
from elixir_moe.runtime.gradients import GradientBuffer, Gradients
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.weights import Weights, WeightState
from elixir_moe.runtime.writes import Writes
from tests.support.every import every

CPU = torch.device("cpu")
NUMEL = 64


def shard_of(dtype: torch.dtype, *, trainable: bool = True, tier: Tier = Tier.HOST) -> ShardState:
    """The shard of a chunk that is not scattered, filled with values that bf16 rounds."""
    key = ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=trainable, divisor=1)
    (spec,) = build_layout([ParamSpec(name="p", shape=(NUMEL,), key=key)]).chunks
    (shard,) = build_shards([(spec, tier)], CPU)
    shard.fill(torch.linspace(-1, 1, NUMEL))
    return shard


def gradient(dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def update(shard: ShardState) -> None:
    """What an optimizer does to a shard."""
    assert shard.master is not None
    shard.master.sub_(shard.gradient().float())
    if shard.values_shard is not None:
        shard.values_shard.copy_(shard.master)
    shard.updated()


# --------------------------------------------------------------------------------------------------------------- shards


def test_what_is_kept_is_had_at_once_and_read_behind_the_update() -> None:
    """On any thread; when one beside training has waited, which differs between ranks, decides no order of gathers."""
    shard = shard_of(torch.bfloat16)
    assert shard.master is not None
    master, under_way = shard.master, Future[Sequence[Future[None]]]()
    shard.update_async(under_way)
    kept = shard.weights()[3:5]
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(kept.read)
        master.fill_(2.0)
        assert not reading.done()
        under_way.set_result(())
        assert reading.result().tolist() == [2.0, 2.0]
    assert shard._gate.has_update
    assert shard.values() is shard.storage and not shard._gate.has_update


def test_bf16_sends_its_compute_shard_and_the_gradient_takes_its_place() -> None:
    shard = shard_of(torch.bfloat16)
    assert shard.master is not None
    assert shard.contents is Contents.VALUES
    assert shard.values() is shard.storage
    assert not shard.has_gradient
    shard.add_gradient(gradient(torch.bfloat16, 1))
    assert shard.contents is Contents.GRADIENT
    assert shard.has_gradient
    assert shard.gradient().data_ptr() == shard.storage.data_ptr(), "no memory of its own"
    assert torch.equal(shard.gradient(), gradient(torch.bfloat16, 1))
    update(shard)
    assert shard.contents is Contents.VALUES
    assert not shard.has_gradient
    assert torch.equal(shard.values(), shard.master.bfloat16())
    assert shard._sum is not None and shard._sum.total is None


def test_bf16_values_wanted_again_move_the_gradient_to_the_accumulator() -> None:
    shard = shard_of(torch.bfloat16)
    assert shard.master is not None
    grads = [gradient(torch.bfloat16, seed) for seed in (1, 2, 3)]
    for grad in grads:
        shard.add_gradient(grad)
        assert torch.equal(shard.values(), shard.master.bfloat16()), "cast anew from the master"
    assert shard.contents is Contents.SUM
    assert shard.sum_memory.dtype == torch.float32
    assert shard.gradient().data_ptr() == shard.sum_memory.data_ptr()
    assert torch.equal(shard.gradient(), grads[0].float() + grads[1] + grads[2]), "summed in fp32"


def test_bf16_gradients_without_a_gather_between_are_summed_in_fp32_too() -> None:
    shard = shard_of(torch.bfloat16)
    assert shard.master is not None
    shard.add_gradient(gradient(torch.bfloat16, 1))
    shard.add_gradient(gradient(torch.bfloat16, 2))
    assert shard.contents is Contents.STALE_SUM
    assert torch.equal(shard.gradient(), gradient(torch.bfloat16, 1).float() + gradient(torch.bfloat16, 2))
    assert torch.equal(shard.values(), shard.master.bfloat16())
    assert torch.equal(shard.gradient(), gradient(torch.bfloat16, 1).float() + gradient(torch.bfloat16, 2))


def test_an_accumulator_starts_from_zero_in_each_step() -> None:
    shard = shard_of(torch.bfloat16)
    for step in range(3):
        for seed in (1, 2):
            shard.values()
            shard.add_gradient(gradient(torch.bfloat16, 10 * step + seed))
        wanted = gradient(torch.bfloat16, 10 * step + 1).float() + gradient(torch.bfloat16, 10 * step + 2)
        assert torch.equal(shard.gradient(), wanted)
        if step == 1:
            shard.clear_gradient()
        else:
            update(shard)
        assert not shard.has_gradient
        assert shard.master is not None
        assert torch.equal(shard.values(), shard.master.bfloat16())


def test_squares_found_on_the_way_are_those_of_one_gradient_alone() -> None:
    shard = shard_of(torch.float32)
    for _ in range(2):
        shard.add_gradient(gradient(torch.float32, 1), 4.0)
        assert shard.squares == 4.0
        shard.add_gradient(gradient(torch.float32, 2), 9.0)
        assert shard.squares is None, "of the sum nobody knows them"
        shard.clear_gradient()
    shard.add_gradient(gradient(torch.float32, 1))
    assert shard.squares is None


def test_fp32_sends_the_master_and_sums_in_place() -> None:
    shard = shard_of(torch.float32)
    assert shard.values() is shard.master
    shard.add_gradient(gradient(torch.float32, 1))
    assert shard.values() is shard.master, "untouched by the gradient beside it"
    assert torch.equal(shard.values(), torch.linspace(-1, 1, NUMEL))
    shard.add_gradient(gradient(torch.float32, 2))
    assert shard.gradient().data_ptr() == shard.sum_memory.data_ptr()
    assert torch.equal(shard.gradient(), gradient(torch.float32, 1) + gradient(torch.float32, 2))
    update(shard)
    assert not shard.has_gradient
    shard.add_gradient(gradient(torch.float32, 3))
    assert torch.equal(shard.gradient(), gradient(torch.float32, 3)), "not added to what is used up"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_chunk_has_nothing_but_its_values(dtype: torch.dtype) -> None:
    shard = shard_of(dtype, trainable=False)
    assert shard.master is None and shard._sum is None
    assert shard.values() is shard.storage
    assert torch.equal(shard.values(), torch.linspace(-1, 1, NUMEL).to(dtype))
    assert not shard.has_gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cleared_gradient_leaves_the_values(dtype: torch.dtype) -> None:
    shard = shard_of(dtype)
    wanted = shard.values().clone()
    shard.add_gradient(gradient(dtype, 1))
    shard.clear_gradient()
    assert not shard.has_gradient
    assert torch.equal(shard.values(), wanted)
    with pytest.raises(AssertionError, match="chunk 0 has no gradient"):
        shard.gradient()


# What a test of random calls may do to a shard, and the events of the table that it is.
CALLS = st.lists(
    st.sampled_from(["place", "add", "add in place", "values", "clear", "update", "store", "change"]), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float32]), CALLS)
def test_any_order_of_calls_keeps_weights_and_gradients(dtype: torch.dtype, calls: list[str]) -> None:
    """Against a master and a list of gradients; every move of the state is one of the table, or `_become` asserts."""
    shard, master, added = shard_of(dtype), torch.linspace(-1, 1, NUMEL), list[torch.Tensor]()
    for seed, call in enumerate(calls):
        new = gradient(dtype, seed)
        if call == "place":
            shard.place_for_gradient()  # and no gradient comes
        elif call.startswith("add"):
            place = shard.place_for_gradient() if call == "add in place" else None
            shard.add_gradient(new if place is None else place.copy_(new))
            added.append(new)
        elif call == "values":
            assert torch.equal(shard.values(), master.to(dtype))
        elif call == "clear":
            shard.clear_gradient()
            added.clear()
        elif call == "update" and added:
            master = master - shard.gradient().float()
            update(shard)
            added.clear()
        elif call == "store":
            shard.store(3, new[3:9])
            master[3:9] = torch.where(master[3:9].to(dtype) == new[3:9], master[3:9], new[3:9].float())
        elif call == "change" and added:
            shard.change_gradient([(0, 8)], lambda part: part.zero_())
            added = [one.clone() for one in added]
            for one in added:
                one[:8] = 0
        assert shard.has_gradient == bool(added)
        if added:
            total = added[0].float()
            for more in added[1:]:
                total = total + more
            assert torch.equal(shard.gradient().float(), total)
        assert shard.master is not None and torch.equal(shard.master, master)
    assert torch.equal(shard.values(), master.to(dtype))


MOVES = {
    "VALUES": {"VALUES", "STALE", "SUM"},
    "STALE": {"STALE", "VALUES", "GRADIENT", "STALE_SUM"},
    "GRADIENT": {"STALE_SUM", "STALE", "VALUES"},
    "SUM": {"SUM", "VALUES"},
    "STALE_SUM": {"STALE_SUM", "SUM", "STALE", "VALUES"},
}


@pytest.mark.parametrize("source", Contents)
@pytest.mark.parametrize("target", Contents)
def test_a_shard_moves_as_the_table_says(source: Contents, target: Contents) -> None:
    shard = shard_of(torch.bfloat16)
    shard.contents = source
    if target.name in MOVES[source.name]:
        shard._become(target)
        assert shard.contents is target
    else:
        with pytest.raises(AssertionError, match=f"shard of chunk 0: {source.name} -> {target.name} is not legal"):
            shard._become(target)
        assert shard.contents is source


# ---------------------------------------------------------------------------------------------------------------- slabs


def test_shards_of_a_tier_and_dtype_share_one_allocation_of_exact_size() -> None:
    keys = [
        ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=trainable, divisor=1)
        for dtype, trainable in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False))
    ]
    chunks = build_layout(
        [ParamSpec(name="p", shape=(NUMEL,), key=key) for key in keys for _ in range(2)], NUMEL
    ).chunks
    placed = [(chunk, Tier.HOST if chunk.index % 2 else Tier.DEVICE) for chunk in chunks]
    tensors = [tensor for shard in build_shards(placed, CPU) for tensor in shard._tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert len(storages) == 4 + 2, "two tiers, two dtypes; frozen chunks have pages of their own"
    assert sum(storages.values()) == sum(t.nbytes for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


def test_a_slab_is_not_handed_out_twice() -> None:
    slab = Slab(8, torch.float32, Tier.DEVICE, CPU)
    slab.allocate(5)
    with pytest.raises(AssertionError, match="beyond its size"):
        slab.allocate(4)


@pytest.mark.fault(18)
def test_more_than_a_host_has_is_refused() -> None:
    with pytest.raises(TierError, match=r"needs 3.00 GiB for 2 ranks on h, 1.00 GiB are left \(2.00 GiB short\)"):
        check_fits(3 << 30, 1 << 30, "2 ranks on h")
    check_fits(1 << 30, 1 << 30, "2 ranks on h")


MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n"
CGROUP_2 = {"memory.max": "5000000\n", "memory.current": "4000000\n", "memory.stat": "anon 1\ninactive_file 500000\n"}
CGROUP_1 = {
    "memory/memory.limit_in_bytes": "3000000\n",
    "memory/memory.usage_in_bytes": "2000000\n",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, sys.maxsize),
        ({"meminfo": MEMINFO}, 8000 * 1024),
        ({"meminfo": MEMINFO} | CGROUP_2, 1_500_000),
        ({"meminfo": MEMINFO} | CGROUP_2 | {"memory.max": "max\n"}, 8000 * 1024),
        ({"meminfo": MEMINFO} | CGROUP_1, 1_000_007),
    ],
)
def test_what_a_host_has_left(files: dict[str, str], left: int, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / ("proc" if name == "meminfo" else "sys/fs/cgroup") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_bytes_left(tmp_path) == left


def test_a_host_that_shows_less_than_it_gives_is_told_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in use counts all the same; a limit that is shown does not."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in CGROUP_2.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    monkeypatch.setenv("ELIXIR_HOST_MEMORY", "20 MiB")
    assert host_bytes_left(tmp_path) == (20 << 20) - 1000 * 1024
    monkeypatch.setenv("ELIXIR_HOST_MEMORY", "120")
    with pytest.raises(PlanError, match="ELIXIR_HOST_MEMORY='120' has no unit: write '120 GiB'"):
        host_bytes_left(tmp_path)


def test_this_host_has_something_left() -> None:
    assert 0 < host_bytes_left() < sys.maxsize


def test_a_device_that_refuses_is_a_tier_error() -> None:
    with pytest.raises(TierError, match=r"(?s)device memory: cannot allocate .* GiB.*keep less on the device"):
        Slab(1 << 55, torch.float32, Tier.DEVICE, CPU)


# --------------------------------------------------------------------------------------------------------------- states

LEGAL = {("sharded", "gathering"), ("gathering", "gathered"), ("gathered", "sharded")}


def chunk_of(dtype: torch.dtype, *, in_place: bool = False) -> Chunk:
    """A chunk of two parameters of a rank that is alone, away; its shard has zeros."""
    key = ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=True, divisor=1)
    params = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(3))]
    layout = build_layout([ParamSpec(name="p", shape=tuple(p.shape), key=key) for p in params], NUMEL)
    (spec,) = (layout.with_residence({0}) if in_place else layout).chunks
    (shard,) = build_shards([(spec, Tier.DEVICE)], CPU)
    communicator = mock.Mock(spec=Communicator, rank=0, index=0, tagged=True)
    return Chunk.of(spec, params, ["weight", "bias"], shard, communicator, Placeholder(CPU))


@pytest.fixture
def chunk() -> Chunk:
    return chunk_of(torch.float32)


@pytest.fixture
def weights(chunk: Chunk) -> Weights:
    return Weights(chunk, None)


@pytest.mark.parametrize("source", WeightState)
@pytest.mark.parametrize("target", WeightState)
def test_only_the_table_is_legal(weights: Weights, source: WeightState, target: WeightState) -> None:
    weights.state = source
    if (source.value, target.value) in LEGAL:
        weights.move(target)
        assert weights.state is target
    else:
        with pytest.raises(AssertionError, match=rf"chunk 0 \(.*: {source.value} -> {target.value} is not legal"):
            weights.move(target)
        assert weights.state is source


def test_released_parameters_look_right_and_read_as_nan(chunk: Chunk) -> None:
    weight, bias = chunk.parameters
    assert weight.shape == (4, 4)
    assert weight.dtype == torch.float32
    assert weight.untyped_storage().nbytes() == 4, "one NaN for all"
    assert weight.data_ptr() == bias.data_ptr()
    assert weight.isnan().all()


def block_for(chunk: Chunk, fill: float = 0.0) -> Block:
    """A block of the chunk's size, full of one number, as others may have left it."""
    memory = torch.full((chunk.spec.numel,), fill, dtype=chunk.spec.key.dtype)
    return Block(memory.view(torch.uint8), Statistics())


def gather(weights: Weights) -> Block:
    """Fills the chunk's block, a new one unless it has its own, with 0, 1, 2, … and attaches the chunk."""
    spec = weights.chunk.spec
    weights.block = weights.block or block_for(weights.chunk)
    weights.move(WeightState.GATHERING)
    weights.buffer = weights.block.claim(spec).copy_(torch.arange(spec.numel))
    weights.attach()
    weights.move(WeightState.GATHERED)
    return weights.block


def opened(chunk: Chunk, block: Block) -> GradientBuffer:
    """The chunk's gradients in a block."""
    gradients = Gradients(chunk)
    gradients.block = block
    gradients.open()
    assert gradients.buffer is not None
    return gradients.buffer


def test_gathered_parameters_are_views_of_the_block(weights: Weights) -> None:
    gather(weights)
    weight, bias = weights.chunk.parameters
    assert weights.buffer is not None
    assert weight.data_ptr() == weights.buffer.data_ptr()
    assert weight.flatten().tolist() == list(range(16))
    assert bias.tolist() == [16.0, 17.0, 18.0], "the second parameter starts on the next line"
    weights.detach()
    assert weight.isnan().all()
    assert weights.buffer is None


def test_a_block_makes_the_views_of_a_chunk_once_and_still_sees_every_other_view(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and gradients are shown by the same views; a view that somebody keeps moves the block as ever."""
    made: list[torch.Tensor] = []
    make, chunk = Chunk.views, weights.chunk

    def counted(self: Chunk, memory: torch.Tensor) -> list[torch.Tensor]:
        made.extend(views := make(self, memory))
        return views

    monkeypatch.setattr(Chunk, "views", counted)
    statistics = Statistics()
    weights.block = block = Block(torch.zeros(chunk.spec.nbytes, dtype=torch.uint8), statistics)

    def leave() -> None:
        weights.detach()
        weights.move(WeightState.SHARDED)
        block.vacate(Work())

    for _ in range(3):
        gather(weights)
        leave()
    opened(chunk, block).add([(0, torch.ones(chunk.parameters[0].shape))])
    assert (len(made), statistics.blocks_replaced) == (2, 0)
    gather(weights)
    kept = chunk.parameters[0].detach()
    leave()
    gather(weights)
    assert (len(made), statistics.blocks_replaced) == (4, 1), "the kept view has the old memory"
    assert chunk.parameters[0].data_ptr() == made[2].data_ptr() != kept.data_ptr()
    assert kept.flatten().tolist() == chunk.parameters[0].flatten().tolist() == list(range(16))
    leave()
    gather(weights)
    assert (len(made), statistics.blocks_replaced) == (4, 1)


def test_a_block_drops_views_before_there_are_too_many(chunk: Chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_moe.memory.blocks._MOST_PLACES", 4)
    statistics = Statistics()
    memory = torch.zeros(64, dtype=torch.uint8)
    block = Block(memory, statistics)
    first = block.param_views(1, memory[:], lambda whole: [whole[:8], whole[8:16]])
    assert block.param_views(1, memory, lambda _: []) is first
    del first
    second = block.param_views(2, memory[:], lambda whole: [whole[:16]])
    assert block.param_views(2, memory, lambda _: []) is second
    assert len(block.param_views(1, memory[:], lambda whole: [whole[:8]])) == 1, "made again"
    block.vacate(Work())
    block.claim(chunk.spec)
    assert statistics.blocks_replaced == 0, "every view is one of the block's own"


def test_gradients_are_copied_to_a_block_of_their_own_and_leave_the_weights(weights: Weights) -> None:
    block, chunk = gather(weights), weights.chunk
    gradients = opened(chunk, block_for(chunk, fill=9.0))
    gradients.add([(1, torch.full((3,), 7.0))])
    gradients.add([(1, torch.full((3,), 1.0))])
    sent = gradients.complete()
    assert sent[:16].eq(0).all(), "no gradient came: zeros"
    assert sent[16:19].tolist() == [8.0] * 3
    assert block.wire(chunk.spec).tolist() == list(range(chunk.spec.numel))
    assert chunk.parameters[1].tolist() == [16.0, 17.0, 18.0]


def test_what_was_written_without_a_trace_is_said_too(weights: Weights) -> None:
    writes = Writes([weights], Streams(CPU), Phase())
    (seen,) = writes._seen
    gather(weights)
    writes.watch(weights)
    assert seen.altered is None, "the first look only remembers"
    writes.watch(weights)
    assert seen.altered is not None and seen.altered.tolist() == [False, False]
    first, second = (parameter.data for parameter in weights.chunk.parameters)
    first.copy_(first.flip(0))
    second.add_(1)
    assert not writes._written(weights), "nothing tells of it"
    writes._look(weights, [1])
    assert seen.altered.tolist() == [True, False], "the second was stored"


def test_a_write_while_the_weights_are_away_is_told_at_the_next_gather(weights: Weights) -> None:
    writes = Writes([weights], Streams(CPU), Phase())
    gather(weights)
    view = weights.chunk.parameters[1].detach()
    weights.reset()
    view.add_(1)
    with pytest.raises(
        ElixirError, match=r"'bias' was written through a view .* em\.unsharded\(parameter, write=True\)"
    ):
        writes.refuse_old_views(weights)


def ends(scheduler: Scheduler) -> None:
    scheduler.release((0,), tracked=True)


def ends_and_an_interrupt_comes(scheduler: Scheduler) -> None:
    scheduler.gathers.release((0,), tracked=True)
    scheduler.reductions.drain()


@pytest.mark.parametrize("hold", [ends, ends_and_an_interrupt_comes])
def test_a_reader_that_outlives_a_chunk_used_in_place_keeps_the_values(hold: Callable[[Scheduler], None]) -> None:
    """Nothing takes the place of weights in blocks but other weights; here their own gradient does."""
    chunk = chunk_of(torch.bfloat16, in_place=True)
    blocks = mock.Mock(own={0: ShardBlock(chunk.shard, Statistics())})
    scheduler = Scheduler([chunk], CacheState(0), blocks, None, Streams(CPU), Statistics())
    reductions = scheduler.reductions
    (weights,), (gradients,) = reductions._weights, reductions._gradients
    gather(weights)
    view, reduced = chunk.parameters[0].detach(), torch.full((chunk.spec.numel,), 2.0, dtype=torch.bfloat16)
    weights.holds = 1
    reductions._add_reduced(gradients, reduced, None)
    assert chunk.parameters[0].flatten().tolist() == list(range(16)), "somebody computes with them"
    assert not chunk.shard.has_gradient
    hold(scheduler)
    assert chunk.shard.gradient().eq(2).all()
    assert view.flatten().tolist() == list(range(16))
    assert chunk.parameters[0].isnan().all()


def test_gradients_are_zero_between_and_behind_parameters(chunk: Chunk) -> None:
    """What lies between parameters is sent and summed, and counts in the norm: it must be zero."""
    gradients = opened(chunk, block_for(chunk, fill=9.0))
    for index, parameter in enumerate(chunk.parameters):
        gradients.add([(index, torch.ones_like(parameter))])
    assert gradients.complete().sum() == 16 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_shard_takes_what_was_written_and_keeps_the_rest(dtype: torch.dtype, trainable: bool) -> None:
    key = ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=trainable, divisor=1)
    (spec,) = build_layout([ParamSpec(name="p", shape=(64,), key=key)], 64).chunks
    (shard,) = build_shards([(spec, Tier.HOST)], CPU)
    fine = torch.full((64,), 1.001)  # not a bf16 number
    shard.fill(fine)
    written = shard.values().clone()
    written[3] = 5.0
    shard.store(2, written[2:7])
    assert shard.values()[3] == 5.0
    if shard.master is not None:
        assert shard.master[3] == 5.0
        assert shard.master[4] == fine[4], "as fine as before"


def test_the_pages_of_a_host_slab_are_touched_by_all_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU, where torchrun leaves torch one thread: as many at the same time, and each its own part."""
    together, zero_ = threading.Barrier(3, timeout=60), torch.Tensor.zero_
    touched: list[int] = []

    def touch(part: torch.Tensor) -> torch.Tensor:
        together.wait()
        touched.append(part.numel())
        return zero_(part.fill_(7))

    monkeypatch.setattr(torch.Tensor, "zero_", touch)
    monkeypatch.setattr("elixir_moe.memory.slabs.host_threads", lambda device: 3 if device.type == "cuda" else 1)
    slab = Slab(10, torch.float32, Tier.HOST, torch.device("cuda"))
    assert sorted(touched) == [2, 4, 4]
    assert torch.equal(slab.allocate(10), torch.zeros(10))


class Locking:
    """Stands for `register_host_memory`, and notes the bytes it is asked for."""

    def __init__(self) -> None:
        self.locked: list[int] = []

    def __call__(self, memory: torch.Tensor) -> Callable[[], None]:
        self.locked.append(memory.nbytes)
        return lambda: None


@pytest.fixture
def locking(monkeypatch: pytest.MonkeyPatch) -> Locking:
    found = Locking()
    monkeypatch.setattr("elixir_moe.memory.slabs.register_host_memory", found)
    return found


def test_page_locked_memory_is_no_part_of_forked_processes(locking: Locking, tmp_path: Path) -> None:
    """What parameters on a CPU show they have, and may read: fork copies that when it is written."""
    gpu = Slab(3 << 18, torch.float32, Tier.HOST, torch.device("cuda"), travels=True)
    slabs = [gpu, Slab(3 << 18, torch.float32, Tier.HOST, CPU)]
    taken = [slab.allocate(3 << 18).fill_(7.0) for slab in slabs]
    places = [tensor.data_ptr() + (1 << 20) for tensor in taken]
    gc.disable()  # the child of a process with threads must not run what is left of torch's objects
    process = os.fork()
    if not process:
        try:
            os._exit(_lacks_the_first_alone(*places))
        finally:
            os._exit(2)
    gc.enable()
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert locking.locked == [3 << 20]


def _lacks_the_first_alone(*places: int) -> int:
    """0 if the memory maps of this process show the second address alone, with what was in it; else 1."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
    first, second = ([low <= at < high for low, high in maps] for at in places)
    return 0 if not any(first) and any(second) and ctypes.c_float.from_address(places[1]).value == 7.0 else 1


def test_no_more_is_page_locked_at_once_than_drivers_take(locking: Locking, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no shard lies in two pieces, which no copy could span."""
    monkeypatch.setattr("elixir_moe.memory.build.LOCKED_BYTES", 5 * 128)
    key = ChunkGroupKey(ranks=(0,), dtype=torch.bfloat16, trainable=True, divisor=1)
    params = [ParamSpec(name=str(i), shape=(64,), key=key) for i in range(12)]
    placed = [(spec, Tier.HOST) for spec in build_layout(params, 64).chunks]
    shards = build_shards(placed, torch.device("cuda"))
    assert locking.locked == [5 * 128, 5 * 128, 2 * 128]
    assert len({shard.values().data_ptr() for shard in shards}) == 12


def test_a_frozen_chunk_is_page_locked_when_its_weights_are_in(locking: Locking) -> None:
    """Locking makes the pages, and the model as given is still there before."""
    key = ChunkGroupKey(ranks=(0,), dtype=torch.bfloat16, trainable=False, divisor=1)
    params = [ParamSpec(name=str(i), shape=(64,), key=key) for i in range(3)]
    shards = build_shards([(s, Tier.HOST) for s in build_layout(params, 64).chunks], torch.device("cuda"))
    assert not locking.locked
    for shard in shards:
        shard.fill(torch.ones(64))
        shard.lock()
    assert locking.locked == [128, 128, 128]
    assert every(bool(shard.values().eq(1).all()) for shard in shards)


def test_a_block_that_nobody_reads_need_not_wait_for_later_compute(weights: Weights) -> None:
    """Else a fetch into it would begin when all compute has ended."""
    blocks = mock.Mock(own={})
    gathers = Scheduler([weights.chunk], CacheState(0), blocks, None, Streams(CPU), Statistics()).gathers
    block = gather(gathers._weights[0])
    gathers._reshard(gathers._weights[0])
    waited: list[bool] = []
    block.claim(weights.chunk.spec, lambda: waited.append(True))
    assert not waited


def reshard(scheduler: Scheduler) -> None:
    (weights,) = scheduler.gathers._weights
    scheduler.gathers._reshard(weights)


@pytest.mark.parametrize("leave", [reshard, Scheduler.reset])
def test_a_reader_that_has_outlived_a_chunk_is_waited_for(leave: Callable[[Scheduler], None], chunk: Chunk) -> None:
    scheduler = Scheduler([chunk], CacheState(0), mock.Mock(own={}), None, Streams(CPU), Statistics())
    (weights,), waited = scheduler.gathers._weights, mock.Mock()
    weights.block = Block(torch.zeros(chunk.spec.nbytes, dtype=torch.uint8), Statistics())
    block = gather(weights)
    view = chunk.parameters[0].detach()
    leave(scheduler)
    del view  # after it was read
    block.claim(chunk.spec, waited)
    waited.assert_called_once()


def test_a_gather_ends_before_its_step_is_given_up(chunk: Chunk) -> None:
    scheduler = Scheduler([chunk], CacheState(0), mock.Mock(own={}), None, Streams(CPU), Statistics())
    (weights,), ended = scheduler.gathers._weights, mock.Mock()
    gather(weights)
    weights.gather = Work(finish=ended)
    scheduler.phase.looked = True
    scheduler.reset()
    ended.assert_called_once()
