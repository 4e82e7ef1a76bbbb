"""Passes of several micro-batches: the bytes that a price predicts are those that a step moves, and the search."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.errors import PlanError
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.solve import Task, _Packing, price, solve
from elixir_moe.planner.trace import trace
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss, lm_loss_without_logits
from tests.runtime.test_accumulate import PLANS, Tied, adam, batches_of, bytes_of, loss_of, wrap
from tests.runtime.test_first_step import Model
from tests.runtime.test_first_step import loss_of as drawn_loss
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
COUNT = 4
DIALS = (None, 1, 2, 3, 8)
MACHINE = "a100-40g-sxm-x4"


def task_of(model: nn.Module, step: Any, sample: Any, world: int = 1, **options: Any) -> Task:
    fields: dict[str, Any] = {"capacity_bytes": 2**40, "host_bytes": 2**40, "disk_bytes": 2**40, "over_gloo": True}
    profile = trace(model, step, sample, world=world, compute_dtype=torch.bfloat16)
    hardware = replace(Hardware.named(MACHINE), disk_bytes=2**40, disk_read=3.0, disk_write=3.0)
    return Task(profile=profile, hardware=hardware, gpus=world, **{**fields, **options})


def moved_by_kind(moved: dict[str, int]) -> dict[str, int]:
    """The bytes of a step: fetched, offloaded, gathered and reduced."""
    found = dict.fromkeys(("fetched", "offloaded", "gathered", "reduced"), 0)
    names = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "reduced"}
    for key, nbytes in moved.items():
        kind, what = key.split(maxsplit=1)
        found[names.get(kind, kind)] += nbytes * (what != "device")
    return found


def counted_and_predicted(name: str, dial: int | None) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(rank) Bytes of a step that cross the bus or ranks, as counted, as priced, and as `em.inspect` gives them."""
    model = Tied("non-reentrant")
    world = em.init_mesh(device_type="cpu").size(0)
    plan = replace(PLANS[name], batches_per_pass=dial)
    task = task_of(model, loss_of, batches_of(1)[0], world, accumulation=COUNT, batches_per_pass=COUNT)
    moved = price(task, plan).moved
    model, optimizer = wrap(model, plan, adam(model), compute_dtype=torch.bfloat16)
    before: dict[str, int] = {}
    for step in range(3):
        if step == 2:
            before = bytes_of(em.inspect(model).statistics)
        em.accumulate(model, loss_of, batches_of(COUNT))
        optimizer.step()
        optimizer.zero_grad()
    after = bytes_of(em.inspect(model).statistics)
    said = em.inspect(model).step_bytes(COUNT)
    optimizer.close()
    priced = {kind: getattr(moved, f"{kind}_bytes") for kind in ("fetched", "offloaded", "gathered", "reduced")}
    return moved_by_kind({key: n - before[key] for key, n in after.items()}), priced, said


def every_dial(name: str) -> list[tuple[dict[str, int], dict[str, int], dict[str, int]]]:
    return [counted_and_predicted(name, dial) for dial in DIALS]


@pytest.mark.parametrize(("name", "world"), [("zero3", 2), ("offload", 1), ("disk", 2)])
def test_the_bytes_of_a_step_are_those_counted(name: str, world: int, ranks: Ranks) -> None:
    for by_dial in ranks(world).run(every_dial, name):
        for dial, (counted, priced, said) in zip(DIALS, by_dial, strict=True):
            assert counted == priced == said, (name, dial)
            assert sum(counted.values()) > 0


def gpt(**shape: Any) -> GPT:
    sizes = {"vocab_size": 512, "seq_len": 32, "n_layers": 4, "d_model": 64, "n_heads": 4, **shape}
    return GPT(GPTConfig(**sizes, checkpoint="non_reentrant"))


SAMPLE = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(0))


def tight(**options: Any) -> Task:
    """A step of which half the weights fit on the device, and whose link to it is slow."""
    task = task_of(gpt(), lm_loss, SAMPLE, over_gloo=False, accumulation=8, batches_per_pass=None, **options)
    capacity = int(2 * 2 * sum(p.numel for p in task.profile.params) + 1.5 * task.profile.activation_bytes)
    return replace(task, capacity_bytes=capacity)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 8.0])
