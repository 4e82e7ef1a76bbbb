"""Parameters that are DTensors, made by `parallelize_module` and similar functions.

Owns the conversion from a DTensor to the types of the rest of the package: the local tensor of this rank, a `Pattern`,
a gradient placed like its parameter. Never changes a plain tensor, and never imports DTensor unless there is one.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.errors import LayoutError
from elixir_moe.parallel.pattern import EXPERT_AXIS, Pattern
from elixir_moe.torch_private import root_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor."""
    return hasattr(type(tensor), "_local_tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of `tensor`: the tensor that a DTensor wraps, or `tensor` itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def wrap_local(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Wraps `local` in a DTensor with this spec; returns `local` if the spec is None."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def placed_as(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wraps `local`, of any dtype, like the DTensor `tensor`; returns `local` if `tensor` is plain."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    whole: torch.Tensor = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return whole


def spec_of(tensor: torch.Tensor) -> Any:
    """Returns the spec with which `wrap_local` makes a DTensor like `tensor`; None for a plain tensor."""
    return tensor._spec if is_dtensor(tensor) else None


def recast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Converts a DTensor and its local tensor to `dtype`; leaves a plain parameter to its chunk."""
    if not is_dtensor(parameter) or parameter.dtype == dtype:
        return
    converted = parameter.detach().to(dtype)
    assert is_dtensor(converted)
    parameter.data = converted
    parameter._local_tensor, parameter._spec = converted._local_tensor, converted._spec


def placed_like(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Returns this rank's part of `gradient`, placed like `parameter`; sums partial values. Collective on the mesh."""
    if not is_dtensor(gradient):
        return gradient
    assert is_dtensor(parameter)
    return local_of(gradient.redistribute(parameter.device_mesh, parameter.placements))


def whole_of(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Returns the full tensor, on the CPU, from the `local` parts of all ranks of the DTensor's mesh. Collective."""
    mesh, meta = spec.mesh, spec.tensor_meta
    from torch.distributed.tensor import DTensor, Shard

    for axis, placement in enumerate(spec.placements):
        if (groups := getattr(placement, "split_factor", 1)) > 1:  # torch 2.11 cannot gather this placement
            dim = placement.dim % local.dim()
            by_group = local.to(mesh.device_type).unflatten(dim, (groups, -1))
            placements = [*spec.placements[:axis], Shard(dim + 1), *spec.placements[axis + 1 :]]
            return DTensor.from_local(by_group, mesh, placements).full_tensor().flatten(dim, dim + 1).cpu()
    part = DTensor.from_local(
        local.to(mesh.device_type), mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )
    return part.full_tensor().cpu()


def tensor_parallel_degree(tensors: Iterable[torch.Tensor]) -> int:
    """Returns how many ranks share a batch, according to the meshes of the DTensors among `tensors`."""
    roots = (root_mesh(tensor.device_mesh) for tensor in tensors if is_dtensor(tensor))
    return max((root["tp"].size() for root in roots if "tp" in (root.mesh_dim_names or ())), default=1)


def pattern_of_dtensor(name: str, parameter: "DTensor", tp: int) -> Pattern:
    """Returns the pattern of a DTensor's placements, on the root mesh of its own mesh.

    A placement with a `split_factor`, like torch's strided shard, shards each of several groups of rows, such as gate
    and up of a fused weight. Its pattern has a view with a dim of groups.

    Args:
        name: the parameter's name, for messages.
        parameter: a DTensor.
        tp: tensor-parallel degree of the model. Expert-parallel ranks that share a batch in the other layers split it
            among themselves in expert layers, so their gradients come from fewer batches than there are ranks.

    Raises:
        LayoutError: a mesh without names or without some ranks of the world, a placement that neither shards nor
            replicates, a dim that its axes do not divide evenly, or groups of rows sharded together with another dim.
    """
    mesh = parameter.device_mesh
    root, axes = root_mesh(mesh), mesh.mesh_dim_names
    if axes is None or root.mesh_dim_names is None:
        raise LayoutError(f"parameter {name!r} is on a mesh without axis names: pass mesh_dim_names when you build it")
    if root.mesh.numel() != dist.get_world_size():
        raise LayoutError(
            f"parameter {name!r} is on a mesh of {root.mesh.numel()} of the world's {dist.get_world_size()} ranks: "
            f"shard it along an axis of a mesh of all ranks, such as em.init_mesh(tp=...)['tp'], or annotate it"
        )
    shard: dict[str, int] = {}
    parts = [1] * parameter.dim()
    grouped: dict[str, Any] = {}
    for axis, placement in zip(axes, parameter.placements, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise LayoutError(f"parameter {name!r} has placement {placement}: a parameter is sharded or replicated")
        dim = placement.dim % parameter.dim()  # type: ignore[attr-defined]
        groups = getattr(placement, "split_factor", 1)
        parts[dim] *= mesh[axis].size() * groups
        if parameter.shape[dim] % parts[dim]:
            raise LayoutError(
                f"parameter {name!r} of shape {tuple(parameter.shape)}: dim {dim} is not divisible by the "
                f"{parts[dim]} parts of {placement} on axis {axis!r}; choose a size that is"
            )
        shard[axis] = dim
        if groups > 1:
            local = local_of(parameter).shape
            grouped = {"view": (*local[:dim], groups, local[dim] // groups, *local[dim + 1 :]), "grows": dim}
            shard[axis] = dim + 1
    if grouped and len(shard) > 1:
        raise LayoutError(
            f"parameter {name!r} has placements {parameter.placements}, one of which shards each of several groups of "
            f"rows: a pattern cannot combine this with another placement; shard the parameter on one axis"
        )
    replicate = tuple(axis for axis in root.mesh_dim_names if axis not in shard)
    pattern = Pattern(root, replicate=replicate, shard=shard, **grouped)
    if EXPERT_AXIS in shard and "tp" not in root.mesh_dim_names:
        pattern = replace(pattern, divisor=pattern.gradient_divisor // tp)
    return pattern
