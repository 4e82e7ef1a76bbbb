"""Where every parameter lies: chunks, offsets, shards.

Owns the packing of parameters into chunks and the choice of the chunk length. Pure: no tensor, no process group.

A chunk of three parameters in a group of N = 4 ranks, in a block of the rCache (C is the length of every block)::

    0                 numel/N           numel/2           3*numel/4         numel          C
    |- shard of rank 0 -|- shard of rank 1 -|- shard of rank 2 -|- shard of rank 3 -|........|
    |== parameter 0 ==|..|====== parameter 1 ======|.|======= parameter 2 =======|..|........|
                       ^ parameters start on 64 bytes            zeros up to numel ^  ^ not sent, not stored

`numel` is rounded up so that all shards are equal and start on 64 bytes. Only `numel` elements are stored at home and
sent; the rest of the block is the price of one length for all groups, and what `waste_fraction` counts.
Sources: Elixir v1, sections IV-A (grouping, fused small groups) and V (fully symmetric partitioning); v2, A.2.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elixir_moe.chunks.group import ChunkGroupKey, ParamSpec, group_parameters
from elixir_moe.errors import PlanError

ALIGN_BYTES = 64
"""Parameters and shards start on a cache line: what torch's own allocator gives, and all that kernels ask for."""
FUSE_BELOW = 1 / 4
"""A chunk group smaller than this part of a chunk becomes one small resident chunk of its own length."""
_SEARCH_SPAN = 4
_SEARCH_STEPS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter in its chunk."""

    param: int
    """Index into the list of parameters."""
    start: int
    """First element."""
    numel: int
    """Number of elements."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSpec:
    """A flat buffer of consecutive parameters of one chunk group."""

    index: int
    key: ChunkGroupKey
    slots: tuple[Slot, ...]
    numel: int
    """Elements in use, zeros for alignment included: a multiple of `shards`."""
    shards: int
    """Into how many shards it is scattered: the ranks of its group, or 1 where the plan replicates."""
    resident: bool
    """Has a buffer of its own instead of a block of the rCache."""

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.shards

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered chunk in its compute dtype."""
        return self.numel * self.key.dtype.itemsize

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element of global rank `rank`'s shard."""
        index = self.key.ranks.index(rank) if self.shards > 1 else 0
        return index * self.shard_numel, (index + 1) * self.shard_numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All chunks of a model."""

    chunk_numel: int
    """C: elements of a block, one length for all chunk groups."""
    chunks: tuple[ChunkSpec, ...]
    block_itemsize: int
    """Bytes of an element of a block: that of the widest compute dtype of any chunk that uses one."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one rCache block."""
        return self.chunk_numel * self.block_itemsize

    @property
    def cached(self) -> tuple[ChunkSpec, ...]:
        """The chunks that come and go through the rCache."""
        return tuple(chunk for chunk in self.chunks if not chunk.resident)

    @property
    def waste_fraction(self) -> float:
        """Part of all block and resident space that no parameter fills, were every chunk gathered."""
        space = sum(chunk.numel if chunk.resident else self.chunk_numel for chunk in self.chunks)
        used = sum(slot.numel for chunk in self.chunks for slot in chunk.slots)
        return 1 - used / space if space else 0.0


def build_layout(params: Sequence[ParamSpec], chunk_numel: int | None = None, *, scatter: bool = True) -> Layout:
    """Packs parameters, given in order of first use, into chunks.

    Args:
        params: all parameters; resident (tied) ones get chunks of their own.
        chunk_numel: the chunk length C in elements; by default the length that wastes least (`best_chunk_numel`).
        scatter: False keeps every chunk whole on every rank (the paper's S_FLAG).

    Raises:
        PlanError: `chunk_numel` is smaller than the largest parameter.
    """
    chunk_numel = best_chunk_numel(params) if chunk_numel is None else chunk_numel
    chunks: list[ChunkSpec] = []
    for key, resident, indices in _streams(params, chunk_numel):
        shards = len(key.ranks) if scatter else 1
        if not resident:
            _check_fits(params, indices, chunk_numel)
        sizes = [params[i].numel for i in indices]
        for first, starts, used in _pack(sizes, math.inf if resident else chunk_numel, _align(key)):
            slots = tuple(
                Slot(param=indices[first + k], start=start, numel=sizes[first + k]) for k, start in enumerate(starts)
            )
            numel = _round_up(used, shards * _align(key))
            chunks.append(
                ChunkSpec(index=len(chunks), key=key, slots=slots, numel=numel, shards=shards, resident=resident)
            )
    cached = [chunk for chunk in chunks if not chunk.resident]
    return Layout(
        chunk_numel=max((chunk_numel, *(chunk.numel for chunk in cached))) if cached else 0,
        chunks=tuple(chunks),
        block_itemsize=max((chunk.key.dtype.itemsize for chunk in cached), default=1),
    )


