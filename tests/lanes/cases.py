"""Models, plans and habits drawn at random, and the run of one of them on a machine.

Owns what is drawn. What a run uses is recorded by `machine`.
"""

import gc
import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

import elixir_moe as em
from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.memory.gate import Gate
from elixir_moe.runtime.gradients import Gradients
from tests.lanes.faults import FAULTS
from tests.lanes.machine import GPU, Machine
from tests.support.order_cases import HABITS, PARTS, PLANS, WIDTH, Case, build, take_step, wrapped


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Runs: every other one is small, since few parts leave long times between them."""
    small = draw(st.booleans())
    return Case(
        parts=("plain", *draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=1 if small else 5))),
        plan=draw(st.sampled_from(sorted(PLANS))),
        blocks=None if small else draw(st.sampled_from((None, 0, 1, 3))),
        half=draw(st.booleans()),
        accumulation=draw(st.integers(1, 2)),
        habits=draw(st.frozensets(st.sampled_from(HABITS), max_size=1 if small else 3)),
        away=not small and draw(st.booleans()),
        delays=draw(st.integers(0, 99)),
    )


class _OnMachine:
    """The device of the machine that is on."""

    device, mesh = GPU, "cpu"

    def given(self, inputs: Tensor) -> Tensor:
        return inputs

    def beside(self, given: Tensor, made: list[Tensor]) -> AbstractContextManager[None]:
        return Machine.running().beside(given, made)

    def join(self, made: Tensor) -> Tensor:
        return Machine.running().join(made)

    def aside(self, given: Tensor) -> AbstractContextManager[None]:
        return Machine.running().aside(given)


_MACHINE = _OnMachine()


HABITS_WITH_VIEWS = {"view", "late"}
"""They keep views of weights, as operations do that have not run yet: late compute is tested without them."""


def run_with_a_bad_step(plan: str) -> tuple[list[str], list[str], list[str]]:
    """One good step, one whose gradients are NaN, and another good one.

    Returns the messages of the error, races, and the names of parameters that differ from a run of the two good steps.
    """
    case, states, messages, machine = Case(parts=("plain", "tied"), plan=plan, half=True), [], [], Machine()
    with machine.on():
        for losses in ((1.0, 1.0), (1.0, math.nan, 1.0)):
            model, optimizer = wrapped(case, _MACHINE, PLANS[plan])
            for factor in losses:
                inputs = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=GPU)
                (factor * model(inputs).float().square().mean()).backward()
                try:
                    optimizer.clip_grad_norm_(1.0)
                except em.ElixirError as error:  # of the step before
                    messages.append(str(error))
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            states.append(em.full_state_dict(model, all_ranks=True))
            optimizer.close()
    return messages, machine.memory.races, [n for n, v in states[0].items() if not torch.equal(v, states[1][n])]


def bytes_of_gradients(case: Case) -> tuple[int, int]:
    """Most bytes of gradients outside the rCache that the host does not know to be done with, and the plan's bytes."""
    machine, spans, most = Machine(), [], 0
    open_buffer = Gradients.open

    def opened(gradients: Gradients) -> None:
        nonlocal most
        open_buffer(gradients)
        if gradients.chunk.spec.residence is not ATTACHED and gradients.block is None:
            assert gradients.buffer is not None
            spans.append(machine.span_of(gradients.buffer._wire))
            most = max(most, sum(span.stop - span.start for span in spans if machine.may_be_in_use(span)))

    with machine.on(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "open", opened)
        model, optimizer = build(case, _MACHINE)
        for step in range(case.steps):
            take_step(case, _MACHINE, model, optimizer, step, "")
        planned = em.inspect(model).footprint.gradient_bytes
        optimizer.close()
    return most, planned


def norm_of_a_frozen_model() -> float:
    """The gradient norm of a model that has nothing to train; takes a step too."""
    with Machine().on():
        model, optimizer = wrapped(Case(parts=("frozen",), plan="zero3"), _MACHINE, PLANS["zero3"])
        with torch.no_grad():
            model(torch.ones(4, WIDTH, device=GPU))
        norm = float(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.close()
    return norm


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a machine has seen of one rank's run."""

    races: list[str]
    issued: list[tuple[tuple[int, ...], str, int]]
    waits: list[list[str]]
    """What the host waited for, by step."""
    refused: str = ""
    """The PlanError, where the rCache is too small for what the run does."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """The trained model, if the run keeps it."""


def run(case: Case, fault: str = "") -> Outcome:
    """Runs a case on this rank, with a fault of `faults` in the library."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault](patch.setattr)
        return _run(case)


def run_compute_late(case: Case, fault: str = "") -> list[str]:
    """Runs a case as ever and, with a fault, with late compute; returns the names of what differs."""
    case = replace(case, habits=case.habits - HABITS_WITH_VIEWS)
    outcomes = []
    for late_compute in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if late_compute and fault:
                FAULTS[fault](patch.setattr)
            outcomes.append(_run(case, late=late_compute, keeps=True))
    as_ever, as_late = outcomes
    if as_ever.refused != as_late.refused:
        return [as_ever.refused, as_late.refused]
    return [name for name, value in as_ever.state.items() if not torch.equal(value, as_late.state[name])]


def _run(case: Case, *, late: bool = False, keeps: bool = False) -> Outcome:
    machine, waits, refused, state = Machine(), [], "", {}
    with tempfile.TemporaryDirectory() as folder, _delayed(case.delays), machine.on():
        folders = [folder]
        dist.broadcast_object_list(folders)
        (folder,) = folders
        try:
            model, optimizer = build(case, _MACHINE)
        except em.PlanError as error:
            return Outcome(races=[], issued=[], waits=[], refused=str(error))
        try:
            with machine.late_compute() if late else nullcontext():
                for step in range(case.steps):
                    before = len(machine.waits)
                    take_step(case, _MACHINE, model, optimizer, step, f"{folder}/{step}")
                    waits.append(machine.waits[before:])
        except em.PlanError as error:
            refused = str(error)
        if keeps and not refused:
            state = em.full_state_dict(model, all_ranks=True)
        optimizer.close()
        del model, optimizer
        gc.collect()
    races = sorted(set(machine.memory.races))
    return Outcome(races=races, issued=machine.issued, waits=waits, refused=refused, state=state)


@contextmanager
def _delayed(seed: int) -> Iterator[None]:
    """A context in which an update that has ended may still seem to run, on each rank at other times."""
    draw, updating = random.Random(1000 * seed + dist.get_rank()), Gate.updating

    def seems(gate: Gate) -> bool:
        return updating.__get__(gate) or (gate.has_update and draw.random() < 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "updating", property(seems))
        yield
