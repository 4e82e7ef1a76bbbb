"""The benchmarks run and write what they say; nothing here looks at a time."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from benchmarks.run import main as measure
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.ranks import prepare_server

DISK = "disk"
HOOKS = "hooks of a unit: zero3, 3 blocks, checkpointed"
BESIDE = "asynchronous save: what it blocks training for"
ROW = {"name", "peer", "workload", "ranks", "limit", "ratio", "spread", "unit", "ours", "theirs", "note"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is no rank, and what the benchmarks set in it is undone."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "build/torch_extensions")


def number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


@pytest.mark.parametrize(
    ("only", "ranks"),
    with_further(
        [("zero2", {2}), (BESIDE, {2}), (HOOKS, {2}), (DISK, {1}), (None, {1, 2})],
        [("zero2", {2}), (HOOKS, {2}), (DISK, {1})],
    ),
)
def test_a_quick_run_measures_every_row(
    only: str | None,
    ranks: set[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks are forked; that which reads from disk is started, as the command does it."""
    if only != DISK:
        prepare_server()
        monkeypatch.setattr(mp, "spawn", partial(mp.start_processes, start_method="forkserver"))
    path = tmp_path / "deeper" / "bench.json"
    as_json = only == "zero2"
    wanted = [*([only] if only == DISK else ["--only", only] if only else []), *["--json"] * as_json]
    assert measure(["--quick", "--rounds", "1", "--out", str(path), *wanted]) == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert set(result) == {"machine", "rounds", "steps", "workloads", "rows"}
    assert {"cpu", "cores", "torch", "threads_per_rank"} <= set(result["machine"])
    assert {row["ranks"] for row in result["rows"]} == ranks
    for row in result["rows"]:
        assert set(row) == ROW
        assert row["limit"] is None or number(row["limit"])
        if row["note"] is not None and row["spread"] is not None:
            assert row["note"].startswith("the limit of ") and row["limit"] is None
        elif row["note"] is not None:
            assert "deepspeed is not installed" in row["note"]
            assert "deepspeed" in f"{row['name']} {row['peer']}".lower()
            assert row["ratio"] is row["spread"] is row["ours"] is row["theirs"] is None
            continue
        assert number(row["ours"]) and row["ours"] > 0
        assert len(row["spread"]) == 2 and every(number(value) for value in row["spread"])
        has_peer = row["peer"] is not None
        assert has_peer == (row["ratio"] is not None) == (row["theirs"] is not None)
    table = path.with_suffix(".md").read_text()
    assert json.loads(printed) == result if as_json else printed == table
    assert every(f"| {row['name']} |" in table for row in result["rows"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--rounds", "0"], "expected at least 1, got 0"),
        (["--steps", "-1"], "expected at least 1, got -1"),
        (["--out", "/proc/none/bench.json"], "--out /proc/none/bench.json: No such file or directory"),
        (["--out", "/"], "--out /: it is a directory"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_measured(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        measure(wrong)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_contenders_that_do_other_work_are_not_compared() -> None:
    from benchmarks.measure import DisagreementError, _compare

    _compare("loss", {"ours": 9.0, "theirs": 9.00001}, 1e-5)
    with pytest.raises(DisagreementError, match="theirs is nan, that of ours 9"):
        _compare("loss", {"ours": 9.0, "theirs": float("nan")}, 1e-5)
