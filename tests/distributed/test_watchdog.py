"""What ranks that wait tell each other outside their collectives."""

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elixir_moe.distributed import watchdog
from elixir_moe.distributed.collectives import drop_groups, end_gloo, make_groups
from elixir_moe.distributed.waits import RankWait, deadlock_of
from tests.support.ranks import RankPool


def test_a_rank_hears_of_a_deadlock_of_ranks_that_are_in_no_collective_with_it() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1, and that for rank 0."""
    store = dist.HashStore()
    places = [
        RankWait("gather 2", (0, 1), "gather", 2, {"gather": 2, "norm": 0, "exchange": 0}),
        RankWait("norm 1", (0, 1), "norm", 1, {"gather": 1, "norm": 1}),
        RankWait("exchange 1", (0, 2), "exchange", 1, {"exchange": 1}),
    ]
    lines = [watchdog._Line(store, "a name", rank, 3) for rank in range(3)]
    heard = [line.exchange_waits(place) for line, place in zip(lines, places, strict=True)]
    assert deadlock_of(0, heard[0]) == "", "the others had said nothing yet"
    assert "(3 ranks wait for each other)" in deadlock_of(2, heard[2])
    lines[1].end_wait()
    assert deadlock_of(2, lines[2].exchange_waits(places[2])) == ""
    for line in lines:
        line.close()


def wait_until_another_ends_it() -> str:
    """(rank) The error of a wait of at most 60 seconds that the other rank ends."""
    group = make_groups({(0, 1)})[0, 1]
    said = ""
    if dist.get_rank():
        end_gloo(group)
    else:
        work = dist.irecv(torch.empty(1), group=group, group_src=1)
        assert work is not None
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=60))
        said = str(caught.value)
    dist.barrier()
    drop_groups([group])
    return said


def test_a_rank_ends_the_waits_of_all_others_in_a_group(ranks: Callable[[int], RankPool]) -> None:
    said = ranks(2).run(wait_until_another_ends_it)[0]
    assert re.search("Connection (closed|reset) by peer", said), said  # "reset" where bytes were under way
