"""Updates that begin in backward: the bits of updates in `step`, and what may not happen in between."""

import math
import tempfile
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.plan import Tier
from elixir_moe.optim.optimizer import ShardedOptimizer
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
D, STEPS = 16, 4
CHUNK = 2 * D * D + 2 * D
DISK = tempfile.gettempdir()
PLANS = {
    "offload": em.Plan.offload(chunk_numel=CHUNK),
    "half": em.Plan.offload(chunk_numel=CHUNK, device_chunks=2),
    "disk": em.Plan.offload(chunk_numel=CHUNK, disk=DISK, disk_chunks=3, verify=True),
    "values on disk": em.Plan.offload(
        chunk_numel=CHUNK, disk=DISK, disk_chunks=99, values_on_disk=True, verify=True, rcache_blocks=6
    ),
    "zero3": em.Plan.zero3(chunk_numel=CHUNK),
}


class Net(nn.Module):
    """Tied, frozen and unused weights, and a mixture whose experts belong to one rank each."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        own = em.expert_mesh(mesh, dist.get_world_size())
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.frozen, self.unused = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)
        self.mixture = em.MoE(d_model=D, d_hidden=D, num_experts=4, top_k=2, mesh=own)
        em.annotate(
            self, {"mixture.experts.*": em.Pattern(own, replicate=("edp",), shard={"ep": 0})} | {"*": whole(mesh)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x))
        for layer in self.layers:
            x = x + layer(x).tanh()
        out, aux = self.mixture(x)
        return self.last(x + out).float().square().mean() + aux


def whole(mesh: Any) -> em.Pattern:
    return em.Pattern(mesh, replicate=("dp",))


def wrapped(plan: str, *, half: bool = False) -> tuple[Net, ShardedOptimizer]:
    torch.manual_seed(3)
    model = Net(em.init_mesh(device_type="cpu"))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-3},
    ]
    dtype = torch.bfloat16 if half else None
    return em.wrap(model, torch.optim.AdamW(groups, 1e-2), plan=PLANS[plan], compute_dtype=dtype)


def backward(model: Net, seed: int, *, half: bool = False, factor: float = 1.0) -> None:
    inputs = torch.randn(8, D, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    (factor * model(inputs.bfloat16() if half else inputs)).backward()


def begun(optimizer: ShardedOptimizer) -> set[int]:
    """The chunks updated in backward, once all that were given to the thread are."""
    given = {} if optimizer._early is None else optimizer._early._begun
    wait([one.done for one in given.values()])
    return {index for index, one in given.items() if one.prepared.result() is not None}


def train(plan: str, early: bool, half: bool, accumulation: int, ready: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """(rank) Norms, weights and moments; and the chunks updated in backward, of those that may be."""
    model, optimizer = wrapped(plan, half=half)
    seen: dict[str, Tensor] = {}
    counts = []
    for step in range(STEPS):
        for micro in range(accumulation):
            last = early and micro == accumulation - 1
            with optimizer.update_in_backward() if last else nullcontext():
                backward(model, 10 * step + micro, half=half)
        if ready:
            away = [c for c in optimizer._chunks if c.shard.tier is not Tier.DEVICE]
            counts.append((begun(optimizer), {c.spec.index for c in away if "unused.weight" not in c.names}))
        seen[f"norm {step}"] = optimizer.clip_grad_norm_(math.inf)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
    seen |= em.full_state_dict(model, all_ranks=True)
    for parameter in model.parameters():
        if parameter.requires_grad and optimizer.kept.segment_of(parameter) is not None:
            state = optimizer.kept.of(parameter)
            name = optimizer._hooks.name_of(parameter)
            seen |= {f"{name} {kind}": state[kind].read().clone() for kind in ("exp_avg", "exp_avg_sq")}
    optimizer.close()
    return seen, counts


def compare(plan: str, half: bool, accumulation: int) -> list[str]:
    """(rank) Names of what differs between updates in `step`, in backward, and wherever the thread is in time."""
    expected, _ = train(plan, False, half, accumulation, True)
    found, counts = train(plan, True, half, accumulation, True)
    anyhow, _ = train(plan, True, half, accumulation, False)
    assert bool(counts[0][0]) == (accumulation > 1 and plan != "zero3"), "the first backward looks for writes"
    for some, allowed in counts[1:]:
        assert some <= allowed
        assert bool(some) == (plan != "zero3")
        if dist.get_world_size() == 1:
            assert some == allowed, "one rank lands every gradient in backward"
    return [n for n, value in expected.items() for other in (found, anyhow) if not torch.equal(value, other[n])]


QUICK = {("offload", True, 2, 2), ("half", False, 1, 1), ("values on disk", True, 1, 1), ("disk", True, 2, 1)}


@pytest.mark.parametrize(
    ("plan", "half", "accumulation", "world"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in (
            (plan, half, accumulation, world)
            for plan in PLANS
            for half in (False, True)
            for accumulation in (1, 2)
            for world in (1, 2, 4)
        )
    ],
)
def test_the_bits_of_updates_in_step(plan: str, half: bool, accumulation: int, world: int, ranks: Ranks) -> None:
    assert ranks(world).run(compare, plan, half, accumulation) == [[]] * world
