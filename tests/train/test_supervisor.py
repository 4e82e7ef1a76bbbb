"""The supervisor's decisions on their own, and in a training: not a number, divergence, going back, new settings."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elixir_moe.watch.supervisor import Action, Observation, Supervisor, Verdict, WatchConfig
from tests.support.ranks import RankPool
from tests.support.train_cases import run, settings_of

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
    assert all(action.verdict is Verdict.GO for action in actions)


@pytest.mark.fault(13)
def test_a_nan_on_one_rank_stops_all_with_a_name_and_the_state_apart(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(run, settings_of(tmp_path / "out"), {4: "poison"}, 1)
    for found in results:
        # experts of both ranks have seen it by the end of forward
        assert re.match(r"3 step 5: the loss of rank [01] is nan; the gradient of '.*' is not finite", found["ended"])
    assert results[0]["status"]["state"] == "failed"
    assert results[0]["apart"] == ["step-00000005"] and results[0]["checkpoints"] == ["step-00000002", "step-00000004"]


@pytest.mark.fault(13, 14)
@pytest.mark.parametrize("policy", ["skip", "back"])
def test_a_nan_may_be_skipped_or_gone_back_from(policy: str, ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", watch={"on_nan": policy})
    found = ranks(2).run(run, config, {3: "poison"}, 0)[0]
    assert found["ended"] == "" and [line["step"] for line in found["metrics"]] == [1, 2, 3, 4, 5, 6]
    kind, text = found["events"][0]
    if policy == "skip":
        assert kind == "skipped" and "the loss of rank 0 is nan" in text
        assert found["metrics"][3]["loss"] is None
    else:
        assert kind == "went back" and "back to step 2, at 0.5 of the learning rate, without the batches [4]" in text
        whole = ranks(2).run(run, settings_of(tmp_path / "whole"))[0]["metrics"]
        assert [line["lr"] for line in found["metrics"][2:]] == [line["lr"] / 2 for line in whole[2:]]
        assert found["metrics"][:3][0] == whole[0] and found["metrics"][3]["loss"] != whole[3]["loss"]


def test_what_control_yaml_has_changed_holds_after_going_back(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", watch={"on_nan": "back"}, save={"every": 4})
    found = ranks(2).run(run, config, {4: "control: {lr: 0.001, clip_norm: 0.5}", 5: "poison"}, 0)[0]
    assert [kind for kind, _ in found["events"]] == ["control", "control", "went back"], found["events"]
    assert found["metrics"][-1]["lr"] == pytest.approx(0.001 * 0.1 / 2)


def test_control_yaml_changes_saves_and_stops(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", save={"every": 100})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "control.yaml").write_text("lr: 0.001\nstop: true\n")
    found = ranks(2).run(run, config, {2: "control: {lrr: 1}", 3: "control: {save: true}", 4: "control: {stop: true}"})
    assert found[0]["ended"].startswith("0 stopped after step 5 by control.yaml"), found[0]["ended"]
    texts = [text for _, text in found[0]["events"]]
    assert texts[0] == "lr is 0.001 from step 1 on, it was 0.003" and "did you mean 'lr'" in texts[1]
    assert found[0]["checkpoints"] == ["step-00000004", "step-00000005"]
    (tmp_path / "out" / "control.yaml").unlink()
    again = ranks(2).run(run, config)[0]
    assert again["ended"] == "" and again["metrics"][-1]["lr"] == pytest.approx(0.001 * 0.1), "the rate is kept"
