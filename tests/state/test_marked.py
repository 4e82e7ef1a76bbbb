"""Folders that the library may remove: only its own, and none in which a process works, whenever another one looks."""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.state import marked
from elixir_moe.state.checkpoint import storage
from elixir_moe.state.checkpoint.storage import Draft, latest, read_manifest, remove, verify
from elixir_moe.state.marked import MARK, StagingFolder, partial_of, remove_abandoned
from elixir_tools.cli.main import main
from elixir_tools.report.directory import Claim, is_claimed
from tests.state.test_checkpoint_files import left_by_the_dead, names_in, write_small
from tests.support.every import every


def at_each_line(modules: tuple[Any, ...], act: Callable[[], Any], also: Callable[[], None]) -> Any:
    """Runs `act`, and `also` before each line of these modules that it executes; returns what `act` returns."""
    files, inside = {module.__file__ for module in modules}, False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal inside
        if inside or frame.f_code.co_filename not in files:
            return None
        if event == "line":
            inside = True
            try:
                also()
            finally:
                inside = False
        return trace

    sys.settrace(trace)
    try:
        return act()
    finally:
        sys.settrace(None)


@pytest.mark.fault(2, 35)
def test_neither_readers_nor_a_cleanup_disturb_a_save_at_any_line(tmp_path: Path) -> None:
    write_small(tmp_path / "step-1", 1)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        found = latest(tmp_path)
        assert found in (tmp_path / "step-1", tmp_path / "step-2") and not remove_abandoned(tmp_path)

    at_each_line((storage, marked), lambda: write_small(tmp_path / "step-2", 2, keep=1), look)
    assert looks > 50 and names_in(tmp_path) == ["step-2"]
    verify(tmp_path / "step-2", read_manifest(tmp_path / "step-2"))


@pytest.mark.parametrize("fall_back", [False, True])
def test_a_reader_finds_a_checkpoint_although_saves_remove_those_that_it_has_listed(
    fall_back: bool, tmp_path: Path
) -> None:
    write_small(tmp_path / "step-1", 1)
    number = 1

    def save() -> None:
        nonlocal number
        if number < 40:
            number += 1
            write_small(tmp_path / f"step-{number}", number, keep=1)

    found = at_each_line((storage,), lambda: latest(tmp_path, fall_back=fall_back), save)
    assert found is not None and number == 40


