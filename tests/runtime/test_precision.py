"""Mixed precision: a compute dtype beside fp32 masters, dynamic loss scaling, accumulation in fp32.

The oracle is the paper's scheme by hand in one process: a copy of the model in the compute dtype runs forward and
backward, torch's AdamW updates fp32 masters, and the copy is cast from them (Elixir v1, II-B).
"""

import copy
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from tests.support.cases import placed, with_further
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, D = 6, 8, 32
PLANS = {
    "zero2": em.Plan.zero2(),
    "offload": em.Plan.offload(rcache_blocks=4, chunk_numel=1100),
    "ddp": em.Plan.ddp(),
    "disk": em.Plan.offload(rcache_blocks=4, disk_chunks=2, chunk_numel=1100),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [m for _ in range(4) for m in (nn.LayerNorm(D), nn.Linear(D, D), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(D, D))


def make_optimizer(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)


def loss_of(model: nn.Module, step: int, micro: int, dtype: torch.dtype, part: slice) -> Tensor:
    rows = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(100 * step + micro))[part]
    return F.mse_loss(model(rows.to(dtype)).float(), rows.flip(1))


def by_hand(dtype: torch.dtype, accumulation: int, scale: float) -> tuple[list[float], dict[str, Tensor]]:
    master = make_model()
    model = copy.deepcopy(master).to(dtype)
    optimizer = make_optimizer(master.parameters())
    losses = []
    for step in range(STEPS):
        for p in master.parameters():
            p.grad = torch.zeros_like(p)
        for micro in range(accumulation):
            loss = loss_of(model, step, micro, dtype, slice(None))
            model.zero_grad()
            (loss * scale).backward()
            for p, q in zip(master.parameters(), model.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                p.grad += q.grad.float() / scale
            losses.append(loss.item())
        optimizer.step()
        for p, q in zip(master.parameters(), model.parameters(), strict=True):
            q.data.copy_(p.data)
    return losses, master.state_dict()


def wrapped(plan: em.Plan, dtype: torch.dtype, accumulation: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    model, optimizer = em.wrap(
        model,
        make_optimizer(model.parameters()),
        plan=placed(plan),
        compute_dtype=dtype,
    )
    assert {p.dtype for p in model.parameters()} == {dtype}
    part = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = loss_of(model, step, micro, dtype, part)
            optimizer.scale(loss).backward()
            dist.all_reduce(detached := loss.detach())
            losses.append(detached.item() / world)
        optimizer.step()
        optimizer.zero_grad()
    result = {"losses": losses, "state": em.full_state_dict(model, all_ranks=True), "scale": optimizer.loss_scale}
    optimizer.close()
    del model, optimizer
    gc.collect()
    return result


def overflow(plan: em.Plan) -> dict[str, Any]:
    """One step in which only the last rank's gradient overflows, then an ordinary one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    model, optimizer = em.wrap(
        model,
        make_optimizer(model.parameters()),
        plan=placed(plan),
        compute_dtype=torch.float16,
    )
    before = em.full_state_dict(model, all_ranks=True)
    loss = loss_of(model, 0, 0, torch.float16, slice(None)) * (1e6 if rank == world - 1 else 1)
    optimizer.scale(loss).backward()
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    skipped = em.full_state_dict(model, all_ranks=True)
    scale = optimizer.loss_scale.scale
    optimizer.loss_scale.scale = 128.0
    optimizer.scale(loss_of(model, 1, 0, torch.float16, slice(None))).backward()
    optimizer.step()
    after = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return {"norm": norm, "before": before, "skipped": skipped, "after": after, "scale": scale}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


BF16, FP16 = torch.bfloat16, torch.float16
QUICK = [(1, 3, BF16), (2, 1, BF16), (1, 1, FP16), (2, 3, FP16)]


@pytest.mark.parametrize(
    ("world", "accumulation", "dtype"), with_further(itertools.product((1, 2), (1, 3), (BF16, FP16)), QUICK)
)
def test_masters_follow_the_paper(world: int, accumulation: int, dtype: torch.dtype, ranks: Ranks) -> None:
    """One rank: bitwise but for the last bit of a square root. Two ranks: each half of the batch has its own rounding.

    Two ranks: a gradient element of the mean loss, below 0.1, is rounded to 8 (11) bits on each rank, an error of
    2^-9 * 0.1 at most; with eps = 1e-3 beside sqrt(v) the step, of size lr = 1e-2, moves by at most
    lr * 2^-9 * 0.1 / 1e-3 = 2e-3 a step, of either sign: 1e-2 bounds six of them.
    """
    scale = 65536.0 if dtype is torch.float16 else 1.0
    losses, state = by_hand(dtype, accumulation, scale)
    for name, plan in PLANS.items():
        for result in ranks(world).run(wrapped, plan, dtype, accumulation):
            rounding = 1e-6 if world == 1 else 1e-2
            assert result["losses"] == pytest.approx(losses, rel=1e-5 if world == 1 else 1e-2), name
            for key, value in state.items():
                torch.testing.assert_close(result["state"][key], value, rtol=0, atol=rounding)


@pytest.mark.parametrize("world", [1, 2])
def test_overflow_on_one_rank_skips_the_step_on_all(world: int, ranks: Ranks) -> None:
    for name, plan in PLANS.items():
        for result in ranks(world).run(overflow, plan):
            assert not math.isfinite(result["norm"]), name
            assert equal(result["before"], result["skipped"]), name
            assert not equal(result["before"], result["after"]), name
            assert every(value.isfinite().all() for value in result["after"].values())
            assert result["scale"] == 32768.0