def test_the_search_chooses_the_fastest_number_of_batches_in_a_pass(factor: float) -> None:
    """Less memory leaves room for fewer micro-batches."""
    task = tight()
    task = replace(task, capacity_bytes=int(factor * task.capacity_bytes))
    best, each = solve(task), {}
    for together in task.dials:
        with contextlib.suppress(PlanError):
            each[together] = solve(task.passing(together)).seconds.step
    assert best.seconds.step == min(each.values())
    assert best.plan.batches_per_pass == best.task.together
    assert each[best.task.together] == best.seconds.step
    assert best.task.passes == -(-8 // best.task.together)


def test_where_all_weights_stay_gathered_the_plain_loop_is_foreseen() -> None:
    task = task_of(gpt(n_layers=2), lm_loss, SAMPLE, over_gloo=False, accumulation=8)
    for number in (8, None):
        found = solve(replace(task, batches_per_pass=number))
        assert not found.plan.gathers_again(found.layout)
        assert found.task.together == 1 and found.task.passes == 8


def test_one_pass_needs_no_sums_and_moves_what_one_batch_does() -> None:
    task = tight(host_bytes=2**40)
    task = replace(task, capacity_bytes=8 * task.capacity_bytes)
    plan = em.Plan.offload(rcache_blocks=4, chunk_numel=50_000)
    one = price(replace(task, accumulation=1, batches_per_pass=1), plan)
    whole, loop = (price(task, replace(plan, batches_per_pass=n)) for n in (8, 1))
    assert whole.moved == one.moved
    assert loop.moved.offloaded_bytes == 8 * one.moved.offloaded_bytes
    assert whole.task.held_bytes(whole.size) == one.task.held_bytes(one.size)
    numel = sum(p.numel for p in task.profile.params)
    assert loop.task.held_bytes(loop.size)[1] - one.task.held_bytes(one.size)[1] >= 4 * numel
    assert whole.task.profile.activation_bytes > one.task.profile.activation_bytes


def test_heads_that_recompute_keep_no_gradient_for_each_micro_batch() -> None:
    config = GPTConfig(
        vocab_size=4096, seq_len=8, n_layers=2, d_model=64, n_heads=4, tie_embeddings=False, checkpoint="non_reentrant"
    )
    sample = torch.zeros(4, 9, dtype=torch.int64)
    head = 4096 * 64 * torch.bfloat16.itemsize
    peaks, flops = [], []
    for recompute in (False, True):
        step = partial(lm_loss_without_logits, recompute=recompute)
        profile = trace(GPT(config), step, sample, compute_dtype=torch.bfloat16)
        peaks.append([profile.peak_bytes(0, together) for together in (8, 16)])
        flops.append(profile.flops)
    (eight, sixteen), (recomputed, more) = peaks
    assert sixteen - eight >= 8 * head
    assert more - recomputed < head
    assert flops[1] - flops[0] == 2 * 4 * 8 * 4096 * 64


def searched() -> tuple[em.Plan, list[float], list[float]]:
    """(rank) The plan that is found for steps of eight micro-batches, its losses, and those of plain torch."""
    model = gpt()
    em.init_mesh(device_type="cpu")
    torch.manual_seed(0)
    model = gpt(n_layers=2)
    batches = [SAMPLE.roll(n) for n in range(8)]
    plain = [lm_loss(model, batch).item() for batch in batches]
    optimizer: Any = torch.optim.AdamW(model.parameters())
    budget = 16 * sum(p.numel() for p in model.parameters()) // dist.get_world_size() // 2 + 20_000_000
    auto = em.Plan.auto(lm_loss, SAMPLE, hardware=MACHINE, budget=budget, accumulation=8, batches_per_pass=None)
    model, optimizer = em.wrap(model, optimizer, plan=auto)
    found = [loss.item() for loss in em.accumulate(model, lm_loss, batches)]
    optimizer.step()
    plan = em.inspect(model).plan
    optimizer.close()
    return plan, found, plain


def test_a_searched_plan_has_the_number(ranks: Ranks) -> None:
    for plan, found, plain in ranks(1).run(searched):
        assert plan.batches_per_pass in (1, 2, 4, 8)
        assert found == plain
        assert em.Plan.from_json(plan.to_json()).batches_per_pass == plan.batches_per_pass
    with pytest.raises(PlanError, match=r"batches_per_pass=0: expected a number of micro-batches, at least 1, or None"):
        em.Plan.auto(lm_loss, SAMPLE, batches_per_pass=0)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 300), marks=pytest.mark.slow)])
def test_a_step_with_chunks_in_place_is_that_of_a_replay(seeds: range, ranks: Ranks) -> None:
    """However many of the chunks are in place, and whatever units the others then have."""
    ranks(1).run(compare_with_replays, seeds)


def compare_with_replays(seeds: range) -> None:
    """(rank) Compares all steps of drawn models, one of which has chunks of any length, with replays."""
    mesh = em.init_mesh(device_type="cpu")
    for seed in seeds:
        draw = random.Random(seed)
        model, sample = Model(random.Random(seed), mesh), torch.randint(0, 24, (2, 8))
        profile = trace(model, drawn_loss, sample, compute_dtype=draw.choice([torch.float32, torch.bfloat16]))
        task = replace(task_of(model, drawn_loss, sample, accumulation=2), profile=profile).passing(2)
        packing = _Packing(task, draw.choice([600, 1200, 2400]), whole_layers=draw.random() < 0.5)
        for device_chunks in range(1, len(packing.layout.chunks) + 1):
            found = packing.step(device_chunks)
            layout = em.Plan.offload(rcache_blocks="all", device_chunks=device_chunks).place(packing.layout)
            for micro_batches, mine in ((1, found.one), (2, found.two)):
                wanted = profile.step_order.schedule(layout, micro_batches)
                assert (mine.entries, mine.kept) == (wanted.entries, wanted.kept), (seed, device_chunks, micro_batches)
