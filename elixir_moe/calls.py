"""Which modules of a wrapped model run now: a stack, kept right through errors and interrupts.

torch tells of the end of a module even if it failed before its pre-forward hook, and does not tell of it if it was
interrupted. Owns what follows from that: only what was begun is undone, and what was lost is undone when it is noticed.
Also what is remembered of a forward until its backward.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from elixir_moe.errors import ConfigError
from elixir_moe.guard import refuse_copy
from elixir_moe.units import Unit


@dataclass(slots=True)
class Call:
    """A module that runs."""

    module: nn.Module
    unit: Unit | None
    entered: int
    """Its position in forward."""
    training: bool
    """It, or one around it, runs with gradients."""
    mode: tuple[bool, bool]
    """Whether it runs with gradients, and whether in backward."""
    outermost: bool
    """No other call is around it."""
    began: bool = False
    """Its chunks were unsharded."""
    held: bool = False
    """They are to be released."""
    covers: bool = False
    """What is beneath it asks for nothing."""
    covered: int = 0
    """Calls beneath it that ask for nothing and are not on the stack."""
    saving: saved_tensors_hooks | None = None
    """To be taken off when it ends."""


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of the model that awaits its backward. Several may: pipeline schedules run ahead."""

    start: int
    """No number of it is smaller."""
    entered: dict[Unit, int] = field(default_factory=dict)
    """The number at which it first entered each unit."""
    left: dict[Unit, int] = field(default_factory=dict)
    """The number at which it last left each unit."""
    unrecomputed: Counter[Unit] = field(default_factory=Counter)
    """Calls in checkpoints that backward has yet to run again."""

    def numbers_of(self, unit: Unit) -> tuple[int, int]:
        """Those at which it, or a cover beneath which it ran, was first entered and last left.

        What was not seen counts as entered first of all and left last: it is after nothing, and nothing after it.
        """
        seen = next((known for known in (unit, *unit.around) if known in self.entered), unit)
        return self.entered.get(seen, 0), self.left.get(seen, sys.maxsize)

    def first_of(self, units: Iterable[Unit]) -> int:
        """The number at which the first of `units` was entered; what was not seen counts as after everything."""
        return min(self.entered.get(unit, sys.maxsize) for unit in units)


class Forwards:
    """Those that await their backward, and the clock that numbers entries and exits."""

    def __init__(self) -> None:
        self.clock = 0
        self._waiting: list[Forward] = []
        self._current: Forward | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self) -> None:
        """What is entered from now on belongs to another forward."""
        self._current = None

    def enter(self, unit: Unit) -> None:
        """Notes that `unit` is entered now."""
        self._now().entered.setdefault(unit, self.clock)

    def leave(self, unit: Unit) -> int:
        """Notes that `unit` is left, at the number that is returned; without gradients, backward will run it again."""
        self.clock += 1
        forward = self._now()
        forward.left[unit] = self.clock
        if not torch.is_grad_enabled():
            forward.unrecomputed[unit] += 1
        return self.clock

    def take(self, left: int | None, *, keep: bool) -> Forward | None:
        """All that began before number `left` as one, for a backward after which they are gone, but for `keep`."""
        mine = [forward for forward in self._waiting if left is None or forward.start < left]
        if not mine:
            return None
        taken = Forward(mine[0].start)
        for forward in mine:
            taken.entered = forward.entered | taken.entered
            taken.left |= forward.left
            taken.unrecomputed += forward.unrecomputed
        if not keep:
            self._waiting = [forward for forward in self._waiting if forward not in mine]
        return taken

    def _now(self) -> Forward:
        if self._current is None:
            self._current = Forward(self.clock - 1)
            self._waiting.append(self._current)
        return self._current


class Calls:
    """The stack of one wrapped model."""

    def __init__(self, undo: Callable[[Call], None]) -> None:
        """`undo` gives back what a call has taken, whether it came to its end or not."""
        self._undo = undo
        self._stack: list[Call] = []
        self.top: Call | None = None
        """The innermost call."""
        self._thread = 0

    def __bool__(self) -> bool:
        return bool(self._stack)

    @property
    def training(self) -> bool:
        """Whether the innermost call, or one around it, runs with gradients."""
        return bool(self._stack) and self._stack[-1].training

    def begin(self, module: nn.Module) -> None:
        """To be called before `module` is pushed.

        Raises:
            ConfigError: another thread is in the model.
        """
        if module in [call.module for call in self._stack] and not self._recurses(module):
            self.unwind()
        if not self._stack:
            self._thread = threading.get_ident()
        self.check_thread()

    def check_thread(self) -> None:
        """Raises ConfigError on another thread than that of the calls on the stack.

        What backward runs again is on whichever thread autograd has for it: for tensors on a GPU, one of its own.
        """
        if self._thread != threading.get_ident() and not in_backward():
            raise ConfigError("two threads run a wrapped model at once: let one wait for the other")

    def push(self, call: Call) -> None:
        """Enters a module."""
        self._stack.append(call)
        self.top = call

    def pop(self, module: nn.Module) -> Call | None:
        """Leaves `module`, and all that was lost inside it; None if it is not on the stack."""
        if self.top is None or self.top.module is not module:
            if module not in [call.module for call in self._stack]:
                return None
            while self._stack[-1].module is not module:
                self._undo(self._take())
        return self._take()

    def unwind(self) -> None:
        """Leaves all modules."""
        while self._stack:
            self._undo(self._take())

    def _take(self) -> Call:
        call = self._stack.pop()
        self.top = self._stack[-1] if self._stack else None
        return call

    def _recurses(self, module: nn.Module) -> bool:
        """Whether Python still runs all calls of `module` that are on the stack, and not only the new one."""
        running, frame = 0, sys._getframe()
        while frame is not None:
            running += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module
            frame = frame.f_back  # type: ignore[assignment]
        return running > sum(call.module is module for call in self._stack)


class Hook:
    """A hook that torch.compile does not look into, and that tells who would copy or pickle it that it cannot be."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._hidden = torch.compiler.disable(run)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._hidden(*args)
        else:
            self._run(*args)  # the way round the compiler is not free

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def in_backward() -> bool:
    """Whether autograd runs the one who asks."""
    return torch._C._current_graph_task_id() != -1


def brings_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the backward that runs now brings a gradient of any of `parameters`."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            if parameter.requires_grad:
                view = parameter.view_as(parameter).grad_fn
                assert view is not None
                node = view.next_functions[0][0]
                try:
                    if torch._C._will_engine_execute_node(node):  # type: ignore[arg-type]
                        return True
                except RuntimeError:  # what torch says of a parameter that autograd.grad was asked about
                    return False
    return False


def hook_outputs(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Has backward call `hook` with the gradient of each tensor in a module's `output`."""
    for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(hook)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
