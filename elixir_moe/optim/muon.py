"""Muon's update of one chunk: momentum in the shards, whole matrices at their owners.

Owns the arithmetic of `torch.optim.Muon` on shards, in three passes:

    momentum        in the shard, in its tier: the gradient becomes the update that is to be orthogonalized
    orthogonalize   the chunk's updates are gathered; each rank replaces those of its matrices and zeroes the others
    apply           the sum over the ranks is in the shard: weights decay and change

The first and the last pass treat each element by itself. Between them, the update is in the gradient's memory. Never
decides when to update, or how updates travel (`runtime.whole_updates`).
Source: K. Jordan, "Muon"; the owners are those of J. Liu et al., "Muon is Scalable for LLM Training", 3.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir_moe.optim.shard_update import FlatMoments, TrainedPiece, copy_master, run_at_once
from elixir_moe.optim.whole_matrix import matrices_of, owners
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.whole_updates import WholeUpdates, update_memory
from elixir_moe.torch_private import adjusted_rate, orthogonalized


class MuonUpdate(FlatMoments):
    """Muon: one flat moment for each master shard, and an update of whole matrices."""

    def __init__(self, chunks: Sequence[Chunk], groups: Sequence[Mapping[str, Any]], whole: WholeUpdates) -> None:
        super().__init__(chunks, ("momentum_buffer",))
        self._groups, self._whole = groups, whole
        self._group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
        shapes = {chunk.spec.index: [tuple(local.shape) for local in chunk.locals] for chunk in chunks}
        matrices = [matrices_of(chunk.spec, shapes[chunk.spec.index]) for chunk in chunks]
        owned = owners([(chunk.spec, theirs) for chunk, theirs in zip(chunks, matrices, strict=True)])
        self._matrices = {
            chunk.spec.index: list(zip(theirs, ranks, strict=True))
            for chunk, theirs, ranks in zip(chunks, matrices, owned, strict=True)
        }
        """{index of a chunk: its matrices, with the rank that updates each}."""

    def prepare(
        self,
        chunk: Chunk,
        pieces: list[TrainedPiece],
        used: set[nn.Parameter],
        scale: float | torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> "Callable[[], Sequence[Future[None]]]":
        """Returns the update like `AdamUpdate.prepare`, to be run at once on the caller's thread; never skips.

        Collective: ranks with the chunk run it in one order.
        """
        assert skip is None, "only Adam's update can be skipped on the device"
        return partial(run_at_once, partial(self._run, chunk, [p for p in pieces if p.parameter in used], used, scale))

    def _run(
        self, chunk: Chunk, pieces: list[TrainedPiece], used: set[nn.Parameter], scale: float | torch.Tensor
    ) -> None:
        chunk.shard.finish_sum()
        own = update_memory(chunk)
        self._add_momentum(chunk, pieces, scale, own)
        self._whole.change(chunk, own, partial(self._orthogonalize, chunk, used))
        self._apply(chunk, pieces, own)

    def _add_momentum(
        self, chunk: Chunk, pieces: list[TrainedPiece], scale: float | torch.Tensor, own: torch.Tensor
    ) -> None:
        """Writes to `own`, which is the gradient's memory, the updates that are to be orthogonalized."""
        (momentum,) = self.in_memory(chunk)
        for one in pieces:
            options, kept = self._groups[one.group], momentum[one.piece.here]
            gradient = chunk.shard.gradient(one.piece.start, one.piece.stop).float() * scale
            kept.lerp_(gradient, 1 - options["momentum"])
            own[one.piece.here] = gradient.lerp(kept, options["momentum"]) if options["nesterov"] else kept

    def _orthogonalize(self, chunk: Chunk, used: set[nn.Parameter], update: torch.Tensor) -> None:
        """Orthogonalizes the matrices of this rank in a gathered `update`, and zeroes the others."""
        for matrix, owner in self._matrices[chunk.spec.index]:
            part, parameter = update[matrix.start : matrix.stop], chunk.parameters[matrix.slot]
            if owner != chunk.communicator.rank or parameter not in used:
                part.zero_()
                continue
            options = self._groups[self._group_of[parameter]]
            part = part.view(matrix.shape)
            part.copy_(orthogonalized(part, options["ns_coefficients"], options["ns_steps"], options["eps"]))

    def _apply(self, chunk: Chunk, pieces: list[TrainedPiece], own: torch.Tensor) -> None:
        """Changes the weights by the orthogonalized updates in `own`."""
        assert chunk.shard.master is not None
        for one in pieces:
            options, weight = self._groups[one.group], chunk.shard.master[one.piece.here]
            rate = float(options["lr"])
            weight.mul_(1 - rate * options["weight_decay"])
            shape = tuple(one.parameter.shape)
            weight.add_(own[one.piece.here], alpha=-adjusted_rate(rate, options["adjust_lr_fn"], shape))
        copy_master(chunk.shard)

    def finish(self) -> None:
        """Does nothing: no option of Muon changes in a step."""
