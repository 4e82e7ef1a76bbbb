"""Turns a plan given in bytes, or with open numbers, into numbers of chunks and blocks for one model.

Owns three numbers (chunks on the device, chunks on disk, blocks of the rCache) and `Placement`, which finds the first
two. Pure: `wrap` passes the model's parameters and the free host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elixir_moe.chunks.ledger import Footprint, Ledger
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.param_spec import ParamSpec
from elixir_moe.chunks.plan import Plan, Tier, size_text, tier_at
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.errors import PlanError, TierError


@dataclass(slots=True)
class Placement:
    """A ledger whose last chunks are on the device, those before them on disk, and the others in host memory."""

    ledger: Ledger
    on_disk: int
    """The first chunk on disk."""
    on_device: int
    """The first chunk on the device."""

    def put(self, on_disk: int, on_device: int) -> None:
        """Sets the first chunks on disk and on the device; moves only chunks whose tier changes."""
        for was, now in (self.on_device, on_device), (self.on_disk, on_disk):
            for index in range(min(was, now), max(was, now)):
                self.ledger.move(index, tier_at(index, on_disk, on_device))
        self.on_disk, self.on_device = on_disk, on_device

    def spill(self, on_device: int, host_bytes: int, backwards: int = 1) -> Footprint | None:
        """Puts chunks from `on_device` on the device, and as few of the others on disk as `host_bytes` requires.

        Returns the bytes; None if host memory is too small even with all of them on disk.

        Each chunk on disk leaves less state in host memory, but may need larger buffers. So the number of chunks on
        disk starts where the state without buffers fits, and grows until the buffers fit too.
        """
        self.put(min(self.on_disk, on_device), on_device)
        while self.on_disk < on_device and self.ledger.state_bytes(Tier.HOST, sums=backwards > 1) <= host_bytes:
            self.put(self.on_disk + 1, on_device)
        while (size := self.ledger.footprint()).memory_bytes(backwards)[1] > host_bytes:
            if not self.on_disk:
                return None
            self.put(self.on_disk - 1, on_device)
        return size

    def fill(self, on_device: int, disk_bytes: int) -> Footprint:
        """Puts chunks from `on_device` on the device, and as many of the others on disk as fit in `disk_bytes`."""
        self.put(min(self.on_disk, on_device), on_device)
        while self.on_disk and self.ledger.state_bytes(Tier.DISK) <= disk_bytes:
            self.put(self.on_disk - 1, on_device)
        while self.ledger.state_bytes(Tier.DISK) > disk_bytes:
            self.put(self.on_disk + 1, on_device)
        return self.ledger.footprint()


def resolve_counts(
    plan: Plan,
    params: Sequence[ParamSpec],
    step_order: StepOrder,
    *,
    moments: int,
    free_host_bytes: int,
    async_sums: bool = False,
) -> Plan:
    """Returns `plan` with every size and every open number replaced by a number of chunks or blocks.

    Parameters are in order of first use. `free_host_bytes`, the host memory of this rank for state, is used if the plan
    sets none; `moments` and `async_sums` are as for `Ledger`.

    Raises:
        PlanError: a size is too small for a step.
        TierError: host memory is too small even with all chunks on disk.
    """
    if plan.device_bytes is not None:
        plan = replace(plan, device_bytes=None, device_chunks=_device_chunks(plan, params, moments))
    if plan.host_bytes is not None or plan.disk_chunks is None:
        allowed = free_host_bytes if plan.host_bytes is None else plan.host_bytes
        count = _disk_chunks(plan, params, moments, allowed, async_sums)
        disk = plan.disk if count else None
        plan = replace(
            plan,
            host_bytes=None,
            disk_chunks=count,
            disk=disk,
            values_on_disk=plan.values_on_disk and disk is not None,
            verify=plan.verify and disk is not None,
        )
    if plan.rcache_blocks is None:
        layout = plan.layout(params)
        schedule = step_order.schedule(layout)
        layout = replace(layout, open_gradients=schedule.open_gradients())
        plan = replace(plan, rcache_bytes=None, rcache_blocks=_blocks(plan, layout, schedule.least_blocks()))
    return plan


def _device_chunks(plan: Plan, params: Sequence[ParamSpec], moments: int) -> int:
    """The most chunks whose state fits in `device_bytes`."""
    assert plan.device_bytes is not None, "the caller has checked it"
    layout = plan.layout(params)
    ledger = Ledger.of(replace(plan, values_on_device=False), layout, moments=moments, over_gloo=False)
    for count, chunk in enumerate(reversed(layout.chunks)):
        ledger.move(chunk.index, Tier.DEVICE)
        if ledger.state_bytes(Tier.DEVICE) > plan.device_bytes:
            return count
    return len(layout.chunks)


def _disk_chunks(plan: Plan, params: Sequence[ParamSpec], moments: int, allowed: int, async_sums: bool) -> int:
    """The fewest chunks on disk that make the rest fit in host memory."""
    layout = plan.layout(params)
    _, on_device = plan.bounds(layout)
    placement = Placement(
        Ledger.of(plan, layout, moments=moments, over_gloo=False, async_sums=async_sums), on_device, on_device
    )
    if placement.spill(on_device, allowed) is None:
        needed = [placement.ledger.footprint().host_bytes]  # with all of them on disk
        for on_disk in range(1, on_device + 1):
            placement.put(on_disk, on_device)
            needed.append(placement.ledger.footprint().host_bytes)
        raise TierError(
            f"host memory: {size_text(allowed)} are available for state, but {size_text(min(needed))} are needed even "
            f"with chunks on disk ({size_text(min(needed) - allowed)} short): use more ranks, "
            f"{'' if plan.values_on_disk else 'put values on disk too (values_on_disk=True), '}or keep more on the "
            "device"
        )
    return on_device - placement.on_disk


def _blocks(plan: Plan, layout: Layout, least: int) -> int:
    """The blocks that fit in `rcache_bytes`; without `rcache_bytes`, the `least` that a step needs plus `prefetch`."""
    least = max(1, least)
    if plan.rcache_bytes is None:
        return min(least + plan.prefetch, max(1, layout.most_blocks))
    if plan.rcache_bytes < least * layout.block_bytes:
        raise PlanError(
            f"rcache={size_text(plan.rcache_bytes)}: a step of this model needs {least} blocks of "
            f"{size_text(layout.block_bytes)} at once: give at least {size_text(least * layout.block_bytes)}, or a "
            f"smaller chunk_numel where no parameter needs chunks of {layout.chunk_numel} elements"
        )
    fits = plan.rcache_bytes // layout.block_bytes if layout.block_bytes else 1
    return min(fits, max(1, layout.most_blocks))
