"""The model as one process would have it: full tensors from shards.

Owns `full_state_dict`. Reads homes and gathers over process groups of its own; disturbs neither rCache nor schedule.
"""

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.chunk import Chunk
from elixir_moe.errors import ConfigError
from elixir_moe.parallel.annotate import pattern_of
from elixir_moe.parallel.pattern import Pattern


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """``{name: full CPU tensor}`` with the names, shapes and dtypes of the model before `wrap`, experts of all ranks included.

    Trainable parameters come from their fp32 masters. Tied names share one tensor. Collective; every rank gets all of it.

    Raises:
        ConfigError: the model is not wrapped.
    """
    chunks: list[Chunk] | None = getattr(model, "elixir_chunks", None)
    if chunks is None:
        raise ConfigError("full_state_dict needs a model that went through wrap; use model.state_dict() on a plain one")
    groups = _Groups()
    full: dict[nn.Parameter, torch.Tensor] = {}
    for chunk in chunks:
        source = chunk.home.compute if chunk.home.master is None else chunk.home.master
        whole = groups.concatenate(source.cpu(), chunk.spec.key.ranks) if chunk.spec.shards > 1 else source.cpu()
        for slot, parameter, dtype in zip(chunk.spec.slots, chunk.parameters, chunk.original_dtypes, strict=True):
            local = whole[slot.start : slot.stop].view(parameter.shape).to(dtype)
            full[parameter] = _join(local, pattern_of(parameter), groups)
    state = {name: full[p] for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: state[name] if name in state else value.cpu().clone() for name, value in model.state_dict().items()}


def _join(local: torch.Tensor, pattern: Pattern | None, groups: "_Groups") -> torch.Tensor:
    """The logical parameter from the slices of all ranks it is sharded over; the innermost axis is joined first."""
    if pattern is None:
        return local.clone()
    for axis, dim in reversed(pattern.shard):
        ranks = pattern.mesh.ranks_along((axis,))
        if len(ranks) > 1:
            pieces = groups.all(local.contiguous(), ranks)
            local = torch.cat(pieces, dim)
    return local.clone()


class _Groups:
    """gloo process groups by their ranks, made when first needed and in the same order on all their ranks."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def all(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[torch.Tensor]:
        """`tensor` of every rank, in the order of `ranks`."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        pieces = [torch.empty_like(tensor) for _ in ranks]
        own = tensor.view(torch.uint8) if tensor.numel() and tensor.dim() else tensor
        views = [p.view(torch.uint8) if tensor.numel() and tensor.dim() else p for p in pieces]
        dist.all_gather(views, own, group=self._groups[ranks])
        return pieces

    def concatenate(self, shard: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """The shards of all ranks, one behind the other."""
        return torch.cat(self.all(shard, ranks))
