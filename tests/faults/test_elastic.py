"""Ranks that die or stand still: the others say so and end, and torchrun starts all again where they were."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elixir_tools import settings
from elixir_tools.train.config import PlanConfig
from elixir_tools.train.launch import _children, program
from elixir_tools.train.memory import smaller
from tests.support.cases import with_further
from tests.support.checkpoint_cases import assert_same
from tests.support.programs import Program
from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, settings_of, written

ROOT = Path(__file__).parents[2]
TEXT = "".join(chr(97 + (i * i) % 23) for i in range(6000))


def write_settings(out: Path, **run_settings: object) -> None:
    (out.parent / "text.txt").write_text(TEXT)
    config = settings_of(out, data={"paths": [str(out.parent / "text.txt")]}, run=dict(run_settings))
    Path(f"{out}.yaml").write_text(settings.to_yaml(config))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


@pytest.mark.slow
@pytest.mark.fault(1, 20, 21)
def test_a_rank_without_memory_and_a_killed_rank_leave_the_run_as_the_unbroken_one(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """Rank 1 has no memory left in the forward of step 5, half of which has run: all redo the step on the same samples
    with a smaller rCache. It is killed in step 6: torchrun starts all again from the checkpoint of step 4.

    Without clipping: another rCache does not change what is summed.
    """
    out = tmp_path / "out"
    write_settings(out, timeout_seconds=12.0)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    program = [str(ROOT / "tests" / "support" / "fault_program.py"), str(out), "1", "5=memory,6=kill"]
    done = subprocess.run(
        [sys.executable, *torchrun, *program, "optimizer.clip_norm=null"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"ElixirError: .* failed on rank 0: .*Another rank has stopped", done.stderr), done.stderr
    found = written(out)
    assert [kind for kind, _ in found["events"]] == ["out of memory", "resumed", "resumed"]
    assert found["events"][0][1].startswith("rank 1 in step 5; it is redone with micro-batches: 1, rCache")
    data = {"paths": [str(tmp_path / "text.txt")]}
    config = settings_of(tmp_path / "whole", data=data, optimizer={"clip_norm": None})
    whole = ranks(2).run(run, config, None, 0, True)[0]
    assert found["metrics"] == whole["metrics"]
    assert_same(last_state(out), last_state(tmp_path / "whole"), "the last step")


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    ("plan", "blocks", "least", "rows", "expected"),
    [
        (PlanConfig(kind="zero2"), 9, 2, 4, [("zero3", 4, 1), ("zero3", 2, 1), ("zero3", 2, 2), ("zero3", 2, 4)]),
        (PlanConfig(kind="offload"), 3, 3, 6, [("offload", None, 2), ("offload", None, 6)]),
        (PlanConfig(kind="ddp"), 9, 1, 3, [("ddp", None, 3)]),
        (PlanConfig(kind="ddp"), 9, 1, 1, []),
    ],
)
def test_the_rcache_shrinks_first_and_then_the_micro_batch(
    plan: PlanConfig, blocks: int, least: int, rows: int, expected: list[tuple[str, int | None, int]]
) -> None:
    """Micro-batches that divide the rows of a rank, each time at least twice as many."""
    found = [(p.kind, p.rcache_blocks, n) for p, n in smaller(plan, blocks, least, rows, 1)]
    assert found == expected


@pytest.mark.slow
@pytest.mark.fault(36)
@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGTERM, 75, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")])
def test_a_signal_to_the_launcher_of_the_short_form_saves_too(
    number: int, code: int, name: str, tmp_path: Path
) -> None:
    """It comes when a step has been told of; there are more steps than any test can wait for."""
    out = tmp_path / "out"
    write_settings(out, steps=10**6)
    command = [sys.executable, "-m", "elixir_moe", "train", "--nproc", "2", "--config", f"{out}.yaml"]
    options = environment(PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, env=options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any("  loss " in line for line in run.stdout), "a line for a step"
        run.send_signal(number)
        _, said = run.communicate(timeout=200)
    status = written(out)["status"]
    assert run.returncode == code, said
    assert f"stopped after step {status['step']} by {name}" in said and status["state"] == "stopped"
    assert f"to resume it:\n  {program()} train --nproc 2 --config {out}.yaml\n" in said
    assert Path(status["checkpoint"]).name == f"step-{status['step']:08d}" and Path(status["checkpoint"]).is_dir()


@pytest.mark.slow
@pytest.mark.fault(4)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_does_not_hold_the_launcher_back_and_is_named(rank: int, tmp_path: Path) -> None:
    """The rank that waits for it in vain kills it: the launcher would, 30 seconds later, and blame it for that."""
    out = tmp_path / "out"
    write_settings(out, steps=10**6, timeout_seconds=5.0)
    command = [sys.executable, "-m", "elixir_moe", "train", "--nproc", "2", "--config", f"{out}.yaml"]
    options = environment(PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, env=options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any("  loss " in line for line in run.stdout), "a line for a step"
        stopped = next(
            process
            for process, _ in _children(run.pid)
            if f"\0RANK={rank}\0" in Path(f"/proc/{process}/environ").read_text()
        )
        os.kill(stopped, signal.SIGSTOP)
        _, said = run.communicate(timeout=200)
    assert run.returncode == 1, said
    assert f"[rank {1 - rank}] rank {rank} (process {stopped}) is stopped by a signal, so it is killed. " in said


EARLY = {
    "a rank that starts": ("RANK", "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"),
    "the launcher that starts": ("", "import elixir_tools.train.directory as d; d.check_directory = end"),
    "a rank that takes the directory": ("RANK", "import elixir_tools.train.directory as d; d.claim_directory = end"),
}
"""Where the signal comes: (what the environment of that process has, what it runs before all else)."""


@pytest.mark.fault(36)
@pytest.mark.parametrize("where", with_further(EARLY, [*EARLY][:1]))
def test_a_signal_before_there_is_anything_to_save_asks_to_be_started_again(where: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_settings(out)
    has, code = EARLY[where]
    end = "def end(*_): os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    condition = "os.environ.get('RANK') == '0'" if has else "'train' in sys.orig_argv and 'RANK' not in os.environ"
    lines = ["import os, signal, sys", end, f"if {condition}:", f"    {code}", ""]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "elixir_moe", "train", "--nproc", "2", "--config", f"{out}.yaml"]
    options = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    done = subprocess.run(command, env=options, capture_output=True, text=True, timeout=200)
    assert done.returncode == 75, done.stderr
    assert "ended by SIGTERM before the first step; the same command starts it again" in done.stderr
    assert "Traceback" not in done.stderr and not list(out.glob("checkpoints/*"))


@pytest.mark.fault(4)
@pytest.mark.parametrize("rank", with_further([1, 0], [1]))
def test_the_others_of_a_rank_that_stands_still_end(rank: int, tmp_path: Path) -> None:
    """In step 2; the other waits for it as long as it was told to, and not for ever: that of rank 0, in which the store
    stands still too, as well.
    """
    out = tmp_path / "out"
    write_settings(out, timeout_seconds=12.0)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    program = (str(ROOT / "tests" / "support" / "fault_program.py"), str(out), str(rank), "2=stop")
    both = [Program(*program, environment=environment(RANK=str(r), **address)) for r in range(2)]
    try:
        code, said = both[1 - rank].wait(300), both[1 - rank].stderr.read()
    finally:
        for process in both:
            process.close()
    assert code == 1 and re.search(rf"ElixirError: .* failed on rank {1 - rank}: .*Timed out waiting 12000ms", said), (
        said
    )
