"""The sharded optimizer: the user's optimizer on the master shards.

Owns the update, the global norm, the loss scale and the rule for unused parameters. Never gathers a chunk.

Every rank updates the shards it owns. `torch.optim.Adam` and `AdamW` run as one pass over a whole shard (`kernels`):
the gradient is read in the dtype it travelled in, unscaled, and the compute shard is written along with the master.
Any other elementwise optimizer of torch runs as it is, on one tensor for each piece of a parameter in a shard.

A parameter that got no gradient on any rank is left alone, as torch does where ``grad is None``; one that got a
gradient somewhere counts as zero elsewhere. `step` uses the gradients up: they do not pile up if `zero_grad` is
forgotten.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.chunk import Chunk
from elixir_moe.chunks.layout import Layout
from elixir_moe.chunks.plan import Footprint, Plan
from elixir_moe.chunks.policy import Schedule
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.hooks import Hooks
from elixir_moe.kernels import adam_step, sum_of_squares

_WHOLE_TENSOR = {"LBFGS", "Adafactor", "SparseAdam", "Muon"}
"""Optimizers of torch whose update of one element looks at others."""


@dataclass(kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scaling, as `torch.amp.GradScaler` does it: halved on overflow, doubled after a while without."""

    scale: float = 65536.0
    growth_interval: int = 2000
    """Steps without overflow after which the scale doubles."""
    clean_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Takes note of one step."""
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.scale /= 2
        elif self.clean_steps == self.growth_interval:
            self.scale, self.clean_steps = self.scale * 2, 0


@dataclass(kw_only=True, slots=True)
class Segment:
    """The part of one parameter that lies in this rank's shard of a chunk."""

    parameter: nn.Parameter
    group: int
    """Index into `param_groups`."""
    start: int
    """First element, counted from the start of the shard."""
    stop: int
    steps: int = 0
    """Updates so far; what Adam's bias correction goes by."""


@dataclass(kw_only=True, slots=True)
class Facts:
    """What the ranks agree on before an update."""

    norm: float
    """Global gradient norm, unscaled."""
    used: set[nn.Parameter] = field(default_factory=set)
    """Parameters that got a gradient on any rank."""


