"""The link from modules and autograd to the step machine: what happens in a step, told by hooks.

Owns the hooks on units and parameters; `saved_tensors` owns the hooks on saved tensors. Decides nothing: `chunks.calls`
says what a hook means, `chunks.step_machine` what is acquired, released and reduced; `gathers` and `reductions` do it.

Forward.   While a unit runs, its parameters have their original classes. Weights that autograd saves are packed, unless
           all chunks are `ATTACHED`.
Backward.  A hook on a unit's outputs runs right before the unit's backward. Gradients move from `parameter.grad` to the
           chunk's memory.
Recompute. A forward inside backward (activation checkpointing) holds its chunks until backward has passed it, since
           the checkpoint's own saved-tensor hooks keep the weights (v2, A.3: the rCache must hold the largest region).
           A unit that saves none (`parallel.regather`) is released when the region leaves it.
Elsewhere. A function that reads a parameter outside its running unit borrows it: the chunk is gathered for the call.
           Inside a forward, such a read has a position like a unit's, so that its gradient is waited for. Outside of
           one it packs what autograd saves under every plan, since no unit holds the parameter in backward.
Addresses. A parameter whose address is asked for is lent to what runs: to the innermost call, to an autograd function
           outside of calls until the next call or backward, and in backward until the next operator.
Turns.     Forwards of several micro-batches (`em.accumulate`) hand a turn on where one of them is to gather weights, so
           that all pass a layer before the next is gathered (`chunks.legs`). What runs is kept for each of them.
Reset.     What a call, read or backward has begun and not ended (`phase`) is given up by the next outermost call or
           read, `zero_grad` or `step`.
"""

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from elixir_moe.accelerator import is_accelerator, is_capturing
from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.calls import CallStack
from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.chunks.step_machine import ParamId, StepMachine, Unit
from elixir_moe.distributed.waits import WAITS
from elixir_moe.errors import UsageError
from elixir_moe.parallel.dtensor import placed_like
from elixir_moe.parallel.megatron import TokenDispatchers
from elixir_moe.parallel.state_dict import unparametrized
from elixir_moe.runtime.autograd import Hook, hook_outputs, in_backward, in_function
from elixir_moe.runtime.chunk import Placeholder
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.param_access import ParamAccess, Switch
from elixir_moe.runtime.phase import READABLE
from elixir_moe.runtime.saved_tensors import SavedTensors, leave
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.turns import Threads, Turns
from elixir_moe.torch_private import (
    DIFFERENTIATING,
    DisableTorchFunctionSubclass,
    accumulates_all,
    advance_sequence_number,
    at_end_of_backward,
    interpreter,
    keeps_graph,
    next_sequence_number,
    running_node,
    top_saved_tensors_hooks,
    will_execute,
)

T = TypeVar("T")


class _Actions:
    """The `StepActions` of a step: chunks are moved, and parameters change their classes.

    `tracked` as in `Gathers.unshard`.
    """

    def __init__(self, scheduler: Scheduler, access: ParamAccess, accept_gradient: Callable[[ParamId], None]) -> None:
        self.accept_gradient = accept_gradient
        self._scheduler, self._access = scheduler, access
        self._switches: dict[Unit, tuple[Switch, ...]] = {}
        gathers, reductions = scheduler.gathers, scheduler.reductions
        self.acquire_chunk, self.release_chunk = gathers.acquire_chunk, scheduler.release_chunk
        self.reserve, self.agree, self.reduce = reductions.reserve, reductions.agree, reductions.reduce
        self.finish, self.forget_round = reductions.finish_backward, gathers.forget_round

    def keep_writes(self, unit: Unit) -> None:
        self._scheduler.writes.keep_all(unit.chunks)

    def acquire(self, unit: Unit, *, tracked: bool = True) -> None:
        self._scheduler.gathers.unshard(unit.chunks, tracked=tracked, who=unit.label)
        self._access.open(self._switches_of(unit))

    def release(self, unit: Unit, *, tracked: bool = True) -> None:
        self._access.close(self._switches_of(unit))
        self._scheduler.release(unit.chunks, tracked=tracked)

    def _switches_of(self, unit: Unit) -> tuple[Switch, ...]:
        switches = self._switches.get(unit)
        if switches is None:
            chunks = self._scheduler.chunks
            switches = self._access.switches(chunks[chunk].parameters[index] for chunk, index in unit.slots)
            self._switches[unit] = switches
        return switches


