"""Experts in a list, of which each rank and each step runs others: requests follow from the model alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from tests.support.cases import least_said
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D, STEPS = 16, 4


class Choice(nn.Module):
    """Four experts; which of them run is drawn from the step and the half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, draw: torch.Generator) -> Tensor:
        weights = self.router(x).softmax(dim=-1)
        for index, expert in enumerate(self.experts):
            if torch.rand((), generator=draw) < 0.5:
                x = x + weights[:, index, None] * torch.tanh(expert(x))
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(nn.ModuleList([Choice(), nn.Linear(D, D)]) for _ in range(4))

    def forward(self, x: Tensor, draw: torch.Generator) -> Tensor:
        x = self.first(x)
        for choice, linear in self.layers:
            x = x + linear(choice(x, draw))
        return x


def loss(model: nn.Module, batch: tuple[int, int]) -> Tensor:
    """Of (step, half)."""
    step, half = batch
    draw = torch.Generator().manual_seed(10 * step + half)
    x = torch.randn(8, D, generator=draw)
    return model(x, draw).square().mean()


def trained(offload: bool) -> dict[str, Any]:
    """(rank) Weights, requests and counts under the fewest blocks."""
    model: Any = Net()
    chunk = 420  # an expert and a half: a choice is in three chunks
    plan = (
        em.Plan.offload(rcache_blocks=1, chunk_numel=chunk)
        if offload
        else em.Plan.zero3(rcache_blocks=1, chunk_numel=chunk)
    )
    options: dict[str, Any] = {"step": loss, "sample": (0, dist.get_rank())}

    def adamw() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    with pytest.raises(em.PlanError) as error:
        em.wrap(model, adamw(), plan=plan, **options)
    plan = replace(plan, rcache_blocks=least_said(error.value))
    model, optimizer = em.wrap(model, adamw(), plan=plan, **options)
    for step in range(STEPS):
        loss(model, (step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "state": em.full_state_dict(model, all_ranks=True),
        "requests": em.inspect(model).schedule.entries,
        "statistics": em.inspect(model).statistics.as_dict(),
    }
    optimizer.close()
    return found


@pytest.mark.parametrize("offload", [False, True], ids=["zero3", "offload"])
def test_requests_follow_from_the_model_and_never_from_routing(offload: bool, ranks: Ranks) -> None:
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(STEPS):
        for half in range(2):
            (loss(plain, (step, half)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    one, other = ranks(2).run(trained, offload)
    assert one["requests"] == other["requests"]
    for found in (one, other):
        assert (found["statistics"]["off_schedule"], found["statistics"]["blocks_replaced"]) == (0, 0)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-4, atol=1e-5)
