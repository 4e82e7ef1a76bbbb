"""Reads and writes of parameters outside their modules: every function on a sharded parameter is intercepted.

Owns the two classes of a wrapped parameter: its original class while it is gathered for a unit, a read or a block of
user code, and `ShardedParameter` otherwise. torch passes every function on a sharded parameter to the class's
``__torch_function__``, in any mode and on any thread.

    operation                                        result
    a function that reads (``F.linear(x, p)``)       the parameter is gathered for the call
    an in-place operator (``p.mul_()``, `nn.init`)   the same, and the written values are stored in the shards
    ``p.data``, ``p.detach()``                       a read-only copy
    an address (``numpy()``, ``data_ptr()``)         in a forward, backward or autograd function, the parameter is held
                                                     for as long as that runs; elsewhere an error that names
                                                     `em.unsharded`
    shape, dtype and other metadata                  answered without a gather

No operator is patched and no mode is set. The owner of the parameters (`hooks`) gathers them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elixir_moe.errors import UsageError
from elixir_moe.parallel.dtensor import is_dtensor
from elixir_moe.torch_private import DisableTorchFunctionSubclass

_ATTRIBUTE = "_elixir_access"
_READING_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Properties that read values; all others are metadata."""
_COPYING = {"data", "detach"}
_ADDRESSING = {"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "_typed_storage", "storage"}
_LAYOUT = {"stride", "is_contiguous"}
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
    """The class before `wrap`."""
    guarded: type
    times: int = 0
    """Number of `open` calls that `close` has not undone."""


class ParamAccess:
    """Switches the classes of one model's parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        unshard_for_call: Callable[[list[nn.Parameter]], AbstractContextManager[None]],
        unshard_for_block: Callable[[list[nn.Parameter], bool], AbstractContextManager[None]],
        lend: Callable[[nn.Parameter], bool],
        keep_exactly: Callable[[nn.Parameter, torch.Tensor], None],
        has_gradient: Callable[[nn.Parameter], bool],
        name_of: Callable[[nn.Parameter], str],
    ) -> None:
        """Guards `parameters` from now on.

        Args:
            parameters: all parameters to guard.
            unshard_for_call: a context in which the given parameters can be read, and written in place.
            unshard_for_block: the same; if its second argument is true, any kind of write is kept.
            lend: holds a parameter for as long as what asks for its address runs; returns False if nobody knows how
                long that is.
            keep_exactly: stores values of more bits than the parameter has, which it was just given.
            has_gradient: whether the library holds a gradient of the parameter that ``parameter.grad`` does not show.
            name_of: the parameter's name in messages.
        """
        self.unshard_for_call = unshard_for_call
        self.unshard_for_block = unshard_for_block
        self.lend = lend
        self.keep_exactly = keep_exactly
        self.has_gradient = has_gradient
        self.name_of = name_of
        self._switches: dict[nn.Parameter, Switch] = {}
        kinds: dict[type, type] = {}
        for parameter in parameters:
            kind = type(parameter)
            if issubclass(ShardedParameter, kind):  # one class for all models, so that their parameters compare
                kinds[kind] = ShardedParameter
            kinds.setdefault(kind, type(f"Sharded{kind.__name__}", (ShardedParameter, kind), {}))
            self._switches[parameter] = Switch(parameter, kind, kinds[kind])
            setattr(parameter, _ATTRIBUTE, weakref.ref(self))  # a graph that holds a parameter must not hold the model
            parameter.__class__ = kinds[kind]
        self._no_swaps = [weakref.ref(parameter) for parameter in self._switches]
        """Torch swaps no tensors that have weak references: a swap would be lost without a word."""

    def switches(self, parameters: Iterable[nn.Parameter]) -> tuple[Switch, ...]:
        """The argument of `open` and `close` for these parameters."""
        return tuple(self._switches[parameter] for parameter in parameters)

    def open(self, switches: Iterable[Switch]) -> None:
        """Gives the parameters their original classes until `close`; calls nest."""
        for switch in switches:
            switch.times += 1
            if switch.times == 1:
                switch.parameter.__class__ = switch.plain

    def close(self, switches: Iterable[Switch]) -> None:
        """Undoes one `open`."""
        for switch in switches:
            switch.times = max(switch.times - 1, 0)  # `close_all` may have run before
            if not switch.times:
                switch.parameter.__class__ = switch.guarded

    def remove(self) -> None:
        """Gives the parameters their original classes for good."""
        for switch in self._switches.values():
            switch.parameter.__class__ = switch.plain
            delattr(switch.parameter, _ATTRIBUTE)

    def close_all(self) -> None:
        """Undoes every `open`, interrupted ones included."""
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
        if not _reads(name, is_property):
            told = args
            if name in _LAYOUT and not is_dtensor(args[0]):  # that of the values when they are gathered
                told = (torch.empty(args[0].shape, device="meta"), *args[1:])
            with DisableTorchFunctionSubclass():
                value = func(*told, **kwargs)
            if name == "grad" and is_property and (args[1] if len(args) == 2 else value) is None:
                _refuse_if_kept(args[0])
            return value
        if name in _ADDRESSING:
            owner = next(_guarded((*args, *kwargs.values())))
            if not _access_of(owner).lend(owner):
                _refuse_address(name, f"parameter {_access_of(owner).name_of(owner)!r}")
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with ExitStack() as stack:
            for access, parameters in _by_access(_guarded((*args, *kwargs.values()))).items():
                stack.enter_context(access.unshard_for_call(parameters))
            if name in _COPYING and len(args) == 1:
                return read_only(args[0].data)
            result = func(*args, **kwargs)
            exact = _of_more_bits(*args[:2]) if name == "copy_" else None
        if exact is not None:
            _access_of(args[0]).keep_exactly(args[0], exact)
        return result

    def set_(self, *source: Any, **named: Any) -> torch.Tensor:  # type: ignore[override]
        """Does ``p.data = tensor``; does nothing if `tensor` is `p` itself, as in parametrisations.

        torch does not pass this one function to ``__torch_function__``.
        """
        if named or len(source) != 1 or not isinstance(source[0], torch.Tensor):
            raise UsageError(
                "set_() on a wrapped parameter takes only a tensor: copy_() new values into it under torch.no_grad()"
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
    """A copy of a weight that raises on writes that change it, since they would not reach the weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedParameter) for kind in types):
            return NotImplemented  # `ShardedParameter` gathers its parameter and calls `func` again
        kwargs = kwargs or {}
        name, _ = _name(func)
        written = kwargs.get("out") if "out" in kwargs else (args[0] if args and _writes(name, args) else None)
        if any(
            isinstance(tensor, ReadOnly) for tensor in (written if isinstance(written, (list, tuple)) else [written])
        ):
            if isinstance(written, ReadOnly) and "out" not in kwargs and _leaves(func, args, kwargs):
                return written
            raise UsageError(f"{name} on a copy of a wrapped parameter would be lost: {_HOW_TO_WRITE}")
        if name in _ADDRESSING - {"numpy", "__array__"}:
            _refuse_address(name, "a copy of a wrapped parameter")
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if name in ("numpy", "__array__"):
                result.flags.writeable = False
                return result
            addresses = {t.untyped_storage().data_ptr() for t in args if isinstance(t, ReadOnly)}
            return _still_read_only(result, addresses)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


