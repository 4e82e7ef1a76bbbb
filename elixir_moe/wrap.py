"""`wrap`: from a plain model and optimizer to sharded ones, in five stages.

Owns the order of the stages, and that what they allocate is freed if one fails. Each stage is a file in `wrapping`.
"""

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.errors import TierError
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.mesh import prepare_process
from elixir_moe.wrapping.allocate import allocate
from elixir_moe.wrapping.build import build
from elixir_moe.wrapping.materialize import materialize
from elixir_moe.wrapping.prepare import Request, accept, prepare
from elixir_moe.wrapping.resolve_plan import resolve_plan

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    plan: Plan | AutoPlan,
    sample: Any = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> tuple[M, ShardedOptimizer]:
    """Shards `model` and `optimizer` by `plan`, in place: the model keeps its class and its training loop.

    Collective: every rank calls it with the same model and plan. Weights are taken from the first rank of each
    replicate process group. Parameters without a pattern are replicated over the world.

    A failure on one rank is a failure on all, and frees what was allocated. Before weights move, the model stays
    unchanged. Afterwards parameters that had data are on meta, without it, and the model must be built again. Layers
    that bitsandbytes or transformers have quantized become layers of this library with the same bytes, and stay so.
    So do layers that `Plan.auto` has cut into tiles, with the optimizer's parameters.

    Args:
        model: any module, on any device; tensors on "meta" come from `weights`, or are drawn if it was built under
            `sharded_init`.
        optimizer: an elementwise `torch.optim` optimizer on its parameters, not yet stepped; `torch.optim.Muon`; or
            both, as in ``(muon, adamw)``, which together have each trainable parameter once. The `ShardedOptimizer` has
            the groups of both, in this order.
        plan: the tier of each chunk's state and the number of chunks gathered at once. `Plan.auto` traces one step and
            finds the fastest plan that fits; `em.inspect(model)` has the plan, the reasons for it and the expected time
            of a step.
        sample: with `step`, a batch: ``step(model, sample)`` and its backward run once on tensors without data. The run
            shows the order in which parameters are first used, which is the order of packing, and all requests of a
            step to the rCache, which prefetches from the first step on. A step that cannot run without data runs once
            on the model instead, without gradients. By default the order is that of registration. `Plan.auto` has a
            sample and a step of its own.
        step: the forward of a training step, as in ``step(model, batch).backward()``.
        compute_dtype: the dtype of forward and backward; fp32 masters keep the weights as they are now. By default each
            parameter's own dtype. `Pattern.dtype` overrides it.
        device: the device of forward; by default this rank's GPU, or the CPU.
        weights: a folder of safetensors, as `save_pretrained` and Hugging Face write them, that every rank can read.
            Parameters and buffers of a model made under ``torch.device("meta")`` are read from it straight into their
            shards; no rank ever holds more than one parameter besides. For a peft model made under `sharded_init`, the
            base is read and the adapters are drawn. Weights that the folder has in FP8 or MXFP4 stay bytes, as after
            `em.quantize`; they must be frozen. Spread experts, and tiles and slices of whole blocks, have their part
            of the bytes.

    Returns:
        The model and a `ShardedOptimizer` with the same `param_groups`.

    Raises:
        PlanError: the plan does not fit the model (a chunk too short, an rCache too small), or `Plan.auto` finds none
            that fits; the message has the missing bytes, their tier, and what would help.
        LayoutError: patterns do not fit the ranks, or ranks disagree.
        ConfigError: the optimizer is neither elementwise nor Muon, has a state that cannot be cut (8-bit moments in
            blocks), has been stepped, or does not belong to the model; Muon's parameters are not whole matrices, or its
            plan has narrow state; a buffer, a view that a module keeps, or another
            parameter shares a parameter's memory; another library has quantized a layer in a format without an equal
            here; or an argument is wrong.
        TierError: device memory, host memory or the disk is too small; before anything is allocated, if free memory
            tells.
        CheckpointError: `weights` lacks a tensor that the model has on meta, or has it in another shape. ConfigError
            if its `quantization_config` names a format that is not known, or quantizes weights that are trainable or
            cut inside a block.
    """

    prepare_process()
    request = accept(model, optimizer, plan, sample, step, compute_dtype, device, weights)
    try:
        with request.undo as undo:
            sharded = _wrap(request)
            undo.pop_all()
            return model, sharded
    except BaseException as error:
        _release_memory(error)
        raise


def _wrap(request: Request) -> ShardedOptimizer:
    """The stages of `wrap`. A stage is collective: all ranks end it, or all raise."""
    pretrained = prepare(request)
    resolved = resolve_plan(request)
    allocated = allocate(request, resolved)
    chunks = materialize(request, resolved, allocated, pretrained)
    return build(request, resolved, allocated, chunks)


def _release_memory(error: BaseException | None) -> None:
    """Cuts the traceback of an error about memory: its frames hold memory, for as long as a caller keeps the error."""
    if isinstance(error, TierError) or is_out_of_memory(error):
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
        gc.collect()
