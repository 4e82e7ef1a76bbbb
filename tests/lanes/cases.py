"""Models, plans and habits drawn at random, and the run of one of them on a machine.

Owns what is drawn. What a run uses is recorded by `machine`.
"""

import gc
import math
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.memory.gate import Gate
from elixir_moe.runtime.gradients import Gradients
from tests.lanes.faults import FAULTS
from tests.lanes.late import issue_in_order, late
from tests.lanes.machine import GPU, Machine
from tests.optim.test_modes import ScheduleFree
from tests.support.cases import least_said

WIDTH = 8
PARTS = ("plain", "bias", "tied", "reused", "checkpointed", "reentrant", "mixture", "residual", "frozen", "beside")
MIXTURES = ("mixture", "residual", "swapped")
HABITS = ("evaluation", "view", "failing", "late", "read", "write", "save", "clip", "norms", "value", "early")
"""Those that are drawn; "aside", "between", "load" and "modes" are for chosen runs."""
PLANS = {
    "ddp": replace(em.Plan.ddp(), chunk_numel=4 * WIDTH * WIDTH + 64),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(chunk_numel=4 * WIDTH * WIDTH + 64),
    "offload": em.Plan.offload(chunk_numel=4 * WIDTH * WIDTH + 64),
    "half": em.Plan.offload(chunk_numel=4 * WIDTH * WIDTH + 64, device_chunks=2),
    "disk": em.Plan.offload(chunk_numel=4 * WIDTH * WIDTH + 64, disk=tempfile.gettempdir(), disk_chunks=2, verify=True),
    "all on disk": em.Plan.offload(chunk_numel=4 * WIDTH * WIDTH + 64, disk=tempfile.gettempdir(), disk_chunks=99),
    "values on disk": em.Plan.offload(
        chunk_numel=4 * WIDTH * WIDTH + 64, disk=tempfile.gettempdir(), disk_chunks=99, values_on_disk=True, verify=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run."""

    parts: tuple[str, ...]
    plan: str
    blocks: int | None = None
    """More blocks than the least; None for the plan's own."""
    half: bool = False
    """bf16 instead of fp32."""
    accumulation: int = 1
    habits: frozenset[str] = frozenset()
    away: bool = False
    """What checkpointed regions keep is in host memory."""
    delays: int = 0
    """Seed of the delays of updates."""
    steps: int = 3


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


class _Mlp(nn.Module):
    keeps = False

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.kept: Tensor | None = None
        """A view of a weight, from the last forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.kept = self.inner.weight[:1]
        return x + self.outer(self.inner(x).tanh())


class _Tied(nn.Module):
    """One weight, used by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x).tanh())


