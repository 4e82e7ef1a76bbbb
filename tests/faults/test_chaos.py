"""SIGKILL at seeded points of step and save: a few of those that `make chaos` sweeps."""

from pathlib import Path

import pytest

from tests.faults.chaos import Sweep
from tests.support.cases import with_further


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("points", with_further([1, 20], [1]))
def test_nothing_committed_is_lost_wherever_a_rank_dies(points: int, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    for number, point in enumerate(sweep.points(points, seed=1)):
        sweep.check(number, point)
