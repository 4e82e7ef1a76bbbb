"""A model built without its weights: `sharded_init` records how each tensor is computed, `drawn` computes it later.

Owns the record and its repetition. Knows nothing of shards: `materialize` asks for one parameter after another.

Under `sharded_init` a new tensor has a storage on meta, which carries a `Record`: the operators that wrote to it, in
order, each with the state of the random generator before it. Whatever draws random numbers also draws them at once,
into memory that is freed again, so each later draw and the code after the block find the generator as an unsharded
start leaves it. `drawn` repeats the operators of one storage, and of those that they read. Views need no record: an
operand is a place in a storage. Python code that asks a tensor for its device or its values gets true answers.
After the block, tensors of the context are `_Followed`: what is done to them is recorded as before, until `wrap`.
Source of the idea: deferred initialization, torchdistX.
"""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elixir_moe.errors import ConfigError
from elixir_moe.torch_private import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    disable_dispatch_modes,
    dispatch_modes,
    tree_leaves,
    tree_map,
)

_ATTRIBUTE = "_elixir_record"
_META = torch.device("meta")
_GETS_DEVICE, _GETS_IS_META = torch.Tensor.device.__get__, torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_TO_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_STATISTICS = ("running_mean", "running_var")
_OVERWRITES = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "zero_", "fill_", "copy_")
"""Operators that write every element of their first argument and read none of them."""


@dataclass(slots=True, eq=False)
class Record:
    """How the contents of one storage are computed."""

    device: torch.device
    """The device of an unsharded start."""
    nbytes: int = 0
    operations: list["_Operation"] = field(default_factory=list)
    """All that wrote to the storage, in order."""
    read: bool = False
    """Whether another storage depends on it, so that no operation may be dropped."""
    clock: int = 0
    """The number of the last operation that read or wrote the storage: later ones have higher numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A tensor on meta: a place in a storage."""

    record: Record
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    """The storage has the conjugate of the values, as that of ``x.conj()`` has."""

    def on(self, storages: dict[Record, Tensor]) -> Tensor:
        """Returns the tensor with data; a storage of which nothing is known yet holds zeros."""
        if self.record not in storages:
            nbytes = self.record.nbytes
            storages[self.record] = torch.zeros(nbytes, dtype=torch.uint8, device=self.record.device)
        view = storages[self.record].view(self.dtype).as_strided(self.size, self.stride, self.offset)
        return view.conj() if self.conj else view

    def keep(self, made: Tensor, storages: dict[Record, Tensor]) -> None:
        """Makes the result of an operator the contents of the storage; copies it only if it lies differently."""
        made = made.resolve_conj().resolve_neg()
        if (
            not self.conj
            and made.stride() == self.stride
            and made.is_contiguous()
            and made.nbytes == self.record.nbytes
        ):
            storages[self.record] = made.reshape(-1).view(torch.uint8)
        else:
            self.on(storages).copy_(made)


@dataclass(slots=True, eq=False)
class _Operation:
    """One operator, with all that is needed to repeat it."""

    function: Callable[..., Any]
    args: Any
    """Positional arguments; tensors on meta are a `_Place` each."""
    kwargs: Any
    made: list[tuple[int, _Place]]
    """(index, place) of each result with a storage of its own, among all results."""
    before: list[tuple[Record, int]]
    """Each storage it read or wrote, and how many operations had written to that one."""
    clock: int
    random: tuple[torch.Generator, Tensor] | None
    """The generator it drew from, and the state of that generator before."""

    def repeat(self, storages: dict[Record, Tensor]) -> None:
        """Runs the operator again; leaves the generator as it is."""
        args, kwargs = tree_map(lambda a: a.on(storages) if isinstance(a, _Place) else a, (self.args, self.kwargs))
        if self.random is None:
            results = self.function(*args, **kwargs)
        else:
            generator, state = self.random
            now = generator.get_state()
            generator.set_state(state)
            try:
                results = self.function(*args, **kwargs)
            finally:
                generator.set_state(now)
        leaves = tree_leaves(results)
        for index, place in self.made:
            place.keep(leaves[index], storages)


def record_of(tensor: Tensor) -> Record | None:
    """How a tensor on meta that was made under `sharded_init` is computed; None for every other tensor."""
    with DisableTorchFunctionSubclass():
        return getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if tensor.is_meta else None


