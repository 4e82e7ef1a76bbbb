"""Explains a plan in words and numbers that a person can check.

Owns the wording; never searches. Computes the saving of each choice by pricing the plan without it.
"""

from dataclasses import replace

from elixir_moe.chunks.plan import Tier, seconds_text, size_text
from elixir_moe.errors import PlanError
from elixir_moe.planner import cost
from elixir_moe.planner.solve import PlanCandidate, price


def explain(candidate: PlanCandidate) -> str:
    """Describes the plan, its memory and time on one rank, and the time that each choice saves."""
    task, plan, layout = candidate.task, candidate.plan, candidate.layout
    size, seconds = candidate.size, candidate.seconds
    blocks, chunks, (device_bytes, host_bytes) = plan.blocks(layout), len(layout.chunks), task.held_bytes(size)
    tflops = cost.tflops_per_gpu(task.profile, seconds.step, task.accumulation)
    activations = cost.activations(task.profile, task.imbalance)
    kept = [
        f"kept      {size_text(task.kept_bytes)} more of host memory for the inputs of {task.kept_regions} of "
        f"{len(task.profile.kept)} checkpointed regions"
    ] * bool(task.kept_regions)
    passed = [f"passes    {task.passes}, of {task.together} micro-batches that pass each layer together"] * (
        task.together > 1
    )
    hidden = f" ({seconds_text(seconds.hidden_update)} hidden)" if seconds.hidden_update else ""
    disk = f", disk {seconds_text(seconds.disk)}" if seconds.disk else ""
    stall = f", stall {seconds_text(seconds.stall)}" if seconds.stall else ""
    apart = ", values on the device" if plan.values_on_device else " with their values" if plan.values_on_disk else ""
    lines = [
        f"chunks    {chunks} of {plan.chunk_numel} elements, {layout.waste_fraction:.1%} of their space unused",
        f"rCache    {blocks} blocks: {len(candidate.loads)} gathers a step, {len(layout.cached)} if all were kept",
        f"tiers     {candidate.chunks_in(Tier.DEVICE)} chunks on the device, {candidate.chunks_in(Tier.HOST)} in host "
        f"memory, {candidate.chunks_in(Tier.DISK)} on disk{apart}",
        f"device    {size_text(device_bytes)} of the library (U_allowed {size_text(task.allowed_bytes)}), "
        f"{size_text(activations)} activations, {size_text(task.profile.buffer_bytes)} buffers; "
        f"{size_text(task.capacity_bytes)} there are",
        f"host      {size_text(host_bytes)} "
        + ("in the same memory" if task.hardware.one_memory else f"a rank of {size_text(task.host_bytes)}"),
        *kept,
        *passed,
        f"disk      {size_text(size.disk_bytes)} a rank of {size_text(task.disk_bytes or 0)}",
        f"step      {seconds_text(seconds.step)}, {tflops:.1f} TFLOPS a GPU: compute "
        f"{seconds_text(seconds.compute + seconds.units)}, fetch {seconds_text(seconds.fetch)}, offload "
        f"{seconds_text(seconds.offload)}{disk}{stall}, exposed collectives {seconds_text(seconds.exposed)}, updates "
        f"{seconds_text(seconds.device_update)} on device, {seconds_text(seconds.host_update)} on host{hidden}, "
        f"{seconds_text(seconds.disk_update)} on disk",
    ]
    others = {"one block fewer": replace(plan, rcache_blocks=max(1, blocks - 1))}
    if plan.offloaded and plan.device_chunks:
        on_disk = plan.disk_chunks + 1 if task.hardware.one_memory and plan.disk_chunks else plan.disk_chunks
        others["one chunk fewer on the device"] = replace(
            plan, device_chunks=plan.device_chunks - 1, disk_chunks=on_disk
        )
    if plan.disk_chunks and not task.hardware.one_memory:
        others["one chunk more on disk"] = replace(plan, disk_chunks=plan.disk_chunks + 1)
    if plan.values_on_device:
        others["values in host memory"] = replace(plan, values_on_device=False)
    if task.kept_regions:
        others["inputs of one checkpointed region fewer in host memory"] = replace(
            plan, host_checkpoints=task.kept_regions - 1
        )
    for change, other in others.items():
        try:
            slower = price(task, other).seconds.step - seconds.step
        except PlanError:
            lines.append(f"saves     {change} cannot carry the step")
        else:
            lines.append(f"saves     {seconds_text(slower)} against {change}")
    return "\n".join(lines)
