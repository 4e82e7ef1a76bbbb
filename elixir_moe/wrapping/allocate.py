"""The third stage of `wrap`: the files, control groups and memory of a plan, on all ranks or on none.

Owns the order in which they are made, after a look at what is free. Each kind of memory is made by its own file in
`memory`. Nothing here has a value of a weight yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.ledger import Footprint, Ledger, arrays_on_disk, values_bytes
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import Plan, Tier, reads_disk
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.all_ranks import ControlGroups, make_on_all_ranks, raise_on_all_ranks
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import TierError
from elixir_moe.memory.blocks import Blocks
from elixir_moe.memory.build import build_shards, filled_later
from elixir_moe.memory.disk import DiskFile, DiskStore
from elixir_moe.memory.disk_values import ValuesFile
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.runtime.chunk import Placeholder
from elixir_moe.runtime.streams import Streams
from elixir_moe.state.full import groups_needed
from elixir_moe.wrapping.agreement import check_device_memory, check_host_memory
from elixir_moe.wrapping.prepare import Request
from elixir_moe.wrapping.resolve_plan import Resolved, close_all
from elixir_moe.wrapping.shared_frozen import one_home
from elixir_moe.wrapping.weight_transfer import WeightTransfer


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocated:
    """The parts of a wrapped model on this rank, before any weight is in its shard."""

    footprint: Footprint
    """The bytes that the plan allows."""
    files: tuple[DiskFile, ...]
    """The files of the chunks on disk."""
    groups: ControlGroups
    shards: Sequence[ShardState]
    """One for each chunk."""
    blocks: Blocks
    sums: HostSums | None
    """Where gradients are summed in host memory, if anywhere."""
    transfer: WeightTransfer
    cache: CacheState
    placeholder: Placeholder
    streams: Streams
    statistics: Statistics
    not_shared: Mapping[tuple[int, ...], str]
    """{ranks of a process group: why its frozen chunks, which the plan would share, are not shared}."""


def allocate(request: Request, resolved: Resolved) -> Allocated:
    """Makes all that the plan needs; `request.undo` has what frees it. Collective.

    Raises TierError on all ranks if device memory, host memory or the disk is too small.
    """
    device, undo = request.device, request.undo
    plan, layout, schedule, spec = resolved.plan, resolved.layout, resolved.schedule, resolved.spec
    n_blocks = plan.blocks(layout)
    ledger = Ledger.of(
        plan, layout, moments=resolved.moments, over_gloo=resolved.over_gloo, async_sums=resolved.async_sums
    )
    footprint = ledger.footprint(n_blocks)
    needed = footprint.host_bytes + (footprint.device_bytes if device.type == "cpu" else 0)
    placed = [(chunk, plan.tier_of(layout, chunk)) for chunk in layout.chunks]
    later = [
        values_bytes(chunk)
        for chunk, tier in placed
        if filled_later(chunk, tier, device) and not plan.shares(chunk, tier)
    ]
    check_host_memory(needed, later, spec.parameters)
    check_device_memory(device, footprint, spec.parameters)
    home = one_home(plan, layout, device)
    spill, values = _open_files(plan, layout, resolved.moments, device)
    files = tuple(file for file in (spill, values) if file is not None)
    undo.callback(close_all, files)
    with Wait("the making of process groups by all ranks"):
        groups = ControlGroups(spec.ranks, groups_needed(spec.parameters, layout.chunks))
    undo.callback(groups.close_local)
    sums = HostSums(ledger.arriving_bytes, device) if ledger.arriving_bytes else None
    observed = schedule if spec.step_order.observed else None
    cache, streams = CacheState(n_blocks, observed, prefetch=plan.prefetch), Streams(device)
    statistics = Statistics(cache=cache.counts)

    def make() -> tuple[list[ShardState], Blocks, WeightTransfer]:
        shards = build_shards(
            placed,
            device,
            spill,
            sums,
            values,
            values_on_disk=plan.values_on_disk,
            values_on_device=plan.values_on_device,
            shared=home.memory,
            rank=dist.get_rank(),
        )
        gradient_blocks = schedule.gradient_blocks(n_blocks)
        blocks = Blocks(layout, n_blocks, gradient_blocks, shards, device, statistics, streams.allocating)
        return shards, blocks, WeightTransfer(layout, device)

    shards, blocks, transfer = make_on_all_ranks("allocated their memory", make)
    return Allocated(
        footprint=footprint,
        files=files,
        groups=groups,
        shards=shards,
        blocks=blocks,
        sums=sums,
        transfer=transfer,
        cache=cache,
        placeholder=Placeholder(device),
        streams=streams,
        statistics=statistics,
        not_shared=home.refused,
    )


def _open_files(
    plan: Plan, layout: Layout, moments: int, device: torch.device
) -> tuple[DiskStore | None, ValuesFile | None]:
    """Creates the files for masters and moments, and for values on disk; None without such chunks.

    Raises TierError on all ranks if one fails.
    """
    there = [chunk for chunk in layout.chunks if plan.tier_of(layout, chunk) is Tier.DISK]
    shards = [
        (chunk.shard_numel, arrays_on_disk(chunk, moments, values_on_disk=plan.values_on_disk))
        for chunk in there
        if chunk.key.trainable
    ]
    sizes = [values_bytes(chunk) for chunk in there if reads_disk(chunk, Tier.DISK, values_on_disk=plan.values_on_disk)]
    if not there:
        return None, None
    assert plan.disk is not None, "checked with the other arguments"
    directory, checked, rank = plan.disk, plan.verify, dist.get_rank()
    spill: DiskStore | None = None
    values: ValuesFile | None = None

    def make() -> None:
        nonlocal spill, values
        if shards:
            spill = DiskStore(directory, shards, rank=rank, checked=checked)
        if sizes:
            values = ValuesFile(directory, sizes, device, rank=rank, checked=checked)

    try:
        raise_on_all_ranks("made the files for chunks on disk", make, error=TierError)
    except BaseException:
        for file in (spill, values):
            if file is not None:
                file.close()
        raise
    return spill, values