@torch.no_grad()
def drawn(tensor: Tensor, kept: dict[Record, Tensor] | None = None) -> Tensor:
    """A tensor of `sharded_init` with its data, computed by each call; another tensor as it is.

    Holds the tensor and what its own initializer makes on the way; no generator changes. Tensors that were in one
    storage are in one again if `kept` is the same for them: it has the storages that are drawn.
    """
    record = record_of(tensor)
    if record is None:
        return tensor
    if kept is not None and record in kept:
        with DisableTorchFunction():
            return _place_of(tensor, record).on(kept)
    operations = _needed(record)
    last = {touched: operation for operation in operations for touched, _ in operation.before}
    storages: dict[Record, Tensor] = {}
    with DisableTorchFunction(), disable_dispatch_modes():
        for operation in operations:
            operation.repeat(storages)
            for touched, _ in operation.before:
                if touched is not record and last[touched] is operation:
                    storages.pop(touched, None)
        made = _place_of(tensor, record).on(storages)
    if kept is not None:
        kept[record] = storages[record]
    return made


def computed_from(tensors: Mapping[str, Tensor], others: Iterable[Tensor]) -> str | None:
    """The name of the first tensor of `sharded_init` that is computed from values of `others`, now or before a change.

    A change may have given one of `others` another storage, which is computed from the one that the tensor has read.
    """
    read = {record for other in others for record in _storages_of(other)}
    return next((name for name, tensor in tensors.items() if not read.isdisjoint(_storages_of(tensor))), None)


def _storages_of(tensor: Tensor) -> set[Record]:
    """The storages that a tensor of `sharded_init` is computed from, with its own."""
    record = record_of(tensor)
    needed = [] if record is None else _needed(record)
    return {touched for operation in needed for touched, _ in operation.before}


def was_loaded(tensor: Tensor) -> bool:
    """Whether the last that was written to a tensor of `sharded_init` is one with memory, as by `load_state_dict`."""
    record = record_of(tensor)
    last = [] if record is None else record.operations[-1:]
    return any(isinstance(value, Tensor) for operation in last for value in tree_leaves(operation.args[1:]))


def _needed(record: Record) -> list[_Operation]:
    """The operations that the contents of a storage depend on, in their order."""
    found: dict[_Operation, None] = {}
    known: dict[Record, int] = {}
    waiting = [(record, len(record.operations))]
    while waiting:
        storage, stop = waiting.pop()
        for operation in storage.operations[known.get(storage, 0) : stop]:
            if operation not in found:
                found[operation] = None
                waiting += operation.before
        known[storage] = max(stop, known.get(storage, 0))
    return sorted(found, key=lambda operation: operation.clock)


def _place_of(tensor: Tensor, record: Record) -> _Place:
    place = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
    return _Place(record, tensor.dtype, *place, tensor.is_conj())


# ----------------------------------------------------------------------------------------------------------- recording


@contextmanager
def sharded_init() -> Iterator[None]:
    """A context in which a model is built without memory for its weights: `wrap` draws them, straight into shards.

    ::

        torch.manual_seed(0)
        with em.sharded_init():
            model = Model(config)
        model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())

    Every weight is bit for bit that of a start without the context from the same seed, and so is the state of the
    random generator afterwards, whatever the initializers are. A rank holds its shards and one parameter at a time,
    with what that parameter's own initializer makes on the way. Weights are drawn twice: in the context to move the
    generator on, and in `wrap` by the first rank of each process group.

    New tensors are on the default device of that moment. With an explicit ``device="cpu"`` a tensor is made as always.
    What is written to the model after the context and before `wrap` counts too: initializers, conversions, copies,
    parametrisations, `load_state_dict`. A parameter made afterwards has memory, and torch lets it take nothing of the
    model's as its ``data``: create adapters that are computed from the model (peft's PiSSA and OLoRA) in the context,
    or in another one.

    Raises:
        ConfigError: the default device is meta; or an operator cannot be recorded. The message names the module that
            called it.
    """
    default = torch.get_default_device()
    if default.type == "meta":
        raise ConfigError('em.sharded_init() inside torch.device("meta"): leave torch.device("meta") out')
    device = torch.device(default.type, default.index or 0)  # "cpu:0" tells tensors of the context from others
    try:
        with _recording(device):
            yield
    finally:
        follow(gc.get_objects())  # tensors in modules, lists and closures, copies and views: all that can be written


@contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    asked = _Answers(device)
    with asked, _Recorder(device, asked):
        yield


