"""From sizes to counts: turns a plan given in bytes, or with open numbers, into numbers of chunks for one model.

Owns three numbers: chunks that stay on the device, chunks on disk, and blocks of the rCache. Pure; `wrap` passes the
model's parameters and the free host memory.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch

from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.param_spec import ParamSpec
from elixir_moe.chunks.plan import (
    Plan,
    Tier,
    arriving_bytes,
    disk_buffer_bytes,
    home_bytes,
    size_text,
)
from elixir_moe.chunks.step_order import StepOrder
from elixir_moe.errors import PlanError, TierError


def settled(
    plan: Plan,
    params: Sequence[ParamSpec],
    step_order: StepOrder,
    *,
    moments: int,
    free_host_bytes: int,
    beside: bool = False,
) -> Plan:
    """`plan` with every size and every open number replaced by a number of chunks or blocks.

    Args:
        plan: any plan; a plan with all numbers set is returned unchanged.
        params: the model's parameters in order of first use.
        step_order: the order in which a step uses the parameters.
        moments: fp32 values the optimizer keeps per element.
        free_host_bytes: host memory of this rank for state, if the plan does not say.
        beside: whether gradients reach sums outside the device beside backward, as with a GPU.

    Raises:
        PlanError: a size is too small for a step.
        TierError: host memory is too small even with all chunks on disk.
    """
    if plan.device_bytes is not None:
        plan = replace(plan, device_bytes=None, device_chunks=_device_chunks(plan, params, moments))
    if plan.host_bytes is not None or plan.disk_chunks is None:
        allowed = free_host_bytes if plan.host_bytes is None else plan.host_bytes
        count = _disk_chunks(plan, params, moments, allowed, beside)
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
        layout = step_order.counted(plan.layout(params))
        plan = replace(plan, rcache_bytes=None, rcache_blocks=_blocks(plan, layout, step_order))
    return plan


def _device_chunks(plan: Plan, params: Sequence[ParamSpec], moments: int) -> int:
    """The most chunks whose state fits in `device_bytes`."""
    assert plan.device_bytes is not None, "asked for a plan that says it"
    layout = plan.layout(params)

    def state_bytes(count: int) -> int:
        there = replace(plan, device_bytes=None, device_chunks=count)
        placed = there.place(layout).chunks[len(layout.chunks) - count :]
        return sum(home_bytes(chunk, Tier.DEVICE, moments)[Tier.DEVICE] for chunk in placed)

    return bisect_right(range(1, len(layout.chunks) + 1), plan.device_bytes, key=state_bytes)


def _disk_chunks(plan: Plan, params: Sequence[ParamSpec], moments: int, allowed: int, beside: bool) -> int:
    """The fewest chunks on disk with which host memory is large enough."""
    layout = plan.layout(params)
    offloaded = layout.chunks[: max(0, len(layout.chunks) - plan.device_chunks)]
    state = sum(home_bytes(chunk, Tier.HOST, moments)[Tier.HOST] for chunk in offloaded)
    needed, whole = [state], plan.values_on_disk
    largest: dict[tuple[bool, torch.dtype], ChunkSpec] = {}
    for chunk in reversed(offloaded):
        if needed[-1] <= allowed:
            break
        state -= home_bytes(chunk, Tier.HOST, moments)[Tier.HOST]
        state += home_bytes(chunk, Tier.DISK, moments, values_on_disk=whole)[Tier.HOST]
        kind = chunk.key.trainable, chunk.key.dtype
        largest[kind] = max(chunk, largest.get(kind, chunk), key=lambda c: c.shard_numel)
        buffers = disk_buffer_bytes(largest.values(), moments, values_on_disk=whole)
        if beside and whole and any(c.key.trainable for c in largest.values()):
            buffers += arriving_bytes(offloaded)
        needed.append(state + buffers)
    if needed[-1] > allowed:
        raise TierError(
            f"host memory: {size_text(allowed)} are for state, and {size_text(min(needed))} are needed even with "
            f"chunks on disk ({size_text(min(needed) - allowed)} short): use more ranks, "
            f"{'' if whole else 'put values on disk too (values_on_disk=True), '}or keep more on the device"
        )
    return len(needed) - 1


def _blocks(plan: Plan, layout: Layout, step_order: StepOrder) -> int:
    """The blocks that fit in `rcache_bytes`; without `rcache_bytes`, the fewest a step needs plus `prefetch`."""
    least = max(1, step_order.schedule(layout).least_blocks())
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
