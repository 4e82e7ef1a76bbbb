"""``plan="auto"`` on Megatron-core's own models: dense ones are traced and trained exactly."""

from collections.abc import Callable

import pytest

from tests.megatron_cases import Case, plain, wrapped
from tests.parity import compare
from tests.ranks import RankPool

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_is_planned_and_exact(ranks: Ranks, sequence_parallel: bool) -> None:
    """Sequence parallelism gathers into a buffer that outlives the trace; so does what rotary embeddings memoise."""
    case = Case(tp=2, sequence_parallel=sequence_parallel, rope=sequence_parallel)
    (wanted,) = ranks(1).run(plain, case, 1, 0.5)
    for found in ranks(2).run(wrapped, case, "auto", 1, 0.5, wanted["start"]):
        compare(found, wanted, "tp 2")
        assert found["statistics"]["off_schedule"] == 0
