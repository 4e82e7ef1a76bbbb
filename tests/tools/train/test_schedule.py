"""Schedules of the learning rate: any scheduler of torch, by a string, is what torch itself makes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elixir_moe.errors import ConfigError
from elixir_tools.train.config import OptimizerConfig
from elixir_tools.train.schedule import factors
from elixir_tools.train.trainer import Progress, Trainer, lr_factor
from tests.support.ranks import RankPool
from tests.support.train_cases import run, settings_of

Ranks = Callable[[int], RankPool]


class Halved(lr_scheduler.LRScheduler):
    """Half the rate from step `after` on."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: int) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base / 2 if self.last_epoch >= self.after else base for base in self.base_lrs]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "kind", "arguments"),
    [
        ("StepLR(step_size=3, gamma=0.5)", lr_scheduler.StepLR, {"step_size": 3, "gamma": 0.5}),
        ("MultiStepLR(milestones=[2, 7])", lr_scheduler.MultiStepLR, {"milestones": [2, 7]}),
        (
            "torch.optim.lr_scheduler.CosineAnnealingLR(T_max=10, eta_min=1e-4)",
            lr_scheduler.CosineAnnealingLR,
            {"T_max": 10, "eta_min": 1e-4},
        ),
        (
            "OneCycleLR(max_lr=0.01, total_steps=12, cycle_momentum=False)",
            lr_scheduler.OneCycleLR,
            {"max_lr": 0.01, "total_steps": 12, "cycle_momentum": False},
        ),
        (f"{__name__}.Halved(after=4)", Halved, {"after": 4}),
    ],
)
def test_rates_are_those_of_torch(text: str, kind: Any, arguments: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-3)
    scheduler, expected = kind(optimizer, **arguments), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < 12:
            scheduler.step()
    assert [3e-3 * factor for factor in factors(text, 3e-3, 12)] == pytest.approx(expected, rel=1e-12)
    config = OptimizerConfig(lr=3e-3, warmup_steps=4, schedule=text)
    after = [3e-3 * lr_factor(step, 16, config, text) for step in range(16)]
    assert after[4:] == pytest.approx(expected, rel=1e-12), "behind the warm-up"
    assert after[:4] == pytest.approx([3e-3 * step / 5 for step in (1, 2, 3, 4)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("StepLR", "expected cosine, or a scheduler with named arguments"),
        ("StepLR(3)", "expected cosine, or a scheduler with named arguments"),
        ("StepLR(step_size=os)", "expected cosine, or a scheduler with named arguments"),
        ("StepLR(step_size=", "expected cosine, or a scheduler with named arguments"),
        ("StepLR(step_size=30, step_size=2)", "expected cosine, .*an argument is given twice"),
        ("tests.support.no_module.MyLR(after=3)", "there is no .*PYTHONPATH: ModuleNotFoundError"),
        ("StepsLR(step_size=3)", "there is no StepsLR"),
        ("nowhere.StepLR(step_size=3)", "there is no nowhere.StepLR"),
        ("torch.nn.Linear(in_features=1)", "torch.nn.Linear is not a scheduler"),
        ("ReduceLROnPlateau()", "needs a metric"),
        ("StepLR(size=3)", "TypeError"),
        ("OneCycleLR(max_lr=1, total_steps=98)", "changes betas, .* give cycle_momentum=False"),
        ("OneCycleLR(max_lr=1, total_steps=9, cycle_momentum=False)", "step 10 of 98 fails: ValueError"),
        ("LinearLR(start_factor=1, end_factor=-1)", "LinearLR"),
    ],
)
def test_what_is_no_schedule_says_why(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.schedule .*{message}"):
        settings_of(tmp_path, optimizer={"schedule": text}, run={"steps": 100})


def test_a_module_of_a_schedule_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no broken_module\.MyLR .*ValueError: broken"):
        factors("broken_module.MyLR(after=3)", 0.1, 4)


def test_a_last_rate_without_its_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.final_lr=0.5 has no effect with optimizer.schedule='StepLR"):
        OptimizerConfig(schedule="StepLR(step_size=3)", final_lr=0.5)


def test_a_run_has_the_rates_of_its_schedule_and_keeps_them_when_it_resumes(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", optimizer={"schedule": "StepLR(step_size=2, gamma=0.5)"})
    stopped = ranks(2).run(run, config, {3: "SIGTERM"})[0]
    assert stopped["ended"].startswith("75 ")
    found = ranks(2).run(run, config)[0]
    assert [line["lr"] for line in found["metrics"]] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3, 1.5e-3, 1.5e-3])


BATCHED: dict[str, Any] = {"model": {"ep": [1, 1], "dropout": 0.0}, "save": {"every": 2}}


