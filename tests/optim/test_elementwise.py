"""Optimizers that run as they are on the pieces of shards: every elementwise one of torch, on parameters of odd shapes.

All ranks have the same rows, so that the mean of their gradients is the gradient of one process. Tolerance: AdamW and
Adam run in the library's kernel, which may differ from torch's by 2.5 EPS of an update and EPS of a weight at each step
(`test_adam`); all others are torch's own code on the same numbers, and sums over parameters may add in another order.
"""

import inspect
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.optim.accepted import _WHOLE_TENSOR
from tests.parallel.test_composed_misuse import Sums
from tests.support.cases import with_further
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero3": em.Plan.zero3(),
    "offload": em.Plan.offload(),
}
STEPS = 4


class Shapes(nn.Module):
    """Parameters without dims, without elements, with one element, and with many."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(7, 5)
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.one_of_two_dims = nn.Parameter(torch.tensor([[-0.5]]))
        self.empty = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 3))
        self.shift = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        odd = self.shift + self.one + self.one_of_two_dims + self.empty.sum() + self.no_rows.sum()
        return self.linear(x) * self.scale + odd


def elementwise() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Every elementwise optimizer of this torch, and those with options that add to their state."""
    found: dict[str, Any] = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kinds = {name: kind for name, kind in found.items() if name not in _WHOLE_TENSOR}
    return {
        **kinds,
        "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
        "SGD, momentum": lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1),
        "RMSprop, centered": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        "Adagrad, foreach": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1, foreach=True),
        "Sums, not of torch": Sums,
        "Adagrad, from zero": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.0, lr_decay=0.1),
    }


def test_the_sweep_knows_every_optimizer_of_torch() -> None:
    """An optimizer that torch adds is swept, unless it is one that `wrap` refuses."""
    expected = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
    assert expected <= elementwise().keys()


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number))
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(name: str) -> list[dict[str, Tensor]]:
    """The weights behind each step of torch's own optimizer."""
    torch.manual_seed(0)
    model = Shapes()
    optimizer = elementwise()[name](model.parameters())
    found = []
    for number in range(STEPS):
        step(model, optimizer, number)
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    return found


def wrapped(name: str, plan: str, folder: Path) -> list[dict[str, Tensor]]:
    """(rank) The same under a plan; the second half by another model that has loaded the first half's checkpoint."""
    mesh_of_world()
    found: list[dict[str, Tensor]] = []
    for half in range(2):
        torch.manual_seed(half)
        model = Shapes()
        model, optimizer = em.wrap(model, elementwise()[name](model.parameters()), plan=PLANS[plan])
        if half:
            em.load(folder / plan, model, optimizer)
        for number in range(half * STEPS // 2, (half + 1) * STEPS // 2):
            step(model, optimizer, number)
            found.append(em.full_state_dict(model, all_ranks=True))
        if not half:
            em.save(folder / plan, model, optimizer)
        optimizer.close()
    return found


CASES = list(product(elementwise(), PLANS, (1, 2)))
EACH_ONCE = [(name, [*PLANS][i % 3], 1 + i % 2) for i, name in enumerate(elementwise())]
"""Each optimizer, under the plans and on the ranks in turn."""


@pytest.mark.parametrize(("name", "plan", "world"), with_further(CASES, EACH_ONCE))
def test_a_parameter_of_any_shape_is_updated_as_by_torch(
    name: str, plan: str, world: int, ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks(world).run(wrapped, name, plan, tmp_path):
        torch.testing.assert_close(found, plain(name), rtol=1e-6, atol=1e-7)
