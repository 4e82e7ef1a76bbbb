"""Plans as data, and what they cost: the memory and the traffic of the papers' table, counted in running models."""

import gc
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.ledger import DISK_THREADS, PAGE_BYTES, footprint, held_rows
from elixir_moe.chunks.packing import Layout, build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Plan, Tier, seconds_text, size_text
from elixir_moe.chunks.residence import Residence
from elixir_moe.errors import PlanError
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import placed, with_further
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]

# ------------------------------------------------------------------------------------------------------- plans as data


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5 * 2**19, "2.50 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**50, "1048576.00 GiB"),
        (1e3, "1000 B"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_shows_it(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.00020912, "209.1 µs"),
        (0.0123456, "12.35 ms"),
        (-0.002, "-2 ms"),
        (1, "1 s"),
        (1234.56, "1235 s"),
    ],
)
def test_a_time_is_shown_in_the_unit_that_shows_it(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


PRESETS = [
    Plan.ddp(),
    Plan.zero2(),
    Plan.zero2(chunk_numel=4096),
    Plan.zero3(rcache_blocks=3),
    Plan.offload(rcache_blocks=3, device_chunks=2, chunk_numel=64),
    Plan.offload(rcache_blocks=3, device_chunks=2, disk_chunks=4, chunk_numel=64),
    Plan.offload(rcache_blocks="all"),
]


@pytest.mark.parametrize("plan", PRESETS, ids=lambda plan: plan.to_json())
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json()) == {n: v for n, v in asdict(plan).items() if n != "explanation"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rcache_blocks": 0}, "rcache_blocks=0: expected a whole number of at least 1 or all or None"),
        ({"rcache_blocks": 2.0}, "rcache_blocks=2.0"),
        ({"rcache_blocks": True}, "rcache_blocks=True"),
        ({"device_chunks": -1}, "device_chunks=-1: expected a whole number of at least 0$"),
        ({"device_chunks": None}, "device_chunks=None"),
        ({"chunk_numel": 0}, "chunk_numel=0"),
        ({"chunk_numel": "64"}, "chunk_numel='64'"),
        ({"scatter": "no"}, "scatter='no': expected True or False"),
        ({"offloaded": 0}, "offloaded=0: expected True or False"),
        ({"prefetch": None}, "prefetch=None: expected a whole number of at least 0$"),
        ({"prefetch": True}, "prefetch=True"),
        ({"offloaded": False, "device_chunks": 2}, "device_chunks=2 needs offloaded=True"),
        ({"offloaded": False, "disk_chunks": 2}, "disk_chunks=2 needs offloaded=True"),
        ({"disk_chunks": -1}, "disk_chunks=-1: expected a whole number of at least 0 or None"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], message: str) -> None:
    fields = json.loads(Plan.offload(rcache_blocks=2).to_json()) | change
    with pytest.raises(PlanError, match=message):
        Plan(**fields)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(fields))


NO_PLANS = ["", "{", "[]", "3", "null", '"plan"', "{}", '{"scatter": true}', "nan", "[" * 100_000]
NO_PLANS += ["9" * 5000]  # an integer of more digits than Python converts
NO_PLANS += [Plan.zero2().to_json()[:-1] + ', "blocks": 3}', Plan.zero2().to_json().replace("scatter", "Scatter")]


@pytest.mark.parametrize("text", NO_PLANS, ids=range(len(NO_PLANS)))
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "found", [None, 3, Plan.zero2().to_json().encode(), asdict(Plan.zero2()), Plan.zero2()], ids=str
)
def test_json_that_is_no_text_is_refused(found: Any) -> None:
    with pytest.raises(PlanError, match=f"{type(found).__name__}.*to_json"):
        Plan.from_json(found)


def test_homes_and_blocks() -> None:
    layout = tiny_layout()
    assert len(layout.chunks) == 3
    assert Plan.zero3(rcache_blocks=99).blocks(layout) == Plan.zero2().blocks(layout) == 4, "one for gradients"
    assert Plan.zero2().blocks(replace(layout, open_gradients=2)) == 5
    assert Plan.zero2().blocks(tiny_layout(trainable=False)) == 3
    assert Plan.zero3(rcache_blocks=2).blocks(layout) == 2
    homes = [Plan.offload(rcache_blocks=1, device_chunks=n).tier_of(layout, layout.chunks[1]) for n in (0, 1, 2, 9)]
    assert homes == [Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.DEVICE]
    mixed = Plan.offload(rcache_blocks=1, device_chunks=1, disk_chunks=1)
    assert [mixed.tier_of(layout, chunk) for chunk in layout.chunks] == [Tier.HOST, Tier.DISK, Tier.DEVICE]
    frozen = tiny_layout(trainable=False)
    assert [mixed.tier_of(frozen, chunk) for chunk in frozen.chunks] == [Tier.HOST, Tier.DISK, Tier.DEVICE]


