"""Muon's update of one chunk: momentum in the shards, whole matrices at their owners.

Owns the arithmetic of `Muon` on shards, in three passes:

    momentum        in the shard, in its tier: the gradient becomes the update that is to be orthogonalized
    orthogonalize   the chunk's updates are gathered; each rank replaces those of its matrices and zeroes the others
    apply           the sum over the ranks is in the shard: weights decay and change

The first and the last pass treat each element by itself. Between them, the update is in the gradient's memory. Never
decides when to update, or how updates travel (`runtime.whole_updates`).
Source: K. Jordan, "Muon"; the owners are those of J. Liu et al., "Muon is Scalable for LLM Training", 3.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import UsageError
from elixir_moe.optim.cut_matrix import cuts_of, slice_of, whole_shape
from elixir_moe.optim.muon import orthogonalize, part_of
from elixir_moe.optim.shard_update import FlatMoments, TrainedPiece, UpdateAtOnce
from elixir_moe.optim.whole_matrix import at_once, bands, fixed_options, in_chunk, matrices, owners
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.whole_updates import WholeUpdates
from elixir_moe.torch_private import adjusted_rate


class MuonUpdate(FlatMoments, UpdateAtOnce):
    """Muon: one flat moment for each master shard, and an update of whole matrices."""

    def __init__(self, chunks: Sequence[Chunk], groups: Sequence[Mapping[str, Any]], whole: WholeUpdates) -> None:
        super().__init__(chunks, ("momentum_buffer",))
        self._groups, self._whole = groups, whole
        self._fixed = [fixed_options(group) for group in groups]
        self._group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
        self._matrices = {
            p: list(matrices(local_of(p).shape, groups[self._group_of[p]]))
            for chunk in chunks
            for p in chunk.parameters
        }
        """The matrices of each parameter."""
        self._cuts = {p: cuts_of(p) for p in self._matrices}
        found = [(chunk.spec, in_chunk(chunk.spec, [self._matrices[p] for p in chunk.parameters])) for chunk in chunks]
        self._owned = {
            spec.index: list(zip(theirs, ranks, strict=True))
            for (spec, theirs), ranks in zip(found, owners(found), strict=True)
        }
        """{index of a chunk: its matrices, with the rank that updates each}."""

    def check_fixed(self) -> None:
        """Raises UsageError if an option of a group that is fixed has another value than when this was built."""
        for index, (then, group) in enumerate(zip(self._fixed, self._groups, strict=True)):
            if (now := fixed_options(group)) != then:
                raise UsageError(
                    f"options in param_groups[{index}] were {then} in wrap and are {now} now: owners and memory follow "
                    f"from them, so set them before wrap"
                )

    def _run(
        self, chunk: Chunk, pieces: list[TrainedPiece], used: set[nn.Parameter], scale: float | torch.Tensor
    ) -> None:
        """Updates the chunk. Collective: ranks with the chunk run it in one order."""
        chunk.shard.finish_sum()
        own, pieces = self._whole.memory(chunk), [one for one in pieces if one.parameter in used]
        gradients = None if chunk.shard.gradient_comes_along else chunk.shard.gradient()
        self._change(chunk, partial(self._add_momentum, pieces, scale, gradients, own))
        self._whole.change(chunk, own, partial(self._orthogonalize, chunk, used))
        self._change(chunk, partial(self._apply, pieces, own, chunk.shard.values_shard))

    def _change(self, chunk: Chunk, work: Callable[[int, list[torch.Tensor]], None]) -> None:
        """Calls ``work(first, arrays)`` on master and momentum, in slices if they are on disk. Raises DiskError."""
        slices = chunk.shard.change(work, self.in_memory(chunk))
        for one in slices:
            one.exception()  # until nobody writes any more
        for one in slices:
            one.result()

    def _add_momentum(
        self,
        pieces: list[TrainedPiece],
        scale: float | torch.Tensor,
        gradients: torch.Tensor | None,
        own: torch.Tensor,
        first: int,
        arrays: list[torch.Tensor],
    ) -> None:
        """Writes to `own`, which may be the memory of the `gradients`, the updates that are to be orthogonalized.

        `arrays` are master and momentum of the shard's elements from `first` on, and behind them the gradients, if
        `gradients` is None.
        """
        _, momentum, *behind = arrays
        for one, start, stop in _parts(pieces, first, first + momentum.numel()):
            options, kept = self._groups[one.group], momentum[start - first : stop - first]
            given = behind[0][start - first : stop - first] if gradients is None else gradients[start:stop]
            gradient = given.float() * scale
            kept.lerp_(gradient, 1 - options["momentum"])
            own[start:stop] = gradient.lerp(kept, options["momentum"]) if options["nesterov"] else kept

    def _orthogonalize(self, chunk: Chunk, used: set[nn.Parameter], update: torch.Tensor) -> None:
        """Orthogonalizes the matrices of this rank in a gathered `update`, and zeroes the others."""
        mine = []
        for matrix, owner in self._owned[chunk.spec.index]:
            if owner == chunk.communicator.rank and chunk.parameters[matrix.slot] in used:
                mine.append(matrix)
            else:
                part_of(update, matrix).zero_()
        for slot, of_parameter in groupby(mine, key=lambda matrix: matrix.slot):
            parameter = chunk.parameters[slot]
            cuts, options = self._cuts[parameter], self._groups[self._group_of[parameter]]
            for together in at_once(of_parameter, options):
                joined = [self._whole.join(part_of(update, matrix), cuts) for matrix in together]
                for matrix, whole in zip(together, orthogonalize(joined, options), strict=True):
                    part_of(update, matrix).copy_(slice_of(whole, cuts, chunk.communicator.rank))

    def _apply(
        self,
        pieces: list[TrainedPiece],
        own: torch.Tensor,
        values: torch.Tensor | None,
        first: int,
        arrays: list[torch.Tensor],
    ) -> None:
        """Changes the master by the orthogonalized updates in `own`, and copies it to the `values`, if they are apart.

        `arrays` as for `_add_momentum`. The values of parameters without a gradient come back, too.
        """
        master, *_ = arrays
        for one, start, stop in _parts(pieces, first, first + master.numel()):
            options, offset = self._groups[one.group], one.piece.offset - one.piece.start
            rate = float(options["lr"])
            master[start - first : stop - first].mul_(1 - rate * options["weight_decay"])
            cuts = self._cuts[one.parameter]
            for top, bottom, shape in bands(self._matrices[one.parameter], local_of(one.parameter).shape[-1]):
                low, high = max(top - offset, start), min(bottom - offset, stop)
                if low < high:
                    scaled = adjusted_rate(rate, options["adjust_lr_fn"], whole_shape(shape, cuts))
                    master[low - first : high - first].add_(own[low:high], alpha=-scaled)
        if values is not None:
            values[first : first + master.numel()].copy_(master)

    def finish(self) -> None:
        """Does nothing: no option of Muon changes in a step."""


def _parts(pieces: Sequence[TrainedPiece], first: int, last: int) -> Iterator[tuple[TrainedPiece, int, int]]:
    """Yields (piece, start, stop) of the elements of pieces among those from `first` to `last` of the shard."""
    for one in pieces:
        start, stop = max(one.piece.start, first), min(one.piece.stop, last)
        if start < stop:
            yield one, start, stop
