"""Order among streams, threads and ranks, as a GPU would have it: nothing reads what is still being written."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings

from tests.lanes.cases import (
    Outcome,
    bytes_of_gradients,
    cases,
    norm_of_a_frozen_model,
    run,
    run_compute_late,
    run_with_a_bad_step,
)
from tests.lanes.faults import FAULTS
from tests.support.cases import with_further
from tests.support.order_cases import ADDED_LATE, LATE, TELLING, TOGETHER, Case
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
QUICK, MANY = 6, 250


def divergence(outcomes: list[Outcome]) -> str:
    """The first place at which ranks issue different collectives; empty if they agree."""
    orders = [[issue for issue in outcome.issued if len(issue[0]) > 1] for outcome in outcomes]
    for place, issues in enumerate(zip(*orders, strict=False)):
        if any(issue != issues[0] for issue in issues):
            return f"issue {place}: {issues}"
    return "" if len({len(order) for order in orders}) == 1 else f"{[len(order) for order in orders]} issues"


def faults_of(outcomes: list[Outcome]) -> list[str]:
    """All that is wrong with a run."""
    found = sorted({race for outcome in outcomes for race in outcome.races})
    return found + [text for text in (divergence(outcomes),) if text]


def drawn(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on that many cases, the same ones each time."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        rules = settings(
            max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks
        )
        return rules(given(case=cases())(test))  # type: ignore[no-any-return]

    return decorate


@pytest.mark.parametrize("world", [1, 2])
@drawn(QUICK)
def test_no_race_and_one_order_on_all_ranks(world: int, ranks: Ranks, case: Case) -> None:
    assert not faults_of(ranks(world).run(run, case)), case


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@drawn(MANY)
def test_no_race_and_one_order_on_all_ranks_in_many_cases(world: int, ranks: Ranks, case: Case) -> None:
    assert not faults_of(ranks(world).run(run, case)), case


@pytest.mark.parametrize(("world", "case"), [*TELLING, *TOGETHER])
def test_the_telling_runs_are_sound(world: int, case: Case, ranks: Ranks) -> None:
    assert not faults_of(ranks(world).run(run, case))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (LATE[0], "a reduction does not wait for compute"),
        (
            Case(parts=("plain", "beside", "plain", "beside"), plan="offload", blocks=0, half=True, accumulation=2),
            "a block is free at once",
        ),
        (ADDED_LATE, "a gradient is added late on compute, and nobody waits for it"),
    ],
)
def test_too_early_gives_other_bits(case: Case, fault: str, ranks: Ranks) -> None:
    """All but compute runs at once: it comes too early where it does not wait."""
    try:
        assert ranks(1).run(run_compute_late, case, fault)[0]
    except RankError as error:  # the first forwards compare blocks with shards
        assert "has written parameter" in str(error) or "gradient norm" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@drawn(MANY)
def test_the_same_bits_with_late_compute_in_many_cases(world: int, ranks: Ranks, case: Case) -> None:
    assert ranks(world).run(run_compute_late, case) == [[]] * world, case


@pytest.mark.parametrize(
    ("plan", "waits", "outside"),
    [("zero3", "numbers", 4), ("zero2", "numbers", 3), ("offload", "Stream.synchronize", 1)],
)
@pytest.mark.parametrize("world", [1, 2])
def test_the_host_waits_once_in_a_step(plan: str, waits: str, outside: int, world: int, ranks: Ranks) -> None:
    """With all state on the device, only for the norm of the step before, which is long done.

    For each chunk with gradients outside the blocks it waits for an older one, too; between two ranks that is the tied
    weight alone.
    """
    case = Case(parts=("plain", "tied", "checkpointed"), plan=plan, half=True, habits=frozenset({"clip"}), steps=4)
    older = ["Event.synchronize"] * (outside if world == 1 else 1)
    for outcome in ranks(world).run(run, case):
        assert outcome.waits[2:] == [[*older, waits]] * 2


@pytest.mark.parametrize("plan", ["zero3", "ddp"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_device_skips_a_step_whose_norm_is_not_finite(plan: str, world: int, ranks: Ranks) -> None:
    for messages, races, differing in ranks(world).run(run_with_a_bad_step, plan):
        (message,) = messages
        assert "the global gradient norm of the last step was nan" in message
        assert not races and not differing


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_with_nothing_to_train_has_a_norm_of_0(world: int, ranks: Ranks) -> None:
    assert ranks(world).run(norm_of_a_frozen_model) == [0.0] * world


@pytest.mark.parametrize(("plan", "half"), [("offload", True), ("offload", False), ("values on disk", True)])
def test_gradients_are_summed_outside_the_device_without_a_wait(plan: str, half: bool, ranks: Ranks) -> None:
    case = Case(parts=("plain",) * 4, plan=plan, blocks=3, half=half, accumulation=2, steps=3)
    for outcome in ranks(1).run(run, case):
        assert not outcome.races
        assert not any("copy" in wait for waits in outcome.waits[1:] for wait in waits), outcome.waits[1:]


@pytest.mark.parametrize("plan", ["zero3", "offload", "values on disk"])
def test_the_first_step_waits_once_for_what_forwards_have_written(plan: str, ranks: Ranks) -> None:
    (outcome,) = ranks(1).run(run, Case(parts=("plain",) * 4, plan=plan, half=True, steps=1))
    assert not outcome.races
    assert outcome.waits[0].count("tolist") == 1
    assert "equal" not in outcome.waits[0]


PLAIN, MIXED = ("plain",) * 9, ("plain", "mixture", "frozen") * 3
OUTSIDE = list(product([1, 2], ["ddp", "zero3"], [PLAIN, MIXED], [1, 2]))
HALF = [
    (world, plan, parts, n) for world, plan, parts, n in OUTSIDE if (world + n + (plan == "ddp") + (parts is PLAIN)) % 2
]
"""Any three of the four have all their combinations."""


@pytest.mark.parametrize(("world", "plan", "parts", "accumulation"), with_further(OUTSIDE, HALF))
def test_gradients_outside_blocks_stay_within_the_plan(
    world: int, plan: str, parts: tuple[str, ...], accumulation: int, ranks: Ranks
) -> None:
    """However far the host runs ahead: it waits for an older reduction."""
    case = Case(parts=parts, plan=plan, half=True, accumulation=accumulation)
    for most, planned in ranks(world).run(bytes_of_gradients, case):
        assert most <= planned


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_left_out_is_noticed(fault: str, ranks: Ranks) -> None:
    for world, case in TELLING:
        try:
            if faults_of(ranks(world).run(run, case, fault)):
                return
        except RankError as error:
            # Ranks that issue other collectives may wait for each other without end; first forwards compare weights;
            # values that are read while they are written may miss their checksum.
            assert any(
                text in str(error) for text in ("Timed out", "has written parameter", "the disk cannot be trusted")
            )
            return
    pytest.fail("nothing was noticed")
