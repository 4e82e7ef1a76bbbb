"""Whether to try tiles, and their size: they help where blocks of the rCache, not state, fill a device's memory.

Owns the two rules. Never cuts a parameter: `em.tile` does, and a search with the tiles decides if they pay off.
"""

import math

from elixir_moe.ext.planner import Packings, PlanCandidate, Task, device_bytes_for

_TILES_IN_DEVICE = 64
"""A tile is at most one part in so many of a device, or one row: a step holds a few tiles and their gradients, and
prefetches more."""
_BLOCKS_IN_DEVICE = 0.25
"""Fraction of a device above which blocks leave too little memory for state."""
_FREED = 8
"""Most memory that tiles may free, in multiples of the largest parameter: twice its block and the block of its
gradient, with a margin."""


def tile_bytes(task: Task, candidate: PlanCandidate | None, packings: Packings | None = None) -> int | None:
    """Returns the bytes of the largest tile to try, a power of two, in the step's dtype; None if tiles do not help.

    Args:
        task: the problem, without tiles.
        candidate: its solution; None if no plan fits.
        packings: the packings of its search, if available.
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
