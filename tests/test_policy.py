"""The cache's decisions: against an exhaustive search on small schedules, and against what the runtime does."""

import gc
import math
from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elixir_moe as em
from elixir_moe.chunks.policy import CacheCounts, CacheState, Entry, Load, Schedule, Verb, simulate
from elixir_moe.chunks.requests import Requests
from elixir_moe.errors import PlanError
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, gpt_patterns, lm_loss
from tests.parity import mesh_of_world
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
ACQUIRE, RELEASE, HOLD, FREE = Verb.ACQUIRE, Verb.RELEASE, Verb.HOLD, Verb.FREE


def entries(text: str) -> list[Entry]:
    """``"+01 -01 +0 !0 -0 x0"``: acquire 0 and 1 together, release, acquire 0, hold it, release it, free it."""
    verbs = {"+": ACQUIRE, "-": RELEASE, "!": HOLD, "x": FREE}
    return [Entry(verbs[word[0]], tuple(map(int, word[1:]))) for word in text.split()]


@st.composite
def schedules(draw: st.DrawFn, chunks: int = 5, longest: int = 22) -> Schedule:
    """Well-formed requests: releases end acquires, gradients come to chunks in use, all is let go in the end."""
    found: list[Entry] = []
    open_uses: list[tuple[int, ...]] = []
    gradients: set[int] = set()
    for _ in range(draw(st.integers(1, longest))):
        verb = draw(st.sampled_from([ACQUIRE, ACQUIRE, RELEASE, RELEASE, HOLD, FREE]))
        inside = sorted({chunk for use in open_uses for chunk in use} - gradients)
        if verb is ACQUIRE and len(open_uses) < 3:
            open_uses.append(tuple(sorted(draw(st.sets(st.integers(0, chunks - 1), min_size=1, max_size=2)))))
            found.append(Entry(ACQUIRE, open_uses[-1]))
        elif verb is RELEASE and open_uses:
            found.append(Entry(RELEASE, open_uses.pop(draw(st.integers(0, len(open_uses) - 1)))))
        elif verb is HOLD and inside:
            chunk = draw(st.sampled_from(inside))
            gradients.add(chunk)
            found.append(Entry(HOLD, (chunk,)))
        elif verb is FREE and gradients:
            chunk = draw(st.sampled_from(sorted(gradients)))
            gradients.remove(chunk)
            found.append(Entry(FREE, (chunk,)))
            left = [tuple(c for c in use if c != chunk) for use in open_uses]
            open_uses = [use for use in left if use]
    found += [Entry(RELEASE, use) for use in open_uses]
    return Schedule([*found, *(Entry(FREE, (chunk,)) for chunk in sorted(gradients))])


def holds_after(schedule: Schedule) -> list[dict[int, int]]:
    """By entry: how often each chunk is held once it is done; written down anew, on purpose."""
    held: dict[int, int] = {}
    states = []
    for entry in schedule.entries:
        for chunk in entry.chunks:
            if entry.verb in (ACQUIRE, HOLD):
                held[chunk] = held.get(chunk, 0) + 1
            elif entry.verb is RELEASE and chunk in held:
                held[chunk] -= 1
            if entry.verb is FREE or held.get(chunk) == 0:
                held.pop(chunk, None)
        states.append(dict(held))
    return states


def least_loads(schedule: Schedule, blocks: int) -> tuple[int, int] | None:
    """(misses, evictions) of the best of all ways to serve the schedule, trying every victim; None if there is none."""
    held = holds_after(schedule)

    @cache
    def best(position: int, inside: frozenset[int]) -> tuple[int, int] | None:
        if position == len(schedule.entries):
            return 0, 0
        entry = schedule.entries[position]
        if entry.verb is FREE:
            return best(position + 1, inside - set(entry.chunks))
        missing = set(entry.chunks) - inside if entry.verb is ACQUIRE else set()
        over = len(inside) + len(missing) - blocks
        found = []
        for victims in combinations(sorted(inside - set(held[position])), max(0, over)):
            rest = best(position + 1, inside - set(victims) | missing)
            if rest is not None:
                found.append((rest[0] + len(missing), rest[1] + len(victims)))
        return min(found, default=None)

    return best(0, frozenset())


