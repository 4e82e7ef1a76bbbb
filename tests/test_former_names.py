"""Names of former versions: each is refused, and says what it is called now."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.cli.main import main
from elixir_moe.train.config import TrainConfig
from elixir_moe.train.settings import build


@pytest.mark.parametrize("name", ["hardware", "budget_bytes", "accumulation", "spill", "check_spill"])
def test_arguments_of_wrap(name: str) -> None:
    model = nn.Linear(4, 4)
    options: dict[str, Any] = {name: 1}
    with pytest.raises(em.ConfigError, match=rf"em\.wrap: {name} is now "):
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2(), **options)


def test_an_argument_that_never_was() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(em.ConfigError, match=r"em\.wrap has no argument 'plans'"):
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2(), plans=1)


def test_a_plan_that_was_a_text() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(em.ConfigError, match=r"plan='auto': .* em\.Plan\.auto\(step, sample\)"):
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan="auto")  # type: ignore[arg-type]


def test_attributes_of_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    found = em.inspect(model)
    for name in ("plan", "layout", "footprint", "held_bytes", "schedule", "statistics", "prediction"):
        with pytest.raises(AttributeError, match=rf"optimizer\.{name} is now em\.inspect\(model\)\.{name}"):
            getattr(optimizer, name)
        assert hasattr(found, name)
    with pytest.raises(AttributeError, match=r"is now em\.inspect\(model\)\.rows"):
        _ = optimizer.plan_table
    with pytest.raises(AttributeError, match="has no 'plans'"):
        _ = optimizer.plans
    optimizer.close()


def test_methods_of_a_save(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    saving = em.save(tmp_path / "saved", model, optimizer, asynchronous=True)
    with pytest.raises(AttributeError, match=r"saving\.wait is now saving\.result\(\)"):
        saving.wait()
    assert saving.result() == tmp_path / "saved"
    optimizer.close()


@pytest.mark.parametrize("name", ["spill", "check_spill", "budget_gib"])
def test_settings(name: str) -> None:
    with pytest.raises(em.ConfigError, match=rf"plan\.{name} is now plan\."):
        build(TrainConfig, {"plan": {name: 1}, "model": {}, "run": {"out": "x"}})


def test_arguments_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "--model",
                "gpt2-4b",
                "--hardware",
                "a100-40g-sxm-x4",
                "--gpus",
                "4",
                "--batch",
                "1",
                "--seq",
                "8",
                "--budget-gib",
                "24",
            ]
        )
        == 2
    )
    assert "elixir-moe plan --budget-gib is now --budget" in capsys.readouterr().err
