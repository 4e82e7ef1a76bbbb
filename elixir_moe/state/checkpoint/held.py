"""The elements of each logical parameter that a rank holds.

Owns the mapping from a wrapped model to `HeldPiece`: the position in its logical parameter of each piece on this rank.
Saving and loading use it in opposite directions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import UsageError
from elixir_moe.memory.elements import Elements
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.rules import UNCUT, pattern_of
from elixir_moe.parallel.state_dict import modules_with_extra_state, persistent_buffers
from elixir_moe.parallel.tiles import tile_of, whole_shape
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.phase import OPEN
from elixir_moe.state.checkpoint.shard_ranges import Span
from elixir_moe.state.checkpoint.values import encode
from elixir_moe.state.wrapped import Wrapped, check_as_wrapped
from elixir_moe.torch_private import sparse_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPiece:
    """A piece on this rank, or a part of one, and its position in the logical parameter."""

    name: str
    chunk: Chunk
    index: int
    """Position of the parameter in the chunk."""
    span: Span
    here: slice
    """Position of the elements in the shard."""
    global_shape: tuple[int, ...]
    """Shape of the logical parameter."""
    grid: tuple[int, ...]
    """Shape of the logical parameter under the pattern's `view`, of which `span` is a part."""

    @property
    def parameter(self) -> nn.Parameter:
        return self.chunk.parameters[self.index]

    @property
    def values(self) -> Elements:
        """The flat elements in the shard: fp32 masters of trainable parameters, else weights in the compute dtype."""
        return self.chunk.shard.weights()[self.here]

    def cut(self, start: int, stop: int) -> "HeldPiece":
        """Returns the part inside elements `start` .. `stop` of the chunk's shard."""
        low, high = max(self.here.start, start), min(self.here.stop, stop)
        moved = low - self.here.start
        span = replace(self.span, start=self.span.start + moved, stop=self.span.start + moved + max(0, high - low))
        return replace(self, span=span, here=slice(low, max(low, high)))


def held_pieces(wrapped: Wrapped) -> Iterator[HeldPiece]:
    """Yields the pieces of all parameters on this rank, including empty ones."""
    for chunk in wrapped.scheduler.chunks:
        for index, parameter in enumerate(chunk.parameters):
            yield _held(wrapped.spec.names[parameter][0], chunk, index)


def _held(name: str, chunk: Chunk, index: int) -> HeldPiece:
    piece, parameter, shape = chunk.pieces[index], chunk.parameters[index], tuple(chunk.locals[index].shape)
    pattern, tile = pattern_of(parameter) or UNCUT, tile_of(parameter)
    first = 0
    if tile is not None:  # its rows are consecutive elements of the whole slice
        first, shape = tile.start * math.prod(shape[1:]), whole_shape(parameter)
    offset, cell = pattern.local_offset(shape), pattern.cell_shape(shape)
    return HeldPiece(
        name=name,
        chunk=chunk,
        index=index,
        span=Span(offset=offset, shape=cell, start=first + piece.there.start, stop=first + piece.there.stop),
        here=piece.here,
        global_shape=pattern.global_shape(shape),
        grid=pattern.grid_shape(shape),
    )


def share_of(chunk: Chunk) -> tuple[int, int]:
    """Returns (start, stop) of the shard's elements that this rank writes: all, or its part of a replicated chunk."""
    ranks, numel = chunk.spec.key.ranks, chunk.spec.shard_numel
    if chunk.spec.shards > 1:
        return 0, numel
    index = ranks.index(chunk.communicator.rank)
    return index * numel // len(ranks), (index + 1) * numel // len(ranks)


def wrapped_of(model: nn.Module, optimizer: Any) -> Wrapped:
    """Returns the record that `wrap` left on the model.

    Raises UsageError without one, for another optimizer, for a closed model, and for one that has changed since.
    """
    wrapped: Wrapped | None = getattr(model, "_elixir", None)
    if wrapped is None or not isinstance(optimizer, ShardedOptimizer):
        raise UsageError("a checkpoint needs a model and an optimizer that went through em.wrap")
    if optimizer is not wrapped.optimizer:
        raise UsageError("the optimizer belongs to another model: pass both as em.wrap returned them")
    wrapped.phase.check(OPEN, "")
    check_as_wrapped(model, wrapped)
    return wrapped


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns {first name: buffer} of the buffers that torch saves; a sparse one in parts, such as ``name[values]``."""
    return {
        f"{names[0]}{part}": tensor
        for buffer, names in persistent_buffers(model).items()
        for part, tensor in _parts(buffer)
    }


def _parts(buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a buffer: itself, or views of the parts of a sparse one."""
    if buffer.layout is torch.strided:
        yield "", buffer
    elif buffer.layout is torch.sparse_coo:
        indices, values = sparse_parts(buffer)
        yield "[sorted indices]" if buffer.is_coalesced() else "[indices]", indices
        yield "[values]", values
    else:
        rows = buffer.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield "[crow_indices]" if rows else "[ccol_indices]", buffer.crow_indices() if rows else buffer.ccol_indices()
        yield "[col_indices]" if rows else "[row_indices]", buffer.col_indices() if rows else buffer.row_indices()
        yield "[values]", buffer.values()


def extra_states_of(model: nn.Module) -> dict[str, Any]:
    """Returns {key: encoded extra state} of each module. Raises CheckpointError for a value that has no encoding."""
    states = {key: module.get_extra_state() for key, module in modules_with_extra_state(model).items()}
    return {
        key: encode(state, f"the extra state {key!r}") for key, state in states.items()
    }  # all ranks have read theirs
