"""The first stage of `wrap`: checks of its arguments and of the model, which is then ready to be described.

Owns the order of the checks and of the changes that come before a description: layers of other libraries, tiles, the
bytes of a folder. `checks` and `agreement` have the checks themselves.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.distributed.all_ranks import make_on_all_ranks, raise_on_all_ranks
from elixir_moe.distributed.watchdog import watch
from elixir_moe.hf.fused_experts import restore_classes, run_adapters_unmerged
from elixir_moe.hf.import_quantized import import_quantized
from elixir_moe.hf.pretrained import Pretrained
from elixir_moe.optim.joined import join
from elixir_moe.parallel import megatron
from elixir_moe.parallel.mesh import start
from elixir_moe.parallel.rules import annotate_dtensors
from elixir_moe.wrapping.agreement import check_alike
from elixir_moe.wrapping.checks import (
    check_adapted_bytes,
    check_arguments,
    check_data,
    check_disk,
    check_modules,
    check_precision,
    check_whole_matrices,
)
from elixir_moe.wrapping.deferred_init import follow, unfollow


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `wrap`, which documents them, and the device of forward on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan | AutoPlan
    sample: Any
    step: Callable[[nn.Module, Any], Any] | None
    compute_dtype: torch.dtype | None
    device: torch.device
    weights: str | os.PathLike[str] | None
    undo: ExitStack = field(default_factory=ExitStack)
    """Undoes what the stages have made so far, the last first. It is closed if a stage fails."""


def accept(
    model: nn.Module,
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    plan: Plan | AutoPlan,
    sample: Any,
    step: Callable[[nn.Module, Any], Any] | None,
    compute_dtype: torch.dtype | None,
    device: torch.device | str | None,
    weights: str | os.PathLike[str] | None,
) -> Request:
    """Checks the arguments of `wrap`, on this rank and then between ranks, and starts what is not running. Collective.

    Raises ConfigError or TierError on all ranks if an argument is wrong, or differs between ranks.
    """

    def check() -> torch.optim.Optimizer:
        optimizer = join(given)
        check_arguments(model, optimizer, plan, sample, step, compute_dtype)
        check_whole_matrices(plan, optimizer)
        check_disk(plan, optimizer)
        check_precision(plan, optimizer)
        watch()
        return optimizer

    optimizer = make_on_all_ranks("checked what wrap was given", check) if dist.is_initialized() else check()
    request = Request(model, optimizer, plan, sample, step, compute_dtype, start(device), weights)
    watch()
    check_alike(optimizer, plan, weights)
    return request


def prepare(request: Request) -> Pretrained | None:
    """Checks the model, and gives it the layers and the tiles that it is described with. Collective; raises as `wrap`.

    Returns the folder of weights, with place in the model for its bytes; None without a folder.
    """
    model = request.model
    request.undo.callback(follow, unfollow(model))

    def check() -> None:
        import_quantized(model, request.optimizer)
        check_modules(model)
        annotate_dtensors(model)
        megatron.check(model)
        check_data(model, request.weights, request.step)

    raise_on_all_ranks("checked the model", check)
    request.undo.callback(restore_classes, run_adapters_unmerged(model))
    _tile(request)  # before the folder: its weights are looked up, and become bytes, by tile
    if request.weights is None:
        return None
    pretrained = Pretrained(model, request.weights)
    request.undo.callback(pretrained.unpack)
    raise_on_all_ranks("made place for the folder's bytes", pretrained.pack)
    raise_on_all_ranks("checked the folder's bytes", lambda: check_adapted_bytes(model))
    return pretrained


def _tile(request: Request) -> None:
    """Cuts the parameters that no plan could hold whole into tiles, if the plan is searched for. Collective."""
    if isinstance(request.plan, AutoPlan):
        from elixir_moe.planner.auto import device_budget
        from elixir_moe.wrapping.tiling import tile_to_fit

        room = device_budget(request.model, request.plan, request.device)
        tile_to_fit(request.model, request.optimizer, room, request.compute_dtype)
