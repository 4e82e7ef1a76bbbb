"""The example that trains a model larger than its memory: what it prints, and that the limit holds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "infinity.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=600)


def mebibytes(printed: str, what: str) -> float:
    found = re.search(rf"{what}: ([\d.]+) MiB", printed)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.parametrize(
    ("limit", "steps"), [(96, 2), pytest.param(192, 6, marks=pytest.mark.slow)], ids=["small", "default"]
)
def test_frozen_weights_of_three_times_the_limit_train_in_the_bytes_of_the_plan(
    limit: int, steps: int, tmp_path: Path
) -> None:
    done = run("--limit", str(limit), "--steps", str(steps), "--on", str(tmp_path))
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == steps and losses[-1] < losses[0] - 1
    assert mebibytes(done.stdout, "limit") == limit
    assert mebibytes(done.stdout, "frozen weights") >= 3 * limit
    peak, planned = (mebibytes(done.stdout, what) for what in ("peak above the bare process", "planned"))
    assert planned < limit
    assert peak <= 1.1 * planned  # the rest: activations, objects of Python, stacks of threads
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_same_model_in_memory_fails_under_the_limit() -> None:
    done = run("--on", "host")
    assert done.returncode != 0 and "step" not in done.stdout
    assert "TierError: host memory: cannot allocate" in done.stderr
