"""The record that `wrap` leaves on a model, for saving, loading and inspection.

Owns `Wrapped`, and the check that a model has not changed since `wrap`.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import Footprint, Plan, Tier
from elixir_moe.errors import UsageError
from elixir_moe.memory.disk import DiskFile
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.rules import named_tensors
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.model_spec import ModelSpec
from elixir_moe.runtime.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """A model's plan, and the objects that carry it out on this rank."""

    plan: Plan
    """The plan with all numbers settled."""
    layout: Layout
    footprint: Footprint
    moments: int
    """fp32 values the optimizer keeps per element."""
    model: ModelSpec
    """Names, parameters and ranks of the model at the time of `wrap`."""
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    """gloo process groups by their ranks, for every chunk and every sharded axis."""
    scheduler: Scheduler
    hooks: Hooks
    checkpoints: HostCheckpoints | None
    """Holds what checkpointed regions keep in host memory, if anything."""
    optimizer: ShardedOptimizer
    files: tuple[DiskFile, ...]
    """The files of the chunks on disk."""
    weights: str | None
    """The folder that `wrap` read weights from."""
    prediction: Any
    """The predicted cost of a step (`search.prediction.Prediction`); None for a plan without a search."""

    def held_bytes(self) -> dict[str, int]:
        """{tier: bytes} that the library holds on this rank in a backward, all gradients counted."""
        held = {tier.value: 0 for tier in Tier}
        held[Tier.DEVICE] = self.scheduler.buffer_bytes + self.footprint.landing_bytes
        held[Tier.HOST] = sum(file.buffer_bytes for file in self.files)
        if self.scheduler.sums is not None:
            held[Tier.HOST] += self.scheduler.sums.nbytes
        if self.checkpoints is not None:
            held[Tier.HOST] += self.checkpoints.nbytes
        for chunk in self.scheduler.chunks:
            for tier, nbytes in chunk.shard.held_bytes().items():
                held[tier] += nbytes
            held[chunk.shard.tier.of_compute] += self.optimizer.kept.bytes_of(chunk)
        return held


def require_wrapped(model: nn.Module, what: str, otherwise: str = "") -> Wrapped:
    """The record that `wrap` left on the model. Raises UsageError: `what` names the caller, `otherwise` a remedy."""
    wrapped: Wrapped | None = getattr(model, "_elixir", None)
    if wrapped is None:
        raise UsageError(f"{what} needs a model that went through wrap{otherwise}")
    return wrapped


def check_as_wrapped(model: nn.Module, wrapped: Wrapped) -> None:
    """Raises UsageError unless the model has the parameters and buffers of `wrap`, under the same names.

    `torch.nn.utils.parametrize` may have moved a parameter, or moved it back.
    """
    keys = dict.fromkeys(wrapped.model.keys)
    lasting = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    new = [name for name, p in model.named_parameters() if p not in wrapped.model.names]
    new += [name for name, _ in model.named_buffers() if name in lasting and name not in keys]
    if new:
        raise UsageError(f"the model has {new} now and had not in wrap: add and replace modules before wrap")
    known = {_unparametrized(name) for name, _ in named_tensors(model)}
    named = dict.fromkeys(name for names in wrapped.model.names.values() for name in names)
    missing = [name for name in named | keys if _unparametrized(name) not in known]
    if missing:
        raise UsageError(f"the model had {missing} in wrap and has not now: rename and remove parameters before wrap")


def _unparametrized(name: str) -> str:
    """The name of a parameter without the path that `torch.nn.utils.parametrize` inserts."""
    return re.sub(r"parametrizations\.([^.]+)\.original$", r"\1", name)
