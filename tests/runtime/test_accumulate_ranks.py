"""Micro-batches that pass each layer together on several ranks: the plain loop in one process is the oracle.

fp32: sums over ranks and micro-batches round in another order; `tests.support.parity` derives the tolerance.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import elixir_moe as em
from tests.optim.test_early import begun
from tests.parallel import test_dtensor as dtensor
from tests.support import adapter_cases
from tests.support.cases import placed
from tests.support.every import every, same_tensors
from tests.support.parity import assert_alike, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D, STEPS = 16, 3
CHUNK = 8 * D * D // 2
PLANS = {
    "zero3": em.Plan.zero3(chunk_numel=CHUNK, rcache_blocks=4),
    "offload": em.Plan.offload(chunk_numel=CHUNK, rcache_blocks=4),
    "disk": em.Plan.offload(chunk_numel=CHUNK, rcache_blocks=4, disk_chunks=99, values_on_disk=True),
    "all gathered": em.Plan.offload(chunk_numel=CHUNK, rcache_blocks="all"),
}
TOLERANCE = 3e-5 * STEPS
SLOW = pytest.mark.slow


class Mixture(nn.Module):
    """Tied, frozen and unused weights around a mixture, most of whose experts get no token of a batch of one row."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        mesh = em.init_mesh(device_type="cpu")
        experts = em.expert_mesh(mesh, ep)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(12))
        self.frozen, self.unused = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)
        self.mixture = em.MoE(d_model=D, d_hidden=D // 2, num_experts=8, top_k=1, mesh=experts)
        own = em.Pattern(experts, replicate=("edp",), shard={"ep": 0})
        em.annotate(self, {"mixture.experts.*": own, "*": em.Pattern(mesh, replicate=("dp",))})

    def forward(self, x: Tensor) -> Tensor:
        """(rows, D) -> (rows, D)."""
        x = self.frozen(self.first(x))
        for layer in self.layers:
            x = x + layer(x).tanh()
        result: Tensor = self.last(x + self.mixture(x)[0])
        return result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, weight_decay=0.1)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """The loss of a batch; that of an empty one reads all weights and is zero."""
    output: Tensor = model(rows).float()
    return output.square().mean() if len(rows) else output.sum()


def batches_of(step: int, rank: int, like: Tensor) -> list[Tensor]:
    """The batches of a rank in a step: some have one row, and all ranks but the first have fewer."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(n, like.shape[-1], generator=draw).to(like.dtype) for n in (1, 2, 1 if rank == 0 else 0)]


def backward(model: Any, step: int, world: int, *, early: Any = nullcontext) -> None:
    """One pass of this rank's batches; under plain torch, the batches of all ranks one after the other."""
    like = next(model.parameters())
    if hasattr(model, "_elixir"):
        batches = batches_of(step, dist.get_rank(), like)
        with early():
            em.accumulate(model, loss_of, batches, weights=[len(batch) / 4 for batch in batches])
        return
    for rank in range(world):
        for batch in batches_of(step, rank, like):
            (loss_of(model, batch) * len(batch) / 4 / world).backward()


def mixture(ep: int) -> tuple[nn.Module, Any]:
    model = Mixture(ep)
    return model, adamw(model)


def run(build: Callable[[], Any], world: int, plans: dict[str, em.Plan | None], **options: Any) -> dict[str, Any]:
    """(rank) The weights and norms of some steps under each plan."""
    em.init_mesh(device_type="cpu")
    step = partial(backward, world=world)
    found: dict[str, Any] = {}
    for name, plan in plans.items():
        wrapped: list[Any] = []

        def note(model: Any, wrapped: list[Any] = wrapped) -> nn.Module:
            wrapped.append(getattr(model, "_elixir", None))
            return model  # type: ignore[no-any-return]

        found[name] = trained(build, step, None if plan is None else placed(plan), STEPS, after=note, **options)
        assert plan is None or bool(wrapped[0].passed_together) == (name != "all gathered"), name
    return found


@pytest.mark.parametrize(("world", "ep"), [(2, 2), *(pytest.param(4, ep, marks=SLOW) for ep in (2, 4))])
def test_experts_without_tokens_and_ranks_with_fewer_batches(world: int, ep: int, ranks: Ranks) -> None:
    wanted = ranks(1).run(run, partial(mixture, 1), world, {"": None})[0][""]
    for by_plan in ranks(world).run(run, partial(mixture, ep), world, PLANS):
        for name, found in by_plan.items():
            assert_alike(found, wanted, name, TOLERANCE, rel=1e-5)