def foreign(folder: Path) -> Path:
    """A folder of somebody else with what a checkpoint has."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "my app"}')
    (folder / "app.js").write_text("mine")
    return folder


def untouched(folder: Path) -> bool:
    return names_in(folder) == ["app.js", "manifest.json"] and (folder / "app.js").read_text() == "mine"


def test_a_foreign_folder_in_the_way_is_named_and_stays(tmp_path: Path) -> None:
    half = foreign(partial_of(tmp_path / "a"))
    (tmp_path / "link").symlink_to(half)
    (tmp_path / "link").rename(partial_of(tmp_path / "b"))
    (tmp_path / ".c.partial").write_text("mine")
    for name in "abc":
        with pytest.raises(em.CheckpointError, match=rf"\.{name}\.partial exists and was not made by elixir_moe"):
            Draft(tmp_path / name)
    assert latest(tmp_path) is None and not remove_abandoned(tmp_path) and untouched(half)
    with pytest.raises(em.CheckpointError, match=r"\.a\.partial is not removed: its manifest.json"):
        remove(half)
    assert untouched(half) and names_in(tmp_path) == [".a.partial", ".b.partial", ".c.partial"]


def test_an_empty_folder_and_what_the_dead_left_are_used(tmp_path: Path) -> None:
    partial_of(tmp_path / "a").mkdir()
    partial_of(tmp_path / "b").mkdir()
    (partial_of(tmp_path / "b") / MARK).touch()  # died before it wrote the mark
    left_by_the_dead(tmp_path / "c")
    for name in "abc":
        write_small(tmp_path / name, 1)
        assert names_in(tmp_path / name) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert names_in(tmp_path) == ["a", "b", "c"]


def test_a_checkpoint_that_cannot_be_rotated_away_stays_and_the_save_stands(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        write_small(tmp_path / name, int(name[-1]))
    foreign(partial_of(tmp_path / "step-1"))
    with pytest.warns(
        UserWarning, match=r"step-1 stays, although keep=1: .*\.step-1\.partial is in the way, move that"
    ):
        write_small(tmp_path / "step-3", 3, keep=1)
    assert names_in(tmp_path) == [".step-1.partial", "step-1", "step-3"]
    assert untouched(partial_of(tmp_path / "step-1")) and MARK not in names_in(tmp_path / "step-1")


def test_exports_and_save_pretrained_leave_foreign_folders_and_what_links_lead_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_small(tmp_path / "run" / "step-1", 1)
    model = torch.nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.ddp())
    (tmp_path / "hf").mkdir()
    halves = [foreign(tmp_path / name) for name in (".out.partial", "hf/.partial")]
    (tmp_path / "precious").write_text("mine")
    partial_of(tmp_path / "out.pt").symlink_to(tmp_path / "precious")
    with pytest.raises(em.CheckpointError, match=r"hf/\.partial exists and was not made by elixir_moe"):
        em.save_pretrained(model, tmp_path / "hf")
    for out, form in (("out", "hf"), ("out.pt", "torch")):
        assert main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / out), "--format", form]) == 1
        assert f".{out}.partial exists and was not made by elixir_moe" in capsys.readouterr().err
    assert every(map(untouched, halves)) and (tmp_path / "precious").read_text() == "mine"
    for half in halves:
        (half / "app.js").unlink(), (half / "manifest.json").unlink(), half.rmdir()
    left_by_the_dead(tmp_path / "out")
    assert main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    em.save_pretrained(model, tmp_path / "hf")
    assert names_in(tmp_path / "out") == names_in(tmp_path / "hf") == ["model.safetensors"]
    optimizer.close()


def test_the_contents_of_a_folder_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StagingFolder(tmp_path / ".a.partial") as folder:
        (folder.path / "half").touch()
        raise ZeroDivisionError
    with StagingFolder(tmp_path / ".a.partial") as folder:
        (folder.path / "whole").touch()
        folder.move_to(tmp_path / "a")
        with StagingFolder(tmp_path / ".a.partial"):  # another process begins the next one
            folder.remove()
            assert names_in(tmp_path) == [".a.partial", "a"]
    assert names_in(tmp_path) == ["a"] and names_in(tmp_path / "a") == ["whole"]


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system such as Lustre's without ``-o flock``."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    yield


@pytest.mark.fault(34)
def test_a_file_system_without_locks_is_named(
    without_locks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = r"cannot be locked \(flock: Function not implemented\), .* mount its file system with locks"
    model = torch.nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.ddp())
    with pytest.raises(em.CheckpointError, match=said):
        em.save(tmp_path / "a", model, optimizer)
    assert not names_in(tmp_path)
    em.save_pretrained(model, tmp_path / "hf")  # which needs no lock
    assert names_in(tmp_path / "hf") == ["model.safetensors"]
    optimizer.close()
    with pytest.raises(em.ConfigError, match=said):
        Claim(tmp_path, None)
    with pytest.raises(em.ConfigError, match=said):
        is_claimed(tmp_path)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": 2}))
    assert main(["report", "--json", str(tmp_path)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["state"].endswith("its file system has no locks, which would tell")


def test_a_lock_ends_with_its_process_though_forked_workers_live(tmp_path: Path) -> None:
    """A worker of a data loader outlives a killed rank for some seconds."""
    half = partial_of(tmp_path / "step-1")
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    if (maker := os.fork()) == 0:
        try:
            folder = StagingFolder(half)
            if os.fork() == 0:
                os.close(end)
                os.write(tell, b"x")
                os.read(wait, 1)
        finally:
            os._exit(0 if folder else 1)
    os.waitpid(maker, 0)
    os.read(ready, 1)
    try:
        assert remove_abandoned(tmp_path) == [half]
    finally:
        for descriptor in (ready, tell, wait, end):
            os.close(descriptor)
