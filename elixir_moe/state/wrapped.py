"""The record that `wrap` leaves on a model, for saving, loading and inspection.

Owns `Wrapped`, and the check that a model has not changed since `wrap`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from elixir_moe.chunks.ledger import Footprint
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import Plan, Tier
from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.errors import UsageError
from elixir_moe.memory.disk import DiskFile
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.optim.state import OptimizerState
from elixir_moe.parallel.rules import named_tensors
from elixir_moe.parallel.state_dict import persistent_buffers, unparametrized
from elixir_moe.runtime.hooks import Hooks, gone_since_wrap, moved_since_wrap
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.model_spec import ModelSpec
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """A model's plan, and the objects that execute it on this rank."""

    plan: Plan
    """The plan, resolved to numbers."""
    layout: Layout
    footprint: Footprint
    moments: int
    """fp32 values the optimizer keeps per element."""
    spec: ModelSpec
    """Names, parameters and ranks of the model at the time of `wrap`."""
    groups: ControlGroups
    """gloo process groups: of all ranks, and for every chunk and every sharded axis."""
    scheduler: Scheduler
    hooks: Hooks
    checkpoints: HostCheckpoints | None
    """Holds the tensors that checkpointed regions keep in host memory, if any."""
    optimizer: ShardedOptimizer
    kept: OptimizerState
    files: tuple[DiskFile, ...]
    """The files of the chunks on disk."""
    weights: str | None
    """The folder that `wrap` read weights from."""
    not_shared: Mapping[tuple[int, ...], str]
    """{ranks of a process group: why they do not share frozen chunks in host memory, although the plan does}."""
    prediction: Any
    """The predicted cost of a step (`planner.prediction.Prediction`); None for a plan without a search."""
    passed_together: set[object] = field(default_factory=set)
    """The code of the steps of `accumulate` whose batches were seen to change no module for each other."""

    @property
    def phase(self) -> Phase:
        """The phase of the step, which decides what may happen now."""
        return self.scheduler.phase

    def held_bytes(self) -> dict[str, int]:
        """Returns {tier: bytes} that the library holds on this rank in a backward, with all gradients."""
        held = {tier.value: 0 for tier in Tier}
        held[Tier.DEVICE] = self.scheduler.buffer_bytes + self.footprint.gradient_bytes + self.footprint.workspace_bytes
        held[Tier.HOST] = sum(file.buffer_bytes for file in self.files) + self.scheduler.whole_updates.buffer_bytes
        if self.scheduler.reductions.sums is not None:
            held[Tier.HOST] += self.scheduler.reductions.sums.nbytes
        if self.checkpoints is not None:
            held[Tier.HOST] += self.checkpoints.nbytes
        for chunk in self.scheduler.chunks:
            for tier, nbytes in chunk.shard.held_bytes().items():
                held[tier] += nbytes
            held[chunk.shard.tier.of_compute] += self.kept.bytes_of(chunk)
        return held


def require_wrapped(model: nn.Module, what: str, otherwise: str = "") -> Wrapped:
    """Returns the record that `wrap` left on the model.

    Raises UsageError if there is none; `what` names the caller, `otherwise` a remedy.
    """
    wrapped: Wrapped | None = getattr(model, "_elixir", None)
    if wrapped is None:
        raise UsageError(f"{what} needs a model that went through wrap{otherwise}")
    return wrapped


def check_as_wrapped(model: nn.Module, wrapped: Wrapped) -> None:
    """Raises UsageError unless the model has the parameters and buffers that it had in `wrap`, under the same names.

    `torch.nn.utils.parametrize` may have moved a parameter, or moved it back.
    """
    spec = wrapped.spec
    then = {(unparametrized(name), p): name for p, names in spec.names.items() for name in names}
    now = {(unparametrized(name), t): name for name, t in named_tensors(model) if isinstance(t, nn.Parameter)}
    buffers = list(chain(*persistent_buffers(model).values()))
    new = [name for (_, p), name in now.items() if p not in spec.names]
    new += [name for name in buffers if name not in spec.buffers]
    if new:
        raise UsageError(f"the model has {new}, which were not there in wrap: add and replace modules before wrap")
    moved = [(spec.names[key[1]][0], name) for key, name in now.items() if key not in then]
    if moved:
        raise UsageError(moved_since_wrap(moved))
    missing = [name for key, name in then.items() if key not in now]
    missing += [name for name in spec.buffers if name not in buffers]
    if missing:
        raise UsageError(gone_since_wrap(missing))
