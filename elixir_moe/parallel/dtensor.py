"""Parameters that are DTensors: what `parallelize_module` and its like leave in a model.

Owns the way between a DTensor and what the rest of the package works with: the local tensor of this rank, a `Pattern`,
a gradient placed as its parameter is. A plain tensor passes through unchanged, and without one DTensor is not imported.
"""

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from elixir_moe.errors import LayoutError
from elixir_moe.parallel.pattern import Pattern

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor."""
    return hasattr(type(tensor), "_local_tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` on this rank: the very tensor a DTensor wraps."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def wrap_local(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor of that spec around `local`; `local` itself if there is no spec."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def spec_of(tensor: torch.Tensor) -> Any:
    """What `wrap_local` needs to make one like `tensor`; None for a plain tensor."""
    return tensor._spec if is_dtensor(tensor) else None


def recast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Makes a DTensor say that it is of `dtype`; its local tensor is changed by who owns the memory."""
    if not is_dtensor(parameter) or parameter.dtype == dtype:
        return
    converted = parameter.detach().to(dtype)
    assert is_dtensor(converted)
    parameter.data = converted
    parameter._local_tensor, parameter._spec = converted._local_tensor, converted._spec


def placed_like(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The local part of `gradient`, placed as its parameter is: what is partial is summed. Collective over its mesh."""
    if not is_dtensor(gradient):
        return gradient
    assert is_dtensor(parameter)
    return local_of(gradient.redistribute(parameter.device_mesh, parameter.placements))


def pattern_of_dtensor(name: str, parameter: "DTensor") -> Pattern:
    """The pattern its placements amount to, on the whole mesh its own is a part of.

    Raises:
        LayoutError: a placement other than Shard and Replicate, or a dim that its axis does not cut evenly.
    """
    mesh = parameter.device_mesh
    root = mesh._get_root_mesh()
    axes = mesh.mesh_dim_names
    if axes is None or root.mesh_dim_names is None:
        raise LayoutError(f"parameter {name!r} is on a mesh without axis names: pass mesh_dim_names when you build it")
    shard = {}
    for axis, placement in zip(axes, parameter.placements, strict=True):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]
            if parameter.shape[dim] % mesh[axis].size():
                raise LayoutError(
                    f"parameter {name!r} of shape {tuple(parameter.shape)}: dim {dim} is not cut evenly by the "
                    f"{mesh[axis].size()} ranks of axis {axis!r}; choose a size that is"
                )
            shard[axis] = dim
        elif not placement.is_replicate():
            raise LayoutError(f"parameter {name!r} has placement {placement}: only Shard and Replicate can be wrapped")
    replicate = tuple(axis for axis in root.mesh_dim_names if axis not in shard)
    return Pattern(root, replicate=replicate, shard=shard)
