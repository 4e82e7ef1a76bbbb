"""What one step asks of the rCache, from the uses of its units alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_moe.chunks.cache_policy import Verb, gradients_of
from elixir_moe.chunks.events import (
    ACCUMULATE,
    ENTER,
    LEAVE,
    REACH,
    READ,
    UNPACK,
    ModuleInfo,
    StepEvent,
    by_first_use,
)
from elixir_moe.chunks.packing import ChunkSpec, Layout, Slot
from elixir_moe.chunks.param_spec import ChunkGroupKey
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.chunks.residence import Residence
from elixir_moe.chunks.units import choose_units
from tests.support.every import every
from tests.support.simulation import simulate


def layout_of(
    where: list[int], frozen: tuple[int, ...] = (), resident: tuple[int, ...] = (), biases: tuple[int, ...] = ()
) -> Layout:
    """Parameter p in chunk ``where[p]``; `biases` are shorter than all others."""
    chunks = []
    for index in range(max(where) + 1):
        key = ChunkGroupKey(ranks=(0, 1), dtype=torch.float32, trainable=index not in frozen, divisor=2)
        mine = [p for p, chunk in enumerate(where) if chunk == index]
        slots = tuple(Slot(param=p, start=16 * i, numel=8 if p in biases else 16) for i, p in enumerate(mine))
        numel = max(32, 16 * len(mine))
        residence = Residence.RESIDENT if index in resident else Residence.CACHED
        chunks.append(ChunkSpec(index=index, key=key, slots=slots, numel=numel, shards=2, residence=residence))
    return Layout(chunk_numel=256, chunks=tuple(chunks), block_itemsize=4)


def trainable(layout: Layout) -> dict[int, int]:
    return {slot.param: slot.numel for chunk in layout.chunks if chunk.key.trainable for slot in chunk.slots}


def order(parts: list[ModuleInfo], events: list[StepEvent], layout: Layout) -> StepOrder:
    return StepOrder(parts, events, trainable(layout))


def ran(number: int, *inside: list[StepEvent]) -> list[StepEvent]:
    """The events of a run of a part around others."""
    return [StepEvent(ENTER, number), *(event for events in inside for event in events), StepEvent(LEAVE, number)]


def lines(parts: list[ModuleInfo], events: list[StepEvent], layout: Layout) -> list[str]:
    """The schedule, a word and its chunks a line; a block for gradients is in brackets."""
    entries = order(parts, events, layout).schedule(layout).entries
    return [f"{e.verb} {' '.join(str(c) if c >= 0 else f'({gradients_of(c)})' for c in e.chunks)}" for e in entries]


def part(*params: int, parent: int | None = None, shared: bool = False) -> ModuleInfo:
    return ModuleInfo(params=params, parent=parent, shared=shared)


def test_a_unit_is_the_largest_part_of_one_chunk() -> None:
    parts = [part(0), part(1, parent=0), part(2, parent=1), part(3, parent=1), part(4, parent=0), part(5, parent=4)]
    chunk_of = {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 2}
    units = choose_units(parts, chunk_of)
    assert [None if unit is None else (unit.module, unit.params, unit.whole) for unit in units] == [
        (0, (0,), False),
        (1, (1, 2, 3), True),
        (1, (1, 2, 3), True),
        (1, (1, 2, 3), True),
        (4, (4,), False),
        (5, (5,), True),
    ]


def test_what_is_in_no_moving_chunk_is_all_one_unit() -> None:
    parts = [part(), part(0, parent=0), part(1, parent=0)]
    units = choose_units(parts, {})
    assert every(unit is not None and unit.params == (0, 1) for unit in units)


def test_a_part_of_several_is_never_inside_a_unit() -> None:
    parts = [part(), part(0, parent=0), part(1, parent=1, shared=True), part(2, parent=0)]
    units = choose_units(parts, {0: 0, 1: 0, 2: 0})
    assert [None if unit is None else unit.module for unit in units] == [None, 1, 2, 3]
    assert units[1] is not None and units[1].params == (0,)


def test_the_last_gradient_of_a_unit_lets_its_weights_go() -> None:
    """Wherever in a chunk its parameters are; a frozen chunk has no gradients."""
    parts = [part(), part(0, 1, 2, parent=0), part(3, parent=0)]
    events = [*ran(0, ran(1), ran(2)), StepEvent(REACH, 2), StepEvent(ACCUMULATE, params=(3,)), StepEvent(REACH, 1)]
    events += [StepEvent(ACCUMULATE, params=(p,)) for p in (2, 1, 0)]
    forward = ["acquire 0", "release 0", "acquire 1", "release 1"]
    last = ["acquire 1", "release 1", "acquire (1)", "release (1)"]
    first = ["acquire 0", "acquire (0)", "release 0", "release (0)"]
    assert lines(parts, events, layout_of([0, 0, 0, 1])) == [*forward, *last, *first]
    frozen = layout_of([0, 0, 0, 1], frozen=(0,))
    assert lines(parts, events, frozen) == [*forward, *last, "acquire 0", "release 0"]


def layers(*, hooked: bool) -> tuple[list[ModuleInfo], list[StepEvent]]:
    """Two layers of two parts in an encoder, beside an embedding; backward runs each again, with its hooks or not."""
    encoder, layer = part(parent=0), part(parent=2)
    parts = [part(), part(0, parent=0), encoder, layer, part(1, parent=3), part(2, parent=3)]
    parts += [layer, part(3, parent=6), part(4, parent=6)]
    forward = ran(0, ran(1), ran(2, ran(3, ran(4), ran(5)), ran(6, ran(7), ran(8))))
    backward = [StepEvent(REACH, 0), StepEvent(REACH, 2)]
    for number in (6, 3):
        again = [number] * hooked + [number + 1, number + 2]
        backward += [StepEvent(REACH, number), *(StepEvent(ENTER, other, in_backward=True) for other in again)]
        backward += [StepEvent(ACCUMULATE, params=(p,)) for p in (number // 2 + 1, number // 2)]
    return parts, [*forward, *backward]


@pytest.mark.parametrize("where", [[0, 0, 0, 1, 1], [0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
def test_a_part_that_says_it_is_recomputed_is_expected_to_run_again(where: list[int]) -> None:
    """As a traced backward would."""
    parts, events = layers(hooked=False)
    forward = [event for event in events if event.is_forward]
    backward = [StepEvent(REACH, 0), StepEvent(REACH, 2)]
    for number in (6, 3):
        backward.append(StepEvent(REACH, number))
        for inner in (number + 1, number + 2):
            backward += [StepEvent(ENTER, inner, in_backward=True), StepEvent(LEAVE, inner, in_backward=True)]
        for inner in (number + 2, number + 1):
            backward += [StepEvent(REACH, inner, run=-1), StepEvent(ACCUMULATE, params=parts[inner].params)]
    backward += [StepEvent(REACH, 1), StepEvent(ACCUMULATE, params=parts[1].params)]
    said = [replace(each, recomputed=number >= 3) for number, each in enumerate(parts)]

    def schedule(parts: list[ModuleInfo], events: list[StepEvent]) -> list[str]:
        _, described, ordered = by_first_use(parts, events, 5)
        return lines(list(described), list(ordered), layout_of(where))

    assert schedule(said, forward) == schedule(parts, [*forward, *backward])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_recomputed_layer_is_a_unit_in_any_chunks(hooked: bool) -> None:
    parts, events = layers(hooked=hooked)
    _, parts, events = (list(found) for found in by_first_use(parts, events, 5))
    assert [number for number, each in enumerate(parts) if each.recomputed] == [3, 4, 5, 6, 7, 8], "one region each"
    chunk_of = dict(enumerate([0, 0, 1, 1, 2]))

    def units(whole_layers: bool) -> list[int]:
        found = choose_units(parts, chunk_of, whole_layers=whole_layers)
        return [unit.module for unit in dict.fromkeys(found) if unit is not None]

    assert units(True) == [1, 3, 6]
    assert units(False) == [1, 4, 5, 7, 8]
    layouts = [replace(layout_of([0, 0, 1, 1, 2]), whole_layers=w) for w in (True, False)]
    whole, apart = (order(parts, events, layout).schedule(layout).least_blocks() for layout in layouts)
    assert whole <= apart, "the region holds both chunks of the layer anyway"


def test_a_step_by_hand() -> None:
    parts = [part(0), part(1, parent=0), part(2, 3, parent=0)]
    # Module 0 is around 1, 2, and 1 again; the last two share a chunk, of which another parameter is never used.
    events = ran(0, ran(1), ran(2), ran(1))
    forward = ["acquire 0", "acquire 1", "release 1", "acquire 1 2", "release 1 2", "acquire 1", "release 1"]
    # Module 0 has its gradient at once, and its weights leave; module 1 with its first run, the last in backward.
    backward = ["acquire 0", "release 0", "acquire (0)", "acquire 1", "release 1", "acquire 1 2", "acquire (2)"]
    backward += ["release (2)", "release 1 2", "acquire (1)", "acquire 1", "release 1", "release (1)", "release (0)"]
    assert lines(parts, events, layout_of([0, 1, 1, 2, 1], biases=(3,))) == [*forward, "release 0", *backward]


def test_the_gradients_of_a_norm_come_together() -> None:
    """In two chunks they need two blocks; a bias has its gradient before its weight, and the blocks come in turn."""
    parts, events = [part(0, 1)], ran(0)
    first = ["acquire 0 1", "release 0 1"]
    together = ["acquire 0 1", "acquire (1)", "acquire (0)", "release (1)", "release 0 1", "release (0)"]
    in_turn = ["acquire 0 1", "acquire (1)", "release (1)", "release 0 1", "acquire (0)", "release (0)"]
    assert lines(parts, events, layout_of([0, 1])) == [*first, *together]
    assert lines(parts, events, layout_of([0, 1], biases=(1,))) == [*first, *in_turn]


def test_a_run_without_gradients_counts_among_the_runs_of_its_module() -> None:
    """Backward reaches the second run of each module; the first is an evaluation, which no schedule has."""
    parts, layout = [part(0), part(1)], layout_of([0, 1])
    forward = [event for number in range(2) for event in ran(number)]
    evaluation = [replace(event, with_grad=False) for event in forward]

    def backward(run: int) -> list[StepEvent]:
        reached = ((StepEvent(REACH, n, run=run), StepEvent(ACCUMULATE, params=(n,))) for n in (1, 0))
        return [event for each in reached for event in each]

    trained = lines(parts, [*forward, *backward(0)], layout)
    assert lines(parts, [*evaluation, *forward, *backward(1)], layout) == trained
    assert lines(parts, [*forward, *evaluation, *backward(0)], layout) == trained


def test_the_weights_of_a_part_that_ran_again_go_with_its_last_gradient() -> None:
    """As in a reentrant checkpoint, whose first run autograd does not record."""
    parts = [part(), part(0, parent=0), part(1, parent=0)]
    unrecorded = [replace(event, with_grad=False) for event in ran(2)]
    again = [StepEvent(ENTER, 2, in_backward=True), StepEvent(LEAVE, 2, in_backward=True), StepEvent(REACH, 2, run=-1)]
    backward = [*again, StepEvent(ACCUMULATE, params=(1,)), StepEvent(REACH, 1), StepEvent(ACCUMULATE, params=(0,))]
    assert lines(parts, [*ran(0, ran(1), unrecorded), *backward], layout_of([0, 1]))[4:] == [
        "acquire 1",
        "acquire 1",
        "release 1",
        "release 1",
        "acquire (1)",
        "release (1)",
        "acquire 0",
        "release 0",
        "acquire (0)",
        "release (0)",
    ]


def test_a_gradient_of_what_forward_did_not_use_is_reduced_at_the_end() -> None:
    parts = [part(), part(0, parent=0), part(1, parent=0)]
    events = [
        *ran(0, ran(1)),
        StepEvent(REACH, 1),
        StepEvent(ACCUMULATE, params=(1,)),
        StepEvent(ACCUMULATE, params=(0,)),
    ]
    assert lines(parts, events, layout_of([0, 1]))[-3:] == ["acquire (0)", "release (0)", "release (1)"]


def test_a_recomputed_region_is_held_until_its_backward_is_done() -> None:
    parts, layout = [part(number) for number in range(3)], layout_of([0, 1, 2])
    forward = [event for number in range(3) for event in ran(number)]
    backward = [[StepEvent(REACH, number), StepEvent(ACCUMULATE, params=(number,))] for number in (2, 1, 0)]
    again = [StepEvent(ENTER, number, in_backward=True) for number in range(3)]
    kept = [*forward, *backward[0], *backward[1], *backward[2]]
    recomputed = [*forward, backward[0][0], *again, backward[0][1], *backward[1], *backward[2]]
    assert order(parts, recomputed, layout).schedule(layout).least_blocks() == 3
    assert order(parts, kept, layout).schedule(layout).least_blocks() == 1
    assert order(parts, kept, layout).schedule(layout).entries == order(parts, forward, layout).schedule(layout).entries


def test_an_operator_holds_what_it_unpacks_until_the_next_one() -> None:
    parts, layout = [part(0, 1)], layout_of([0, 1])
    reads = [StepEvent(READ, params=(1,)), StepEvent(READ, params=(0,))]
    backward = [
        StepEvent(UNPACK, params=(0,)),
        StepEvent(UNPACK, params=(1,), same_operator=True),
        StepEvent(ACCUMULATE, params=(0,)),
    ]
    assert lines(parts, [*ran(0), *reads, *backward], layout)[6:] == [
        "acquire 0",
        "acquire 1",
        "release 0",
        "release 1",
        "acquire (0)",
        "acquire (1)",
        "release (1)",
        "release (0)",
    ]


def test_parameters_come_in_order_of_first_use() -> None:
    parts = [part(2, 3), part(3, 1)]
    events = [*ran(0, ran(1)), StepEvent(READ, params=(3, 0))]
    order, parts, events = (list(found) for found in by_first_use(parts, events, 5))
    assert order == [2, 3, 1, 0, 4]
    assert [each.params for each in parts] == [(0, 1), (1, 2)]
    assert [each.params for each in events if each.kind is READ] == [(1, 3)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ModuleInfo], list[StepEvent], Layout]:
    """Parts that run beside and inside each other, some of them more than once."""
    where = draw(st.lists(st.integers(0, 4), min_size=1, max_size=10))
    owners = draw(st.lists(st.integers(0, 4), min_size=len(where), max_size=len(where)))
    parents = [draw(st.sampled_from([None, *range(number)])) for number in range(5)]
    parts = [
        part(
            *(p for p, owner in enumerate(owners) if owner == number),
            parent=parents[number],
            shared=draw(st.booleans()),
        )
        for number in range(5)
    ]
    events, running = list[StepEvent](), list[int]()
    entering = draw(st.lists(st.sampled_from([*range(5), None]), max_size=24))
    for number in [*entering, *[None] * len(entering)]:
        if number is not None:
            running.append(number)
            events.append(StepEvent(ENTER, number))
        elif running:
            events.append(StepEvent(LEAVE, running.pop()))
    frozen, resident = (tuple(draw(st.sets(st.integers(0, 4), max_size=2))) for _ in range(2))
    return parts, events, layout_of(where, frozen, resident)


@settings(deadline=None)
@given(steps())
def test_what_forward_used_is_reduced_once_and_nothing_stays_held(
    step: tuple[list[ModuleInfo], list[StepEvent], Layout],
) -> None:
    parts, events, layout = step
    schedule = order(parts, events, layout).schedule(layout)
    used = {p for event in events for p in parts[event.module].params}
    for chunk in layout.chunks:
        weights = [entry.verb for entry in schedule.entries if chunk.index in entry.chunks]
        gradients = [entry.verb for entry in schedule.entries if gradients_of(chunk.index) in entry.chunks]
        assert weights.count(Verb.ACQUIRE) == weights.count(Verb.RELEASE)
        if chunk.residence is Residence.RESIDENT:
            assert not weights + gradients
        elif used & {slot.param for slot in chunk.slots}:
            assert weights
            assert gradients == [Verb.ACQUIRE, Verb.RELEASE] * chunk.key.trainable
    simulate(schedule, schedule.least_blocks())
    counted = order(parts, events, layout).counted(layout)
    if counted.cached:
        simulate(schedule, counted.most_blocks)
