"""The place of a chunk's gathered weights and of its gradients on the device.

Owns `Residence`, which packing and the plan assign to each chunk. Pure: the runtime reads it and never changes it.
"""

from enum import Enum


class Residence(Enum):
    """The device memory for a chunk's gathered weights and gradients, in addition to its shard."""

    CACHED = "cached"
    """Weights are in a block of the rCache while they are used, and until another chunk needs the block. From the first
    gradient to the reduction, gradients are in another block. Costs no memory beyond the plan's blocks."""
    RESIDENT = "resident"
    """Weights are in a buffer of the chunk's own, which permanently takes `nbytes`. Gradients take `nbytes` more, from
    the first one to the reduction."""
    IN_PLACE = "in place"
    """Weights are the shard, which is the whole chunk on the device: no block. Gradients have their own memory until
    the reduction, and the reduced gradient overwrites the weights once nothing holds them. A few chunks do this at once
    (`GRADIENTS_ON_THEIR_WAY`)."""
    ATTACHED = "attached"
    """Weights are the shard, which is the whole chunk on the device, and parameters view it permanently: no block. No
    gradient overwrites it: a frozen chunk has none, and an fp32 chunk sums them in its second shard."""

    @property
    def in_shard(self) -> bool:
        """Whether gathered weights are the shard itself."""
        return self in (IN_PLACE, ATTACHED)


CACHED, RESIDENT, IN_PLACE, ATTACHED = Residence
"""The members as globals: a lookup in the class is slow, and they are read very often."""
