"""The comparison with Elixir v1: what the data file says, and the rows that the program prints of it."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import paper_table_v1 as v1
from elixir_tools.models.presets import named_model
from tests.support.every import every

RESULTS = json.loads(v1.RESULTS.read_text())
DOCUMENT = (Path(__file__).parents[2] / "docs" / "paper_figures.md").read_text()


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


@pytest.mark.slow
def test_the_program_says_its_mean_error(capsys: pytest.CaptureFixture[str]) -> None:
    v1.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in found["rows"] if row["measured"]]
    assert len(errors) == found["compared"] == 4
    assert found["mean_error"] == pytest.approx(sum(errors) / 4) and found["mean_error"] < 0.2
    by_run = {(row["model"], row["gpus"]): row for row in found["rows"]}
    assert every(by_run["gpt-21b", gpus]["measured"] == tflops for gpus, tflops in ((1, 102), (2, 121), (4, 113)))
    assert sum(row["fits"] for row in found["rows"]) >= 19 and not by_run["pr-moe-29b", 1]["fits"]
    gpt = [row for row in found["rows"] if row["model"] == "gpt-21b"]
    assert [row["deepspeed_measured"] for row in gpt] == [53, 91, 100] and max(map(abs, found["rivals"])) < 0.35
    shown = ", ".join(f"{100 * (row['predicted'] / row['measured'] - 1):+.1f} %" for row in gpt)
    assert shown in DOCUMENT, shown
    shown = ", ".join(f"{100 * error:+.1f} %" for error in found["rivals"])
    assert shown in DOCUMENT, shown
    for claim in found["claims"]:
        shown = " to ".join(f"{value:.1f}" for value in dict.fromkeys(claim["ours"]))
        assert f"| {shown}" in DOCUMENT, shown
    small, large = zip(*(row["ours"] for row in found["scaling"]), strict=True)
    assert small == pytest.approx((1.01, 1.0, 1.0, 1.14), abs=0.01)
    assert large == pytest.approx((1.64, 1.51, 1.0, 1.62), abs=0.02)
    for row in found["scaling"]:
        shown = ", ".join(f"{100 * (factor - 1):+.1f} %" for factor in row["ours"])
        assert f"| {row['says']} | {row['paper']} | {shown} |" in DOCUMENT, row


def test_deepspeeds_batches_are_those_that_the_text_tells() -> None:
    rows = {row["model"]: row for row in RESULTS["table-2"]}
    told = {name: [v1.batch_of_deepspeed(rows[name], gpus) for gpus in (1, 2, 4)] for name in rows}
    assert told["opt-13b"] == [24, 24, 24] and told["opt-6.7b"] == [32, None, 28]
    assert (
        told["pr-moe-16b"] == [4, 12, 16] and told["pr-moe-25b"] == [None, None, 12] and told["opt-30b"] == [None] * 3
    )
