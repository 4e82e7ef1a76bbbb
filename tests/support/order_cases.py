"""Runs that try the order among streams, threads and ranks: models, plans and habits that together need every wait.

Owns the models and the steps. `tests.lanes` runs them on a model of a GPU's streams, and `tests.accelerator` on a
device whose streams are threads. Each of them has a `Platform`, which says what the device is.
"""

import math
import tempfile
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from tests.optim.test_modes import ScheduleFree
from tests.support.cases import least_said

WIDTH = 8
PARTS = ("plain", "bias", "tied", "reused", "checkpointed", "reentrant", "mixture", "residual", "frozen", "beside")
MIXTURES = ("mixture", "residual", "swapped")
HABITS = (
    "evaluation",
    "view",
    "failing",
    "late",
    "read",
    "write",
    "save",
    "clip",
    "norms",
    "value",
    "early",
    "together",
)
"""Those that are drawn; "aside", "between", "load" and "modes" are for chosen runs. With "together", micro-batches pass
each layer together, and nothing runs between them."""
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
    there: bool = False
    """The model is on the device before `wrap`."""
    steps: int = 3


ADDED_LATE = Case(parts=("plain", "frozen"), plan="zero3", half=True, accumulation=2)
"""A gradient waits until the end of backward for the last use of the values in whose place it goes."""
TELLING = [
    (1, Case(parts=("plain", "beside"), plan="ddp", half=True)),
    (2, Case(parts=("plain", "bias", "checkpointed", "tied"), plan="zero3", blocks=0, half=True, accumulation=2)),
    (1, Case(parts=("plain", "beside", "plain", "beside"), plan="offload", blocks=0, half=True, accumulation=2)),
    (1, Case(parts=("plain", "plain", "plain"), plan="disk", blocks=1, half=True, habits=frozenset({"save", "read"}))),
    (
        1,
        Case(
            parts=("plain", *("frozen",) * 5), plan="all on disk", blocks=0, accumulation=2, habits=frozenset({"save"})
        ),
    ),
    (
        1,
        Case(
            parts=("plain", "bias", "frozen", "mixture", "plain"),
            plan="values on disk",
            blocks=1,
            half=True,
            accumulation=2,
            habits=frozenset({"evaluation", "value"}),
        ),
    ),
    (1, Case(parts=("plain", "beside"), plan="ddp", accumulation=2)),
    (1, Case(parts=("plain", "beside", "mixture"), plan="zero2")),
    (1, Case(parts=("plain", "tied", "beside"), plan="zero2", half=True, habits=frozenset({"view"}))),
    (
        2,
        Case(
            parts=("plain", "reentrant", "reused", "tied", "beside"),
            plan="zero3",
            blocks=3,
            half=True,
            accumulation=2,
            habits=frozenset({"evaluation", "failing"}),
            delays=11,
        ),
    ),
    (
        1,
        Case(
            parts=("plain", "mixture", "plain", "reentrant"),
            plan="offload",
            blocks=3,
            habits=frozenset({"evaluation", "clip", "view"}),
        ),
    ),
    (
        1,
        Case(
            parts=("plain", "residual", "frozen", "mixture", "beside", "plain"),
            plan="offload",
            blocks=0,
            accumulation=2,
            habits=frozenset({"write", "failing"}),
        ),
    ),
    (
        2,
        Case(
            parts=("plain", "mixture", "plain", "mixture"),
            plan="offload",
            blocks=3,
            half=True,
            habits=frozenset({"evaluation"}),
        ),
    ),
    (2, Case(parts=("plain", "swapped", "plain", "swapped"), plan="ddp", half=True)),
    (2, Case(parts=("plain", "plain"), plan="ddp", habits=frozenset({"clip", "norms"}))),
    (1, Case(parts=("plain", "bias", "plain"), plan="zero3", blocks=1, half=True, habits=frozenset({"aside"}))),
    (
        2,
        Case(
            parts=("plain", "tied", "reused", "checkpointed", "reentrant"),
            plan="ddp",
            half=True,
            habits=frozenset({"evaluation"}),
        ),
    ),
    (2, Case(parts=("plain", "tied", "reentrant"), plan="ddp", accumulation=2, habits=frozenset({"late"}))),
    (1, Case(parts=("plain", "plain"), plan="zero2", half=True, habits=frozenset({"write", "clip"}))),
    (1, Case(parts=("plain",), plan="offload", blocks=3, half=True, habits=frozenset({"between"}))),
    (1, Case(parts=("plain", "reentrant", *("checkpointed",) * 3), plan="zero3", away=True, accumulation=2)),
    (1, Case(parts=("plain", "checkpointed"), plan="all on disk", away=True)),
    (1, Case(parts=("plain", "bias"), plan="offload", blocks=0, half=True, habits=frozenset({"load"}))),
    (
        1,
        Case(parts=("plain", "mixture", "bias"), plan="half", blocks=1, half=True, habits=frozenset({"early", "save"})),
    ),
    (2, Case(parts=("plain", "tied", "bias"), plan="zero3", blocks=1, half=True, habits=frozenset({"modes", "save"}))),
    (1, Case(parts=("plain", "bias"), plan="offload", blocks=0, accumulation=2, habits=frozenset({"modes"}))),
    (1, ADDED_LATE),
    (1, Case(parts=("plain", "frozen"), plan="zero3", half=True, habits=frozenset({"evaluation"}))),
    (
        1,
        Case(
            parts=("plain", "plain", "plain"), plan="zero3", blocks=0, half=True, habits=frozenset({"value", "write"})
        ),
    ),
]
"""Runs that between them need every wait: (ranks, case)."""


