"""Where the gathered weights of a chunk are, and where its gradients are.

Owns `Residence`, which packing and the plan give to each chunk. Pure: the runtime reads it and never changes it.
"""

from enum import Enum


class Residence(Enum):
    """The memory that a chunk's gathered weights and gradients have on the device, beside the chunk's home."""

    CACHED = "cached"
    """Weights are in a block of the rCache while somebody uses them, and as long as nobody else wants the block. From
    the first gradient to the reduction, gradients are in another block. Costs nothing of its own: the plan's blocks are
    all there is."""
    RESIDENT = "resident"
    """Weights are in a block of the chunk's own, `nbytes` for good. Gradients have memory of their own, `nbytes` more,
    from the first one to the reduction."""
    IN_PLACE = "in place"
    """Weights are the shard, which is the whole chunk on the device: no block. Gradients have memory of their own until
    the reduction, and the reduced gradient overwrites the weights when nobody holds them; a few chunks at once are on
    their way (`GRADIENTS_ON_THEIR_WAY`)."""
    ATTACHED = "attached"
    """Weights are the shard, which is the whole chunk on the device, and parameters view it for good: no block. No
    gradient overwrites it: a frozen chunk has none, and an fp32 one sums them in the memory beside its master."""

    @property
    def in_shard(self) -> bool:
        """Whether gathered weights are the shard itself."""
        return self in (IN_PLACE, ATTACHED)


CACHED, RESIDENT, IN_PLACE, ATTACHED = Residence
"""The members as globals: looking a member up in its class is slow, and they are read all the time."""
