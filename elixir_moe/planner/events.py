"""The events of a traced step: memory allocated and freed, arithmetic, and the modules that run.

Owns `CostEvent`, and `Recorder`, which records operators, modules and gradients while a step runs on fake tensors.
Never prices an event, which `cost` does.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from elixir_moe.chunks.events import ACCUMULATE, ENTER, LEAVE, REACH, READ, UNPACK, EventKind, StepEvent
from elixir_moe.errors import ConfigError
from elixir_moe.moe.layer import MoE
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.meta_tensors import Recording, has_data
from elixir_moe.planner.megatron_meta import is_mixture
from elixir_moe.runtime.autograd import hook_outputs, in_backward, tensors_in
from elixir_moe.runtime.host_checkpoints import kept_by_region
from elixir_moe.runtime.units import Parts, reads_heard
from elixir_moe.torch_private import (
    COLLECTIVES,
    FLASH_ON_CPU,
    FLASH_ON_CPU_BACKWARD,
    GROUPED_MM,
    DisableTorchFunctionSubclass,
    FakeTensor,
    group_of_name,
    next_sequence_number,
    running_node,
)

aten = torch.ops.aten
_PICKS_ROWS = (aten.embedding, aten.index_select, aten.gather, aten.index)
"""Operators that read as much as they write, however large their source is."""
_UNVECTORIZED = 2
"""How often a byte counts in a pointwise operator whose tensors are not laid out alike: torch's kernel computes the
address of each element. In a layer of Qwen3-30B-A3B on an H200 they reached 0.35 to 0.54 of a copy's bandwidth."""
_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
"""{in-place product that torch's FLOP registry lacks: the product that it has}."""
_PRODUCTS_INTO = (aten.mm.out, aten.addmm.out)
_DEVICE = torch.ops.prim.device.default


class Cost(Enum):
    """The kinds of events that cost time or memory."""

    MEMORY = auto()
    """Bytes allocated, or freed if negative."""
    OPERATOR = auto()
    MIXTURE = auto()
    """Forward enters a mixture layer; `nbytes` is its number of tokens."""
    MIXTURE_RECOMPUTE = auto()
    """Backward recomputes a mixture layer; `nbytes` is its number of tokens."""
    SENT = auto()
    """A collective of the model itself; `name` lists its ranks."""
    KEEP = auto()
    """A checkpointed region keeps inputs of `nbytes`, which may go to host memory."""
    ASK = auto()
    """A checkpointed region needs its inputs in backward."""
    LOSS = auto()
    """Forward has ended."""
    BOUNDARY = auto()
    """Forward enters, or backward leaves, a traced period of repeated layers (`repeat`); `nbytes` is the number of the
    period, three for each cut."""


@dataclass(frozen=True, slots=True)
class CostEvent:
    """The cost of one event of a traced step."""

    kind: Cost
    name: str = ""
    """The name of a mixture layer in the model, or the text described in `Cost`."""
    nbytes: int = 0
    flops: int = 0
    traffic: int = 0
    of_gradient: bool = False
    """The memory is that of a parameter's gradient."""


TraceEvent = StepEvent | CostEvent


def costs_of(events: Iterable[TraceEvent]) -> Iterator[CostEvent]:
    """Yields the events that cost time or memory."""
    return (event for event in events if isinstance(event, CostEvent))


def steps_of(events: Iterable[TraceEvent]) -> Iterator[StepEvent]:
    """Yields the events of modules and parameters, both numbered as in the whole model."""
    return (event for event in events if isinstance(event, StepEvent))


def work_of(events: Iterable[TraceEvent]) -> list[tuple[int, int]]:
    """Returns (flops, traffic) between each step event and the one before, and after the last."""
    found = [(0, 0)]
    for event in events:
        if isinstance(event, StepEvent):
            found.append((0, 0))
        elif event.flops or event.traffic:
            flops, traffic = found[-1]
            found[-1] = flops + event.flops, traffic + event.traffic
    return found


def peak_of(events: Iterable[TraceEvent]) -> int:
    """Returns the most bytes allocated at once."""
    return max(accumulate((event.nbytes for event in costs_of(events) if event.kind is Cost.MEMORY), initial=0))


