"""The gradients of one chunk, from autograd to the shard.

Owns their memory until the reduction, and reduced ones that wait for the values they overwrite. Only `reductions`
changes it. Gradients are never written into a block that holds weights.
"""

from collections.abc import Sequence

import torch

from elixir_moe.chunks.packing import ChunkSpec
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.blocks import Block
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.torch_private import foreach_copy_


class GradientBuffer:
    """The gradients of one backward, at their parameters' places in a flat tensor."""

    def __init__(
        self,
        chunk: Chunk,
        gaps: Sequence[tuple[int, int]],
        memory: torch.Tensor,
        wire: torch.Tensor | None = None,
        views: list[torch.Tensor] | None = None,
        *,
        adds: bool = False,
    ) -> None:
        """`views` are the parameters' views of `memory`, and `gaps` its elements of no parameter, as (start, stop).

        `wire` is the same memory, for collectives.
        `adds`: the memory holds the sum of earlier backwards.
        """
        self._chunk, self._gaps, self._memory, self._adds = chunk, gaps, memory, adds
        self._wire = memory if wire is None else wire
        self._views = chunk.views(memory) if views is None else views
        self._copied: set[int] = set()

    def add(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Stores gradients of parameters, given by index, or adds them to earlier ones.

        One launch copies several that all come first.
        """
        indices = [index for index, _ in gradients]
        views = [self._views[index] for index in indices]
        several = len(indices) > 1 and len(set(indices)) == len(indices)
        if several and not self._adds and self._copied.isdisjoint(indices):
            foreach_copy_(views, [gradient for _, gradient in gradients])
            self._copied.update(indices)
            return
        for (index, gradient), view in zip(gradients, views, strict=True):
            (view.add_ if self._adds or index in self._copied else view.copy_)(gradient)
            self._copied.add(index)

    def move_out(self) -> None:
        """Moves the gradients to new memory."""
        self._memory = self._wire = self._memory.clone()
        self._views = self._chunk.views(self._memory)

    def complete(self) -> torch.Tensor:
        """Zeroes elements without a gradient; returns the tensor to sum over the ranks, (numel,)."""
        if not self._adds:
            for index, view in enumerate(self._views):
                if index not in self._copied:
                    view.zero_()
            for start, stop in self._gaps:
                self._memory[start:stop].zero_()
        return self._wire


class Gradients:
    """The gradients of one chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._gaps = _gaps(chunk.spec)
        self.pending: list[tuple[int, torch.Tensor]] = []
        """(index, gradient) of gradients not yet copied to the buffer."""
        self.buffer: GradientBuffer | None = None
        """Set from `open` until the reduction."""
        self.block: Block | None = None
        """The block of the rCache that holds the buffer."""
        self.reduction: Work | None = None
        """The last reduction; on a GPU it may still run on its stream."""
        self.waiting: list[tuple[torch.Tensor, float | torch.Tensor | None]] = []
        """(reduced gradient, sum of squares), waiting until nobody holds the values that the gradient overwrites."""

    def open(self) -> None:
        """Chooses the memory for the gradients of a backward.

        Attached chunks sum in the shard. If all ranks hold a sum there, one keeps it and the others start at zero, so
        that the reduction adds it once.
        """
        chunk = self.chunk
        if chunk.spec.residence is ATTACHED:
            memory = chunk.shard.sum_memory
            if chunk.shard.has_gradient and chunk.communicator.index:
                memory.zero_()
            self.buffer = GradientBuffer(chunk, self._gaps, memory, adds=chunk.shard.has_gradient)
        elif self.block is not None:
            memory = self.block.claim(chunk.spec)
            views = self.block.param_views(chunk.spec.index, memory, chunk.views)
            self.buffer = GradientBuffer(chunk, self._gaps, memory, self.block.wire(chunk.spec), views)
        else:
            memory = torch.empty(chunk.spec.numel, dtype=chunk.spec.key.dtype, device=chunk.device)
            self.buffer = GradientBuffer(chunk, self._gaps, memory)

    def copy_pending(self) -> None:
        """Copies the pending gradients to the buffer."""
        assert self.buffer is not None
        self.buffer.add(self.pending)
        self.pending.clear()

    def order_behind_reduction(self) -> None:
        """Orders the current stream behind the last reduction; the host too if it will read the gradient."""
        if self.reduction is None:
            return
        host = self.chunk.shard.tier is not Tier.DEVICE and self.chunk.shard.gradient_moves
        (self.reduction.synchronize if host else self.reduction.wait)()

    def drop_unreduced(self) -> None:
        """Drops gradients that are not reduced yet."""
        self.buffer = self.block = None
        self.pending.clear()

    def clear(self) -> None:
        """Drops reduced gradients without an update."""
        self.waiting.clear()
        self.chunk.shard.clear_gradient()


def _gaps(spec: ChunkSpec) -> list[tuple[int, int]]:
    """(start, stop) of elements that belong to no parameter."""
    ends = [0, *(slot.stop for slot in spec.slots)]
    starts = [*(slot.start for slot in spec.slots), spec.numel]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
