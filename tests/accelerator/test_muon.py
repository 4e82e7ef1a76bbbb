"""Muon on the accelerator of threads: the weights of one process to the bit, whichever stream is late.

Gradients are given, so that they depend on no kernel and on no order of sums.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import elixir_moe as em
from tests.accelerator.device import NAME
from tests.accelerator.test_training import BF16, FP32, LATE, late_in, seeds
from tests.optim.test_muon import GIVEN, SHAPES, STEPS, Given, given_optimizers, gradient_of
from tests.support.cases import placed, with_further
from tests.support.every import same_tensors


def plain(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The weights behind each step of fp32 masters whose gradients come in `dtype`."""
    model = Given(0, 1)
    both = given_optimizers(model)
    found = []
    for step in range(STEPS):
        for name in SHAPES:
            getattr(model, name).grad = gradient_of(name, step).to(dtype).float()
        model.shift.grad = torch.ones(4)
        for optimizer in both:
            optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def trains(plan: em.Plan, dtype: torch.dtype) -> None:
    """(rank) Takes the same steps under a plan."""
    em.init_mesh(device_type=NAME)
    model = Given(0, 1)
    both: Any = given_optimizers(model)
    if plan.disk_chunks:
        both = em.Muon(both[0].param_groups[0]["params"], lr=0.02, adjust_lr_fn="match_rms_adamw")
        model.shift.requires_grad_(False)
    model, optimizer = em.wrap(model, both, plan=placed(plan), compute_dtype=dtype, device=NAME)
    for step, wanted in enumerate(plain(dtype)):
        model(step).backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
        found = em.full_state_dict(model, all_ranks=True)
        if plan.disk_chunks:
            del found["shift"], wanted["shift"]
        assert same_tensors(found, wanted), step
    optimizer.close()


CASES = [(world, plan, dtype, late) for world in (1, 2) for plan in GIVEN for dtype in (FP32, BF16) for late in LATE]
QUICK = [
    (2, "zero3", BF16, "random"),
    (2, "offload", FP32, "others"),
    (2, "offload", BF16, "compute"),
    (1, "disk", BF16, "random"),
    (2, "all on disk", BF16, "compute"),
    (2, "ddp", FP32, "compute"),
]


@pytest.mark.parametrize(("world", "plan", "dtype", "late"), with_further(CASES, QUICK))
def test_weights_are_those_of_one_process(threads: Any, world: int, plan: str, dtype: torch.dtype, late: str) -> None:
    for seed in seeds(len(CASES)):
        threads(world).run(late_in, late, seed, trains, GIVEN[plan], dtype)
