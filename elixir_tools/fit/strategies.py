"""Other strategies as plans on this library's chunks: DDP, ZeRO-1 to 3, ZeRO-Offload.

Owns which plan stands for which strategy, and the memory that a strategy needs. Pure; `cost` prices. The plans are
those of Elixir v1, VI-B. ZeRO-1 is ZeRO-2 plus whole gradients in the compute dtype.
"""

from dataclasses import replace

from elixir_moe.ext.planner import Task, device_bytes_for
from elixir_moe.ext.plans import Plan

OURS_HOST, OURS_DISK = "ours, host", "ours, disk"
LADDER = {
    "ddp": "ddp",
    "zero-1": "zero-1",
    "zero-2": "zero-2",
    "zero-3": "zero-3",
    "zero-offload": "zero-2-offload",
    OURS_HOST: None,
    OURS_DISK: None,
}
"""{strategy: its name in `plans`}; None for the plans that `solve` searches, without and with a disk."""


def plans(task: Task, numel: int | None = None) -> dict[str, tuple[Plan, int]]:
    """{strategy: (plan, bytes of device memory beyond the plan's)} with chunks of `numel` elements."""

    def least(plan: Plan) -> int:
        return max(1, task.profile.schedule(plan.layout(task.profile.params)).least_blocks())

    on_device, in_memory = Plan.zero2(chunk_numel=numel), Plan.offload(rcache_blocks="all", chunk_numel=numel)
    gradients = sum(p.numel * p.key.dtype.itemsize for p in task.profile.params if p.key.trainable)
    return {
        "ddp": (Plan(scatter=False, offloaded=False, rcache_blocks="all", chunk_numel=numel), 0),
        "zero-1": (on_device, gradients),
        "zero-1-offload": (in_memory, gradients),
        "zero-2": (on_device, 0),
        "zero-2-offload": (in_memory, 0),
        "zero-3": (replace(on_device, rcache_blocks=least(on_device)), 0),
        "zero-3-offload": (replace(in_memory, rcache_blocks=least(in_memory)), 0),
    }


def needs(task: Task, strategy: str) -> tuple[int, int]:
    """(device bytes, host bytes) that one of `LADDER` needs, in this task's host memory and disk for the last two.

    These need host bytes 0: what does not fit in host memory or on disk is on the device, as `device_bytes_for` counts.
    """
    name = LADDER[strategy]
    if name is None:
        limited = replace(task, disk_bytes=task.disk_bytes if strategy == OURS_DISK else None)
        return device_bytes_for(limited), 0
    plan, more = plans(task)[name]
    layout = plan.layout(task.profile.params)
    layout = replace(layout, open_gradients=task.profile.schedule(layout).open_gradients())
    device, host = task.held_bytes(task.footprint(plan, layout))
    return device + more, host
