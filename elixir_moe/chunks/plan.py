"""How a model is held and moved: the plan, and the bytes it costs.

Owns `Plan`, a small piece of frozen data, and `Footprint`, the memory a plan needs for a layout, to the byte. Pure.
Source: [S_FLAG, O_FLAG, C_SIZE], Elixir v1, VI-B; memory as in v2, Table 1, with L_c the bytes of a compute element and
L_os * F_os those of master and moments.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

import torch

from elixir_moe.chunks.cache_policy import LOOKAHEAD
from elixir_moe.chunks.packing import ChunkSpec, Layout, best_chunk_numel, build_layout
from elixir_moe.chunks.param_spec import ParamSpec
from elixir_moe.errors import PlanError
from elixir_moe.parallel.pattern import is_whole


class Tier(StrEnum):
    """Where the long-lived state of a chunk (compute shard, master shard, moments) is at home."""

    DEVICE = "device"
    """Device memory: updates run on the device, gathers need no transfer."""
    HOST = "host"
    """Host memory, pinned where there is a GPU: updates run on the CPU, each gather first fetches the shard."""
    DISK = "disk"
    """Master shard and moments in a file, compute shard in host memory: gathers are as of `HOST`, updates
    read and write the file."""

    @property
    def of_compute(self) -> "Tier":
        """Where the compute shard and sums of gradients lie."""
        return Tier.HOST if self is Tier.DISK else self


def size_text(nbytes: float) -> str:
    """A size for a reader, in the largest binary unit that it fills: ``2.50 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


