"""Trainings that are saved and go on elsewhere: what every rank of a pool runs.

A small GPT of dense and mixture layers, trained on tokens that depend on the step alone. All layouts of it start from
the same weights, so a checkpoint of one can be loaded by any other.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.checkpoint.load import load
from elixir_moe.checkpoint.save import save
from elixir_moe.checkpoint.storage import read_manifest, verify
from elixir_moe.checkpoint.whole import Whole
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, gpt_patterns, lm_loss
from tests.parity import make_optimizer, mesh_of_world, tokens

ROWS = 4
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(rcache_blocks=4, chunk_numel=2500),
    "offload": em.Plan.offload(rcache_blocks=6, device_chunks=1, chunk_numel=4096),
}


def config(ep: int, dropout: float = 0.0) -> GPTConfig:
    return GPTConfig(
        vocab_size=29,
        seq_len=8,
        n_layers=2,
        d_model=16,
        n_heads=2,
        mlp_ratio=2,
        experts=(0, 4),
        ep=(1, ep),
        residual=True,
        dropout=dropout,
        tie_embeddings=True,
    )


class Run:
    """A model and an optimizer with an LR schedule, between two steps."""

    def __init__(self, ep: int, plan: str, *, dropout: float = 0.0, clip: float | None = None, **options: Any) -> None:
        self.config, self.clip, self.step = config(ep, dropout), clip, 0
        torch.manual_seed(5)
        model = GPT(self.config, mesh_of_world())
        model.positions.weight.requires_grad_(False)
        em.annotate(model, gpt_patterns(model))
        self.model, self.optimizer = em.wrap(model, make_optimizer_of_trainable(model), plan=PLANS[plan], **options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        torch.manual_seed(100 + dist.get_rank())

    def train(self, steps: int) -> list[float]:
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        losses = []
        for _ in range(steps):
            loss = lm_loss(self.model, tokens(self.step, 0, 8, 29)[rows])
            self.optimizer.scale(loss).backward()
            if self.clip is not None:
                self.optimizer.clip_grad_norm_(self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, path: Path, **options: Any) -> Any:
        extra = {"step": self.step, "schedule": self.schedule.state_dict()}
        return save(path, self.model, self.optimizer, extra=extra, **options)

    def load(self, path: Path) -> None:
        extra = load(path, self.model, self.optimizer)
        self.step = extra["step"]
        self.schedule.load_state_dict(extra["schedule"])

    def close(self) -> None:
        self.optimizer.close()
        del self.model, self.optimizer, self.schedule
        gc.collect()


def make_optimizer_of_trainable(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return optimizer


def everything(path: Path) -> dict[str, Tensor]:
    """All whole tensors of a checkpoint, what the optimizer keeps included."""
    manifest = read_manifest(path)
    verify(path, manifest)
    whole = Whole(path, manifest)
    found = {f"{name} buffer": whole.buffer(name).clone() for name in manifest.buffers}
    for name, entry in manifest.parameters.items():
        for kept in entry.pieces[0].state if entry.pieces else ():
            found[f"{name} {kept}"] = whole.parameter(name, kept)
        updates = {piece.scalars.get("updates") for piece in entry.pieces}
        assert len(updates) == 1
        found[f"{name} updates"] = torch.tensor(updates.pop() or 0)
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], case: str) -> None:
    assert a.keys() == b.keys(), case
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), f"{case}: {name}"


def train_and_save(path: Path, ep: int, plan: str, steps: int, **options: Any) -> dict[str, Tensor]:
    run = Run(ep, plan, **options)
    run.train(steps)
    run.save(path)
    state = em.full_state_dict(run.model)
    run.close()
    return state


def load_and_save(source: Path, target: Path, ep: int, plan: str, steps: int, **options: Any) -> list[float]:
    """Into another layout, out of it again, and a few steps further; the losses are those of the whole batch."""
    run = Run(ep, plan, **options)
    run.load(source)
    run.save(target)
    losses = torch.tensor(run.train(steps), dtype=torch.float64)
    dist.all_reduce(losses)
    run.close()
    return (losses / dist.get_world_size()).tolist()


def unbroken_and_resumed(directory: Path, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Four steps; and two, a checkpoint, and two more in a model built anew, perhaps under another plan."""
    run = Run(**first)
    losses = run.train(2)
    run.save(directory / "middle")
    losses += run.train(2)
    run.save(directory / "unbroken")
    run.close()
    run = Run(**second)
    run.load(directory / "middle")
    resumed = run.train(2)
    run.save(directory / "resumed")
    run.close()
    return {"unbroken": losses[2:], "resumed": resumed}


def failing(act: Callable[[], Any]) -> str:
    """The text of the CheckpointError that `act` raises, as `ranks` would raise it."""
    try:
        act()
    except em.CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")