class ShardedOptimizer(torch.optim.Optimizer):
    """What `wrap` returns in the place of the user's optimizer; shares its `param_groups`."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        scheduler: Scheduler,
        hooks: Hooks,
        control: dist.ProcessGroup,
        groups: dict[tuple[int, ...], dist.ProcessGroup],
        *,
        plan: Plan,
        layout: Layout,
        footprint: Footprint,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.plan = plan
        self.layout = layout
        self.footprint = footprint
        self._scheduler = scheduler
        self._hooks = hooks
        self._control = control
        self._groups = groups
        self._chunks = [chunk for chunk in scheduler.chunks if chunk.spec.key.trainable]
        self._frozen = [p for chunk in scheduler.chunks if not chunk.spec.key.trainable for p in chunk.parameters]
        self._parameters = [p for chunk in self._chunks for p in chunk.parameters]
        self._segments = _cut(self._chunks, self.param_groups)
        self._update = _update_for(inner, self._chunks, self._segments, self.param_groups)
        half = any(chunk.spec.key.dtype is torch.float16 for chunk in self._chunks)
        self.loss_scale = LossScale() if half else None
        self._moments = moments_of(inner)
        self._facts: Facts | None = None
        self._clip = 1.0

    # -------------------------------------------------------------------------------------------------- user's verbs

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale; call it before `backward` with fp16 parameters. The identity otherwise."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`; returns the norm before, a scalar.

        The norm is that of the logical model: shards, experts and replicas of all ranks, each element once. The scaling
        happens in `step`. Collective.
        """
        norm = self._agree().norm * self._clip
        self._clip *= min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
        return torch.tensor(norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters and uses the gradients up. Collective.

        With fp16 parameters the update is skipped on all ranks if any gradient overflowed.

        Raises:
            ConfigError: a parameter frozen in `wrap` is trainable now.
            ElixirError: a gradient is not finite; on all ranks alike, naming the parameters. No weight has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_frozen()
        facts = self._agree()
        overflow = not math.isfinite(facts.norm)
        if overflow and self.loss_scale is None:
            raise ElixirError(self._blame(facts.norm))
        if not overflow:
            for chunk, segments in zip(self._chunks, self._segments, strict=True):
                self._update_chunk(chunk, segments, facts.used)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        self._forget_gradients()
        self._hooks.updated()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self._scheduler.drain()
        self._hooks.abandon()
        self._forget_gradients()

    def statistics(self) -> Statistics:
        """A snapshot of what has been moved so far on this rank; subtract two of them."""
        return self._scheduler.statistics.copy()

    def plan_table(self) -> list[dict[str, Any]]:
        """One row for each chunk group and tier: how many chunks and parameters, and their bytes on this rank."""
        rows: dict[tuple[str, str, bool], dict[str, Any]] = {}
        for chunk in self._scheduler.chunks:
            spec, tier = chunk.spec, chunk.home.tier.value
            row = rows.setdefault(
                (spec.key.label, tier, spec.resident),
                {
                    "chunk_group": spec.key.label,
                    "tier": tier,
                    "resident": spec.resident,
                    "chunks": 0,
                    "numel": 0,
                    "shard_bytes": 0,
                },
            )
            row["chunks"] += 1
            row["numel"] += sum(slot.numel for slot in spec.slots)
            row["shard_bytes"] += spec.shard_numel * spec.key.dtype.itemsize
            row["shard_bytes"] += spec.shard_numel * 4 * (1 + self._moments) if spec.key.trainable else 0
        return list(rows.values())

    @property
    def schedule(self) -> Schedule | None:
        """The recorded order of chunk uses in a step; None before the first."""
        return self._scheduler.cache.schedule

    def close(self) -> None:
        """Destroys the process groups `wrap` made; model and optimizer are of no use afterwards. Collective."""
        self._scheduler.drain()
        self._hooks.end_watch()
        dist.barrier(group=self._control)  # a group destroyed while a peer still joins it fails there
        for group in self._groups.values():
            dist.destroy_process_group(group)
        for communicator in {id(c.communicator): c.communicator for c in self._scheduler.chunks}.values():
            communicator.close()
        dist.destroy_process_group(self._control)

    def state_dict(self) -> dict[str, Any]:
        """Refused: a rank holds only its shards, and their cut is the plan's."""
        raise ConfigError("the state of a sharded optimizer is not one dict: each rank holds shards of it")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as `state_dict` is."""
        raise ConfigError("a sharded optimizer cannot load a plain state dict: load it before wrap")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is built: chunks are packed in `wrap`."""
        if hasattr(self, "_scheduler"):
            raise ConfigError("add_param_group after wrap: add the group to the optimizer before wrapping it")
        super().add_param_group(param_group)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _agree(self) -> Facts:
        """One small all-reduce: the sum of squares, and who got a gradient. Done once between two updates."""
        if self._facts is not None and not self._scheduler.in_flight:
            return self._facts
        self._scheduler.drain()
        squares = 0.0
        for chunk in self._chunks:
            if chunk.home.has_gradient:
                weight = chunk.spec.shards / len(chunk.spec.key.ranks)
                squares += weight * sum_of_squares(chunk.home.gradient()) * self._unscale(chunk) ** 2
        votes = torch.tensor(
            [squares, *(float(p in self._scheduler.used) for p in self._parameters)], dtype=torch.float64
        )
        if dist.get_world_size(self._control) > 1:
            dist.all_reduce(votes, group=self._control)
        squares, *used = votes.tolist()
        self._facts = Facts(norm=squares**0.5, used={p for p, n in zip(self._parameters, used, strict=True) if n})
        return self._facts

    def _check_frozen(self) -> None:
        """Raises ConfigError for parameters that were frozen in `wrap` and are not any more: they have no master."""
        thawed = [self._hooks.name_of(p) for p in self._frozen if p.requires_grad]
        if thawed:
            raise ConfigError(
                f"parameters were frozen when wrapped and are trainable now: {thawed}; unfreeze before wrap"
            )

    def _blame(self, norm: float) -> str:
        """Says whose gradient is not finite, from this rank's shards."""
        names = []
        for chunk, segments in zip(self._chunks, self._segments, strict=True):
            if chunk.home.has_gradient:
                gradient = chunk.home.gradient()
                names += [s.parameter for s in segments if not gradient[s.start : s.stop].isfinite().all()]
        found = ", ".join(self._hooks.name_of(p) for p in names[:8]) or "none in this rank's shards"
        return (
            f"the global gradient norm is {norm}; gradients that are not finite: {found}. The weights are as before: "
            f"zero_grad() and go on with another batch or a smaller rate. A parameter read outside its own module for "
            f"the first time after the first step is NaN too: read it in every step, or use Plan.zero2()"
        )

    def _unscale(self, chunk: Chunk) -> float:
        """What a summed gradient is multiplied with to be that of the unscaled mean loss."""
        return 1.0 / chunk.spec.key.divisor / (self.loss_scale.scale if self.loss_scale else 1.0)

    def _update_chunk(self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter]) -> None:
        home = chunk.home
        if not home.has_gradient:
            return
        self._update(chunk, segments, used, self._unscale(chunk) * self._clip)
        for segment in segments:
            segment.steps += segment.parameter in used
        if home.compute.dtype != torch.float32 and home.master is not None:
            for segment in segments:
                if segment.parameter not in used:
                    home.compute[segment.start : segment.stop] = home.master[segment.start : segment.stop]
        home.updated()

    def _forget_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.home.clear_gradient()
        self._scheduler.used.clear()
        self._facts, self._clip = None, 1.0


