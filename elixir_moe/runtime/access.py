"""How parameters are read and written while their modules do not run: every function that meets one is seen.

Owns the two classes of a wrapped parameter: its own while it is gathered for a unit, a read or a block of user code,
and `ShardedParameter` otherwise. torch hands every function that meets a sharded parameter to the class's
``__torch_function__``, in any mode and on any thread.

    what                                             becomes
    a function that reads (``F.linear(x, p)``)       the parameter is gathered for the call
    an in-place operator (``p.mul_()``, `nn.init`)   the same, and what was written is brought home
    ``p.data``, ``p.detach()``                       a copy that can be read and refuses to be written
    an address (``numpy()``, ``data_ptr()``)         an error that names `em.unsharded`
    questions of shape or dtype                      answered as they are

No operator is patched and no mode is set. How a parameter is gathered is the lender's matter (`hooks`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from elixir_moe.errors import UsageError

_ATTRIBUTE = "elixir_access"
_READING_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""All others only tell what a tensor is."""
_COPYING = {"data", "detach"}
_ADDRESSING = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "_typed_storage", "storage"}
_TELLING_METHODS = {
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "element_size",
    "get_device",
    "is_contiguous",
    "is_complex",
    "is_floating_point",
    "is_signed",
    "is_same_size",
    "is_set_to",
    "is_shared",
    "is_pinned",
    "has_names",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "__hash__",
    "__len__",
    "result_type",
    "can_cast",
    "_has_compatible_shallow_copy_type",
}


_HOW_TO_WRITE = (
    "write to the parameter itself under torch.no_grad(), or inside `with em.unsharded(parameter, write=True)`"
)


@dataclass(slots=True, eq=False)
class Switch:
    """One parameter with its two classes."""

    parameter: nn.Parameter
    plain: type
    """What it was before `wrap`."""
    guarded: type
    times: int = 0
    """How many `open` were not undone."""


class ParamAccess:
    """Switches the classes of one model's parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        unshard_for_call: Callable[[list[nn.Parameter]], AbstractContextManager[None]],
        unshard_for_block: Callable[[list[nn.Parameter], bool], AbstractContextManager[None]],
        has_gradient: Callable[[nn.Parameter], bool],
        name_of: Callable[[nn.Parameter], str],
    ) -> None:
        """Guards `parameters` from now on.

        Args:
            parameters: of a wrapped model.
            unshard_for_call: a context in which the given parameters can be read, and written in place.
            unshard_for_block: the same, in which they can be written in any way if it is told so.
            has_gradient: whether a gradient of the parameter is kept, where ``parameter.grad`` does not show it.
            name_of: what messages call it.
        """
        self.unshard_for_call = unshard_for_call
        self.unshard_for_block = unshard_for_block
        self.has_gradient = has_gradient
        self.name_of = name_of
        self._switches: dict[nn.Parameter, Switch] = {}
        kinds: dict[type, type] = {}
        for parameter in parameters:
            kind = type(parameter)
            kinds.setdefault(kind, type(f"ShardedParameter{kind.__name__}", (ShardedParameter, kind), {}))
            self._switches[parameter] = Switch(parameter, kind, kinds[kind])
            setattr(parameter, _ATTRIBUTE, weakref.ref(self))  # a graph that holds a parameter must not hold the model
            parameter.__class__ = kinds[kind]

    def switches(self, parameters: Iterable[nn.Parameter]) -> tuple[Switch, ...]:
        """What `open` and `close` take for these parameters."""
        return tuple(self._switches[parameter] for parameter in parameters)

    def open(self, switches: Iterable[Switch]) -> None:
        """Until `close`, the parameters are what they were before `wrap`; calls nest."""
        for switch in switches:
            switch.times += 1
            if switch.times == 1:
                switch.parameter.__class__ = switch.plain

    def close(self, switches: Iterable[Switch]) -> None:
        """Undoes one `open`."""
        for switch in switches:
            switch.times = max(switch.times - 1, 0)  # `close_all` may have come before
            if not switch.times:
                switch.parameter.__class__ = switch.guarded

    def remove(self) -> None:
        """The parameters are what they were, for good."""
        for switch in self._switches.values():
            switch.parameter.__class__ = switch.plain
            delattr(switch.parameter, _ATTRIBUTE)

    def close_all(self) -> None:
        """Undoes every `open`, also one that was interrupted."""
        for switch in self._switches.values():
            switch.times = 0
            switch.parameter.__class__ = switch.guarded


class ShardedParameter(nn.Parameter):
    """A parameter that is not gathered for a unit."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_property = _name(func)
        if name == "data" and is_property and len(args) == 2:
            return _assign(*args)
        if name not in _READING_PROPERTIES if is_property else name in _TELLING_METHODS:
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **kwargs)
            if name == "grad" and is_property and (args[1] if len(args) == 2 else value) is None:
                _refuse_if_kept(args[0])
            return value
        if name in _ADDRESSING:
            refuse_address(name)
        with ExitStack() as stack:
            for access, parameters in _by_access(_guarded((*args, *kwargs.values()))).items():
                stack.enter_context(access.unshard_for_call(parameters))
            if name in _COPYING and len(args) == 1:
                return read_only(args[0].data)
            return func(*args, **kwargs)

    def set_(self, *source: Any, **named: Any) -> torch.Tensor:  # type: ignore[override]
        """``p.set_(tensor)`` is ``p.data = tensor``, and nothing where that is `p` itself, as in parametrisations.

        torch hands this one function to no subclass.
        """
        if named or len(source) != 1 or not isinstance(source[0], torch.Tensor):
            raise UsageError(
                "set_() on a wrapped parameter takes a tensor alone: copy_() new values into it under torch.no_grad()"
            )
        _assign(self, source[0])
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Parameter of shape {tuple(self.shape)}, {self.dtype}, sharded: em.full_state_dict(model) has its values"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class ReadOnly(torch.Tensor):
    """A copy of a weight, which refuses to be written: the weight would not have what was written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedParameter) for kind in types):
            return NotImplemented  # it is gathered first, and asks again
        kwargs = kwargs or {}
        name, _ = _name(func)
        written = kwargs.get("out") if "out" in kwargs else (args[0] if args and _writes(name, args) else None)
        if any(
            isinstance(tensor, ReadOnly) for tensor in (written if isinstance(written, (list, tuple)) else [written])
        ):
            raise UsageError(f"{name} on a copy of a wrapped parameter would be lost: {_HOW_TO_WRITE}")
        if name in _ADDRESSING - {"numpy", "__array__"}:
            refuse_address(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if name in ("numpy", "__array__"):
                result.flags.writeable = False
                return result
            addresses = {t.untyped_storage().data_ptr() for t in args if isinstance(t, ReadOnly)}
            return _still_read_only(result, addresses)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


@contextmanager
def unsharded(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """Inside it, parameters of a wrapped model are plain ones: gathered whole, with an address. Collective.

    Reads need it only for addresses (`numpy()`, DLPack, ``.data``), as any function gathers what it reads. What is
    gathered at once needs blocks of the rCache; do large models module by module.

    Args:
        target: a module, with all that is beneath it, or some parameters.
        write: keep what is written in whatever way, on all ranks alike.

    Raises:
        UsageError: a parameter is of no wrapped model, or was written without `write`.
        PlanError: the parameters need more blocks than the rCache has.
    """
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    else:
        parameters = [target] if isinstance(target, nn.Parameter) else list(target)
    if any(not hasattr(parameter, _ATTRIBUTE) for parameter in parameters):
        raise UsageError("unsharded() of a parameter that no wrapped model has: call em.wrap first")
    with ExitStack() as stack:
        for access, mine in _by_access(parameters).items():
            stack.enter_context(access.unshard_for_block(mine, write))
        yield


def _by_access(parameters: Iterable[nn.Parameter]) -> dict[ParamAccess, list[nn.Parameter]]:
    """The parameters of each wrapped model, each once."""
    found: dict[ParamAccess, list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        found.setdefault(_access_of(parameter), []).append(parameter)
    return found


def _access_of(parameter: nn.Parameter) -> ParamAccess:
    access: ParamAccess | None = getattr(parameter, _ATTRIBUTE)()
    if access is None:
        raise UsageError("a parameter of a wrapped model that is gone: keep the model as long as its parameters")
    return access


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` that can be read like any other."""
    copy = tensor.clone()
    return copy.as_subclass(ReadOnly) if type(copy) is torch.Tensor else copy  # a DTensor's copy has a class already


