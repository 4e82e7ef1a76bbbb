"""The search against trying everything, on steps drawn at random: mixtures, one rank, checkpoints, tight budgets."""

import contextlib
import random
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product
from unittest import mock

import pytest
import torch

from elixir_moe.chunks.events import ACCUMULATE, ENTER, LEAVE, REACH, ModuleInfo, StepEvent
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Plan, Tier, size_bytes
from elixir_moe.errors import PlanError
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import (
    PlanCandidate,
    Task,
    _LengthSearch,
    _Packing,
    chunk_lengths,
    gathered,
    price,
    shortage,
    solve,
)
from tests.support.cases import with_further

PLENTY = 1 << 40


def drawn(rng: random.Random) -> Task:
    """A step of a few units on 1, 2 or 4 ranks, with memory for a part of what it would like to hold."""
    world = rng.choice([1, 2, 4])
    dtype = rng.choice([torch.bfloat16, torch.float32])
    everyone = ChunkGroupKey(ranks=tuple(range(world)), dtype=dtype, trainable=True, divisor=world)
    keys = [
        everyone,
        everyone,
        replace(everyone, ranks=(0,)),  # experts that one rank owns
        replace(everyone, ranks=tuple(range(0, world, 2))),
        replace(everyone, trainable=False),
    ]
    params, parts, regions, region = [], list[ModuleInfo](), list[int | None](), None
    for unit in range(rng.randint(2, 6)):
        mine = [
            ParamSpec(name=f"{unit}.{i}", shape=(rng.choice([32, 64, 96, 200, 320]),), key=rng.choice(keys))
            for i in range(rng.randint(1, 2))
        ]
        params += [replace(p, tied=rng.random() < 0.1) for p in mine]
        indices = tuple(range(len(params) - len(mine), len(params)))
        region = rng.choice([None, region, unit])
        parts.append(ModuleInfo(params=indices, parent=None))
        regions.append(region)
    events = _events(parts, regions)
    if rng.random() < 0.5:  # a unit that contains all others, as a model with parameters of its own does
        params.append(ParamSpec(name="outer", shape=(64,), key=everyone))
        parts = [ModuleInfo(params=(len(params) - 1,), parent=None), *(replace(part, parent=0) for part in parts)]
        moved = [replace(event, module=event.module + 1) if event.module >= 0 else event for event in events]
        forward, backward = moved[: 2 * len(regions)], moved[2 * len(regions) :]
        around = [StepEvent(ENTER, 0), *forward, StepEvent(LEAVE, 0), StepEvent(REACH, 0), *backward]
        events = [*around, StepEvent(ACCUMULATE, params=parts[0].params)]
    profile = Profile(
        params=tuple(params),
        order=tuple(range(len(params))),
        parts=tuple(parts),
        events=tuple(events),
        parameters=sum(p.numel for p in params),
        tokens=1,
        flops=rng.choice([0, 10**7]),
        traffic_bytes=0,
        activation_bytes=(held := rng.choice([0, 2000])),
        buffer_bytes=0,
        **_kept(rng, held),
    )
    plenty = Task(
        profile=profile,
        # Parameters here are of 100 elements: at 60 microseconds, units would be all of a step. The search weighs units
        # between chunks that begin with layers and chunks that are filled, and not between homes of chunks.
        hardware=replace(Hardware.named("a100-80g-pcie-x4"), disk_read=2.0, disk_write=1.0, unit_us=1e-9),
        gpus=world,
        capacity_bytes=PLENTY,
        host_bytes=PLENTY,
        over_gloo=rng.random() < 0.5,
        accumulation=rng.choice([1, 1, 2]),
    )
    most, _ = plenty.held_bytes(price(plenty, Plan.zero2()).size)
    return replace(
        plenty,
        capacity_bytes=int(rng.uniform(0.1, 1.1) * most / 0.95 + 1.25 * profile.activation_bytes),
        host_bytes=(host := rng.choice([PLENTY, PLENTY, most, most // 2, most // 4])),
        disk_bytes=None if host is PLENTY else rng.choice([None, 0, most // 2, PLENTY]),
    )


def _events(parts: list[ModuleInfo], regions: list[int | None]) -> list[StepEvent]:
    """Each part runs once; those of one region run again before the backward of its last one."""
    numbers = range(len(parts))
    events = [StepEvent(kind, number) for number in numbers for kind in (ENTER, LEAVE)]
    done: set[int | None] = {None}
    for number in reversed(numbers):
        events.append(StepEvent(REACH, number))
        region = regions[number]
        events += [
            StepEvent(ENTER, other, in_backward=True)
            for other in numbers
            if region not in done and regions[other] == region
        ]
        done.add(region)
        events += [StepEvent(ACCUMULATE, params=(p,)) for p in reversed(parts[number].params)]
    return events


def with_little_host_memory(rng: random.Random) -> Task:
    """As `drawn`, with a disk that is large enough and too little memory for the values of all chunks on it."""
    task = drawn(rng)
    _, most = task.held_bytes(price(task, Plan.offload(rcache_blocks="all")).size)
    disk = rng.choice([most, PLENTY, PLENTY])
    return replace(task, host_bytes=int(rng.uniform(0.0, 0.3) * most), disk_bytes=disk)


def in_one_memory(rng: random.Random) -> Task:
    """As `drawn`, on a machine whose GPU has the memory of its host, with or without a disk."""
    task = drawn(rng)
    _, most = task.held_bytes(price(task, Plan.offload(rcache_blocks="all")).size)
    hardware = replace(task.hardware, one_memory=True)
    return replace(task, hardware=hardware, host_bytes=0, disk_bytes=rng.choice([None, 0, most // 2, PLENTY, PLENTY]))


def _kept(rng: random.Random, held: int) -> dict[str, tuple[int, ...]]:
    """Inputs of checkpointed regions among `held` bytes of activations, in half of the cases."""
    if not held or rng.random() < 0.5:
        return {}
    kept = tuple(rng.choice([100, 400]) for _ in range(rng.randint(1, 4)))
    return {"kept": kept, "kept_peaks": tuple(held - sum(kept[:n]) for n in range(len(kept) + 1))}


def every_plan(task: Task, rng: random.Random) -> Iterator[PlanCandidate]:
    """All blocks and tiers that can be carried out and fit, on lengths worth trying and on some others."""
    params = task.profile.params
    lengths = chunk_lengths(params, task.chunk_numel)
    _, longest = task.chunk_numel or (0, 4 * lengths[0])
    away = {0, bisect_right(list(accumulate(task.profile.kept)), task.host_bytes)}
    others = [rng.randint(lengths[0], longest) for _ in range(3)]
    for length in {*rng.sample(lengths, min(len(lengths), 12)), *others}:
        chunks = len(price(task, Plan.offload(rcache_blocks="all", chunk_numel=length)).layout.chunks)
        for device_chunks in range(chunks + 1):
            # The step is the same wherever chunks are that are not on the device.
            layout = Plan.offload(rcache_blocks="all", device_chunks=device_chunks, chunk_numel=length).layout(params)
            schedule = task.profile.schedule(layout)
            layout = replace(layout, open_gradients=schedule.open_gradients())
            for blocks in range(1, max(layout.most_blocks, 1) + 1):
                try:
                    loads = gathered(schedule, min(blocks, layout.most_blocks), task.accumulation)
                except PlanError:
                    continue
                on_disk = range(chunks - device_chunks + 1 if task.disk_bytes else 1)
                for disk_chunks, (whole, near) in product(on_disk, ((False, False), (True, False), (False, True))):
                    in_host_memory = chunks - device_chunks - disk_chunks
                    if (whole and not disk_chunks) or (task.hardware.one_memory and in_host_memory):
                        continue
                    plan = Plan.offload(
                        rcache_blocks=blocks,
                        device_chunks=device_chunks,
                        disk_chunks=disk_chunks,
                        values_on_disk=whole,
                        values_on_device=near,
                        chunk_numel=length,
                    )
                    for regions in away:
                        found = price(task, replace(plan, host_checkpoints=regions), layout, loads)
                        if not shortage(found.task, found.size):
                            yield found


_SIZE = r"([\d.]+ \w+)"


def nbytes_of(text: str) -> int:
    found = size_bytes("a size", text)
    assert found is not None
    return found


def what_would_help(task: Task, message: str) -> Iterator[Task]:
    """The task with each of the changes that a refusal names."""
    changes = message.partition("; ")[2]
    both = re.search(rf"give the device {_SIZE} more and each rank {_SIZE} more", changes)
    if both:
        device, host = map(nbytes_of, both.groups())
        yield replace(task, capacity_bytes=task.capacity_bytes + device, host_bytes=task.host_bytes + host)
        return
    for more in re.findall(rf"give the device {_SIZE} more", changes):
        yield replace(task, capacity_bytes=task.capacity_bytes + nbytes_of(more))
    for more in re.findall(rf"give each rank {_SIZE} more host memory", changes):
        yield replace(task, host_bytes=task.host_bytes + nbytes_of(more))
    for more in re.findall(rf"{_SIZE} more on a disk", changes):
        yield replace(task, disk_bytes=(task.disk_bytes or 0) + nbytes_of(more))
    for less in re.findall(rf"free {_SIZE} of the", changes):
        freed = task.profile.activation_bytes - nbytes_of(less)
        peaks = tuple(peak - nbytes_of(less) for peak in task.profile.kept_peaks)
        yield replace(task, profile=replace(task.profile, activation_bytes=freed, kept_peaks=peaks))


@pytest.fixture(autouse=True)
def short_pages() -> Iterator[None]:
    """As short beside the chunks here as they are beside those of a model."""
    with (
        mock.patch("elixir_moe.chunks.ledger._SPILL_SLICE_NUMEL", 8),
        mock.patch("elixir_moe.chunks.ledger.PAGE_BYTES", 16),
        mock.patch("elixir_moe.chunks.ledger.VALUES_BUFFERS", 1),
        mock.patch("elixir_moe.chunks.ledger.VALUES_REQUEST_BYTES", 16),
    ):
        yield


@pytest.mark.parametrize("seed", with_further(range(400), range(30)))
def test_nothing_beats_the_plan_found(seed: int) -> None:
    rng = random.Random(seed)
    nothing_beats_the_plan_for(drawn(rng), rng)


@pytest.mark.parametrize("seed", with_further(range(200), range(10)))
def test_nothing_in_a_range_of_chunk_lengths_beats_the_plan_found(seed: int) -> None:
    rng = random.Random(seed)
    task = drawn(rng)
    largest = max((p.numel for p in task.profile.params if not p.tied), default=1)
    low = rng.randint(1, 3 * largest)
    task = replace(task, chunk_numel=(low, rng.randint(max(low, largest), 8 * largest)))
    nothing_beats_the_plan_for(task, rng)
    with contextlib.suppress(PlanError):  # what it says is checked above
        found = solve(task).plan.chunk_numel
        assert found is not None and low <= found <= task.chunk_numel[1]


@pytest.mark.parametrize("seed", with_further(range(200), (0, 1, 30, 51, 59, 88)))
def test_nothing_beats_the_plan_found_with_little_host_memory(seed: int) -> None:
    rng = random.Random(seed)
    nothing_beats_the_plan_for(with_little_host_memory(rng), rng)


@pytest.mark.parametrize("seed", with_further(range(200), (1, 9, 22, 23, 30, 76, 102)))
def test_nothing_beats_the_plan_found_in_one_memory(seed: int) -> None:
    rng = random.Random(seed)
    task = in_one_memory(rng)
    nothing_beats_the_plan_for(task, rng)
    with contextlib.suppress(PlanError):  # what it says is checked above
        found = solve(task)
        assert found.chunks_in(Tier.HOST) == 0 and not found.task.kept_regions
        assert sum(task.held_bytes(found.size)) <= task.allowed_bytes, "both are the same memory"


@pytest.mark.parametrize("seed", with_further((9, 30, 36, 50), (9, 36)))
def test_values_are_on_the_device_where_the_link_is_slow(seed: int) -> None:
    rng = random.Random(seed)
    task = drawn(rng)
    slow = {gpus: replace(links, b_c2g=links.b_c2g / 50) for gpus, links in task.hardware.by_gpus.items()}
    task = replace(task, hardware=replace(task.hardware, by_gpus=slow), accumulation=16)
    nothing_beats_the_plan_for(task, rng)
    assert solve(task).plan.values_on_device


@pytest.mark.parametrize("seed", with_further(range(300), range(40)))
def test_counts_are_those_of_trying_every_number_on_disk(seed: int) -> None:
    rng = random.Random(seed)
    task = replace(rng.choice([drawn, with_little_host_memory])(rng), moments=rng.randint(0, 3))
    lengths = chunk_lengths(task.profile.params)
    places = (False, False), (True, False), (False, True)
    for length, (whole, near) in product(rng.sample(lengths, min(3, len(lengths))), places):
        packing = _Packing(task, length)
        search = _LengthSearch(task, packing, values_on_disk=whole, values_on_device=near)
        chunks = len(packing.layout.chunks)
        for device_chunks in rng.sample(range(chunks + 1), chunks + 1):
            held, away = search._held(device_chunks), chunks - device_chunks
            sizes = [bytes_of(task, packing.layout, device_chunks, count, whole, near) for count in range(away + 1)]
            hosts = [host for _, host, _ in sizes]
            fits = [count for count, host in enumerate(hosts) if host <= task.host_bytes]
            disk_chunks, host, short = 0, hosts[0], None
            if task.disk_bytes is not None and 0 not in fits:
                room = max(count for count, (_, _, disk) in enumerate(sizes) if disk <= task.disk_bytes)
                short = max(0, sizes[fits[0]][2] - task.disk_bytes) if fits else None
                disk_chunks = 0 if short != 0 else fits[0]
                host = hosts[disk_chunks] if short == 0 else min(hosts[0], hosts[room])
            assert (held.disk_chunks, held.host_bytes, held.disk_short_bytes) == (disk_chunks, host, short)
            assert held.device_bytes == sizes[0][0]


def bytes_of(
    task: Task, layout: Layout, device_chunks: int, disk_chunks: int, whole: bool, near: bool
) -> tuple[int, int, int]:
    """Bytes on the device without blocks, in host memory and on disk."""
    plan = Plan.offload(
        rcache_blocks="all", device_chunks=device_chunks, disk_chunks=disk_chunks, values_on_device=near
    )
    size = task.footprint(replace(plan, values_on_disk=whole and disk_chunks > 0), plan.place(layout))
    device, host = task.held_bytes(size)
    return device - size.rcache_bytes, host, size.disk_bytes


def nothing_beats_the_plan_for(task: Task, rng: random.Random) -> None:
    choices = list(every_plan(task, rng))
    if not choices:
        with pytest.raises(PlanError, match=r"too little (device memory|host memory|memory of device)") as error:
            solve(task)
        for enough in what_would_help(task, str(error.value)):
            found = solve(enough)
            assert not shortage(found.task, found.size)
        return
    found = solve(task)
    assert not shortage(found.task, found.size)
    if found.plan.rcache_blocks == "all" and not found.plan.offloaded:  # then inputs of checkpoints stay, too
        choices = [choice for choice in choices if not choice.task.kept_regions]
    assert found.seconds.step <= min(choice.seconds.step for choice in choices) * (1 + 1e-12)
    assert price(task, found.plan) == found, "what was found is what the plan says"