def kept_regions(events: Iterable[TraceEvent]) -> list[tuple[int, int, int]]:
    """Returns (bytes, events of memory before they are kept, before they are needed) for each checkpointed region.

    The list is empty unless regions need their inputs in reverse order.
    """
    memory, kept, asked = 1, list[tuple[int, int]](), list[int]()
    for event in costs_of(events):
        if event.kind is Cost.MEMORY:
            memory += 1
        elif event.kind is Cost.KEEP:
            kept.append((event.nbytes, memory))
        elif event.kind is Cost.ASK:
            asked.append(memory)
            if len(asked) > len(kept) or event.nbytes != kept[-len(asked)][0]:
                return []
    if len(asked) != len(kept):
        return []
    return [(*region, need) for region, need in zip(kept, reversed(asked), strict=True)]


def kept_peaks(events: Sequence[TraceEvent]) -> list[int]:
    """Returns the peak bytes with the inputs of the first n checkpointed regions on the host, for each n from 0 on.

    As in `runtime.host_checkpoints`, the inputs of a region leave the device when the next region keeps its own, and
    start to come back when the next region needs its own.
    """
    memory = (event.nbytes for event in costs_of(events) if event.kind is Cost.MEMORY)
    held, kept = torch.tensor(list(accumulate(memory, initial=0))), kept_regions(events)
    peaks = [int(held.max())]
    for (nbytes, _, _), (_, since, until) in pairwise(kept):
        held[since:until] -= nbytes
        peaks.append(int(held.max()))
    return [*peaks, *peaks[-1:]] if kept else peaks