@dataclass(slots=True)
class _Forward:
    """A forward whose turn it is not."""

    stack: CallStack
    saving: saved_tensors_hooks | None = None
    region: object = None
    """The checkpointed region in which it has handed its turn on last; None outside of one."""


class Hooks:
    """All hooks on one wrapped model."""

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[Unit, nn.Module],
        scheduler: Scheduler,
        placeholder: Placeholder,
        checkpoints: HostCheckpoints | None = None,
        callers: Iterable[nn.Module] = (),
    ) -> None:
        """`checkpoints` takes what checkpointed regions keep, if it goes to host memory.

        A call of one of the `callers` begins the hooks of saved tensors, too: a step may call a part of the model,
        which then runs checkpointed regions outside of all units, or inside a larger one that nobody calls.
        """
        self._root = model
        self._scheduler, self._writes = scheduler, scheduler.writes
        self._device = placeholder.device
        self._phase = scheduler.phase
        stays = all(chunk.spec.residence is ATTACHED for chunk in scheduler.chunks)
        self._packs = checkpoints is not None or not stays
        self._slot_of = {p: (c.spec.index, i) for c in scheduler.chunks for i, p in enumerate(c.parameters)}
        self._names = {p: name for name, p in model.named_parameters()}
        self._places = dict(model.named_parameters(remove_duplicate=False))
        self._gradient_hooks: list[tuple[int, dict[int, Any]]] = []
        self._handles: list[RemovableHandle] = []
        """Handles of the hooks on modules."""
        self._thread = 0
        self._saving: saved_tensors_hooks | None = None
        """The hooks that the end of the outermost call must remove."""
        self._access = ParamAccess(
            self._slot_of,
            unshard_for_call=self._unshard_for_call,
            unshard_for_block=self._unshard_for_block,
            lend=self._lend,
            keep_exactly=lambda parameter, values: self._writes.keep_exactly(self._slot_of[parameter], values),
            has_gradient=lambda parameter: self._slot_of[parameter] in scheduler.reductions.used,
            name_of=self.name_of,
        )
        self._actions = _Actions(scheduler, self._access, self._accept_gradient)
        trainable = {chunk.spec.index for chunk in scheduler.chunks if chunk.spec.key.trainable}
        self.machine = StepMachine(units, trainable, self._actions, in_order=scheduler.gathers.in_order)
        """Decides what the step asks for."""
        self._stack = CallStack(self.machine, self._actions)
        self._saved = SavedTensors(scheduler, placeholder, self.machine, self._begin_backward, checkpoints)
        self._turns: Turns[Any] | None = None
        """The forwards that take turns."""
        self._threads = Threads()
        self._others: dict[int, _Forward] = {}
        """By micro-batch: the forwards whose turn it is not."""
        self._region: object = None
        """The checkpointed region in which the present one has handed its turn on last."""
        self._turn_starts: list[tuple[int, int]] = []
        """(autograd's sequence number at its start, micro-batch) of each turn of the forwards that await a backward."""
        self._next_number = 0
        """The sequence number of the first node of the next turn."""
        self._in_fp32: list[nn.Parameter] = []
        """The parameters whose gradients autograd sums in fp32 now."""
        self._install(units, callers)

    def _install(self, units: Mapping[Unit, nn.Module], callers: Iterable[nn.Module]) -> None:
        for unit, module in units.items():
            self._hook(module, unit)
        for module in {self._root, *callers}.difference(units.values()):
            self._hook(module, None)
        hooks = weakref.ref(self)
        for parameter, slot in self._slot_of.items():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(partial(_accumulated, hooks, slot))
                self._gradient_hooks.append((handle.id, handle.hooks_dict_ref()))

    def _hook(self, module: nn.Module, unit: Unit | None) -> None:
        self._handles.append(module.register_forward_pre_hook(Hook(partial(self._enter, unit))))
        self._handles.append(module.register_forward_hook(Hook(partial(self._leave, unit)), always_call=True))

    def remove(self) -> None:
        """Removes all hooks, and gives the parameters their classes back, for good."""
        for handle in self._handles:
            handle.remove()
        for key, hooks in self._gradient_hooks:
            del hooks[key]
        self._access.remove()

    # ---------------------------------------------------------------------------------------------------------- forward

    def _enter(self, unit: Unit | None, module: nn.Module, args: Any) -> None:
        recomputes = in_backward()
        if recomputes:
            self._begin_backward()
            self._find_micro_batch()
        elif not self._stack.calls or module is self._root:
            self._phase.require_for_forward(READABLE, "a forward of the model")
            self._begin()
        elif self._thread != threading.get_ident():
            raise UsageError(_TWO_THREADS)
        if self._turns is not None and unit is not None and not recomputes:
            self._hand_on(unit.chunks)
        call = self._stack.enter(id(module), unit, with_grad=torch.is_grad_enabled(), in_backward=recomputes)
        if call.outermost and self._packs:
            self._saving = self._saved.hooks(continues=bool(self._others))
            self._saving.__enter__()

    def _begin(self, micro_batches: int = 1, predict: Callable[[], Schedule | None] = lambda: None) -> None:
        """Starts a call or read that is inside no other; resets unfinished work first.

        The arguments are those of `Gathers.begin_round`.
        """
        transform = interpreter()
        if transform is not None and transform.key() in DIFFERENTIATING:
            raise UsageError(
                "torch.func.grad, jvp and their like cannot go through a wrapped model, whose weights come and go: use "
                "backward() or torch.autograd.grad"
            )
        if is_accelerator(self._device) and is_capturing(self._device):
            raise UsageError(
                "a CUDA graph cannot capture a wrapped model, whose weights move between steps: capture parts of the "
                "step that meet none of its parameters"
            )
        in_turn = self._turns is not None and self._turns.is_mine()
        if self._turns is not None and not in_turn and not self._turns.is_callers():
            raise UsageError(_TWO_THREADS)
        if not in_turn and self._phase.unfinished:
            self.reset()
        if self._stack.loans and not in_function():
            self._stack.end_loans()
        self._thread = threading.get_ident()
        if not in_turn:
            WAITS.callers.add(self._thread)
            self._scheduler.gathers.begin_round(micro_batches, predict)
        self._phase.begin_call()

    def _leave(self, unit: Unit | None, module: nn.Module, args: Any, output: Any) -> None:
        call = self._stack.leave(id(module), with_grad=torch.is_grad_enabled())
        if call is None:
            return  # it failed before `_enter` recorded it
        if call.left and unit is not None:
            hook_outputs(output, partial(_reach, weakref.ref(self), weakref.ref(unit), call.entered, call.left))
        if call.outermost:
            self._end_saving()
            if output is None and sys.exc_info()[0] is not None:  # a failed forward gets no backward
                self.machine.drop_call()
            if call.training:
                hook_outputs(output, partial(_reach_end, weakref.ref(self), self.machine.clock, self._saved.updates))
            self._phase.end_call()

    def _end_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            leave(saving)

    # ------------------------------------------------------------------------------------------------------------ reads

    @contextmanager
    def _unshard_for_call(self, parameters: list[nn.Parameter], *, recorded: bool = True) -> Iterator[None]:
        """Gathers parameters for a function that reads them, or writes them in place, outside their units.

        `recorded`: the request is part of a training step.
        """
        backward, with_grad = in_backward(), torch.is_grad_enabled()
        outermost = not self._stack.calls and not backward
        if outermost:
            self._begin()
        if backward:
            self._begin_backward()
            self._find_micro_batch()
        slots, label = self._read_of(parameters)
        if self._turns is not None and recorded:
            self._hand_on([chunk for chunk, _ in slots])
        read = self._stack.begin_read(slots, label, with_grad=with_grad, in_backward=backward, recorded=recorded)
        try:
            with self._saved.hooks() if with_grad and not self._stack.calls else nullcontext():
                yield
        finally:
            self._stack.end_read(read)
            if outermost and not self._stack.calls:  # an interrupt inside `em.unsharded` leaves calls
                self._phase.end_call()

    @contextmanager
    def _unshard_for_block(self, parameters: list[nn.Parameter], write: bool) -> Iterator[None]:
        """Gathers parameters for a block of user code; with `write`, their values at its end are stored."""
        slots = [self._slot_of[p] for p in parameters]
        if write:
            self._writes.refuse_shared(slots)
        outermost = not self._stack.calls and not in_backward()
        with self._unshard_for_call(parameters, recorded=not outermost):
            if outermost:
                self._phase.end_call()  # reads inside the block are calls of their own
            before = {} if write else self._writes.fingerprints(slots)
            depth = len(self._phase.blocks)
            try:
                if outermost:
                    self._phase.blocks.append([self._names[p] for p in parameters[:4]])
                with self._writes.allowing(slots) if write else nullcontext():
                    yield
                if write and not (outermost and len(self._phase.blocks) <= depth):
                    self._writes.refuse_different(slots)
            finally:
                # First of all: an interrupt must not leave the block open.
                given, self._phase.blocks = self._phase.blocks, self._phase.blocks[:depth]
                if outermost:
                    self._phase.begin_call()
                lost = outermost and len(given) <= depth
                if write and not lost:
                    self._writes.store(slots)
            if lost:
                raise UsageError(
                    "what ran inside em.unsharded(...) has failed, and the block with it: what was written is lost"
                )
            self._writes.refuse_changes(before)

    def _lend(self, parameter: nn.Parameter) -> bool:
        """Implements the `lend` of `ParamAccess`."""
        if in_backward():
            self._begin_backward()
            self.machine.unpack(self._slot_of[parameter][0], running_node)
            return True
        outside = not self._stack.calls
        if outside:
            if not in_function():
                return False
            self._begin()
        if self._turns is not None:
            self._hand_on([self._slot_of[parameter][0]])
        self._stack.lend(*self._read_of([parameter]))
        if outside:
            self._phase.end_call()
        return True

    def _read_of(self, parameters: Sequence[nn.Parameter]) -> tuple[tuple[ParamId, ...], Callable[[], str]]:
        """(slots, label): the parameters that are read, and their name in messages."""
        return (
            tuple(self._slot_of[p] for p in parameters),
            lambda: f"a read of {', '.join(self._names[p] for p in parameters[:4])}",
        )

    # ------------------------------------------------------------------------------------------------------------ turns

    def run_in_turns(
        self,
        forwards: Sequence[Callable[[], T]],
        predict: Callable[[], Schedule | None],
        resume: Callable[[int], None],
        suspend: Callable[[int], None],
    ) -> list[T]:
        """Runs the forwards of several micro-batches, which pass each layer together; one backward of all must follow.

        `predict` gives the schedule of such a step, if it is known. `resume` and `suspend` are called with the number
        of a forward on its thread when its turn begins, and when it ends.
        """

        dispatchers = TokenDispatchers(self._root)

        def begin_turn(number: int) -> None:
            self._resume(number)
            dispatchers.resume(number)
            resume(number)

        def end_turn(number: int) -> None:
            suspend(number)
            dispatchers.suspend(number)
            self._suspend(number)

        self._phase.require(READABLE, "em.accumulate")
        self._refuse_own_gradients()
        self._begin(len(forwards), predict)
        stack = self._stack
        try:
            self._turns = Turns(self._threads, forwards, begin_turn, end_turn)
            self._phase.begin_turns(self._turns.is_mine)
            self.machine.begin_turns()
            self._sum_in_fp32()
            self._turn_starts, self._next_number = [], max(self._next_number, next_sequence_number())
            results: list[T] = self._turns.run()
            self._turns = None
        except BaseException:
            self.reset()
            raise
        for other in self._others.values():
            stack.loans += other.stack.loans
        self._stack = stack
        self._others.clear()
        advance_sequence_number(self._next_number)
        self._turn_starts.append((self._next_number, -1))
        self.machine.end_turns()
        self._phase.end_turns()
        return results

    def _resume(self, number: int) -> None:
        """Restores what runs in a micro-batch; its next nodes come after all that others have made."""
        advance_sequence_number(self._next_number)
        self._turn_starts.append((self._next_number, number))
        mine = self._others.pop(number, None) or _Forward(CallStack(self.machine, self._actions))
        self._stack, self._saving, self._region = mine.stack, mine.saving, mine.region
        self.machine.turn_to(number)
        self._thread = threading.get_ident()

    def _suspend(self, number: int) -> None:
        self._next_number = next_sequence_number()
        self._others[number] = _Forward(self._stack, self._saving, self._region)

    def _hand_on(self, chunks: Sequence[int]) -> None:
        """Hands the turn on before weights are gathered, by the rule of `chunks.legs`."""
        assert self._turns is not None
        region = self._checkpointed_region()
        if self._phase.blocks or (region is not None and region == self._region):
            return
        if self._scheduler.gathers.uses_cache(tuple(chunks)):
            if region is not None and not torch.is_grad_enabled():
                self.machine.arrive()
            self._turns.hand_on()
            self._region = self._checkpointed_region()

    def _checkpointed_region(self) -> object:
        """Identifies the checkpointed region that runs; None outside of one.

        A reentrant one makes no nodes of autograd, and another one sets saved-tensor hooks of its own.
        """
        if not torch.is_grad_enabled():
            calls = self._stack.calls
            return next_sequence_number() if calls and calls[-1].training else None
        pack, _ = top_saved_tensors_hooks(True) or (None, None)
        return pack if getattr(pack, "__module__", "") == "torch.utils.checkpoint" else None

    def _find_micro_batch(self) -> None:
        """Finds the micro-batch that backward runs again: the one that has made the running node."""
        node = running_node()
        if self._turn_starts and node is not None:
            found = self._turn_starts[bisect_right(self._turn_starts, (node, sys.maxsize)) - 1][1]
            if found >= 0:  # else a region inside a region, which has just been made again
                self.machine.micro_batch = found

    def _sum_in_fp32(self) -> None:
        """Lets autograd sum gradients of 16 bits in fp32 until `_end_fp32_sums`."""
        with DisableTorchFunctionSubclass():
            for parameter in self._slot_of:
                if parameter.requires_grad and parameter.itemsize == 2:
                    self._in_fp32.append(parameter)
                    parameter.grad_dtype = torch.float32

    def _end_fp32_sums(self) -> None:
        with DisableTorchFunctionSubclass():
            while self._in_fp32:
                parameter = self._in_fp32[-1]
                parameter.grad = None  # a backward that has failed leaves a part of the sum
                parameter.grad_dtype = parameter.dtype
                self._in_fp32.pop()

    # --------------------------------------------------------------------------------------------------------- backward

    def reach_end(self, left: int, updates: int) -> None:
        """Called when backward reaches the end of an outermost call, left at this number after `updates` updates."""
        self._saved.check_current(updates)
        self._begin_backward(left)

    def _begin_backward(self, left: int | None = None, *, brought: ParamId | None = None) -> None:
        """Starts a backward from the point that forward left at number `left`, if none runs yet.

        `brought` is the slot whose gradient it has brought already.
        """
        if self.machine.backward is not None or not in_backward():
            return
        if not self._in_fp32:
            self._refuse_own_gradients(but=brought)
        self._phase.begin_backward()
        self._run_last()
        keep_graph = keeps_graph()
        self.machine.begin(left, keep_graph=keep_graph, find_awaited=self._find_awaited)
        at_end_of_backward(self._end_backward)
        for index in self._stack.end_loans():  # the function whose backward runs first may have asked already
            self.machine.unpack(index, running_node)

    def _refuse_own_gradients(self, *, but: ParamId | None = None) -> None:
        """Raises UsageError if user code has set a gradient to which autograd would add."""
        with DisableTorchFunctionSubclass():
            found = [p for p, slot in self._slot_of.items() if p.grad is not None and p.requires_grad and slot != but]
            if found and in_backward() and not accumulates_all():
                found = [p for p in found if self._adds_to(p)]
        if found:
            raise UsageError(gradients_set_by_hand([self._names[p] for p in found]))

    def _adds_to(self, parameter: nn.Parameter) -> bool:
        """Whether the running `torch.autograd.grad`, or `backward` with inputs, adds to ``parameter.grad``."""
        try:
            with torch.enable_grad():
                return self._accumulates(self._slot_of[parameter])
        except RuntimeError:  # torch's answer for an input of autograd.grad
            return False

    def _run_last(self) -> None:
        """Moves our hooks on gradients behind all others, which must run before the gradient is taken away."""
        for key, hooks in self._gradient_hooks:
            if len(hooks) > 1:
                hooks[key] = hooks.pop(key)

    def _find_awaited(self, ahead: Sequence[tuple[int, Unit]]) -> Sequence[ParamId] | None:
        """Implements `find_awaited` of `StepMachine.begin`; `torch.autograd.grad` brings no gradients of parameters.

        Ranks need not agree where requests decide no gathers of several ranks, nor on a rank-dependent unit: a rank
        whose tokens reach none of its experts passes its output on. Reentrant checkpoints recompute into graphs of
        their own, which nobody sees before, and only a backward that accumulates can run them.
        """
        awaited: list[ParamId] = []
        brings = any(self.machine.past.unrecomputed.values())
        compares = self._scheduler.gathers.of_several_ranks
        with torch.enable_grad(), DisableTorchFunctionSubclass():
            for unit in dict.fromkeys(unit for _, unit in reversed(ahead)):
                compared = compares and not unit.rank_dependent and self._scheduler.gathers.uses_cache(unit.chunks)
                for slot in unit.slots if compared or not brings else ():
                    try:
                        found = self._accumulates(slot)
                    except RuntimeError:  # torch's answer for an input of autograd.grad
                        return None
                    brings |= found
                    if found and not compared:
                        break
                    if found:
                        awaited.append(slot)
        return awaited if brings else None

    def _accumulates(self, slot: ParamId) -> bool:
        """Whether the running backward comes to the gradient of a parameter."""
        parameter = self._scheduler.chunks[slot[0]].parameters[slot[1]]
        if not parameter.requires_grad:
            return False
        view = parameter.view_as(parameter).grad_fn
        assert view is not None
        return will_execute(view.next_functions[0][0])  # type: ignore[arg-type]

    def reach(self, unit: Unit, entered: int, left: int) -> None:
        """Called when backward reaches a run of `unit` that forward entered and left at these numbers."""
        self._begin_backward(left)
        self.machine.reach(unit, entered, left)

    def accumulated(self, slot: ParamId) -> None:
        """Takes the gradient of the parameter at `slot`; in a pass, it may wait in `grad` until it is complete."""
        if self.machine.backward is None:
            self._begin_backward(brought=slot)
        self.machine.accumulate(slot)

    def _accept_gradient(self, slot: ParamId) -> None:
        """Implements `StepActions.accept_gradient`."""
        parameter = self._scheduler.chunks[slot[0]].parameters[slot[1]]
        with DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
            if slot in self._scheduler.reductions.used and len(parameter._post_accumulate_grad_hooks or ()) > 1:
                self._refuse_part(parameter)
        if gradient is None:
            return  # a hook of user code has used it up, and the parameter has none, as in torch
        if type(gradient) is not torch.Tensor:
            gradient = placed_like(gradient, parameter)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        self._scheduler.reductions.add_gradient(*slot, gradient)

    def _refuse_part(self, parameter: nn.Parameter) -> NoReturn:
        raise UsageError(
            f"a second gradient of parameter {self._names[parameter]!r}, which has a hook of "
            f"register_post_accumulate_grad_hook: in torch that hook sees the sum of all gradients of the step, which "
            f"is in shards here: use register_hook, which sees each gradient by itself, or optimizer.clip_grad_value_"
        )

    def _end_backward(self) -> None:
        self.machine.end()
        self.machine.micro_batch = 0
        self._turn_starts.clear()
        self._end_fp32_sums()
        if not self.machine.round_is_open:
            self._scheduler.learn()
        self._phase.end_backward(in_call=bool(self._stack.calls))

    # ---------------------------------------------------------------------------------------------------- between steps

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's first name in the model."""
        return self._names[parameter]

    def changed_parameters(self) -> tuple[list[str], list[tuple[str, str]], list[str]]:
        """Names of trainable parameters that the model did not have in `wrap`; (name then, name now) of moved ones,
        and of those that are tied since; names of parameters in whose place another stands.

        `torch.nn.utils.parametrize` may move parameters. The others must be back before anything is saved, which
        nobody should learn at the end of a run. A module may be left out of the model for some steps, as when layers
        are dropped at random.
        """
        new, moved, replaced = [], [], []
        with DisableTorchFunctionSubclass():
            now = dict(self._root.named_parameters(remove_duplicate=False))
            found = set(now.values())
            for name, parameter in now.items():
                before = self._places.get(name)
                if before is parameter:
                    continue
                if before is not None and before not in found:
                    replaced.append(name)
                then = self._names.get(parameter)
                if then is None:
                    new += [name] * parameter.requires_grad
                elif name in self._places or not self._still_at(then, parameter):
                    moved.append((then, name))
        return new, moved, replaced

    def _still_at(self, then: str, parameter: nn.Parameter) -> bool:
        wanted = unparametrized(then)
        every = self._root.named_parameters(remove_duplicate=False)
        return any(p is parameter and unparametrized(name) == wanted for name, p in every)

    def abandon(self) -> None:
        """Gives up interrupted forwards and a failed backward."""
        self._stack.end_loans()
        if self._phase.unfinished or self._stack.calls:
            self.reset()

    def reset(self) -> None:
        """Gives up all unfinished work; reduced gradients stay."""
        if self._turns is not None:
            self._turns.end()
            self._threads.end()  # torch's modes may be what a failure has left in them
            self._turns = None
        self._phase.abort()
        self._scheduler.reset()
        self._saved.forget()
        self.forget_calls()
        self._access.close_all()

    def forget_calls(self) -> None:
        """Ends the calls of which torch has told no end, as after an interrupt, with their saved-tensor hooks."""
        self._end_saving()
        self._end_fp32_sums()
        self._turn_starts.clear()
        self._others.clear()
        self._stack.forget()
        self.machine.forget()
        self._phase.recover()

    def updated(self) -> None:
        """Called when the optimizer has written new values, or begun to: drops gathered weights, starts a step."""
        self.abandon()
        self._scheduler.updated()
        if self.machine.round_is_open:
            self._scheduler.learn()
        self._scheduler.rewind()
        self.machine.forget()
        self._saved.updated()


