"""From modules and autograd to the scheduler: who needs which chunk, and when its gradients are complete.

Owns the hooks on modules and parameters, and the notion of position in a forward; those on saved tensors are `saved`'s.
Moves nothing: it tells `Scheduler` what is needed and what is ready.

Forward.   A module's pre-forward hook unshards the chunks of its parameters, its post-forward hook releases them.
           Weights that autograd saves are packed, so that their blocks can be reused.
Backward.  A hook on a module's outputs fires right before the module's backward: its chunks are unsharded again and
           held. Unpacking rebuilds the view from wherever the chunk is now. Gradients go from `parameter.grad` into
           the block.
Passing.   Every entry into and exit from a module in forward gets the next number. Autograd runs nodes in the reverse
           of their creation, so when backward reaches a module that was left at number e, everything entered after e
           is done: gradients that have not come by then will not come, and count as zero.
Recompute. A forward inside backward (activation checkpointing) holds its chunks until it is passed, since the
           checkpoint's own saved-tensor hooks keep the weights (v2, A.3: the rCache must hold the largest
           checkpointed region).
Elsewhere. Parameters are guarded while their module does not run. A function that reads one all the same borrows it:
           its chunk is gathered for as long as the function runs, in a recomputation until it is passed. Such a read is
           in the recorded schedule like any other, and has a position, so that its gradient is waited for.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir_moe.calls import Call, Calls, Forward, Forwards, Hook, brings_gradients, hook_outputs, in_backward
from elixir_moe.chunks.chunk import GRADIENT, Placeholder
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.errors import ConfigError, PlanError
from elixir_moe.guard import Guard
from elixir_moe.parallel.dtensor import is_dtensor, placed_like
from elixir_moe.saved import SavedTensors
from elixir_moe.units import Unit, find_covers, find_units


class Hooks:
    """All hooks on one wrapped model."""

    def __init__(self, model: nn.Module, scheduler: Scheduler, placeholder: Placeholder, longest_cover: int) -> None:
        self._scheduler = scheduler
        self._saved = SavedTensors(scheduler, placeholder, self._begin_backward)
        self._packs = not all(chunk.direct for chunk in scheduler.chunks)  # else weights stay where autograd saw them
        self._slot_of = {p: (c.spec.index, i) for c in scheduler.chunks for i, p in enumerate(c.parameters)}
        self._names = {p: name for name, p in model.named_parameters()}
        self._model = model
        self._units = list(find_units(model, self._slot_of))
        moves = [not chunk.spec.resident for chunk in scheduler.chunks]
        self._units += find_covers(model, self._units, moves.__getitem__, longest_cover)
        self._owners: dict[tuple[int, int], list[Unit]] = {}
        for unit in self._units:
            for slot in unit.slots:
                self._owners.setdefault(slot, []).append(unit)
        self._borrowers: dict[tuple[int, int], Unit] = {}
        self._landings: list[tuple[int, dict[int, Any]]] = []
        self._calls = Calls(self._undo)
        self.torn = False
        """A backward has failed, and with it a part of the gradients is gone."""
        self._reset()
        self._install(model)
        self._guard = Guard(
            self._slot_of,
            lend=self._lend,
            gave=self._gave,
            assign=self._assign,
            has_gradient=lambda parameter: self._slot_of[parameter] in scheduler.used,
        )
        self._doors = {unit: self._guard.doors(unit.parameters) for unit in self._units}

    # ------------------------------------------------------------------------------------------------------- install

    def _install(self, model: nn.Module) -> None:
        parts = [unit.module for unit in self._units if not unit.is_cover]
        inside = {id(m) for part in parts for m in part.modules() if m is not part}
        units = {id(unit.module): unit for unit in self._units}  # covers come last, and stand for what they cover
        for module in model.modules():
            if id(module) in inside and id(module) not in units:
                continue
            if any(True for _ in module.parameters()):
                unit = units.get(id(module))
                module.register_forward_pre_hook(Hook(partial(self._enter, unit)))
                module.register_forward_hook(Hook(partial(self._leave, unit)), always_call=True)
        # Python cannot see through what autograd keeps: with a strong reference in it, model and homes would never go.
        hooks = weakref.ref(self)
        for parameter, slot in self._slot_of.items():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(partial(_landed, hooks, slot))
                self._landings.append((handle.id, handle.hooks_dict_ref()))

    def _land_last(self) -> None:
        """What others do to a gradient when it has come, they do before it is taken away."""
        for key, hooks in self._landings:
            if len(hooks) > 1:
                hooks[key] = hooks.pop(key)

    def _reset(self) -> None:
        """Forgets the forwards and backwards of a step."""
        self._forwards = Forwards()
        self._backwards_of = Forward(0)
        self._entered: dict[Unit, int] = {}
        self._round_is_open = False
        self._unfinished = 0
        self._reset_backward()

    def _reset_backward(self) -> None:
        self._backward = False
        self._reached: set[tuple[Unit, int]] = set()
        self._engaged: set[Unit] = set()
        self._holds: list[tuple[int, tuple[int, ...]]] = []

    # ------------------------------------------------------------------------------------------------------- forward

    def _enter(self, unit: Unit | None, module: nn.Module, args: Any) -> None:
        recomputing = in_backward()
        mode = torch.is_grad_enabled(), recomputing
        top = self._calls.top
        if top is not None and unit is not None and top.covers and top.unit in unit.around and top.mode == mode:
            self._calls.check_thread()
            top.covered += 1  # and `_leave` takes it off again
            if not top.held:
                self._hold(top)
            return
        if recomputing:
            self._begin_backward()
        else:
            self._calls.begin(module)
            self.notice_torn()
            self._step_aside()
        training = mode[0] or self._calls.training
        self._forwards.clock += unit is not None and training and not recomputing
        outermost = not self._calls and not recomputing
        call = Call(module, unit, self._forwards.clock, training, mode, outermost)
        # Where backward runs parts again that had no gradients in forward, each part is counted by itself.
        again = self._backwards_of.unrecomputed if recomputing else training and not mode[0]
        call.covers = unit is not None and unit.is_cover and not again
        self._calls.push(call)  # what may fail comes after it: `_leave` undoes only what was done
        if outermost:
            self._forwards.begin()
            if self._packs:
                call.saving = self._saved.hooks()
                call.saving.__enter__()
        if unit is None:
            return
        if recomputing:
            self._recompute(unit)
            self._holds.append((self._backwards_of.numbers_of(unit)[0], unit.chunks))
        elif training:
            self._forwards.enter(unit)
        self._hold(call)
        call.began = True

    def _hold(self, call: Call) -> None:
        assert call.unit is not None
        tracked = call.training or call.mode[1]
        self._scheduler.unshard(call.unit.chunks, tracked=tracked, who=call.unit.label)
        self._guard.open(self._doors[call.unit])
        call.held = True

    def _let_go(self, call: Call) -> None:
        assert call.unit is not None
        self._guard.close(self._doors[call.unit])
        self._scheduler.release(call.unit.chunks, tracked=call.training)
        call.held = False

    def _step_aside(self) -> None:
        """What is no part of a cover runs inside it: until a part does, it holds nothing, as its parts would not."""
        top = self._calls.top
        if top is not None and top.held and top.unit is not None and top.unit.is_cover and not top.mode[1]:
            self._take_back(top.unit)
            self._let_go(top)

    def _undo(self, call: Call) -> None:
        if call.held:
            self._let_go(call)
        if call.saving is not None:
            call.saving.__exit__(None, None, None)

    def notice_torn(self) -> None:
        """Gives up a backward that is over without having come to its end."""
        if self._backward and not in_backward():
            self._restart()
            self.torn = True

    def _recompute(self, unit: Unit) -> None:
        """Activation checkpointing runs `unit` again in backward."""
        if self._backwards_of.unrecomputed[unit] and torch.is_grad_enabled():
            self._backwards_of.unrecomputed[unit] -= 1
        overwritten = [
            self._names[p]
            for (chunk, index), p in zip(unit.slots, unit.parameters, strict=True)
            if self._scheduler.chunks[chunk].overwritten(index)
        ]
        if overwritten:
            raise PlanError(
                f"module {unit.name!r} is recomputed when the gradients of {overwritten} are complete: it is called in "
                f"checkpoints of both kinds, or in and out of them; use non-reentrant ones for all calls"
            )

    def _leave(self, unit: Unit | None, module: nn.Module, args: Any, output: Any) -> None:
        top = self._calls.top
        if top is not None and unit is not None and top.covered and top.unit in unit.around:
            top.covered -= 1
            return
        self._unfinished += 1  # what an interrupt leaves behind on the stack tells of itself; this does not
        call = self._calls.pop(module)
        if call is not None:
            self._end_call(call, unit, output)
        self._unfinished -= 1

    def _end_call(self, call: Call, unit: Unit | None, output: Any) -> None:
        recomputing = in_backward()
        if unit is not None and call.began:
            if call.held:
                self._take_back(unit)
            if recomputing:
                self._guard.close(self._doors[unit])
                self._keep_beside_gradients(unit.chunks)
                entered, left = self._backwards_of.numbers_of(unit)
            else:
                entered, left = call.entered, self._forwards.leave(unit) if call.training else 0
                if call.held:
                    self._let_go(call)
            if call.training or recomputing:
                hook_outputs(output, partial(self._reach, unit, entered, left))
        if call.saving is not None:
            call.saving.__exit__(None, None, None)
        if call.outermost:
            self._scheduler.settle()
            if call.training:
                hook_outputs(output, partial(self._reach_end, self._forwards.clock, self._saved.updates))

    def _take_back(self, unit: Unit) -> None:
        """Keeps new values that forward has assigned (``self.weight.data = …``), in the parameter's own place."""
        with torch._C.DisableTorchFunctionSubclass():
            taken = [self._scheduler.chunks[index].own(position) for index, position in unit.slots]
        for parameter, foreign in zip(unit.parameters, taken, strict=True):
            if foreign is not None:
                self._put(parameter, foreign)

    def _keep_beside_gradients(self, chunks: tuple[int, ...]) -> None:
        """Brings home what was written in backward, before a gradient takes its place in the block."""
        for chunk in map(self._scheduler.chunks.__getitem__, chunks):
            if chunk.state is GRADIENT:
                self._scheduler.bring_home(chunk)

    @contextmanager
    def _lend(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Gathers parameters for a function that reads or writes them while their modules do not run."""
        self.notice_torn()
        self._step_aside()
        slots = [self._slot_of[p] for p in parameters]
        chunks = tuple(sorted({chunk for chunk, _ in slots}))
        names = ", ".join(self._names[p] for p in parameters[:4])
        backward, with_grad = in_backward(), torch.is_grad_enabled()
        tracked = with_grad or backward or self._calls.training
        self._begin_backward()
        for chunk, index in slots:
            if backward and self._scheduler.chunks[chunk].overwritten(index):
                raise PlanError(f"backward reads {names} when its gradient is complete: read it through its module")
            if tracked and self._calls and not backward:
                self._forwards.clock += 1
                self._forwards.enter(self._borrower((chunk, index)))
        self._unfinished += 1
        self._scheduler.unshard(chunks, tracked=tracked, who=f"a read of {names}")
        doors = self._guard.doors(parameters)
        self._guard.open(doors)
        try:
            with self._saved.hooks() if self._packs and with_grad and not self._calls else nullcontext():
                yield
        finally:
            self._guard.close(doors)
            self._keep_beside_gradients(chunks)
            if backward and with_grad:
                self._holds.append((self._backwards_of.first_of(map(self._borrower, slots)), chunks))
            else:
                self._scheduler.release(chunks, tracked=tracked)
            self._unfinished -= 1

    def _gave(self, parameter: nn.Parameter, view: torch.Tensor | None) -> None:
        index, position = self._slot_of[parameter]
        chunk = self._scheduler.chunks[index]
        if view is None or is_dtensor(view):
            chunk.compare = True
        else:
            chunk.lend(position, view)

    def _assign(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if value is not parameter:
            with self._lend([parameter]):
                self._put(parameter, value)

    def _put(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """``parameter.data = value``: views of the old values keep them."""
        wanted, found = ((tuple(t.shape), t.dtype, t.device) for t in (parameter, value))
        if found != wanted:
            raise ConfigError(
                f"parameter {self._names[parameter]!r} of {wanted} cannot become {found}: shape, dtype and device are "
                f"fixed in wrap, by its compute_dtype and device"
            )
        self._scheduler.put(*self._slot_of[parameter], value)

    def _borrower(self, slot: tuple[int, int]) -> Unit:
        """Stands for all reads of one parameter outside its own module."""
        unit = self._borrowers.get(slot)
        if unit is None:
            owner = self._owners[slot][0]
            unit = self._borrowers[slot] = Unit(owner.name, owner.module, [slot], slot[:1])
            self._owners[slot].append(unit)
        return unit

    # ------------------------------------------------------------------------------------------------------ backward

    def _reach_end(self, left: int, updates: int, gradient: torch.Tensor) -> None:
        """Backward has come to the outermost module, which forward left at this number, after so many updates."""
        self._saved.check_current(updates)
        self._begin_backward(left)

    def _begin_backward(self, left: int | None = None) -> None:
        """Backward has come to what forward left at number `left`: what was entered after it awaits another one."""
        if self._backward or not in_backward():
            return
        self._backward = True
        self._land_last()
        self._round_is_open = torch._C._autograd._get_current_graph_task_keep_graph()
        self._backwards_of = self._forwards.take(left, keep=self._round_is_open) or self._backwards_of
        self._entered = dict(sorted(self._backwards_of.entered.items(), key=lambda item: item[1]))
        first_use: dict[int, int] = {}
        pending: dict[int, set[int]] = {}
        for unit, position in self._entered.items() if self._accumulates() else ():
            for chunk, index in unit.slots:
                if self._scheduler.chunks[chunk].spec.key.trainable:
                    first_use[chunk] = min(first_use.get(chunk, position), position)
                    pending.setdefault(chunk, set()).add(index)
        order = sorted(first_use, key=lambda chunk: (first_use[chunk], chunk), reverse=True)
        self._scheduler.reductions.begin(order, pending)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _accumulates(self) -> bool:
        """Whether this backward brings gradients of parameters: that of `torch.autograd.grad` does not."""
        slots = (slot for unit in reversed(self._entered) for slot in unit.slots)
        return brings_gradients(self._scheduler.chunks[chunk].parameters[index] for chunk, index in slots)

    def _reach(self, unit: Unit, entered: int, left: int, gradient: torch.Tensor) -> None:
        """Backward has come to a call of `unit` that forward entered and left at these numbers."""
        self._begin_backward(left)
        if (unit, left) in self._reached:
            return
        self._reached.add((unit, left))
        self._pass(left)
        self._engaged.add(unit)
        self._scheduler.unshard(unit.chunks, tracked=True, who=unit.label)
        self._holds.append((entered, unit.chunks))

    def landed(self, slot: tuple[int, int], parameter: nn.Parameter) -> None:
        """A gradient is complete: autograd has summed it over all uses of the parameter at `slot`."""
        if not self._backward:
            self._begin_backward()
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if type(gradient) is not torch.Tensor:
            gradient = placed_like(gradient, parameter)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        awaited = self._backwards_of.unrecomputed
        final = not (awaited and any(awaited[unit] for unit in self._owners[slot]))
        self._scheduler.add_gradient(*slot, gradient, final=final)

    def _pass(self, left: int) -> None:
        """Everything that forward entered after number `left` has had its backward."""
        while self._entered:
            unit, entered = self._entered.popitem()  # the one entered last
            if entered <= left:
                self._entered[unit] = entered
                break
            for slot in unit.slots:
                if self._scheduler.reductions.awaits(*slot):
                    self._give_up(slot)
        if self._holds:
            passed = [chunks for entered, chunks in self._holds if entered > left]
            self._holds = [hold for hold in self._holds if hold[0] <= left]
            for chunks in passed:
                self._scheduler.release(chunks, tracked=True)

    def _give_up(self, slot: tuple[int, int]) -> None:
        """The parameter at `slot`, which has no gradient yet, will get none unless a module of it is to come."""
        chunk, index = slot
        owners = self._owners[slot]
        if any(unit in self._entered for unit in owners):
            return
        if any(unit in self._engaged for unit in owners):
            self._scheduler.add_gradient(chunk, index, None)
        else:
            self._scheduler.expect_no_more(chunk, index)

    def _end_backward(self) -> None:
        self._pass(-2)
        self._scheduler.finish_backward()
        self._round_is_open |= bool(self._forwards)  # the graph is kept, or that of another forward awaits its turn
        if not self._round_is_open:
            self._end_round()
        self._reset_backward()

    def _end_round(self) -> None:
        if self._scheduler.requests.learn():
            self._scheduler.compare_all = False

    # ------------------------------------------------------------------------------------------------- between steps

    def name_of(self, parameter: nn.Parameter) -> str:
        """Its first name in the model."""
        return self._names[parameter]

    def new_parameters(self) -> list[str]:
        """Trainable parameters that the model has and had not in `wrap`."""
        with torch._C.DisableTorchFunctionSubclass():
            return [n for n, p in self._model.named_parameters() if p.requires_grad and p not in self._names]

    def abandon(self) -> None:
        """Forgets what did not come to its end: forwards that were interrupted, a backward that failed."""
        if self._calls or self._backward or self._unfinished:
            self._restart()
        self.torn = False

    def _restart(self) -> None:
        self._scheduler.restart()
        self._calls.unwind()
        self._guard.close_all()
        self._reset()

    def updated(self) -> None:
        """The optimizer has written new values: drops what is gathered and starts a new step."""
        self._calls.unwind()
        self._scheduler.invalidate()
        if self._round_is_open:
            self._end_round()
        self._scheduler.requests.rewind()
        self._reset()
        self._saved.updates += 1


def _landed(hooks: weakref.ref[Hooks], slot: tuple[int, int], parameter: nn.Parameter) -> None:
    alive = hooks()
    if alive is not None:
        alive.landed(slot, parameter)
