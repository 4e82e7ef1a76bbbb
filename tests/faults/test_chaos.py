"""SIGKILL at seeded points of step and save: a few of those that `make chaos` sweeps."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.chaos import KINDS, Sweep
from tests.support.cases import with_further
from tests.support.shared_memory import abandoned, sessions_of


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("points", with_further([1, 20], [1]))
def test_nothing_committed_is_lost_wherever_a_rank_dies(points: int, kind: str, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, kind)
    for number, point in enumerate(sweep.points(points, seed=1)):
        sweep.check(number, point)


def test_what_a_run_leaves_behind_is_seen() -> None:
    """A file in /dev/shm that nobody has open, and a process in the session of one that has ended."""
    before = os.listdir("/dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        name = Path(file.name).name
        assert name not in abandoned(before), "it is open"
        file.file.close()
        assert name in abandoned(before)
    starts = "import subprocess; print(subprocess.Popen(['cat']).pid)"
    pipe = subprocess.PIPE
    leader = subprocess.Popen([sys.executable, "-c", starts], start_new_session=True, stdin=pipe, stdout=pipe)
    assert leader.stdin is not None and leader.stdout is not None
    child = int(leader.stdout.readline())
    leader.wait()
    assert sessions_of([leader.pid]) == [child]
    os.kill(child, signal.SIGKILL)
    leader.stdin.close()
    assert leader.stdout.read() == b"", "until it is closed by the child's end"
    leader.stdout.close()
