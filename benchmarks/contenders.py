"""The contenders: the same training step, held together in different ways.

Owns how ours and torch's are built from one seed and how they take a step. Measures nothing (`measure`), compares
nothing (`run`); those of other libraries have files of their own.

Peers get their best settings: torch's fused AdamW, gradients that are views of DDP's buckets in a static graph, buckets
short enough to overlap, and for FSDP2 a unit for each block and the root. All see the same batches and start from the
same weights.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import elixir_moe as em
from benchmarks.workload import Workload, fresh_model
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_tools.models.gpt import gpt_patterns, lm_loss

LEARNING_RATE = 3e-4


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model and its optimizer, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shares_gradients: bool = True
    """Whether the ranks train one model; else each trains its own."""
    same_work: bool = True
    """Whether it trains the very model of the workload, so that its losses must be those of the others."""
    loss: Callable[[nn.Module, Tensor], Tensor] = lm_loss

    def step(self, batch: Tensor) -> Tensor:
        """One forward, backward and update on this rank's batch; returns the loss, ()."""
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """Releases the process groups that building it has made. Collective."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.close()


MICRO_BATCHES = 8
"""Micro-batches of a step of those that accumulate."""


@dataclass(frozen=True, kw_only=True)
class Accumulating(Contender):
    """A contender whose step has several micro-batches."""

    accumulate: Callable[[nn.Module, Sequence[Tensor]], list[Tensor]]
    """Forward and backward of micro-batches; returns their losses."""

    def step(self, batch: Tensor) -> Tensor:
        """Cuts the rows of the batch into micro-batches; else like `Contender.step`."""
        losses = self.accumulate(self.model, batch.chunk(MICRO_BATCHES))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()


Build = Callable[[Workload], Contender]


def plain(workload: Workload) -> Contender:
    """Plain torch: each rank for itself, with all experts, no communication."""
    model = fresh_model(workload.model).to(torch.bfloat16 if workload.bf16 else torch.float32)
    return Contender(model=model, optimizer=fused_adamw(model.parameters()), shares_gradients=False)


def ddp(workload: Workload) -> Contender:
    """torch's DistributedDataParallel."""
    model = DistributedDataParallel(fresh_model(workload.model), gradient_as_bucket_view=True, static_graph=True)
    return Contender(model=model, optimizer=fused_adamw(model.parameters()))


def fsdp(workload: Workload) -> Contender:
    """torch's `fully_shard`, the second FSDP: blocks are resharded after forward, the root is not (its default)."""
    return _fsdp(workload, reshard_after_forward=True)


def fsdp_zero2(workload: Workload) -> Contender:
    """`fully_shard` that keeps every block gathered from forward to backward."""
    return _fsdp(workload, reshard_after_forward=False)


def ours(workload: Workload, plan: em.Plan) -> Contender:
    """This library under `plan`."""
    mesh = em.init_mesh(device_type="cpu") if any(workload.model.experts) else None
    model = fresh_model(workload.model, mesh)
    if mesh is not None:
        em.annotate(model, gpt_patterns(model))
    model, optimizer = em.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        plan=plan,
        compute_dtype=torch.bfloat16 if workload.bf16 else None,
    )
    return Contender(model=model, optimizer=optimizer)


def ours_in_one_pass(workload: Workload, plan: em.Plan) -> Contender:
    """This library under `plan`; all micro-batches pass each layer together."""
    one = ours(workload, plan)
    return Accumulating(
        model=one.model,
        optimizer=one.optimizer,
        accumulate=lambda model, batches: em.accumulate(model, lm_loss, batches),
    )


def fsdp_accumulating(workload: Workload, *, kept_gathered: bool) -> Contender:
    """`fully_shard` that reduces gradients behind the last micro-batch; blocks may stay gathered until then."""
    one = _fsdp(workload, reshard_after_forward=not kept_gathered)

    def accumulate(model: Any, batches: Sequence[Tensor]) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or not kept_gathered)
            loss = lm_loss(model, batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        return losses

    return Accumulating(model=one.model, optimizer=one.optimizer, accumulate=accumulate)


def dense_of_same_size(workload: Workload) -> Contender:
    """This library's `zero2` on a dense GPT with at least as many parameters: the same depth, a larger width."""
    with torch.device("meta"):
        wanted = sum(p.numel() for p in fresh_model(workload.model).parameters())
        dense = replace(workload.model, experts=(), ep=(), residual=False, capacity_factor=None)
        while sum(p.numel() for p in fresh_model(dense).parameters()) < wanted:
            dense = replace(dense, d_model=dense.d_model + 16 * dense.n_heads)
    return replace(ours(replace(workload, model=dense), em.Plan.zero2()), same_work=False)


def _fsdp(workload: Workload, *, reshard_after_forward: bool) -> Contender:
    model = fresh_model(workload.model)
    mesh = em.init_mesh(device_type="cpu")["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return Contender(model=model, optimizer=fused_adamw(model.parameters()))


def fused_adamw(parameters: Any) -> torch.optim.AdamW:
    """torch's fastest AdamW on parameters, or on groups of them."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def start_rank(rank: int, ranks: int, rendezvous: str, threads: int) -> None:
    """Makes this process rank `rank` of `ranks` on gloo, with `threads` CPU threads."""
    torch.set_num_threads(threads)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