def without_clipping(ep: int, plan: em.Plan, *, early: bool) -> dict[str, Tensor]:
    """(rank) The weights after some steps, whose updates begin in backward or in `step`."""
    em.init_mesh(device_type="cpu")
    torch.manual_seed(1)
    model, optimizer = mixture(ep)
    model, optimizer = em.wrap(model, optimizer, plan=placed(plan))
    for step in range(STEPS):
        backward(model, step, 0, early=optimizer.update_in_backward if early else nullcontext)
        assert bool(begun(optimizer)) == (early and (step > 0 or not model._elixir.passed_together))
        optimizer.step()
        optimizer.zero_grad()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.parametrize(("world", "ep"), [(2, 2), pytest.param(4, 2, marks=SLOW)])
@pytest.mark.parametrize("name", ["offload", "disk", "all gathered"])
def test_updates_in_backward_have_the_bits_of_updates_in_step(world: int, ep: int, name: str, ranks: Ranks) -> None:
    late, early = (ranks(world).run(without_clipping, ep, PLANS[name], early=early) for early in (False, True))
    assert every(map(same_tensors, early, late))


def adapters(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model, optimizer = adapter_cases.build()
    return model.to(dtype), optimizer


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=SLOW)])
def test_frozen_chunks_that_the_ranks_of_a_host_share(world: int, ranks: Ranks) -> None:
    build = partial(adapters, torch.float32)
    wanted = ranks(1).run(run, build, world, {"": None})[0][""]
    plans: Any = {
        name: em.Plan.offload(rcache_blocks=5, chunk_numel=adapter_cases.WIDTH * 33, shared_frozen=name == "shared")
        for name in ("shared", "scattered")
    }
    for found in ranks(world).run(run, build, world, plans):
        assert_alike(found["shared"], wanted, "shared", TOLERANCE, rel=1e-5)
        assert same_tensors(found["shared"]["state"], found["scattered"]["state"])


def spread(plan: em.Plan | None, tp: int, dtype: torch.dtype, *, sequence_parallel: bool) -> dict[str, Any]:
    """(rank) The model of `test_dtensor`; plain torch has it whole, and the batches of all data-parallel ranks."""
    mesh = em.init_mesh(tp=tp, device_type="cpu")
    dp = mesh.get_local_rank("dp"), mesh["dp"].size()

    def build() -> tuple[nn.Module, Any]:
        model = dtensor.Model().to(dtype)
        if plan is not None:
            dtensor.parallelize(model, mesh["tp"], sequence_parallel)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def backward(model: nn.Module, step: int) -> None:
        batches = dtensor.batch(step).chunk(2)
        if plan is not None:
            em.accumulate(model, dtensor.loss_of, [batch.chunk(dp[1])[dp[0]] for batch in batches])
        for batch in batches if plan is None else ():
            (dtensor.loss_of(model, batch) / 2).backward()

    return trained(build, backward, plan, STEPS)


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(("world", "tp"), [(2, 2), pytest.param(4, 2, marks=SLOW)])
@pytest.mark.parametrize("name", ["zero3", "offload"])
def test_dtensors(name: str, world: int, tp: int, sequence_parallel: bool, ranks: Ranks) -> None:
    wanted = ranks(1).run(spread, None, 1, torch.float32, sequence_parallel=False)[0]
    for found in ranks(world).run(spread, dtensor.PLANS[name], tp, torch.float32, sequence_parallel=sequence_parallel):
        assert_alike(found, wanted, name, TOLERANCE, rel=1e-5)


def gradients_of(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The gradients that autograd brings while `run` runs, as each parameter's hook sees them, by name."""
    found: dict[str, Tensor] = {}

    def note(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor)
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name] = local.detach().clone()

    handles = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in model.named_parameters()]
    run()
    for handle in handles:
        handle.remove()
    return found


def sums_in_fp32(sequence_parallel: bool) -> None:
    """(rank) Gradients of DTensors in bf16: the sum of eight batches against the sum of what each brings by itself."""
    mesh = em.init_mesh(tp=2, device_type="cpu")
    torch.manual_seed(1)
    model = dtensor.Model()
    dtensor.parallelize(model, mesh["tp"], sequence_parallel)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = em.wrap(model, optimizer, plan=dtensor.PLANS["offload"], compute_dtype=torch.bfloat16)
    batches = [dtensor.batch(step) for step in range(8)]
    each = []
    for batch in batches:
        each.append(gradients_of(model, dtensor.loss_of(model, batch).backward))
        optimizer.zero_grad()
    found = gradients_of(model, lambda: em.accumulate(model, dtensor.loss_of, batches, weights=[1.0] * 8))
    assert every(p.grad_dtype == p.dtype for p in model.parameters())
    assert found.keys() == each[0].keys() == dict(model.named_parameters()).keys()
    for name, total in found.items():
        assert total.dtype is torch.float32
        wanted = torch.stack([one[name].double() for one in each]).sum(0)
        torch.testing.assert_close(total.double(), wanted, rtol=0, atol=3e-6, msg=lambda text, name=name: name + text)
    optimizer.close()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_dtensors_in_bf16_are_summed_in_fp32(sequence_parallel: bool, ranks: Ranks) -> None:
    ranks(2).run(sums_in_fp32, sequence_parallel)
