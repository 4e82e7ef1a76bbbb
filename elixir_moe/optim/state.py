"""The state of an optimizer, parameter by parameter, for code that saves, loads and moves it.

Owns the map from a parameter to its piece of a shard and the state of that piece. Updates nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.memory.elements import Elements
from elixir_moe.optim.decision import StepDecision
from elixir_moe.optim.shard_update import AdamUpdate, ElementwiseUpdate, TrainedPiece
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.scheduler import Scheduler


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
        self._scheduler, self._hooks = scheduler, hooks
        self.groups = groups
        """The process groups on which ranks agree."""
        self._place_of = {p.parameter: (chunk, p) for chunk in chunks for p in pieces[chunk.spec.index]}
        self.kind = f"{type(inner).__name__}, {type(update).__name__}"
        """Optimizers of one kind have states with the same names."""
        self.keeps_always_the_same = isinstance(update, AdamUpdate)
        """The state has the same names before and after the first step."""

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for `step`, on this rank."""
        return self._scheduler.has_gradients

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

    def give_up_gradients(self) -> None:
        """Gives up unfinished work, and clears the gradients."""
        self._scheduler.drain()
        self._hooks.abandon()
        self._decision.forget_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in (parameter for chunk in self._chunks for parameter in chunk.parameters):
                parameter.grad = None  # a failed backward may have left one

    def give_up_updates(self) -> None:
        """Ends updates that have begun in backward, so that their step can be given up: a load replaces the weights."""
        for chunk in self._chunks:
            chunk.shard.gate.finish_update()
        self._scheduler.final.clear()

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """A context in which shards may be written; gradients are forgotten and nothing is gathered.

        If it does not end as it should, nothing but another one is possible.
        """
        self._hooks.check_outside("em.load()")
        self._scheduler.half_written = "an em.load()"
        self._hooks.updated()
        self._scheduler.drop_weights(frozen=True)
        for chunk in self._scheduler.chunks:
            chunk.shard.gate.open_for_writing()
        yield
        for chunk in self._scheduler.chunks:
            chunk.shard.updated()
        self._scheduler.updated()
        self._scheduler.progress.steps = 0
        self._scheduler.half_written = ""
