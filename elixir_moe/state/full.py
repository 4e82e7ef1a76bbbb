"""Full tensors from shards: the model as a single process would have it.

Owns `full_state_dict`. Reads the shards and gathers over process groups of its own; touches neither the rCache nor the
schedule.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.packing import ChunkSpec
from elixir_moe.distributed.all_ranks import gathered, raise_on_all_ranks
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import UsageError
from elixir_moe.parallel.dtensor import spec_of, whole_of
from elixir_moe.parallel.pattern import Pattern
from elixir_moe.parallel.rules import UNCUT, pattern_of
from elixir_moe.parallel.state_dict import plain_state_dict
from elixir_moe.parallel.tiles import tile_of
from elixir_moe.runtime.model_spec import ModelSpec
from elixir_moe.runtime.param_access import RefusedReads
from elixir_moe.runtime.phase import WHOLE
from elixir_moe.state.wrapped import Wrapped, check_as_wrapped, require_wrapped
from elixir_moe.torch_private import storage_id


def groups_needed(parameters: Iterable[nn.Parameter], chunks: Iterable[ChunkSpec]) -> list[tuple[int, ...]]:
    """The ranks of each process group that `full_state_dict` gathers over."""
    patterns = {pattern for p in parameters if (pattern := pattern_of(p)) is not None}
    return [
        *(spec.key.ranks for spec in chunks),
        *(pattern.mesh.ranks_along((axis,)) for pattern in patterns for axis, _ in pattern.shard),
    ]


@torch.no_grad()
def full_state_dict(model: nn.Module, *, all_ranks: bool = False) -> dict[str, Any]:
    """Returns ``{name: full CPU tensor}`` like ``model.state_dict()`` before `wrap`, with the experts of all ranks.

    The model's own ``state_dict`` makes it from full tensors, with its hooks, its overrides and its extra state. Names
    stay those of `wrap` if parametrizations come or go. Trainable parameters are read from their fp32 masters. Tied
    names share one tensor. Collective.

    Args:
        model: a wrapped model.
        all_ranks: return the tensors on all ranks. By default only rank 0 gets them (for a pipeline stage, the first of
            its ranks); the others get an empty dict and hold at most one chunk at once.

    Raises:
        UsageError: the model is not wrapped, its parameters or buffers have changed since `wrap`, or a hook reads a
            parameter that it has kept instead of the module's.
        OutOfStepError: ranks have taken different steps, as after an interrupt; on all ranks.
        ElixirError: the model's ``state_dict`` raises; on all ranks.
    """
    wrapped = require_wrapped(model, "full_state_dict", "; use model.state_dict() on a plain one")
    check_as_wrapped(model, wrapped)
    gets = all_ranks or dist.get_rank() == wrapped.spec.ranks[0]
    names = wrapped.spec.names
    full = {names[parameter][0]: value for parameter, value in full_parameters(wrapped) if gets}
    states: list[dict[str, Any]] = []

    def take() -> None:
        if gets:
            values: dict[torch.Tensor, torch.Tensor] = {p: full[those[0]] for p, those in names.items()}
            states.append(_state_of(model, wrapped, values))

    raise_on_all_ranks("took the model's state dict", take, wrapped.groups.peers_group)
    return states[0] if gets else {}


def _state_of(model: nn.Module, wrapped: Wrapped, values: dict[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Returns the model's own state dict, from full parameters and CPU copies of its buffers."""
    values |= {buffer: buffer.detach().cpu().clone() for buffer in model.buffers()}
    with RefusedReads("a hook of state_dict() has kept a parameter, which it should read from its module"):
        state = plain_state_dict(model, wrapped.spec.names, values)
    ours = {_memory(value) for value in values.values()} - {None}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and _memory(value) not in ours:
            state[key] = value.detach().cpu().clone()  # made by a hook, perhaps a view of values that will change
    if state.keys() == wrapped.spec.keys.keys():  # parametrizations may have come or gone since: use wrap's order
        for key in wrapped.spec.keys:
            state[key] = state.pop(key)
    return state


def _memory(tensor: torch.Tensor) -> int | None:
    """The id of the storage of a tensor; None for a tensor that is not strided."""
    return storage_id(tensor.untyped_storage()) if tensor.layout is torch.strided else None


