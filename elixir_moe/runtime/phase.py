"""The calls that may happen now: how far a model is in its step, what runs in it, and whether its ranks are together.

Owns these states and their legal moves, the place of this rank in training, the chunks that were updated in backward,
and the errors of calls that come at the wrong time in a step. Moves no data, and undoes nothing.

    state      meaning                                                      next states
    READY      no gradient has been reduced since the last update           REDUCED, CLIPPED, LOST
    REDUCED    gradients are in shards, or on their way                     CLIPPED, LOST
    CLIPPED    gradients are clipped, or will be in the next update         LATE, LOST
    LATE       other gradients came after the clipping                      LOST
    LOST       a part of the gradients is gone, or is being changed         READY, REDUCED, CLIPPED
    EARLY      READY or REDUCED while `early` has chunks                    REDUCED, UPDATING
    UPDATING   weights are being written, or that has stopped halfway       READY
    BROKEN     the ranks can no longer train together                       the one before, after a collective is issued
    CLOSED     the process groups are gone                                  none

Any state but CLOSED can also become UPDATING, BROKEN or CLOSED. Forwards, evaluations and reads change no state. What
runs is another question:

    IDLE       nothing, or user code inside ``em.unsharded``                FORWARD, BACKWARD
    FORWARD    a call of the model or a read, inside no other               IDLE, BACKWARD
    BACKWARD   a backward through the model                                 IDLE, or FORWARD if it ran inside a forward

What does not end as it should stays `unfinished`: the next call or read outside of others, `zero_grad` and `step` give
it up. A backward of this kind has lost gradients, and weights too if updates may have begun in it.

Interrupts. A state is one attribute. Work that may stop halfway begins with the state that names it and sets the next
one last, so that an interrupt at any place leaves a state that is true.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch.distributed as dist

from elixir_moe.distributed.all_ranks import disagreement, gathered
from elixir_moe.errors import ElixirError, OutOfStepError, UsageError
from elixir_moe.runtime.autograd import in_backward

State = Enum("State", "READY REDUCED CLIPPED LATE LOST EARLY UPDATING BROKEN CLOSED")
READY, REDUCED, CLIPPED, LATE, LOST, EARLY, UPDATING, BROKEN, CLOSED = State
Running = Enum("Running", "IDLE FORWARD BACKWARD")
IDLE, FORWARD, BACKWARD = Running

INTACT = READY, REDUCED, CLIPPED
"""All gradients that have come are there, and belong to one step."""
STEPPABLE = *INTACT, EARLY
"""`step` may update."""
WHOLE = *INTACT, LATE, LOST
"""All weights are of one step."""
READABLE = *WHOLE, EARLY
"""Weights may be gathered, but for chunks in `early`."""
OPEN = *READABLE, UPDATING
"""A load helps."""

_LEGAL = {
    READY: (REDUCED, CLIPPED, LOST),
    REDUCED: (CLIPPED, LOST),
    CLIPPED: (CLIPPED, LATE, LOST),
    LATE: (LOST,),
    LOST: INTACT,
    EARLY: (REDUCED,),
    UPDATING: (READY,),
    BROKEN: (),
}
_ALWAYS = UPDATING, BROKEN, CLOSED

_WAITING = "{what} while gradients wait for a step: call it after optimizer.step(), or call optimizer.zero_grad() first"
_REFUSALS = {
    REDUCED: _WAITING,
    CLIPPED: _WAITING,
    LATE: "backward ran after clip_grad_norm_ or clip_grad_value_: clip when all gradients of the step have come, or "
    "call zero_grad() and begin the step again",
    LOST: "{why}, and a part of its gradients is gone: call zero_grad() and run it again",
    EARLY: "{what} between a backward in optimizer.update_in_backward() and optimizer.step(): gradients wait for a "
    "step, and weights may be old or new; call step() first, or em.load a checkpoint if the backward has failed",
    UPDATING: "{what} after {why}",
    BROKEN: "{why}",
    CLOSED: "optimizer.close() was called: the model cannot run any more; wrap a new one",
}
_HALFWAY = "{} that stopped halfway: some weights are new and others are old; em.load a checkpoint"
_FAILED = "a backward failed"
_FAILED_EARLY = "a backward failed, in which updates may have begun: continue from a checkpoint (em.load)"
_REMEDY = "start all ranks again, from the latest checkpoint"

_WATCHED_EVERY = 64
"""Steps from one that is watched for writes without a trace to the next; the first since `wrap` or a load is one."""

Place = tuple[int, int]
"""Number of steps since `wrap` or the last load, and of backwards since gradients were cleared."""


class Phase:
    """The phase of one wrapped model on this rank."""

    def __init__(self) -> None:
        self.early: dict[int, Any] = {}
        """{chunk reduced in a backward in which updates may begin: the update that `optim.early` has begun, or None}.

        Until the step ends, their weights are old or new."""
        self.blocks: list[list[str]] = []
        """Names of parameters of each open `em.unsharded` block outside of a forward, outermost first."""
        self.looked = False
        """A backward of this step has ended."""
        self.aborted = False
        """A request has failed or a reset has begun, so decisions of the cache may not have been carried out."""
        self.place: Place = 0, 0
        """This rank's place in training; ranks that train together are at the same one."""
        self._running = IDLE
        self._in_turn: Callable[[], bool] | None = None
        """Whether the caller runs in one of several forwards that take turns, which count as one call."""
        self._state: tuple[State, str] = READY, ""
        """The state, and why it is one that refuses."""
        self._uncut: tuple[State, str] | None = None
        """The state before a collective that is being issued, or that was cut in two."""

    # -------------------------------------------------------------------------------------------------------- questions

    @property
    def now(self) -> State:
        """The present state."""
        state = self._state[0]
        return EARLY if self.early and state in (READY, REDUCED) else state

    @property
    def watched(self) -> bool:
        """Whether writes that leave no trace are looked for: in some steps, until the end of the first backward.

        The same on all ranks.
        """
        return not self.looked and self.place[0] % _WATCHED_EVERY == 0

    @property
    def unfinished(self) -> bool:
        """Whether something has begun and not ended; outside of calls, it will not end as it should."""
        return self.aborted or self._running is not IDLE

    def check(self, allowed: Sequence[State], what: str) -> None:
        """Raises UsageError or OutOfStepError unless the state is one of those `allowed` for `what`."""
        now = self.now
        if now not in allowed:
            kind: type[ElixirError] = OutOfStepError if now is BROKEN else UsageError
            raise kind(_REFUSALS[now].format(what=what, why=self._state[1]))

    def require(self, allowed: Sequence[State], what: str) -> None:
        """Like `require_for_forward`, for calls that cannot run in a forward of `em.accumulate` either."""
        if self._in_turn is not None and self._in_turn():
            raise UsageError(
                f"{what} inside em.accumulate: its `step` only computes the loss of a batch; call it when accumulate "
                f"has returned"
            )
        self.require_for_forward(allowed, what)

    def require_for_forward(self, allowed: Sequence[State], what: str) -> None:
        """Checks a call of a user, like `check`: it cannot run in a backward or inside ``em.unsharded``."""
        if self._running is BACKWARD:
            if in_backward():
                raise UsageError(f"{what} inside a backward: call it when backward() has returned")
            self.drop_gradients()
        self.check(allowed, what)
        self._check_outside(what)

    def _check_outside(self, what: str) -> None:
        if self.blocks:
            names = ", ".join(map(repr, self.blocks[0]))
            raise UsageError(f"{what} inside `with em.unsharded(...)` of {names}: end the block first")

    # ------------------------------------------------------------------------------------------------ moves of the step

    def move(self, to: State, why: str = "") -> None:
        """Changes the state; asserts that the table allows it."""
        now = self.now
        assert now is not CLOSED and (to in _ALWAYS or to in _LEGAL[now]), f"{now.name} -> {to.name} is not legal"
        self._state = to, why

    def reduce(self) -> None:
        """Called before a reduction is issued."""
        if self._state[0] in (READY, CLIPPED):
            self.move(REDUCED if self._state[0] is READY else LATE)

    def drop_gradients(self, why: str = _FAILED) -> None:
        """Called when gradients may be gone. Weights too are not of one step if updates may have begun in backward."""
        if self.early and self._state[0] in WHOLE:
            self.move(UPDATING, _FAILED_EARLY)
        elif self._state[0] in (*INTACT, LATE):
            self.move(LOST, why)

    def clear(self) -> None:
        """Called when all gradients have been cleared."""
        self.place = self.place[0], 0  # an interrupt before it leaves a rank apart from the others
        self.looked = False
        if self._state[0] is LOST:
            self.move(READY)

    def write(self, who: str) -> None:
        """Called before `who` writes weights and the optimizer's state."""
        self.move(UPDATING, _HALFWAY.format(who))

    def written(self, steps: int) -> None:
        """Called when all weights are those after this number of steps, or running updates will make them so."""
        self.early.clear()
        self.place = steps, 0
        self.looked = False
        self.move(READY)

    # ----------------------------------------------------------------------------------------------- moves of what runs

    def begin_call(self) -> None:
        """Called when an outermost call or read begins."""
        self._running = FORWARD

    def end_call(self) -> None:
        """Called when an outermost call or read has ended, or user code inside ``em.unsharded`` begins."""
        if self._running is FORWARD and self._in_turn is None:  # else a backward in it has failed
            self._running = IDLE

    def begin_turns(self, in_turn: Callable[[], bool]) -> None:
        """Called when forwards begin that take turns: until `end_turns`, they are one call.

        `in_turn` tells whether its caller runs in one of them.
        """
        self._running, self._in_turn = FORWARD, in_turn

    def end_turns(self) -> None:
        """Called when all forwards that take turns have ended."""
        self._in_turn = None
        self.end_call()

    def begin_backward(self) -> None:
        """Called when a backward begins. Raises UsageError or OutOfStepError if none may."""
        if self._running is BACKWARD:
            self.drop_gradients()  # the one before has failed
        if self._in_turn is not None:
            raise UsageError(
                "a backward inside em.accumulate: let its `step` return the loss, whose backward accumulate runs; a "
                "step with a backward of its own needs the plain loop"
            )
        self._check_outside("a backward through the model")
        self.check(WHOLE, "a second backward")
        self._running = BACKWARD

    def end_backward(self, *, in_call: bool) -> None:
        """Called when a backward has ended; `in_call`: it ran inside a forward."""
        self.looked = True
        self._running = FORWARD if in_call else IDLE

    def abort(self) -> None:
        """Called before unfinished work is given up."""
        if self._running is BACKWARD:
            self.drop_gradients()
        self.aborted = True
        self._running, self._in_turn = IDLE, None
        self.blocks.clear()

    def recover(self) -> None:
        """Called when unfinished work has been given up."""
        self.aborted = False

    # -------------------------------------------------------------------------------------------------------- all ranks

    @contextmanager
    def issuing(self, what: str) -> Iterator[None]:
        """Around the issue of a collective and its record: what stops between them would be issued twice.

        Another rank's next message would then be taken for this one's.
        """
        self.check(OPEN, "")
        self._uncut = before = self._state
        self.move(BROKEN, _apart(f"the gather or reduction of {what} was interrupted"))
        try:
            yield
        except Exception as error:
            self.move(BROKEN, _apart(f"the gather or reduction of {what} has failed ({error})"))
            raise
        self._state, self._uncut = before, None  # not after an error

    def leave_groups(self) -> None:
        """Called when all process groups are dropped: a collective that was cut in two parts nobody any more."""
        if self._uncut is not None:
            self._state, self._uncut = self._uncut, None

    def count_backward(self) -> None:
        """Called when the ranks have been asked whether they begin the same backward."""
        self.place = self.place[0], self.place[1] + 1

    def compare(self, places: Sequence[Place], ranks: Sequence[int]) -> None:
        """Raises OutOfStepError, now and ever after, unless the places of all `ranks` are the same."""
        found = disagreement("their place in training", [_in_words(place) for place in places], ranks)
        if found is not None:
            self.desync(
                f"{found}, as after an interrupt where one rank gave up what another did; they would mix different "
                f"steps"
            )

    def agree(self, process_group: dist.ProcessGroup) -> None:
        """Compares the places of all ranks of a process group. Collective; raises as `compare`."""
        self.compare(gathered(self.place, process_group), dist.get_process_group_ranks(process_group))

    def desync(self, why: str) -> None:
        """Raises OutOfStepError, now and ever after."""
        self.move(BROKEN, f"{why}: {_REMEDY}")
        self.check((), "")


def _apart(what: str) -> str:
    return f"{what}, and other ranks may have a part of it, which what comes next would meet: {_REMEDY}"


def _in_words(place: Place) -> str:
    return f"after {place[0]} steps and {place[1]} backwards of the next one"
