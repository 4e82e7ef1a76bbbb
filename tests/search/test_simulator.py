"""The native simulator against the policy of the runtime, load by load."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_moe import _native
from elixir_moe.chunks.cache_policy import CacheRequest, Load, Schedule, Verb, simulate
from elixir_moe.chunks.packing import build_layout
from elixir_moe.errors import PlanError
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, lm_loss
from elixir_moe.search.simulator import Simulator
from elixir_moe.search.trace import trace
from tests.chunks.test_cache_policy import schedules


def native(schedule: Schedule, blocks: int) -> list[Load] | None:
    """What C++ decides, without the way back to Python."""
    numbers = {verb: number for number, verb in enumerate(Verb)}
    items = [item for entry in schedule.entries for item in entry.chunks]
    count = max((max(item, ~item) for item in items), default=0) + 1
    starts, chunks = array("i", [0]), array("i")
    for entry in schedule.entries:
        chunks.extend(item if item >= 0 else count + ~item for item in entry.chunks)
        starts.append(len(chunks))
    verbs = array("B", (numbers[entry.verb] for entry in schedule.entries))
    found = _native.simulate(verbs, starts, chunks, count, blocks)
    if found is None:
        return None
    return [Load(c if c < count else ~(c - count), b, None if out < 0 else out, False) for c, b, out in found]


@settings(max_examples=300, deadline=None)
@given(schedule=schedules(), blocks=st.integers(0, 6))
def test_native_decisions_are_the_policys(schedule: Schedule, blocks: int) -> None:
    plain = Schedule(schedule.entries)  # what a frozen chunk leaves for the next step is the policy's own business
    try:
        expected = simulate(plain, blocks, prefetch=0)[1]
    except PlanError:
        assert native(plain, blocks) is None
        with pytest.raises(PlanError, match="blocks of the rCache are in use at once"):
            Simulator(plain).loads(blocks)
    else:
        assert native(plain, blocks) == expected == Simulator(plain).loads(blocks)
        assert Simulator(schedule).loads(blocks) == simulate(schedule, blocks, prefetch=0)[1]


@pytest.mark.parametrize("checkpoint", ["none", "non_reentrant"])
def test_a_models_step_on_every_number_of_blocks(checkpoint: str) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, seq_len=16, n_layers=6, d_model=16, n_heads=2, checkpoint=checkpoint))  # type: ignore[arg-type]
    profile = trace(model, lm_loss, torch.zeros(2, 17, dtype=torch.int64), world=2)
    layout = build_layout(profile.params, 1100)
    schedule = profile.schedule(layout)
    for blocks in range(schedule.least_blocks(), len(layout.cached) + 2):
        assert native(schedule, blocks) == simulate(schedule, blocks, prefetch=0)[1]
    assert native(schedule, schedule.least_blocks() - 1) is None


@pytest.mark.parametrize(
    ("verbs", "starts", "chunks", "message"),
    [
        ([0], [0], [0], "starts needs one number more than verbs"),
        ([2], [0, 1], [0], "entry 0 is none"),
        ([0, 1], [0, 2, 1], [0, 0], "entry 1 is none"),
        ([0], [0, 1], [0, 0], "starts does not end where chunks do"),
        ([0], [0, 1], [2], "chunks has one beyond twice chunk_count"),
    ],
)
def test_arrays_that_are_no_schedule_are_refused(
    verbs: list[int], starts: list[int], chunks: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _native.simulate(array("B", verbs), array("i", starts), array("i", chunks), 1, 1)


def test_an_empty_step_gathers_nothing() -> None:
    assert Simulator(Schedule([])).loads(0) == []
    assert Simulator(Schedule([CacheRequest(Verb.RELEASE, (3,))])).loads(1) == []