# ----------------------------------------------------------------------------------------------------------- simulator


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(1, 5))
def test_nothing_beats_the_policy(schedule: Schedule, blocks: int) -> None:
    best = least_loads(schedule, blocks)
    for prefetch in (0, 1, 3):
        if best is None:
            with pytest.raises(PlanError):
                simulate(schedule, blocks, prefetch=prefetch)
            continue
        counts, _ = simulate(schedule, blocks, prefetch=prefetch)
        assert (counts.misses, counts.evictions) == best, f"prefetch={prefetch}"
        assert counts.off_schedule == 0
        requests = sum(len(entry.chunks) for entry in schedule.entries if entry.verb is ACQUIRE)
        assert counts.hits + counts.misses == requests, "every gather was wanted"
        assert counts.prefetched <= (counts.misses if prefetch else 0)


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_least_blocks_is_the_least(schedule: Schedule) -> None:
    least = schedule.least_blocks()
    for prefetch in (0, 1, 3):
        simulate(schedule, least, prefetch=prefetch)
        if least > 1:
            with pytest.raises(PlanError, match=f"all {least - 1} blocks .* set rcache_blocks to at least"):
                simulate(schedule, least - 1, prefetch=prefetch)
    assert least == max((len(held) for held in holds_after(schedule)), default=0)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 3), st.booleans(), st.integers(0, 4))
def test_decisions_can_be_carried_out(schedule: Schedule, more: int, known: bool, prefetch: int) -> None:
    """With a schedule or before there is one: what is asked for is there, what is held stays, blocks hold one chunk."""
    blocks = schedule.least_blocks() + more
    state = CacheState(blocks, schedule if known else None, prefetch=prefetch)
    where: dict[int, int] = {}
    before: dict[int, int] = {}
    for entry, held in zip(schedule.entries, holds_after(schedule), strict=True):
        if entry.verb is FREE:
            where.pop(entry.chunks[0], None)
        for load in request(state, entry):
            assert load.chunk not in where
            if load.evicted is None:
                assert load.block not in where.values()
            else:
                assert where.pop(load.evicted) == load.block
                assert load.evicted not in before or load.evicted not in held, "a chunk in use was evicted"
            assert 0 <= load.block < blocks
            where[load.chunk] = load.block
        assert set(held) <= set(where), "what is held is in a block"
        assert dict.fromkeys(where) == dict.fromkeys(state.chunks)
        before = held
    assert state.counts.off_schedule == 0


def request(state: CacheState, entry: Entry, *, tracked: bool = True) -> list[Load]:
    """Asks `state` for what `entry` says."""
    if entry.verb is ACQUIRE:
        return state.acquire(entry.chunks, tracked=tracked)
    if entry.verb is RELEASE:
        return state.release(entry.chunks, tracked=tracked)
    return state.hold(entry.chunks[0]) if entry.verb is HOLD else state.free(entry.chunks[0])


def test_farthest_use_leaves_first() -> None:
    schedule = Schedule(entries("+0 -0 +1 -1 +2 -2 +0 -0 +1 -1"))
    counts, loads = simulate(schedule, 2, prefetch=0)
    assert [(load.chunk, load.evicted) for load in loads] == [(0, None), (1, None), (2, 1), (1, 0)]
    assert (counts.hits, counts.misses, counts.evictions) == (1, 4, 2)


def test_without_a_schedule_the_longest_unused_leaves() -> None:
    state = CacheState(2)
    loads = [load for entry in entries("+0 -0 +1 -1 +0 -0 +2 -2") for load in request(state, entry)]
    assert [(load.chunk, load.evicted) for load in loads] == [(0, None), (1, None), (2, 1)]


