"""Frozen parameters that a checkpoint identifies by a hash but does not hold.

Owns this hash, which is independent of the layout: over the elements of the logical parameter, it sums each element's
bits times an odd number derived from its position, modulo 2^64. Every rank sums over the elements that it holds, and
the sums of all ranks are added. The hash tells different weights apart; it does not protect against forgery.

Each frozen shard is read once. A chunk keeps the sums of this rank until one of its parameters is written.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from elixir_moe.distributed.all_ranks import raise_on_all_ranks
from elixir_moe.errors import CheckpointError
from elixir_moe.state.checkpoint.held import HeldPiece, held_pieces, share_of
from elixir_moe.state.checkpoint.manifest import FrozenRecord
from elixir_moe.state.checkpoint.shard_ranges import Span, rectangles
from elixir_moe.state.safetensors_format import name_of
from elixir_moe.state.wrapped import Wrapped

_RUN_NUMEL = 1 << 16
"""Elements hashed at once; the intermediate results fit in a core's cache."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Odd, with about as many ones as zeros: 2^64 over the golden ratio, and a factor of splitmix64."""


def frozen_records(wrapped: Wrapped, process_group: dist.ProcessGroup) -> dict[str, FrozenRecord]:
    """Returns {first name: shape, dtype and hash} of the frozen parameters, equal on all ranks. Collective."""
    holdings = [held for held in held_pieces(wrapped) if not held.chunk.spec.key.trainable]

    def sums_here() -> dict[str, int]:
        writes = wrapped.scheduler.writes
        writes.keep_all()
        sums: dict[str, int] = {}
        for held in holdings:
            sums[held.name] = sums.get(held.name, 0) + writes.kept_sum(
                (held.chunk.spec.index, held.index), partial(_sum_here, held)
            )
        return sums

    found = raise_on_all_ranks("hashed the frozen weights", sums_here, process_group, error=CheckpointError)
    totals = {name: sum(sums.get(name, 0) for sums in found) % 2**64 for name in found[0]}
    return {
        held.name: FrozenRecord(
            shape=held.global_shape, dtype=name_of(held.values.dtype, held.name), digest=f"{totals[held.name]:016x}"
        )
        for held in holdings
    }


def _sum_here(held: HeldPiece) -> int:
    """Returns this rank's part of the hash of a parameter: that of the elements which no other rank adds."""
    mine, total = held.cut(*share_of(held.chunk)), 0
    for start in range(mine.here.start, mine.here.stop, _RUN_NUMEL):
        run = mine.cut(start, start + _RUN_NUMEL)
        values = run.values.read().reshape(-1)
        bits = values.view(_BITS[values.itemsize])
        for first, places in _places(run.span, held.grid, values.device):
            total += int(_odd(places).mul_(bits[first : first + places.numel()]).sum())
    return total % 2**64


def _places(span: Span, grid: tuple[int, ...], device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first element in the run, row-major positions in the parameter) for each box of the run."""
    strides = [math.prod(grid[dim + 1 :]) for dim in range(len(grid))]
    for first, offset, shape in rectangles(span):
        places = torch.zeros(1, dtype=torch.int64, device=device)
        for begin, length, stride in zip(offset, shape, strides, strict=True):
            steps = torch.arange(begin, begin + length, device=device) * stride
            places = (places[:, None] + steps).reshape(-1)
        yield first, places


def _odd(places: torch.Tensor) -> torch.Tensor:
    """Turns each position into an odd number spread over all 64 bits, in place. Products wrap around."""
    for factor in _FACTORS:
        places *= factor
        places ^= places >> 32
    places |= 1
    return places
