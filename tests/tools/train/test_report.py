"""The files of a run, written where a link or a full disk is in the way."""

import io
import json
import resource
from pathlib import Path

import pytest

from elixir_tools.report.records import StepRecord
from elixir_tools.train.config import RunConfig
from elixir_tools.train.report import Console, Report


def record(step: int, val_loss: float | None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5,
        grad_norm=float("nan"),
        lr=1e-3,
        step_seconds=0.5,
        tokens_per_second=64.0,
        statistics={
            "misses": 7,
            "prefetched": 5,
            "off_schedule": 1,
            "bytes_fetched": {"host": 100},
            "bytes_offloaded": {"host": 50},
        },
        held_bytes={"device": 10, "host": 20},
        process_bytes={"host": 1000},
        tokens_per_expert={"layer": [3, 0, 1]},
        val_loss=val_loss,
    )


def test_a_report_is_written_to_no_place_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out" / "status.json.part").symlink_to(tmp_path / "precious")
    console = Console(file=io.StringIO())
    with Report(console, tmp_path / "out", RunConfig(out="out", steps=1), None) as report:
        report.status("running", 0, None)
    assert (tmp_path / "precious").read_text() == "mine"
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "running"


@pytest.mark.fault(7)
def test_a_full_disk_is_said_once_for_each_file_and_the_run_goes_on(tmp_path: Path) -> None:
    said = io.StringIO()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Report(Console(file=said, width=400), tmp_path, RunConfig(out="out", steps=9, log_every=9), None) as report:
        report.status("running", 0, None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            for step in (1, 2):
                report.step(record(step, None))
                report.event(step, "save failed", "the disk is full")
                report.status("running", step, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        report.status("done", 2, None)
    for name in ("metrics.jsonl", "events.jsonl", "status.json"):
        assert said.getvalue().count(f"{name} cannot be written, and the run continues: File too large") == 1
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
