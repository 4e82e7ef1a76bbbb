"""The running calls of a step, and what their hooks mean for the step machine.

Owns the stack of calls and the parameters that functions have borrowed. Pure: `runtime.hooks` drives it in a step, and
`chunks.replay` before the first one, so that what a hook means is written down once.

    hook        in forward                                      in backward, which recomputes a region
    enter       acquires the unit; one that trains is numbered  acquires the unit until backward has passed it
    leave       releases it                                     releases a unit that saves no weights
    read        acquires parameters for the call                with gradients, until backward has passed them
    lend        acquires them until the innermost call ends     -

A call trains if it, or one around it, runs with gradients. Others are evaluations: their requests are not `tracked`,
that is, not a part of the step and its schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from elixir_moe.chunks.step_machine import ParamId, StepActions, StepMachine, Unit


class Read(NamedTuple):
    """A hold on parameters for a function that reads them outside their units."""

    reader: Unit
    tracked: bool
    ends: bool = True
    """The end of the read releases them; else backward does."""


@dataclass(slots=True, eq=False)
class Call:
    """A running call of a module."""

    owner: int
    """Identifies the module."""
    unit: Unit | None
    training: bool
    """The call, or one around it, runs with gradients."""
    recomputes: bool
    """The call runs in backward."""
    outermost: bool
    """The call is a forward inside no other."""
    held: bool = False
    """The end of the call releases its unit."""
    entered: int = 0
    """The position in forward at which its unit was entered."""
    left: int = 0
    """The position at which it was left; 0 if backward does not reach the call."""
    loans: list[Read] = field(default_factory=list)
    """Reads that the end of the call ends."""


class CallStack:
    """The running calls of one model, innermost last."""

    def __init__(self, machine: StepMachine, actions: StepActions) -> None:
        self.calls: list[Call] = []
        self.loans: list[Read] = []
        """For functions outside of calls, whose end no hook tells."""
        self._machine, self._actions = machine, actions

    def enter(self, owner: int, unit: Unit | None, *, with_grad: bool, in_backward: bool) -> Call:
        """Begins the call of a module, and acquires its unit; None stands for a model that is not a unit itself."""
        calls = self.calls
        training = with_grad or (bool(calls) and calls[-1].training)
        call = Call(owner, unit, training, in_backward, not calls and not in_backward)
        calls.append(call)  # before all that may fail: `leave` undoes only what was done
        if call.outermost:
            self._machine.begin_call()
        if unit is None:
            return call
        if in_backward:
            self._machine.recompute(unit, with_grad=with_grad)
            call.held = unit.saves_no_weights
        elif training:
            call.entered = self._machine.enter(unit)
            call.held = True
        else:
            self._actions.acquire(unit, tracked=False)
            call.held = True
        return call

    def leave(self, owner: int, *, with_grad: bool) -> Call | None:
        """Ends the innermost call of a module, whether it finished or not; None if none runs.

        Calls inside it end too: no hook tells the end of those that an interrupt has ended.
        """
        calls = self.calls
        if not calls or (calls[-1].owner != owner and all(call.owner != owner for call in calls)):
            return None
        while True:
            call = calls.pop()
            self._end(call, with_grad)
            if call.owner == owner:
                return call

    def _end(self, call: Call, with_grad: bool) -> None:
        if call.loans:
            self._end_all(call.loans)
        unit = call.unit
        if unit is None:
            return
        if call.recomputes:
            call.entered, call.left = self._machine.positions(unit)
            if call.held:
                self._actions.release(unit)
        elif call.held and call.training:
            call.left = self._machine.leave(unit, with_grad=with_grad)
        elif call.held:
            self._actions.release(unit, tracked=False)

    def begin_read(
        self,
        slots: tuple[ParamId, ...],
        label: Callable[[], str],
        *,
        with_grad: bool,
        in_backward: bool,
        recorded: bool = True,
    ) -> Read:
        """Acquires parameters for a function that reads them outside their units; `end_read` must follow.

        `recorded`: the request may be part of a step.
        """
        reader = self._machine.reader(slots, label)
        if in_backward and with_grad:
            self._machine.recompute(reader, with_grad=True)
            return Read(reader, tracked=True, ends=False)
        trains = with_grad or in_backward or (bool(self.calls) and self.calls[-1].training)
        return self._acquire(reader, tracked=recorded and trains, inside=bool(self.calls) and not in_backward)

    def _acquire(self, reader: Unit, *, tracked: bool, inside: bool) -> Read:
        if tracked:
            self._machine.read(reader, inside=inside)
        else:
            self._actions.acquire(reader, tracked=False)
        return Read(reader, tracked)

    def end_read(self, read: Read) -> None:
        """Ends a read: keeps what the function has written, and releases the parameters."""
        self._actions.keep_writes(read.reader)
        if read.ends:
            self._actions.release(read.reader, tracked=read.tracked)

    def lend(self, slots: tuple[ParamId, ...], label: Callable[[], str]) -> None:
        """Acquires parameters until the innermost call ends, or, outside of calls, until `end_loans`."""
        call = self.calls[-1] if self.calls else None
        reader = self._machine.reader(slots, label)
        read = self._acquire(reader, tracked=call is not None and call.training, inside=True)
        (self.loans if call is None else call.loans).append(read)

    def end_loans(self) -> list[int]:
        """Ends the loans outside of calls; returns their chunks."""
        chunks = [chunk for read in self.loans for chunk in read.reader.chunks]
        self._end_all(self.loans)
        return chunks

    def _end_all(self, loans: list[Read]) -> None:
        while loans:
            self.end_read(loans.pop())

    def forget(self) -> None:
        """Forgets all calls and loans, whose holds are given up."""
        self.calls.clear()
        self.loans.clear()
