"""What gradients ask of the rCache, and which reductions the host waits for."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Work
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.reductions import Reductions
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.streams import Streams

CPU = torch.device("cpu")


def reductions_of(blocks: Any, gathers: Any) -> Reductions:
    others, streams = MagicMock(), Streams(CPU)
    return Reductions([], [], gathers, blocks, None, None, streams, Statistics(), Phase(), others, others)


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_get_the_blocks_that_the_plan_has_for_them(apart: bool) -> None:
    """Where ranks await different gradients, only those that were foreseen."""
    blocks: Any = SimpleNamespace(for_gradients=3, foreseen_gradients=2, shared=[None])
    gathers = MagicMock()
    gathers.cache.block_of.return_value = 0
    reductions = reductions_of(blocks, gathers)
    reductions.apart = apart
    assert [reductions._has_block(MagicMock()) for _ in range(4)] == [True, True, not apart, False]
    reductions._leave_block(MagicMock(), Work())
    assert [reductions._has_block(MagicMock()) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_host_waits_for_the_oldest_reductions(most: int) -> None:
    reductions, ended = reductions_of(MagicMock(), MagicMock()), list[int]()
    reductions._in_flight.extend(Work(finish=partial(ended.append, number)) for number in range(3))
    reductions._leave_in_flight(most)
    assert ended == [0, 1, 2][: 3 - most]
    assert len(reductions._in_flight) == most


def test_a_step_that_is_given_up_waits_for_its_reductions() -> None:
    blocks: Any = SimpleNamespace(own={})
    scheduler, ended = Scheduler([], CacheState(0), blocks, None, Streams(CPU), Statistics()), MagicMock()
    scheduler.reductions._in_flight.append(Work(finish=ended))
    scheduler.reset()
    ended.assert_called_once()
