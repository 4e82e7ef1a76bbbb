"""The bytes that a plan needs on one rank, for each chunk at its tier and for all chunks together.

Owns `Ledger`, which updates these bytes while chunks move between tiers, and `Footprint`, a reading of it. Pure: never
allocates memory or chooses a tier. Source: Elixir v2, Table 1, where L_c is the bytes of a compute element, and
L_os * F_os the bytes of its master and moments.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import torch

from elixir_moe.chunks.cache_policy import LOOKAHEAD
from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.param_spec import StateArray
from elixir_moe.chunks.plan import Plan, Tier, keeps_values, reads_disk, size_text
from elixir_moe.chunks.residence import CACHED, IN_PLACE, RESIDENT

DISK_THREADS = 4
"""Slices of chunks on disk updated at the same time: while one is computed, others are read and written."""
PAGE_BYTES = 4096
"""Unit of reads and writes on disk."""
REDUCTIONS_IN_FLIGHT = 3
"""Reductions the host leaves in flight: enough not to wait for a rank that is slightly late, few enough to bound
the buffers that wait to be summed. With a GPU, this bounds the gradients whose memory is outside the rCache."""
GRADIENTS_ON_THEIR_WAY = REDUCTIONS_IN_FLIGHT + 2
"""Gradients alive at once: those in reduction, one being produced, and one waiting for the last use of the weights
that it overwrites."""
SUMS_IN_FLIGHT = 3
"""With a GPU: buffers for gradients on their way to a sum in host memory; one is copied while another is added."""
VALUES_BUFFERS = LOOKAHEAD + 1
"""Shards of values on disk that are in host memory at once: those read ahead, and one being copied."""
VALUES_REQUEST_BYTES = 1 << 23
"""Bytes of a frozen chunk's values read from disk at once."""
_SPILL_SLICE_NUMEL = 1 << 20
"""Most elements of a shard on disk updated in one read and write."""
_WORKSPACE = 6
"""Memory for the update of a matrix, in multiples of its own: before and after an iteration of Newton-Schulz, two
square matrices of its shorter side, and the slices and the whole of one that is cut over ranks."""
GRADIENT = StateArray("gradient")
"""The sum of gradients on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes the library holds on one rank, without activations and the framework's own memory."""

    rcache_bytes: int
    """Blocks of the rCache."""
    resident_bytes: int
    """Gathered chunks with a buffer of their own: tied parameters and fused small groups, unless used in place."""
    staging_bytes: int
    """Buffer of a reduction: for parts received over gloo before they are summed, and for gradients widened to fp32.
    One chunk uses it at a time, so it has the size of the largest."""
    shard_bytes: dict[str, int]
    """{tier: bytes of compute or gradient shards, master shards and moments}."""
    spill_buffer_bytes: int
    """Host memory for buffers: slices of chunks on disk during their update, updates of whole matrices whose gradients
    are on disk, values on their way from disk to the device, and, with a GPU, gradients on their way to disk."""
    gradient_bytes: int
    """Device memory for gradients of chunks without blocks, from the first gradient of a chunk to its reduction."""
    workspace_bytes: int
    """Device memory for the update of a matrix at its owner."""
    accumulator_bytes: dict[str, int]
    """{tier: bytes of fp32 sums of gradients}, used only if a step has several backwards. With a GPU, the host tier
    includes buffers for gradients on their way to the sums, unless gradients go to disk."""

    @property
    def device_bytes(self) -> int:
        """Peak device memory with one backward per step."""
        moving = self.rcache_bytes + self.resident_bytes + self.staging_bytes + self.gradient_bytes
        moving += self.workspace_bytes
        return moving + self.shard_bytes[Tier.DEVICE]

    @property
    def host_bytes(self) -> int:
        """Peak host memory with one backward per step."""
        return self.shard_bytes[Tier.HOST] + self.spill_buffer_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file on disk, constant for the whole run."""
        return self.shard_bytes[Tier.DISK]

    def memory_bytes(self, backwards: int) -> tuple[int, int]:
        """(peak device memory, peak host memory) with this number of backwards per step."""
        sums = self.accumulator_bytes if backwards > 1 else {}
        return self.device_bytes + sums.get(Tier.DEVICE, 0), self.host_bytes + sums.get(Tier.HOST, 0)


class Kind(StrEnum):
    """The kinds of memory that a chunk needs. Those of `_SUMMED` add up over chunks; for the others, chunks share
    buffers as large as the largest of them needs."""

    SHARD = "shard"
    """Compute or gradient shard, master shard and moments."""
    SUMS = "sums"
    """An fp32 sum of gradients."""
    RESIDENT = "resident"
    """A buffer in which the chunk is gathered."""
    GRADIENTS = "gradients"
    """Memory for gradients until they are reduced."""
    TURN = "turn"
    """Memory for gradients that overwrite weights once reduced: `GRADIENTS_ON_THEIR_WAY` chunks have it at once."""
    BLOCK = "block"
    """Blocks; the number is bytes for each of C elements."""
    ARRIVING = "arriving"
    """`SUMS_IN_FLIGHT` buffers for gradients on their way to sums."""
    UPDATED = "updated"
    """`DISK_THREADS` buffers for records of arrays on disk (`record_bytes`)."""
    CHANGED = "changed"
    """Memory for a shard's part of an update of whole matrices, where the gradient is on disk: one has it at once."""
    WORKSPACE = "workspace"
    """Memory for the update of a matrix: one has it at once."""
    READ = "read"
    """Buffers for values on their way from disk (`values_buffer_bytes`)."""


