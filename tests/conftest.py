"""Fixtures every test shares: the pools of ranks, started at first use and kept for the whole run."""

import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elixir_moe.kernels import spare_tiles
from elixir_tools.train import waiting
from tests.support.fresh import Fresh
from tests.support.ranks import RankPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore Ctrl-C
spare_tiles()  # for the processes that tests start, too
torch.set_num_threads(1)

FIRST = ("tests/accelerator/test_memory.py", "tests/lanes/test_lanes.py", "tests/parallel/test_megatron.py")
"""A file that compiles half a minute before its first test, which all others of its folder wait for, and the longest
ones."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run of all tests begins with the slowest files, so that it does not end with one of them alone."""
    if [Path(path).name for path in config.args] == ["tests"]:  # files that are named come in that order
        items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish() -> None:
    """Tests collect what they leave, not the half million objects of imports and of the tests themselves."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_wait_is_told() -> Iterator[None]:
    """On a machine with much to do, any command may take two seconds; what tests read of stderr is the same then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "AFTER_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A module that starts a world in this process does not leave it to the next module."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(2).run(fn, ...)``: a pool of that many ranks, made again if a test broke it."""
    pools: dict[int, RankPool] = {}

    def get(world: int) -> RankPool:
        pool = pools.get(world)
        if pool is None or not pool.alive:
            pool = pools[world] = RankPool(world)
        return pool

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    """Runs code where torch is imported and the library is not."""
    found = Fresh()
    yield found
    found.close()
