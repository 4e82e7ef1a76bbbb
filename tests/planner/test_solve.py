"""The search against trying everything, and its bytes against those of the runtime."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.chunks.plan import Plan, size_bytes
from elixir_moe.errors import PlanError
from elixir_moe.planner.cost import F_ALLOC
from elixir_moe.planner.explain import explain
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import Packings, Task, chunk_lengths, device_bytes_for, price, shortage, solve
from elixir_moe.planner.trace import trace
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.planner.test_exhaustive import every_plan
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
BATCH = torch.zeros(2, 17, dtype=torch.int64)


@cache
def profile_of(gpus: int, layers: int) -> Profile:
    """What a trace finds of a small model."""
    config = GPTConfig(vocab_size=64, seq_len=16, n_layers=layers, d_model=16, n_heads=2, checkpoint="non_reentrant")
    with torch.device("meta"):
        model = GPT(config)
    return trace(model, lm_loss, BATCH, world=gpus, compute_dtype=torch.bfloat16)


def task(gpus: int, room: float, layers: int = 3, host: int = 1 << 40) -> Task:
    """A small model with `room` of what it would take to hold all of it on the device."""
    profile = profile_of(gpus, layers)
    hardware = Hardware.named("a100-80g-pcie-x4")
    plenty = Task(profile=profile, hardware=hardware, gpus=gpus, capacity_bytes=1 << 40, host_bytes=host)
    whole = price(plenty, Plan.zero2()).size.device_bytes
    capacity = int(profile.buffer_bytes + 1.25 * profile.activation_bytes + room * whole / 0.95)
    return Task(profile=profile, hardware=hardware, gpus=gpus, capacity_bytes=capacity, host_bytes=host)


@pytest.mark.parametrize(("gpus", "room"), with_further(product([1, 2, 4], [0.65, 0.8, 1.1]), [(1, 0.8), (2, 0.65)]))
def test_nothing_beats_the_plan_found(gpus: int, room: float) -> None:
    given = task(gpus, room, layers=2)
    given = replace(given, hardware=replace(given.hardware, unit_us=1e-9))  # not weighed between homes of chunks
    given = replace(given, profile=replace(given.profile, work=()))  # stalls are weighed after the search
    found = solve(given)
    assert not shortage(found.task, found.size)
    best = min(choice.seconds.step for choice in every_plan(given, random.Random(0)))
    assert found.seconds.step <= best * (1 + 1e-12)
    assert "chunks" in explain(found)


@pytest.mark.parametrize("unit_us", [1e-6, 1e6])
def test_whole_layers_are_chosen_by_bytes_and_by_the_host_time_of_units(unit_us: float) -> None:
    given = task(2, 0.65, layers=4)
    given = replace(given, hardware=replace(given.hardware, unit_us=unit_us))
    found = solve(given)
    other = replace(found.plan, whole_layers=not found.plan.whole_layers)
    try:
        turned = price(found.task, other)
    except PlanError:  # too few blocks for it
        assert found.plan.whole_layers
        return
    assert shortage(turned.task, turned.size) or turned.seconds.step >= found.seconds.step
    assert (turned.moved.units > found.moved.units) == found.plan.whole_layers


@pytest.mark.parametrize(("blocks", "fit"), [(6, False), (9, True), (12, True)])
def test_one_rank_runs_a_long_model_in_few_blocks(blocks: int, fit: bool) -> None:
    """A rank by itself needs no block for layers that are on the device: the search must try few blocks, too."""
    given = task(1, 1.0, layers=40)
    shortest = chunk_lengths(given.profile.params)[0]
    given = replace(given, chunk_numel=(shortest, shortest), profile=replace(given.profile, kept=()))
    packings = Packings(given)
    layout = packings.at(shortest).layout
    spare = blocks * layout.block_bytes - given.allowed_bytes
    given = replace(given, capacity_bytes=given.capacity_bytes + math.ceil(spare / F_ALLOC) + 1)
    assert layout.most_blocks > 100
    assert (device_bytes_for(given, packings) <= given.allowed_bytes) is fit
    if fit:
        found = solve(given, packings)
        assert not shortage(found.task, found.size)
    else:
        with pytest.raises(PlanError, match="too little device memory"):
            solve(given, packings)


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_the_explanation_of_a_small_model_shows_its_bytes() -> None:
    found = solve(task(2, 0.65, layers=2))
    shown = re.findall(r"([\d.]+) (B|KiB|MiB|GiB)\b", explain(found))
    there, size = found.task, found.size
    sizes = [size.device_bytes, there.allowed_bytes, there.profile.activation_bytes, there.profile.buffer_bytes]
    sizes += [there.capacity_bytes, size.host_bytes, there.host_bytes, *[there.kept_bytes] * bool(there.kept_regions)]
    sizes += [size.disk_bytes, 0]
    assert len(shown) == len(sizes)
    for (number, unit), nbytes in zip(shown, sizes, strict=True):
        assert abs(float(number) * UNITS[unit] - nbytes) <= 0.006 * UNITS[unit]
        assert float(number) >= 1 or not nbytes, "no size is lost in its unit"


def test_more_memory_is_never_slower() -> None:
    steps = [solve(task(2, room)).seconds.step for room in (0.6, 0.8, 1.0, 2.0)]
    assert every(more <= 1.001 * less for less, more in pairwise(steps)), "an update on the device is not hidden"


def test_what_does_not_fit_says_where_and_by_how_much() -> None:
    with pytest.raises(
        PlanError, match=r"no plan fits 2 x a100-80g-pcie-x4: ([\d.]+ \w+) too little device memory"
    ) as error:
        solve(task(2, 0.1))
    given = task(2, 0.1)
    said = re.search(r"give the device ([\d.]+ \w+) more", str(error.value))
    assert said is not None
    more = size_bytes("said", said[1])
    assert more is not None
    enough = Task(
        profile=given.profile,
        hardware=given.hardware,
        gpus=2,
        capacity_bytes=given.capacity_bytes + more,
        host_bytes=1 << 40,
    )
    found = solve(enough)
    assert not shortage(found.task, found.size)
    with pytest.raises(PlanError, match=r"or give each rank [\d.]+ [KMG]iB more host memory"):
        solve(task(2, 0.5, host=1000))


def held(room: float) -> dict[str, Any]:
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    config = GPTConfig(vocab_size=64, seq_len=16, n_layers=3, d_model=16, n_heads=2, checkpoint="non_reentrant")
    model = GPT(config, mesh_of_world())
    em.annotate(model, gpt_patterns(model))
    profile = trace(model, lm_loss, BATCH, world=world, rank=torch.distributed.get_rank(), compute_dtype=torch.bfloat16)
    given = Task(
        profile=profile,
        hardware=Hardware.named("a100-80g-pcie-x4"),
        gpus=world,
        capacity_bytes=int(1.25 * profile.activation_bytes + room),
        host_bytes=1 << 40,
        over_gloo=True,
    )
    found = solve(given)
    model, optimizer = em.wrap(
        model,
        torch.optim.AdamW(model.parameters()),
        plan=found.plan,
        sample=BATCH,
        step=lm_loss,
        compute_dtype=torch.bfloat16,
    )
    for _ in range(2):
        lm_loss(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = {
        "planned": found.size,
        "runtime": em.inspect(model).footprint,
        "layouts": (found.layout, em.inspect(model).layout),
    }
    optimizer.close()
    return result


@pytest.mark.parametrize("room", [90_000, 10_000_000])
def test_planned_bytes_are_the_runtimes(room: int, ranks: Ranks) -> None:
    """`Footprint` is held against the allocations of a running model elsewhere; here it must be the same one."""
    for found in ranks(2).run(held, room):
        assert found["planned"] == found["runtime"]
        assert found["layouts"][0] == found["layouts"][1]
