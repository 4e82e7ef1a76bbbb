"""The supervisor's decisions on their own, and in a training: not a number, divergence, going back, new settings."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from elixir_tools.watch.supervisor import Action, Observation, Supervisor, Verdict, WatchConfig
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def seen(step: int, loss: float = 2.0, norm: float = 1.0, **more: Any) -> Observation:
    return Observation(step=step, batch=100 + step, losses=(loss, loss), norm=norm, **more)


def after(supervisor: Supervisor, steps: int = 20) -> Supervisor:
    """Steps whose losses differ by a hundredth."""
    for step in range(1, steps + 1):
        assert supervisor.observe(seen(step, 2.0 + 0.01 * (step % 3))).verdict is Verdict.GO
    return supervisor


def kinds(action: Action) -> list[str]:
    return [note.kind for note in action.notes]


@pytest.mark.fault(13)
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (2.0, math.inf), (2.0, math.nan)])
def test_what_is_not_finite_is_never_applied(loss: float, norm: float) -> None:
    stop = after(Supervisor(WatchConfig())).observe(seen(21, loss, norm))
    assert stop.verdict is Verdict.STOP and stop.not_finite and "step 21" in stop.reason
    skipping = after(Supervisor(WatchConfig(on_nan="skip", patience=2)))
    found = [skipping.observe(seen(step, loss, norm)).verdict for step in (21, 22, 23)]
    assert found == [Verdict.SKIP, Verdict.SKIP, Verdict.STOP]


@pytest.mark.fault(13)
def test_overflow_of_scaled_gradients_is_the_loss_scales_business_until_no_scale_helps() -> None:
    supervisor = after(Supervisor(WatchConfig()))
    verdicts = [supervisor.observe(seen(step, 2.0, math.inf, scaled=True)).verdict for step in range(21, 60)]
    assert verdicts[:31] == [Verdict.GO] * 31 and verdicts[31] is Verdict.STOP
    assert supervisor.observe(seen(60, math.nan, math.inf, scaled=True)).verdict is Verdict.STOP, "the loss itself"


@pytest.mark.fault(14)
def test_a_divergence_is_several_steps_in_a_row_far_above_the_last_ones() -> None:
    supervisor = after(Supervisor(WatchConfig(patience=3)))
    assert supervisor.observe(seen(21, 2.2)).verdict is Verdict.GO
    actions = [supervisor.observe(seen(step, 9.0)) for step in (22, 23)]
    assert [action.verdict for action in actions] == [Verdict.GO] * 2 and kinds(actions[0]) == ["loss"]
    after(supervisor, 3)  # they do not follow each other
    verdicts = [supervisor.observe(seen(step, 9.0)) for step in (30, 31, 32)]
    assert [action.verdict for action in verdicts] == [Verdict.GO, Verdict.GO, Verdict.STOP]
    assert "diverges since step 30" in verdicts[2].reason


@pytest.mark.fault(14)
def test_going_back_leaves_out_the_batches_lowers_the_rate_and_ends_some_day() -> None:
    supervisor = after(Supervisor(WatchConfig(on_divergence="back", patience=2, tries=2)))
    state = supervisor.state()
    for _ in range(2):
        supervisor.observe(seen(21, 9.0))
        back = supervisor.observe(seen(22, 9.0))
        assert (back.verdict, back.before, back.avoid, back.rate) == (Verdict.BACK, 21, (121, 122), 0.5)
        supervisor.restore(state)
    supervisor.observe(seen(21, 9.0))
    assert supervisor.observe(seen(22, 9.0)).verdict is Verdict.STOP, "going back has not made it forget how often"


def test_a_supervisor_goes_on_from_its_state() -> None:
    whole = after(Supervisor(WatchConfig(patience=2)))
    resumed = Supervisor(WatchConfig(patience=2))
    resumed.restore(whole.state())
    for step, loss in ((21, 9.0), (22, 9.0)):
        assert whole.observe(seen(step, loss)) == resumed.observe(seen(step, loss))


@pytest.mark.fault(4)
def test_a_slow_rank_gets_a_score_and_one_line() -> None:
    supervisor = Supervisor(WatchConfig(window=8))
    said = [kinds(supervisor.observe(seen(step, busy_seconds=(1.0, 2.0, 1.0)))) for step in range(1, 20)]
    assert said.count(["straggler"]) == 1 and said[7] == ["straggler"]
    assert supervisor.scores() == [1.0, 2.0, 1.0]
    for step in range(20, 40):
        assert not kinds(supervisor.observe(seen(step, busy_seconds=(1.0, 1.1, 1.0))))


def test_a_slow_rank_is_named_with_its_place() -> None:
    supervisor, places = Supervisor(WatchConfig(window=2)), ["one, GPU 0", "two, GPU 0"]
    for step in (1, 2):
        action = supervisor.observe(seen(step, busy_seconds=(1.0, 4.0), places=places))
    assert [note.text.partition(": ")[0] for note in action.notes] == ["rank 1 (two, GPU 0) is slow"]


def test_norms_and_scales_are_watched() -> None:
    supervisor = after(Supervisor(WatchConfig(window=10)))
    assert kinds(supervisor.observe(seen(21, norm=500.0))) == ["norm"]
    assert not kinds(supervisor.observe(seen(22, scales={"w": 0.1})))
    assert kinds(supervisor.observe(seen(23, scales={"w": 2.0}))) == ["scale"]


@pytest.mark.fault(16)
def test_an_expert_without_a_token_for_a_window_of_steps_is_told_of_once_each_time() -> None:
    supervisor = Supervisor(WatchConfig(window=4))
    counts = [[3, 0]] * 6 + [[3, 1]] + [[3, 0]] * 4  # one token, and the steps are counted anew
    actions = [supervisor.observe(seen(step, tokens_per_expert={"mlp": n})) for step, n in enumerate(counts, 1)]
    text = "expert 1 of mlp has had no token for 4 steps"
    assert [(step, note.text) for step, a in enumerate(actions, 1) for note in a.notes] == [(4, text), (11, text)]
    assert every(action.verdict is Verdict.GO for action in actions)
