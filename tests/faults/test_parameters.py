"""Parameters that are not the usual ones: each is trained as plain torch trains it, and given back as it was."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Odd(nn.Module):
    """A part that a step may leave out, and parameters of no dim, of no element, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: Tensor, *, with_other: bool = True) -> Tensor:
        x = self.first(x) * self.scale + self.nothing.sum()
        return (self.other(x) if with_other else x) @ self.turned.t()


class Mixed(nn.Module):
    """Two dtypes in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.wide + self.narrow.float()


def trained(model: nn.Module, uses: list[dict[str, bool]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full weights of ours and of plain torch's after these steps.

    All ranks see the same rows: the mean over two ranks of equal gradients is that gradient, to the bit.
    """
    plain = deepcopy(model)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (model, plain))
    model, ours = em.wrap(model, mine, plan=em.Plan.zero3(rcache_blocks="all"))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for use in uses:
        for module, optimizer in ((model, ours), (plain, theirs)):
            module(x, **use).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = em.full_state_dict(model, all_ranks=True)
    ours.close()
    return found, dict(plain.state_dict())


def train_odd(uses: list[dict[str, bool]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    return trained(Odd(), uses)


def train_mixed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    return trained(Mixed(), [{}])


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """To a few roundings of the dtype: an update may be an ulp off torch's (`test_adam`), and steps add up."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        eps = torch.finfo(value.dtype).eps
        torch.testing.assert_close(found[name], value, rtol=16 * eps, atol=16 * eps, msg=name)


@pytest.mark.fault(22)
def test_what_a_step_does_not_use_is_left_as_it_is(ranks: Ranks) -> None:
    """Weight decay and all: a gradient of zero would have changed it."""
    once, plain = ranks(2).run(train_odd, [{"with_other": False}])[0]
    torch.manual_seed(0)
    fresh = Odd().state_dict()
    for name in ("other.weight", "other.bias"):
        assert torch.equal(once[name], fresh[name]) and not torch.equal(once["first.weight"], fresh["first.weight"])
    assert_close(once, plain)
    for found, wanted in ranks(2).run(train_odd, [{"with_other": False}, {}, {"with_other": False}]):
        assert_close(found, wanted)


@pytest.mark.fault(27)
def test_parameters_of_no_dim_of_no_element_or_not_contiguous(ranks: Ranks) -> None:
    for found, wanted in ranks(2).run(train_odd, [{}, {}]):
        assert found["scale"].shape == () and found["nothing"].shape == (0, 3) and found["turned"].shape == (4, 6)
        assert_close(found, wanted)


@pytest.mark.fault(28)
def test_two_dtypes_in_one_module(ranks: Ranks) -> None:
    for found, wanted in ranks(2).run(train_mixed):
        assert [value.dtype for value in found.values()] == [torch.float32, torch.bfloat16]
        assert_close(found, wanted)