class Recorder(Recording):
    """Records the events of the code that runs inside it. The model's parameters and buffers do not count as memory."""

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        boundaries: Sequence[tuple[nn.Module, nn.Module]],
        scratch_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.events: list[TraceEvent] = []
        self.scratch_bytes = scratch_bytes
        self.alive = 0
        """Number of storages allocated inside the recorder that are still alive."""
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: weakref.WeakSet[Any] = weakref.WeakSet()
        self._made_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """{storage: the number of the event that it was allocated with}."""
        self._region: tuple[int, list[int]] = (-1, [0])
        self._listening = True
        self._handles: list[Any] = []
        self._running = 0
        """Number of parts and reads that run in forward; parameters saved meanwhile record an `UNPACK` in backward."""
        self._runs: Counter[int] = Counter()
        """{module: number of runs that have ended in forward}."""
        self._operator: int | None = None
        """Number of the autograd node that has unpacked a parameter last."""
        self._index_of: dict[Any, int] = {}
        """{fake parameter that replaces one of the model's during the trace: its index}."""
        self._storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """{storage of a fake parameter: its index}."""
        self._model, self._parts, self._boundaries = model, parts, boundaries
        self._parameters = list(model.parameters())
        self._places = {
            p: (module, key) for module in model.modules() for key, p in module._parameters.items() if p is not None
        }
        self._reading = ExitStack()
        self._mixtures = [
            (name, module) for name, module in model.named_modules() if isinstance(module, MoE) or is_mixture(module)
        ]

    def __enter__(self) -> Self:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._known.add(local_of(tensor).untyped_storage())
        # Fake parameters replace the model's while it is traced.
        present: dict[Any, Any] = {p: module._parameters[key] for p, (module, key) in self._places.items()}
        for index, p in enumerate(self._parameters):
            self._index_of[present[p]] = index
            self._storages[local_of(present[p]).untyped_storage()] = index
        for number, (first, last) in enumerate(self._boundaries):
            self._mark_boundary(first, last, number)
        for number, module in enumerate(self._parts.modules):
            self._handles.append(module.register_forward_pre_hook(self._enters(number)))
            leave = module.register_forward_hook(self._leaves(number), always_call=True)  # a recomputation stops early
            self._handles.append(leave)
        for name, module in self._mixtures:
            self._handles.append(module.register_forward_pre_hook(self._mixes(name)))
        self._reading.enter_context(self._reads_heard(present))
        self._reading.enter_context(saved_tensors_hooks(self._saved, self._asked))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._reading.close()
        self._listening = False
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented  # an operator on DTensors is dispatched again for their local tensors
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(
            args[0], FakeTensor
        ):  # autograd asks for the device more often than operators run
            return args[0].fake_device
        with DisableTorchFunctionSubclass():  # computing a shape in Python must not count as reading a parameter
            out = _computed(func, args, kwargs)
        made = [t for t in tensors_in(out) if self._record_allocation(t)]
        packet = _IN_PLACE.get(func._overloadpacket, func._overloadpacket)
        if func.namespace in COLLECTIVES:
            self.events += _sent(func, args, out)
            return out
        if packet in flop_registry or packet in _UNREGISTERED:
            self.events.append(CostEvent(Cost.OPERATOR, flops=_flops(packet, args, kwargs, out)))
        elif made or func._schema.is_mutable:
            written = sum(_nbytes(t) for t in tensors_in(out))
            read = (
                written
                if packet in _PICKS_ROWS
                else sum(_nbytes(t) for t in tensors_in((args, tuple(kwargs.values()))))
            )
            if "empty" not in packet.__name__:
                scattered = torch.Tag.pointwise in func.tags and not _alike(tensors_in((args, kwargs, out)))
                self.events.append(
                    CostEvent(Cost.OPERATOR, traffic=(read + written) * (_UNVECTORIZED if scattered else 1))
                )
        return out

    def _record_allocation(self, tensor: Tensor) -> bool:
        """Records the tensor's storage if it is new, and returns whether it was; ignores sparse tensors."""
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        if storage in self._known:
            return False
        self._known.add(storage)
        self._made_at[storage] = len(self.events)
        self.alive += 1
        nbytes = storage.nbytes()
        self.events.append(CostEvent(Cost.MEMORY, nbytes=nbytes))
        weakref.finalize(storage, self._record_free, nbytes).atexit = False
        return True

    def _record_free(self, nbytes: int) -> None:
        self.alive -= 1
        if self._listening:
            self.events.append(CostEvent(Cost.MEMORY, nbytes=-nbytes))

    def _record(self, kind: EventKind, module: int = -1, params: tuple[int, ...] = ()) -> None:
        """Records a call or a read, with the present modes of autograd."""
        self.events.append(
            StepEvent(kind, module, params, with_grad=torch.is_grad_enabled(), in_backward=in_backward())
        )

    def _enters(self, number: int) -> Any:
        def enter(*_: object) -> None:
            self._running += not in_backward()
            self._record(ENTER, number)

        return enter

    def _mixes(self, name: str) -> Any:
        def mix(_: nn.Module, args: tuple[Any, ...]) -> None:
            kind = Cost.MIXTURE_RECOMPUTE if in_backward() else Cost.MIXTURE
            self.events.append(CostEvent(kind, name, nbytes=args[0].numel() // args[0].shape[-1]))

        return mix

    def _reads_heard(self, present: Mapping[Any, Any]) -> AbstractContextManager[None]:
        @contextmanager
        def read(parameters: Sequence[Tensor]) -> Iterator[None]:
            self._record(READ, params=tuple(self._index_of[p] for p in parameters))
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1

        owned = zip(self._parts.modules, self._parts.parameters, strict=True)
        return reads_heard([(module, [present[p] for p in mine]) for module, mine in owned], read)

    def _leaves(self, number: int) -> Any:
        def leave(_: nn.Module, args: object, output: object) -> None:
            run = -1
            if not in_backward():
                run = self._runs[number]
                self._runs[number] += 1
                self._running -= 1
            self._record(LEAVE, number)
            hook_outputs(output, lambda _: self.events.append(StepEvent(REACH, number, run=run)))

        return leave

    def _mark_boundary(self, first: nn.Module, last: nn.Module, number: int) -> None:
        """Records when forward enters `first` and when backward reaches the output of `last`."""

        def enter(*_: object) -> None:
            if not in_backward():
                self.events.append(CostEvent(Cost.BOUNDARY, "forward", nbytes=number))

        def leave(_: nn.Module, args: object, output: object) -> None:
            whose = [t for t in tensors_in(output) if t.requires_grad] if not in_backward() else []
            if whose:
                whose[0].register_hook(
                    lambda _: self.events.append(CostEvent(Cost.BOUNDARY, "backward", nbytes=number))
                )

        self._handles += [first.register_forward_pre_hook(enter), last.register_forward_hook(leave)]

    def _saved(self, tensor: Tensor) -> "_Saved":
        """Notes parameters among the saved tensors, and records what checkpointed regions keep."""
        whole = tensor if tensor.is_leaf else tensor.detach()
        local = local_of(tensor)
        if self._running and local.layout is torch.strided:
            with DisableTorchFunctionSubclass():
                index = self._storages.get(local.untyped_storage())
            if index is not None:
                return _Saved(whole, parameter=index)
        region = None
        inside = self._running and not in_backward()  # the hooks of a wrapped model see no more
        if inside and kept_by_region(tensor) and tensor.untyped_storage() not in self._kept:
            self._kept.add(tensor.untyped_storage())
            number, region = self._region
            if number != next_sequence_number():
                region = [0]
                self._region = next_sequence_number(), region
                self.events.append(CostEvent(Cost.KEEP))
            region[0] += _nbytes(tensor)
            self.events[-1] = CostEvent(Cost.KEEP, nbytes=region[0])
        return _Saved(whole, region=region)

    def _asked(self, saved: "_Saved") -> Tensor:
        if saved.parameter is not None:
            number = running_node()
            same = number == self._operator
            self.events.append(StepEvent(UNPACK, params=(saved.parameter,), same_operator=same))
            self._operator = number
        elif saved.region and saved.region[0]:
            self.events.append(CostEvent(Cost.ASK, nbytes=saved.region[0]))
            saved.region[0] = 0
        return saved.tensor

    def _accumulated(self, parameter: Tensor) -> None:
        """Frees the gradient, as the runtime does by moving it into its block immediately."""
        assert parameter.grad is not None
        made_at, before = self._made_at.get(local_of(parameter.grad).untyped_storage()), len(self.events)
        parameter.grad = None
        if made_at is not None and len(self.events) > before:
            for number in (made_at, before):
                event = self.events[number]
                assert isinstance(event, CostEvent), "memory is allocated and freed there"
                self.events[number] = replace(event, of_gradient=True)
        self.events.append(StepEvent(ACCUMULATE, params=(self._index_of[parameter],)))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd has saved."""

    tensor: Tensor
    parameter: int | None = None
    """Index of the parameter that the tensor views."""
    region: list[int] | None = None
    """Bytes that its checkpointed region keeps, in a list that all inputs of the region share."""


def _sent(func: Any, args: Sequence[Any], out: Any) -> list[CostEvent]:
    """Returns the event of a collective over several ranks; none for one rank, or for an operator that only waits."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    if "process_group" in named:
        group = dist.ProcessGroup.unbox(named["process_group"])
    elif "group_name" in named:
        group = group_of_name(named["group_name"])
    else:
        return []
    if group.size() == 1:
        return []
    name = func._overloadpacket.__name__
    twice = 1 + ("reduce" in name and "scatter" not in name)
    largest = max(sum(map(_nbytes, tensors_in(part))) for part in (*args, out))
    return [CostEvent(Cost.SENT, " ".join(map(str, dist.get_process_group_ranks(group))), nbytes=twice * largest)]


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs the operator. For a product into a given fake tensor, returns that tensor without running anything."""
    if func in _PRODUCTS_INTO and not has_data(kwargs["out"]):
        return kwargs["out"]
    if func is aten.bincount.default and not has_data(args[0]):
        return _counts(*args, **kwargs)
    return _grouped(func, *args, **kwargs) if func is GROUPED_MM.default else func(*args, **kwargs)


def _counts(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Returns counts of numbers without data, all of which are taken to be less than `minlength`."""
    if not minlength:
        raise ConfigError(
            "the step counts numbers by torch.bincount without minlength, so the counts have no known shape"
        )
    return numbers.new_empty(minlength, dtype=torch.int64 if weights is None else torch.float64)


def _grouped(func: Any, a: Tensor, b: Tensor, offsets: Tensor | None = None, *rest: Any, **kwargs: Any) -> Tensor:
    """Runs a grouped matrix product. On fake tensors, torch infers the shape only for bf16, though others work too."""
    if has_data(a) or a.dtype is torch.bfloat16:
        out: Tensor = func(a, b, offsets, *rest, **kwargs)
        return out
    if a.dim() == b.dim() == 2:
        assert offsets is not None, "a grouped product of two matrices has offsets"
        return a.new_empty(offsets.numel(), a.shape[0], b.shape[1])
    rows = a.shape[:-1] if b.dim() == 3 else a.shape[1:-1]
    return a.new_empty(*rows, b.shape[-1])


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is GROUPED_MM:  # each row is multiplied only by the matrix of its group
        a, b = args[:2]
        return 2 * math.prod(a.shape if b.dim() == 3 or a.dim() == 2 else a.shape[1:]) * int(b.shape[-1])
    backward = packet is FLASH_ON_CPU_BACKWARD
    query, key = args[1:3] if backward else args[:2]
    causal = kwargs.get("is_causal", (args[7] if len(args) > 7 else False) if backward else len(args) > 4 and args[4])
    forward = 4 * math.prod(query.shape) * key.shape[-2]
    return int(forward * (2.5 if backward else 1) * (0.5 if causal else 1))  # five products where forward has two


_UNREGISTERED = (GROUPED_MM, FLASH_ON_CPU, FLASH_ON_CPU_BACKWARD)


def _alike(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors, scalars aside, have one shape and one order of elements in memory without gaps."""
    layouts = {tuple(zip(t.shape, t.stride(), strict=True)) for t in tensors if t.ndim}
    if len(layouts) > 1:
        return False
    return all(1 + sum((n - 1) * stride for n, stride in each) == math.prod(n for n, _ in each) for each in layouts)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
