"""The memory of the rCache: blocks, and the proof that nobody still reads one that is to be written.

Owns the blocks and the buffers of resident chunks. Which chunk goes where is `policy`'s decision.

A block may be written when the operation that last used it has ended and no tensor shares its storage. The policy
only gives away chunks that nothing holds, so the second is true already, but for a reader nobody could foresee: user
code that keeps a view of a weight. Such a reader keeps the old storage, and the block takes a new one: more memory
for a while, counted as `blocks_replaced`, never stale bytes. Source: Elixir v1, VI; v2, section 3 ("rCache has
n_block storage blocks of the same length").
"""

import torch

from elixir_moe.chunks.collectives import Ticket
from elixir_moe.chunks.layout import ChunkSpec, Layout
from elixir_moe.chunks.statistics import Statistics


class Block:
    """`nbytes` of device memory for one gathered chunk at a time."""

    def __init__(self, nbytes: int, device: torch.device, statistics: Statistics) -> None:
        self._statistics = statistics
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._wire = torch.from_dlpack(self._memory)
        self._idle_uses = storage_uses(self._memory)
        self.busy: Ticket | None = None
        """The operation that must end before the block is written again."""

    def claim(self, spec: ChunkSpec) -> torch.Tensor:
        """The buffer for `spec`'s chunk, (numel,) in its compute dtype, safe to write on the current stream."""
        if self.busy is not None:
            self.busy.wait()
            self.busy = None
        if storage_uses(self._memory) > self._idle_uses:
            self._replace()
        return self._memory[: spec.nbytes].view(spec.key.dtype)

    def unread(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer`, or a copy of it in new memory if anybody else reads what it is a view of."""
        if storage_uses(self._memory) <= self._idle_uses + 1:
            return buffer
        self._replace()
        return self._memory[: buffer.nbytes].view(buffer.dtype).copy_(buffer)

    def wire(self, spec: ChunkSpec) -> torch.Tensor:
        """The same memory for collectives, which may keep their tensors for a moment after they have ended."""
        return self._wire[: spec.nbytes].view(spec.key.dtype)

    def _replace(self) -> None:
        self._statistics.blocks_replaced += 1
        self._memory = torch.zeros_like(self._memory)
        self._wire = torch.from_dlpack(self._memory)


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors, views included, use the storage of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


class RCache:
    """All blocks: those shared by the chunks that come and go, and one for each resident chunk."""

    def __init__(self, layout: Layout, blocks: int, device: torch.device, statistics: Statistics) -> None:
        self.blocks = [Block(layout.block_bytes, device, statistics) for _ in range(blocks)]
        self.resident = {spec.index: Block(spec.nbytes, device, statistics) for spec in layout.chunks if spec.resident}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block._memory.nbytes for block in (*self.blocks, *self.resident.values()))
