"""Tensors that share memory with a parameter: `wrap` would move the parameter away from them.

Owns the search for overlapping bytes and the messages. Reads addresses and shapes, never data. One parameter with
several names is not a finding: it is tied, and stays so.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from elixir_moe.errors import ConfigError
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.torch_private import DisableTorchFunctionSubclass, storage_id

_REGISTRIES = frozenset(nn.Module().__dict__)
_MOST_WORK = 100_000
"""Steps in which numpy is to find whether two interleaved tensors overlap; undecided, they count as overlapping."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes from a tensor's first element to its last."""

    name: str
    is_parameter: bool
    memory: object
    """The owner of its addresses: a device, or one storage on meta."""
    start: int
    stop: int
    place: "np.ndarray[Any, Any]"
    """An array at the tensor's addresses, only for comparison: it must not be read."""


class _Array:
    """The interface by which numpy reads memory."""

    def __init__(self, tensor: Tensor, start: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
            "data": (start + 1, False),  # 0 would be no address
        }


def check_sharing(model: nn.Module) -> None:
    """Raises ConfigError if a parameter has bytes in common with another, a buffer, or a tensor that a module keeps."""
    with DisableTorchFunctionSubclass():  # tensors of `sharded_init` say where they are on meta
        found = list(_overlaps(_extents(model)))
    if found:
        more = f" ({len(found) - 1} more pairs share memory)" if len(found) > 1 else ""
        raise ConfigError(f"{_message(*found[0])}{more}")


def _message(parameter: _Extent, other: _Extent) -> str:
    kind = "parameter " if other.is_parameter else ""
    torn = f"{kind}{other.name!r} shares memory with parameter {parameter.name!r}, and wrap would tear them apart: "
    if not other.is_parameter:
        return f"{torn}compute it from the parameter in forward, or give it memory of its own with .detach().clone()"
    same = (parameter.start, parameter.place.shape, parameter.place.strides)
    if same == (other.start, other.place.shape, other.place.strides):
        return f"{torn}tie them as one Parameter before the optimizer is built, as in b.weight = a.weight"
    return (
        f"{torn}keep one Parameter and take its parts in forward, or give each memory of its own, as in "
        f"b.weight = nn.Parameter(b.weight.detach().clone())"
    )


def _overlaps(extents: Iterable[_Extent]) -> Iterator[tuple[_Extent, _Extent]]:
    """(parameter, another tensor) that have a byte in common."""
    by_memory: dict[object, list[_Extent]] = {}
    for extent in extents:
        by_memory.setdefault(extent.memory, []).append(extent)
    for those in by_memory.values():
        parameters: list[_Extent] = []
        others: list[_Extent] = []
        for extent in sorted(those, key=lambda extent: extent.start):
            parameters = [earlier for earlier in parameters if earlier.stop > extent.start]
            others = [earlier for earlier in others if earlier.stop > extent.start]
            yield from ((p, extent) for p in parameters if _share(p, extent))
            if extent.is_parameter:
                yield from ((extent, other) for other in others if _share(extent, other))
            (parameters if extent.is_parameter else others).append(extent)


def _share(a: _Extent, b: _Extent) -> bool:
    """Whether two tensors whose extents overlap have a byte in common: columns of one matrix interleave."""
    try:
        return np.shares_memory(a.place, b.place, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _extents(model: nn.Module) -> Iterator[_Extent]:
    """Parameters, buffers and tensors that modules keep as attributes, each once, if they have memory."""
    known: set[int] = set()
    for kind, named in enumerate((model.named_parameters(), model.named_buffers(), _kept(model))):
        for name, tensor in named:
            local = local_of(tensor)
            if id(local) not in known and local.layout is torch.strided and local.numel():
                known.add(id(local))
                yield from _extent(name, kind == 0, local)


def _extent(name: str, is_parameter: bool, tensor: Tensor) -> Iterator[_Extent]:
    """Nothing for a subclass that keeps its elements in tensors of its own, and so has no memory."""
    try:
        storage = tensor.untyped_storage()
        base = 0 if tensor.is_meta else storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return
    if base or tensor.is_meta:
        memory = ("meta", storage_id(storage)) if tensor.is_meta else tensor.device
        start = base + int(tensor.storage_offset()) * tensor.itemsize
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        place = np.asarray(_Array(tensor, start))
        yield _Extent(name, is_parameter, memory, start, start + (last + 1) * tensor.itemsize, place)


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors among the attributes of modules, also in containers and plain records there; none in closures."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        remade = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for name, value in attributes_of(module):
            if name not in remade:  # the hook computes the attribute before each forward
                yield from _within(f"{prefix}.{name}".lstrip("."), value, seen)


def _within(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in items_of(value):
            yield from _within(f"{name}[{key!r}]", item, seen)


def attributes_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module that are its own, and no registry of parameters, buffers, submodules or hooks."""
    return [(name, value) for name, value in module.__dict__.items() if name not in _REGISTRIES]


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Yields what a container or a plain record holds, with its place there."""
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, partial):
        return [*enumerate(value.args), *value.keywords.items()]
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        return list(getattr(value, "__dict__", {}).items())
    return []
