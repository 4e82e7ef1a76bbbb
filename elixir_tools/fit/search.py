"""The fastest plan for a step of a model, whole or in tiles.

Owns when parameters are cut into tiles, and their size: they help where blocks of the rCache, not state, fill a
device's memory, or where there are too few blocks to fetch a chunk while another one computes. Knows no model: the
caller traces each.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elixir_moe.errors import ConfigError, PlanError
from elixir_moe.ext.planner import Packings, PlanCandidate, Task, device_bytes_for, solve

_TILES_IN_DEVICE = 64
"""A tile is at most one part in so many of a device, or one row: a step holds a few tiles and their gradients, and
prefetches more."""
_BLOCKS_IN_DEVICE = 0.25
"""Fraction of a device above which blocks leave too little memory for state."""
_STALLED = 0.05
"""Fraction of a step above which smaller chunks, of which more fit, may hide what compute and fetches wait for."""
_FREED = 8
"""Most memory that tiles may free, in multiples of the largest parameter: twice its block and the block of its
gradient, with a margin."""
_WORTH = 0.99
"""Part of a step's seconds below which tiles are worth their trouble."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A planning problem and its fastest plan."""

    task: Task
    packings: Packings
    """The layouts of the search, for the same step in other memory."""
    choice: PlanCandidate | None
    reason: str
    """Why there is no plan."""
    seconds: float
    """Time of the search."""
    tiles: int | None = None
    """Bytes of the tiles in which the model was cut; None if it was not."""
    untiled: str | None = None
    """Why the model was not cut into tiles, which might have helped."""


def searched(task: Task, packings: Packings | None = None) -> Search:
    """The fastest plan for a task."""
    began, packings = time.perf_counter(), packings or Packings(task)
    reason, choice = "", None
    try:
        choice = solve(task, packings)
    except PlanError as error:
        reason = str(error)
    return Search(task=task, packings=packings, choice=choice, reason=reason, seconds=time.perf_counter() - began)


def fastest(
    task_of: Callable[[int | None], Task], packings_of: Callable[[Task, int | None], Packings] | None = None
) -> Search:
    """The fastest plan for the whole model, or for the model in tiles if they make it fit or faster.

    Args:
        task_of: the task for the bytes of tiles, None for the whole model. Raises ConfigError if it cannot be cut.
        packings_of: those that an earlier search has left, for a task and its tiles.
    """

    def search(task: Task, tiles: int | None) -> Search:
        return searched(task, None if packings_of is None else packings_of(task, tiles))

    whole = search(task_of(None), None)
    size = tile_bytes(whole.task, whole.choice, whole.packings)
    if size is None:
        return whole
    try:
        task = task_of(size)
    except ConfigError as error:
        return replace(whole, untiled=str(error).partition("\n")[0].removeprefix("tile: "))
    tiled = search(task, size)
    both = whole.seconds + tiled.seconds
    if tiled.choice is None or (
        whole.choice is not None and tiled.choice.seconds.step >= _WORTH * whole.choice.seconds.step
    ):
        return replace(whole, seconds=both)
    return replace(tiled, tiles=size, seconds=both)


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
    crowded = blocks > _BLOCKS_IN_DEVICE * task.capacity_bytes
    waits = candidate.seconds.stall > _STALLED * candidate.seconds.step
    return size if candidate.plan.offloaded and (crowded or waits) else None
