"""The state of an optimizer, parameter by parameter, for code that saves, loads and moves it.

Owns the map from a parameter to its piece of a shard and the state of that piece, the save in progress, and the last
update if the host does not know yet whether it succeeded. Never updates a weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.errors import ElixirError
from elixir_moe.memory.elements import Elements
from elixir_moe.optim.agreement import StepDecision
from elixir_moe.optim.joined import members_of, whole_matrix
from elixir_moe.optim.shard_update import ElementwiseUpdate, TrainedPiece
from elixir_moe.optim.updates import Updates
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.phase import OPEN, WHOLE
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.torch_private import DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class LastStep:
    """An update of which the host does not know yet whether the GPUs skipped it."""

    norm: Callable[[], Any]
    """Waits for the norm, and returns it."""
    pieces: list[TrainedPiece]
    """The pieces that counted the step."""


class OptimizerState:
    """The state of one sharded optimizer on this rank."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        updates: Updates,
        chunks: Sequence[Chunk],
        pieces: Mapping[int, list[TrainedPiece]],
        decision: StepDecision,
        scheduler: Scheduler,
        hooks: Hooks,
        groups: ControlGroups,
    ) -> None:
        self._updates, self._chunks, self.decision = updates, chunks, decision
        self._scheduler, self._hooks, self._groups = scheduler, hooks, groups
        self._phase = scheduler.phase
        self._place_of = {p.parameter: (chunk, p) for chunk in chunks for p in pieces[chunk.spec.index]}
        self.kind = "; ".join(
            f"{type(member).__name__}, {type(updates.whole if whole_matrix(member) else updates.elementwise).__name__}"
            for member in members_of(inner)
        )
        """Optimizers of the same kind have states with the same names."""
        self.keeps_always_the_same = not isinstance(updates.elementwise, ElementwiseUpdate)
        """Whether the state has the same names before and after the first step."""
        self.last_step: LastStep | None = None
        self.pending: Any = None
        """The asynchronous save that `ShardedOptimizer.close` waits for."""

    def bytes_of(self, chunk: Chunk) -> int:
        """Bytes in memory of the state kept for a chunk in addition to its shard."""
        return self._updates.of(chunk).state_bytes(chunk) if chunk.spec.key.trainable else 0

    def piece_of(self, parameter: nn.Parameter) -> TrainedPiece | None:
        """The piece of a trainable parameter in this rank's shards; None if there is none."""
        return self._place_of[parameter][1] if parameter in self._place_of else None

    def of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of `piece_of(parameter)` by name: flat `Elements`, or a single value."""
        chunk, piece = self._place_of[parameter]
        return self._updates.of(chunk).state(chunk, piece)

    def replace(
        self, parameter: nn.Parameter, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Elements]:
        """Allocates another state of the same `kind`; returns its flat elements, which the caller must write."""
        chunk, piece = self._place_of[parameter]
        return self._updates.of(chunk).replace_state(chunk, piece, dtypes, values)

    def check_last_step(self) -> None:
        """Raises ElixirError, on all ranks, if the GPUs skipped the last update; waits only for its norm."""
        last, self.last_step = self.last_step, None
        if last is not None and not math.isfinite(norm := last.norm()):
            for piece in last.pieces:
                piece.steps -= 1
            raise ElixirError(
                f"the global gradient norm of the last step was {norm}; that step changed no weight: call zero_grad() "
                f"and continue with another batch or a smaller rate"
            )

    def give_up_gradients(self) -> None:
        """Gives up unfinished work and clears the gradients."""
        self._phase.drop_gradients("optimizer.zero_grad() stopped halfway")
        self._scheduler.reductions.drain()
        self._hooks.abandon()
        self.decision.forget_gradients()
        with DisableTorchFunctionSubclass():
            for parameter in (parameter for chunk in self._chunks for parameter in chunk.parameters):
                parameter.grad = None  # a failed backward may have left one
        self._phase.clear()

    def drop_process_groups(self, control: Callable[[], dist.ProcessGroup]) -> None:
        """Drops all process groups in the middle of a step. The shards can still be saved, over `control`.

        Raises UsageError if updates have begun in backward: the shards then belong to different steps.
        """
        self._phase.leave_groups()
        self._phase.require(WHOLE, "drop_process_groups()")
        self._phase.abort()
        self._phase.drop_gradients("drop_process_groups() stopped halfway")
        self._scheduler.abandon_groups()
        self.decision.forget_gradients()
        self._groups.replace(control)
        self.pending = None
        self._phase.clear()

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Allows writing the shards while open; drops gradients, a failed step and gathered weights.

        If it fails, only another `rewriting` is possible.
        """
        self._phase.require(OPEN, "em.load()")
        self._phase.write("an em.load()")
        for chunk in self._chunks:
            chunk.shard.drop_update()
        self._phase.early.clear()
        self.give_up_gradients()
        self.decision.forget_options()
        self._hooks.updated()
        self._scheduler.gathers.drop(frozen=True)
        for chunk in self._scheduler.chunks:
            chunk.shard.open_for_writing()
        yield
        for chunk in self._scheduler.chunks:
            chunk.shard.updated()
        self._scheduler.updated()
        self._phase.written(0)
