"""The long-lived state of a chunk: what its home holds when, and that too much is refused before it is allocated."""

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from elixir_moe.chunks.chunk import Chunk, ChunkState, Placeholder
from elixir_moe.chunks.collectives import Communicator
from elixir_moe.chunks.group import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.home import Holds, Home, build_homes
from elixir_moe.chunks.layout import build_layout
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.rcache import Block
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.chunks.tiers import Slab, check_fits, host_bytes_left
from elixir_moe.errors import TierError

CPU = torch.device("cpu")
NUMEL = 64


def home_of(dtype: torch.dtype, *, trainable: bool = True, tier: Tier = Tier.HOST) -> Home:
    """A home of one shard, filled with values that bf16 rounds."""
    key = ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=trainable, divisor=1)
    (spec,) = build_layout([ParamSpec(name="p", shape=(NUMEL,), key=key)]).chunks
    (home,) = build_homes([(spec, tier)], CPU)
    weights = torch.linspace(-1, 1, NUMEL)
    home.compute.copy_(weights)
    if home.master is not None:
        home.master.copy_(weights)
    return home


def gradient(dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def update(home: Home) -> None:
    """What an optimizer does to a home."""
    assert home.master is not None
    home.master.sub_(home.gradient().float())
    if home.compute.dtype != torch.float32:
        home.compute.copy_(home.master)
    home.updated()


# ---------------------------------------------------------------------------------------------------------------- homes


def test_what_is_kept_is_had_at_once_and_read_behind_the_update() -> None:
    """On any thread; when one beside training has waited, which differs between ranks, decides no order of gathers."""
    home = home_of(torch.bfloat16)
    assert home.master is not None
    master, under_way = home.master, Future[Sequence[Future[None]]]()
    home.update_beside(under_way)
    kept = home.weights[3:5]
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(kept.read)
        master.fill_(2.0)
        assert not reading.done()
        under_way.set_result(())
        assert reading.result().tolist() == [2.0, 2.0]
    assert home.has_update
    assert torch.equal(home.master, master) and not home.has_update


def test_bf16_sends_its_compute_shard_and_the_gradient_takes_its_place() -> None:
    home = home_of(torch.bfloat16)
    assert home.master is not None
    assert home.holds is Holds.VALUES
    assert home.values() is home.compute
    assert not home.has_gradient
    home.add_gradient(gradient(torch.bfloat16, 1))
    assert home.holds is Holds.GRADIENT
    assert home.has_gradient
    assert home.gradient() is home.compute, "no memory of its own"
    assert torch.equal(home.gradient(), gradient(torch.bfloat16, 1))
    update(home)
    assert home.holds is Holds.VALUES
    assert not home.has_gradient
    assert torch.equal(home.values(), home.master.bfloat16())
    assert home.accumulator is None


def test_bf16_values_wanted_again_move_the_gradient_to_the_accumulator() -> None:
    home = home_of(torch.bfloat16)
    assert home.master is not None
    grads = [gradient(torch.bfloat16, seed) for seed in (1, 2, 3)]
    for grad in grads:
        home.add_gradient(grad)
        assert torch.equal(home.values(), home.master.bfloat16()), "cast anew from the master"
    assert home.holds is Holds.VALUES
    assert home.accumulator is not None
    assert home.accumulator.dtype == torch.float32
    assert home.gradient() is home.accumulator
    assert torch.equal(home.gradient(), grads[0].float() + grads[1] + grads[2]), "summed in fp32"


def test_bf16_gradients_without_a_gather_between_are_summed_in_fp32_too() -> None:
    home = home_of(torch.bfloat16)
    assert home.master is not None
    home.add_gradient(gradient(torch.bfloat16, 1))
    home.add_gradient(gradient(torch.bfloat16, 2))
    assert home.holds is Holds.STALE
    assert torch.equal(home.gradient(), gradient(torch.bfloat16, 1).float() + gradient(torch.bfloat16, 2))
    assert torch.equal(home.values(), home.master.bfloat16())
    assert torch.equal(home.gradient(), gradient(torch.bfloat16, 1).float() + gradient(torch.bfloat16, 2))


def test_an_accumulator_starts_from_zero_in_each_step() -> None:
    home = home_of(torch.bfloat16)
    for step in range(3):
        for seed in (1, 2):
            home.values()
            home.add_gradient(gradient(torch.bfloat16, 10 * step + seed))
        wanted = gradient(torch.bfloat16, 10 * step + 1).float() + gradient(torch.bfloat16, 10 * step + 2)
        assert torch.equal(home.gradient(), wanted)
        if step == 1:
            home.clear_gradient()
        else:
            update(home)
        assert not home.has_gradient
        assert home.master is not None
        assert torch.equal(home.values(), home.master.bfloat16())


def test_squares_found_on_the_way_are_those_of_one_gradient_alone() -> None:
    home = home_of(torch.float32)
    for _ in range(2):
        home.add_gradient(gradient(torch.float32, 1), 4.0)
        assert home.squares == 4.0
        home.add_gradient(gradient(torch.float32, 2), 9.0)
        assert home.squares is None, "of the sum nobody knows them"
        home.clear_gradient()
    home.add_gradient(gradient(torch.float32, 1))
    assert home.squares is None


def test_fp32_sends_the_master_and_sums_in_place() -> None:
    home = home_of(torch.float32)
    assert home.master is not None
    assert home.values() is home.master
    home.add_gradient(gradient(torch.float32, 1))
    assert home.values() is home.master, "untouched by the gradient beside it"
    assert torch.equal(home.values(), torch.linspace(-1, 1, NUMEL))
    home.add_gradient(gradient(torch.float32, 2))
    assert home.gradient() is home.compute
    assert torch.equal(home.gradient(), gradient(torch.float32, 1) + gradient(torch.float32, 2))
    assert home.accumulator is None
    update(home)
    assert not home.has_gradient
    home.add_gradient(gradient(torch.float32, 3))
    assert torch.equal(home.gradient(), gradient(torch.float32, 3)), "not added to what is used up"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_chunk_has_nothing_but_its_values(dtype: torch.dtype) -> None:
    home = home_of(dtype, trainable=False)
    assert home.master is None
    assert home.values() is home.compute
    assert torch.equal(home.values(), torch.linspace(-1, 1, NUMEL).to(dtype))
    assert not home.has_gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cleared_gradient_leaves_the_values(dtype: torch.dtype) -> None:
    home = home_of(dtype)
    wanted = home.values().clone()
    home.add_gradient(gradient(dtype, 1))
    home.clear_gradient()
    assert not home.has_gradient
    assert torch.equal(home.values(), wanted)
    with pytest.raises(AssertionError, match="chunk 0 has no gradient"):
        home.gradient()


# ---------------------------------------------------------------------------------------------------------------- slabs


def test_homes_of_a_tier_and_dtype_share_one_allocation_of_exact_size() -> None:
    keys = [
        ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=trainable, divisor=1)
        for dtype, trainable in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False))
    ]
    chunks = build_layout(
        [ParamSpec(name="p", shape=(NUMEL,), key=key) for key in keys for _ in range(2)], NUMEL
    ).chunks
    placed = [(chunk, Tier.HOST if chunk.index % 2 else Tier.DEVICE) for chunk in chunks]
    tensors = [t for home in build_homes(placed, CPU) for t in (home.compute, home.master) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert len(storages) == 4, "two tiers, two dtypes"
    assert sum(storages.values()) == sum(t.nbytes for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


def test_a_slab_is_not_handed_out_twice() -> None:
    slab = Slab(8, torch.float32, Tier.DEVICE, CPU)
    slab.take(5)
    with pytest.raises(AssertionError, match="beyond its size"):
        slab.take(4)


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


def test_this_host_has_something_left() -> None:
    assert 0 < host_bytes_left() < sys.maxsize


def test_a_device_that_refuses_is_a_tier_error() -> None:
    with pytest.raises(TierError, match=r"(?s)device memory: cannot allocate .* GiB.*keep fewer chunks on the device"):
        Slab(1 << 55, torch.float32, Tier.DEVICE, CPU)


# --------------------------------------------------------------------------------------------------------------- states

LEGAL = {
    ("sharded", "gathering"),
    ("gathering", "gathered"),
    ("gathered", "sharded"),
    ("gathered", "gradient"),
    ("gradient", "reducing"),
    ("reducing", "sharded"),
    ("reducing", "gathered"),
}


@pytest.fixture
def chunk() -> Chunk:
    """A chunk of two parameters, away."""
    key = ChunkGroupKey(ranks=(0,), dtype=torch.float32, trainable=True, divisor=1)
    params = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(3))]
    specs = [ParamSpec(name="p", shape=tuple(p.shape), key=key) for p in params]
    (spec,) = build_layout(specs, NUMEL).chunks
    (home,) = build_homes([(spec, Tier.DEVICE)], CPU)
    communicator = mock.Mock(spec=Communicator)
    return Chunk(spec, params, ["weight", "bias"], home, communicator, Placeholder(CPU))


