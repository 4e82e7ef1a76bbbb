"""What one step asks of the rCache, from the uses of its units alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_moe.chunks.group import ChunkGroupKey
from elixir_moe.chunks.layout import ChunkSpec, Layout, Slot
from elixir_moe.chunks.policy import Verb, simulate
from elixir_moe.chunks.walk import Use, Walk, by_first_use


def layout_of(where: list[int], frozen: tuple[int, ...] = (), resident: tuple[int, ...] = ()) -> Layout:
    """Parameter p in chunk ``where[p]``."""
    chunks = []
    for index in range(max(where) + 1):
        key = ChunkGroupKey(ranks=(0, 1), dtype=torch.float32, trainable=index not in frozen, divisor=2)
        mine = [p for p, chunk in enumerate(where) if chunk == index]
        slots = tuple(Slot(param=p, start=16 * i, numel=16) for i, p in enumerate(mine))
        numel = max(32, 16 * len(mine))
        chunks.append(ChunkSpec(index=index, key=key, slots=slots, numel=numel, shards=2, resident=index in resident))
    return Layout(chunk_numel=256, chunks=tuple(chunks), block_itemsize=4)


def lines(uses: list[Use], layout: Layout) -> list[str]:
    """The schedule, a word and its chunks a line."""
    return [f"{e.verb} {' '.join(map(str, e.chunks))}" for e in Walk(uses).schedule(layout).entries]


def test_a_step_by_hand() -> None:
    uses = [  # unit 0 around 1, 2, and 1 again; the last two share a chunk, of which another parameter is never used
        Use(entered=1, left=2, params=(1,)),
        Use(entered=3, left=4, params=(2, 3)),
        Use(entered=5, left=6, params=(1,)),
        Use(entered=0, left=7, params=(0,)),
    ]
    forward = ["acquire 0", "acquire 1", "release 1", "acquire 1 2", "release 1 2", "acquire 1", "release 1"]
    backward = ["acquire 0", "acquire 1", "release 1", "acquire 1 2", "hold 1", "hold 2", "free 2"]
    # Unit 1 is done with its first run, which backward comes to last: then its chunk needs no release.
    backward += ["release 1", "acquire 1", "free 1", "hold 0", "free 0"]
    assert lines(uses, layout_of([0, 1, 1, 2, 1])) == [*forward, "release 0", *backward]


def test_a_recomputed_region_is_held_until_its_backward_is_done() -> None:
    uses = [Use(entered=2 * unit, left=2 * unit + 1, params=(unit,), region=0) for unit in range(3)]
    layout = layout_of([0, 1, 2])
    assert Walk(uses).schedule(layout).least_blocks() == 3
    kept = [Use(entered=use.entered, left=use.left, params=use.params) for use in uses]
    assert Walk(kept).schedule(layout).least_blocks() == 1


def test_parameters_come_in_order_of_first_use() -> None:
    uses = [Use(entered=1, left=2, params=(3, 1)), Use(entered=0, left=3, params=(2, 3))]
    order, numbered = by_first_use(uses, range(5))
    assert order == [2, 3, 1, 0, 4]
    assert [use.params for use in numbered] == [(1, 2), (0, 1)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Use], Layout]:
    """Units that run beside and inside each other, some of them more than once."""
    where = draw(st.lists(st.integers(0, 4), min_size=1, max_size=10))
    owners = draw(st.lists(st.integers(0, 4), min_size=len(where), max_size=len(where)))
    params = {unit: tuple(p for p, owner in enumerate(owners) if owner == unit) for unit in owners}
    uses, running = list[Use](), list[tuple[int, int]]()
    entering = draw(st.lists(st.sampled_from([*params, None]), max_size=24))
    for unit in [*entering, *[None] * len(entering)]:
        clock = 2 * len(uses) + len(running)
        if unit is not None:
            running.append((clock, unit))
        elif running:
            entered, left = running.pop()
            uses.append(Use(entered=entered, left=clock, params=params[left]))
    frozen, resident = (tuple(draw(st.sets(st.integers(0, 4), max_size=2))) for _ in range(2))
    return uses, layout_of(where, frozen, resident)


@settings(deadline=None)
@given(steps())
def test_what_forward_used_is_freed_last_of_all_and_nothing_stays_held(step: tuple[list[Use], Layout]) -> None:
    uses, layout = step
    schedule = Walk(uses).schedule(layout)
    used = {p for use in uses for p in use.params}
    for chunk in layout.chunks:
        verbs = [entry.verb for entry in schedule.entries if chunk.index in entry.chunks]
        if chunk.resident or not used & {slot.param for slot in chunk.slots}:
            assert not verbs
        elif chunk.key.trainable:
            assert (verbs.count(Verb.HOLD), verbs.count(Verb.FREE), verbs[-1]) == (1, 1, Verb.FREE)
        else:
            assert set(verbs) == {Verb.ACQUIRE, Verb.RELEASE}
            assert verbs.count(Verb.ACQUIRE) == verbs.count(Verb.RELEASE)
    simulate(schedule, schedule.least_blocks())
