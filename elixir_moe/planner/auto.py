"""`Plan.auto`: the best plan for a model on the present ranks.

Owns the memory available to the plan, the search on one rank for all ranks that hold the model, and the `Forecast` that
they all get. One rank searches, by its own trace, so rounding cannot give ranks different plans. Never wraps the model.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.events import StepEvent
from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.distributed.all_ranks import gathered, make_on_all_ranks, raise_on_all_ranks
from elixir_moe.errors import ConfigError
from elixir_moe.memory.slabs import device_left, host_bytes_for_plan, host_bytes_left
from elixir_moe.parallel.rules import pattern_of, replicated_everywhere
from elixir_moe.planner import cost
from elixir_moe.planner.explain import explain
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.measure import describe, hardware_here, remembered_fit, with_disk
from elixir_moe.planner.solve import PlanCandidate, Task, solve
from elixir_moe.planner.trace import trace
from elixir_moe.runtime.model_spec import ranks_of
from elixir_moe.runtime.units import Parts, traced_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """The user's request, with the facts that `wrap` adds to it."""

    wanted: AutoPlan
    device: torch.device
    compute_dtype: torch.dtype | None
    adam: bool
    """Whether the elementwise optimizer is Adam: only Adam updates while the next forward runs."""
    updates_on_disk: bool
    moments: int
    """fp32 values the optimizer keeps per element."""
    over_gloo: bool
    """Whether reductions run over gloo."""
    trained_whole: Mapping[nn.Parameter, str] = field(default_factory=dict)
    """The parameters that are updated as whole matrices, as for `param_specs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """The memory of one rank that is free, or available for training."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The plan found and its predicted cost; the same on all ranks that hold the model."""

    plan: Plan
    events: tuple[StepEvent, ...]
    """The events of a step, with parameters numbered as in ``model.parameters()``."""
    seconds: cost.Seconds
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    """Bytes the library holds in each of the three tiers."""
    activation_bytes: int
    """The most bytes that a micro-batch's activations take on the device."""
    hardware: Hardware


def forecast(model: nn.Module, request: SearchRequest) -> tuple[Forecast, Task | None, dict[str, Any] | None]:
    """Finds the plan. Collective over the world; errors are raised on all ranks, other pipeline stages included.

    Returns:
        (forecast, task, machine): the task on the rank that searched, else None; the description of the machine
        (`describe`) if it was measured, else None.

    Raises:
        PlanError: no plan fits; the message has the missing bytes, the tier and a remedy.
        ConfigError: the step cannot be traced, the hardware file lacks a figure, or the budget exceeds free memory.
    """
    everywhere = replicated_everywhere()
    machine = None
    wanted = request.wanted
    if wanted.hardware is None:
        dtype = request.compute_dtype or next((p.dtype for p in model.parameters()), torch.float32)
        machine = describe(request.device, dtype)
        hardware = hardware_here(machine, request.device, groups_of(model))
    else:
        name = wanted.hardware
        hardware = raise_on_all_ranks("read the figures of a machine", lambda: Hardware.named(name))[dist.get_rank()]
    peers = ranks_of(model, everywhere)
    disk_bytes = 0
    if wanted.disk is not None:
        hardware, disk_bytes = with_disk(hardware, wanted.disk)
    left = gathered(_free_memory(model, request.device, disk_bytes))
    tasks: list[Task] = []

    def search() -> Forecast | None:
        memory = _memory_budget(peers, wanted, request.device, left)
        if dist.get_rank() != peers[0]:
            return None
        task = _task(model, request, hardware, memory)
        fitted = None if machine is None else remembered_fit(machine, task.profile.key)
        tasks.append(task if fitted is None else replace(task, hardware=replace(hardware, fitted=fitted)))
        return forecast_of(solve(tasks[0]))

    found = raise_on_all_ranks("searched for a plan", search)[peers[0]]
    assert found is not None, "the first rank that holds the model has searched"
    found = replace(found, plan=replace(found.plan, reduce_dtype=wanted.reduce_dtype))
    if found.plan.disk_chunks:
        found = replace(found, plan=replace(found.plan, disk=wanted.disk, verify=wanted.verify))
    return found, tasks[0] if tasks else None, machine


def device_budget(model: nn.Module, wanted: AutoPlan, device: torch.device) -> int:
    """Returns the device memory in bytes that a plan may use on each rank, activations included. Collective."""
    peers, left = ranks_of(model, replicated_everywhere()), gathered(_free_memory(model, device, 0))
    return make_on_all_ranks(
        "looked at the device's memory", lambda: _memory_budget(peers, wanted, device, left)
    ).device_bytes