@pytest.mark.parametrize("source", ChunkState)
@pytest.mark.parametrize("target", ChunkState)
def test_only_the_table_is_legal(chunk: Chunk, source: ChunkState, target: ChunkState) -> None:
    chunk.state = source
    if (source.value, target.value) in LEGAL:
        chunk.transition(target)
        assert chunk.state is target
    else:
        with pytest.raises(AssertionError, match=f"chunk 0: {source.value} -> {target.value} is not legal"):
            chunk.transition(target)
        assert chunk.state is source


def test_released_parameters_look_right_and_read_as_nan(chunk: Chunk) -> None:
    weight, bias = chunk.parameters
    assert weight.shape == (4, 4)
    assert weight.dtype == torch.float32
    assert weight.untyped_storage().nbytes() == 4, "one NaN for all"
    assert weight.data_ptr() == bias.data_ptr()
    assert weight.isnan().all()


def gather(chunk: Chunk) -> Block:
    """Fills a block with 0, 1, 2, … and gives it to the chunk."""
    block = Block(torch.zeros(chunk.spec.nbytes, dtype=torch.uint8), Statistics())
    chunk.buffer = block.claim(chunk.spec).copy_(torch.arange(chunk.spec.numel))
    chunk.attach()
    return block


def test_gathered_parameters_are_views_and_gradients_overwrite_them(chunk: Chunk) -> None:
    block = gather(chunk)
    weight, bias = chunk.parameters
    assert chunk.buffer is not None
    assert weight.data_ptr() == chunk.buffer.data_ptr()
    assert weight.untyped_storage().nbytes() == 16 * 4, "its own storage, not the block's"
    assert bias.tolist() == [16.0, 17.0, 18.0], "the second parameter starts on the next line"
    chunk.write_gradient(1, torch.full((3,), 7.0))
    chunk.write_gradient(1, torch.full((3,), 1.0))
    sent = block.wire(chunk.spec)
    assert sent[16:19].tolist() == [8.0] * 3
    chunk.complete_gradients(block)
    assert sent[:16].eq(0).all(), "no gradient came: zeros"
    assert sent[16:19].tolist() == [8.0] * 3
    assert weight.isnan().all()
    assert chunk.buffer is None


