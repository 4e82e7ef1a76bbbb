"""The comparison with Elixir v1: what the data file says, and the rows that the program prints of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper_table_v1 as v1
from benchmarks.paper_table import MACHINE
from elixir_moe.planner.hardware import Hardware
from elixir_tools.models.presets import named_model
from tests.support.every import every

RESULTS = json.loads(v1.RESULTS.read_text())
DOCUMENT = (Path(__file__).parents[2] / "docs" / "paper_figures_more.md").read_text()


def test_the_models_have_the_papers_sizes() -> None:
    for row in RESULTS["table-2"]:
        if row["model"].startswith("pr-moe"):
            continue  # their experts need ranks; test_command counts them
        name, layers = v1.shape(row["model"])
        size = sum(p.numel() for p in set(named_model(name, batch=1, seq=8, layers=layers).model.parameters()))
        wanted = re.search(r"([\d.]+)b$", row["model"])
        assert wanted is not None and size / 1e9 == pytest.approx(float(wanted[1]), rel=0.03)


def test_runs_are_those_whose_batch_the_text_tells() -> None:
    runs = {row["model"]: list(v1.runs(row)) for row in RESULTS["table-2"]}
    assert runs["opt-30b"] == [(1, 16), (2, 16), (4, 16)]
    assert runs["pr-moe-16b"] == [(1, 28), (4, 24)]
    measured = {row["gpus"] for row in RESULTS["table-1"] if row["framework"] == "Elixir"}
    assert measured == {gpus for gpus, _ in runs["gpt-21b"]}, "each measured step has its run"


def run_of(rows: list[dict[str, Any]], model: str, gpus: int) -> dict[str, Any]:
    (row,) = (row for row in rows if (row["model"], row["gpus"]) == (model, gpus))
    return row


@pytest.mark.slow
def test_the_document_has_what_the_program_says(capsys: pytest.CaptureFixture[str]) -> None:
    v1.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    errors = [row["predicted"] / row["measured"] - 1 for row in rows if row["measured"]]
    assert len(errors) == found["compared"] == 3 and max(map(abs, errors)) < 0.09
    assert found["mean_error"] == pytest.approx(sum(map(abs, errors)) / 3)
    assert every(run_of(rows, "gpt-21b", n)["measured"] == tflops for n, tflops in ((1, 102), (2, 121), (4, 113)))
    gpt = [row for row in rows if row["model"] == "gpt-21b"]
    assert [row["deepspeed_measured"] for row in gpt] == [53, 91, 100] and max(map(abs, found["rivals"])) < 0.27
    for off in (errors, found["rivals"]):
        shown = ", ".join(f"{100 * error:+.1f} %" for error in off)
        assert shown in DOCUMENT, shown
    unslowed = ", ".join(f"{row['unslowed']:.0f}" for row in gpt)
    assert unslowed in DOCUMENT, unslowed
    for claim in found["claims"]:
        both = (claim["ours"], claim["unslowed"])
        shown = " | ".join(" to ".join(dict.fromkeys(f"{value:.2f}" for value in ours)) for ours in both)
        assert f"| {shown} |" in DOCUMENT, shown
    for row in found["scaling"]:
        shown = ", ".join(f"{100 * (factor - 1):+.1f} %" for factor in row["ours"])
        assert f"| {row['says']} | {row['paper']} | {shown} |" in DOCUMENT, row
    for row in found["networks"]:
        shown = ", ".join(f"{rate:.1f}" for rate in row["ours"])
        assert f"| {row['says']} | {shown} |" in DOCUMENT, row


@pytest.mark.slow
def test_mixtures_fit_on_one_gpu_in_tiles() -> None:
    """All 22 runs fit; PR-MoE 25B and 29B on one GPU do so in tiles, as `elixir-moe plan` says (tests/tools/fit)."""
    rows = list(v1.compared(Hardware.named(MACHINE)))
    assert len(rows) == 22 and every(row["fits"] for row in rows)
    tiled = {(row["model"], row["gpus"]) for row in rows if row["tiles"] is not None}
    assert tiled == {("pr-moe-25b", 1), *(("pr-moe-29b", gpus) for gpus in (1, 2, 4))}
    for model in ("pr-moe-25b", "pr-moe-29b"):
        row = run_of(rows, model, 1)
        shown = f"| {model} | {row['blocks']} | {row['chunks']:,} | {row['predicted']:.0f} |"
        assert shown in DOCUMENT, shown


def test_deepspeeds_batches_are_those_that_the_text_tells() -> None:
    rows = {row["model"]: row for row in RESULTS["table-2"]}
    told = {name: [v1.batch_of_deepspeed(rows[name], gpus) for gpus in (1, 2, 4)] for name in rows}
    assert told["opt-13b"] == [24, 24, 24] and told["opt-6.7b"] == [32, None, 28]
    assert (
        told["pr-moe-16b"] == [4, 12, 16] and told["pr-moe-25b"] == [None, None, 12] and told["opt-30b"] == [None] * 3
    )
