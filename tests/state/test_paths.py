"""Paths as users write them, and what em.load says where a save has left something else than a checkpoint."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.planner.hardware import Hardware
from elixir_moe.state.checkpoint.storage import MANIFEST
from elixir_moe.state.marked import partial_of
from tests.support.checkpoint_cases import assert_same, full_disk

OFFLOAD = em.Plan.offload(rcache_blocks=2)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home; the working directory is another one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def wrapped(plan: em.Plan = OFFLOAD, numel: int = 4) -> tuple[nn.Module, ShardedOptimizer]:
    model = nn.Linear(numel, numel)
    return em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)


def test_a_checkpoint_in_the_users_home(home: Path) -> None:
    model, optimizer = wrapped()
    em.save("~/saved", model, optimizer, extra=7)
    assert [path.name for path in home.iterdir()] == ["saved"] and not list(Path.cwd().iterdir())
    assert em.load("~/saved", model, optimizer) == em.load(Path("~/saved"), model, optimizer) == 7
    assert em.latest("~") == home / "saved"
    optimizer.close()


def test_chunks_on_disk_and_a_machines_figures_in_the_users_home(home: Path) -> None:
    plans = [em.Plan.offload(disk="~"), em.Plan.offload(disk=Path("~")), em.Plan.from_json(OFFLOAD.to_json())]
    assert [plan.disk for plan in plans] == [str(home), str(home), None]
    assert em.Plan.auto(lambda model, batch: model(batch), torch.ones(1), disk="~/fast").disk == str(home / "fast")
    figures = Hardware.named(shipped()[0])
    (home / "mine.json").write_text(figures.to_json())
    assert Hardware.named("~/mine.json").peak_tflops == figures.peak_tflops


class Nowhere:
    """A path that says nothing, or something else than a text."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def __fspath__(self) -> str:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer  # type: ignore[return-value]

    def __repr__(self) -> str:
        return "Nowhere()"


@pytest.mark.parametrize("answer", [None, 5, ValueError("not mounted")])
def test_a_path_that_does_not_say_which_is_refused_by_name(answer: object) -> None:
    with pytest.raises(em.ConfigError, match=r"disk=Nowhere\(\): its __fspath__ failed"):
        em.Plan.offload(disk=Nowhere(answer))
    with pytest.raises(em.ConfigError, match=r"hardware=Nowhere\(\): its __fspath__ failed"):
        em.Plan.auto(lambda model, batch: model(batch), torch.ones(1), hardware=Nowhere(answer))


def test_what_a_broken_save_has_left_is_named(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    partial = partial_of(tmp_path / "step-1")
    partial.mkdir()
    (tmp_path / "empty").mkdir()
    said = {
        tmp_path / "step-1": rf"step-1: no such checkpoint: .*{partial}",
        partial: r"\.step-1\.partial ",
        tmp_path / "empty": f"empty/{MANIFEST} does not exist",
        tmp_path / "none": "none: no such checkpoint$",
        tmp_path / "run": rf"run .*em\.latest\('{tmp_path}/run'\)",
        tmp_path / "training": rf"training .*em\.latest\('{tmp_path}/training/checkpoints'\)",
    }
    em.save(tmp_path / "run" / "step-1", model, optimizer)
    em.save(tmp_path / "training" / "checkpoints" / "step-1", model, optimizer)
    for path, text in said.items():
        with pytest.raises(em.CheckpointError, match=text):
            em.load(path, model, optimizer)
    with pytest.raises(em.CheckpointError, match="expected the path of a checkpoint"):
        em.load(5, model, optimizer)  # type: ignore[arg-type]
    optimizer.close()


@pytest.mark.fault(3)
@pytest.mark.parametrize("call", ["load", "save"])
def test_an_earlier_save_that_failed_unasked_is_named_as_such(call: str, tmp_path: Path) -> None:
    """And not as a failure of the call that meets it; called again, it works."""
    model, optimizer = wrapped(numel=64)
    em.save(tmp_path / "good", model, optimizer, extra=7)
    with full_disk(0):
        em.save(tmp_path / "bad", model, optimizer, asynchronous=True).join()
    path = tmp_path / ("good" if call == "load" else "next")
    run = getattr(em, call)
    with pytest.raises(
        em.CheckpointError, match=rf"the earlier save of .*bad has failed: .*em\.{call}\('.*{path.name}"
    ):
        run(path, model, optimizer)
    run(path, model, optimizer)
    optimizer.close()


def test_a_save_that_cannot_begin_its_thread_leaves_nothing_behind(tmp_path: Path) -> None:
    """No update may wait for it."""
    model, optimizer = wrapped(numel=64)
    refused = patch.object(ThreadPoolExecutor, "submit", side_effect=RuntimeError("can't start new thread"))
    with refused, pytest.raises(RuntimeError, match="can't start new thread"):
        em.save(tmp_path / "saved", model, optimizer, asynchronous=True)
    assert list(tmp_path.iterdir()) == [] and not any(c.shard.being_saved for c in optimizer._chunks)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    em.save(tmp_path / "saved", model, optimizer, asynchronous=True).result()
    optimizer.close()


LAST_LINE = """
import resource, sys, torch
import elixir_moe as em
folder, fails = sys.argv[1], sys.argv[2] == "fails"
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
plan = em.Plan.offload() if fails else em.Plan.offload(disk=folder, disk_chunks=1)
model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
if fails:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
em.save(f"{folder}/saved", model, optimizer, asynchronous=True)
"""


@pytest.mark.parametrize("ends", ["well", "fails"])
def test_an_asynchronous_save_in_the_last_line_of_a_program(ends: str, tmp_path: Path) -> None:
    """Python gives executors no more work at its exit, which the save needs."""
    command = [sys.executable, "-c", LAST_LINE, str(tmp_path), ends]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "saved" / MANIFEST).exists() == (ends == "well"), done.stderr
    assert (f"the save of {tmp_path}/saved has failed, and the program ends" in done.stderr) == (ends == "fails")


def test_a_load_helps_after_an_update_that_has_failed(tmp_path: Path) -> None:
    """The update was beside training: its error is raised by whatever needs the shard."""
    model, optimizer = wrapped(numel=64)
    em.save(tmp_path / "saved", model, optimizer)
    wanted = em.full_state_dict(model)
    model(torch.ones(2, 64)).sum().backward()
    with patch.object(optimizer._updates.elementwise, "prepare", lambda *_: Mock(side_effect=MemoryError("once"))):
        optimizer.step()
    with pytest.raises(MemoryError, match="once"):
        model(torch.ones(2, 64))
    em.load(tmp_path / "saved", model, optimizer)
    assert_same(em.full_state_dict(model), wanted, "as saved")
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.close()


def shipped() -> list[str]:
    """Names of machines that ship with the package."""
    folder = Path(em.__file__).parent / "planner" / "machines"
    return sorted(path.stem for path in folder.glob("*.json"))
