"""Blocks that somebody still reads: a view keeps its bytes, whoever has taken it and however."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_moe as em
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Records:
    """What views operators have returned under a mode, and the values of each at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[tuple[Tensor, Tensor]] = []

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **(kwargs or {}))
        if "as_strided" in str(function):
            self.views.append((result, result.clone()))
        return result


class Functions(Records, TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(function, args, kwargs)


class Operators(Records, TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(function, args, kwargs)


def recorded(kind: type[Any], *, warm: bool) -> tuple[int, int, int]:
    """(rank) Views that a mode has recorded in a forward, those with other bytes a step later, blocks replaced."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    plan = em.Plan.zero3(rcache_blocks=3, chunk_numel=72)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    x = torch.ones(2, 8)
    if warm:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with kind() as mode:
        loss = model(x).sum()
    loss.backward()
    replaced = em.inspect(model).statistics.blocks_replaced
    optimizer.step()
    model(x).sum().backward()
    stale = sum(not torch.equal(view, then) for view, then in mode.views)
    optimizer.close()
    return len(mode.views), stale, replaced


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", [Functions, Operators])
def test_a_view_that_a_mode_records_keeps_its_bytes(kind: type[Any], warm: bool, ranks: Ranks) -> None:
    for views, stale, replaced in ranks(2).run(recorded, kind, warm=warm):
        assert views >= 12, "those of weights and biases"
        assert stale == 0
        assert replaced > 0