@torch.no_grad()
def full_parameters(
    wrapped: Wrapped, wanted: Container[nn.Parameter] | None = None
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yields (parameter, full CPU tensor in its dtype before `wrap`); gathers one chunk at a time. Collective.

    For a tiled parameter, yields its last tile with the whole parameter. Chunks without a parameter in `wanted` are
    neither read nor gathered; by default all parameters are wanted.
    """
    wrapped.phase.require(WHOLE, "em.full_state_dict()")
    wrapped.scheduler.writes.keep_all()
    if len(wrapped.spec.ranks) > 1:
        everyone = gathered((wrapped.phase.place, wrapped.kept.decision.stepped), wrapped.groups.peers_group)
        places, stepped = zip(*everyone, strict=True)
        wrapped.phase.compare(places, wrapped.spec.ranks)
        wrapped.kept.decision.compare_stepped(stepped)
    tiles: dict[str, dict[int, torch.Tensor]] = {}
    for chunk in wrapped.scheduler.chunks:
        if wanted is not None and not any(parameter in wanted for parameter in chunk.parameters):
            continue
        source = chunk.shard.weights().read().cpu() if chunk.shard.whole is None else chunk.shard.whole
        apart = chunk.spec.shards > 1 and chunk.shard.whole is None
        whole = torch.cat(_all(source, wrapped.groups.by_ranks[chunk.spec.key.ranks])) if apart else source
        owned = zip(chunk.spec.slots, chunk.parameters, chunk.locals, chunk.original_dtypes, strict=True)
        for slot, parameter, shaped, dtype in owned:
            if wanted is not None and parameter not in wanted:
                continue
            local = whole[slot.start : slot.stop].view(shaped.shape).to(dtype, copy=True)
            if (tile := tile_of(parameter)) is not None:
                name = wrapped.spec.names[parameter][0]
                there = tiles.setdefault(name, {})
                there[tile.start] = local
                if sum(map(len, there.values())) < tile.rows:
                    continue
                local = torch.cat([rows for _, rows in sorted(tiles.pop(name).items(), key=lambda item: item[0])])
            spec, pattern = spec_of(parameter), pattern_of(parameter) or UNCUT
            joined = _join(local, pattern, wrapped.groups.by_ranks) if spec is None else whole_of(local, spec)
            yield parameter, joined


def refuse_plain_state_dicts(model: nn.Module, spec: ModelSpec) -> None:
    """Makes ``model.state_dict()`` and ``load_state_dict()`` raise UsageError: released parameters hold no weights."""

    def refuse(module: nn.Module, *_: object) -> None:
        if any(parameter in spec.names for parameter in module.parameters()):  # else full tensors have replaced them
            raise UsageError(
                "a wrapped model's parameters are sharded: em.save_pretrained(model, folder) writes what "
                "model.save_pretrained would (in a Trainer, trainer.save_model(folder)), em.full_state_dict(model) has "
                "the full weights, and a state dict is loaded into the model before wrap"
            )

    model.register_state_dict_pre_hook(refuse)
    model.register_load_state_dict_pre_hook(refuse)
    if "state_dict" in vars(model) or type(model).state_dict is not nn.Module.state_dict:
        own = model.state_dict  # it may call only the state_dict of submodules, which have no such hook

        def state_dict(*args: Any, **kwargs: Any) -> Any:
            refuse(model)
            return own(*args, **kwargs)

        model.state_dict = state_dict  # type: ignore[method-assign]


def _join(local: torch.Tensor, pattern: Pattern, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> torch.Tensor:
    """Joins the slices of all ranks into the logical parameter, along the innermost axis first."""
    shape = pattern.global_shape(local.shape)
    local = local.view(pattern.cell_shape(local.shape))
    for axis, dim in reversed(pattern.shard):
        ranks = pattern.mesh.ranks_along((axis,))
        if len(ranks) > 1:
            local = torch.cat(_all(local, groups[ranks]), dim)
    return local.view(shape)


def _all(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gathers `tensor` of every rank, in rank order; as bytes, since gloo does not send every dtype."""
    flat = tensor.reshape(-1).view(torch.uint8)
    pieces = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    with Wait("the all-gather of whole parameters", dist.get_process_group_ranks(group)):
        dist.all_gather(pieces, flat, group=group)
    return [piece.view(tensor.dtype).view(tensor.shape) for piece in pieces]
