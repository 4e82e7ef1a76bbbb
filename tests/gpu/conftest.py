"""Where the tests of GPUs run: each on the CPU, where it proves its own code, and on a GPU if there is one."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.ranks import RankPool

Run = Callable[..., list[object]]


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def run_on(ranks: Callable[[int], RankPool]) -> Iterator[Callable[[str, int], Run]]:
    """``run_on(device, 2)(fn, ...)``: runs on that many ranks; NCCL needs a GPU for each rank, else gloo serves all."""
    pools: dict[int, RankPool] = {}

    def get(device: str, world: int) -> Run:
        if device == "cpu":
            return ranks(world).run
        pool = pools.get(world)
        if pool is None or not pool.alive:
            backend = "cpu:gloo,cuda:nccl" if world <= torch.cuda.device_count() else "gloo"
            pool = pools[world] = RankPool(world, backend=backend, spawned=True)
        return pool.run

    yield get
    for pool in pools.values():
        pool.close()