def tiny_layout(dtype: torch.dtype = torch.bfloat16, *, trainable: bool = True, scatter: bool = True) -> Layout:
    """Three chunks of 64 on two ranks."""
    key = ChunkGroupKey(ranks=(0, 1), dtype=dtype, trainable=trainable, divisor=2)
    return build_layout([ParamSpec(name="p", shape=(64,), key=key)] * 3, 64, scatter=scatter)


@pytest.mark.parametrize(
    ("dtype", "trainable", "per_element", "accumulator"),
    [
        (torch.bfloat16, True, 2 + 12, 4),
        (torch.float32, True, 4 + 12, 0),  # the compute shard is where gradients are summed; the master is what is sent
        (torch.bfloat16, False, 2, 0),
        (torch.float32, False, 4, 0),
    ],
)
def test_bytes_of_a_footprint(dtype: torch.dtype, trainable: bool, per_element: int, accumulator: int) -> None:
    layout = tiny_layout(dtype, trainable=trainable)
    size = footprint(Plan.offload(rcache_blocks=2, device_chunks=1), layout, over_gloo=True)
    assert size.rcache_bytes == 2 * 64 * dtype.itemsize
    assert size.resident_bytes == 0
    assert size.staging_bytes == 32 * dtype.itemsize * trainable, "of two ranks each waits for one shard"
    assert size.shard_bytes == {"device": 32 * per_element, "host": 64 * per_element, "disk": 0}
    assert size.accumulator_bytes == {"device": 32 * accumulator, "host": 64 * accumulator, "disk": 0}
    assert size.device_bytes == size.rcache_bytes + size.staging_bytes + 32 * per_element
    assert size.host_bytes == 64 * per_element
    whole = tiny_layout(dtype, trainable=trainable, scatter=False)
    assert footprint(Plan.ddp(), whole, over_gloo=False).shard_bytes["device"] == 3 * 64 * per_element
    widened = 64 * 4 * (trainable and dtype == torch.bfloat16)
    assert footprint(Plan.ddp(), whole, over_gloo=True).staging_bytes == widened, "gloo's all-reduce sums as it is sent"
    assert footprint(Plan.zero2(), layout, over_gloo=False).staging_bytes == widened


def test_rows_of_what_a_rank_holds() -> None:
    key = ChunkGroupKey(ranks=(0, 1), dtype=torch.bfloat16, trainable=True, divisor=2)
    params = [ParamSpec(name="p", shape=(48,), key=key, tied=i == 0) for i in range(3)]
    plan = Plan.offload(rcache_blocks=1, device_chunks=1, chunk_numel=64)
    layout = plan.layout(params)
    rows = held_rows(plan, layout, 2)
    assert [(row["tier"], row["resident"], row["chunks"], row["numel"]) for row in rows] == [
        ("host", True, 1, 48),
        ("host", False, 1, 48),
        ("device", False, 1, 48),
    ]
    by_tier = {tier: sum(row["shard_bytes"] for row in rows if row["tier"] == tier) for tier in ("device", "host")}
    assert by_tier | {"disk": 0} == footprint(plan, layout, over_gloo=False).shard_bytes


# ------------------------------------------------------------------------------------------ the papers' table, measured

CONFIG = GPTConfig(vocab_size=32, seq_len=8, n_layers=4, d_model=16, n_heads=2, mlp_ratio=2, tie_embeddings=False)
CHUNK = 1024