_TWO_THREADS = (
    "two threads run a wrapped model at once: let one wait for the other; a forward that starts threads of its own "
    "cannot run under em.accumulate"
)


def moved_since_wrap(moved: Sequence[tuple[str, str]]) -> str:
    """The error message for parameters with (name in `wrap`, name now)."""
    return (
        f"parameter {moved[0][0]!r} of wrap is at {moved[0][1]!r} now; {len(moved)} are tied, swapped or moved since: "
        f"tie, swap and move parameters and modules, and call apply_activation_checkpointing, before wrap"
    )


def gradients_set_by_hand(names: Sequence[str]) -> str:
    """The error message for parameters whose ``grad`` is not from a backward."""
    return (
        f"parameter.grad was set by hand: {names[:8]}; only gradients from backward are used: call zero_grad(), and "
        f"add the term to the loss"
    )


def gone_since_wrap(gone: Sequence[str]) -> str:
    """The error message for parameters and buffers that the model has no more."""
    return f"the model had {gone} in wrap and has not now: rename and remove parameters before wrap"


# Python's garbage collector cannot see into autograd's graph: a strong reference there would keep the model alive.


def _accumulated(hooks: weakref.ref[Hooks], slot: ParamId, _: nn.Parameter) -> None:
    if (alive := hooks()) is not None:
        alive.accumulated(slot)


def _reach(hooks: weakref.ref[Hooks], unit: weakref.ref[Unit], entered: int, left: int, _: torch.Tensor) -> None:
    if (alive := hooks()) is not None:
        found = unit()
        assert found is not None, "hooks keep their units"
        alive.reach(found, entered, left)


def _reach_end(hooks: weakref.ref[Hooks], left: int, updates: int, _: torch.Tensor) -> None:
    if (alive := hooks()) is not None:
        alive.reach_end(left, updates)
