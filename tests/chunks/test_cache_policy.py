"""The cache's decisions: against an exhaustive search on small schedules, and against what the runtime does."""

import gc
import math
from collections.abc import Callable
from functools import cache
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elixir_moe as em
from elixir_moe.chunks.cache_policy import (
    CacheCounts,
    CacheRequest,
    CacheState,
    Load,
    Schedule,
    Verb,
    gathers,
    gradients_of,
)
from elixir_moe.chunks.residence import Residence
from elixir_moe.errors import PlanError
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool
from tests.support.simulation import simulate

Ranks = Callable[[int], RankPool]
ACQUIRE, RELEASE = Verb


def entries(text: str) -> list[CacheRequest]:
    """``"+01 -01 !0 x0"``: acquire the weights 0 and 1, release them, a block for the gradients of 0, release that."""
    found = []
    for word in text.split():
        chunks = tuple(map(int, word[1:]))
        verb = ACQUIRE if word[0] in "+!" else RELEASE
        found.append(CacheRequest(verb, tuple(map(gradients_of, chunks)) if word[0] in "!x" else chunks))
    return found


@st.composite
def schedules(draw: st.DrawFn, chunks: int = 5, longest: int = 22) -> Schedule:
    """Well-formed requests: releases end acquires, gradients come once a chunk, all is let go in the end."""
    found: list[CacheRequest] = []
    open_uses: list[tuple[int, ...]] = []
    gradients: list[int] = []
    to_come = set(range(chunks))
    for _ in range(draw(st.integers(1, longest))):
        verb = draw(st.sampled_from("++--!x"))
        if verb == "+" and len(open_uses) < 3:
            open_uses.append(tuple(sorted(draw(st.sets(st.integers(0, chunks - 1), min_size=1, max_size=2)))))
            found.append(CacheRequest(ACQUIRE, open_uses[-1]))
        elif verb == "-" and open_uses:
            found.append(CacheRequest(RELEASE, open_uses.pop(draw(st.integers(0, len(open_uses) - 1)))))
        elif verb == "!" and to_come and len(gradients) < 2:
            gradients.append(draw(st.sampled_from(sorted(to_come))))
            to_come.remove(gradients[-1])
            found.append(CacheRequest(ACQUIRE, (gradients_of(gradients[-1]),)))
        elif verb == "x" and gradients:
            found.append(
                CacheRequest(RELEASE, (gradients_of(gradients.pop(draw(st.integers(0, len(gradients) - 1)))),))
            )
    found += [CacheRequest(RELEASE, use) for use in open_uses]
    return Schedule([*found, *(CacheRequest(RELEASE, (gradients_of(chunk),)) for chunk in gradients)])


def holds_after(schedule: Schedule) -> list[dict[int, int]]:
    """By entry: how often each is held once it is done; written down anew, on purpose."""
    held: dict[int, int] = {}
    states = []
    for entry in schedule.entries:
        for chunk in entry.chunks:
            held[chunk] = held.get(chunk, 0) + (1 if entry.verb is ACQUIRE else -1)
            if not held[chunk]:
                del held[chunk]
        states.append(dict(held))
    return states


def least_loads(schedule: Schedule, blocks: int) -> int | None:
    """The gathers of the best of all ways to serve the schedule, trying every victim; None if there is none."""
    held = holds_after(schedule)

    @cache
    def best(position: int, inside: frozenset[int]) -> int | None:
        if position == len(schedule.entries):
            return 0
        entry = schedule.entries[position]
        if entry.verb is RELEASE:
            return best(position + 1, inside - {item for item in entry.chunks if item < 0})
        missing = set(entry.chunks) - inside
        over = len(inside) + len(missing) - blocks
        found = []
        for victims in combinations(sorted(inside - set(held[position])), max(0, over)):
            rest = best(position + 1, inside - set(victims) | missing)
            if rest is not None:
                found.append(rest + sum(item >= 0 for item in missing))
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
        assert counts.misses == best, f"prefetch={prefetch}"
        assert counts.off_schedule == 0
        requests = sum(c >= 0 for entry in schedule.entries if entry.verb is ACQUIRE for c in entry.chunks)
        assert counts.hits + counts.misses == requests, "every gather was wanted"
        assert counts.prefetched <= (counts.misses if prefetch else 0)


@settings(max_examples=300, deadline=None)
@given(schedules(), st.sets(st.integers(0, 4)), st.integers(0, 3), st.integers(1, 3))
def test_the_search_counts_the_gathers_of_the_policy(
    schedule: Schedule, kept: set[int], more: int, backwards: int
) -> None:
    schedule = Schedule(schedule.entries, kept=kept)
    blocks = schedule.least_blocks() + more
    _, loads = simulate(schedule, blocks, prefetch=0, backwards=backwards)
    assert list(chain(*gathers(schedule, blocks, backwards))) == [load.chunk for load in loads if load.chunk >= 0]
    with pytest.raises(PlanError, match=f"set rcache_blocks to at least {schedule.least_blocks()}"):
        gathers(schedule, schedule.least_blocks() - 1)


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
        if entry.verb is RELEASE and entry.chunks[0] < 0:
            where.pop(entry.chunks[0])
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