_WHOLE_NUMBERS = (
    ("rcache_blocks", 1, True),
    ("device_chunks", 0, False),
    ("disk_chunks", 0, False),
    ("chunk_numel", 1, True),
    ("prefetch", 0, False),
)
"""(field, least value, may be None)."""
DISK_THREADS = 4
"""Slices of chunks on disk that are updated at the same time: while one is computed, others are read and written."""
PAGE_BYTES = 4096
"""What the disk is read and written in."""
SPILL_ALIGN_NUMEL = PAGE_BYTES // 4
"""fp32 elements of a page: where arrays on disk begin."""
REDUCTIONS_IN_FLIGHT = 3
"""How many the host leaves under way: none waits for a rank that is a little late, and few wait to be summed."""
GRADIENTS_ON_THEIR_WAY = REDUCTIONS_IN_FLIGHT + 2
"""With one that lands, and one that waits for the last use of the values in its place."""
_SPILL_SLICE_NUMEL = 1 << 20
"""Elements of an array on disk that are moved at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `wrap` does with a model. Make one with a preset, or field by field."""

    scatter: bool
    """S_FLAG: scatter every chunk over its process group; False keeps it whole on every rank."""
    offloaded: bool
    """O_FLAG: chunks are at home in host memory."""
    rcache_blocks: int | None
    """C_SIZE: blocks of the rCache, for weights and gradients; None is enough for all weights to stay gathered."""
    device_chunks: int = 0
    """With `offloaded`: this many chunks, the last in order of first use, are at home on the device all the same."""
    disk_chunks: int = 0
    """With `offloaded`: of this many chunks, the last before those on the device, master shard and moments are on disk.
    The later a chunk is used, the longer its update can take unseen."""
    chunk_numel: int | None = None
    """Chunk length C in elements; None takes the length that wastes least."""
    prefetch: int = LOOKAHEAD
    """So many chunks of the recorded schedule are gathered ahead of their use, where blocks are free."""
    explanation: str = field(default="", compare=False, repr=False)
    """Why a search chose this plan; no part of what the plan is, and not in its JSON."""

    def __post_init__(self) -> None:
        for name in ("scatter", "offloaded"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r}: expected True or False")
        for name, least, optional in _WHOLE_NUMBERS:
            value = getattr(self, name)
            if not is_whole(value, least=least) and not (optional and value is None):
                raise PlanError(f"{name}={value!r}: expected a whole number of at least {least}{' or None' * optional}")
        for name in ("device_chunks", "disk_chunks"):
            if getattr(self, name) and not self.offloaded:
                raise PlanError(
                    f"{name}={getattr(self, name)} needs offloaded=True: all chunks are on the device as it is"
                )

    @classmethod
    def ddp(cls) -> Self:
        """Replicated parameters and optimizer state, gradients all-reduced: [False, False, inf]."""
        return cls(scatter=False, offloaded=False, rcache_blocks=None)

    @classmethod
    def zero2(cls, *, chunk_numel: int | None = None) -> Self:
        """Every chunk gathered once a step and kept until the update: [True, False, inf]."""
        return cls(scatter=True, offloaded=False, rcache_blocks=None, chunk_numel=chunk_numel)

    @classmethod
    def zero3(cls, *, rcache_blocks: int, chunk_numel: int | None = None) -> Self:
        """Chunks come and go through `rcache_blocks` blocks: [True, False, C]."""
        return cls(scatter=True, offloaded=False, rcache_blocks=rcache_blocks, chunk_numel=chunk_numel)

    @classmethod
    def offload(
        cls,
        *,
        rcache_blocks: int | None,
        device_chunks: int = 0,
        disk_chunks: int = 0,
        chunk_numel: int | None = None,
    ) -> Self:
        """As `zero3`, with all chunks but `device_chunks` at home in host memory: [True, True, C].

        Of `disk_chunks` of them master shards and moments are on disk; `wrap` is told where (`spill`).
        """
        return cls(
            scatter=True,
            offloaded=True,
            rcache_blocks=rcache_blocks,
            device_chunks=device_chunks,
            disk_chunks=disk_chunks,
            chunk_numel=chunk_numel,
        )

    def to_json(self) -> str:
        """The plan as one JSON object, without its explanation."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "explanation"})

    def explain(self) -> None:
        """Prints what each choice of the search saves; of a plan nobody searched for, what it is."""
        print(self.explanation or f"given, not searched for: {self}")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`. Raises PlanError for anything that is not a plan."""
        if not isinstance(text, str):
            raise PlanError(f"not a plan: text is a {type(text).__name__}, expected the str that to_json gives")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or more digits than Python converts
            raise PlanError(f"not a plan in JSON: {error}") from error
        known = {field.name for field in fields(cls)} - {"explanation"}
        if not isinstance(data, dict) or set(data) - known or {"scatter", "offloaded", "rcache_blocks"} - set(data):
            raise PlanError(f"not a plan: expected an object with the keys {sorted(known)}, got {text[:200]}")
        return cls(**data)

    def layout(self, params: Sequence[ParamSpec]) -> Layout:
        """Where this plan puts parameters that are given in order of first use.

        Raises:
            PlanError: its chunk length is smaller than the largest parameter.
        """
        length = best_chunk_numel(params, stay=not self.offloaded) if self.chunk_numel is None else self.chunk_numel
        return self.place(build_layout(params, length, scatter=self.scatter))

    def place(self, layout: Layout) -> Layout:
        """`layout` with every chunk that is whole at home on the device used in place: no block, no copy."""
        return layout.with_in_place(
            {c.index for c in layout.chunks if c.shards == 1 and self.home(layout, c) is Tier.DEVICE}
        )

    def blocks(self, layout: Layout) -> int:
        """Blocks of the rCache for this layout; never more than a step can fill."""
        return layout.most_blocks if self.rcache_blocks is None else min(self.rcache_blocks, layout.most_blocks)

    def home(self, layout: Layout, chunk: ChunkSpec) -> Tier:
        """The tier of a chunk's long-lived state; a frozen chunk has none that could be on disk."""
        first_on_device = len(layout.chunks) - self.device_chunks
        if not self.offloaded or chunk.index >= first_on_device:
            return Tier.DEVICE
        on_disk = chunk.key.trainable and chunk.index >= first_on_device - self.disk_chunks
        return Tier.DISK if on_disk else Tier.HOST


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The bytes the library holds on one rank, activations and the framework's own not included."""

    rcache_bytes: int
    """Blocks of the rCache."""
    resident_bytes: int
    """Gathered chunks with a buffer of their own: tied parameters and fused small groups."""
    staging_bytes: int
    """Where a reduction over gloo lands before it is summed; none on NCCL."""
    shard_bytes: dict[str, int]
    """By tier: compute or gradient shards, master shards and moments."""
    spill_buffer_bytes: int
    """In host memory: through which slices of chunks on disk are updated."""
    gradient_bytes: int
    """On the device, from backward to update: gradients where autograd put them, of chunks used in place that no other
    rank has."""
    landing_bytes: int
    """On the device, from the first gradient of a chunk to its reduction: gradients of chunks that use no blocks."""
    accumulator_bytes: dict[str, int]
    """By tier: fp32 sums, which exist only if a step has several backwards and the compute dtype is narrower."""

    @property
    def device_bytes(self) -> int:
        """Peak on the device with one backward a step."""
        gradients = self.gradient_bytes + self.landing_bytes
        return self.rcache_bytes + self.resident_bytes + self.staging_bytes + gradients + self.shard_bytes[Tier.DEVICE]

    @property
    def host_bytes(self) -> int:
        """Peak in host memory with one backward a step."""
        return self.shard_bytes[Tier.HOST] + self.spill_buffer_bytes

    @property
    def disk_bytes(self) -> int:
        """What the file on disk takes, from beginning to end."""
        return self.shard_bytes[Tier.DISK]


