"""The last stage of `wrap`: the scheduler, the hooks and the optimizer that move weights from now on.

Owns their construction, the record that `wrap` leaves on the model, and the methods of the model that then behave
differently.
"""

import os
import weakref
from collections.abc import Sequence

import torch

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.all_ranks import drop_all, make_on_all_ranks
from elixir_moe.hf.save_pretrained import refuse_merges
from elixir_moe.kernels import host_threads
from elixir_moe.memory.slabs import allocation, locked_zeros
from elixir_moe.optim.optimizer import ShardedOptimizer, refuse_given
from elixir_moe.parallel import megatron
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.peers import Peers, of_one_rank
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.units import build_units, callers_of_parts
from elixir_moe.state.full import refuse_plain_state_dicts
from elixir_moe.state.wrapped import Wrapped
from elixir_moe.wrapping.allocate import Allocated
from elixir_moe.wrapping.prepare import Request
from elixir_moe.wrapping.resolve_plan import Resolved


def build(request: Request, resolved: Resolved, allocated: Allocated, chunks: Sequence[Chunk]) -> ShardedOptimizer:
    """Builds what moves the weights of `chunks`, and marks the model as wrapped. Collective.

    Raises TierError on all ranks if the device has too little memory for the buffer of reductions.
    """
    wrapped = make_on_all_ranks("built what moves weights", lambda: _build(request, resolved, allocated, list(chunks)))
    model, optimizer = request.model, wrapped.optimizer
    communicators = tuple(resolved.communicators.values())
    dropping = weakref.finalize(wrapped.scheduler, drop_all, allocated.groups, communicators)  # if nobody calls `close`
    dropping.atexit = False
    model._elixir = wrapped  # type: ignore[assignment]
    refuse_plain_state_dicts(model, resolved.spec)
    refuse_merges(model)
    megatron.refuse_replaced(model)
    if resolved.prediction is not None:
        resolved.prediction.watch(model, optimizer)
    refuse_given(request.optimizer)
    model.zero_grad = optimizer.zero_grad  # type: ignore[method-assign]
    return optimizer


def _build(request: Request, resolved: Resolved, allocated: Allocated, chunks: list[Chunk]) -> Wrapped:
    """The objects that carry out the plan on this rank. `request.undo` then removes the hooks, too."""
    model, plan, layout, spec = request.model, resolved.plan, resolved.layout, resolved.spec
    groups, streams = allocated.groups, allocated.streams
    several = len(spec.ranks) > 1
    scheduler = Scheduler(
        chunks,
        allocated.cache,
        allocated.blocks,
        _staging(request, allocated),
        streams,
        allocated.statistics,
        Peers(groups, chunks, stays=plan.blocks(layout) >= layout.most_blocks) if several else of_one_rank,
        allocated.sums,
        resolved.communicators,
        _update_buffer(request, chunks),
    )
    checkpoints = (
        HostCheckpoints(plan.most_host_checkpoints, request.device, streams) if plan.host_checkpoints else None
    )
    callers = callers_of_parts(spec.parts) if checkpoints is not None else ()
    hooks = Hooks(model, build_units(spec.parts, layout), scheduler, allocated.placeholder, checkpoints, callers)
    request.undo.callback(hooks.remove)
    everyone = resolved.communicators.get(spec.ranks) if streams.asynchronous and not groups.has_stages else None
    optimizer = ShardedOptimizer(
        request.optimizer,
        scheduler,
        hooks,
        groups,
        allocated.files,
        megatron.Routers(model),
        everyone,
        seed=plan.rounding_seed,
    )
    return Wrapped(
        plan=plan,
        layout=layout,
        footprint=allocated.footprint,
        moments=resolved.moments,
        spec=spec,
        groups=groups,
        scheduler=scheduler,
        hooks=hooks,
        checkpoints=checkpoints,
        optimizer=optimizer,
        kept=optimizer._kept,
        files=allocated.files,
        weights=None if request.weights is None else os.path.abspath(os.path.expanduser(request.weights)),
        not_shared=allocated.not_shared,
        prediction=resolved.prediction,
    )


def _staging(request: Request, allocated: Allocated) -> torch.Tensor | None:
    """The staging buffer of reductions, if any needs one."""
    nbytes = allocated.footprint.staging_bytes
    if not nbytes:
        return None
    with allocation(nbytes, "the staging buffer of reductions", Tier.DEVICE):
        return torch.empty(nbytes, dtype=torch.uint8, device=request.device)


def _update_buffer(request: Request, chunks: Sequence[Chunk]) -> torch.Tensor | None:
    """The buffer for updates of whole matrices whose gradients are on disk, if there are any."""
    specs = [chunk.spec for chunk in chunks if chunk.spec.key.optimizer and chunk.shard.gradient_comes_along]
    nbytes = max((spec.shard_numel * spec.update_itemsize for spec in specs), default=0)
    if not nbytes:
        return None
    with allocation(nbytes, "the updates of matrices on disk", Tier.HOST):
        if is_accelerator(request.device):
            return locked_zeros(nbytes, host_threads(request.device))
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
