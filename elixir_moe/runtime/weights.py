"""Where the weights of one chunk are gathered.

Owns their state and their block, and what the parameters view. Only `gathers` changes it.

    state      weights are in                             next state
    SHARDED    only the shards                            GATHERING
    GATHERING  a block or the shard, being filled         GATHERED
    GATHERED   a block or the shard, parameters view it   SHARDED

An `ATTACHED` chunk is gathered once and stays gathered.
"""

from enum import Enum

import torch

from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.blocks import Block
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.torch_private import DisableTorchFunctionSubclass


class WeightState(Enum):
    """The state of a chunk's weights; see the table above."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


SHARDED, GATHERING, GATHERED = WeightState
"""The members as globals: looking a member up in its class is slow, and they are read all the time."""

_LEGAL = {(SHARDED, GATHERING), (GATHERING, GATHERED), (GATHERED, SHARDED)}


class Weights:
    """The gathered weights of one chunk."""

    def __init__(self, chunk: Chunk, block: Block | None) -> None:
        """`block`: that of a chunk which shares no blocks."""
        self.chunk = chunk
        self.state = SHARDED
        self.block = block
        """The block of the weights; a chunk that shares no blocks always has the same one."""
        self.buffer: torch.Tensor | None = None
        """(numel,) in the compute dtype while the weights are in a block."""
        self.gather: Work | None = None
        """The gather, from its begin until the weights leave; each stream waits for it before it uses them."""
        self.holds = 0
        """Number of uses that have not ended; for a chunk that shares no blocks."""

    def move(self, to: WeightState) -> None:
        """Changes the state; asserts that the table allows it."""
        assert (self.state, to) in _LEGAL, f"{self.chunk.label}: {self.state.value} -> {to.value} is not legal"
        self.state = to

    @property
    def views(self) -> list[torch.Tensor]:
        """The parameters' views of the buffer, which the block keeps for the next time."""
        assert self.buffer is not None and self.block is not None
        return self.block.param_views(self.chunk.spec.index, self.buffer, self.chunk.views)

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's part of the buffer, (shard_numel,)."""
        assert self.buffer is not None
        return self.chunk.own_part(self.buffer)

    def attach(self) -> None:
        """Makes the parameters views of the buffer."""
        self.chunk.show(self.views)

    def detach(self) -> None:
        """Makes the parameters placeholders and drops the buffer."""
        self.chunk.hide()
        self.buffer = self.gather = None

    def moved(self) -> str | None:
        """The name of a gathered parameter that is not in the buffer, as after ``parameter.data = …`` in forward."""
        if self.buffer is None or self.state is not GATHERED:
            return None
        base, size, chunk = self.buffer.data_ptr(), self.buffer.itemsize, self.chunk
        with DisableTorchFunctionSubclass():
            for local, slot, name in zip(chunk.locals, chunk.spec.slots, chunk.names, strict=True):
                if local.numel() and local.data_ptr() != base + slot.start * size:
                    return name
        return None

    def reset(self) -> None:
        """Drops gathered weights; an `ATTACHED` chunk that is gathered stays so."""
        self.holds = 0
        if self.chunk.spec.residence is not ATTACHED or self.state is GATHERING:
            self.detach()
            self.state = SHARDED