def footprint(plan: Plan, layout: Layout, *, moments: int = 2, staged: bool) -> Footprint:
    """The bytes `plan` needs.

    Args:
        plan: the plan.
        layout: the chunks.
        moments: fp32 values the optimizer keeps for each element; 2 for Adam.
        staged: reductions go through a staging buffer (gloo).
    """
    shards = {tier.value: 0 for tier in Tier}
    accumulators = dict(shards)
    spilled = []
    for chunk in layout.chunks:
        tier = plan.home(layout, chunk)
        for where, nbytes in home_bytes(chunk, tier, moments).items():
            shards[where] += nbytes
        accumulators[tier.of_compute] += accumulator_bytes(chunk, tier)
        if tier is Tier.DISK:
            spilled.append(chunk.shard_numel)
    return Footprint(
        rcache_bytes=plan.blocks(layout) * layout.block_bytes,
        resident_bytes=sum(chunk.nbytes for chunk in layout.chunks if chunk.resident and not chunk.in_place),
        staging_bytes=staging_bytes(layout) if staged else 0,
        shard_bytes=shards,
        spill_buffer_bytes=spill_buffer_bytes(spilled, 1 + moments),
        gradient_bytes=sum(chunk.nbytes for chunk in layout.chunks if chunk.keeps_pieces),
        landing_bytes=landing_bytes(layout),
        accumulator_bytes=accumulators,
    )


def home_bytes(chunk: ChunkSpec, tier: Tier, moments: int) -> dict[Tier, int]:
    """Bytes, where they lie, of a rank's long-lived state: compute or gradient shard, master shard and moments."""
    compute = 0 if chunk.keeps_pieces else chunk.key.dtype.itemsize * chunk.shard_numel
    arrays = (1 + moments) * chunk.key.trainable
    if tier is Tier.DISK:
        return {Tier.HOST: compute, Tier.DISK: spilled_bytes(chunk.shard_numel, arrays)}
    return {tier: compute + 4 * arrays * chunk.shard_numel}


def held_rows(plan: Plan, layout: Layout, moments: int) -> list[dict[str, Any]]:
    """What one rank holds, as plain data: a row for each chunk group and tier, resident chunks apart.

    `numel` are the elements of their parameters when gathered, `shard_bytes` what this rank has of their state.
    """
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for chunk in layout.chunks:
        label, tier = chunk.key.label, plan.home(layout, chunk)
        kind = {"chunk_group": label, "tier": tier.value, "resident": chunk.resident}
        row = rows.setdefault(tuple(kind.values()), {**kind, "chunks": 0, "numel": 0, "shard_bytes": 0})
        row["chunks"] += 1
        row["numel"] += sum(slot.numel for slot in chunk.slots)
        row["shard_bytes"] += sum(home_bytes(chunk, tier, moments).values())
    return list(rows.values())


def accumulator_bytes(chunk: ChunkSpec, tier: Tier) -> int:
    """Bytes of a rank's fp32 sum of a chunk's gradients, which a step of several backwards has.

    fp32 gradients are summed where they lie, unless values lie there too: where the master is not in memory.
    """
    apart = chunk.key.dtype != torch.float32 or tier is Tier.DISK
    return 4 * chunk.shard_numel if chunk.key.trainable and apart else 0


def spilled_bytes(numel: int, arrays: int) -> int:
    """Bytes on disk of `arrays` of fp32, each filled up to whole pages."""
    return 4 * arrays * paged_numel(numel)


def paged_numel(numel: int) -> int:
    """So many elements of fp32, or as many more as fill a page of the disk."""
    return -(-numel // SPILL_ALIGN_NUMEL) * SPILL_ALIGN_NUMEL


def spill_slice_numel(numels: Iterable[int]) -> int:
    """Elements of an array that are moved between disk and memory at once, for chunks of `numels` elements."""
    return min(_SPILL_SLICE_NUMEL, paged_numel(max(numels, default=0)))


def spill_buffer_bytes(numels: Sequence[int], arrays: int) -> int:
    """Bytes of the memory through which chunks of `numels` elements on disk are updated."""
    return 4 * DISK_THREADS * arrays * spill_slice_numel(numels)


def landing_bytes(layout: Layout) -> int:
    """Bytes on the device of gradients that land outside the rCache, at most.

    Resident chunks have memory for theirs until they are reduced. Where a reduced gradient takes the values' place, a
    few are on their way there at once.
    """
    own = sum(chunk.nbytes for chunk in layout.chunks if chunk.key.trainable and chunk.resident and not chunk.in_place)
    moving = sorted((chunk.nbytes for chunk in layout.chunks if chunk.takes_turns), reverse=True)
    return own + sum(moving[:GRADIENTS_ON_THEIR_WAY])


def staging_bytes(layout: Layout) -> int:
    """Bytes of the staging buffer, which serves one chunk at a time."""
    scattered = (chunk for chunk in layout.chunks if chunk.shards > 1 and chunk.key.trainable)
    return max((chunk.staging_bytes for chunk in scattered), default=0)
