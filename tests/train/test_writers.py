"""The numbers of a run for TensorBoard and others: those of metrics.jsonl, under names."""

import importlib.util
import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from elixir_moe.errors import ConfigError
from elixir_moe.report.records import StepRecord
from elixir_moe.train.report import Console, Report
from elixir_moe.train.writers import TensorBoard, check_tensorboard, values_of


class Noting:
    """A writer as anybody may write one."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, values: Any) -> None:
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


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


def test_a_writer_gets_what_the_file_has(tmp_path: Path) -> None:
    noting, console = Noting(), Console(file=io.StringIO())
    prediction = {"predicted_step_seconds": 0.4, "predicted_host_bytes": 21}
    with Report(console, tmp_path, steps=2, log_every=1, bigram_loss=None, writers=[noting]) as report:
        report.step(record(1, None))
        report.step(record(2, 2.25), prediction)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert noting.written == [(1, values_of(lines[0], None)), (2, values_of(lines[1], prediction))] and noting.closed
    found = noting.written[1][1]
    assert found == {
        "loss/train": 2.5,
        "loss/validation": 2.25,
        "step/learning rate": 1e-3,
        "step/seconds": 0.5,
        "step/seconds, predicted": 0.4,
        "step/tokens a second": 64.0,
        "bytes held/device": 10.0,
        "bytes held/host": 20.0,
        "bytes held/host, predicted": 21.0,
        "bytes of the process/host": 1000.0,
        "bytes moved/fetched from host": 100.0,
        "bytes moved/offloaded to host": 50.0,
        "stalls/gathers on demand": 2.0,
        "stalls/requests off schedule": 1.0,
        "busiest expert/layer": 3 * 3 / 4,
    }
    assert "loss/validation" not in noting.written[0][1], "nothing that is missing or not finite"


def test_without_the_package_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        check_tensorboard()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, (1, 2, 3)), (2, (3,))):
        writer = TensorBoard(tmp_path, done)
        for step in steps:
            writer.write(step, {"loss/train": float(10 * done + step)})
        writer.close()
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("loss/train")
    assert [(event.step, event.value) for event in found] == [(1, 1.0), (2, 2.0), (3, 23.0)]


def test_a_report_is_written_to_no_place_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out" / "status.json.part").symlink_to(tmp_path / "precious")
    console = Console(file=io.StringIO())
    with Report(console, tmp_path / "out", steps=1, log_every=1, bigram_loss=None) as report:
        report.status("running", 0, None)
    assert (tmp_path / "precious").read_text() == "mine"
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "running"


@pytest.mark.fault(7)
def test_a_full_disk_is_said_once_for_each_file_and_the_run_goes_on(tmp_path: Path) -> None:
    said = io.StringIO()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Report(Console(file=said, width=400), tmp_path, steps=9, log_every=9, bigram_loss=None) as report:
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
        assert said.getvalue().count(f"{name} cannot be written, and the run goes on: File too large") == 1
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
