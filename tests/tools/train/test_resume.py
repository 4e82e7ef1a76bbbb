"""A training that is cut short and started again by the same command is the unbroken one, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elixir_moe.errors import ConfigError
from elixir_tools.train.directory import check_directory
from tests.support.checkpoint_cases import assert_same
from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, settings_of, text_of

Ranks = Callable[[int], RankPool]
UNCLIPPED = {"optimizer": {"clip_norm": None}}
ZERO3 = {"plan": {"kind": "zero3", "rcache_blocks": 5, "chunk_numel": 5000}}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return out, ranks(2).run(run, settings_of(out))[0]


def assert_like(found: dict[str, Any], out: Path, unbroken: tuple[Path, dict[str, Any]]) -> None:
    assert found["ended"] == "" and found["status"]["state"] == "done"
    assert found["metrics"] == unbroken[1]["metrics"]
    assert_same(last_state(out), last_state(unbroken[0]), "the last step")


def test_the_last_checkpoints_are_kept_and_the_last_step_is_one(unbroken: tuple[Path, dict[str, Any]]) -> None:
    out, found = unbroken
    assert found["ended"] == "" and found["checkpoints"] == ["step-00000004", "step-00000006"]
    assert found["status"] == {
        "state": "done", "step": 6, "checkpoint": str(out / "checkpoints" / "step-00000006"), "reason": ""
    }  # fmt: skip
    assert [line["step"] for line in found["metrics"]] == [1, 2, 3, 4, 5, 6] and found["events"] == []


@pytest.mark.fault(36, 38, 39)
@pytest.mark.parametrize(
    ("name", "on", "code", "said"),
    [("SIGINT", 0, 130, "Ctrl-C"), ("SIGTERM", 1, 75, "SIGTERM"), ("SIGUSR1", 0, 75, "SIGUSR1")],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_same_command_goes_on(
    name: str, on: int, code: int, said: str, unbroken: tuple[Path, dict[str, Any]], ranks: Ranks, tmp_path: Path
) -> None:
    config = settings_of(tmp_path / "out")
    stopped = ranks(2).run(run, config, {3: name}, on)
    for found in stopped:
        expected = f"{code} stopped after step 4 by {said}; the state is saved in "
        assert found["ended"].startswith(expected), "it came behind the agreement of step 3"
        assert found["status"]["state"] == "stopped" and found["checkpoints"][-1] == "step-00000004"
    found = ranks(2).run(run, config)[0]
    assert found["events"][-1][0] == "resumed"
    assert_like(found, tmp_path / "out", unbroken)


@pytest.mark.slow
@pytest.mark.fault(36)
def test_a_signal_before_the_first_step_changes_nothing(
    unbroken: tuple[Path, dict[str, Any]], ranks: Ranks, tmp_path: Path
) -> None:
    """While the model is wrapped: in a new run, and in one that goes on."""
    config = settings_of(tmp_path / "out")
    for saved, step in (([], 1), (["step-00000002", "step-00000004"], 5)):
        for found in ranks(2).run(run, config, {0: "SIGTERM"}, 1):
            assert found["ended"].startswith(f"75 stopped before step {step} by SIGTERM")
            assert found["status"]["state"] == "stopped" and found["checkpoints"] == saved
        found = ranks(2).run(run, config, {3: "SIGTERM"} if not saved else None)[0]
    assert_like(found, tmp_path / "out", unbroken)


@pytest.mark.fault(1, 38, 39)
def test_what_follows_the_last_checkpoint_is_done_again(
    unbroken: tuple[Path, dict[str, Any]], ranks: Ranks, tmp_path: Path
) -> None:
    """Ended between two checkpoints, without a chance to save."""
    config = settings_of(tmp_path / "out")
    cut = ranks(2).run(run, config, {5: "end"})[0]
    assert cut["ended"].startswith("Ending") and [line["step"] for line in cut["metrics"]] == [1, 2, 3, 4]
    assert_like(ranks(2).run(run, config)[0], tmp_path / "out", unbroken)


@pytest.mark.fault(12)
def test_a_resume_under_another_plan_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Without clipping, whose norm is a sum over shards; the norm itself is then the same to rounding."""
    whole = ranks(2).run(run, settings_of(tmp_path / "a", **UNCLIPPED))[0]
    ranks(2).run(run, settings_of(tmp_path / "b", **UNCLIPPED), {3: "SIGTERM"})
    found = ranks(2).run(run, settings_of(tmp_path / "b", **UNCLIPPED, **ZERO3))[0]
    for line, other in zip(found["metrics"], whole["metrics"], strict=True):
        assert line.pop("grad_norm") == pytest.approx(other.pop("grad_norm"), rel=1e-5)
        assert line == other
    assert_same(last_state(tmp_path / "b"), last_state(tmp_path / "a"), "the last step")


