"""Files that are not what they were, or should be: what others left or wrote into a run directory."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import elixir_moe as em
from elixir_moe.errors import ConfigError
from elixir_moe.state.marked import remove_abandoned
from elixir_tools.report.directory import Claim
from elixir_tools.watch.control import ControlFile
from tests.state.test_checkpoint_files import left_by_the_dead, write_small
from tests.support.checkpoint_cases import assert_same
from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, settings_of

Ranks = Callable[[int], RankPool]
ONE = {"model": {"ep": [1, 1]}}


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 20_000,
        b"lr: 2024-99-99",
        b"lr: !!int abc",
        b"lr: " + b"9" * 5000,
        b"lr: \x00",
        b"\xff",
        b"lr: -1",
        b"lr: .nan",
        b"lr: 1e400",
        b"!!python/object/apply:os.system [x]",
        b"- 1",
        b"&a {lr: *a}",
    ],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_whatever_control_yaml_holds_is_an_error_told_once(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "control.yaml"
    path.write_bytes(content)
    control = ControlFile(path)
    with pytest.raises(ConfigError):
        control.changed()
    assert control.changed() is None


@pytest.mark.fault(33)
def test_a_control_yaml_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (("pipe", "it is a pipe"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=said):
            ControlFile(tmp_path / name).changed()
    assert ControlFile(tmp_path / "loop").changed() is None


@pytest.mark.fault(35)
def test_a_name_that_says_partial_is_refused_and_not_collected_later(tmp_path: Path) -> None:
    for name in ("a.partial", ".a.partial"):
        with pytest.raises(em.CheckpointError, match=f"{name}: "):
            write_small(tmp_path / name, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(2)
def test_a_half_with_a_folder_in_it_is_collected_too(tmp_path: Path) -> None:
    half = left_by_the_dead(tmp_path / "b")
    (half / "folder").mkdir()
    (half / "folder" / "file").touch()
    assert remove_abandoned(tmp_path) == [half] and not half.exists()


@pytest.mark.fault(8, 35)
@pytest.mark.parametrize(("begun", "linked"), [(True, False), (False, False), (False, True)])
def test_what_is_left_of_removed_checkpoints_is_in_nobodys_way(
    begun: bool, linked: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """Somebody has removed the files of a checkpoint one by one, and not all; and has spoilt a line of the metrics.

    Checkpoints may be on another file system.
    """
    config = settings_of(tmp_path / "out", **ONE)
    whole = ranks(1).run(run, settings_of(tmp_path / "whole", **ONE))[0]
    if linked:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "checkpoints").symlink_to(tempfile.mkdtemp(dir="/dev/shm"))
    if begun:
        ranks(1).run(run, config, {3: "SIGTERM"})
    left = tmp_path / "out" / "checkpoints" / "step-00000006"
    left.mkdir(parents=True)
    (left / "rank-00000.safetensors").touch()
    Claim(tmp_path / "out", None).release()
    (tmp_path / "out" / "config.yaml").touch()
    with (tmp_path / "out" / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\x00\xff\n{}\n[1]\n")
    found = ranks(1).run(run, config)[0]
    assert found["ended"] == "" and found["metrics"] == whole["metrics"]
    assert found["apart"] == ["step-00000006"] and found["events"][-2 if begun else -1][0] == "moved apart"
    assert_same(last_state(tmp_path / "out"), last_state(tmp_path / "whole"), "the last step")
    if linked:
        shutil.rmtree((tmp_path / "out" / "checkpoints").resolve())