LATE = [
    Case(
        parts=("plain", "tied", "checkpointed", "bias"), plan=plan, half=half, accumulation=accumulation, habits=habits
    )
    for plan, half, accumulation, habits in (
        ("zero3", True, 2, frozenset({"evaluation", "clip"})),
        ("offload", False, 1, frozenset({"write"})),
        ("half", True, 2, frozenset({"read"})),
        ("disk", True, 1, frozenset({"evaluation"})),
        ("values on disk", True, 2, frozenset({"write"})),
        ("zero2", True, 2, frozenset({"failing", "value"})),
    )
]
"""Runs under each plan that moves weights."""


TOGETHER = [
    (world, Case(parts=parts, plan=plan, blocks=0, half=half, accumulation=3, habits=habits | {"together"}, away=away))
    for world, parts, plan, half, habits, away in (
        (2, ("plain", "tied", "mixture", "bias"), "zero3", True, frozenset({"clip"}), False),
        (1, ("plain", "checkpointed", "tied", "reentrant"), "zero3", False, frozenset({"read"}), True),
        (1, ("plain", "beside", "frozen", "plain"), "offload", True, frozenset({"early"}), False),
        (1, ("plain", "bias", "reused", "plain"), "disk", True, frozenset({"save"}), False),
        (1, ("plain", "tied", "checkpointed", "plain"), "values on disk", False, frozenset({"write"}), False),
    )
]
"""Runs whose micro-batches pass each layer together: (ranks, case)."""


class Platform(Protocol):
    """A device with a second stream for compute."""

    device: Any
    mesh: str
    """The type of device of the mesh."""

    def given(self, inputs: Tensor) -> Tensor:
        """Returns the inputs of a step on the device; nobody waits."""
        ...

    def beside(self, given: Tensor, made: list[Tensor]) -> AbstractContextManager[None]:
        """A context whose forward and backward run on the second stream.

        `given` goes in; what comes out is to be appended to `made`, and used after `join`.
        """
        ...

    def join(self, made: Tensor) -> Tensor:
        """What the second stream has made, for use on the current one."""
        ...

    def aside(self, given: Tensor) -> AbstractContextManager[None]:
        """A context whose work goes to the second stream, behind what was issued; nobody waits for it."""
        ...


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

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self._platform = platform
        self.side, self.main = _Mlp(bias=True), _Mlp(bias=True)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        with self._platform.beside(x, made):
            made.append(self.side(x))
        return self.main(x) + self._platform.join(made[0])


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
    def __init__(self, case: Case, mesh: Any, platform: Platform) -> None:
        super().__init__()
        self._platform = platform
        self.kinds = case.parts
        self.parts = nn.ModuleList(self._part(kind, mesh) for kind in case.parts)
        self.fails = False
        self.together = "together" in case.habits
        self.parts[0].keeps = bool(case.habits & {"view", "late"}) and not self.together  # type: ignore[assignment]
        self.aux: Tensor | float = 0.0

    def _part(self, kind: str, mesh: Any) -> nn.Module:
        if kind in MIXTURES:
            own = em.expert_mesh(mesh, dist.get_world_size() if kind != "residual" else 1)
            mixture = em.MoE(
                d_model=WIDTH, d_hidden=WIDTH, num_experts=4, top_k=2, mesh=own, residual=kind == "residual"
            )
            return _Swapped(mixture) if kind == "swapped" else mixture
        if kind == "beside":
            return _Beside(self._platform)
        part: nn.Module = _Tied() if kind == "tied" else _Mlp(bias=kind != "bias")
        return part.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        sum_of_aux: Tensor | float = 0.0
        for place, (kind, part) in enumerate(zip(self.kinds, self.parts, strict=True)):
            if self.fails and place == len(self.kinds) // 2:
                x = _Fails.apply(x)  # type: ignore[no-untyped-call]
            if kind in MIXTURES:
                out, aux = part(x)
                x, sum_of_aux = x + out, sum_of_aux + aux
            elif kind in ("checkpointed", "reentrant"):
                x = checkpoint(part, x, use_reentrant=kind == "reentrant")
            else:
                x = part(x)
            if kind == "reused":
                x = part(x)
        if not self.together:
            self.aux = sum_of_aux
        return x