class _Answers(TorchFunctionMode):
    """Answers Python code that looks at a tensor, and notes the explicit devices of new ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.explicit = False
        """Whether the function that runs was given another device."""
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and (record := record_of(args[0])) is not None:
            if func == _GETS_IS_META:
                return False
            if func == _GETS_DEVICE:
                return record.device
            if func in _TO_PYTHON:
                found = func(drawn(args[0]), *args[1:], **kwargs)
                if func is not torch.Tensor.tolist:
                    found.flags.writeable = False  # a write would be lost
                return found
        if func == _SETS_DATA:
            return func(args[0], self._like(*args))
        device, before = kwargs.get("device"), self.explicit
        self.explicit = device is not None and torch.device(device) not in (self._device, _META)
        if func is torch.Tensor.__deepcopy__ and record_of(args[0]) is None:
            self.explicit = True  # of a tensor that has memory; torch copies its storage by operators without a device
        try:
            return func(*args, **kwargs)
        finally:
            self.explicit = before

    def _like(self, tensor: Tensor, data: Tensor) -> Tensor:
        """Returns what ``tensor.data = data`` sets: `data` recorded, or drawn, if it is not of the kind of `tensor`."""
        if record_of(tensor) is None or record_of(data) is not None:
            return data if record_of(tensor) is not None else drawn(data)
        if torch.device(data.device.type, data.device.index or 0) != self._device:
            raise ConfigError(
                f"{_caller()} sets data of a parameter to a tensor on {data.device}: expected {self._device}, where "
                f"em.sharded_init() draws weights; em.wrap moves them to the device of forward"
            )
        recorded = torch.empty_strided(
            data.size(), torch.empty_like(data).stride(), dtype=data.dtype, device=self._device
        )
        return recorded.copy_(data)


class _Recorder(TorchDispatchMode):
    """Records all operators on tensors of the context."""

    def __init__(self, device: torch.device, asked: _Answers) -> None:
        super().__init__()
        self._device, self._asked = device, asked
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction(), torch.no_grad():
            operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if not any(t.is_meta for t in operands) and (operands or not self._is_ours(kwargs)):
                return func(*args, **kwargs)
            if self._needs_values(func, args, kwargs):
                real_args, real_kwargs = tree_map(_value, (args, kwargs))
                return func(*real_args, **real_kwargs)
            return self._record(func, args, kwargs)

    def _is_ours(self, kwargs: Any) -> bool:
        """Whether an operator without tensors makes one on the device of the context."""
        device = kwargs.get("device")
        return device is not None and not self._asked.explicit and device.type in (self._device.type, "meta")

    def _needs_values(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator brings values out of the context: to Python, or to tensors with data."""
        device = kwargs.get("device")
        leaves = device is not None and any(map(_is_tensor, args)) and device not in (self._device, _META)
        into = any(not t.is_meta for t in _written(func, args, kwargs))
        return leaves or into or bool(_NEEDS_VALUES & set(func.tags))

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        on_meta = tree_map(lambda a: a.to(_META) if _is_tensor(a) else a, (args, kwargs))
        try:
            results = func(*on_meta[0], **on_meta[1])
        except NotImplementedError as error:
            if _written(func, args, kwargs) or torch.Tag.nondeterministic_seeded in func.tags:
                raise ConfigError(
                    f"{_caller()} calls {func}, which em.sharded_init cannot record: build that module outside the "
                    f'context, or its tensors with device="cpu"'
                ) from error
            real_args, real_kwargs = tree_map(_value, (args, kwargs))  # torch does not run it on meta, like `geqrf`
            results = tree_map(lambda a: a.to(_META) if _is_tensor(a) else a, func(*real_args, **real_kwargs))
        leaves = tree_leaves(results)
        fresh = [i for i, t in enumerate(leaves) if _is_tensor(t) and record_of(t) is None]
        operands = [t for t in tree_leaves((args, kwargs)) if _is_tensor(t) and t.is_meta]
        foreign = any(record_of(t) is None for t in operands)
        before = {self._touch(t): None for t in operands}
        made = [(i, _place_of(leaves[i], self._touch(leaves[i]))) for i in fresh]
        written = {self._touch(t): None for t in _written(func, args, kwargs)}
        if not (written or made) or "empty" in func._schema.name:
            return results
        if foreign and not _base_name(func).startswith("new_") and "_like" not in func._schema.name:
            raise ConfigError(
                f"{_caller()} computes with a tensor on the meta device that em.sharded_init() has not made, and which "
                f"has no values: make it in the context"
            )
        random = self._draw(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        if "dtype" in (names := {a.name for a in func._schema.arguments}) and made:
            kwargs = {**kwargs, "dtype": leaves[made[0][0]].dtype}  # the default dtype may change
        if "device" in names and made:
            kwargs = {**kwargs, "device": self._device}
        self._append(func, args, kwargs, made, list(before), list(written), random)
        return results

    def _append(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        made: list[tuple[int, _Place]],
        touched: list[Record],
        written: list[Record],
        random: Any,
    ) -> None:
        if len(written) == 1 and not written[0].read and _overwrites(func, args, kwargs, written[0]):
            written[0].operations.clear()
        for record in touched:
            record.read |= record not in written or len(written) > 1
        fresh = [place.record for _, place in made]
        clock = 1 + max(record.clock for record in (*touched, *fresh))
        operation = _Operation(
            function=func,
            args=tree_map(_frozen, args),
            kwargs=tree_map(_frozen, kwargs),
            made=made,
            before=[(record, len(record.operations)) for record in (*touched, *fresh)],
            clock=clock,
            random=random,
        )
        for record in (*touched, *fresh):
            record.clock = clock
        for record in (*written, *fresh):
            record.operations.append(operation)

    def _touch(self, tensor: Tensor) -> Record:
        """The record of a tensor on meta, made if there is none."""
        storage = tensor.untyped_storage()
        record: Record | None = getattr(storage, _ATTRIBUTE, None)
        if record is None:
            record = Record(self._device)
            setattr(storage, _ATTRIBUTE, record)
        record.nbytes = storage.nbytes()
        if tensor.is_neg():
            raise ConfigError(
                f"{_caller()} computes with the imaginary part of x.conj(), which em.sharded_init cannot record: write "
                f"x.conj().resolve_conj()"
            )
        return record

    def _draw(self, func: Any, args: Any, kwargs: Any) -> tuple[torch.Generator, Tensor]:
        """Draws for real, only for the sake of the generator; returns the generator and its state before."""
        generator = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), None)
        if generator is None:
            generator = _default_generator(self._device)
        state = generator.get_state()
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._device}
        into = {id(t) for t in _written(func, args, kwargs)} if _base_name(func) in _OVERWRITES else set()
        real_args, real_kwargs = tree_map(lambda a: self._scratch(a) if id(a) in into else _value(a), (args, kwargs))
        func(*real_args, **real_kwargs)
        return generator, state

    def _scratch(self, tensor: Tensor) -> Tensor:
        """Memory like that of a tensor on meta, the same for all: what is freed between small things stays resident."""
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
        nbytes = tensor.dtype.itemsize * (extent if tensor.numel() else 0)
        if self._memory.nbytes < nbytes:
            self._memory = self._memory[:0].clone()  # the old memory is freed before there is more
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[:nbytes].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Tensor)