def request(state: CacheState, entry: CacheRequest, *, tracked: bool = True) -> list[Load]:
    """Asks `state` for what `entry` says."""
    ask = state.acquire if entry.verb is ACQUIRE else state.release
    return ask(entry.chunks, tracked=tracked)


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
    schedule = Schedule(entries("+0 -0 +1 !1 !2 x2 x1 -1 +2 -2 +0 -0 +1 -1"))
    _, loads = simulate(schedule, 4)
    assert [(load.chunk, load.evicted, load.ahead) for load in loads] == [
        (0, None, False),
        (1, None, True),
        (gradients_of(1), None, True),
        (gradients_of(2), None, True),
        (2, None, True),
    ]


def test_gradients_that_were_just_sent_leave_their_block_alone_for_a_while() -> None:
    schedule = Schedule(entries("+0 -0 +1 !1 x1 -1 !0 x0 +0 -0"))
    _, loads = simulate(schedule, 3, prefetch=0)
    assert [(load.chunk, load.evicted) for load in loads[2:]] == [(gradients_of(1), None), (gradients_of(0), 1)]
    _, loads = simulate(Schedule(entries("+0 -0 +1 !1 x1 -1 !0 x0 +0 -0 +1 -1")), 3, prefetch=0)
    assert loads[-1].evicted is None, "but no gather is paid for that"


def test_gradients_that_were_reserved_and_did_not_come_leave_with_the_round() -> None:
    state = CacheState(2, Schedule(entries("+0 !0 -0 x0")))
    for entry in entries("+0 -0"):
        request(state, entry)
    assert state.chunks == (0, gradients_of(0)), "a block is kept for them"
    assert not state.rewind()
    assert state.chunks == (0,)


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


def test_more_than_a_thousand_chunks_are_simulated() -> None:
    n = 1200
    forward = [CacheRequest(verb, (chunk,)) for chunk in range(n) for verb in (ACQUIRE, RELEASE)]
    backward = [
        CacheRequest(verb, (item,))
        for chunk in reversed(range(n))
        for verb, item in ((ACQUIRE, chunk), (ACQUIRE, ~chunk), (RELEASE, ~chunk), (RELEASE, chunk))
    ]
    schedule = Schedule(forward + backward)
    for blocks in (2, n // 10, n + 1):
        counts, _ = simulate(schedule, blocks)
        assert (counts.hits, counts.misses) == (blocks - 1, 2 * n - blocks + 1), "each block but one saves a gather"


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

    def step(self, between: Callable[[], Any] = lambda: None, backwards: int = 1) -> dict[str, Any]:
        """One training step; returns what was counted and decided in it."""
        self.loads.clear()
        before = em.inspect(self.model).statistics
        for _ in range(backwards):
            loss = lm_loss(self.model, self.batch)
            between()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = (em.inspect(self.model).statistics - before).as_dict()
        return found | {"loads": [(load.chunk, load.evicted, load.ahead) for load in self.loads], "loss": loss.item()}

    def evaluate(self) -> float:
        """A forward without gradients."""
        with torch.no_grad():
            return lm_loss(self.model, self.batch).item()

    def promise(self, backwards: int = 1) -> dict[str, Any]:
        """What the simulator says of a step that starts from an empty cache."""
        plan, layout, schedule = (
            em.inspect(self.model).plan,
            em.inspect(self.model).layout,
            em.inspect(self.model).schedule,
        )
        assert schedule is not None
        counts, loads = simulate(schedule, plan.blocks(layout), prefetch=plan.prefetch, backwards=backwards)
        gathered = [layout.chunks[load.chunk] for load in loads if load.chunk >= 0]
        gathered += [chunk for chunk in layout.chunks if chunk.residence is Residence.RESIDENT]
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


def follow(plan: em.Plan, steps: int, backwards: int = 1) -> dict[str, Any]:
    """(rank) A few steps and what was promised of them."""
    recorder = Recorder(plan)
    found = [recorder.step(backwards=backwards) for _ in range(steps)]
    blocks = plan.blocks(em.inspect(recorder.model).layout)
    result = {"found": found, "promise": recorder.promise(backwards), "blocks": blocks}
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
        plan = em.Plan(scatter=True, offloaded=offloaded, rcache_blocks="all", chunk_numel=CHUNK)
        everything = ranks(2).run(follow, plan, 2)[0]
        sizes[offloaded] = everything["promise"]["least"], everything["blocks"]
        assert sizes[offloaded][0] < sizes[offloaded][1] - 2
    for place, offloaded, prefetch, backwards in (
        (0.0, False, 3, 1),
        (0.0, True, 0, 1),
        (0.1, True, 1, 3),
        (0.5, False, 3, 1),
        (0.5, False, 0, 4),
        (0.9, False, 0, 1),
        (0.9, True, 3, 2),
    ):
        least, most = sizes[offloaded]
        blocks = least + math.ceil(place * (most - 1 - least))
        plan = em.Plan(scatter=True, offloaded=offloaded, rcache_blocks=blocks, chunk_numel=CHUNK, prefetch=prefetch)
        for result in ranks(2).run(follow, plan, 3, backwards):
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
    sizes = [chunk.nbytes for chunk in em.inspect(recorder.model).layout.chunks]
    recorder.close()
    return [dict(*counted.values()), {"all_gather": sum(sizes), "reduce_scatter": sum(sizes)}]


def test_a_tied_chunk_is_gathered_and_reduced_once(ranks: Ranks) -> None:
    for found, wanted in ranks(2).run(tied_traffic):
        assert found == wanted