class Run:
    """A bf16 GPT wrapped by a plan, on this rank."""

    def __init__(self, plan: Plan, config: GPTConfig, make: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        self.model = GPT(config, mesh_of_world())
        em.annotate(self.model, gpt_patterns(self.model))
        inner = make(self.model.parameters(), lr=1e-3)
        plan = placed(plan)
        self.model, self.optimizer = em.wrap(self.model, inner, plan=plan, compute_dtype=torch.bfloat16, device="cpu")
        self.batch = torch.arange(18).view(2, 9) % 32

    def step(self, backwards: int = 1) -> dict[str, Any]:
        """One step; what it moved."""
        before = em.inspect(self.model).statistics
        for _ in range(backwards):
            lm_loss(self.model, self.batch).backward()
        held = sum(self.storages().values())
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (em.inspect(self.model).statistics - before).as_dict() | {"held": held}

    def storages(self) -> dict[int, int]:
        """Bytes of every storage the wrapped optimizer can reach, by address; parameters themselves are the model's."""
        return storages_of(self.optimizer)


def storages_of(optimizer: Any) -> dict[int, int]:
    """Bytes by address of all memory the optimizer can reach, but for parameters and the one NaN they are between uses.

    A chunk used in place has a storage of its own on a part of its home: that part counts once.
    """
    nan = optimizer._hooks._saved._placeholder.addresses
    found: dict[int, int] = {}
    for storage in (tensor.untyped_storage() for tensor in reach(optimizer)):
        found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
    memory: dict[int, int] = {}
    end = 0
    for address, nbytes in sorted(found.items()):
        if address not in nan and address >= end:
            memory[address], end = nbytes, address + nbytes
    return memory


def reach(root: Any) -> Iterator[torch.Tensor]:
    """All tensors held by objects of the library, however deep."""
    seen, todo = set(), [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (nn.Parameter, nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            todo += value
        elif type(value).__module__.startswith("elixir_moe") or isinstance(value, torch.optim.Optimizer):
            todo += vars(value).values() if hasattr(value, "__dict__") else []
            todo += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]


def measure(
    plan: Plan, config: GPTConfig = CONFIG, backwards: tuple[int, ...] = (1, 1, 1), make: Any = torch.optim.AdamW
) -> dict[str, Any]:
    """(rank) Steps of `backwards` backward passes each; what they moved and what was held."""
    run = Run(plan, config, make)
    steps, addresses = [], []
    for n in backwards:
        steps.append(run.step(n))
        addresses.append(run.storages())
    found = em.inspect(run.model)
    schedule, layout = found.schedule, found.layout
    assert schedule is not None
    result = {
        "steps": steps,
        "addresses": addresses,
        "footprint": found.footprint,
        "least": schedule.least_blocks(),
        "chunks": len(layout.cached),
        "most": layout.most_blocks,
        "sum_numel": sum(chunk.numel for chunk in layout.chunks),
        "resident_numel": sum(chunk.numel for chunk in layout.chunks if chunk.residence is Residence.RESIDENT),
        "largest_bytes": max(chunk.nbytes for chunk in layout.chunks),
        "block_numel": layout.chunk_numel,
    }
    run.optimizer.close()
    del run, found
    gc.collect()
    return result


def wire(step: dict[str, Any]) -> dict[str, int]:
    """Bytes by collective; one chunk group here."""
    (counted,) = step["collective_bytes"].values()
    return dict(counted)


L_C, L_OS_F_OS = 2, 12
"""Bytes of bf16; of an fp32 master and two fp32 moments."""


def held_as_promised(found: dict[str, Any]) -> None:
    """What the objects hold is the footprint, from the end of the first backward on, and never moves."""
    size = found["footprint"]
    for step in found["steps"]:
        assert step["held"] == size.device_bytes - size.gradient_bytes + size.host_bytes
        assert step["blocks_replaced"] == 0
    assert found["addresses"][0] == found["addresses"][1] == found["addresses"][2], "not a byte allocated anew"


@pytest.mark.parametrize("world", with_further([2, 4], [2]))
def test_traffic_and_memory_of_the_papers_table(world: int, ranks: Ranks) -> None:
    """Elixir v2, table 1, and v1, VI-B: per step and rank, with S the elements of all chunks.

    plan                    device bytes                        host<->device          between ranks
    DDP                     (L_c + L_c + L_os F_os) S           0                      2 L_c S
    ZeRO-2 = rCache-max     L_c (S + C) + (L_c + L_os F_os) S/N 0                      2 L_c S
    ZeRO-3 = rCache-min     L_c b C + (L_c + L_os F_os) S / N   0                      3 L_c S - cached (paper: 4 L_c S)
    offload, rCache-max     L_c S                               2 L_c S / N            2 L_c S
    offload, rCache-min     L_c b C                             (3 L_c S - cached) / N, as between ranks

    b is the number of blocks. The paper's fourth L_c S is the gather for recomputation under activation checkpointing:
    here one gather serves recomputation and backward. What is cached when backward begins is not gathered again.
    """
    pool = ranks(world)
    ddp, zero2 = (pool.run(measure, plan)[0] for plan in (Plan.ddp(), Plan.zero2(chunk_numel=CHUNK)))
    least = zero2["least"]
    assert least < zero2["chunks"] // 2
    zero3, offload, offload_all = (
        pool.run(measure, plan)[0]
        for plan in (
            Plan.zero3(rcache_blocks=least, chunk_numel=CHUNK),
            Plan.offload(rcache_blocks=least, chunk_numel=CHUNK),
            Plan.offload(rcache_blocks="all", chunk_numel=CHUNK),
        )
    )
    for found in (ddp, zero2, zero3, offload, offload_all):
        held_as_promised(found)
    s = zero2["sum_numel"]
    blocks = zero2["block_numel"] * L_C

    for step in ddp["steps"]:
        assert wire(step) == {"all_reduce": 2 * 4 * ddp["sum_numel"]}, "summed in fp32"
    assert ddp["footprint"].shard_bytes == {"device": (L_C + L_OS_F_OS) * ddp["sum_numel"], "host": 0, "disk": 0}

    for found in (zero2, offload_all):
        for step in found["steps"]:
            assert wire(step) == {"all_gather": L_C * s, "reduce_scatter": L_C * s}
        assert found["footprint"].rcache_bytes == blocks * found["most"]

    for found in (zero3, offload):
        for step in found["steps"][1:]:
            assert wire(step)["reduce_scatter"] == L_C * s
            assert L_C * s < wire(step)["all_gather"] < 2 * L_C * s
        assert found["footprint"].rcache_bytes == blocks * least

    for found, home, other in ((zero2, "device", "host"), (zero3, "device", "host"), (offload, "host", "device")):
        assert found["footprint"].shard_bytes == {home: (L_C + L_OS_F_OS) * s // world, other: 0, "disk": 0}
        for step in found["steps"]:
            assert step["bytes_fetched"] == {home: wire(step)["all_gather"] // world}, "each rank brings its shard"
            assert step["bytes_offloaded"] == {home: wire(step)["reduce_scatter"] // world}
    for found in (ddp, zero2, zero3, offload, offload_all):
        size = found["footprint"]
        assert size.resident_bytes == L_C * found["resident_numel"]
        received = found["largest_bytes"] // (2 if world == 2 else 1)
        assert size.staging_bytes == (4 // L_C * found["largest_bytes"] if found is ddp else received)


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_recomputation_is_not_another_gather(kind: Any, ranks: Ranks) -> None:
    """The paper's rCache-min pays 4 L_c S with activation checkpointing; ours 3, less what is cached at the turn."""
    config = replace(CONFIG, checkpoint=kind)
    least = ranks(2).run(measure, Plan.zero2(chunk_numel=CHUNK), config)[0]["least"]
    found = ranks(2).run(measure, Plan.zero3(rcache_blocks=least, chunk_numel=CHUNK), config)[0]
    held_as_promised(found)
    for step in found["steps"][1:]:
        assert step["off_schedule"] == 0
        assert wire(step)["reduce_scatter"] == L_C * found["sum_numel"]
        assert wire(step)["all_gather"] <= 2 * L_C * found["sum_numel"]


def test_accumulators_appear_with_a_second_backward(ranks: Ranks) -> None:
    plan = Plan.offload(rcache_blocks="all", device_chunks=2, chunk_numel=CHUNK)
    for found in ranks(2).run(measure, plan, CONFIG, (1, 2, 1, 3)):
        size = found["footprint"]
        more = sum(size.accumulator_bytes.values())
        base = size.device_bytes - size.gradient_bytes + size.host_bytes
        assert more == 4 * found["sum_numel"] // 2
        first, second, *rest = [step["held"] - base for step in found["steps"]]
        assert first == 0
        assert 0 < second <= more, "some reductions may still be under way"
        assert rest == [more, more], "kept once they are there"
        assert found["addresses"][1] == found["addresses"][2] == found["addresses"][3]


def test_what_is_on_disk_is_not_in_memory(ranks: Ranks) -> None:
    """Of its chunks only values or gradients are, and what their updates go through."""
    in_memory, on_disk = (Plan.offload(rcache_blocks="all", disk_chunks=n, chunk_numel=CHUNK) for n in (0, 3))
    for found, other in zip(*(ranks(2).run(measure, plan) for plan in (on_disk, in_memory)), strict=True):
        held_as_promised(found)
        size, page = found["footprint"], PAGE_BYTES
        assert size.disk_bytes == 3 * 3 * page, "of three chunks three arrays, each filled up to a page"
        assert size.spill_buffer_bytes == DISK_THREADS * 3 * page
        less = other["footprint"].host_bytes - (size.host_bytes - size.spill_buffer_bytes)
        assert less <= 3 * L_OS_F_OS * CHUNK // 2


def test_a_tied_parameter_needs_no_accumulator(ranks: Ranks) -> None:
    for found in ranks(2).run(measure, Plan.zero2(chunk_numel=CHUNK), replace(CONFIG, tie_embeddings=True)):
        held_as_promised(found)


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, amsgrad=True), torch.optim.SGD], ids=["amsgrad", "sgd"])
def test_the_footprint_knows_the_optimizer(make: Any, ranks: Ranks) -> None:
    for found in ranks(2).run(measure, Plan.zero2(chunk_numel=CHUNK), CONFIG, (1, 1, 1), make):
        promised = found["footprint"].device_bytes
        for step in found["steps"][1:]:  # torch's own optimizers keep nothing for the zeros between parameters
            assert 0.95 * promised <= step["held"] <= promised