@contextmanager
def unsharded(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """A context in which parameters of a wrapped model are plain ones: gathered whole, with an address. Collective.

    Reads need it only for addresses (`numpy()`, DLPack, ``.data``) outside of forwards and autograd functions: any
    function gathers the parameters it reads. The forward of a parameter's own module does not need it.
    Parameters that are gathered together need blocks of the rCache together; do large models module by module.

    Args:
        target: a module with its submodules, a parameter, or several parameters.
        write: keep writes of any kind; every rank must write the same values.

    Raises:
        UsageError: a parameter belongs to no wrapped model, was written through ``.data`` or its address without
            `write`, or has other values on each rank at the end of a block with `write`.
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
    """The parameters by wrapped model, each once."""
    found: dict[ParamAccess, list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        found.setdefault(_access_of(parameter), []).append(parameter)
    return found


def _access_of(parameter: nn.Parameter) -> ParamAccess:
    access: ParamAccess | None = getattr(parameter, _ATTRIBUTE)()
    if access is None:
        raise UsageError(
            "the wrapped model of this parameter no longer exists: keep the model as long as you use its parameters"
        )
    return access


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` that raises on writes; a DTensor's copy is a plain one."""
    copy = tensor.clone()
    return copy.as_subclass(ReadOnly) if type(copy) is torch.Tensor else copy  # a DTensor's copy has a class already


def _refuse_address(name: str, owner: str) -> NoReturn:
    raise UsageError(
        f"{name} of {owner}, whose memory is another chunk's as soon as it is not in use: read a clone() of it, or "
        f"take the address inside `with em.unsharded(parameter):`, or in an autograd function. What is written there "
        f"is kept inside `with em.unsharded(parameter, write=True)`"
    )


def refuse_copy() -> NoReturn:
    """Raises UsageError for `copy` and `pickle` of a wrapped model."""
    raise UsageError(
        "a wrapped model can neither be copied nor pickled: copy it before wrap. For an average of its weights make "
        "AveragedModel(model) there, and after each step call its update_parameters(model) on all ranks; a frozen copy "
        "can be wrapped too. To keep its weights, use em.save, em.save_pretrained or em.full_state_dict(model)"
    )


def _assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Does ``parameter.data = value`` by copying the values."""
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


def _leaves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function that writes to its first argument leaves it as it is, as a clamp to wide limits does."""
    with DisableTorchFunctionSubclass():
        tried = args[0].clone()
        func(tried, *args[1:], **kwargs)
        return torch.equal(tried, args[0])


def _still_read_only(result: Any, addresses: set[int]) -> Any:
    """Views of a read-only copy are read-only too."""
    if type(result) is torch.Tensor:
        return result.as_subclass(ReadOnly) if result.untyped_storage().data_ptr() in addresses else result
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_still_read_only(item, addresses) for item in result)
    return result


def _of_more_bits(written: Any, source: Any = None, *_: Any) -> torch.Tensor | None:
    """The tensor that was copied into a parameter, in its shape, if it has bits that the parameter has not."""
    if not isinstance(written, nn.Parameter) or not isinstance(source, torch.Tensor) or is_dtensor(source):
        return None
    if not (written.is_floating_point() and source.is_floating_point()) or written.itemsize >= source.itemsize:
        return None
    return source.detach().expand(written.shape)


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


class RefusedReads(TorchFunctionMode):
    """A context in which a function that would gather a parameter raises UsageError with the parameter's name."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads(*_name(func)):
            for parameter in _guarded((*args, *kwargs.values())):
                raise UsageError(f"{self._why}: parameter {_access_of(parameter).name_of(parameter)!r}")
        return func(*args, **kwargs)


def _reads(name: str, is_property: bool) -> bool:
    """Whether a function of this name needs the values of its parameters, not only their shape."""
    return name in _READING_PROPERTIES if is_property else name not in _TELLING_METHODS


def _name(func: Any) -> tuple[str, bool]:
    """(name, whether it is a property)."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name), True
    return name, False
