"""The training state: a model, its optimizer, its data, and the progress of the run.

Owns one step (forward and backward over the micro-batches, clipping, update), evaluation, the text sample, and the
state that must be saved to resume exactly. Decides nothing: `loop` chooses the next step and when to save.
"""

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe import MoE, Saving, ShardedOptimizer, annotate, load, save, sharded_init, wrap
from elixir_moe.ext.checkpoints import random_states, read_random_states, set_random_states
from elixir_moe.ext.models import CutLinear, LayerRanks, logical_numel, require_wrapped
from elixir_tools.models.gpt import (
    GPT,
    Meshes,
    generate,
    gpt_patterns,
    lm_loss,
    lm_loss_without_logits,
    tokens_per_expert,
)
from elixir_tools.train.config import OptimizerConfig, TrainConfig, identity
from elixir_tools.train.data import Text, decode_bytes, rows_of
from elixir_tools.watch.tensors import name_not_finite, scales


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a run; the same on all ranks, and part of every checkpoint."""

    step: int = 0
    """Number of steps done."""
    batch: int = 0
    """Number of the last batch of samples drawn."""
    avoid: tuple[int, ...] = ()
    """Numbers of batches that are never drawn again."""
    lr: float
    """Peak learning rate of the schedule."""
    rate: float = 1.0
    """Factor on the learning rate; lowered when a run goes back."""
    clip_norm: float | None
    """Bound on the global gradient norm; None: no clipping."""
    accumulation: int
    """Micro-batches that each rank runs per step; raised when memory is short."""

    def next_batch(self) -> int:
        """The number of the next batch."""
        number = self.batch + 1
        while number in self.avoid:
            number += 1
        return number


class Training:
    """A model, its optimizer and its data during a run."""

    def __init__(self, config: TrainConfig, data: Text, mesh: DeviceMesh) -> None:
        self.config, self.data = config, data
        self._loss = lm_loss_without_logits if config.run.loss == "fused" else lm_loss
        self.mesh: DeviceMesh | None = mesh
        self.identity = identity(config, data)
        self.ranks = mesh.size()
        self.replica, self.replicas = mesh.get_local_rank("dp"), mesh.size(0)  # ranks of one tp group share their rows
        self.device = torch.device(mesh.device_type)
        optimizer = config.optimizer
        self.progress = Progress(lr=optimizer.lr, clip_norm=optimizer.clip_norm, accumulation=config.run.accumulation)
        torch.manual_seed(config.run.seed)  # the same on all ranks, so that replicated weights start equal
        with sharded_init():  # no rank ever holds the model: `wrap` draws each weight straight into its shards
            model = GPT(config.model, mesh)
            annotate(model, gpt_patterns(model))
        self.parameters = _count_parameters(model)
        self.model, self.optimizer = self._wrap(model)
        self.wrapped = require_wrapped(self.model, "train")
        torch.manual_seed(config.run.seed + 1 + self.replica)  # from here on for dropout, which differs between ranks
        self.updating = False
        """Whether weights are being written, or may be in this step's backward: the step cannot be undone."""
        self.mark()
        self.validation = data.validation_batches(batches=config.run.eval_batches, rows=config.micro_batch)

    def _wrap(self, model: nn.Module) -> tuple[nn.Module, ShardedOptimizer]:
        rows = self.config.micro_batch // self.replicas
        sample = self.data.batch(seed=self.config.run.seed, step=1, rows=rows)
        return wrap(
            model,
            adamw(model, self.config.optimizer),
            plan=self.config.plan.plan(self._loss, sample, self.config.run.accumulation),
            compute_dtype=self.config.run.compute_dtype,
        )

    # ---------------------------------------------------------------------------------------------------------- a step

    def forward_backward(self, *, early: bool = False) -> float:
        """Computes the gradients of the mean loss over the next batch of samples; returns this rank's mean loss.

        `early`: updates begin in the last backward.
        """
        progress = self.progress
        progress.batch = progress.next_batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.updating = early
        losses: list[Tensor] = []
        for micro_batch in self._micro_batches():
            loss = self._loss(self.model, micro_batch)
            last = len(losses) == progress.accumulation - 1
            with self.optimizer.update_in_backward() if early and last else nullcontext():
                (self.optimizer.scale(loss) / progress.accumulation).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    def _micro_batches(self) -> Iterator[Tensor]:
        """This rank's micro-batches of the step."""
        batch = self.data.batch(seed=self.config.run.seed, step=self.progress.batch, rows=self.config.run.global_batch)
        for micro_batch in batch.chunk(self.progress.accumulation):
            yield rows_of(micro_batch, self.replica, self.replicas).to(self.device)

    def norm(self) -> float:
        """Clips the gradients; returns their global norm before clipping. Collective."""
        clip = self.progress.clip_norm
        return float(self.optimizer.clip_grad_norm_(math.inf if clip is None else clip))

    def update(self) -> None:
        """Applies the gradients. Collective."""
        self.updating = True
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.mark()

    def skip(self) -> None:
        """Drops the gradients and counts the step; weights and moments do not change."""
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.mark()

    def mark(self) -> None:
        """Marks the point between two steps to which `rewind` returns."""
        self.updating = False
        self._mark = replace(self.progress), random_states()

    def rewind(self) -> None:
        """Returns to the last `mark`; weights and moments have not changed since."""
        progress, states = self._mark
        self.progress = replace(progress)
        set_random_states(read_random_states(states, "the beginning of the step"))

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        progress = self.progress
        return progress.lr * progress.rate * lr_factor(progress.step, self.config.run.steps, self.config.optimizer)

    # ---------------------------------------------------------------------------------------------- go and come back

    def disconnect(self) -> None:
        """Drops all references to meshes: no step can run any more, but the model can be saved."""
        self.mesh = None
        for module in self.model.modules():
            if isinstance(module, GPT):
                module.meshes = Meshes(self.config.model, None)
            if isinstance(module, MoE):
                module.place = LayerRanks()
            if isinstance(module, CutLinear):
                module.ranks = replace(module.ranks, process_group=None)

    def save(
        self, path: Path, supervisor: dict[str, Any], *, keep: int | None = None, asynchronous: bool = False
    ) -> Saving:
        """Saves everything needed to resume from here. Collective. Raises CheckpointError."""
        extra = {"progress": asdict(self.progress), "settings": self.identity, "supervisor": supervisor}
        return save(path, self.model, self.optimizer, extra=extra, keep=keep, asynchronous=asynchronous)

    def load(self, path: Path) -> dict[str, Any]:
        """Restores the state in a checkpoint; returns the supervisor's state. Collective. Raises CheckpointError."""
        extra = load(path, self.model, self.optimizer)
        self.progress = Progress(**extra["progress"])
        unit = self.replicas * self.progress.accumulation
        if self.config.run.global_batch % unit or self.progress.accumulation < self.config.run.accumulation:
            self.progress.accumulation = self.config.run.accumulation
        self.mark()
        supervisor: dict[str, Any] = extra["supervisor"]
        return supervisor

    # ---------------------------------------------------------------------------------------------------- a closer look

    def scales(self) -> dict[str, float]:
        """Root mean square of every trainable parameter, from the masters. Collective."""
        return scales(self.wrapped)

    def name_not_finite(self) -> str:
        """Names the origin of values that are not finite. Collective; needs the gradients, and drops them."""
        drop = None if self.updating else self.optimizer.zero_grad
        return name_not_finite(self.model, self.wrapped, self._forward_again, drop)

    def _forward_again(self) -> None:
        for micro_batch in self._micro_batches():
            self._loss(self.model, micro_batch)

    # ----------------------------------------------------------------------------------------------------- evaluation

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks predict in a step."""
        return self.config.run.global_batch * self.config.model.seq_len

    def tokens_per_expert(self) -> dict[str, list[int]]:
        """By mixture layer, the choices that fell on each expert in the last micro-batch, all ranks together."""
        return tokens_per_expert(self.model)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross-entropy over the validation batches in nats per token. Collective."""
        self.model.eval()
        losses = []
        for batch in self.validation:
            mine = rows_of(batch, self.replica, self.replicas).to(self.device)
            logits = self.model(mine[:, :-1]).logits.float()
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()))
        self.model.train()
        total = torch.stack(losses).mean()
        dist.all_reduce(total)
        return total.item() / self.ranks

    def sample(self) -> str:
        """Text that the model writes after the start of the validation part; the same on all ranks. Collective."""
        run = self.config.run
        if not run.sample_bytes:
            return ""
        written = generate(
            self.model,
            self.data.validation[: min(64, self.config.model.seq_len)].long().unsqueeze(0).to(self.device),
            run.sample_bytes,
            temperature=run.temperature,
            generator=torch.Generator(self.device).manual_seed(run.seed),
        )
        return decode_bytes(written[0].tolist())

    def description(self) -> Iterator[str]:
        """Lines that describe model, data and step."""
        run, model = self.config.run, self.config.model
        pairs = zip(model.experts, model.ep, strict=True)
        kinds = ", ".join(f"{n} experts (ep {ep})" if n else "dense" for n, ep in pairs)
        yield f"model       {self.parameters:,} parameters, layers of width {model.d_model}: {kinds}"
        yield self.data.description(self.validation)
        yield (
            f"step        {run.global_batch} samples of {model.seq_len} bytes, ranks: {self.ranks}"
            f"{f' (tp {run.tp})' * (run.tp > 1)}, "
            f"micro-batches: {self.progress.accumulation}, {run.dtype}, plan: {self.config.plan.kind}"
        )
        if self.device.type == "cuda" and any(model.experts) and model.capacity_factor is None and not _expandable():
            yield (
                "memory      experts take another number of tokens in each step, which fragments GPU memory: set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )


def _expandable() -> bool:
    """Whether CUDA's allocator was told about expandable segments, one way or the other."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments" in os.environ.get(name, "") for name in names)


def lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Factor on the peak learning rate at a step counted from 0: linear warm-up, then cosine decay to `final_lr`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * done)) / 2


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of what is trained; only matrices decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() > 1]
    others = [p for p in trained if p.dim() <= 1]
    param_groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    param_groups = [group for group in param_groups if group["params"]]
    return torch.optim.AdamW(param_groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _count_parameters(model: nn.Module) -> int:
    """Elements of the whole model: sharded parameters count with all their slices, tied ones once."""
    return sum(logical_numel(p) for p in model.parameters())
