"""The measured steps of Elixir v2 and their predictions: how large the errors are, of rows held out too."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks import paper_table
from benchmarks.paper_table import HELD_OUT, MACHINE, Priced, Row, held_out, planned_rows, predicted, task_of
from elixir_moe.chunks.plan import Plan
from elixir_moe.planner.hardware import Fitted, Hardware
from elixir_moe.planner.solve import price
from tests.support.every import every

DOCUMENT = (Path(__file__).parents[2] / "docs" / "paper_figures.md").read_text()
OTHERS = Fitted(
    device_efficiency=0.7, exposed_collectives=0.4, host_update_slowdown=2.0, overhead_ns_per_parameter=0.01
)


@pytest.mark.parametrize("plan", [Plan.zero2(), Plan.offload(rcache_blocks=8)], ids=["device", "host"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_a_priced_step_is_that_of_the_cost_model(plan: Plan, gpus: int) -> None:
    hardware = Hardware.named(MACHINE)
    task = task_of("gpt2-4b", gpus, 1, hardware, 2)
    choice = price(task, plan)
    for fitted in (hardware.fitted, OTHERS):
        row = Row(
            model="gpt2-4b", gpus=gpus, batch=1, measured=100.0, task=task, choice=choice, priced=Priced(task, choice)
        )
        assert row.error(fitted) == pytest.approx(predicted(task, choice, fitted) / 100 - 1)


@cache
def table() -> list[Row]:
    return planned_rows()


@pytest.mark.slow
def test_rows_are_predicted_within_a_sixth() -> None:
    off = [abs(row.error(Hardware.named(MACHINE).fitted)) for row in table()]
    assert len(off) == 47 and sum(off) / len(off) < 0.035 and max(off) < 0.12


@pytest.mark.slow
@pytest.mark.parametrize(("name", "largest"), [("model", 0.15), ("number of GPUs", 0.19), ("batch", 0.15)])
def test_rows_held_out_are_predicted(name: str, largest: float) -> None:
    found = held_out(table(), HELD_OUT[name])
    off = [abs(error) for _, error in found]
    assert len(off) == 47 and sum(off) / len(off) < 0.05 and max(off) < largest
    assert f"| {name} | {sum(off) / len(off):.1%} | {max(off):.1%} |" in DOCUMENT


def test_the_constants_of_held_out_rows_come_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = Hardware.named(MACHINE)
    task = task_of("gpt2-4b", 1, 1, hardware, 2)
    choice = price(task, Plan.ddp())
    measured = predicted(task, choice, hardware.fitted)
    alike = [
        Row(model="m", gpus=gpus, batch=1, measured=factor * measured, task=task, choice=choice,
            priced=Priced(task, choice))
        for gpus, factor in ((1, 1.0), (2, 2.0))
    ]  # fmt: skip
    errors = [error for _, error in held_out(alike, lambda row: row.gpus)]
    assert errors == pytest.approx([1.0, -0.5], abs=0.02), "each by what the other says"
    assert every(name in HELD_OUT for name in ("model", "batch")) and paper_table.UNFITTED