def test_what_was_written_without_a_trace_is_said_too(chunk: Chunk) -> None:
    chunk.communicator.rank = 0
    gather(chunk)  # its home has zeros
    assert chunk.keep_written(compare=True)
    assert not chunk.keep_written(compare=True), "it is at home now"
    assert torch.equal(chunk.home.values(), torch.arange(chunk.spec.numel).float())


@pytest.mark.parametrize("reader", ["saved", "view", "unfinished"])
def test_a_gradient_waits_while_somebody_reads_its_parameter(chunk: Chunk, reader: str) -> None:
    block = gather(chunk)
    view = chunk.parameters[0].detach()[1:] if reader == "view" else None
    chunk.readers[0] += reader == "saved"
    for value in (2.0, 3.0):
        put = chunk.delay_gradient if reader == "unfinished" else chunk.write_gradient
        put(0, torch.full((4, 4), value))
    sent = block.wire(chunk.spec)
    assert sent[:16].tolist() == list(range(16)), "still the values"
    del view
    chunk.readers.clear()
    chunk.complete_gradients(block)
    assert sent[:16].eq(5).all()


def test_a_reader_that_outlives_the_chunk_keeps_the_values(chunk: Chunk) -> None:
    block = gather(chunk)
    view = chunk.parameters[0].detach()
    chunk.write_gradient(0, torch.full((4, 4), 2.0))
    chunk.write_gradient(1, torch.full((3,), 4.0))
    chunk.complete_gradients(block)
    assert view.flatten().tolist() == list(range(16))
    sent = block.wire(chunk.spec)
    assert sent[:16].eq(2).all()
    assert sent[16:19].eq(4).all()


def test_gradients_are_zero_between_and_behind_parameters(chunk: Chunk) -> None:
    """What lies between parameters is sent and summed, and counts in the norm: it must be zero."""
    block = gather(chunk)
    block.wire(chunk.spec)[torch.arange(chunk.spec.numel) >= 19] = 0  # as a gather from zeroed homes leaves it
    for index, parameter in enumerate(chunk.parameters):
        chunk.write_gradient(index, torch.ones_like(parameter))
    chunk.complete_gradients(block)
    assert block.wire(chunk.spec).sum() == 16 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_home_takes_what_was_written_and_keeps_the_rest(dtype: torch.dtype, trainable: bool) -> None:
    key = ChunkGroupKey(ranks=(0,), dtype=dtype, trainable=trainable, divisor=1)
    (spec,) = build_layout([ParamSpec(name="p", shape=(64,), key=key)], 64).chunks
    (home,) = build_homes([(spec, Tier.HOST)], CPU)
    fine = torch.full((64,), 1.001)  # not a bf16 number
    home.compute.copy_(fine)
    if home.master is not None:
        home.master.copy_(fine)
    written = home.values().clone()
    written[3] = 5.0
    home.store(2, written[2:7])
    assert home.values()[3] == 5.0
    if home.master is not None:
        assert home.master[3] == 5.0
        assert home.master[4] == fine[4], "as fine as before"
