"""Comparisons between ranks before a model is wrapped: arguments, model and plan, and the memory of each host.

Owns the choice of what is compared. All functions are collective; checks on a single rank are in `checks`.
"""

import hashlib
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.ledger import Footprint
from elixir_moe.chunks.plan import AutoPlan, Plan, Tier
from elixir_moe.distributed.all_ranks import agree, disagreement, gathered
from elixir_moe.errors import ConfigError, LayoutError
from elixir_moe.memory.slabs import (
    bytes_freed,
    check_fits,
    device_left,
    host_bytes_for_plan,
    host_bytes_left,
    is_one_memory,
)
from elixir_moe.optim.joined import names_of_members
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.rules import pattern_of, replicated_everywhere
from elixir_moe.runtime.model_spec import ModelSpec

_FOR_STATE = 0.8
"""Fraction of free host memory for chunks if the plan does not say: data loaders and saves need some."""


def check_alike(optimizer: torch.optim.Optimizer, plan: Plan | AutoPlan, weights: object) -> None:
    """Raises ConfigError on all ranks if their arguments would make them take different paths through `wrap`."""
    kinds: dict[str, object] = {
        "optimizer": names_of_members(optimizer),
        "plan": type(plan).__name__,
        "weights": _kind(weights),
    }
    if isinstance(plan, AutoPlan):
        kinds |= {"hardware": _kind(plan.hardware), "disk": _kind(plan.disk)}
        kinds |= {"chunk_numel": plan.chunk_numel, "budget": plan.budget_bytes}
    agree("the arguments of wrap", kinds, remedy="give all ranks the same", error=ConfigError)


def _kind(value: object) -> str | None:
    return None if value is None else type(value).__name__


def agree_on(plan: Plan, model: ModelSpec) -> None:
    """Compares plan and model between the ranks that wrap this model. Raises LayoutError with the first difference.

    These are all ranks in the meshes of its patterns. Another pipeline stage has other ranks and another model.
    """
    given = json.loads(replace(plan, disk=plan.disk and "a folder").to_json())  # the folder may differ between hosts
    lines = []
    for parameter, spec in zip(model.parameters, model.params, strict=True):
        pattern = pattern_of(parameter) or replicated_everywhere()
        by = f" by {spec.key.optimizer}" if spec.key.optimizer else ""
        lines.append(
            f"{spec.name} {spec.shape} {spec.key.dtype} trainable={spec.key.trainable}{by} {pattern.describe()}"
        )
    described = {"plan": given, "parameters": lines}
    everyone = gathered((model.ranks, hashlib.sha256(repr(described).encode()).hexdigest()))
    if all(everyone[rank] == everyone[theirs[0]] for theirs, _ in everyone for rank in theirs):
        return
    models = gathered(described)
    for theirs, _ in everyone:
        if (found := disagreement("the plan or the model", [models[rank] for rank in theirs], theirs)) is not None:
            raise LayoutError(f"{found}: build the same model, patterns and plan on every rank of the patterns' meshes")
    raise LayoutError(f"ranks disagree about who wraps this model: {[theirs for theirs, _ in everyone]}")


def host_bytes_of_a_rank(ranks: Sequence[int], parameters: Iterable[nn.Parameter]) -> int:
    """Host memory for the state of each rank if the plan does not say: the least of any of `ranks`. Collective."""
    everyone = gathered((socket.gethostname(), host_bytes_for_plan(parameters, host_bytes_left())))
    hosts = [host for host, _ in everyone]
    return min(int(_FOR_STATE * everyone[rank][1]) // hosts.count(hosts[rank]) for rank in ranks)


def check_host_memory(nbytes: int, later: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
    """Raises TierError on all ranks if a host's free memory is too small.

    `nbytes` is the need of this rank. Shards of `later` bytes get their memory while the model's frozen `parameters`
    free theirs, of which all but the largest make use.
    """
    nbytes -= min(bytes_freed(parameters), sum(later) - max(later, default=0))
    everyone = gathered((socket.gethostname(), nbytes, host_bytes_left()))
    for host in dict.fromkeys(host for host, *_ in everyone):
        needs = [(theirs, left) for name, theirs, left in everyone if name == host]
        check_fits(sum(theirs for theirs, _ in needs), min(left for _, left in needs), f"{len(needs)} ranks on {host}")


def check_device_memory(device: torch.device, size: Footprint, parameters: Iterable[nn.Parameter]) -> None:
    """Raises TierError on all ranks if a GPU's free memory is too small for the ranks that use it; not for a CPU.

    What the model's `parameters` have there now counts as free, but for blocks, which are allocated before weights
    move. Where the GPU has the memory of its host, the plan's bytes in host memory are part of the need.
    """
    if not is_accelerator(device):
        return
    name, left = device_left(device)
    freed = sum(local_of(p).nbytes for p in parameters if is_accelerator(local_of(p).device))
    needed = max(size.device_bytes - freed, size.rcache_bytes + size.resident_bytes)
    needed += size.host_bytes if is_one_memory(device) else 0
    everyone = gathered((f"{name} of {socket.gethostname()}", needed, left))
    for gpu in dict.fromkeys(gpu for gpu, *_ in everyone):
        needs = [(theirs, free) for name, theirs, free in everyone if name == gpu]
        where = f"{len(needs)} ranks on {gpu}"
        check_fits(sum(theirs for theirs, _ in needs), min(free for _, free in needs), where, Tier.DEVICE)