def test_prefetch_waits_for_a_block_that_is_about_to_be_empty() -> None:
    schedule = Schedule(entries("+0 -0 +1 !1 -1 x1 +2 -2 +0 -0"))
    _, loads = simulate(schedule, 2)
    assert [(load.chunk, load.evicted, load.ahead) for load in loads] == [
        (0, None, False),
        (1, None, True),
        (2, None, True),
    ]


@pytest.mark.fault(23)
def test_off_schedule_requests_are_counted_and_served() -> None:
    schedule = Schedule(entries("+0 -0 +1 -1 +2 -2"))
    state = CacheState(2, schedule)
    for entry in entries("+0 -0 +2 -2 +1 -1 +3 -3"):
        request(state, entry)
        assert entry.verb is RELEASE or entry.chunks[0] in state.chunks
    assert state.counts.off_schedule == 6
    assert not state.rewind(), "the round did not keep to the schedule"
    for entry in schedule.entries:
        request(state, entry)
    assert state.counts.off_schedule == 6
    assert state.rewind()
    for entry in schedule.entries[:2]:
        request(state, entry)
    assert not state.rewind(), "nor did one that ended early"


def test_a_request_that_fails_changes_nothing() -> None:
    state = CacheState(2)
    request(state, *entries("+0"))
    for chunks in ((1, 2), (0, 1, 2)):
        with pytest.raises(PlanError, match="set rcache_blocks to at least"):
            state.acquire(chunks)
    assert state.chunks == (0,)
    assert state.counts.misses == 1
    request(state, *entries("-0"))
    assert [load.evicted for load in state.acquire((1, 2))] == [None, 0], "no hold was left behind"


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 3), st.data())
def test_evaluation_in_the_middle_does_not_move_the_schedule(
    schedule: Schedule, more: int, data: st.DataObject
) -> None:
    state = CacheState(schedule.least_blocks() + more, schedule)
    pause = data.draw(st.integers(0, len(schedule.entries)))
    for position, entry in enumerate(schedule.entries):
        if position == pause:
            for chunk in data.draw(st.lists(st.integers(0, 6), max_size=4)):
                state.acquire((chunk,), tracked=False)
                assert state.release((chunk,), tracked=False) == []
        request(state, entry)
    assert state.counts.off_schedule == 0
    assert state.rewind()


def test_requests_for_the_same_chunks_are_one_to_the_cache() -> None:
    cache = CacheState(2)
    requests = Requests(cache, kept=())
    requests.acquire((0,), tracked=True)
    for _ in range(3):  # modules that follow each other
        requests.release((0,), tracked=True)
        assert requests.go_on((0,), tracked=True)
    requests.release((0,), tracked=True)
    assert not requests.go_on((1,), tracked=True)
    assert not requests.go_on((0,), tracked=False), "evaluation moves no schedule"
    requests.acquire((1,), tracked=True)
    requests.hold(1)
    requests.release((1,), tracked=True)
    requests.free(1)
    assert not requests.go_on((1,), tracked=True), "it has left its block"
    assert [Entry(*request) for request in requests.trace] == entries("+0 -0 +1 !1 -1 x1")
    assert [load.chunk for load in requests.decided] == [0, 1]
    assert not cache._held


def test_what_is_learned_is_what_was_asked() -> None:
    cache = CacheState(2)
    requests = Requests(cache, kept=())

    def step(*chunks: int) -> bool:
        for chunk in chunks:
            if not requests.go_on((chunk,), tracked=True):
                requests.acquire((chunk,), tracked=True)
            requests.release((chunk,), tracked=True)
        requests.settle()
        return requests.learn()

    assert step(0, 0, 1), "the first step is the schedule"
    assert cache.schedule is not None
    assert cache.schedule.entries == tuple(entries("+0 -0 +1 -1"))
    assert not step(0, 1, 1)
    assert cache.counts.off_schedule == 0, "the same requests to the cache"
    assert [step(1, 0) for _ in range(3)] == [False, False, True], "three in a row that missed it"
    assert cache.schedule.entries == tuple(entries("+1 -1 +0 -0"))