def build(case: Case, platform: Platform) -> tuple[nn.Module, Any]:
    """The wrapped model of a case and its optimizer."""
    plan = PLANS[case.plan]
    if case.blocks is not None and case.plan not in ("ddp", "zero2"):
        try:
            wrapped(case, platform, replace(plan, rcache_blocks=1))[1].close()
            least = 1
        except em.PlanError as error:
            least = least_said(error)
        plan = replace(plan, rcache_blocks=least + case.blocks)
    return wrapped(case, platform, plan)


def wrapped(case: Case, platform: Platform, plan: em.Plan) -> tuple[nn.Module, Any]:
    """The wrapped model of a case under a plan, and its optimizer."""
    plan = replace(plan, host_checkpoints="all") if case.away else plan
    mesh = em.init_mesh(device_type=platform.mesh)
    torch.manual_seed(1)
    model = _Model(case, mesh, platform)
    if case.there:
        model.to(platform.device)
    rules = {}
    for place, kind in enumerate(case.parts):
        if kind in MIXTURES:
            own = em.expert_mesh(mesh, dist.get_world_size() if kind != "residual" else 1)
            rules[f"parts.{place}.*experts.*"] = em.Pattern(own, replicate=("edp",), shard={"ep": 0})
    em.annotate(model, rules | {"*": em.Pattern(mesh, replicate=("dp",))})
    dtype = torch.bfloat16 if case.half else None
    make: Any = ScheduleFree if "modes" in case.habits else torch.optim.AdamW
    return em.wrap(model, make(model.parameters(), 1e-2), plan=plan, compute_dtype=dtype, device=platform.device)


def take_step(case: Case, platform: Platform, model: Any, optimizer: Any, step: int, folder: str) -> None:
    """One step of a case, which saves to `folder`."""
    has = case.habits.__contains__
    first = model.parts[0]
    early = has("early") and not has("between")
    if has("together"):
        inputs = _run_together(case, platform, model, optimizer, step)
    for micro in () if has("together") else range(case.accumulation):
        inputs = _inputs(case, platform, step, micro)
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
            with platform.aside(inputs), torch.no_grad():
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


def _inputs(case: Case, platform: Platform, step: int, micro: int) -> Tensor:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
    return platform.given(inputs.bfloat16() if case.half else inputs)


def _run_together(case: Case, platform: Platform, model: Any, optimizer: Any, step: int) -> Tensor:
    """Forward and backward of micro-batches that pass each layer together; returns the last one."""
    batches = [_inputs(case, platform, step, micro) for micro in range(case.accumulation)]
    early = "early" in case.habits

    def loss_of(model: Any, inputs: Tensor) -> Tensor:
        loss: Tensor = model(inputs).float().square().mean()
        return loss + next(model.parameters()).float().square().sum() if "read" in case.habits else loss

    with optimizer.update_in_backward() if early else nullcontext():
        em.accumulate(model, loss_of, batches)
    if early:
        _let_begin(optimizer)
    return batches[-1]


def _let_begin(optimizer: Any) -> None:
    """Waits until no update given to the thread can be withdrawn; this orders nothing."""
    if optimizer._early is not None:
        wait([one.done for one in optimizer._early._begun.values()])
