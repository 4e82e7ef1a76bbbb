"""The timeline of fetches and compute against a simulation tick by tick, and the plans that it leads to."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import pytest
import torch

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, CacheState, Load, Schedule, gradients_of
from elixir_moe.chunks.plan import Plan
from elixir_moe.chunks.residence import CACHED
from elixir_moe.planner import cost
from elixir_moe.planner.cost import Seconds
from elixir_moe.planner.explain import explain
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import Packings, Task, Timed, price, shortage, solve, with_stall
from elixir_moe.planner.timeline import Timeline, elapsed_seconds
from elixir_moe.planner.trace import trace
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss
from tests.support.cases import with_further

BATCH = torch.zeros(2, 17, dtype=torch.int64)


@dataclass(frozen=True)
class Step:
    """Requests with the loads of each, and the time that the device computes before it."""

    schedule: Schedule
    blocks: int
    loads: list[list[Load]]
    compute: list[int]
    fetches: list[int]
    updates: list[tuple[int, int]]
    """(chunk, time) of each update that begins before the step, one after another."""
    near: frozenset[int] = frozenset()
    """Chunks that cross the bus once."""

    def elapsed(self) -> float:
        timeline = Timeline(self.fetches, self.near)
        timeline.update(self.updates)
        for entry, loads, ticks in zip(self.schedule.entries, self.loads, self.compute, strict=False):
            timeline.request(entry, loads, ticks)
        return timeline.computed + self.compute[-1]


def drawn(rng: random.Random) -> Step:
    """A few units that acquire and release up to three chunks, and gradients, in any nesting."""
    chunks = rng.randint(2, 7)
    entries: list[CacheRequest] = []
    held: list[tuple[int, ...]] = []
    for _ in range(rng.randint(2, 16)):
        if held and rng.random() < 0.5:
            entries.append(CacheRequest(RELEASE, held.pop(rng.randrange(len(held)))))
        wanted = tuple(rng.sample(range(chunks), rng.randint(1, min(chunks, 3))))
        gradients = (gradients_of(rng.randrange(chunks)),)
        if rng.random() < 0.2 and gradients not in held:
            wanted = gradients
        held.append(wanted)
        entries.append(CacheRequest(ACQUIRE, wanted))
    entries += [CacheRequest(RELEASE, wanted) for wanted in reversed(held)]
    schedule = Schedule(entries)
    blocks = schedule.least_blocks() + rng.randint(0, 3)
    state = CacheState(blocks, schedule)
    loads = [(state.acquire if e.verb is ACQUIRE else state.release)(e.chunks) for e in schedule.entries]
    compute = [rng.choice([0, 0, 1, 4, 9]) for _ in range(len(entries) + 1)]
    fetches = [rng.choice([0, 1, 5, 12]) for _ in range(chunks)]
    updated = rng.sample(range(chunks), rng.choice([0, chunks // 2, chunks]))
    updates = [(chunk, rng.choice([0, 1, 3, 9])) for chunk in updated]
    near = frozenset(rng.sample(range(chunks), rng.choice([0, 0, chunks // 2, chunks])))
    return Step(schedule, blocks, loads, compute, fetches, updates, near)


def ticks_of(step: Step) -> int:
    """The step, tick by tick: the host has queued all fetches; each waits for the releases and the update before it."""
    ends = accumulate(ticks for _, ticks in step.updates)
    updated = {chunk: end for (chunk, _), end in zip(step.updates, ends, strict=True)}
    queue: list[tuple[int, int, set[int]]] = []  # (chunk, ticks, the requests that must have been passed)
    wanted: list[list[int]] = []  # for each request: the positions in the queue that it waits for
    at: dict[int, int] = {}
    block_of: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for position, (entry, loads) in enumerate(zip(step.schedule.entries, step.loads, strict=True)):
        if entry.verb is RELEASE:
            for chunk in entry.chunks:
                readers.setdefault(block_of[chunk], set()).add(position)
        for load in loads:
            there = load.chunk in step.near and load.chunk in at
            block_of[load.chunk], at[load.chunk] = load.block, len(queue)
            ticks = step.fetches[load.chunk] if load.chunk >= 0 and not there else 0
            queue.append((load.chunk, ticks, set(readers.get(load.block, ()))))
        wanted.append([at[chunk] for chunk in entry.chunks] if entry.verb is ACQUIRE else [])
    passed, now, left = 0, 0, step.compute[0]
    remaining = [ticks for _, ticks, _ in queue]
    arrived: set[int] = set()
    while True:
        moved = True
        while moved:
            moved = False
            for number, (chunk, ticks, needs) in enumerate(queue):
                may_begin = now >= updated.get(chunk, 0) and all(position < passed for position in needs)
                if number not in arrived and not ticks and may_begin:
                    arrived.add(number)
                    moved = True
            if passed < len(wanted) and not left and arrived.issuperset(wanted[passed]):
                passed, moved = passed + 1, True
                left = step.compute[passed]
        if passed == len(wanted) and not left:
            return now
        first = next((n for n, (_, ticks, _) in enumerate(queue) if ticks and remaining[n]), None)
        may_begin = first is not None and now >= updated.get(queue[first][0], 0)
        if first is not None and may_begin and all(position < passed for position in queue[first][2]):
            remaining[first] -= 1
            if not remaining[first]:
                arrived.add(first)
        left = max(left - 1, 0)
        now += 1


@pytest.mark.parametrize("seed", with_further(range(600), range(100)))
def test_it_is_the_simulation_tick_by_tick(seed: int) -> None:
    step = drawn(random.Random(seed))
    assert step.elapsed() == ticks_of(step)


@pytest.mark.parametrize("seed", with_further(range(300), range(100)))
def test_nothing_that_is_shorter_makes_it_longer(seed: int) -> None:
    rng = random.Random(seed)
    step = drawn(rng)
    compute, fetch = sum(step.compute), sum(step.fetches[n.chunk] for made in step.loads for n in made if n.chunk >= 0)
    assert max(compute, fetch) <= step.elapsed() <= compute + fetch + sum(ticks for _, ticks in step.updates)
    chunk, request = rng.randrange(len(step.fetches)), rng.randrange(len(step.compute))
    for less in (
        replace(step, fetches=[n // 2 if at == chunk else n for at, n in enumerate(step.fetches)]),
        replace(step, compute=[n // 2 if at == request else n for at, n in enumerate(step.compute)]),
        replace(step, loads=_apart(step.loads)),
        replace(step, updates=[(index, ticks // 2) for index, ticks in step.updates]),
    ):
        assert less.elapsed() <= step.elapsed()


def _apart(loads: Sequence[Sequence[Load]]) -> list[list[Load]]:
    """The same loads, each into a block of its own."""
    numbers = iter(range(sum(map(len, loads))))
    return [[replace(load, block=next(numbers)) for load in made] for made in loads]


def layers(count: int) -> Schedule:
    """Forward and backward of frozen layers of one chunk each, which a unit holds one at a time."""
    order = [*range(count), *reversed(range(count))]
    return Schedule([CacheRequest(verb, (n,)) for n in order for verb in (ACQUIRE, RELEASE)])


def test_one_block_hides_nothing_and_two_hide_the_shorter() -> None:
    """Four layers of 3 s, of which each fetch takes 2 s; a layer computes between its acquire and its release."""
    schedule, compute = layers(4), [0, *(8 * [3, 0])]
    seconds = [elapsed_seconds(schedule, compute, [2.0] * 4, blocks) for blocks in (1, 2, 4)]
    assert seconds == [8 * 3 + 7 * 2, 8 * 3 + 2, 8 * 3 + 2], "the last layer of forward is the first of backward"


def test_chunks_near_are_fetched_once_a_step() -> None:
    """Four layers of 3 s, one block, fetches of 2 s: the others copy what the device has."""
    schedule, compute = layers(4), [0, *(8 * [3, 0])]

    def seconds(backwards: int, updates: Sequence[tuple[int, float]] = ()) -> float:
        return elapsed_seconds(schedule, compute, [2.0] * 4, 1, backwards, updates, near=frozenset(range(4)))

    assert [seconds(1), seconds(2)] == [8 * 3 + 4 * 2, 16 * 3 + 4 * 2]
    assert seconds(1, [(0, 5.0)]) == seconds(1) + 5, "an update makes each of them stale"


def test_chunks_that_stay_gathered_are_fetched_by_the_steps_before() -> None:
    schedule = Schedule(layers(4).entries, kept=range(4))
    assert elapsed_seconds(schedule, [1.0] * 17, [100.0] * 4, blocks=4) == 17
    assert elapsed_seconds(schedule, [1.0] * 17, [100.0] * 4, blocks=4, backwards=2) == 2 * 17


def test_updates_hide_behind_the_forward_that_does_not_need_them_yet() -> None:
    """Four layers of 3 s, four blocks: the first waits for its update and its fetch, the others arrive behind it."""
    schedule, compute = layers(4), [0, *(8 * [3, 0])]

    def seconds(*updates: float) -> float:
        return elapsed_seconds(schedule, compute, [1.0] * 4, 4, updates=list(enumerate(updates)))

    assert seconds() == seconds(0, 0, 0, 0) == 8 * 3 + 1
    assert seconds(2, 2, 2, 2) == 8 * 3 + 1 + 2, "the first layer waits; each further update takes less than a layer"
    assert seconds(2, 9, 2, 2) == 8 * 3 + 1 + 2 + (9 - 3)
    assert seconds(1, 1, 1, 30) == 8 * 3 + 1 + 33 - 9, "updates of a step end before its backward"


@cache
def traced(device: torch.device | None = None, checkpoint: str = "non_reentrant", *, frozen: bool = True) -> Profile:
    config = GPTConfig(vocab_size=64, seq_len=16, n_layers=8, d_model=32, n_heads=2, checkpoint=checkpoint)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = GPT(config)
        for parameter in model.blocks.parameters():
            parameter.requires_grad_(not frozen)
    return trace(model, lm_loss, BATCH, compute_dtype=torch.bfloat16, device=device)


def task(room: float, profile: Profile | None = None) -> Task:
    """Frozen layers of which `room` fits on the device, whose fetches take as long as their compute."""
    profile = profile or traced()
    hardware = replace(Hardware.named("a100-80g-pcie-x4"), unit_us=1e-9)
    numel = sum(p.numel for p in profile.params)
    hardware = replace(hardware, fitted=replace(hardware.fitted, overhead_ns_per_parameter=2e-1))
    capacity = int(1.25 * profile.activation_bytes + room * 2 * numel / 0.95)
    return Task(profile=profile, hardware=hardware, gpus=1, capacity_bytes=capacity, host_bytes=1 << 40)


@cache
def packings(accumulation: int = 1) -> Packings:
    """The step of all these problems, whatever fits on the device."""
    return Packings(replace(task(0.5), accumulation=accumulation))


def test_work_between_events_adds_up_and_a_cpu_waits_for_copies() -> None:
    profile = traced()
    assert len(profile.work) == len(profile.events) + 1
    assert [sum(column) for column in zip(*profile.work, strict=True)] == [profile.flops, profile.traffic_bytes]
    assert not traced(torch.device("cpu")).work


def test_a_stall_is_what_the_timeline_is_longer_than_perfect_overlap() -> None:
    given = task(0.5)
    found = solve(given, packings())
    schedule, positions = given.profile.step_order.timed(found.layout)
    assert schedule.entries == given.profile.schedule(found.layout).entries
    assert positions == sorted(positions) and len(positions) == len(schedule.entries)
    whole = found.seconds.compute + found.seconds.units
    each = cost.compute_seconds(given.profile, positions, given.hardware, whole)
    assert sum(each) == pytest.approx(whole)
    fetches = cost.fetch_seconds(found.plan, found.layout, given.hardware, 1)
    crossing = found.moved.fetched_bytes / (given.hardware.links(1).b_c2g * 1e9)
    own = [chunk.index for chunk in found.layout.chunks if chunk.residence is not CACHED and chunk.key.trainable]
    assert sum(fetches[chunk] for chunk in (*found.loads, *own)) == pytest.approx(crossing)
    elapsed = elapsed_seconds(schedule, each, fetches, found.plan.blocks(found.layout))
    assert found.seconds.stall == pytest.approx(elapsed - found.seconds.overlapped) != 0
    assert ", stall " in explain(found)


@pytest.mark.parametrize("room", with_further([0.4, 0.5, 0.6, 0.7, 0.8], [0.4, 0.7]))
def test_blocks_that_hide_fetches_are_worth_more_than_chunks_on_the_device(room: float) -> None:
    given = task(room)
    blind = solve(replace(given, profile=replace(given.profile, work=())), packings())
    found, without = solve(given, packings()), price(given, blind.plan)
    assert not shortage(found.task, found.size)
    assert price(given, found.plan) == found, "what was found is what the plan says"
    assert without.seconds.step - without.seconds.stall + without.seconds.hidden_update == pytest.approx(
        blind.seconds.step
    )
    assert found.seconds.step < without.seconds.step
    assert found.plan.blocks(found.layout) > blind.plan.blocks(blind.layout)
    assert (found.plan.device_chunks or 0) < (blind.plan.device_chunks or 0)


@pytest.mark.parametrize("room", with_further([0.4, 0.5, 0.6, 0.7, 0.8], [0.5]))
def test_several_backwards_stall_no_less_than_one(room: float) -> None:
    one, five = (solve(replace(task(room), accumulation=n), packings(n)) for n in (1, 5))
    again = price(replace(one.task, accumulation=5), one.plan)
    assert again.seconds.stall >= 4 * one.seconds.stall
    assert five.seconds.step <= again.seconds.step


def offloaded(**changes: object) -> Seconds:
    """All layers trained, with their state in host memory, where updates take as long as compute does."""
    given = task(0.5, traced(frozen=False))
    plan = Plan.offload(rcache_blocks="all")
    (links,) = (given.hardware.links(1),)
    plain = price(replace(given, overlaps_updates=False), plan).seconds
    faster = replace(links, v_c=links.v_c * plain.host_update / plain.compute)
    return price(replace(given, hardware=replace(given.hardware, by_gpus={1: faster}), **changes), plan).seconds


def test_updates_in_host_memory_count_as_far_as_no_forward_hides_them() -> None:
    found, apart = offloaded(), offloaded(overlaps_updates=False)
    assert found.host_update == pytest.approx(found.compute) == pytest.approx(apart.host_update)
    assert not apart.hidden_update
    assert found.step == pytest.approx(apart.step - found.hidden_update)
    assert 0 < found.hidden_update < 0.5 * found.compute, "backward is two parts of three, and waits for all of them"


def test_updates_that_begin_in_backward_hide_behind_it_too() -> None:
    """Two chunks: forward 0, 1, then backward 1, 0, each for 3 seconds; chunk 1's gradients leave after 9 of 12."""
    forward = [CacheRequest(verb, (chunk,)) for chunk in (0, 1) for verb in (ACQUIRE, RELEASE)]
    backward = [CacheRequest(verb, (chunk, gradients_of(chunk))) for chunk in (1, 0) for verb in (ACQUIRE, RELEASE)]
    schedule = Schedule([*forward, *backward])
    compute = [0.0, 3.0, 0.0, 3.0, 0.0, 3.0, 0.0, 3.0, 0.0]

    def seconds(first: float, second: float, *, early: bool) -> float:
        updates = [(0, first), (1, second)]
        return elapsed_seconds(schedule, compute, [1.0, 1.0], 4, updates=updates, in_backward=early)

    assert seconds(2, 2, early=False) == 3 + 12, "chunk 0 is updated, then fetched; chunk 1 is updated meanwhile"
    assert seconds(2, 2, early=True) == 3 + 12, "chunk 1 has been updated in backward, chunk 0 is updated behind it"
    assert seconds(1, 9, early=False) == 11 + 9, "chunk 1 is late for its forward"
    assert seconds(1, 9, early=True) == 8 + 12, "chunk 1 has begun 3 seconds earlier, and chunk 0 waits for it"


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_is_no_longer_if_its_updates_begin_in_backward(accumulation: int) -> None:
    late = offloaded(accumulation=accumulation)
    early = offloaded(accumulation=accumulation, updates_in_backward=True)
    assert early.host_update == late.host_update and early.hidden_update > 1.2 * late.hidden_update
    assert early.hidden_update < early.host_update, "the last chunk's update begins when backward ends"


def test_a_step_of_several_backwards_hides_updates_once() -> None:
    one, five = offloaded(), offloaded(accumulation=5)
    assert five.hidden_update == pytest.approx(one.hidden_update, rel=0.2)


@pytest.mark.parametrize("accumulation", [1, 3, 5])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_is_played_no_further_than_it_may_take(accumulation: int, early: bool, frozen: bool) -> None:
    given = replace(task(0.5, traced(frozen=frozen)), accumulation=accumulation, updates_in_backward=early)
    timed = Timed(given.profile.step_order)
    for blocks, near in ((4, False), (6, False), (6, True)):
        plan = Plan.offload(rcache_blocks=blocks, chunk_numel=1 << 14, values_on_device=near)
        whole = price(given, plan)
        blind = replace(whole, seconds=replace(whole.seconds, stall=0.0, hidden_update=0.0))
        assert whole == with_stall(blind), "a price has the stall"
        for part in (1.0, 1.01, 2.0):
            assert with_stall(blind, part * whole.seconds.step, timed) == whole
        for part in (0.2, 0.8, 0.99):
            found = with_stall(blind, part * whole.seconds.step, timed)
            known = near and accumulation > 1 and found == whole
            assert known or found.seconds.step == math.inf, "only the first backward is known"