def test_a_thousand_chunks_and_more_are_simulated() -> None:
    n = 2000
    forward = [Entry(verb, (chunk,)) for chunk in range(n) for verb in (ACQUIRE, RELEASE)]
    backward = [Entry(verb, (chunk,)) for chunk in reversed(range(n)) for verb in (ACQUIRE, HOLD, FREE)]
    schedule = Schedule(forward + backward)
    for blocks in (1, n // 10, n):
        counts, _ = simulate(schedule, blocks)
        assert (counts.hits, counts.misses) == (blocks, 2 * n - blocks), "each block saves one gather"
        assert counts.evictions == n - blocks


# ------------------------------------------------------------------------------------------------------------- runtime

CONFIG = GPTConfig(
    vocab_size=32, seq_len=8, n_layers=3, d_model=16, n_heads=2, experts=(0, 4, 0), ep=(1, 2, 1), tie_embeddings=False
)
CHUNK = 2048


class Recorder:
    """A wrapped model whose cache tells what it decides."""

    def __init__(self, plan: em.Plan, config: GPTConfig = CONFIG) -> None:
        torch.manual_seed(1)
        self.model = GPT(config, mesh_of_world())
        em.annotate(self.model, gpt_patterns(self.model))
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model, self.optimizer = em.wrap(self.model, inner, plan=plan, device="cpu")
        self.loads: list[Load] = []
        state, self.batch = self.optimizer._scheduler.cache, torch.arange(18).view(2, 9) % 32
        decide = state._load

        def record(*args: Any, **kwargs: Any) -> Load:
            self.loads.append(decide(*args, **kwargs))
            return self.loads[-1]

        state._load = record  # type: ignore[method-assign]

    def step(self, between: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """One training step; returns what was counted and decided in it."""
        self.loads.clear()
        before = self.optimizer.statistics()
        loss = lm_loss(self.model, self.batch)
        between()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = (self.optimizer.statistics() - before).as_dict()
        return found | {"loads": [(load.chunk, load.evicted, load.ahead) for load in self.loads], "loss": loss.item()}

    def evaluate(self) -> float:
        """A forward without gradients."""
        with torch.no_grad():
            return lm_loss(self.model, self.batch).item()

    def promise(self) -> dict[str, Any]:
        """What the simulator says of a step that starts from an empty cache."""
        plan, layout, schedule = self.optimizer.plan, self.optimizer.layout, self.optimizer.schedule
        assert schedule is not None
        counts, loads = simulate(schedule, plan.blocks(layout), prefetch=plan.prefetch)
        gathered = [layout.chunks[load.chunk] for load in loads]
        gathered += [chunk for chunk in layout.chunks if chunk.resident and not chunk.in_place]
        return {
            "counts": counts,
            "loads": [(load.chunk, load.evicted, load.ahead) for load in loads],
            "all_gather": sum(chunk.nbytes for chunk in gathered if chunk.shards > 1),
            "fetched": sum(chunk.nbytes // chunk.shards for chunk in gathered),
            "least": schedule.least_blocks(),
        }

    def close(self) -> None:
        self.optimizer.close()
        gc.collect()


def follow(plan: em.Plan, steps: int) -> dict[str, Any]:
    """(rank) A few steps and what was promised of them."""
    recorder = Recorder(plan)
    found = [recorder.step() for _ in range(steps)]
    result = {"found": found, "promise": recorder.promise(), "chunks": len(recorder.optimizer.layout.cached)}
    recorder.close()
    return result


def assert_as_promised(found: dict[str, Any], promise: dict[str, Any]) -> None:
    assert found["loads"] == promise["loads"], "step by step"
    assert CacheCounts(**{name: found[name] for name in CacheCounts.__slots__}) == promise["counts"]
    assert sum(group.get("all_gather", 0) for group in found["collective_bytes"].values()) == promise["all_gather"]
    assert sum(found["bytes_fetched"].values()) == promise["fetched"]
    assert found["blocks_replaced"] == 0


def test_the_runtime_decides_as_the_simulator(ranks: Ranks) -> None:
    sizes = {}
    for offloaded in (False, True):  # on the device, experts of which a rank has all copies are used in place
        plan = em.Plan(scatter=True, offloaded=offloaded, rcache_blocks=None, chunk_numel=CHUNK)
        everything = ranks(2).run(follow, plan, 2)[0]
        sizes[offloaded] = everything["promise"]["least"], everything["chunks"]
        assert sizes[offloaded][0] < sizes[offloaded][1] - 2
    for place, offloaded, prefetch in (
        (0.0, False, 3),
        (0.0, True, 0),
        (0.1, True, 1),
        (0.5, False, 3),
        (0.9, False, 0),
    ):
        least, chunks = sizes[offloaded]
        blocks = least + math.ceil(place * (chunks - 1 - least))
        plan = em.Plan(scatter=True, offloaded=offloaded, rcache_blocks=blocks, chunk_numel=CHUNK, prefetch=prefetch)
        for result in ranks(2).run(follow, plan, 3):
            for found in result["found"][1:]:
                assert_as_promised(found, result["promise"])


def disturb() -> dict[str, Any]:
    """(rank) Evaluation before, between and after, then a step that leaves out a layer, then ordinary ones."""
    recorder = Recorder(em.Plan.zero3(rcache_blocks=4, chunk_numel=CHUNK))
    plain = [recorder.step(), recorder.step()]
    evaluated = [recorder.evaluate(), recorder.step(between=recorder.evaluate), recorder.step(), recorder.evaluate()]
    after = [recorder.step(), recorder.step()]
    dropped = recorder.model.blocks
    recorder.model.blocks = torch.nn.ModuleList([dropped[0], dropped[1]])
    shorter = recorder.step()
    recorder.model.blocks = dropped
    result = {
        "plain": plain,
        "evaluated": evaluated,
        "after": after,
        "shorter": shorter,
        "again": [recorder.step(), recorder.step()],
        "promise": recorder.promise(),
    }
    recorder.close()
    return result


@pytest.mark.fault(23, 24)
def test_evaluation_and_another_step_leave_the_schedule_in_place(ranks: Ranks) -> None:
    for result in ranks(2).run(disturb):
        promise = result["promise"]
        assert_as_promised(result["plain"][1], promise)
        assert result["evaluated"][0] == result["evaluated"][1]["loss"], "the same weights"
        for step in (result["evaluated"][1], result["evaluated"][2], result["after"][0]):
            assert step["off_schedule"] == 0
        assert_as_promised(result["evaluated"][2], promise)
        assert_as_promised(result["after"][1], promise)
        assert result["shorter"]["off_schedule"] > 0, "counted"
        assert result["shorter"]["loss"] > 0, "and served"
        for step in result["again"]:
            assert_as_promised(step, promise)


def tied_traffic() -> list[dict[str, int]]:
    """(rank) By collective, the bytes of one step of a model that is one tied parameter's and no other's chunk."""
    recorder = Recorder(em.Plan.zero2(), GPTConfig(vocab_size=512, seq_len=9, n_layers=1, d_model=8, n_heads=1))
    recorder.step()
    counted = recorder.step()["collective_bytes"]
    sizes = [chunk.nbytes for chunk in recorder.optimizer.layout.chunks]
    recorder.close()
    return [dict(*counted.values()), {"all_gather": sum(sizes), "reduce_scatter": sum(sizes)}]


def test_a_tied_chunk_is_gathered_and_reduced_once(ranks: Ranks) -> None:
    for found, wanted in ranks(2).run(tied_traffic):
        assert found == wanted
