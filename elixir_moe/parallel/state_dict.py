"""The model's own state dict, with its hooks, its overrides and its extra state.

Owns the call of ``model.state_dict()`` with other tensors instead of the model's own, and the name of the tensor behind
each key. Never knows chunks.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.rules import names_of
from elixir_moe.parallel.tiles import tile_of, whole_name
from elixir_moe.torch_private import storage_id

_Rename = tuple[str, str, str]
"""(name in its module, present end of the key, wanted end of the key) of a parameter."""


def plain_state_dict(
    model: nn.Module, names: Mapping[nn.Parameter, list[str]], values: Mapping[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    """Returns ``model.state_dict()`` with whole parameters instead of tiles, and keys from `names`.

    During the call, modules hold `values` instead of their parameters and buffers. Torch calls hooks, overrides and
    ``get_extra_state`` as usual.
    """
    with _standing_in(model, names, values or {}):
        return model.state_dict()


def keys_of(model: nn.Module) -> dict[str, str | None]:
    """Returns {key of the model's state dict: first name of its parameter or buffer}.

    The name is None for entries that the model computes, and for extra state.
    """
    parameters = {t: those for t, those in names_of(model).items() if isinstance(t, nn.Parameter)}
    names: dict[Tensor, list[str]] = {
        t: those for t, those in (*parameters.items(), *persistent_buffers(model).items())
    }
    own = {name: tensor for tensor, those in names.items() for name in those}
    places = {place: those[0] for tensor, those in names.items() if (place := _place(tensor)) is not None}
    found: dict[str, str | None] = {}
    for key, value in plain_state_dict(model, parameters).items():
        place = _place(value) if isinstance(value, Tensor) else None
        if key in own and _place(own[key]) in (place, None):
            found[key] = names[own[key]][0]
        else:
            found[key] = places.get(place) if place is not None else None
    return found


def computed(keys: Mapping[str, str | None]) -> list[str]:
    """Lists the keys of entries that a model's state dict computes from its tensors, such as a part of one."""
    return [key for key, name in keys.items() if name is None and not key.endswith("_extra_state")]


def persistent_buffers(model: nn.Module) -> dict[Tensor, list[str]]:
    """Returns all names of each buffer that torch saves."""
    names: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, []).append(f"{path}.{name}".lstrip("."))
    return names


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Returns {key in the state dict: module} of the modules with ``get_extra_state``, under each of their names."""
    return {
        f"{path}._extra_state".lstrip("."): module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def unparametrized(name: str) -> str:
    """Returns the name of a parameter without the path that `torch.nn.utils.parametrize` inserts."""
    return re.sub(r"parametrizations\.([^.]+)\.original$", r"\1", name)


@contextmanager
def _standing_in(
    model: nn.Module, names: Mapping[nn.Parameter, list[str]], values: Mapping[Tensor, Tensor]
) -> Iterator[None]:
    undo: list[Callable[[], object]] = []
    try:
        for path, module in model.named_modules():
            renamed: list[_Rename] = []
            for name, parameter in module._parameters.items():
                if parameter is None or parameter not in names:
                    continue
                undo.append(partial(module._parameters.__setitem__, name, parameter))
                if (tile := tile_of(parameter)) is not None and tile.start:
                    module._parameters[name] = None  # the first tile stands for the whole
                    continue
                if parameter in values:
                    module._parameters[name] = _like(parameter, values[parameter])
                now = f"{path}.{name}".lstrip(".")
                if now not in names[parameter]:
                    renamed.append((name, *_ends(now, _wanted(now, parameter, names[parameter]))))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer in values:
                    undo.append(partial(module._buffers.__setitem__, name, buffer))
                    module._buffers[name] = values[buffer]
            if renamed:
                undo.append(module.register_state_dict_post_hook(partial(_rename, renamed)).remove)
        yield
    finally:
        for restore in undo:
            restore()


def _like(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Returns `value` as a parameter with the attributes of `parameter`, for hooks that read them."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    return other


def _wanted(now: str, parameter: nn.Parameter, names: list[str]) -> str:
    """Returns the one of the parameter's `names` that equals `now` except for tiles and parametrizations."""
    plain = unparametrized(whole_name(now, parameter))
    return next(name for name in names if unparametrized(name) == plain)


def _ends(now: str, wanted: str) -> tuple[str, str]:
    """Returns the two names without the path that they share."""
    shared = len(os.path.commonprefix([now, wanted]).rpartition(".")[0])  # noqa: RUF071 (cut at a dot)
    return now[shared:].lstrip("."), wanted[shared:].lstrip(".")


def _rename(renamed: list[_Rename], _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, now, wanted in renamed:
        key = prefix + name
        if key in state and key.endswith(now):
            state[key.removesuffix(now) + wanted] = state.pop(key)


def _place(tensor: Tensor) -> tuple[Any, ...] | None:
    """Returns a key that only tensors with the same memory share; None for tensors without plain memory."""
    local = local_of(tensor)
    if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided:
        return None
    return storage_id(local.untyped_storage()), local.storage_offset(), tuple(local.shape), local.stride()
