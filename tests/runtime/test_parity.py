"""Exactness: every layout under every plan against plain torch in one process."""

from collections.abc import Callable
from typing import Any

import pytest

import elixir_moe as em
from elixir_tools.models.config import GPTConfig
from tests.support.cases import with_further
from tests.support.parity import compare, plain, wrapped
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]

CHUNK = 2048
LAYOUTS = {
    1: [(1, 1, 1, 1)],
    2: [(1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 2, 2)],
    4: [(1, 1, 1, 1), (1, 2, 2, 2), (1, 4, 4, 4), (1, 1, 2, 4)],
}
"""By world size: the expert-parallel degree of each layer; the last has a different one in each."""


def config_of(degrees: tuple[int, ...]) -> GPTConfig:
    return GPTConfig(
        vocab_size=32,
        seq_len=8,
        n_layers=4,
        d_model=16,
        n_heads=2,
        mlp_ratio=1,
        experts=(0, 4, 4, 8),
        ep=degrees,
        residual=True,
        aux_coefficient=0.02,
        z_coefficient=0.01,
        tie_embeddings=True,
    )


def plans(least: int, least_offloaded: int, every: int) -> dict[str, em.Plan]:
    """Each preset, and rCaches from the least possible to everything; offloaded, no chunk is used in place."""
    middle = (least_offloaded + every) // 2
    return {
        "ddp": em.Plan.ddp(),
        "zero2": em.Plan.zero2(chunk_numel=CHUNK),
        f"zero3-{least}": em.Plan.zero3(rcache_blocks=least, chunk_numel=CHUNK),
        f"zero3-{least + 1}": em.Plan.zero3(rcache_blocks=least + 1, chunk_numel=CHUNK),
        f"zero3-{middle}": em.Plan.zero3(rcache_blocks=middle, chunk_numel=CHUNK),
        f"offload-{least_offloaded}": em.Plan.offload(rcache_blocks=least_offloaded, chunk_numel=CHUNK),
        f"offload-{middle}-mixed": em.Plan.offload(rcache_blocks=middle, device_chunks=3, chunk_numel=CHUNK),
        "offload-all": em.Plan.offload(rcache_blocks="all", chunk_numel=CHUNK),
        "disk": em.Plan.offload(rcache_blocks=middle, device_chunks=2, disk_chunks=every // 2, chunk_numel=CHUNK),
        "values-on-disk": em.Plan.offload(
            rcache_blocks=middle, device_chunks=1, disk_chunks=every // 2, values_on_disk=True, chunk_numel=CHUNK
        ),
    }


LOOPS: list[tuple[int, float | None]] = [(1, None), (3, 0.5), (1, 0.5), (3, None)]
"""(accumulation, clipping)."""


@pytest.fixture(scope="module")
def oracle() -> dict[tuple[int, float | None], dict[str, Any]]:
    """Plain torch in this process; it has no layout."""
    return {loop: plain(config_of((1, 1, 1, 1)), *loop) for loop in LOOPS}


CASES = [(world, layout) for world, layouts in LAYOUTS.items() for layout in range(len(layouts))]


QUICK = (4, 3, ("disk",))
"""Ranks, the layout with another degree in each layer, and kinds of plans beside the two that hold everything and the
two with the least blocks.
"""


@pytest.mark.parametrize(
    ("world", "layout", "kinds"), with_further([QUICK, *((*case, None) for case in CASES)], [QUICK])
)
def test_every_layout_and_plan(
    world: int, layout: int, kinds: tuple[str, ...] | None, ranks: Ranks, oracle: dict[Any, dict[str, Any]]
) -> None:
    degrees = LAYOUTS[world][layout]
    config = config_of(degrees)

    def check(name: str, plan: em.Plan, loop: tuple[int, float | None]) -> dict[str, Any]:
        found = ranks(world).run(wrapped, config, plan, *loop)
        for rank, result in enumerate(found):
            compare(result, oracle[loop], f"world {world} ep {degrees} {name} {loop} rank {rank}")
            assert result["statistics"]["blocks_replaced"] == 0
            assert result["statistics"]["off_schedule"] == 0
        return found[0]

    zero2 = check("zero2", em.Plan.zero2(chunk_numel=CHUNK), LOOPS[0])
    offload = check("offload-all", em.Plan.offload(rcache_blocks="all", chunk_numel=CHUNK), LOOPS[2])
    least = max(1, zero2["least_blocks"]), offload["least_blocks"]
    cases = plans(*least, offload["chunks"])
    if kinds is not None:
        cases = {name: cases[name] for name in (*kinds, f"zero3-{least[0]}", f"offload-{least[1]}")}
    for kind, (name, plan) in enumerate(cases.items()):
        for loop in LOOPS if world == 1 else [LOOPS[(kind + layout) % 4]]:
            check(name, plan, loop)