_SUMMED = frozenset({Kind.SHARD, Kind.SUMS, Kind.RESIDENT, Kind.GRADIENTS})
_Need = tuple[Kind, Tier, int]
"""(kind, tier, bytes)."""


def needs(
    chunk: ChunkSpec, tier: Tier, *, moments: int, values_on_disk: bool, values_on_device: bool = False
) -> Iterator[_Need]:
    """Yields the memory that one rank needs for a chunk in `tier`.

    A chunk has a second shard: a separate master, whose reduced gradient overwrites the values, or, where the values
    are the master, memory for the reduced gradient, in which several fp32 gradients are summed, too. A chunk on disk
    has no second shard in memory, only an fp32 sum where a step has several backwards.
    """
    trainable, numel, values = chunk.key.trainable, chunk.shard_numel, values_bytes(chunk)
    from_disk = reads_disk(chunk, tier, values_on_disk=values_on_disk)
    residence = chunk.residence_at(on_device=tier is Tier.DEVICE)
    if not from_disk:
        memory = second_bytes(chunk) + chunk.key.moments(moments) * chunk.key.precision.moment_bytes(numel)
        yield Kind.SHARD, tier.of_compute, values + (memory if trainable and tier is not Tier.DISK else 0)
    if keeps_values(chunk, tier, values_on_device=values_on_device):
        yield Kind.SHARD, Tier.DEVICE, values
    if trainable and not from_disk and (tier is Tier.DISK or chunk.key.dtype != torch.float32):
        yield Kind.SUMS, tier.of_compute, 4 * numel
    if trainable and tier is Tier.DISK:
        arrays = arrays_on_disk(chunk, moments, values_on_disk=values_on_disk)
        yield Kind.SHARD, Tier.DISK, spilled_bytes(numel, arrays)
        yield Kind.UPDATED, Tier.HOST, record_bytes(min(numel, spill_slice_numel()), arrays)
    if trainable and from_disk and chunk.key.optimizer:
        yield Kind.CHANGED, Tier.HOST, numel * chunk.update_itemsize
    if from_disk:
        yield Kind.SHARD, Tier.DISK, paged_bytes(values)
        yield Kind.READ, Tier.HOST, values
    if trainable and tier is not Tier.DEVICE:
        yield Kind.ARRIVING, Tier.HOST, values
    if residence is CACHED:
        yield Kind.BLOCK, Tier.DEVICE, chunk.block_itemsize
    elif residence is RESIDENT:
        yield Kind.RESIDENT, Tier.DEVICE, chunk.nbytes
        if trainable:
            yield Kind.GRADIENTS, Tier.DEVICE, chunk.nbytes
    if residence is IN_PLACE:
        yield Kind.TURN, Tier.DEVICE, chunk.nbytes
    if chunk.matrix_numel:
        yield Kind.WORKSPACE, Tier.DEVICE, _WORKSPACE * chunk.key.iterates_in.itemsize * chunk.matrices_at_once_numel


