"""Full weights: on rank 0, or on all ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def weights() -> tuple[list[str], bool]:
    """(rank) The names that one rank gets, and whether all ranks get the weights of the plain model if asked."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model, optimizer = em.wrap(plain, torch.optim.AdamW(plain.parameters()), plan=em.Plan.zero3())
    some, everywhere = em.full_state_dict(model), em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    assert (dist.get_rank() == 0) == bool(some)
    same = everywhere.keys() == expected.keys() and all(torch.equal(everywhere[n], v) for n, v in expected.items())
    return list(some), same


def test_rank_0_has_it_and_all_if_asked(ranks: Ranks) -> None:
    first, second = ranks(2).run(weights)
    names = list(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).state_dict())
    assert first == (names, True)
    assert second == ([], True)