def refuse_address(name: str) -> NoReturn:
    """What a parameter says to who asks for its address."""
    raise UsageError(
        f"{name} of a wrapped parameter: its memory is another chunk's as soon as it is not in use. Read a clone() of "
        f"it; inside `with em.unsharded(parameter, write=True)` it has an address, and keeps what is written there"
    )


def refuse_copy() -> NoReturn:
    """What a wrapped model says to `copy` and `pickle`."""
    raise UsageError(
        "a wrapped model can neither be copied nor pickled: copy it before wrap, save em.full_state_dict(model)"
    )


def _assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """``parameter.data = value``: the parameter takes the values."""
    wanted, found = ((tuple(t.shape), t.dtype, t.device) for t in (parameter, value))
    if found != wanted:
        name = _access_of(parameter).name_of(parameter)
        raise UsageError(
            f"parameter {name!r} of {wanted} cannot become {found}: shape, dtype and device are fixed in wrap, by its "
            f"compute_dtype and device"
        )
    if value is not parameter:
        with torch.no_grad():
            parameter.copy_(value)


def _writes(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function of this name writes to its first argument."""
    if name in _TELLING_METHODS:
        return False
    if name in ("__setitem__", "data"):
        return name == "__setitem__" or len(args) == 2
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_")


def _still_read_only(result: Any, addresses: set[int]) -> Any:
    """Views of a read-only copy are read-only too."""
    if type(result) is torch.Tensor:
        return result.as_subclass(ReadOnly) if result.untyped_storage().data_ptr() in addresses else result
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_still_read_only(item, addresses) for item in result)
    return result


def _refuse_if_kept(parameter: nn.Parameter) -> None:
    if _access_of(parameter).has_gradient(parameter):
        raise UsageError(
            "gradients of a wrapped model are sharded, parameter.grad does not have them: use "
            "optimizer.clip_grad_norm_ (not torch.nn.utils'), optimizer.scale (not GradScaler) and optimizer.zero_grad"
        )


def _guarded(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, ShardedParameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(value)
        elif isinstance(value, dict):
            yield from _guarded(value.values())


def _name(func: Any) -> tuple[str, bool]:
    """(name, whether it is a property)."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name), True
    return name, False
