"""The sharded optimizer: the user's optimizer on the master shards.

Owns the decision to update, the global norm, the loss scale and the rule for unused parameters; the arithmetic on a
shard is `updates`'. Never gathers a chunk.

A parameter that got no gradient on any rank is left alone, as torch does where ``grad is None``; one that got a
gradient somewhere counts as zero elsewhere. `step` uses the gradients up: they do not pile up if `zero_grad` is
forgotten.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.chunk import Chunk
from elixir_moe.chunks.collectives import world_timeout
from elixir_moe.chunks.home import Kept
from elixir_moe.chunks.layout import Layout
from elixir_moe.chunks.plan import Footprint, Plan, Tier, held_rows
from elixir_moe.chunks.policy import Schedule
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.chunks.spill import Spill
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.hooks import Hooks
from elixir_moe.updates import AdamUpdate, Segment, cut, moments_of, update_for
from elixir_moe.waits import Wait


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
class Facts:
    """What the ranks agree on before an update."""

    norm: float
    """Global gradient norm, unscaled."""
    used: set[nn.Parameter] = field(default_factory=set)
    """Parameters that got a gradient on any rank."""


class Pending(Protocol):
    """Work that goes on beside training, such as an asynchronous save."""

    def wait(self) -> Any:
        """Returns when it is done; raises what it failed of. Collective."""


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
        peers: tuple[int, ...],
        plan: Plan,
        layout: Layout,
        footprint: Footprint,
        spill: Spill | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self._inner = inner
        self.plan = plan
        self.layout = layout
        self.footprint = footprint
        self._scheduler = scheduler
        self._hooks = hooks
        self._control = control
        self._peers = peers
        self._groups = groups
        self._spill = spill
        self._chunks = [chunk for chunk in scheduler.chunks if chunk.spec.key.trainable]
        self._frozen = [p for chunk in scheduler.chunks if not chunk.spec.key.trainable for p in chunk.parameters]
        self._parameters = [p for chunk in self._chunks for p in chunk.parameters]
        self._slots = [(chunk.spec.index, i) for chunk in self._chunks for i in range(len(chunk.parameters))]
        pieces = cut(self._chunks, self.param_groups)
        self._segments = {chunk.spec.index: mine for chunk, mine in zip(self._chunks, pieces, strict=True)}
        self._update = update_for(inner, self._chunks, pieces, self.param_groups)
        self._lane = None
        """The thread on which updates of chunks that are not at home on the device begin, beside the next forward."""
        if self._update.beside and any(chunk.home.tier is not Tier.DEVICE for chunk in self._chunks):
            self._lane = ThreadPoolExecutor(1, "elixir-update")
        half = any(chunk.spec.key.dtype is torch.float16 for chunk in self._chunks)
        self.loss_scale = LossScale() if half else None
        self._moments = moments_of(inner)
        self._grouping = [[id(p) for p in group["params"]] for group in self.param_groups]
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks
        self._facts: Facts | None = None
        self._scaled = False
        self._clip = 1.0
        self._clipped = False
        """Whether gradients have been clipped since the last step: those that come behind it would not be."""
        self._place_of = {
            segment.parameter: (chunk, segment)
            for chunk in self._chunks
            for segment in self._segments[chunk.spec.index]
        }
        self._background: dist.ProcessGroup | None = None
        self.prediction: Any = None
        """What a step was expected to take (`search.prediction.Prediction`), with ``plan="auto"``."""
        self.pending: Pending | None = None
        """What `close` waits for."""
        self.kind = f"{type(inner).__name__}, {type(self._update).__name__}"
        """Tells optimizers apart whose states have other names."""
        self.keeps_always_the_same = isinstance(self._update, AdamUpdate)
        """Its state has the same names before the first step as ever after."""

    # -------------------------------------------------------------------------------------------------- user's verbs

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale; call it before `backward` with fp16 parameters. The identity otherwise."""
        self._scaled = True
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`; returns the norm before, a scalar.

        The norm is that of the logical model: shards, experts and replicas of all ranks, each element once. The scaling
        happens in `step`, and a backward in between is an error, whether the limit was reached or not. A limit of
        infinity clips nothing: it asks for the norm, at any time. Collective.
        """
        try:
            limit = float(max_norm)
        except (TypeError, ValueError):
            limit = math.nan
        if not limit >= 0:
            raise ConfigError(f"clip_grad_norm_(max_norm={max_norm!r}): expected a number of at least 0")
        norm = self._agree().norm * self._clip
        self._clip *= min(1.0, limit / (norm + 1e-6)) if norm == norm else norm
        self._clipped |= limit < math.inf
        return torch.tensor(norm, device="cpu")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters and uses the gradients up. Collective.

        Adam's updates of chunks at home in host memory may still be under way when it returns: they go on in the order
        in which the next forward needs the chunks, and whatever looks at one waits for its update. The result is that
        of updates one after the other, to the bit.

        With fp16 parameters the update is skipped on all ranks if any gradient overflowed.

        Raises:
            ConfigError: a parameter frozen in `wrap` is trainable now, or a trainable one has come since; gradients lie
                where only a plain optimizer would look for them, or came after they were clipped.
            ElixirError: a gradient is not finite; on all ranks alike, naming the parameters. No weight has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        facts = self._agree()
        overflow = not math.isfinite(facts.norm)
        if overflow and self.loss_scale is None:
            raise ElixirError(self._blame(facts.norm))
        self._scheduler.flush()
        if not overflow:
            self._scheduler.drop()  # what an interrupted update leaves gathered would be stale
            self._scheduler.drain()  # what was gathered behind the clipping may still be read from its home
            for chunk in self._in_order_of_use():
                self._update_chunk(chunk, self._segments[chunk.spec.index], facts.used)
            self._update.finish()
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        self._forget_gradients()
        self._hooks.updated()
        setattr(self._inner, "_opt_called", True)  # what LR schedulers built before `wrap` ask  # noqa: B010
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; parameters that then get none are left alone, whatever `set_to_none`."""
        self._scheduler.drain()
        self._hooks.abandon()
        self._forget_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.grad = None  # what came in a backward that failed, and was not taken away

    def statistics(self) -> Statistics:
        """A snapshot of what has been moved so far on this rank; subtract two of them."""
        return self._scheduler.statistics.copy()

    def plan_table(self) -> list[dict[str, Any]]:
        """What this rank holds: a row for each chunk group and tier, resident chunks apart.

        `numel` are the elements of their parameters when gathered, `shard_bytes` what this rank has of their state.
        """
        return held_rows(self.plan, self.layout, self._moments)

    def held_bytes(self) -> dict[str, int]:
        """By tier: bytes the library holds on this rank at the end of a backward."""
        held = {tier.value: 0 for tier in Tier}
        held[Tier.DEVICE] = self._scheduler.buffer_bytes
        held[Tier.HOST] = 0 if self._spill is None else self._spill.buffer_bytes
        for chunk in self._scheduler.chunks:
            for tier, nbytes in chunk.home.held_bytes().items():
                held[tier] += nbytes
            held[chunk.home.tier.of_compute] += self._update.state_bytes(chunk)
        return held

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradients are not finite in this rank's shards, in packing order."""
        names = []
        for chunk in self._chunks:
            if chunk.home.has_gradient:
                home, segments = chunk.home, self._segments[chunk.spec.index]
                names += [s.parameter for s in segments if not home.gradient(s.start, s.stop).isfinite().all()]
        return [self._hooks.name_of(p) for p in names]

    @property
    def schedule(self) -> Schedule | None:
        """The recorded order of chunk uses in a step; None before the first."""
        return self._scheduler.cache.schedule

    def close(self) -> None:
        """Destroys the process groups `wrap` made; model and optimizer are of no use afterwards. Collective.

        Raises what an update beside training has failed of, when all else is done.
        """
        if self._scheduler.closed:
            return
        if self.pending is not None:
            self.pending.wait()
        self._scheduler.drain()
        self._scheduler.closed = True
        if self._lane is not None:
            self._lane.shutdown()
        if self._spill is not None:
            self._spill.close()
        with Wait("the close of the optimizer on all ranks"):
            dist.barrier(group=self._control)  # a group destroyed while a peer still joins it fails there
        for group in self._groups.values():
            dist.destroy_process_group(group)
        for communicator in {id(c.communicator): c.communicator for c in self._scheduler.chunks}.values():
            communicator.close()
        if self._background is not None:
            dist.destroy_process_group(self._background)
        dist.destroy_process_group(self._control)
        for chunk in self._chunks:
            chunk.home.finish_update()

    # ------------------------------------------------------------------------------------- for those who keep its state

    @property
    def control(self) -> dist.ProcessGroup:
        """The gloo process group of all ranks on which they agree."""
        return self._control

    def background(self) -> dist.ProcessGroup:
        """Another such group, for a thread beside training; made when first asked for. Collective."""
        if self._background is None:
            self._background = dist.new_group(backend="gloo", timeout=world_timeout())
        return self._background

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for `step`, on this rank."""
        return self._scheduler.sent or any(chunk.home.has_gradient for chunk in self._chunks)

    def segment_of(self, parameter: nn.Parameter) -> Segment | None:
        """The part of a trainable parameter that lies in this rank's shards; None if none does."""
        return self._place_of[parameter][1] if parameter in self._place_of else None

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What is kept for `segment_of(parameter)`: by name its flat elements (`Kept`), or a value for all of it."""
        return self._update.state(*self._place_of[parameter])

    def replace_state(
        self, parameter: nn.Parameter, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Kept]:
        """Makes room for another state of an optimizer of the same `kind`; returns its flat elements, to be written."""
        return self._update.replace_state(*self._place_of[parameter], dtypes, values)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """While it is open, shards at home may be written: no gradient is kept and nothing is gathered."""
        self.zero_grad()
        self._hooks.updated()
        self._scheduler.drop(frozen=True)
        for chunk in self._scheduler.chunks:
            chunk.home.await_reader()
        yield
        for chunk in self._scheduler.chunks:
            chunk.home.updated()
        self._scheduler.invalidate()

    def outlive(self, control: Callable[[], dist.ProcessGroup]) -> None:
        """Lets go of all process groups, in the middle of a step. What is at home can still be saved, over `control`.

        A gloo connection is closed when nobody holds its process group any more, and not before: the peers that wait
        for this rank then fail.
        """
        self._scheduler.forget()
        for chunk in self._scheduler.chunks:
            chunk.forget()
            chunk.communicator.drop()
        self._groups.clear()
        self._background = self._facts = self.pending = None
        del self._control
        self._control = control()

    def state_dict(self) -> dict[str, Any]:
        """Refused: a rank holds only its shards, and their cut is the plan's."""
        raise ConfigError("a sharded optimizer's state is no plain dict: save model and optimizer with em.save")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as `state_dict` is; `wrap` refuses an optimizer that has loaded one."""
        raise ConfigError("no state dict can be loaded, before wrap or after: em.load a checkpoint of em.save")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is built: chunks are packed in `wrap`."""
        if hasattr(self, "_scheduler"):
            raise ConfigError("add_param_group after wrap: add the group to the optimizer before wrapping it")
        super().add_param_group(param_group)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _agree(self) -> Facts:
        """One small all-reduce: the sum of squares, and who got a gradient. Done once between two updates."""
        if self._facts is not None and not self._scheduler.sent:
            return self._facts
        self._scheduler.check_open()
        self._check_backwards()
        self._scheduler.drain()
        mine: float | torch.Tensor = 0.0
        for chunk in self._chunks:
            if chunk.home.has_gradient:
                weight = chunk.spec.shards / len(chunk.spec.key.ranks)
                mine += weight * chunk.squares() * self._unscale(chunk) ** 2
        used_here = map(self._scheduler.used.__contains__, self._slots)
        votes = torch.tensor([float(mine), *used_here], dtype=torch.float64, device="cpu")
        with Wait("the all-reduce of the gradient norm over all ranks"):
            if len(self._peers) > 1:
                dist.all_reduce(votes, group=self._groups[self._peers])
            if len(self._peers) < dist.get_world_size(self._control):  # other pipeline stages have other parameters
                total = votes[:1] / len(self._peers)
                dist.all_reduce(total, group=self._control)
                votes[:1] = total
        squares, *used = votes.tolist()
        self._facts = Facts(norm=squares**0.5, used={p for p, n in zip(self._parameters, used, strict=True) if n})
        return self._facts

    def _check_backwards(self) -> None:
        """Raises ConfigError if gradients are not what `step` would take them for."""
        self._hooks.notice_torn()
        if self._hooks.torn:
            raise ConfigError(
                "a backward failed, and a part of its gradients is gone: call zero_grad() and run it again"
            )
        if self._clipped:
            raise ConfigError(
                "backward ran after clip_grad_norm_: clip when all gradients of the step have come, or call zero_grad()"
            )
        if self.loss_scale is not None and self._scheduler.used and not self._scaled:
            raise ConfigError("fp16 gradients need a scaled loss: call optimizer.scale(loss).backward()")

    def _check_parameters(self) -> None:
        """Raises ConfigError for parameters that are not as `wrap` found them, or have gradients of their own."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [self._hooks.name_of(p) for p in self._frozen if p.requires_grad]
            own = [self._hooks.name_of(p) for p in self._parameters if p.grad is not None]
        if new := self._hooks.new_parameters():
            raise ConfigError(
                f"the model has trainable parameters that it had not in wrap: {new}; add and replace modules before "
                f"wrap, and register there what makes parameters of its own"
            )
        if thawed:
            raise ConfigError(
                f"parameters were frozen when wrapped and are trainable now: {thawed}; unfreeze before wrap"
            )
        if [[id(p) for p in group["params"]] for group in self.param_groups] != self._grouping:
            raise ConfigError("the parameters of param_groups were changed: fix them before wrap; options may change")
        if isinstance(self._update, AdamUpdate) and any(group.get("amsgrad") for group in self.param_groups):
            raise ConfigError("amsgrad was turned on after wrap, which has made no room for it: turn it on before")
        if own:
            raise ConfigError(
                f"parameter.grad was set by hand: {own[:8]}; only what backward brings is used: call zero_grad(), and "
                f"add the term to the loss"
            )

    def _blame(self, norm: float) -> str:
        """Says whose gradient is not finite, from this rank's shards."""
        found = ", ".join(self.not_finite()[:8]) or "none in this rank's shards"
        return (
            f"the global gradient norm is {norm}; gradients that are not finite: {found}. The weights are as before: "
            f"zero_grad() and go on with another batch or a smaller rate"
        )

    def _unscale(self, chunk: Chunk) -> float:
        """What a summed gradient is multiplied with to be that of the unscaled mean loss."""
        return 1.0 / chunk.spec.key.divisor / (self.loss_scale.scale if self.loss_scale else 1.0)

    def _update_chunk(self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter]) -> None:
        home = chunk.home
        if not home.has_gradient:
            return
        home.await_reader()
        update = self._update.prepare(chunk, segments, used, self._unscale(chunk) * self._clip)
        if self._lane is not None and home.tier is not Tier.DEVICE:
            home.update_beside(self._lane.submit(update))
        else:
            update()
            home.updated()
        for segment in segments:
            segment.steps += segment.parameter in used

    def _in_order_of_use(self) -> list[Chunk]:
        """Chunks as the next forward will ask for them; those that nobody has to ask for come first."""
        first: dict[int, int] = {}
        if self.schedule is not None:
            for entry in self.schedule.entries:
                for index in entry.chunks:
                    first.setdefault(index, len(first))
        return sorted(self._chunks, key=lambda chunk: (first.get(chunk.spec.index, -1), chunk.spec.index))

    def _forget_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.home.clear_gradient()
        self._scheduler.used.clear()
        self._facts, self._clip, self._clipped, self._scaled = None, 1.0, False, False
