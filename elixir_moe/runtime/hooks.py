"""The link from modules and autograd to the scheduler: which chunks a module needs, and when gradients are complete.

Owns the hooks on units and parameters, the stack of running units, and the positions in a forward; `saved_tensors`
owns the hooks on saved tensors. Moves no data: it tells `Scheduler` which chunks are needed and which are ready.

Forward.   A unit's pre-forward hook unshards its chunks; its post-forward hook releases them. In between, the unit's
           parameters have their original classes. Weights that autograd saves are packed, unless all chunks are
           `ATTACHED`.
Backward.  A hook on a unit's outputs runs right before the unit's backward and unshards its chunks again. They are
           held until all gradients of the unit are complete, or until backward has passed the unit. Gradients move
           from `parameter.grad` to the chunk's memory.
Passing.   Every entry into and exit from a unit in forward gets the next number. Autograd runs nodes in the reverse
           order of their creation. So when backward reaches a unit that forward left at number e, it has passed
           everything entered after e: gradients still missing there will not come, and count as zero.
Recompute. A forward inside backward (activation checkpointing) holds its chunks until backward has passed it, since
           the checkpoint's own saved-tensor hooks keep the weights (v2, A.3: the rCache must hold the largest region).
           When a region starts to run again, the holds on everything that forward entered later end.
Elsewhere. A function that reads a parameter outside its running unit borrows it: the chunk is gathered for the call.
           Inside a forward, such a read has a position like a unit's, so that its gradient is waited for. Outside of
           one it packs what autograd saves under every plan, since no unit holds the parameter in backward.
Reset.     A call, read or backward sets a mark, which only its normal end removes. If the next outermost call or read,
           `zero_grad` or `step` finds the mark, all unfinished work is given up.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from elixir_moe.errors import UsageError
from elixir_moe.parallel.dtensor import placed_like
from elixir_moe.parallel.plain_state import unparametrized
from elixir_moe.runtime.access import ParamAccess
from elixir_moe.runtime.autograd import Hook, hook_outputs, in_backward
from elixir_moe.runtime.chunk import ATTACHED, Placeholder
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.saved_tensors import SavedTensors, leave
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.units import Unit

ParamId = tuple[int, int]
_MOST_FORWARDS = 256
"""Most forwards that await a backward one by one; the first ones are merged."""
_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


@dataclass(slots=True)
class Call:
    """A running forward of a unit or of the whole model."""

    module: nn.Module
    unit: Unit | None
    training: bool
    """The call, or one around it, runs with gradients."""
    recomputes: bool
    """The call runs in backward."""
    entered: int
    """The call's position in forward."""
    outermost: bool
    held: bool = False
    """The end of the call must release its chunks."""
    saving: saved_tensors_hooks | None = None
    """The hooks that the end of the call must remove."""


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of the model that awaits its backward; pipeline schedules have several at once."""

    start: int
    """A number below all numbers of this forward."""
    entered: dict[Unit, int] = field(default_factory=dict)
    """The number at which forward first entered each unit."""
    left: dict[Unit, int] = field(default_factory=dict)
    """The number at which forward last left each unit."""
    repeated: set[Unit] = field(default_factory=set)
    """Units entered more than once."""
    unrecomputed: Counter[Unit] = field(default_factory=Counter)
    """Runs of each unit without gradients, in checkpoints that backward has not run again yet."""


@dataclass(slots=True, eq=False)
class Backward:
    """A running backward."""

    forward: Forward
    """All forwards that began before the point where backward started, merged."""
    ahead: list[tuple[int, Unit]]
    """(number, unit) of the first entry of each unit that backward has not passed yet, ascending."""
    waiting: set[Unit]
    """The units in `ahead`."""
    reached: set[tuple[Unit, int]] = field(default_factory=set)
    holds: list[tuple[int, Unit]] = field(default_factory=list)
    """(number of entry, unit) of units held until backward has passed them."""
    landed: set[ParamId] = field(default_factory=set)
    """Parameters whose gradients are complete."""
    awaits: dict[Unit, int] = field(default_factory=dict)
    """Number of incomplete gradients of each unit that has complete ones."""
    region: int = sys.maxsize
    """The number at which forward entered the first unit of the last recomputed region."""


class Hooks:
    """All hooks on one wrapped model."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        scheduler: Scheduler,
        placeholder: Placeholder,
        checkpoints: HostCheckpoints | None = None,
    ) -> None:
        """`checkpoints` takes what checkpointed regions keep, if it goes to host memory."""
        self._root = model
        self._scheduler = scheduler
        self._on_gpu = placeholder.device.type == "cuda"
        self._given: list[list[nn.Parameter]] = []
        """Parameters of each open `em.unsharded` block outside of a forward, outermost first."""
        self._saved = SavedTensors(scheduler, placeholder, self._begin_backward, checkpoints)
        stays = all(chunk.placement is ATTACHED for chunk in scheduler.chunks)
        self._packs = checkpoints is not None or not stays
        self._slot_of = {p: (c.spec.index, i) for c in scheduler.chunks for i, p in enumerate(c.parameters)}
        self._names = {p: name for name, p in model.named_parameters()}
        self._owners: dict[ParamId, list[Unit]] = {slot: [] for slot in self._slot_of.values()}
        self._borrowers: dict[tuple[ParamId, ...], Unit] = {}
        self._landings: list[tuple[int, dict[int, Any]]] = []
        self._handles: list[RemovableHandle] = []
        """Of the hooks on modules."""
        self._calls: list[Call] = []
        self._thread = 0
        self._begun = False
        """An outermost call, a read or a backward has begun and not ended."""
        self._forget_step()
        self._install(units)
        self._access = ParamAccess(
            self._slot_of,
            unshard_for_call=self._unshard_for_call,
            unshard_for_block=self._unshard_for_block,
            keep_exactly=lambda parameter, values: scheduler.keep_exactly(*self._slot_of[parameter], values),
            has_gradient=lambda parameter: self._slot_of[parameter] in scheduler.used,
            name_of=self.name_of,
        )
        self._switches = {unit: self._access.switches(unit.parameters) for unit in units}

    def _install(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for slot in unit.slots:
                self._owners[slot].append(unit)
            assert unit.module is not None
            self._hook(unit.module, unit)
        if all(unit.module is not self._root for unit in units):
            self._hook(self._root, None)
        hooks = weakref.ref(self)
        for parameter, slot in self._slot_of.items():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(partial(_landed, hooks, slot))
                self._landings.append((handle.id, handle.hooks_dict_ref()))

    def _hook(self, module: nn.Module, unit: Unit | None) -> None:
        self._handles.append(module.register_forward_pre_hook(Hook(partial(self._enter, unit))))
        self._handles.append(module.register_forward_hook(Hook(partial(self._leave, unit)), always_call=True))

    def remove(self) -> None:
        """Removes all hooks, and gives the parameters their classes back, for good."""
        for handle in self._handles:
            handle.remove()
        for key, hooks in self._landings:
            del hooks[key]
        self._access.remove()

    def _forget_step(self) -> None:
        """Forgets the forwards that await a backward."""
        self._clock = 0
        self._forwards: list[Forward] = []
        self._current: Forward | None = None
        self._backward: Backward | None = None
        self._past = Forward(0)
        """The forward of the last backward."""
        self._round_is_open = False

    # ------------------------------------------------------------------------------------------------------- forward

    def _enter(self, unit: Unit | None, module: nn.Module, args: Any) -> None:
        recomputes = in_backward()
        if recomputes:
            self._begin_backward()
        elif not self._calls or module is self._root:
            self.check_outside("a forward of the model")
            self._begin()
        elif self._thread != threading.get_ident():
            raise UsageError("two threads run a wrapped model at once: let one wait for the other")
        training = torch.is_grad_enabled() or any(call.training for call in self._calls[-1:])
        outermost = not self._calls and not recomputes
        call = Call(module, unit, training, recomputes, self._clock, outermost)
        self._calls.append(call)  # before all that may fail: `_leave` undoes only what was done
        if outermost:
            self._current = None
            if self._packs:
                call.saving = self._saved.hooks()
                call.saving.__enter__()
        if unit is None:
            return
        if recomputes:
            assert self._backward is not None
            unrecomputed = self._backward.forward.unrecomputed
            if torch.is_grad_enabled() and unrecomputed[unit]:
                unrecomputed[unit] -= 1
        elif training:
            self._clock += 1
            call.entered = self._clock
            self._note(unit)
        if self._backward is not None and recomputes:
            self._hold_again(unit, self._backward, self._backward.forward.entered.get(unit, 0))
        else:
            self._hold(unit, tracked=training or recomputes)
            call.held = True

    def _begin(self) -> None:
        """Starts a call or read that is inside no other; resets unfinished work first."""
        transform = torch._C._functorch.peek_interpreter_stack()
        if transform is not None and transform.key() in _DIFFERENTIATING:
            raise UsageError(
                "torch.func.grad, jvp and their like cannot go through a wrapped model, whose weights come and go: use "
                "backward() or torch.autograd.grad"
            )
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph cannot capture a wrapped model, whose weights move between steps: capture parts of the "
                "step that meet none of its parameters"
            )
        if self._begun or self._scheduler.failed or self._backward is not None:
            self.reset()
        self._thread = threading.get_ident()
        self._begun = True

    def _hold(self, unit: Unit, *, tracked: bool) -> None:
        self._scheduler.unshard(unit.chunks, tracked=tracked, who=unit.label)
        self._access.open(self._switches[unit])

    def _let_go(self, unit: Unit, *, tracked: bool) -> None:
        self._access.close(self._switches[unit])
        self._scheduler.release(unit.chunks, tracked=tracked)

    def _note(self, unit: Unit) -> None:
        """Records that forward enters `unit` now."""
        if self._current is None:
            self._current = Forward(self._clock - 1)
            self._forwards.append(self._current)
            if len(self._forwards) > _MOST_FORWARDS:  # most likely, the first ones never get a backward
                self._forwards[:2] = [_merged(self._forwards[:2])]
                self._scheduler.forget_round()
        if unit in self._current.entered:
            self._current.repeated.add(unit)
        self._current.entered.setdefault(unit, self._clock)

    def _leave(self, unit: Unit | None, module: nn.Module, args: Any, output: Any) -> None:
        places = [place for place, call in enumerate(self._calls) if call.module is module]
        if not places:
            return  # it failed before `_enter` recorded it
        while len(self._calls) > places[-1] + 1:  # torch runs no hooks of calls that an interrupt has ended
            self._end(self._calls.pop())
        call = self._calls.pop()
        if unit is not None and (call.held or call.recomputes):
            if call.recomputes:
                assert self._backward is not None
                forward = self._backward.forward
                entered, left = forward.entered.get(unit, 0), forward.left.get(unit, sys.maxsize)
            else:
                entered, left = call.entered, self._number_exit(unit) if call.training else 0
            if call.training or call.recomputes:
                hook_outputs(output, partial(_reach, weakref.ref(self), weakref.ref(unit), entered, left))
        self._end(call)
        if call.outermost:
            if output is None and sys.exc_info()[0] is not None:  # a failed forward gets no backward
                self._forwards = [forward for forward in self._forwards if forward is not self._current]
            if call.training:
                hook_outputs(output, partial(_reach_end, weakref.ref(self), self._clock, self._saved.updates))
            self._begun = False

    def _number_exit(self, unit: Unit) -> int:
        self._clock += 1
        if self._current is not None:
            self._current.left[unit] = self._clock
            if not torch.is_grad_enabled():
                self._current.unrecomputed[unit] += 1
        return self._clock

    def _end(self, call: Call) -> None:
        """Releases the chunks of a call and removes its hooks, whether it finished or not."""
        if call.held and call.unit is not None:
            self._let_go(call.unit, tracked=call.training)
        if call.saving is not None:
            leave(call.saving)

    # --------------------------------------------------------------------------------------------------------- reads

    @contextmanager
    def _unshard_for_call(self, parameters: list[nn.Parameter], *, recorded: bool = True) -> Iterator[None]:
        """Gathers parameters for a function that reads them, or writes them in place, outside their units.

        `recorded`: the request is part of a training step.
        """
        backward, with_grad = in_backward(), torch.is_grad_enabled()
        outermost = not self._calls and not backward
        if outermost:
            self._begin()
        self._begin_backward()
        tracked = recorded and (with_grad or backward or any(call.training for call in self._calls[-1:]))
        borrower = self._borrower(tuple(self._slot_of[p] for p in parameters), tuple(parameters))
        if tracked and self._calls and not backward:
            self._clock += 1
            self._note(borrower)
        again = self._backward if backward and with_grad else None  # recomputation holds the weights, as for a unit
        if again is not None:
            self._hold_again(borrower, again, again.forward.entered.get(borrower, sys.maxsize))
        else:
            self._hold(borrower, tracked=tracked)
        try:
            with self._saved.hooks() if with_grad and not self._calls else nullcontext():
                yield
        finally:
            for index in borrower.chunks:
                self._scheduler.keep_writes(self._scheduler.chunks[index])
            if again is None:
                self._let_go(borrower, tracked=tracked)
            if outermost:
                self._begun = bool(self._calls)  # an interrupt inside `em.unsharded` leaves calls

    @contextmanager
    def _unshard_for_block(self, parameters: list[nn.Parameter], write: bool) -> Iterator[None]:
        """Gathers parameters for a block of user code; with `write`, their values at its end are stored."""
        slots = [self._slot_of[p] for p in parameters]
        outermost = not self._calls and not in_backward()
        with self._unshard_for_call(parameters, recorded=not outermost):
            self._begun = self._begun and not outermost  # reads inside the block set and remove the mark
            before = {} if write else {slot: self._scheduler.fingerprint(*slot) for slot in slots}
            depth = len(self._given)
            try:
                if outermost:
                    self._given.append(parameters)
                yield
            finally:
                given, self._given = self._given, self._given[:depth]  # first: an interrupt must not leave it open
                self._begun = self._begun or outermost
                lost = outermost and len(given) <= depth
                if write and not lost:
                    self._scheduler.store(slots)
            if lost:
                raise UsageError(
                    "what ran inside em.unsharded(...) has failed, and the block with it: what was written is lost"
                )
            self._refuse_unseen(before)

    def _refuse_unseen(self, before: dict[ParamId, tuple[int, int]]) -> None:
        for slot, (version, values) in before.items():
            now = self._scheduler.fingerprint(*slot)
            if now[0] == version and now[1] != values:
                self._scheduler.undo_unseen(slot[0])
                name = self._scheduler.chunks[slot[0]].names[slot[1]]
                raise UsageError(
                    f"parameter {name!r} was written through .data or its address inside em.unsharded(...): pass "
                    f"write=True"
                )

    def check_outside(self, what: str) -> None:
        """Raises UsageError inside ``with em.unsharded(...)``, where no forward, backward or step may run."""
        if self._given:
            names = ", ".join(repr(self._names[p]) for p in self._given[0][:4])
            raise UsageError(f"{what} inside `with em.unsharded(...)` of {names}: end the block first")

    def _borrower(self, slots: tuple[ParamId, ...], parameters: tuple[nn.Parameter, ...]) -> Unit:
        """The unit that stands for all reads of these parameters outside their units."""
        unit = self._borrowers.get(slots)
        if unit is None:
            names = ", ".join(self._names[p] for p in parameters[:4])
            unit = Unit(f"a read of {names}", None, slots, parameters)
            self._switches[unit] = self._access.switches(parameters)
            for slot in slots:
                self._owners[slot].append(unit)
            self._borrowers[slots] = unit  # last: an interrupt before it leaves a unit that nothing enters
        return unit

    # ------------------------------------------------------------------------------------------------------ backward

    def reach_end(self, left: int, updates: int) -> None:
        """Called when backward reaches the end of an outermost call, left at this number after `updates` updates."""
        self._saved.check_current(updates)
        self._begin_backward(left)

    def _begin_backward(self, left: int | None = None) -> None:
        """Starts a backward from the point that forward left at number `left`; later forwards await another one."""
        if self._backward is not None or not in_backward():
            return
        self.check_outside("a backward through the model")
        self._scheduler.refuse_begun("a second backward")
        self._run_landings_last()
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self._past = self._take(left, keep=keep_graph) or self._past
        self._begun = True
        self._round_is_open = keep_graph
        ahead = sorted(((number, unit) for unit, number in self._past.entered.items()), key=lambda item: item[0])
        self._backward = Backward(self._past, ahead, {unit for _, unit in ahead})
        first_use: dict[int, int] = {}
        awaited: dict[int, set[int]] = {}
        for number, unit in ahead if self._accumulates(ahead) else ():
            for chunk, index in unit.slots:
                if self._scheduler.chunks[chunk].spec.key.trainable:
                    first_use.setdefault(chunk, number)
                    awaited.setdefault(chunk, set()).add(index)
        order = sorted(first_use, key=lambda chunk: (first_use[chunk], chunk), reverse=True)
        self._scheduler.reductions.begin(order, awaited)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _take(self, left: int | None, *, keep: bool) -> Forward | None:
        """Merges all forwards that began before number `left`; forgets them unless `keep`."""
        mine = [forward for forward in self._forwards if left is None or forward.start < left]
        if not mine:
            return None
        if not keep:
            self._forwards = [forward for forward in self._forwards if forward not in mine]
        return _merged(mine)

    def _run_landings_last(self) -> None:
        """Moves our hooks on gradients behind all others, which must run before the gradient is taken away."""
        for key, hooks in self._landings:
            if len(hooks) > 1:
                hooks[key] = hooks.pop(key)

    def _accumulates(self, ahead: Sequence[tuple[int, Unit]]) -> bool:
        """Whether this backward accumulates gradients of parameters; that of `torch.autograd.grad` does not.

        Reentrant checkpoints recompute into graphs of their own, and only a backward that accumulates can run them.
        """
        if any(self._past.unrecomputed.values()):
            return True
        parameters = (parameter for _, unit in reversed(ahead) for parameter in unit.parameters)
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                if parameter.requires_grad:
                    view = parameter.view_as(parameter).grad_fn
                    assert view is not None
                    node = view.next_functions[0][0]
                    try:
                        if torch._C._will_engine_execute_node(node):  # type: ignore[arg-type]
                            return True
                    except RuntimeError:  # torch's answer for an input of autograd.grad
                        return False
        return False

    def reach(self, unit: Unit, entered: int, left: int) -> None:
        """Called when backward reaches a run of `unit` that forward entered and left at these numbers."""
        self._begin_backward(left)
        assert self._backward is not None
        if (unit, left) in self._backward.reached:
            return
        self._backward.reached.add((unit, left))
        self._saved.let_go()
        self._pass(left)
        self._hold(unit, tracked=True)
        self._backward.holds.append((entered, unit))
        if unit.chooses:
            self._scheduler.reserve_gradients(unit.chunks)

    def landed(self, slot: ParamId, parameter: nn.Parameter) -> None:
        """Takes a complete gradient: autograd has summed it over all uses of the parameter at `slot`."""
        if self._backward is None:
            self._begin_backward()
        self._saved.let_go()
        with torch._C.DisableTorchFunctionSubclass():
            gradient, parameter.grad = parameter.grad, None
        if gradient is not None and type(gradient) is not torch.Tensor:
            gradient = placed_like(gradient, parameter)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        more, owners = self._past.unrecomputed, self._owners[slot]
        last = not any(unit.chooses or (more and more[unit]) for unit in owners)
        if last:
            self._let_go_early(slot)
        if gradient is not None:  # else a hook of user code has used it up, and the parameter has none, as in torch
            self._scheduler.add_gradient(*slot, gradient)
        if last:
            self._scheduler.expect_no_more(*slot)

    def _let_go_early(self, slot: ParamId) -> None:
        """Ends the holds on units whose last missing gradient is this one: nothing reads their weights any more."""
        backward = self._backward
        if backward is None or slot in backward.landed:
            return
        backward.landed.add(slot)
        for unit in self._owners[slot]:
            missing = backward.awaits[unit] = backward.awaits.get(unit, len(unit.slots)) - 1
            if not missing:
                ended = [hold for hold in backward.holds if hold[1] is unit]
                backward.holds = [hold for hold in backward.holds if hold[1] is not unit]
                for _ in ended:
                    self._let_go(unit, tracked=True)

    def _pass(self, left: int) -> None:
        """Records that everything forward entered after number `left` has had its backward."""
        assert self._backward is not None
        ahead, waiting = self._backward.ahead, self._backward.waiting
        while ahead and ahead[-1][0] > left:
            _, unit = ahead.pop()
            waiting.discard(unit)
            for slot in unit.slots:
                if self._scheduler.reductions.awaits(*slot) and waiting.isdisjoint(self._owners[slot]):
                    self._scheduler.expect_no_more(*slot)
        self._let_go_after(left, self._backward)

    def _let_go_after(self, left: int, backward: Backward) -> None:
        """Ends the holds on what forward entered after number `left`."""
        passed = [unit for entered, unit in backward.holds if entered > left]
        if passed:
            backward.holds = [hold for hold in backward.holds if hold[0] <= left]
            for unit in passed:
                self._let_go(unit, tracked=True)

    def _hold_again(self, unit: Unit, backward: Backward, entered: int) -> None:
        """Holds a unit that backward recomputes until backward has passed it.

        When a region starts to run again, everything that forward entered later is done, or runs again with it. For a
        unit that ran more than once, it is unknown which run this is.
        """
        self._saved.let_go()
        if entered < backward.region and unit not in backward.forward.repeated:
            self._let_go_after(entered, backward)
            backward.region = entered
        self._hold(unit, tracked=True)
        backward.holds.append((entered, unit))

    def _end_backward(self) -> None:
        self._saved.let_go()
        self._pass(-1)
        self._scheduler.finish_backward()
        self._round_is_open |= bool(self._forwards)  # the graph is kept, or another forward awaits its backward
        if not self._round_is_open:
            self._scheduler.learn()
        self._backward = None
        self._begun = bool(self._calls)

    # ------------------------------------------------------------------------------------------------- between steps

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's first name in the model."""
        return self._names[parameter]

    def changed_parameters(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Names of trainable parameters that the model did not have in `wrap`; (name then, name now) of moved ones.

        `torch.nn.utils.parametrize` may move parameters. The others must be back before anything is saved, which
        nobody should learn at the end of a run.
        """
        new, moved = [], []
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self._root.named_parameters():
                then = self._names.get(parameter)
                if then is None:
                    new += [name] * parameter.requires_grad
                elif then != name and not self._still_at(then, parameter):
                    moved.append((then, name))
        return new, moved

    def _still_at(self, then: str, parameter: nn.Parameter) -> bool:
        wanted = unparametrized(then)
        every = self._root.named_parameters(remove_duplicate=False)
        return any(p is parameter and unparametrized(name) == wanted for name, p in every)

    def notice_failure(self) -> None:
        """Gives up a backward that stopped before its end."""
        if self._backward is not None and not in_backward():
            self.reset()

    def abandon(self) -> None:
        """Gives up interrupted forwards and a failed backward; clears the mark of lost gradients."""
        if self._begun or self._calls or self._backward is not None or self._scheduler.failed:
            self.reset()
        self._scheduler.lost_gradients = False

    def reset(self) -> None:
        """Gives up all unfinished work; reduced gradients stay."""
        self._begun = True
        self._scheduler.lost_gradients |= self._backward is not None
        self._scheduler.reset()
        self._given.clear()
        self._saved.forget()
        while self._calls:
            call = self._calls.pop()
            if call.saving is not None:
                leave(call.saving)
        self._access.close_all()
        self._forget_step()
        self._begun = False

    def updated(self) -> None:
        """Called when the optimizer has written new values: drops gathered weights and starts a new step."""
        if self._begun or self._calls or self._scheduler.failed:
            self.reset()
        self._scheduler.updated()
        if self._round_is_open:
            self._scheduler.learn()
        self._scheduler.rewind()
        self._forget_step()
        self._saved.updated()


def moved_since_wrap(moved: Sequence[tuple[str, str]]) -> str:
    """The error message for parameters with (name in `wrap`, name now)."""
    return (
        f"parameter {moved[0][0]!r} of wrap is at {moved[0][1]!r} now; {len(moved)} are tied, swapped or moved since: "
        f"tie, swap and move parameters and modules, and call apply_activation_checkpointing, before wrap"
    )


def _merged(forwards: Sequence[Forward]) -> Forward:
    """One forward in the place of several, given in their order."""
    merged = Forward(forwards[0].start)
    for forward in forwards:
        merged.repeated |= forward.repeated | (forward.entered.keys() & merged.entered.keys())
        merged.entered = forward.entered | merged.entered
        merged.left |= forward.left
        merged.unrecomputed += forward.unrecomputed
    return merged


# Python's garbage collector cannot see into autograd's graph: a strong reference there would keep the model alive.


def _landed(hooks: weakref.ref[Hooks], slot: ParamId, parameter: nn.Parameter) -> None:
    if (alive := hooks()) is not None:
        alive.landed(slot, parameter)


def _reach(hooks: weakref.ref[Hooks], unit: weakref.ref[Unit], entered: int, left: int, _: torch.Tensor) -> None:
    if (alive := hooks()) is not None:
        found = unit()
        assert found is not None, "hooks keep their units"
        alive.reach(found, entered, left)


def _reach_end(hooks: weakref.ref[Hooks], left: int, updates: int, _: torch.Tensor) -> None:
    if (alive := hooks()) is not None:
        alive.reach_end(left, updates)