class Ledger:
    """The bytes of one rank, by kind and tier, while its chunks move between tiers."""

    def __init__(
        self,
        layout: Layout,
        tiers: Iterable[Tier],
        *,
        moments: int,
        over_gloo: bool,
        async_sums: bool | None = None,
        values_on_disk: bool = False,
        values_on_device: bool = False,
    ) -> None:
        """Counts the bytes of a layout, given the tier of each chunk.

        `moments` is the number of values that the elementwise optimizer keeps per element. With `async_sums`, as with a
        GPU, gradients are summed in host memory while backward runs; by default unless reductions run over gloo.
        """
        self._layout, self._moments, self._whole, self._near = layout, moments, values_on_disk, values_on_device
        self._async_sums = not over_gloo if async_sums is None else async_sums
        self._staging_bytes = max((chunk.staging_bytes(over_gloo=over_gloo) for chunk in layout.chunks), default=0)
        self._totals = {kind: {tier.value: 0 for tier in Tier} for kind in _SUMMED}
        self._ascending: dict[Kind, list[int]] = {kind: [] for kind in Kind if kind not in _SUMMED}
        """The bytes of the kinds that chunks share, in ascending order."""
        first: dict[object, int] = {}
        self._alike = [first.setdefault((c.key, c.numel, c.shards, c.residence), c.index) for c in layout.chunks]
        """For each chunk, the first chunk with the same needs."""
        self._changes: dict[tuple[int, Tier, Tier], list[tuple[_Need, int]]] = {}
        """{(first chunk with the same needs, former tier, tier): [(need, change of its count)]}."""
        self._tiers = list(tiers)
        for (index, tier), count in Counter(zip(self._alike, self._tiers, strict=True)).items():
            for kind, where, number in self._needs(index, tier):
                if kind in _SUMMED:
                    self._totals[kind][where] += count * number
                else:
                    self._ascending[kind] += [number] * count
        for numbers in self._ascending.values():
            numbers.sort()

    @classmethod
    def of(cls, plan: Plan, layout: Layout, *, moments: int, over_gloo: bool, async_sums: bool | None = None) -> Self:
        """The ledger of a plan with this layout."""
        tiers = [plan.tier_of(layout, chunk) for chunk in layout.chunks]
        return cls(
            layout,
            tiers,
            moments=moments,
            over_gloo=over_gloo,
            async_sums=async_sums,
            values_on_disk=plan.values_on_disk,
            values_on_device=plan.values_on_device,
        )

    def move(self, index: int, tier: Tier) -> None:
        """Moves a chunk to `tier`. O(log chunks)."""
        was, self._tiers[index] = self._tiers[index], tier
        if was is not tier:
            assert not self._layout.chunks[index].residence.in_shard, "a chunk that is used in place is on the device"
            self._book(index, was, tier)

    def _needs(self, index: int, tier: Tier) -> Iterator[_Need]:
        chunk, moments = self._layout.chunks[index], self._moments
        return needs(chunk, tier, moments=moments, values_on_disk=self._whole, values_on_device=self._near)

    def _book(self, index: int, was: Tier, tier: Tier) -> None:
        key = self._alike[index], was, tier
        if key not in self._changes:
            changes = Counter(self._needs(index, tier))
            changes.subtract(self._needs(index, was))
            self._changes[key] = [change for change in changes.items() if change[1]]
        for (kind, where, number), times in self._changes[key]:
            if kind in _SUMMED:
                self._totals[kind][where] += times * number
            elif times > 0:
                insort(self._ascending[kind], number)
            else:
                del self._ascending[kind][bisect_left(self._ascending[kind], number)]

    def _largest(self, kind: Kind) -> int:
        return self._ascending[kind][-1] if self._ascending[kind] else 0

    def state_bytes(self, tier: Tier, *, sums: bool = False) -> int:
        """Bytes of shards, masters and moments in a tier; with `sums`, of fp32 sums of gradients too."""
        return self._totals[Kind.SHARD][tier] + sums * self._totals[Kind.SUMS][tier]

    @property
    def cached(self) -> int:
        """Number of chunks that use the rCache."""
        return len(self._ascending[Kind.BLOCK])

    @property
    def block_bytes(self) -> int:
        """Bytes of one rCache block."""
        return self._layout.chunk_numel * self._largest(Kind.BLOCK)

    @property
    def arriving_bytes(self) -> int:
        """Bytes of the largest gradient that is added to a sum in host memory or on disk while backward runs."""
        return self._largest(Kind.ARRIVING) if self._async_sums else 0

    def footprint(self, blocks: int = 0) -> Footprint:
        """Returns all bytes, with this number of blocks in the rCache."""
        totals, turns = self._totals, self._ascending[Kind.TURN]
        buffers = values_buffer_bytes([self._largest(Kind.READ)]) + DISK_THREADS * self._largest(Kind.UPDATED)
        buffers += self._largest(Kind.CHANGED)
        arriving, to_disk = SUMS_IN_FLIGHT * self.arriving_bytes, self._whole and self._ascending[Kind.UPDATED]
        sums = dict(totals[Kind.SUMS])
        if to_disk:
            buffers += arriving
        else:
            sums[Tier.HOST] += arriving
        return Footprint(
            rcache_bytes=blocks * self.block_bytes,
            resident_bytes=totals[Kind.RESIDENT][Tier.DEVICE],
            staging_bytes=self._staging_bytes,
            shard_bytes=dict(totals[Kind.SHARD]),
            spill_buffer_bytes=buffers,
            workspace_bytes=self._largest(Kind.WORKSPACE),
            gradient_bytes=totals[Kind.GRADIENTS][Tier.DEVICE] + sum(turns[-GRADIENTS_ON_THEIR_WAY:]),
            accumulator_bytes=sums,
        )


