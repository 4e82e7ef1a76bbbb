"""The state of an optimizer, parameter by parameter, for code that saves, loads and moves it.

Owns the map from a parameter to its piece of a shard and the state of that piece, the save that is under way, and the
update of whose success the host does not know yet. Updates nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.errors import ElixirError
from elixir_moe.memory.elements import Elements
from elixir_moe.optim.agreement import Options, StepDecision
from elixir_moe.optim.shard_update import AdamUpdate, ElementwiseUpdate, TrainedPiece
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.phase import OPEN, WHOLE
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.torch_private import DisableTorchFunctionSubclass


class Pending(Protocol):
    """Work that runs beside training, such as an asynchronous save."""

    def result(self) -> Any:
        """Blocks until the work is done; raises its error. Collective."""


@dataclass(frozen=True, slots=True)
class LastStep:
    """An update of whose success the host does not know yet."""

    norm: Callable[[], Any]
    """Waits for the norm, and returns it."""
    pieces: list[TrainedPiece]
    """The pieces that have counted the step."""


class OptimizerState:
    """The state of one sharded optimizer on this rank."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        update: AdamUpdate | ElementwiseUpdate,
        chunks: Sequence[Chunk],
        pieces: Mapping[int, list[TrainedPiece]],
        decision: StepDecision,
        scheduler: Scheduler,
        hooks: Hooks,
        groups: ControlGroups,
    ) -> None:
        self._update, self._chunks, self._decision = update, chunks, decision
        self._scheduler, self._hooks, self._groups = scheduler, hooks, groups
        self._phase = scheduler.phase
        self._place_of = {p.parameter: (chunk, p) for chunk in chunks for p in pieces[chunk.spec.index]}
        self.kind = f"{type(inner).__name__}, {type(update).__name__}"
        """Optimizers of one kind have states with the same names."""
        self.keeps_always_the_same = isinstance(update, AdamUpdate)
        """The state has the same names before and after the first step."""
        self.last_step: LastStep | None = None
        self.pending: Pending | None = None
        """The work that `ShardedOptimizer.close` waits for."""

    def bytes_of(self, chunk: Chunk) -> int:
        """Bytes in memory of the state kept for a chunk beside its shard."""
        return self._update.state_bytes(chunk)

    def piece_of(self, parameter: nn.Parameter) -> TrainedPiece | None:
        """The piece of a trainable parameter in this rank's shards; None if none does."""
        return self._place_of[parameter][1] if parameter in self._place_of else None

    def of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of `piece_of(parameter)` by name: flat `Elements`, or one value for all of it."""
        return self._update.state(*self._place_of[parameter])

    def replace(
        self, parameter: nn.Parameter, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Elements]:
        """Makes room for another state of the same `kind`; returns its flat elements, which the caller must write."""
        return self._update.replace_state(*self._place_of[parameter], dtypes, values)

    def check_last_step(self) -> None:
        """Raises ElixirError, on all ranks, if the GPUs have skipped the last update; waits for its norm alone."""
        last, self.last_step = self.last_step, None
        if last is not None and not math.isfinite(norm := last.norm()):
            for piece in last.pieces:
                piece.steps -= 1
            raise ElixirError(
                f"the global gradient norm of the last step was {norm}; that step has changed no weight: zero_grad() "
                f"and go on with another batch or a smaller rate"
            )

    @property
    def stepped(self) -> Options:
        """The options of the last step."""
        return self._decision.stepped

    def compare_stepped(self, everyone: Sequence[Options]) -> None:
        """Raises UsageError unless all peers, in rank order, have made the last step with the same options."""
        self._decision.compare_stepped(everyone)

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradients are not finite in this rank's shards, in packing order."""
        return self._decision.not_finite()

    def give_up_gradients(self) -> None:
        """Gives up unfinished work, and clears the gradients."""
        self._phase.drop_gradients("optimizer.zero_grad() stopped halfway")
        self._scheduler.reductions.drain()
        self._hooks.abandon()
        self._decision.forget_gradients()
        with DisableTorchFunctionSubclass():
            for parameter in (parameter for chunk in self._chunks for parameter in chunk.parameters):
                parameter.grad = None  # a failed backward may have left one
        self._phase.clear()

    def drop_process_groups(self, control: Callable[[], dist.ProcessGroup]) -> None:
        """Drops all process groups in the middle of a step. The shards can still be saved, over `control`.

        Raises UsageError if updates have begun in backward: the shards are not of one step.
        """
        self._phase.leave_groups()
        self._phase.require(WHOLE, "drop_process_groups()")
        self._phase.abort()
        self._phase.drop_gradients("drop_process_groups() stopped halfway")
        self._scheduler.abandon_groups()
        self._decision.forget_gradients()
        self._groups.replace(control)
        self.pending = None
        self._phase.clear()

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """A context in which shards may be written; gradients and a failed step are given up, and nothing is gathered.

        If it does not end as it should, nothing but another one is possible.
        """
        self._phase.require(OPEN, "em.load()")
        self._phase.write("an em.load()")
        for chunk in self._chunks:
            chunk.shard.drop_update()
        self._phase.early.clear()
        self.give_up_gradients()
        self._decision.forget_options()
        self._hooks.updated()
        self._scheduler.gathers.drop(frozen=True)
        for chunk in self._scheduler.chunks:
            chunk.shard.open_for_writing()
        yield
        for chunk in self._scheduler.chunks:
            chunk.shard.updated()
        self._scheduler.updated()
        self._phase.written(0)