def _value(argument: Any) -> Any:
    return drawn(argument) if isinstance(argument, Tensor) else argument


def _frozen(argument: Any) -> Any:
    """An argument as it is now: a place in a storage, or a copy of a tensor with data."""
    if not isinstance(argument, Tensor):
        return argument
    record = record_of(argument)
    return argument.detach().clone() if record is None else _place_of(argument, record)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes; batch norms write their statistics, which torch's schemas do not say."""
    found = []
    statistics = _STATISTICS if "batch_norm" in _base_name(func) else ()
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in statistics or (argument.alias_info is not None and argument.alias_info.is_write):
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _base_name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _overwrites(func: Any, args: Any, kwargs: Any, record: Record) -> bool:
    """Whether an operator leaves nothing of what a storage held before, and reads nothing of it."""
    if _base_name(func) not in _OVERWRITES or args[0].nbytes != record.nbytes:
        return False
    return not any(record_of(t) is record for t in tree_leaves((args[1:], kwargs)) if _is_tensor(t))


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return generator


def _caller() -> str:
    """The method of a module that called an operator, from the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "the code of the start"


# --------------------------------------------------------------------------------------------------- after the context


class _Followed(Tensor):
    """A tensor or parameter of the context after it: functions on it run as in the context, and writes are recorded.

    A parameter has torch's mark of parameters of other classes, `_is_param`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        records = (record_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        record = next((found for found in records if found is not None), None)
        recorded = any(isinstance(mode, _Recorder) for mode in dispatch_modes())
        with DisableTorchFunctionSubclass(), ExitStack() as stack:
            if record is not None and not recorded:
                stack.enter_context(_recording(record.device))
            results = func(*args, **(kwargs or {}))
        follow(tree_leaves(results))
        return results

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]


def follow(objects: Iterable[Any]) -> None:
    """Follows what is done with those of `objects` that are tensors of `sharded_init`, by a class of their own."""
    for found in objects:
        kind = type(found)  # isinstance would ask objects that pretend to be of another class
        if (kind is Tensor or kind is nn.Parameter) and record_of(found) is not None:
            found.__class__ = _Followed
            if kind is nn.Parameter:
                found._is_param = True


def unfollow(model: nn.Module) -> list[Tensor]:
    """Makes parameters and buffers of `sharded_init` plain tensors on meta; returns them for `follow`."""
    followed: list[Tensor] = [t for t in (*model.parameters(), *model.buffers()) if isinstance(t, _Followed)]
    for tensor in followed:
        kind = nn.Parameter if vars(tensor).pop("_is_param", False) else Tensor
        tensor.__class__ = kind  # type: ignore[assignment]
    return followed
