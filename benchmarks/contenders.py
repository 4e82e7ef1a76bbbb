"""The contenders: the same training step, held together in different ways.

Owns how each is built from one seed and how it takes a step. Measures nothing (`measure`), compares nothing (`run`).

Peers get their best settings: torch's fused AdamW, gradients that are views of DDP's buckets in a static graph, and for
FSDP2 a unit for each block and the root. All see the same batches and start from the same weights.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import elixir_moe as em
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, lm_loss
from elixir_moe.optim import ShardedOptimizer

LEARNING_RATE = 3e-4
SEED = 20240607


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A model and its optimizer, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shares_gradients: bool
    """Whether the ranks train one model; else each trains its own."""

    def step(self, batch: Tensor) -> Tensor:
        """One forward, backward and update on this rank's batch; returns the loss, ()."""
        loss = lm_loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """Lets go of the process groups that building it has made. Collective."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.close()


Build = Callable[[GPTConfig], Contender]


def fresh_model(config: GPTConfig) -> GPT:
    """The model all contenders start from."""
    torch.manual_seed(SEED)
    return GPT(config)


def plain(config: GPTConfig) -> Contender:
    """Plain torch: each rank for itself, no communication."""
    model = fresh_model(config)
    return Contender(model=model, optimizer=_fused(model), shares_gradients=False)


def ddp(config: GPTConfig) -> Contender:
    """torch's DistributedDataParallel."""
    model = DistributedDataParallel(fresh_model(config), gradient_as_bucket_view=True, static_graph=True)
    return Contender(model=model, optimizer=_fused(model), shares_gradients=True)


def fsdp(config: GPTConfig) -> Contender:
    """torch's `fully_shard`, the second FSDP: blocks are resharded after forward, the root is not (its default)."""
    return _fsdp(config, reshard_after_forward=True)


def fsdp_zero2(config: GPTConfig) -> Contender:
    """`fully_shard` that keeps every block gathered from forward to backward."""
    return _fsdp(config, reshard_after_forward=False)


def ours(config: GPTConfig, plan: em.Plan) -> Contender:
    """This library under `plan`."""
    model = fresh_model(config)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), plan=plan)
    return Contender(model=model, optimizer=optimizer, shares_gradients=True)


def _fsdp(config: GPTConfig, *, reshard_after_forward: bool) -> Contender:
    model = fresh_model(config)
    mesh = em.init_mesh(device_type="cpu")["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    return Contender(model=model, optimizer=_fused(model), shares_gradients=True)


def _fused(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def start_rank(rank: int, ranks: int, rendezvous: str, threads: int) -> None:
    """Makes this process rank `rank` of `ranks` on gloo, with `threads` CPU threads."""
    torch.set_num_threads(threads)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