def groups_of(model: nn.Module) -> set[tuple[int, ...]]:
    """Returns the ranks of each replicate process group of the model."""
    everywhere = replicated_everywhere()
    return {(pattern_of(p) or everywhere).replicate_ranks for p in model.parameters()}


def events_of(
    model: nn.Module,
    parts: Parts,
    step: Callable[[nn.Module, Any], Any],
    sample: Any,
    compute_dtype: torch.dtype | None,
) -> Sequence[StepEvent]:
    """Returns the events of ``step(model, sample)``, which the first rank that holds the model traces. Collective.

    Parameters are numbered as in ``model.parameters()``. A step that cannot run on fake tensors is run on the model
    itself, by all its ranks and without its backward.
    """
    rank = dist.get_rank()
    first, *_ = ranks_of(model, replicated_everywhere())

    def traced() -> Sequence[StepEvent] | None:
        if rank != first:
            return ()
        try:
            profile = trace(model, step, sample, world=dist.get_world_size(), rank=rank, compute_dtype=compute_dtype)
        except ConfigError:
            return None
        return profile.registered_events

    def run() -> Sequence[StepEvent]:
        events = traced_forward(model, parts, step, sample)
        return events if rank == first else ()

    everyone = raise_on_all_ranks("traced the step that sample and step are", traced)
    events = everyone[first]
    if None in everyone:  # other ranks may hold another stage, whose step can be traced
        work = run if events is None else tuple
        ran = raise_on_all_ranks("ran the step that sample and step are", work)[first]
        events = ran if events is None else events
    assert events is not None, "the first rank has returned its events"
    return events


def _task(model: nn.Module, request: SearchRequest, hardware: Hardware, memory: MemoryBudget) -> Task:
    world = dist.get_world_size()
    hardware.links(world)
    profile = trace(
        model,
        request.wanted.step,
        request.wanted.sample,
        world=world,
        rank=dist.get_rank(),
        compute_dtype=request.compute_dtype,
        reduce_dtype=request.wanted.reduce_dtype,
        precision=request.wanted.precision,
        trained_whole=request.trained_whole,
        device=request.device,
    )
    task = Task(
        profile=profile,
        hardware=hardware,
        gpus=world,
        capacity_bytes=memory.device_bytes,
        host_bytes=0 if hardware.one_memory else memory.host_bytes,
        disk_bytes=memory.disk_bytes if request.updates_on_disk else None,
        moments=request.moments,
        overlaps_updates=request.adam and not request.trained_whole,
        updates_in_backward=request.wanted.update_in_backward,
        over_gloo=request.over_gloo,
        accumulation=request.wanted.accumulation,
        chunk_numel=request.wanted.chunk_range,
    )
    return task.passing(request.wanted.batches_per_pass)


def forecast_of(candidate: PlanCandidate) -> Forecast:
    """Returns the forecast of a candidate."""
    task = candidate.task
    device, host = task.held_bytes(candidate.size)
    return Forecast(
        plan=replace(candidate.plan, explanation=explain(candidate)),
        events=task.profile.registered_events,
        seconds=candidate.seconds,
        device_bytes=device,
        host_bytes=host + task.kept_bytes,
        disk_bytes=candidate.size.disk_bytes,
        activation_bytes=task.profile.activation_bytes,
        hardware=task.hardware,
    )


def _free_memory(model: nn.Module, device: torch.device, disk_bytes: int) -> tuple[str, MemoryBudget]:
    """Returns (the host of this rank, its free memory)."""
    free = 0
    if is_accelerator(device):
        _, free = device_left(device)
    host_bytes = host_bytes_for_plan(model.parameters(), host_bytes_left())
    return socket.gethostname(), MemoryBudget(device_bytes=free, host_bytes=host_bytes, disk_bytes=disk_bytes)


def _memory_budget(
    peers: tuple[int, ...], wanted: AutoPlan, device: torch.device, everyone: list[tuple[str, MemoryBudget]]
) -> MemoryBudget:
    """Returns the least memory of any rank that holds the model.

    Ranks of one host share its memory equally; without a GPU, device and host share it too.
    """
    own_memory = is_accelerator(device)
    hosts, free = zip(*everyone, strict=True)
    left = min(free[rank].host_bytes // hosts.count(hosts[rank]) for rank in peers)
    most = min(free[rank].device_bytes for rank in peers) if own_memory else left
    budget = most if wanted.budget_bytes is None else wanted.budget_bytes
    if budget > most:
        where = f"{device.type} memory for each of its ranks"
        raise ConfigError(f"budget={budget}: only {most} bytes of {where} are free; choose at most that, or None")
    disk = min(free[rank].disk_bytes for rank in peers)
    return MemoryBudget(device_bytes=budget, host_bytes=left if own_memory else left - budget, disk_bytes=disk)
