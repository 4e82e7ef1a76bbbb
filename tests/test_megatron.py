"""Megatron-core models, wrapped, against the same models in one process under plain torch."""

from collections.abc import Callable

import elixir_moe as em
from tests.megatron_cases import CHUNK, Case, plain, wrapped
from tests.parity import compare
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def test_smoke(ranks: Ranks) -> None:
    for case, world in [(Case(), 1)]:
        oracle = ranks(1).run(plain, case, 1, 0.5)[0]
        found = ranks(world).run(wrapped, case, em.Plan.zero2(chunk_numel=CHUNK), 1, 0.5, oracle["start"])
        for result in found:
            compare(result, oracle, "")
