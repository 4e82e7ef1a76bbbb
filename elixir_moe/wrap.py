"""`wrap`: from a plain model and optimizer to sharded ones, step by step. Reads as the table of contents.

Owns the order of construction; each step is another file's work.
"""

import gc
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.ledger import Ledger
from elixir_moe.chunks.plan import AutoPlan, Plan, Tier
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.all_ranks import ControlGroups, drop_all, made_on_all_ranks, raise_on_all_ranks
from elixir_moe.distributed.collectives import build_communicators
from elixir_moe.distributed.waits import Wait
from elixir_moe.distributed.watchdog import watch
from elixir_moe.errors import TierError
from elixir_moe.hf.fused_experts import adapt_beside, restore_classes
from elixir_moe.hf.import_quantized import take_over
from elixir_moe.hf.pretrained import Pretrained
from elixir_moe.hf.save_pretrained import refuse_merges
from elixir_moe.memory.blocks import Blocks
from elixir_moe.memory.build import build_shards
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.memory.slabs import allocation
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel import megatron
from elixir_moe.parallel.mesh import prepare_process, start
from elixir_moe.parallel.rules import annotate_dtensors
from elixir_moe.runtime.chunk import Placeholder
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.reduction_order import Agreement, Peers, alone
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.units import build_units
from elixir_moe.state.full import groups_needed, refuse_plain_state_dicts
from elixir_moe.state.wrapped import Wrapped
from elixir_moe.wrapping.agreement import check_alike, check_device_memory, check_host_memory
from elixir_moe.wrapping.checks import (
    check_adapted_bytes,
    check_arguments,
    check_data,
    check_disk,
    check_modules,
    check_precision,
    warn_of_one_memory,
)
from elixir_moe.wrapping.deferred_init import plain_on_meta
from elixir_moe.wrapping.materialize import Passage, build_chunks, open_files, settle_buffers
from elixir_moe.wrapping.resolve_plan import close_all, decide, tile_for
from elixir_moe.wrapping.shared_frozen import one_home

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    optimizer: torch.optim.Optimizer,
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
        optimizer: an elementwise `torch.optim` optimizer on its parameters, not yet stepped.
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
        ConfigError: the optimizer is not elementwise, has a state that cannot be cut (8-bit moments in blocks), has
            been stepped, or does not belong to the model; a buffer, a view that a module keeps, or another parameter
            shares a parameter's memory; another library has quantized a layer in a format without an equal here; or
            an argument is wrong.
        TierError: device memory, host memory or the disk is too small; before anything is allocated, if free memory
            tells.
        CheckpointError: `weights` lacks a tensor that the model has on meta, or has it in another shape. ConfigError
            if its `quantization_config` names a format that is not known, or quantizes weights that are trainable or
            cut inside a block.
    """

    prepare_process()

    # 1. Check the arguments: each by itself, then among ranks, then the model.
    def check() -> None:
        check_arguments(model, optimizer, plan, sample, step, compute_dtype)
        check_disk(plan, optimizer)
        check_precision(plan, optimizer)
        watch()

    raise_on_all_ranks("checked what wrap was given", check) if dist.is_initialized() else check()
    device = start(device)
    watch()
    check_alike(optimizer, plan, weights)
    try:
        with plain_on_meta(model), ExitStack() as made:
            result = _wrapped(made, model, optimizer, plan, sample, step, compute_dtype, device, weights)
            made.pop_all()
            return result
    except BaseException as error:
        _let_go(error)
        raise


def _let_go(error: BaseException | None) -> None:
    """Cuts the traceback of an error about memory: its frames hold memory, for as long as a caller keeps the error."""
    if isinstance(error, TierError) or is_out_of_memory(error):
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
        gc.collect()


def _wrapped(
    made: ExitStack,
    model: M,
    optimizer: torch.optim.Optimizer,
    plan: Plan | AutoPlan,
    sample: Any,
    step: Callable[[nn.Module, Any], Any] | None,
    compute_dtype: torch.dtype | None,
    device: torch.device,
    weights: str | os.PathLike[str] | None,
) -> tuple[M, ShardedOptimizer]:
    """As `wrap`, with arguments that have been checked; `made` undoes all that is made here."""

    def check_model() -> None:
        take_over(model, optimizer)
        check_modules(model)
        annotate_dtensors(model)
        megatron.check(model)
        check_data(model, weights, step)

    raise_on_all_ranks("checked the model", check_model)
    made.callback(restore_classes, adapt_beside(model))
    tile_for(plan, model, optimizer, compute_dtype, device)
    pretrained = None if weights is None else Pretrained(model, weights)
    if pretrained is not None:
        made.callback(pretrained.unpack)
        raise_on_all_ranks("made place for the folder's bytes", pretrained.pack)
        raise_on_all_ranks("checked the folder's bytes", lambda: check_adapted_bytes(model))

    # 2. Describe the model and settle its plan.
    decided = decide(made, model, optimizer, plan, sample, step, compute_dtype, device)
    described, layout, schedule, plan = decided.spec, decided.layout, decided.schedule, decided.plan
    moments, over_gloo, communicators = decided.moments, decided.over_gloo, decided.communicators
    warn_of_one_memory(plan, layout, device)

    # 3. Make files, process groups and memory: all ranks, or none.
    ledger = Ledger.of(plan, layout, moments=moments, over_gloo=over_gloo, beside=decided.beside)
    size = ledger.footprint(plan.blocks(layout))
    check_host_memory(size.host_bytes + (size.device_bytes if device.type == "cpu" else 0))
    check_device_memory(device, size, model)
    home = one_home(plan, layout, device)
    spill, values = open_files(plan, layout, moments, device)
    files = tuple(file for file in (spill, values) if file is not None)
    made.callback(close_all, files)
    if not communicators:
        communicators = build_communicators([chunk.key.ranks for chunk in layout.chunks], device)
        made.callback(close_all, communicators.values())
    with Wait("the making of process groups by all ranks"):
        groups = ControlGroups(described.ranks, groups_needed(model, layout.chunks))
    made.callback(groups.close_alone)
    homes = [(chunk, plan.home(layout, chunk)) for chunk in layout.chunks]
    sums = HostSums(ledger.arriving_bytes, device) if ledger.arriving_bytes else None
    cache = CacheState(plan.blocks(layout), schedule if described.step_order.observed else None, prefetch=plan.prefetch)
    statistics, placeholder, streams = Statistics(cache=cache.counts), Placeholder(device), Streams(device)

    def allocate() -> tuple[list[ShardState], Blocks, Passage]:
        shards = build_shards(
            homes,
            device,
            spill,
            sums,
            values,
            values_on_disk=plan.values_on_disk,
            shared=home.memory,
            rank=dist.get_rank(),
        )
        most = schedule.gradient_blocks(plan.blocks(layout))
        blocks = Blocks(layout, plan.blocks(layout), most, shards, device, statistics, streams.allocating)
        return shards, blocks, Passage(layout, device)

    shards, blocks, passage = made_on_all_ranks("allocated their memory", allocate)

    # 4. Move buffers and weights, and build what moves weights: the scheduler, the hooks and the optimizer.
    settle_buffers(model, pretrained, device)
    made.callback(passage.undo)
    chunks = build_chunks(layout, described, shards, communicators, placeholder, pretrained, passage)

    def build() -> tuple[Scheduler, HostCheckpoints | None, Hooks, ShardedOptimizer]:
        staging = None
        if size.staging_bytes:
            with allocation(size.staging_bytes, "the staging buffer of reductions", Tier.DEVICE):
                staging = torch.empty(size.staging_bytes, dtype=torch.uint8, device=device)
        agreement: Agreement = alone
        if len(described.ranks) > 1:
            agreement = Peers(groups, chunks, stays=plan.blocks(layout) >= layout.most_blocks)
        scheduler = Scheduler(chunks, cache, blocks, staging, streams, statistics, agreement, sums)
        checkpoints = HostCheckpoints(plan.most_host_checkpoints, device, streams) if plan.host_checkpoints else None
        units = build_units(described.parts, layout)
        hooks = Hooks(model, units, scheduler, placeholder, checkpoints)
        made.callback(hooks.remove)
        everyone = communicators.get(described.ranks) if streams.asynchronous and not groups.has_stages else None
        routers = megatron.Routers(model)
        sharded = ShardedOptimizer(
            optimizer, scheduler, hooks, groups, files, routers, everyone, seed=plan.rounding_seed
        )
        return scheduler, checkpoints, hooks, sharded

    scheduler, checkpoints, hooks, sharded = made_on_all_ranks("built what moves weights", build)
    weakref.finalize(
        scheduler, drop_all, groups, tuple(communicators.values())
    ).atexit = False  # if nobody calls `close`
    wrapped = Wrapped(
        plan=plan,
        layout=layout,
        footprint=size,
        moments=moments,
        spec=described,
        groups=groups,
        scheduler=scheduler,
        hooks=hooks,
        checkpoints=checkpoints,
        optimizer=sharded,
        kept=sharded._kept,
        files=files,
        weights=None if weights is None else os.path.abspath(os.path.expanduser(weights)),
        not_shared=home.refused,
        prediction=decided.prediction,
    )
    model._elixir = wrapped  # type: ignore[assignment]
    refuse_plain_state_dicts(model, described)
    refuse_merges(model)
    megatron.refuse_replaced(model)
    if (prediction := decided.prediction) is not None:
        prediction.watch(model, sharded)
    model.zero_grad = sharded.zero_grad  # type: ignore[method-assign]
    return model, sharded
