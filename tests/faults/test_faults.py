"""The table of faults: each row has a test that bears its number. And the small ones that have no file of their own."""

import ast
import os
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elixir_moe import accelerator
from elixir_moe.memory import slabs as tiers
from elixir_tools.cli.main import main
from elixir_tools.report.directory import Claim
from elixir_tools.train.directory import claim_directory
from elixir_tools.watch.control import Signals
from tests.state.test_checkpoint_files import left_by_the_dead
from tests.support.every import every
from tests.support.ranks import RankPool
from tests.support.train_cases import run, settings_of, text_of
from tests.tools.train.test_train import config_of

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)


def marks() -> Iterator[tuple[int, str]]:
    """(row, test) of every mark in the tests."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    yield from ((ast.literal_eval(row), f"{path.name}::{node.name}") for row in mark.args)  # type: ignore[attr-defined]


def test_every_row_of_the_table_has_a_test_and_every_test_a_row() -> None:
    table = (ROOT / "docs" / "faults.md").read_text().partition("| # | fault |")[2]
    rows = {int(number) for number, *_ in ROW.findall(table)}
    assert rows == set(range(1, 42))
    marked = {row for row, _ in marks()}
    assert rows == marked


@pytest.mark.fault(19)
def test_memory_that_cannot_be_page_locked_is_used_as_it_is_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    def pending(*_: object, **__: object) -> None:
        raise RuntimeError("the error of the registration")

    memory = torch.ones(64)
    monkeypatch.setattr(accelerator, "found", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr(torch, "zeros", pending)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tiers.page_lock(memory)
    assert [str(warning.message) for warning in said] == [
        "host memory of 256 bytes could not be page-locked; transfers will be slower"
    ]
    assert memory.sum() == 64


@pytest.mark.fault(36, 37)
def test_a_second_signal_while_the_first_is_answered_changes_nothing(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    config = settings_of(tmp_path / "out")
    stopped = ranks(2).run(run, config, {3: "SIGTERM twice"}, 1)
    for found in stopped:
        assert found["ended"].startswith("75 stopped after step 4") and found["checkpoints"][-1] == "step-00000004"
    assert ranks(2).run(run, config)[0]["ended"] == ""


@pytest.mark.fault(37)
def test_a_second_ctrl_c_ends_a_run_whose_main_thread_is_blocked(capfd: pytest.CaptureFixture[str]) -> None:
    """The main thread waits here until the second Ctrl-C has been answered on another thread."""
    ended = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told pytest to ignore it
    try:
        with Signals(ended.set, tells=True) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert not ended.is_set() and signals.received == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
            assert ended.wait(60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err.count("a second Ctrl-C ends it at once") == 1


def test_a_signal_that_this_process_ignores_stays_ignored() -> None:
    """As a shell's background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals(pytest.fail, tells=True) as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signals.received == 0
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.fault(7)
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_save_that_fails_is_an_event_or_the_end(
    policy: str, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """The directory of checkpoints is a file, for a while."""
    config = settings_of(tmp_path / "out", save={"every": 2, "on_failure": policy})
    found = ranks(2).run(run, config, {1: "room taken", 3: "room free"})[0]
    kinds = [kind for kind, _ in found["events"]]
    assert kinds == ["save failed"]
    if policy == "stop":
        assert found["ended"].startswith("CheckpointError")
    else:
        assert found["ended"] == "" and found["checkpoints"] == ["step-00000004", "step-00000006"]


@pytest.mark.fault(35)
def test_clean_takes_what_the_dead_have_left_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alive, dead = (tmp_path / name for name in ("alive", "dead"))
    config = config_of(alive)
    claim = claim_directory(config, text_of(config))
    for directory in (alive, dead):
        directory.mkdir(exist_ok=True)
        for name in ("config.yaml", "summary.json.part", "notes.part", "metrics.jsonl"):
            (directory / name).touch()
    Claim(dead, None).release()
    half = left_by_the_dead(dead / "checkpoints" / "step-7")
    foreign = [tmp_path / "site" / ".app.partial" / name for name in ("manifest.json", "src/app.js")]
    foreign += [tmp_path / "site" / ".empty.partial", tmp_path / "site" / "weights.safetensors.part"]
    foreign += [tmp_path / "site" / name for name in ("config.yaml", ".lock", "linked/.model.partial")]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"name": "app"}') if path.suffix != ".partial" else path.mkdir()
    (half / "away").symlink_to(tmp_path / "site")
    foreign += [tmp_path / "other" / ".lock", tmp_path / "other" / ".site.partial" / ".elixir_moe"]
    for path in foreign[-2:]:
        path.mkdir(parents=True)
    assert main(["clean", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert str(half) in said and "dead/summary.json.part" in said and "alive" not in said
    names: Callable[[Path], list[str]] = lambda path: sorted(entry.name for entry in path.iterdir())  # noqa: E731
    assert names(alive) == [".lock", "config.yaml", "metrics.jsonl", "notes.part", "summary.json.part"]
    assert names(dead) == [".lock", "checkpoints", "config.yaml", "metrics.jsonl", "notes.part"]
    assert not names(half.parent) and every(path.exists() for path in foreign)
    claim.release()
    assert main(["clean", str(tmp_path / "nowhere")]) == 2
