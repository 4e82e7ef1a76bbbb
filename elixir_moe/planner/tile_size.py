"""Whether tiles are worth a try, and of which size: where blocks of the rCache, and not state, take a device's memory.

Owns the two rules. Cuts nothing: `wrapping.tiling` does, and a search with the tiles says whether they were worth it.
"""

import math

from elixir_moe.planner.solve import Packings, PlanCandidate, Task, device_bytes_for

_TILES_IN_DEVICE = 64
"""A tile is at most this part of a device, or one row: a step holds a few and their gradients, and prefetches more."""
_BLOCKS_IN_DEVICE = 0.25
"""Part of a device from which on blocks are taken to be in the way of state."""
_FREED = 8
"""Most memory that tiles may free, in largest parameters: a block and one for its gradient, twice, and room to spare.
"""


def tile_bytes(task: Task, candidate: PlanCandidate | None, packings: Packings | None = None) -> int | None:
    """Bytes of the largest tile to try, a power of two, in the dtype of the step; None if tiles are no help.

    Args:
        task: the problem, without tiles.
        candidate: its solution; None if no plan fits.
        packings: those of its search, if they are at hand.
    """
    sizes = [(p.numel * p.key.dtype.itemsize, p.shape[0]) for p in task.profile.params if p.shape and not p.tied]
    largest = max((nbytes for nbytes, _ in sizes), default=0)
    size: int = 2 ** (max(task.capacity_bytes // _TILES_IN_DEVICE, 1).bit_length() - 1)
    if largest <= size:
        return None
    row = max(math.ceil(nbytes / rows) for nbytes, rows in sizes if nbytes > size)
    size = max(size, 2 ** (row - 1).bit_length())
    if largest <= size:
        return None
    if candidate is None:
        return size if device_bytes_for(task, packings) - task.allowed_bytes <= _FREED * largest else None
    blocks = candidate.plan.blocks(candidate.layout) * candidate.layout.block_bytes
    return size if candidate.plan.offloaded and blocks > _BLOCKS_IN_DEVICE * task.capacity_bytes else None