@pytest.mark.fault(10)
def test_a_resume_on_fewer_and_more_ranks_goes_on_with_the_same_samples(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", model={"dropout": 0.0, "capacity_factor": 4.0}, save={"every": 1})
    one = settings_of(tmp_path / "out", model={"dropout": 0.0, "capacity_factor": 4.0, "ep": [1, 1]}, save={"every": 1})
    whole = settings_of(tmp_path / "whole", model={"dropout": 0.0, "capacity_factor": 4.0})
    expected = ranks(2).run(run, whole)[0]["metrics"]
    ranks(2).run(run, config, {1: "SIGTERM"})
    ranks(1).run(run, one, {3: "SIGTERM"})
    found = ranks(2).run(run, config)[0]
    assert found["ended"] == ""
    for line, other in zip(found["metrics"], expected, strict=True):
        assert line["lr"] == other["lr"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)  # sums over other ranks, some steps of AdamW


def test_a_run_that_has_ended_goes_on_if_it_is_given_more_steps(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(run, settings_of(tmp_path / "out", model={"ep": [1, 1]}))
    again = ranks(1).run(run, settings_of(tmp_path / "out", model={"ep": [1, 1]}))[0]
    assert "the run in it has ended at step 6: choose another directory" in again["ended"]
    longer = settings_of(tmp_path / "out", model={"ep": [1, 1]}, run={"steps": 8})
    found = ranks(1).run(run, longer)[0]
    assert [line["step"] for line in found["metrics"]] == list(range(1, 9))
    other = settings_of(tmp_path / "out", model={"ep": [1, 1]}, run={"steps": 9}, optimizer={"lr": 1e-3})
    refused = ranks(1).run(run, other)[0]["ended"]
    assert "ConfigError optimizer.lr is 0.001, but was 0.003 when" in refused and "step-00000008" in refused


def test_a_state_apart_stays_and_may_be_gone_on_from_in_the_same_directory(ranks: Ranks, tmp_path: Path) -> None:
    """Of a run that was stopped before its first checkpoint, and of one that is replaced."""
    out = tmp_path / "out"
    stopped = ranks(2).run(run, settings_of(out, save={"every": 100}), {1: "poison"})[0]
    assert stopped["ended"].startswith("3 ") and (stopped["apart"], stopped["checkpoints"]) == (["step-00000002"], [])
    apart = str(out / "apart" / "step-00000002")
    found = ranks(2).run(run, settings_of(out, save={"every": 100}, run={"resume": apart}))[0]
    assert [line["step"] for line in found["metrics"]] == [3, 4, 5, 6] and found["apart"] == ["step-00000002"]
    config = settings_of(out, save={"every": 100}, run={"overwrite": True, "resume": apart})
    found = ranks(2).run(run, config)[0]
    assert [line["step"] for line in found["metrics"]] == [3, 4, 5, 6] and found["apart"] == ["step-00000002"]
    found = ranks(2).run(run, settings_of(out, run={"overwrite": True}))[0]
    assert len(found["metrics"]) == 6 and found["apart"] == []


def test_another_checkpoint_than_the_latest_is_not_passed_over_silently(ranks: Ranks, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ranks(2).run(run, settings_of(out), {4: "control: {stop: true}"})[0]["ended"].startswith("0 stopped")
    (out / "control.yaml").unlink()
    older = out / "checkpoints" / "step-00000004"
    config = settings_of(out, run={"resume": str(older)})
    with pytest.raises(ConfigError, match=r"step-00000004' is not where the run .* that is .*step-00000005'. Leave"):
        check_directory(config, text_of(config))
    (tmp_path / "link").symlink_to(out)  # another name of the checkpoint, which must not be removed with the old run
    config = settings_of(out, run={"resume": str(tmp_path / "link" / "checkpoints" / older.name), "overwrite": True})
    found = ranks(2).run(run, config, {5: "control: {stop: true}"})[0]
    assert [line["step"] for line in found["metrics"]] == [1, 2, 3, 4, 5, 6] and found["apart"] == ["step-00000005"]
    config = settings_of(out, run={"resume": config.run.resume, "steps": 8})
    assert check_directory(config, text_of(config)) == out / "checkpoints" / "step-00000006", "the same command"
    changes = {"resume": str(out / "checkpoints" / "step-00000006")}
    config = settings_of(tmp_path / "new", run=changes | {"steps": 5})
    with pytest.raises(ConfigError, match=r"run.steps=5: .*step-00000006' has 6 steps already"):
        check_directory(config, text_of(config))
    found = ranks(2).run(run, settings_of(tmp_path / "new", run=changes))[0]
    assert found["ended"] == "" and found["metrics"] == [], "evaluated and concluded, without a picture"


def test_a_run_of_a_trainer_is_neither_continued_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"run: {{out: {tmp_path}}}")
    for more in ({}, {"overwrite": True}):
        config = settings_of(tmp_path, run=more)
        with pytest.raises(ConfigError, match=r"a run of sft or its like.* choose another directory"):
            check_directory(config, text_of(config))