class _Beside(nn.Module):
    """Two branches, one of them on a stream of its own, as Megatron-core runs its shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.main = _Mlp(bias=True), _Mlp(bias=True)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        with Machine.running().beside(x, made):
            made.append(self.side(x))
        return self.main(x) + Machine.running().join(made[0])


class _Swapped(nn.Module):
    """An MLP and a mixture, whose order is another on each rank."""

    def __init__(self, mixture: em.MoE) -> None:
        super().__init__()
        self.mlp, self.mixture = _Mlp(bias=True), mixture

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if dist.get_rank() % 2:
            return self.mixture(self.mlp(x))
        out, aux = self.mixture(x)
        return self.mlp(out), aux


class _BackwardError(RuntimeError):
    """What a failing backward raises."""


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise _BackwardError


class _Model(nn.Module):
    def __init__(self, case: Case, mesh: Any) -> None:
        super().__init__()
        self.kinds = case.parts
        self.parts = nn.ModuleList(self._part(kind, mesh) for kind in case.parts)
        self.fails = False
        self.parts[0].keeps = bool(case.habits & {"view", "late"})  # type: ignore[assignment]
        self.aux: Tensor | float = 0.0

    def _part(self, kind: str, mesh: Any) -> nn.Module:
        if kind in MIXTURES:
            own = em.expert_mesh(mesh, dist.get_world_size() if kind != "residual" else 1)
            mixture = em.MoE(
                d_model=WIDTH, d_hidden=WIDTH, num_experts=4, top_k=2, mesh=own, residual=kind == "residual"
            )
            return _Swapped(mixture) if kind == "swapped" else mixture
        special = {"tied": _Tied, "beside": _Beside}
        part: nn.Module = special[kind]() if kind in special else _Mlp(bias=kind != "bias")
        return part.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        self.aux = 0.0
        for place, (kind, part) in enumerate(zip(self.kinds, self.parts, strict=True)):
            if self.fails and place == len(self.kinds) // 2:
                x = _Fails.apply(x)  # type: ignore[no-untyped-call]
            if kind in MIXTURES:
                out, aux = part(x)
                x, self.aux = x + out, self.aux + aux
            elif kind in ("checkpointed", "reentrant"):
                x = checkpoint(part, x, use_reentrant=kind == "reentrant")
            else:
                x = part(x)
            if kind == "reused":
                x = part(x)
        return x


def build(case: Case) -> tuple[nn.Module, Any]:
    """The wrapped model of a case and its optimizer, on the machine that is on."""
    plan = PLANS[case.plan]
    if case.blocks is not None and case.plan not in ("ddp", "zero2"):
        try:
            _wrapped(case, replace(plan, rcache_blocks=1))[1].close()
            least = 1
        except em.PlanError as error:
            least = least_said(error)
        plan = replace(plan, rcache_blocks=least + case.blocks)
    return _wrapped(case, plan)


HABITS_WITH_VIEWS = {"view", "late"}
"""They keep views of weights, as operations do that have not run yet: late compute is tested without them."""


def run_late(case: Case, fault: str = "") -> list[str]:
    """Runs a case as ever and, with a fault, as late as events allow; returns the names of parameters that differ."""
    states = []
    for context in (_as_ever, partial(late, FAULTS.get(fault))):
        with context(), tempfile.TemporaryDirectory() as folder:
            model, optimizer = _wrapped(case, PLANS[case.plan])
            for step in range(case.steps):
                _step(case, model, optimizer, step, f"{folder}/{step}")
            states.append(em.full_state_dict(model, all_ranks=True))
            optimizer.close()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


def run_with_a_bad_step(plan: str) -> tuple[list[str], list[str], list[str]]:
    """One good step, one whose gradients are NaN, and another good one.

    Returns the messages of the error, races, and the names of parameters that differ from a run of the two good steps.
    """
    case, states, messages, machine = Case(parts=("plain", "tied"), plan=plan, half=True), [], [], Machine()
    with machine.on():
        for losses in ((1.0, 1.0), (1.0, math.nan, 1.0)):
            model, optimizer = _wrapped(case, PLANS[plan])
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
        model, optimizer = build(case)
        for step in range(case.steps):
            _step(case, model, optimizer, step, "")
        planned = em.inspect(model).footprint.gradient_bytes
        optimizer.close()
    return most, planned


def norm_of_a_frozen_model() -> float:
    """The gradient norm of a model that has nothing to train; takes a step too."""
    with Machine().on():
        model, optimizer = _wrapped(Case(parts=("frozen",), plan="zero3"), PLANS["zero3"])
        with torch.no_grad():
            model(torch.ones(4, WIDTH, device=GPU))
        norm = float(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.close()
    return norm


@contextmanager
def _as_ever() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        issue_in_order(patch)
        yield


def _wrapped(case: Case, plan: em.Plan) -> tuple[nn.Module, Any]:
    plan = replace(plan, host_checkpoints="all") if case.away else plan
    mesh = em.init_mesh(device_type="cpu")
    torch.manual_seed(1)
    model = _Model(case, mesh)
    rules = {}
    for place, kind in enumerate(case.parts):
        if kind in MIXTURES:
            own = em.expert_mesh(mesh, dist.get_world_size() if kind != "residual" else 1)
            rules[f"parts.{place}.*experts.*"] = em.Pattern(own, replicate=("edp",), shard={"ep": 0})
    em.annotate(model, rules | {"*": em.Pattern(mesh, replicate=("dp",))})
    dtype = torch.bfloat16 if case.half else None
    make: Any = ScheduleFree if "modes" in case.habits else torch.optim.AdamW
    return em.wrap(model, make(model.parameters(), 1e-2), plan=plan, compute_dtype=dtype, device=GPU)


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


def run_both(case: Case) -> tuple[Outcome, list[str]]:
    """Runs a case as ever and with compute as late as events allow; returns the first and the names of what differs."""
    as_ever, differing = _run_both(case)
    return run(case) if case.habits & HABITS_WITH_VIEWS else replace(as_ever, state={}), differing


def run_compute_late(case: Case, fault: str = "") -> list[str]:
    """Runs a case as ever and, with a fault, with late compute; returns the names of what differs."""
    return _run_both(case, fault)[1]


def _run_both(case: Case, fault: str = "") -> tuple[Outcome, list[str]]:
    case = replace(case, habits=case.habits - HABITS_WITH_VIEWS)
    outcomes = []
    for late_compute in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if late_compute and fault:
                FAULTS[fault](patch.setattr)
            outcomes.append(_run(case, late=late_compute, keeps=True))
    as_ever, as_late = outcomes
    if as_ever.refused != as_late.refused:
        return as_ever, [as_ever.refused, as_late.refused]
    return as_ever, [name for name, value in as_ever.state.items() if not torch.equal(value, as_late.state[name])]


def _run(case: Case, *, late: bool = False, keeps: bool = False) -> Outcome:
    machine, waits, refused, state = Machine(), [], "", {}
    with tempfile.TemporaryDirectory() as folder, _delayed(case.delays), machine.on():
        folders = [folder]
        dist.broadcast_object_list(folders)
        (folder,) = folders
        try:
            model, optimizer = build(case)
        except em.PlanError as error:
            return Outcome(races=[], issued=[], waits=[], refused=str(error))
        try:
            with machine.late_compute() if late else nullcontext():
                for step in range(case.steps):
                    before = len(machine.waits)
                    _step(case, model, optimizer, step, f"{folder}/{step}")
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


def _step(case: Case, model: Any, optimizer: Any, step: int, folder: str) -> None:
    has = case.habits.__contains__
    first = model.parts[0]
    early = has("early") and not has("between")
    for micro in range(case.accumulation):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
        if case.half:
            inputs = inputs.bfloat16()
        if has("modes"):
            optimizer.train()
        if has("between"):  # nothing is fetched after this norm where blocks suffice
            with torch.no_grad():
                model(inputs)
            optimizer.clip_grad_norm_(math.inf)
        if has("failing") and step == 1:
            model.fails = True
            try:
                model(inputs).float().square().mean().backward()
            except _BackwardError:
                optimizer.zero_grad()
            model.fails = False
        loss = model(inputs).float().square().mean() + model.aux
        if has("late") and getattr(first, "kept", None) is not None:
            loss = loss + first.kept.float().square().sum()
            first.kept = None
        if has("read"):
            loss = loss + next(model.parameters()).float().square().sum()
        begins = early and micro == case.accumulation - 1
        with optimizer.update_in_backward() if begins else nullcontext():
            loss.backward()
        if begins:  # nothing of the model may run before the step
            _let_begin(optimizer)
            continue
        if has("evaluation"):
            with torch.no_grad():
                model(inputs)
        if has("aside"):
            with Machine.running().aside(inputs), torch.no_grad():
                model(inputs)
    if has("clip"):
        optimizer.clip_grad_norm_(math.inf if early else 1.0)
    if has("norms") and not early:
        optimizer.grad_norms()
    if has("value") and not early:
        optimizer.clip_grad_value_(0.5)
    if has("write") and not early:
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
            model(inputs)
    kept = getattr(first, "kept", None)
    optimizer.step()
    if has("view") and kept is not None:
        kept.detach().sum()
        first.kept = None
    if has("write"):
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
    if has("modes"):
        optimizer.eval()
        with torch.no_grad():
            model(inputs)
    if has("save") and step == 0:
        em.save(folder, model, optimizer, asynchronous=True)
    if has("load") and step < 2:
        em.save(folder, model, optimizer)
        with torch.set_grad_enabled(step == 0):  # reductions are under way, or fetches alone
            loss = model(inputs).float().square().mean()
        if step == 0:
            loss.backward()
        em.load(folder, model, optimizer)


def _let_begin(optimizer: Any) -> None:
    """Waits until no update given to the thread can be withdrawn; this orders nothing."""
    if optimizer._early is not None:
        wait([one.done for one in optimizer._early._begun.values()])


@contextmanager
def _delayed(seed: int) -> Iterator[None]:
    """A context in which an update that has ended may still seem to run, on each rank at other times."""
    draw, updating = random.Random(1000 * seed + dist.get_rank()), Gate.updating

    def seems(gate: Gate) -> bool:
        return updating.__get__(gate) or (gate.has_update and draw.random() < 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "updating", property(seems))
        yield
