"""The pools of ranks whose device is "threads"."""

from collections.abc import Callable, Iterator

import pytest

from tests.accelerator.build import build, why_not
from tests.accelerator.device import BACKENDS, start
from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def threads() -> Iterator[Callable[[int], RankPool]]:
    """``threads(2).run(fn, ...)``: a pool of that many ranks, made again if a test broke it."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    build()
    pools: dict[int, RankPool] = {}

    def get(world: int) -> RankPool:
        pool = pools.get(world)
        if pool is None or not pool.alive:
            pool = pools[world] = RankPool(world, backend=BACKENDS, prepare=start)
        return pool

    yield get
    for pool in pools.values():
        pool.close()
