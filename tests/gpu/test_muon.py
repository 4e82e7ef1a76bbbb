"""Muon on the CPU and on a GPU: the steps of `em.Muon` on a plain model on the same device.

Gradients are given, and are the same on all ranks. Tolerances are relative norms of weights. A chunk's matrices lie
where the plan puts them, so a product may run by another kernel than plain torch's: sums in another order. In fp32 they
differ by 1e-6 a step. The iteration in bf16 rounds intermediate elements to 2^-9; a last bit there becomes some percent
of an update, which is 2 % of a weight: 3 * 2e-2 * 3e-2. A matrix that is not orthogonalized misses by 6e-2.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import elixir_moe as em
from tests.optim.test_muon import GIVEN, SHAPES, STEPS, Given, given_optimizers, gradient_of
from tests.support.cases import placed, with_further

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
CASES = [(world, plan, ns_dtype) for world in (1, 2) for plan in GIVEN for ns_dtype in TOLERANCE]
QUICK = [(1, "offload", "bf16"), (2, "zero3", "fp32")]


def optimizers(model: Given, ns_dtype: str) -> tuple[em.Muon, torch.optim.Optimizer]:
    muon, rest = given_optimizers(model)
    muon.param_groups[0]["ns_dtype"] = ns_dtype
    return muon, rest


def plain(ns_dtype: str, device: str) -> list[dict[str, Tensor]]:
    """The weights after each step of a plain model."""
    model = Given(0, 1).to(device)
    both = optimizers(model, ns_dtype)
    found = []
    for step in range(STEPS):
        for name in SHAPES:
            getattr(model, name).grad = gradient_of(name, step).to(device)
        model.shift.grad = torch.ones(4, device=device)
        for optimizer in both:
            optimizer.step()
        found.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
    return found


def trains_as_plain(plan: em.Plan, ns_dtype: str, device: str) -> None:
    """(rank) Takes the same steps under a plan."""
    em.init_mesh(device_type=device)
    model = Given(0, 1)
    both: Any = optimizers(model, ns_dtype)
    if plan.disk_chunks:
        both = both[0]
        model.shift.requires_grad_(False)
    model, optimizer = em.wrap(model, both, plan=placed(plan), device=device)
    for step, wanted in enumerate(plain(ns_dtype, device)):
        model(step).backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
        found = em.full_state_dict(model, all_ranks=True)
        for name in SHAPES:
            gap = (found[name].cpu() - wanted[name]).norm() / wanted[name].norm()
            assert gap <= TOLERANCE[ns_dtype], (step, name, gap)
    optimizer.close()


@pytest.mark.parametrize(("world", "plan", "ns_dtype"), with_further(CASES, QUICK))
def test_every_plan_trains_as_a_plain_model(world: int, plan: str, ns_dtype: str, device: str, run_on: Any) -> None:
    run_on(device, world)(trains_as_plain, GIVEN[plan], ns_dtype, device)