class _AdamUpdate:
    """Adam and AdamW: flat moments beside each master shard, one pass a run of segments."""

    def __init__(self, chunks: Sequence[Chunk], groups: list[dict[str, Any]], decoupled: bool) -> None:
        self._groups = groups
        self._decoupled = decoupled
        self._state = {}
        for chunk in chunks:
            assert chunk.home.master is not None
            self._state[chunk.spec.index] = (torch.zeros_like(chunk.home.master), torch.zeros_like(chunk.home.master))

    def __call__(self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter], scale: float) -> None:
        home, gradient = chunk.home, chunk.home.gradient()
        assert home.master is not None
        exp_avg, exp_avg_sq = self._state[chunk.spec.index]
        compute = None if home.compute.dtype == torch.float32 else home.compute
        for start, stop, group, steps in _runs(segments, used):
            here = slice(start, stop)
            options = self._groups[group]
            beta1, beta2 = options["betas"]
            adam_step(
                home.master[here],
                exp_avg[here],
                exp_avg_sq[here],
                gradient[here],
                None if compute is None else compute[here],
                lr=float(options["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=options["eps"],
                weight_decay=options["weight_decay"],
                step=steps + 1,
                grad_scale=scale,
                decoupled=self._decoupled,
                maximize=options["maximize"],
            )


class _ElementwiseUpdate:
    """Any other optimizer of torch: an instance of the user's class on views of the master shards."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        segments: list[list[Segment]],
        chunks: Sequence[Chunk],
        groups: list[dict[str, Any]],
    ) -> None:
        self._groups = groups
        self._pieces: dict[int, nn.Parameter] = {}
        by_group: list[list[nn.Parameter]] = [[] for _ in groups]
        for chunk, parts in zip(chunks, segments, strict=True):
            assert chunk.home.master is not None
            for part in parts:
                piece = nn.Parameter(chunk.home.master[part.start : part.stop])
                self._pieces[id(part)] = piece
                by_group[part.group].append(piece)
        self._optimizers = {}
        kind: Callable[..., torch.optim.Optimizer] = type(inner)
        for index, (pieces, group) in enumerate(zip(by_group, groups, strict=True)):
            if pieces:
                options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
                self._optimizers[index] = kind([{"params": pieces, **options}])

    def __call__(self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter], scale: float) -> None:
        home, gradient = chunk.home, chunk.home.gradient()
        touched = set()
        active = [segment for segment in segments if segment.parameter in used]
        for segment in active:
            self._pieces[id(segment)].grad = gradient[segment.start : segment.stop].float() * scale
            touched.add(segment.group)
        for index in sorted(touched):
            optimizer = self._optimizers[index]
            optimizer.param_groups[0].update({k: v for k, v in self._groups[index].items() if k != "params"})
            optimizer.step()
        for segment in active:
            self._pieces[id(segment)].grad = None
        if home.compute.dtype != torch.float32 and home.master is not None:
            home.compute.copy_(home.master)


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """fp32 values that an optimizer keeps for each element; 2 where it is not known."""

    def any_group(option: str) -> bool:
        return any(group.get(option) for group in optimizer.param_groups)

    match type(optimizer).__name__:
        case "SGD":
            return int(any_group("momentum"))
        case "Adagrad":
            return 1
        case "RMSprop":
            return 1 + any_group("momentum") + any_group("centered")
        case _:
            return 2 + any_group("amsgrad")


def _update_for(
    inner: torch.optim.Optimizer, chunks: Sequence[Chunk], segments: list[list[Segment]], groups: list[dict[str, Any]]
) -> "_AdamUpdate | _ElementwiseUpdate":
    kind = type(inner)
    if kind.__name__ in _WHOLE_TENSOR:
        raise ConfigError(
            f"{kind.__name__} looks at whole tensors, but a rank holds only pieces: use an elementwise one, as AdamW"
        )
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not any(group["amsgrad"] for group in groups):
        decoupled = kind is torch.optim.AdamW or any(group.get("decoupled_weight_decay") for group in groups)
        return _AdamUpdate(chunks, groups, decoupled)
    return _ElementwiseUpdate(inner, segments, chunks, groups)


def _cut(chunks: Sequence[Chunk], groups: list[dict[str, Any]]) -> list[list[Segment]]:
    """The segments of each chunk's shard on this rank, in order."""
    group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
    cut = []
    for chunk in chunks:
        low, high = chunk.spec.shard_bounds(chunk.communicator.rank)
        pieces = []
        for slot, parameter in zip(chunk.spec.slots, chunk.parameters, strict=True):
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop and parameter in group_of:
                pieces.append(
                    Segment(parameter=parameter, group=group_of[parameter], start=start - low, stop=stop - low)
                )
        cut.append(pieces)
    return cut


def _runs(segments: list[Segment], used: set[nn.Parameter]) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, group, steps): used neighbours with the same settings as one; the zeros between them stay zeros."""
    for alike, run in groupby(segments, key=lambda s: (s.parameter in used, s.group, s.steps)):
        pieces = list(run)
        if alike[0]:
            yield pieces[0].start, pieces[-1].stop, *alike[1:]
