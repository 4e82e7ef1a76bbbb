"""Schedules of the learning rate: any scheduler of torch, by a string, is what torch itself makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elixir_moe.errors import ConfigError
from elixir_tools.train.config import OptimizerConfig
from elixir_tools.train.schedule import factors
from elixir_tools.train.trainer import lr_factor
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


def test_a_last_rate_without_its_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.final_lr=0.5 has no effect with optimizer.schedule='StepLR"):
        OptimizerConfig(schedule="StepLR(step_size=3)", final_lr=0.5)


def test_a_run_has_the_rates_of_its_schedule_and_keeps_them_when_it_resumes(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", optimizer={"schedule": "StepLR(step_size=2, gamma=0.5)"})
    stopped = ranks(2).run(run, config, {3: "SIGTERM"})[0]
    assert stopped["ended"].startswith("75 ")
    found = ranks(2).run(run, config)[0]
    assert [line["lr"] for line in found["metrics"]] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3, 1.5e-3, 1.5e-3])