def test_a_larger_batch_from_the_first_step_on_is_that_of_the_settings(ranks: Ranks, tmp_path: Path) -> None:
    twice = settings_of(tmp_path / "twice", **BATCHED, run={"global_batch": 16, "accumulation": 2})
    expected = ranks(2).run(run, twice)[0]["metrics"]
    (tmp_path / "once").mkdir()
    (tmp_path / "once" / "control.yaml").write_text("global_batch: 16")
    once = settings_of(tmp_path / "once", **BATCHED, run={"global_batch": 8})
    found = ranks(2).run(run, once)[0]
    assert found["events"][0] == ("control", "global_batch is 16 from step 1 on, it was 8")
    assert found["metrics"] == expected
    summaries = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("once", "twice")]
    tokens = [[line["tokens_per_second"] * line["step_seconds"] for line in map(json.loads, s)] for s in summaries]
    assert tokens[0] == pytest.approx(tokens[1])
    assert tokens[0] == pytest.approx([16 * 16] * 6)


def test_batch_and_schedule_change_while_a_run_goes_on_and_hold_when_it_resumes(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", **BATCHED, run={"steps": 8})
    wrong = "{global_batch: 12, schedule: 'OneCycleLR(max_lr=1, total_steps=2, cycle_momentum=False)'}"
    right = "{global_batch: 16, schedule: 'StepLR(step_size=1, gamma=0.5)'}"
    at = {2: f"control: {wrong}", 3: f"control: {right}", 5: "SIGTERM"}
    stopped = ranks(2).run(run, config, at)[0]
    texts = [text for kind, text in stopped["events"] if kind == "control"]
    assert texts[0].startswith("control.yaml is not followed: schedule 'OneCycleLR") and "ValueError" in texts[0]
    assert texts[1].startswith("control.yaml is not followed: global_batch=12 is not a multiple of 8")
    assert texts[2:] == [
        "schedule is StepLR(step_size=1, gamma=0.5) from step 5 on, it was cosine",
        "global_batch is 16 from step 5 on, it was 8",
    ]
    (tmp_path / "out" / "control.yaml").unlink()
    found = ranks(1).run(run, config)[0]["metrics"]
    assert [line["lr"] for line in found[4:]] == pytest.approx([3e-3, 1.5e-3, 7.5e-4, 3.75e-4])
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert [round(line["tokens_per_second"] * line["step_seconds"] / 16) for line in lines] == [8] * 4 + [16] * 4


def test_a_run_that_goes_back_keeps_batch_and_schedule(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", **BATCHED, watch={"on_nan": "back"}, run={"steps": 8})
    control = "control: {global_batch: 16, schedule: 'ConstantLR(factor=0.5, total_iters=100)'}"
    found = ranks(2).run(run, config, {4: control, 5: "poison"})[0]
    assert [kind for kind, _ in found["events"]] == ["control", "control", "went back"], found["events"]
    assert [line["lr"] for line in found["metrics"][5:]] == pytest.approx([3e-3 / 4] * 3), (
        "half, and half by the return"
    )


@pytest.mark.parametrize(("begin", "rises"), [(None, 2), (6, 2), (1, 1)])
def test_steps_before_a_change_of_schedule_have_its_first_factor_or_warm_up(begin: int | None, rises: int) -> None:
    """A run that goes back does steps before the change again."""
    config = OptimizerConfig(warmup_steps=2)
    found = [lr_factor(step, 10, config, "ConstantLR(factor=0.5, total_iters=3)", begin) for step in range(8)]
    last = 3 + (2 if begin is None else begin)
    assert found == pytest.approx([(step + 1) / 3 if step < rises else 0.5 if step < last else 1 for step in range(8)])


def test_ranks_that_cannot_share_a_batch_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", **BATCHED, run={"global_batch": 2, "accumulation": 2})
    stopped = ranks(1).run(run, config, {1: "control: {global_batch: 3}", 3: "SIGTERM"})[0]
    assert "global_batch is 3 from step 3 on, it was 2" in [text for _, text in stopped["events"]]
    (tmp_path / "out" / "control.yaml").unlink()
    twice = settings_of(tmp_path / "out", **BATCHED, run={"global_batch": 2})
    ended = ranks(2).run(run, twice)[0]["ended"]
    assert "the run has global_batch=3 by control.yaml, which 2 ranks cannot share equally" in ended, ended


@pytest.mark.parametrize(
    ("samples", "accumulation", "replicas", "settings", "expected"),
    [
        (16, 2, 2, {"global_batch": 8, "accumulation": 1}, 2),
        (16, 2, 2, {"global_batch": 8, "accumulation": 2}, 4),  # memory was short
        (45, 3, 1, {"global_batch": 30, "accumulation": 5}, 9),  # 8 micro-batches of 6 samples would not share 45
        (12, 3, 4, {"global_batch": 8, "accumulation": 2}, 3),
        (12, 4, 2, {"global_batch": 8, "accumulation": 1}, 2),  # another number of ranks
    ],
)
def test_micro_batches_are_at_most_those_of_the_settings(
    samples: int, accumulation: int, replicas: int, settings: dict[str, int], expected: int, tmp_path: Path
) -> None:
    config = settings_of(tmp_path, run=settings)
    progress = Progress(lr=1.0, clip_norm=None, global_batch=samples, accumulation=accumulation)
    trainer: Any = SimpleNamespace(progress=progress, config=config, replicas=replicas)
    Trainer._fit_micro_batches(trainer)
    assert progress.accumulation == expected
    assert samples % (expected * replicas) == 0 and samples // expected <= config.micro_batch
