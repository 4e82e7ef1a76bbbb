"""The packing of parameters into chunks: offsets, shards, and the length of a chunk.

Owns the layout of a model and the choice of the chunk length. Pure: never touches a tensor or a process group.

A chunk of three parameters in a group of N = 4 ranks, in a block of the rCache (C is the length of every block)::

    0                 numel/N           numel/2           3*numel/4         numel          C
    |- shard of rank 0 -|- shard of rank 1 -|- shard of rank 2 -|- shard of rank 3 -|........|
    |== parameter 0 ==|..|====== parameter 1 ======|.|======= parameter 2 =======|..|........|
                       ^ parameters start on 64 bytes            zeros up to numel ^  ^ not sent, not stored

`numel` is rounded up so that all shards are equal and start on 64 bytes. With int8 moments, parameters and shards start
on whole blocks of codes, so that no shard cuts a block, and codes do not depend on the number of ranks. Only `numel`
elements are stored and sent. The rest of the block is unused, because all groups share one block length;
`waste_fraction` counts it.

A chunk begins where a repeated module begins (one whose name is a number) if the module then fits in one chunk instead
of several: a layer in one chunk is gathered as one unit. A module that backward recomputes as a whole is a unit
whatever its number of chunks, so for it fewer chunks are reason enough. A chunk group does this for all its modules, or
for none if that would waste more than `LAYERS_WASTE` of its blocks.
Sources: Elixir v1, sections IV-A (grouping, fused small groups) and V (fully symmetric partitioning); v2, A.2.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec, group_parameters
from elixir_moe.chunks.residence import ATTACHED, CACHED, IN_PLACE, RESIDENT, Residence
from elixir_moe.errors import PlanError
from elixir_moe.kernels import CODE_BLOCK

ALIGN_BYTES = 64
"""Parameters and shards start on a cache line, as in torch's own allocator; no kernel needs more."""
FUSE_BELOW = 1 / 4
"""A chunk group smaller than this fraction of a chunk becomes one small resident chunk of its own length."""
WASTE_ENOUGH = 0.02
"""The fraction of wasted bytes that `best_chunk_numel` accepts: half of what Elixir v2, 4.2, reports."""
LAYERS_WASTE = 0.04
"""The fraction of a chunk group's blocks that may be added so that repeated modules are cut less."""
LATENCY_BYTES = 1 << 24
"""Shorter collectives are latency-bound; torch's DDP uses buckets of 25 MiB."""
FINEST = 8
"""A model gets at least about this many chunks, even below `LATENCY_BYTES`: an rCache needs chunks to choose from."""
MATRICES_AT_ONCE_NUMEL = 1 << 18
"""Most elements of several matrices that are updated at once: larger ones gain nothing by it."""
_SEARCH_SPAN = 4
_MOST_TOGETHER = 4
"""Bytes of the widest elements that weights are trained in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter in its chunk."""

    param: int
    """Index of the parameter."""
    start: int
    """First element."""
    numel: int
    """Number of elements."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The elements of one parameter that are in one rank's shard of its chunk; possibly none."""

    start: int
    """First element, counted from the start of the shard."""
    numel: int
    """Number of elements."""
    offset: int
    """First element, counted in the flattened parameter."""

    @property
    def stop(self) -> int:
        """One past the last element, counted from the start of the shard."""
        return self.start + self.numel

    @property
    def here(self) -> slice:
        """The elements of the shard."""
        return slice(self.start, self.stop)

    @property
    def there(self) -> slice:
        """The elements of the flattened parameter."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSpec:
    """A flat buffer of consecutive parameters of one chunk group."""

    index: int
    """Position among all chunks, in order of first use."""
    key: ChunkGroupKey
    slots: tuple[Slot, ...]
    numel: int
    """Elements in use, zeros for alignment included: a multiple of `shards`."""
    shards: int
    """Number of shards: the ranks of its group, or 1 if the plan does not scatter."""
    residence: Residence
    """Where its gathered weights and its gradients are."""
    matrix_numel: int = 0
    """Elements of its largest matrix, if an optimizer updates whole matrices."""
    width: int = 0
    """Bytes of a block that the chunk needs for each of its C elements; 0 means the itemsize of its dtype."""

    @property
    def block_itemsize(self) -> int:
        """Bytes per element of a block that holds this chunk."""
        return self.width or self.key.dtype.itemsize

    @property
    def update_itemsize(self) -> int:
        """Bytes of an element of the update of whole matrices, which is sent as such or as the gradient's memory."""
        return self.key.dtype.itemsize if self.residence.in_shard else self.key.update_dtype.itemsize

    @property
    def matrices_at_once_numel(self) -> int:
        """Elements of the matrices that are updated at once: in fp32, several that are small."""
        together = min(self.numel, MATRICES_AT_ONCE_NUMEL) if self.key.iterates_in == torch.float32 else 0
        return max(self.matrix_numel, together)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.shards

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered chunk in its compute dtype."""
        return self.numel * self.key.dtype.itemsize

    def residence_at(self, *, on_device: bool) -> Residence:
        """The residence of the chunk given its tier. A whole chunk on the device is used in place, without a block."""
        if self.shards > 1 or not on_device:
            return self.residence
        overwritten = self.key.trainable and self.key.dtype != torch.float32
        return IN_PLACE if overwritten else ATTACHED

    @property
    def shows_only_weights(self) -> bool:
        """Whether gathered parameters view the shard and there is no other master: writing to them updates it."""
        return self.residence.in_shard and (self.key.master_in_values or not self.key.trainable)

    def widens(self, *, over_gloo: bool) -> bool:
        """Whether gradients are widened to fp32 before they are reduced.

        A reduce-scatter over gloo does not need this: it sends gradients unchanged and sums them in fp32.
        """
        summed = self.key.trainable and len(self.key.ranks) > 1
        wider = self.key.reduce_dtype.itemsize > self.key.dtype.itemsize
        return summed and wider and not (over_gloo and self.shards > 1)

    def reduced_bytes(self, *, over_gloo: bool) -> int:
        """Bytes of the gradients as a reduction sends them."""
        return self.numel * self.key.reduce_dtype.itemsize if self.widens(over_gloo=over_gloo) else self.nbytes

    def staging_bytes(self, *, over_gloo: bool) -> int:
        """Bytes of the staging buffer for a reduction.

        The buffer holds widened gradients, or the data that a reduce-scatter over gloo receives: one shard with two
        ranks.
        """
        if self.widens(over_gloo=over_gloo):
            return self.reduced_bytes(over_gloo=over_gloo)
        if not (over_gloo and self.shards > 1 and self.key.trainable):
            return 0
        return self.nbytes if self.shards > 2 else self.nbytes // 2

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element of global rank `rank`'s shard."""
        index = self.key.ranks.index(rank) if self.shards > 1 else 0
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """The piece of each parameter in global rank `rank`'s shard, in the order of `slots`; empty ones included."""
        low, high = self.shard_bounds(rank)

        def piece_of(slot: Slot) -> Piece:
            start, stop = (min(max(end, low), high) for end in (slot.start, slot.stop))
            return Piece(start=start - low, numel=stop - start, offset=min(max(low - slot.start, 0), slot.numel))

        return tuple(map(piece_of, self.slots))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All chunks of a model."""

    chunk_numel: int
    """C: elements of a block, one length for all chunk groups."""
    chunks: tuple[ChunkSpec, ...]
    block_itemsize: int
    """Bytes per element of a block: the most that a chunk in the rCache needs (`ChunkSpec.block_itemsize`)."""
    whole_layers: bool = True
    """`Plan.whole_layers`."""
    open_gradients: int | None = None
    """The most chunks whose gradients have a block at once; None until counted (`chunks.replay`)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one rCache block."""
        return self.chunk_numel * self.block_itemsize

    def with_residence(self, on_device: Collection[int]) -> "Layout":
        """Returns a copy whose chunks have the residence of their tier; `on_device` are those on the device."""
        homes = [chunk.residence_at(on_device=chunk.index in on_device) for chunk in self.chunks]
        chunks = tuple(
            chunk if chunk.residence is home else replace(chunk, residence=home)
            for chunk, home in zip(self.chunks, homes, strict=True)
        )
        widest = max((chunk.block_itemsize for chunk in chunks if chunk.residence is CACHED), default=0)
        return replace(
            self,
            chunk_numel=self.chunk_numel if widest else 0,
            chunks=chunks,
            block_itemsize=max(widest, 1),
            open_gradients=None,
        )

    @property
    def cached(self) -> tuple[ChunkSpec, ...]:
        """The chunks that use the rCache."""
        return tuple(chunk for chunk in self.chunks if chunk.residence is CACHED)

    @property
    def most_blocks(self) -> int:
        """Blocks for the weights of every cached chunk, and for all gradients that have a block at once."""
        groups = len({chunk.key for chunk in self.cached if chunk.key.trainable})
        return len(self.cached) + (groups if self.open_gradients is None else self.open_gradients)

    @property
    def waste_fraction(self) -> float:
        """The fraction of unused bytes in blocks and resident buffers if every chunk were gathered."""
        space = sum(self.block_bytes if chunk.residence is CACHED else chunk.nbytes for chunk in self.chunks)
        used = sum(slot.numel * chunk.key.dtype.itemsize for chunk in self.chunks for slot in chunk.slots)
        return 1 - used / space if space else 0.0


def build_layout(
    params: Sequence[ParamSpec], chunk_numel: int | None = None, *, scatter: bool = True, whole_layers: bool = True
) -> Layout:
    """Packs parameters, given in order of first use, into chunks of C = `chunk_numel` elements.

    Tied parameters get resident chunks of their own. Without `scatter`, every chunk is whole on every rank (the paper's
    S_FLAG). Without `whole_layers`, one chunk after the other is filled, wherever repeated modules begin. Raises
    PlanError if a parameter is longer than C.
    """
    chunk_numel = best_chunk_numel(params) if chunk_numel is None else chunk_numel
    chunks: list[ChunkSpec] = []
    together = bytes_together(params)
    for key, residence, indices in _streams(params, chunk_numel):
        shards = len(key.ranks) if scatter else 1
        most = chunk_numel * elements_for_one(key, together)
        if residence is CACHED:
            _check_fits(params, indices, chunk_numel, most)
        sizes = [params[i].numel for i in indices]
        packed = _pack(sizes, most if residence is CACHED else math.inf, alignment(key))
        if whole_layers and len(packed) > 1:
            modules = _repeated_modules([params[i] for i in indices])
            packed = _with_whole_layers(packed, sizes, modules, most, alignment(key))
        for first, starts, used in packed:
            slots = tuple(
                Slot(param=indices[first + k], start=start, numel=sizes[first + k]) for k, start in enumerate(starts)
            )
            numel = _round_up(max(used, 1), shards * alignment(key))  # at least 1, even if all parameters are empty
            matrix_numel = max(math.prod(params[slot.param].matrix) for slot in slots)
            chunks.append(
                ChunkSpec(
                    index=-1,
                    key=key,
                    slots=slots,
                    numel=numel,
                    shards=shards,
                    residence=residence,
                    matrix_numel=matrix_numel,
                )
            )
    chunks.sort(key=lambda chunk: chunk.slots[0].param)
    chunks = [replace(chunk, index=index) for index, chunk in enumerate(chunks)]
    cached = [chunk for chunk in chunks if chunk.residence is CACHED]
    needed = [-(-chunk.numel // elements_for_one(chunk.key, together)) for chunk in cached]
    length = max(chunk_numel, *needed) if cached else 0
    chunks = [
        replace(chunk, width=-(-chunk.nbytes // length))
        if chunk.residence is CACHED and chunk.numel > length
        else chunk
        for chunk in chunks
    ]
    return Layout(
        chunk_numel=length,
        whole_layers=whole_layers,
        chunks=tuple(chunks),
        block_itemsize=max((chunk.block_itemsize for chunk in chunks if chunk.residence is CACHED), default=1),
    )


def bytes_together(params: Sequence[ParamSpec]) -> int:
    """Returns how many one-byte elements (quantized weights) count as one of the C elements of a chunk.

    As many as fill one element of the widest chunk group that is large enough for blocks: a block is as wide as its
    widest chunk, and single bytes would use only a part of it.
    """
    plain = [p for p in params if not p.tied]
    narrow = max((p.numel for p in plain if p.key.dtype.itemsize == 1), default=0)
    if not narrow:
        return 1
    groups = group_parameters(plain)
    wide = {key: [plain[i].numel for i in indices] for key, indices in groups.items() if key.dtype.itemsize > 1}
    longest = max((*map(max, wide.values()), narrow // _MOST_TOGETHER))
    return max((key.dtype.itemsize for key, sizes in wide.items() if sum(sizes) >= longest * FUSE_BELOW), default=1)


def elements_for_one(key: ChunkGroupKey, together: int) -> int:
    """Returns how many elements of a chunk group count as one of the C elements, given `bytes_together`."""
    return together if key.dtype.itemsize == 1 else 1


def best_chunk_numel(params: Sequence[ParamSpec], *, stay: bool = False) -> int:
    """The smallest chunk length C with little waste, searched from the shortest sensible length to four times that.

    The shortest sensible length is the largest parameter, and at least `LATENCY_BYTES` in a model of `FINEST` times
    that size. Little waste is `WASTE_ENOUGH` of all blocks, or within 0.1 % of the least possible: below that, a finer
    rCache is worth more than fuller chunks. Waste falls only where a group needs one chunk less, so only those lengths
    are tried. Source: Elixir v1, IV-A, which picks the least waste in a range given by the user.

    Args:
        params: all parameters in order of first use.
        stay: leave out chunk groups of a single rank, unless there are no others: they are used in place on the device
            and need no block. So experts, most of a mixture, do not make its dense chunks longer.
    """
    together = bytes_together(params)
    streams = [
        _Stream([params[i].numel for i in indices if not params[i].tied], key, elements_for_one(key, together))
        for key, indices in group_parameters(params).items()
    ]
    largest = max((size for stream in streams for size in stream.sizes), default=0)
    if stay:
        streams = [stream for stream in streams if stream.ranks > 1] or streams
    total = sum(stream.total for stream in streams)
    widest = max((stream.itemsize for stream in streams), default=1)
    shortest = max(largest, min(LATENCY_BYTES // widest, total // FINEST))
    longest = max(shortest, min(shortest * _SEARCH_SPAN, total))
    lengths = sorted({shortest, *(length for stream in streams for length in stream.steps(shortest, longest))})
    wastes = [_waste(streams, length) for length in lengths]
    enough = max(WASTE_ENOUGH, min(wastes) + 0.001)
    return next(length for length, waste in zip(lengths, wastes, strict=True) if waste <= enough)


class _Stream:
    """The sizes of one chunk group, prepared for packing at many lengths; `together` elements count as one."""

    def __init__(self, sizes: list[int], key: ChunkGroupKey, together: int) -> None:
        self.sizes = sizes = [-(-size // together) for size in sizes]
        self.total = sum(sizes)
        self.itemsize = key.dtype.itemsize * together
        self.ranks = len(key.ranks)
        starts = list(accumulate((_round_up(size, alignment(key) // together) for size in sizes), initial=0))
        self._starts = starts[:-1]
        self._stops = [start + size for start, size in zip(starts, sizes, strict=False)]

    def small(self, chunk_numel: int) -> bool:
        """Whether the group is fused into one resident chunk."""
        return self.total < chunk_numel * FUSE_BELOW

    def chunks(self, chunk_numel: int) -> int:
        """The number of chunks that `_pack` makes at this length (at least the largest size). O(chunks log sizes)."""
        first = count = 0
        while first < len(self.sizes):
            first = bisect_right(self._stops, self._starts[first] + chunk_numel, first)
            count += 1
        return count

    def steps(self, shortest: int, longest: int) -> Iterator[int]:
        """Yields the lengths in a range at which the group starts to need fewer chunks, or becomes small."""
        fewest, length = self.chunks(longest), shortest
        while (count := self.chunks(length)) > fewest:
            length += 1 + bisect_left(range(length + 1, longest), 1 - count, key=lambda n: -self.chunks(n))
            yield length
        fused = int(self.total / FUSE_BELOW) + 1
        if shortest < fused <= longest:
            yield fused


def _waste(streams: Sequence[_Stream], chunk_numel: int) -> float:
    used = sum(stream.total * stream.itemsize for stream in streams)
    small = sum(stream.total * stream.itemsize for stream in streams if stream.small(chunk_numel))
    blocked = [stream for stream in streams if not stream.small(chunk_numel)]
    block_bytes = chunk_numel * max((stream.itemsize for stream in blocked), default=0)
    space = small + block_bytes * sum(stream.chunks(chunk_numel) for stream in blocked)
    return 1 - used / space if space else 0.0


def _streams(params: Sequence[ParamSpec], chunk_numel: int) -> Iterator[tuple[ChunkGroupKey, Residence, list[int]]]:
    """Yields (key, residence, parameter indices); each has its own chunks, packed in order of first use."""
    together = bytes_together(params)
    for key, indices in group_parameters(params).items():
        tied = [i for i in indices if params[i].tied]
        rest = [i for i in indices if not params[i].tied]
        if rest:
            most = chunk_numel * elements_for_one(key, together)
            small = sum(params[i].numel for i in rest) < most * FUSE_BELOW
            yield key, RESIDENT if small else CACHED, rest
        if tied:
            yield key, RESIDENT, tied


_Packed = list[tuple[int, list[int], int]]
"""For each chunk: index of its first parameter, start of each, elements used."""


def _pack(sizes: Sequence[int], limit: float, align: int, modules: "_Modules | None" = None) -> _Packed:
    """Packs consecutive sizes, each chunk until one does not fit.

    With `modules`, a chunk also ends where a module begins that then fits in one chunk instead of several, or, if it is
    recomputed as a whole, in fewer chunks.
    """
    packed, first, starts, used = _Packed(), 0, list[int](), 0
    for index, size in enumerate(sizes):
        start = _round_up(used, align)
        ends = start + size > limit
        for stop, at_once in () if ends or modules is None else modules.get(index, ()):
            inside = sizes[index:stop]
            fewest = _chunks_of(inside, limit, align)
            ends = ends or ((fewest == 1 or at_once) and fewest < _chunks_of(inside, limit, align, start))
        if starts and ends:
            packed.append((first, starts, used))
            first, starts, start = index, [], 0
        starts.append(start)
        used = start + size
    if starts:
        packed.append((first, starts, used))
    return packed


def _chunks_of(sizes: Sequence[int], limit: float, align: int, used: int = 0) -> int:
    """The number of chunks that consecutive sizes need if other parameters use the first `used` elements."""
    count = 1
    for size in sizes:
        start = _round_up(used, align)
        if start + size > limit:
            count, start = count + 1, 0
        used = start + size
    return count


def _with_whole_layers(packed: _Packed, sizes: Sequence[int], modules: "_Modules", limit: int, align: int) -> _Packed:
    """Returns a packing whose chunks begin where repeated modules begin; `packed` if that needs too many chunks."""
    aligned = _pack(sizes, limit, align, modules)
    return aligned if len(aligned) <= len(packed) * (1 + LAYERS_WASTE) else packed


_Modules = dict[int, list[tuple[int, bool]]]
"""{first parameter: [(one past the last parameter, whether backward recomputes the module as a whole)]}, outermost
module first."""


def _repeated_modules(params: Sequence[ParamSpec]) -> _Modules:
    """The repeated modules (whose name is a number) among consecutive parameters."""
    stops: dict[tuple[int, str], int] = {}
    first_of: dict[str, int] = {}
    for index, param in enumerate(params):
        parts = param.name.split(".")[:-1]
        around = [".".join(parts[: depth + 1]) for depth, part in enumerate(parts) if part.isdecimal()]
        first_of = {module: first_of.get(module, index) for module in around}
        stops.update({(first, module): index + 1 for module, first in first_of.items()})
    found = _Modules()
    for (first, _), stop in stops.items():
        regions = {param.region for param in params[first:stop]}
        found.setdefault(first, []).append((stop, len(regions) == 1 and None not in regions))
    return found


def _check_fits(params: Sequence[ParamSpec], indices: Sequence[int], chunk_numel: int, most: int) -> None:
    largest = max((params[i] for i in indices), key=lambda p: p.numel)
    if largest.numel > most:
        least = -(-largest.numel * chunk_numel // most)
        raise PlanError(
            f"parameter {largest.name!r} has {largest.numel} elements, more than chunk_numel={chunk_numel}: "
            f"set chunk_numel to at least {least}, or leave it out"
        )


def alignment(key: ChunkGroupKey) -> int:
    """The alignment in elements of the start of each parameter and shard."""
    return CODE_BLOCK if key.precision.moments == "int8" else ALIGN_BYTES // key.dtype.itemsize


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
