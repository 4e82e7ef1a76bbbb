"""Parameters between two uses: nobody reads one that is not gathered without being seen.

Owns the class a parameter has while its module does not run. A wrapped parameter is of its own class inside the forward
of its module, and `Guarded` outside. torch then hands every function that meets it to `Guarded.__torch_function__`,
in any mode and on any thread: reads (``F.linear(h, self.wte.weight)``, a penalty on weights, ``p.norm()`` between two
steps) gather the parameter for as long as the function runs; questions of shape or dtype do not. There is no mode on a
stack and no operator is patched. What a gather is, and what becomes of writes, is the borrower's matter (`hooks`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from elixir_moe.errors import ConfigError

_ATTRIBUTE = "elixir_guard"
_READING_PROPERTIES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""All others only tell what a tensor is."""
_VIEWING = {"data", "detach"}
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


@dataclass(slots=True, eq=False)
class Door:
    """One parameter with its two classes."""

    parameter: nn.Parameter
    plain: type
    """What it was before `wrap`."""
    guarded: type
    times: int = 0
    """How many `open` were not undone."""


class Guard:
    """Switches the classes of one model's parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lend: Callable[[list[nn.Parameter]], AbstractContextManager[None]],
        gave: Callable[[nn.Parameter, torch.Tensor | None], None],
        assign: Callable[[nn.Parameter, torch.Tensor], None],
        has_gradient: Callable[[nn.Parameter], bool],
    ) -> None:
        """Guards `parameters` from now on.

        Args:
            parameters: of a wrapped model.
            lend: a context in which the given parameters can be read and written.
            gave: told inside it when user code gets a view of a parameter with a version counter of its own, or (None)
                an address through which it can write without a trace.
            assign: gives a parameter new values, which views of the old ones do not get.
            has_gradient: whether a gradient of the parameter is kept, where ``parameter.grad`` does not show it.
        """
        self.lend = lend
        self.gave = gave
        self.assign = assign
        self.has_gradient = has_gradient
        self._doors: dict[nn.Parameter, Door] = {}
        kinds: dict[type, type] = {}
        for parameter in parameters:
            kind = type(parameter)
            kinds.setdefault(kind, type(f"Guarded{kind.__name__}", (Guarded, kind), {}))
            self._doors[parameter] = Door(parameter, kind, kinds[kind])
            setattr(parameter, _ATTRIBUTE, self)
            parameter.__class__ = kinds[kind]

    def doors(self, parameters: Iterable[nn.Parameter]) -> tuple[Door, ...]:
        """What `open` and `close` take for these parameters."""
        return tuple(self._doors[parameter] for parameter in parameters)

    def open(self, doors: Iterable[Door]) -> None:
        """Until `close`, the parameters are what they were before `wrap`; calls nest."""
        for door in doors:
            door.times += 1
            if door.times == 1:
                door.parameter.__class__ = door.plain

    def close(self, doors: Iterable[Door]) -> None:
        """Undoes one `open`."""
        for door in doors:
            door.times -= 1
            if not door.times:
                door.parameter.__class__ = door.guarded

    def remove(self) -> None:
        """The parameters are what they were, for good."""
        for door in self._doors.values():
            door.parameter.__class__ = door.plain
            delattr(door.parameter, _ATTRIBUTE)

    def close_all(self) -> None:
        """Undoes every `open`, also one that was interrupted."""
        for door in self._doors.values():
            door.times = 0
            door.parameter.__class__ = door.guarded


class Guarded(nn.Parameter):
    """A parameter outside its module's forward."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_property = _name(func)
        if name == "data" and is_property and len(args) == 2:
            return getattr(args[0], _ATTRIBUTE).assign(args[0], args[1])
        if name not in _READING_PROPERTIES if is_property else name in _TELLING_METHODS:
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **kwargs)
            if name == "grad" and is_property and (args[1] if len(args) == 2 else value) is None:
                _refuse_if_kept(args[0])
            return value
        by_guard: dict[Guard, list[nn.Parameter]] = {}
        for parameter in dict.fromkeys(_guarded((*args, *kwargs.values()))):
            by_guard.setdefault(getattr(parameter, _ATTRIBUTE), []).append(parameter)
        with ExitStack() as stack:
            for guard, parameters in by_guard.items():
                stack.enter_context(guard.lend(parameters))
            if name in _VIEWING and len(args) == 1:
                view = args[0].data  # `detach` shares the parameter's version counter, which would tell less
                getattr(args[0], _ATTRIBUTE).gave(args[0], view)
                return view
            if name in _ADDRESSING:
                getattr(args[0], _ATTRIBUTE).gave(args[0], None)
            return func(*args, **kwargs)

    def set_(self, *source: Any, **named: Any) -> torch.Tensor:  # type: ignore[override]
        """``p.set_(tensor)`` is ``p.data = tensor``, and nothing where that is `p` itself, as in parametrisations.

        torch hands this one function to no subclass.
        """
        if named or len(source) != 1 or not isinstance(source[0], torch.Tensor):
            raise ConfigError("set_() on a wrapped parameter takes a tensor alone: copy_() new values into it instead")
        getattr(self, _ATTRIBUTE).assign(self, source[0])
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Parameter of shape {tuple(self.shape)}, {self.dtype}, sharded: em.full_state_dict(model) has its values"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def refuse_copy() -> NoReturn:
    """What a wrapped model says to `copy` and `pickle`."""
    raise ConfigError(
        "a wrapped model can neither be copied nor pickled: copy it before wrap, save em.full_state_dict(model)"
    )


def _refuse_if_kept(parameter: nn.Parameter) -> None:
    if getattr(parameter, _ATTRIBUTE).has_gradient(parameter):
        raise ConfigError(
            "gradients of a wrapped model are sharded, parameter.grad does not have them: use "
            "optimizer.clip_grad_norm_ (not torch.nn.utils'), optimizer.scale (not GradScaler) and optimizer.zero_grad"
        )


def _guarded(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, Guarded):
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