def footprint(
    plan: Plan, layout: Layout, *, moments: int = 2, over_gloo: bool, async_sums: bool | None = None
) -> Footprint:
    """Returns the bytes that `plan` needs on one rank; the other arguments are those of `Ledger`."""
    ledger = Ledger.of(plan, layout, moments=moments, over_gloo=over_gloo, async_sums=async_sums)
    return ledger.footprint(plan.blocks(layout))


HELD_HEAD = f"{'on one rank':44} {'tier':>6} {'chunks':>6} {'elements':>16} {'bytes':>11}"
"""Table head for `held_line`."""


def held_line(row: dict[str, Any]) -> str:
    """Formats a row of `held_rows`."""
    return (
        f"{row['chunk_group']:44} {row['tier']:>6} {row['chunks']:6} {row['numel']:16,} "
        f"{size_text(row['shard_bytes']):>11}{'  resident' * row['resident']}"
    )


def held_rows(plan: Plan, layout: Layout, moments: int) -> list[dict[str, Any]]:
    """Lists the chunks of one rank as plain data: one row per chunk group, tier and residency.

    `numel` counts the elements of the gathered parameters, `shard_bytes` the bytes of this rank's state.
    """
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for chunk in layout.chunks:
        label, tier = chunk.key.label, plan.tier_of(layout, chunk)
        row_kind = {"chunk_group": label, "tier": tier.value, "resident": chunk.residence is not CACHED}
        row = rows.setdefault(tuple(row_kind.values()), {**row_kind, "chunks": 0, "numel": 0, "shard_bytes": 0})
        row["chunks"] += 1
        row["numel"] += sum(slot.numel for slot in chunk.slots)
        row["shard_bytes"] += shard_bytes(plan, layout, chunk, moments)
    return list(rows.values())


def shard_bytes(plan: Plan, layout: Layout, chunk: ChunkSpec, moments: int) -> int:
    """Bytes of one rank's long-lived state of a chunk."""
    needed = needs(
        chunk,
        plan.tier_of(layout, chunk),
        moments=moments,
        values_on_disk=plan.values_on_disk,
        values_on_device=plan.values_on_device,
    )
    return sum(nbytes for kind, _, nbytes in needed if kind is Kind.SHARD)


def arrays_on_disk(chunk: ChunkSpec, moments: int, *, values_on_disk: bool) -> tuple[StateArray, ...]:
    """The arrays of a trainable chunk on disk: master, moments, with `values_on_disk` a sum of gradients."""
    return (*chunk.key.precision.arrays(chunk.key.moments(moments)), *((GRADIENT,) * values_on_disk))


def record_bytes(numel: int, arrays: Iterable[StateArray]) -> int:
    """Bytes on disk of the arrays of `numel` elements of a shard, each padded to whole pages."""
    return sum(paged_bytes(array.nbytes(numel)) for array in arrays)


def spilled_bytes(numel: int, arrays: Sequence[StateArray]) -> int:
    """Bytes on disk of the arrays of a shard of `numel` elements: one record per slice."""
    slices, rest = divmod(numel, spill_slice_numel())
    return slices * record_bytes(spill_slice_numel(), arrays) + record_bytes(rest, arrays)


def spill_slice_numel() -> int:
    """Most elements of a shard whose arrays are moved between disk and memory at once, as one record."""
    return _SPILL_SLICE_NUMEL


def values_bytes(chunk: ChunkSpec) -> int:
    """Bytes of one rank's values of a chunk, which are also the bytes of its gradient shard."""
    return chunk.shard_numel * chunk.key.dtype.itemsize


def second_bytes(chunk: ChunkSpec) -> int:
    """Bytes of a trainable chunk's second shard in memory: its master, or its gradient if the values are the master."""
    return values_bytes(chunk) if chunk.key.master_in_values else 4 * chunk.shard_numel


def paged_bytes(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages of the disk."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def values_buffer_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the buffers in host memory through which values of these sizes are read from disk."""
    largest = paged_bytes(max(sizes, default=0))
    return min(VALUES_REQUEST_BYTES, largest) + VALUES_BUFFERS * largest
