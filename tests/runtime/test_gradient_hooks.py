"""Hooks on parameters beside several gradients in a step: as in torch, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import elixir_moe as em
from tests.runtime.test_habits import Net, adamw, mean_square, rows_of
from tests.support.parity import assert_alike, trained

PLANS = {"in place": em.Plan.ddp(), "blocks": em.Plan.offload(rcache_blocks=7, chunk_numel=1100)}


def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def use_up(parameter: Tensor) -> None:
    parameter.grad = None


def train(after: bool, hook: Callable[[Tensor], Any], backwards: int, plan: em.Plan | None) -> dict[str, Any]:
    """`hook` comes after the gradients of a backward, or before."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Net()
        for parameter in model.layers[1].parameters():
            (parameter.register_post_accumulate_grad_hook if after else parameter.register_hook)(hook)
        return model, adamw(model)

    def backward(model: torch.nn.Module, step: int) -> None:
        for _ in range(backwards):
            mean_square(model, rows_of(step, plan)).backward()

    return trained(build, backward, plan, 2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("after", "hook", "backwards"), [(True, halve, 1), (True, use_up, 2), (False, lambda gradient: gradient / 2, 2)]
)
def test_hooks_change_gradients_as_in_torch(after: bool, hook: Callable[..., Any], backwards: int, plan: str) -> None:
    found, wanted = (train(after, hook, backwards, p) for p in (PLANS[plan], None))
    assert_alike(found, wanted, plan, 2e-5, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_a_hook_that_would_see_a_sum_is_refused(plan: str) -> None:
    """In torch it is called with the sum of the step's gradients so far, of which a rank has shards alone."""
    with pytest.raises(em.UsageError, match=r"a second gradient of parameter 'layers\.1.*register_hook"):
        train(True, halve, 2, PLANS[plan])
