"""From modules and autograd to the scheduler: who needs which chunk, and when its gradients are complete.

Owns the hooks on modules, parameters and saved tensors, and the notion of position in a forward. Moves nothing: it
tells `Scheduler` what is needed and what is ready.

Forward.   A module's pre-forward hook unshards the chunks of its parameters, its post-forward hook releases them.
           Saved tensors that view a block are packed as (chunk, size, stride, offset), so that the block can be
           reused.
Backward.  A hook on a module's outputs fires right before the module's backward: its chunks are unsharded again and
           held. Unpacking rebuilds the view from wherever the chunk is now. Gradients go from `parameter.grad` into
           the block.
Passing.   Every entry into and exit from a module in forward gets the next number. Autograd runs nodes in the reverse
           of their creation, so when backward reaches a module that was left at number e, everything entered behind e
           is done: gradients that have not come by then will not come, and count as zero.
Recompute. A forward inside backward (activation checkpointing) holds its chunks until it is passed, since the
           checkpoint's own saved-tensor hooks keep the weights (v2, A.3: the rCache must hold the largest
           checkpointed region).
Elsewhere. The first step watches every torch function for parameters that are not gathered (``F.linear(h,
           self.wte.weight)``, a penalty on weights in the loss); their chunks are unsharded on the spot and from then
           on held for the whole step.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from elixir_moe.chunks.chunk import Chunk, ChunkState, Placeholder
from elixir_moe.chunks.policy import Schedule
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.errors import PlanError
from elixir_moe.units import Unit, find_units

_METADATA = {
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "grad",
    "is_leaf",
    "ndim",
    "grad_fn",
    "layout",
    "is_cuda",
    "names",
}
_METADATA |= {
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "is_contiguous",
    "element_size",
    "is_floating_point",
    "data_ptr",
}
_METADATA |= {
    "storage_offset",
    "untyped_storage",
    "register_hook",
    "requires_grad_",
    "__set__",
    "__hash__",
    "__repr__",
    "is_complex",
}
"""Functions that look at a parameter without reading its values."""
_MISSES_BEFORE_NEW_SCHEDULE = 3


class Packed:
    """A saved tensor that was a view of a block: what it takes to rebuild it.

    While it lives its parameter has a reader (`readers` counts them), whose gradient must not overwrite it yet.
    """

    __slots__ = ("_readers", "chunk", "dtype", "index", "offset", "size", "stride", "update")

    def __init__(self, chunk: Chunk, tensor: torch.Tensor, update: int) -> None:
        self.chunk = chunk
        self.dtype, self.size, self.stride, self.offset = (
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        self.index = chunk.index_at(self.offset)
        self.update = update
        self._readers = chunk.readers
        self._readers[self.index] += 1

    def __del__(self) -> None:
        self._readers[self.index] -= 1

    def view(self) -> torch.Tensor:
        """The tensor, as a view of the chunk's present block."""
        assert self.chunk.buffer is not None
        return self.chunk.buffer.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Hooks:
    """All hooks on one wrapped model."""

    def __init__(self, model: nn.Module, scheduler: Scheduler, placeholder: Placeholder) -> None:
        self._scheduler = scheduler
        self._placeholder = placeholder
        self._slot_of = {p: (c.spec.index, i) for c in scheduler.chunks for i, p in enumerate(c.parameters)}
        self._names = {p: name for name, p in model.named_parameters()}
        self._units = list(find_units(model, self._slot_of))
        self._owners: dict[tuple[int, int], list[Unit]] = {}
        for unit in self._units:
            for slot in unit.slots:
                self._owners.setdefault(slot, []).append(unit)
        self._active: list[tuple[Unit, int]] = []
        self._elsewhere: dict[int, str] = {}
        self._watch: _Watch | None = None
        self._watch_stays = True
        self._schedule_known = False
        self._rounds_missed = 0
        self.updates = 0
        """Number of updates so far."""
        self._depth = 0
        self._training = False
        self._saving: saved_tensors_hooks | None = None
        self._last_entered: dict[Unit, int] = {}
        self._left: dict[Unit, int] = {}
        self._reset()
        self._install(model)

    # ------------------------------------------------------------------------------------------------------- install

    def _install(self, model: nn.Module) -> None:
        inside = {id(m) for unit in self._units for m in unit.module.modules() if m is not unit.module}
        units = {id(unit.module): unit for unit in self._units}
        for module in model.modules():
            if id(module) in inside and id(module) not in units:
                continue
            if any(True for _ in module.parameters()):
                unit = units.get(id(module))
                module.register_forward_pre_hook(partial(self._enter, unit))
                module.register_forward_hook(partial(self._leave, unit), always_call=True)
        for parameter in self._slot_of:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._landed)

    def _reset(self) -> None:
        """Forgets the forward and backward under way."""
        self._clock = 0
        self._entered: dict[Unit, int] = {}
        self._reached: set[tuple[int, int]] = set()
        self._engaged: set[Unit] = set()
        self._holds: list[tuple[int, tuple[int, ...]]] = []
        self._backward = False
        self._step_holds: tuple[int, ...] = ()

    # ------------------------------------------------------------------------------------------------------- forward

    def _enter(self, unit: Unit | None, module: nn.Module, args: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if self._depth == 0 and not recomputing:
            self._begin_forward()
        self._depth += 1
        if unit is None:
            return
        tracked = self._training or recomputing
        if recomputing:
            self._holds.append((self._entered.get(unit, 0), unit.chunks))
        elif tracked:
            self._clock += 1
            self._entered.setdefault(unit, self._clock)
        self._active.append((unit, self._clock))
        self._scheduler.unshard(unit.chunks, tracked=tracked, who=f"module {unit.name!r}")

    def _leave(self, unit: Unit | None, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        recomputing = torch._C._current_graph_task_id() != -1
        tracked = self._training or recomputing
        if unit is not None:
            _, entered = self._active.pop()
            if recomputing:
                entered, left = self._entered.get(unit, 0), self._left.get(unit, 0)
            else:
                self._scheduler.release(unit.chunks, tracked=tracked)
                self._clock += tracked
                left = self._left[unit] = self._clock
            if tracked:
                self._hook_outputs(output, partial(self._reach, unit, entered, left))
        if self._depth == 0 and not recomputing:
            self._end_forward(output)

    def _begin_forward(self) -> None:
        self._training = torch.is_grad_enabled()
        if self._elsewhere and not self._step_holds:
            self._step_holds = tuple(sorted(self._elsewhere))
            self._scheduler.unshard(self._step_holds, tracked=self._training, who=self._elsewhere_names())
        if not self._training:
            return
        self._saving = saved_tensors_hooks(self._pack, self._unpack)
        self._saving.__enter__()
        self.end_watch()
        if self._watch is None and not self._schedule_known:
            self._watch_stays = torch._C._len_torch_function_stack() == 0
            self._watch = _Watch(self)
            self._watch.__enter__()  # stays behind the forward if it can: a loss may read parameters too

    def _end_forward(self, output: Any) -> None:
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        if not self._watch_stays:
            self.end_watch()
        if self._training:
            self._hook_outputs(output, self._begin_backward)
        else:
            self._release_step_holds(tracked=False)

    def _hook_outputs(self, output: Any, hook: Callable[[], None]) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _grad: hook())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Packed:
        owner = self._scheduler.owner_of(tensor)
        if owner is None:
            if tensor.untyped_storage().data_ptr() in self._placeholder.keys:
                raise PlanError(
                    f"a parameter of shape {tuple(tensor.shape)} is read outside its own module, "
                    f"which no first step did: its chunk is not gathered. Read it in every step, or use Plan.zero2()"
                )
            return tensor
        return Packed(self._scheduler.chunks[owner], tensor, self.updates)

    def _unpack(self, packed: torch.Tensor | Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.update != self.updates:
            raise PlanError(
                "backward through a forward that ran before the last optimizer.step(): its weights are gone"
            )
        if packed.chunk.state not in (ChunkState.GATHERED, ChunkState.GRADIENT):
            chunks = (packed.chunk.spec.index,)
            self._scheduler.unshard(chunks, tracked=True, who="backward")
            self._holds.append((0, chunks))
        return packed.view()

    # ------------------------------------------------------------------------------------------------------ backward

    def _begin_backward(self) -> None:
        if self._backward:
            return
        self._backward = True
        if self._watch is not None:
            self._watch.active = False
        self._entered = self._entered or dict(self._last_entered)
        self._last_entered = dict(self._entered)
        first_use: dict[int, int] = {}
        pending: dict[int, set[int]] = {}
        for unit, position in self._entered.items():
            for chunk, index in unit.slots:
                if self._scheduler.chunks[chunk].spec.key.trainable:
                    position = -1 if chunk in self._elsewhere else position
                    first_use[chunk] = min(first_use.get(chunk, position), position)
                    pending.setdefault(chunk, set()).add(index)
        order = sorted(first_use, key=lambda chunk: (first_use[chunk], chunk), reverse=True)
        self._scheduler.begin_backward(order, pending)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _reach(self, unit: Unit, entered: int, left: int) -> None:
        """Backward has come to a call of `unit` that forward entered and left at these numbers."""
        if not self._backward:
            self._begin_backward()
        if (id(unit), left) in self._reached:
            return
        self._reached.add((id(unit), left))
        self._pass(left)
        self._engaged.add(unit)
        self._scheduler.unshard(unit.chunks, tracked=True, who=f"backward of module {unit.name!r}")
        self._holds.append((entered, unit.chunks))

    def _landed(self, parameter: nn.Parameter) -> None:
        """A gradient is complete: autograd has summed it over all uses of the parameter."""
        chunk, index = self._slot_of[parameter]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        self._scheduler.add_gradient(chunk, index, gradient, who=f"the gradient of {self._names[parameter]!r}")

    def _pass(self, left: int) -> None:
        """Everything that forward entered behind number `left` has had its backward."""
        for unit in [unit for unit, entered in self._entered.items() if entered > left]:
            del self._entered[unit]
            for slot in unit.slots:
                self._give_up(slot)
        passed = [chunks for entered, chunks in self._holds if entered > left]
        self._holds = [hold for hold in self._holds if hold[0] <= left]
        for chunks in passed:
            self._scheduler.release(chunks, tracked=True)

    def _give_up(self, slot: tuple[int, int]) -> None:
        """The parameter at `slot` will get no gradient any more, if it has none yet and no module of it is to come."""
        chunk, index = slot
        owners = self._owners[slot]
        if chunk in self._elsewhere or not self._scheduler.awaits(chunk, index):
            return
        if any(unit in self._entered for unit in owners):
            return
        if any(unit in self._engaged for unit in owners):
            self._scheduler.add_gradient(chunk, index, None, who=f"module {owners[0].name!r}")
        else:
            self._scheduler.expect_no_more(chunk, index)

    def _end_backward(self) -> None:
        self._pass(-2)
        self._scheduler.finish_backward()
        self._adopt_schedule(held=self._release_step_holds(tracked=True))
        self.end_watch()
        self._reset()

    def _release_step_holds(self, *, tracked: bool) -> bool:
        held, self._step_holds = self._step_holds, ()
        self._scheduler.release(held, tracked=tracked)
        return bool(held)

    # ------------------------------------------------------------------------------------------------------ schedule

    def _adopt_schedule(self, *, held: bool) -> None:
        """Learns the order of requests from the first step, and anew when several steps in a row were others."""
        trace, self._scheduler.trace = self._scheduler.trace, []
        kept = self._scheduler.cache.rewind()
        self._rounds_missed = 0 if kept else self._rounds_missed + 1
        if not self._schedule_known or self._rounds_missed >= _MISSES_BEFORE_NEW_SCHEDULE:
            if self._elsewhere and not held:
                return  # the next step is the first one that holds what is read elsewhere
            frozen = {c.spec.index for c in self._scheduler.chunks if not c.spec.key.trainable}
            self._scheduler.cache.follow(Schedule(trace, kept=frozen))
            self._schedule_known, self._rounds_missed = True, 0

    def read_elsewhere(self, parameter: torch.Tensor) -> None:
        """A torch function is about to read `parameter`; gathers it if its module has not."""
        slot = self._slot_of.get(parameter)  # type: ignore[call-overload]
        if slot is None or slot[0] in self._elsewhere or any(slot in unit.slots for unit, _ in self._active):
            return
        self._elsewhere[slot[0]] = self._names[parameter]  # type: ignore[index]
        self._scheduler.unshard((slot[0],), tracked=True, who=self._elsewhere_names())
        self._holds.append((-1, (slot[0],)))

    def name_of(self, parameter: nn.Parameter) -> str:
        """Its first name in the model."""
        return self._names[parameter]

    def _elsewhere_names(self) -> str:
        return f"reads of parameters outside their own modules ({', '.join(sorted(self._elsewhere.values()))})"

    def end_watch(self) -> None:
        """Takes the mode off the stack, where it is on top of it; a mode that somebody else left there keeps it."""
        here = self._watch is not None and self._watch.thread == threading.get_ident()  # a GPU's backward is elsewhere
        if self._watch is not None and here and _get_current_function_mode() is self._watch:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def abandon(self) -> None:
        """Forgets a backward that did not come to its end."""
        if self._backward:
            for _, chunks in self._holds:
                self._scheduler.release(chunks, tracked=False)
            self._release_step_holds(tracked=False)
            self._scheduler.abandon()
            self._reset()

    def updated(self) -> None:
        """The optimizer has written new values: drops what is gathered and starts a new step."""
        self.end_watch()
        self._scheduler.invalidate()
        self._scheduler.trace.clear()
        self._scheduler.cache.rewind()
        self._reset()
        self._last_entered = {}
        self.updates += 1


class _Watch(TorchFunctionMode):
    """Sees every torch function of the first step, for parameters that are read while released."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self._hooks = hooks
        self.active = True
        self.thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and _name(func) not in _METADATA:
            for value in (*args, *(kwargs or {}).values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, nn.Parameter):
                        self._hooks.read_elsewhere(item)
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
