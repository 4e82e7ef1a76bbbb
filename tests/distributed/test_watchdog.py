"""What ranks that wait tell each other outside their collectives."""

import torch.distributed as dist

from elixir_moe.distributed import watchdog
from elixir_moe.distributed.waits import RankWait, deadlock_of


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