def best_chunk_numel(params: Sequence[ParamSpec]) -> int:
    """The chunk length that wastes least, among lengths from the largest parameter to a few times that.

    Of lengths that waste equally (to 0.1 %) the smallest is taken: a finer rCache. Source: Elixir v1, IV-A.
    """
    groups = [
        (_align(key), [params[i].numel for i in indices if not params[i].resident])
        for key, indices in group_parameters(params).items()
    ]
    largest = max((size for _, sizes in groups for size in sizes), default=0)
    total = sum(size for _, sizes in groups for size in sizes)
    candidates = {largest * (_SEARCH_STEPS + step) // _SEARCH_STEPS for step in range(_SEARCH_STEPS * (_SEARCH_SPAN - 1))}
    candidates |= set(_natural_lengths(groups, largest * _SEARCH_SPAN))
    usable = [c for c in candidates if largest <= c <= max(total, largest)]
    return min(usable, key=lambda c: (round(_waste(groups, c), 3), c), default=0)


def _waste(groups: Sequence[tuple[int, list[int]]], chunk_numel: int) -> float:
    space = used = 0
    for align, sizes in groups:
        total = sum(sizes)
        used += total
        small = total < chunk_numel * FUSE_BELOW
        space += total if small else chunk_numel * sum(1 for _ in _pack(sizes, chunk_numel, align))
    return 1 - used / space if space else 0.0


def _natural_lengths(groups: Sequence[tuple[int, list[int]]], limit: int) -> Iterator[int]:
    """Lengths at which a chunk ends exactly behind a parameter: runs from each of the first few of a group."""
    for align, sizes in groups:
        for first in range(min(8, len(sizes))):
            used = 0
            for size in sizes[first : first + 128]:
                used = _round_up(used, align) + size
                if used > limit:
                    break
                yield used


def _streams(params: Sequence[ParamSpec], chunk_numel: int) -> Iterator[tuple[ChunkGroupKey, bool, list[int]]]:
    """(key, resident, parameter indices): each yields chunks of its own, in order of first use."""
    for key, indices in group_parameters(params).items():
        tied = [i for i in indices if params[i].resident]
        rest = [i for i in indices if not params[i].resident]
        if rest:
            small = sum(params[i].numel for i in rest) < chunk_numel * FUSE_BELOW
            yield key, small, rest
        if tied:
            yield key, True, tied


def _pack(sizes: Sequence[int], limit: float, align: int) -> Iterator[tuple[int, list[int], int]]:
    """Packs consecutive sizes until one does not fit; yields (index of the first, start of each, elements used)."""
    first, starts, used = 0, list[int](), 0
    for index, size in enumerate(sizes):
        start = _round_up(used, align)
        if starts and start + size > limit:
            yield first, starts, used
            first, starts, start = index, [], 0
        starts.append(start)
        used = start + size
    if starts:
        yield first, starts, used


def _check_fits(params: Sequence[ParamSpec], indices: Sequence[int], chunk_numel: int) -> None:
    largest = max((params[i] for i in indices), key=lambda p: p.numel)
    if largest.numel > chunk_numel:
        raise PlanError(
            f"parameter {largest.name!r} has {largest.numel} elements, more than chunk_numel={chunk_numel}: "
            f"set chunk_numel to at least {largest.numel}, or leave it out"
        )


def _align(key: ChunkGroupKey) -> int:
    return ALIGN_BYTES // key.dtype.itemsize


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
