"""The facts of a training step before its update, and the callbacks that may use them.

Owns the facts that all ranks share about a step, and the interface for callbacks. Decides nothing. Needs the package
`transformers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from elixir_moe.distributed.waits import BusyTime
from elixir_moe.hf.routers import Routers
from elixir_moe.parallel.rules import ranks_of_a_batch
from elixir_moe.state.wrapped import Wrapped

_NO_TOKENS = ("position_ids", "token_type_ids", "cache_ids")
"""Inputs whose names end in ``_ids`` but that are not tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """The facts that all ranks share after the gradients of a step."""

    losses: tuple[float, ...]
    """Loss of each rank, over all micro-batches."""
    norm: float
    """Global gradient norm before clipping."""
    busy_seconds: tuple[float, ...]
    """Time of each rank for forward and backward, without its waits for other ranks."""
    tokens: float
    """Tokens of all ranks, without padding; 0 if the inputs have no tokens."""
    tokens_per_expert: Mapping[str, list[int]] = field(default_factory=dict)
    """By router: tokens that chose each expert, over all ranks."""


class GoBack(Exception):  # noqa: N818 (a request, not an error)
    """Raised by a callback on all ranks: the trainer continues from a checkpoint."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """A callback of a trainer under a plan. It may ask for the facts of a step, drop its gradients, or go back.

    In `on_pre_optimizer_step` it may call `trainer.step_facts()`, which is collective, and `trainer.drop_gradients()`,
    with which this step leaves the weights unchanged; or it may raise `GoBack`. Checkpoints contain the result of
    `to_save`.
    """

    trainer: Any = None
    """The trainer, from the moment the callback is added."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights from before the next step may be needed after its backward has begun."""
        return False

    def to_save(self) -> dict[str, Any]:
        """Returns plain data for a checkpoint, equal on all ranks."""
        return {}

    def restore(self, saved: Mapping[str, Any], *, back: bool) -> None:
        """Restores the data of a checkpoint; `back`: a running training returns to that checkpoint."""


class Steps:
    """Collects the facts of a step on this rank."""

    def __init__(self, routers: Routers | None, device: torch.device) -> None:
        """`routers`: count tokens per expert; None for a model without routers."""
        self._routers = routers
        self._busy = BusyTime(device)
        self._losses: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor | int] = []
        self.inputs: list[dict[str, Any]] = []
        """The inputs of the step's micro-batches."""
        self.norm: Any = 0.0
        self._facts: StepFacts | None = None
        self._step = -1

    def begin(self, step: int) -> None:
        """Begins a micro-batch of the step of that number, counted from 0. After `facts`, a new step begins too."""
        if self._facts is not None or step != self._step:
            self._losses, self._tokens, self.inputs, self._facts = [], [], [], None
            self._step = step
            self._busy.start()

    def end(self, loss: torch.Tensor) -> None:
        """Ends a micro-batch, whose share of the step's loss is `loss`."""
        self._losses.append(loss.detach().float())

    def record_inputs(self, inputs: dict[str, Any]) -> None:
        self.inputs.append({**inputs})  # Trainer takes labels out of it
        self._tokens.append(tokens_in(inputs))

    def facts(self, model: nn.Module, wrapped: Wrapped) -> StepFacts:
        """The facts of this step. Collective at its first call in a step."""
        if self._facts is not None:
            return self._facts
        busy = self._busy.stop()
        loss = float(sum(self._losses))
        tokens = sum(float(count) for count in self._tokens) / ranks_of_a_batch(model)
        mine = torch.tensor([loss, busy, tokens], dtype=torch.float64, device="cpu")
        table = mine.new_empty(dist.get_world_size(), len(mine))
        dist.all_gather(list(table), mine, group=wrapped.groups.control)
        losses, seconds, counts = table.t().tolist()
        experts: dict[str, list[int]] = {}
        if self._routers is not None:
            self._routers.step()
            experts = {name: found.tolist() for name, found in self._routers.loads().items()}
        self._facts = StepFacts(
            losses=tuple(losses),
            norm=float(self.norm),
            busy_seconds=tuple(seconds),
            tokens=sum(counts),
            tokens_per_expert=experts,
        )
        return self._facts


def tokens_in(inputs: Mapping[str, Any]) -> torch.Tensor | int:
    """Counts the tokens in the inputs of a loss, without padding; 0 if the inputs have none."""
    found: torch.Tensor | int = 0
    for name, tokens in inputs.items():
        if name.endswith("_ids") and name not in _NO_TOKENS and isinstance(tokens, torch.Tensor):
            stem = name.removesuffix("input_ids") if name.endswith("input_ids") else name.removesuffix("ids")
            masks = (inputs.get(f"{stem}{end}") for end in ("attention_mask", "mask"))
            mask = next((m for m in masks if isinstance(m, torch.Tensor) and m.shape == tokens.shape), None)
            found = found + (tokens.numel() if mask is None else mask.sum())
    return found
