"""What gradients ask of the rCache, and what is left of them when a step is given up."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from elixir_moe.chunks.statistics import Statistics
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.reductions import Reductions
from elixir_moe.runtime.streams import Streams


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_get_the_blocks_that_the_plan_has_for_them(apart: bool) -> None:
    """Where ranks await different gradients, only those that were foreseen."""
    blocks: Any = SimpleNamespace(for_gradients=3, foreseen_gradients=2, shared=[None])
    gathers, others = MagicMock(), MagicMock()
    gathers.cache.block_of.return_value = 0
    reductions = Reductions(
        [], [], gathers, blocks, None, None, Streams(torch.device("cpu")), Statistics(), Phase(), others, others
    )
    reductions.apart = apart
    assert [reductions._has_block(MagicMock()) for _ in range(4)] == [True, True, not apart, False]
