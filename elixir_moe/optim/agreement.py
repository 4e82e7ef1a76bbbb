"""The decisions of all ranks before an update: the gradient norm, whether it is finite, and which gradients exist.

Owns the one small all-reduce of a step, the clipping and the loss scale. Pipeline stages, clipping of some parameters
and clipping by value take one more. Never changes a weight. The all-reduce also detects ranks that are at different
steps, clip differently or have different options, by the bits of a number or a checksum.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from numbers import Real

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.packing import Piece
from elixir_moe.distributed.all_ranks import ControlGroups, disagreement, gathered, raise_on_all_ranks
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.distributed.waits import Series, Wait
from elixir_moe.errors import UsageError
from elixir_moe.kernels import host_threads, sum_of_squares
from elixir_moe.optim.early import EarlyUpdates
from elixir_moe.parallel.megatron import Routers
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.phase import CLIPPED, INTACT, STEPPABLE
from elixir_moe.runtime.scheduler import Scheduler

Options = list[dict[str, object]]
"""The options in each of the `param_groups`, as plain data."""

_BITS = 32
"""Bits of a number that all ranks compare."""
_NOT_OPTIONS = {"params", "param_names"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The parameters that a clipping was given."""

    parameters: Set[nn.Parameter]
    """The trainable ones."""
    whole: bool
    """Whether they are exactly the trainable parameters of the model."""
    error: UsageError | None = None
    """The error for parameters that are not the model's."""

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts on which ranks agree before an update."""

    norm: float | torch.Tensor
    """Global gradient norm, unscaled; a scalar on the device if the host has not waited for it."""
    used: set[nn.Parameter]
    """Parameters that got a gradient on any rank."""
    begun: int
    """Number of updates that have begun in backward, on all ranks."""


@dataclass(kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scaling of fp16 parameters, as in `torch.amp.GradScaler`: halved on overflow, doubled after
    `growth_interval` steps without one."""

    scale: float = 65536.0
    growth_interval: int = 2000
    """Steps without overflow after which the scale doubles."""
    clean_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Adjusts the scale after one step."""
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.scale /= 2
        elif self.clean_steps == self.growth_interval:
            self.scale, self.clean_steps = self.scale * 2, 0


class StepDecision:
    """The agreement of ranks on each step of one wrapped model."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        chunks: Sequence[Chunk],
        scheduler: Scheduler,
        hooks: Hooks,
        groups: ControlGroups,
        routers: Routers,
        on_device: Communicator | None,
        early: EarlyUpdates | None,
    ) -> None:
        """`chunks` are the trainable ones. `routers` forget their counts when gradients are dropped. `on_device` sums
        the norm on the device, so that the host does not wait for it.
        """
        self._inner = inner
        self._routers = routers
        self._early = early
        self._chunks = chunks
        self._scheduler = scheduler
        self._phase = scheduler.phase
        self._hooks = hooks
        self._groups = groups
        self._turns = Series("norms", range(dist.get_world_size()), groups.end)
        self._parameters = [p for chunk in chunks for p in chunk.parameters]
        self._slots = [(chunk.spec.index, i) for chunk in chunks for i in range(len(chunk.parameters))]
        half = any(chunk.spec.key.dtype is torch.float16 for chunk in chunks)
        self.loss_scale = LossScale() if half else None
        self._on_device = on_device
        self._asked: list[str] = []
        """The clippings that the facts do not include yet; all ranks must request the same ones."""
        self.stepped: Options = []
        """The options of the last step; they may have changed since the ranks agreed, if clipping made them agree."""
        self._forget()

    def _forget(self) -> None:
        self._facts: Facts | None = None
        self._counted = 0
        """Number of reductions that the facts include."""
        self._clip: float | torch.Tensor = 1.0
        self._scaled = False

    def forget_gradients(self) -> None:
        """Forgets the gradients and facts of a step that has ended or was given up."""
        reductions = self._scheduler.reductions
        reductions.clear()
        if reductions.used:  # else the forward whose tokens have been counted may still await its backward
            self._routers.forget_counts()
        reductions.used.clear()
        self._scheduler.writes.forget_unseen()
        self._forget()

    def note_options(self) -> None:
        """Notes the options when `step` begins to write; the next agreement compares them."""
        self.stepped = self._options()

    def forget_options(self) -> None:
        """Forgets the options of the last step, when a load replaces its result."""
        self.stepped = []

    def compare_stepped(self, everyone: Sequence[Options]) -> None:
        """Raises UsageError unless all peers, in rank order, have made the last step with the same options."""
        found = disagreement("the options of the last step", _by_group(everyone), self._groups.peers)
        if found is not None:
            self._phase.write("a step with different options")
            raise UsageError(
                f"{found}, set between clipping and step(): continue from a checkpoint (em.load), and set the "
                f"same options on every rank"
            )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies `loss` by the loss scale."""
        self._scaled = True
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def clip(self, limit: float) -> float | torch.Tensor:
        """Makes the next update clip the norm to `limit`; returns the norm before. Collective."""
        self._phase.require(INTACT if limit < math.inf else STEPPABLE, "optimizer.clip_grad_norm_()")
        if limit < math.inf:
            self._asked.append(f"clip_grad_norm_({limit})")
        norm = self.facts().norm * self._clip
        if limit < math.inf:
            self._phase.move(CLIPPED)
        if isinstance(norm, torch.Tensor):
            self._clip = self._clip * (limit / (norm + 1e-6)).clamp(max=1.0)
        else:
            self._clip *= min(1.0, limit / (norm + 1e-6)) if norm == norm else norm
        return norm

    def clip_part(self, limit: float, chosen: Chosen) -> float:
        """Scales the gradients of some parameters so that their norm is at most `limit`; returns the norm before.

        The host waits for the norm. Collective, for the same parameters on all ranks.
        """
        self._phase.require(INTACT, "optimizer.clip_grad_norm_() of some of the parameters")
        self._agree("clip_grad_norm_", limit, chosen)
        total = self._squares(chosen.parameters).sum().reshape(1)
        self._groups.sum_over_stages(total)
        norm = math.sqrt(total.item())
        if math.isfinite(norm):  # otherwise `step` raises, so there is nothing to clip
            factor = min(1.0, limit / (norm + 1e-6))
            self._change(chosen.parameters, limit, lambda _, part: part.mul_(factor))
        return norm

    def clip_values(self, limit: float, chosen: Chosen) -> None:
        """Clamps the parameters' gradients to `limit`, as the next update sees them; skips gradients that overflowed.

        Collective.
        """
        self._phase.require(INTACT, "optimizer.clip_grad_value_()")
        self._agree("clip_grad_value_", limit, chosen)
        if not math.isfinite(self.facts().norm):  # the host waits here, even if the norm is on the device
            return

        def clamp(scale: float, part: torch.Tensor) -> None:
            bound = min(limit / scale if scale else math.inf, torch.finfo(part.dtype).max)
            part.clamp_(-bound, bound)

        self._change(chosen.parameters, limit, clamp)

    def _agree(self, method: str, limit: float, chosen: Chosen) -> None:
        """Agrees with all ranks on the clipping, in the all-reduce of the norm if that is still to come. Collective.

        Raises UsageError if ranks request different clippings, or an invalid one.
        """
        names = (
            "" if chosen.whole else f", {[self._hooks.name_of(p) for p in self._parameters if p in chosen.parameters]}"
        )
        self._asked.append(str(chosen.error or f"{method}({limit}{names})"))
        self.facts()
        if not chosen.whole:
            raise_on_all_ranks("checked what is clipped", chosen.check, self._groups.control)

    def _change(
        self, parameters: Set[nn.Parameter], limit: float, change: Callable[[float, torch.Tensor], object]
    ) -> None:
        """Calls ``change(factor in the update, gradient)`` on gradients, to clip them to `limit`. Collective."""
        now = CLIPPED if limit < math.inf else self._phase.now
        self._phase.drop_gradients("a clipping stopped halfway")
        for chunk in self._chunks:
            ranges = [(p.start, p.stop) for parameter, p in _pieces(chunk) if parameter in parameters and p.numel]
            if chunk.shard.has_gradient and ranges:
                chunk.shard.change_gradient(ranges, partial(change, float(self.gradient_scale(chunk))))
        self._facts = None  # the norm has changed
        self._phase.move(now)
        self.facts()

    def norms(self) -> dict[str, float]:
        """Returns {name: norm of the parameter's gradient as the next update sees it}. Collective."""
        self._phase.require(INTACT, "optimizer.grad_norms()")
        used = self.facts().used
        found = zip(self._parameters, self._squares(used).sqrt().tolist(), strict=True)
        return {self._hooks.name_of(p): norm for p, norm in found if p in used}

    def _squares(self, wanted: Set[nn.Parameter]) -> torch.Tensor:
        """Sums the squares of each wanted parameter's gradient as the next update sees it; 0 for others. Collective.

        Raises UsageError if ranks want different parameters.
        """
        self.facts()
        mine: list[float | torch.Tensor] = []
        for chunk in self._chunks:
            scale, threads = self.gradient_scale(chunk), host_threads(chunk.device)
            weight = scale * scale * chunk.spec.shards / len(chunk.spec.key.ranks)
            for parameter, piece in _pieces(chunk):
                there = parameter in wanted and chunk.shard.has_gradient and piece.numel
                gradient = chunk.shard.gradient(piece.start, piece.stop) if there else None
                mine.append(0.0 if gradient is None else weight * sum_of_squares(gradient, threads=threads))
        asked = torch.tensor([float(p in wanted) for p in self._parameters], dtype=torch.float64, device="cpu")
        squares = torch.stack([_on_host(mine), asked])
        with Wait("the all-reduce of gradient norms over all ranks"):
            self._groups.sum_over_peers(squares)
        for parameter, count in zip(self._parameters, squares[1].tolist(), strict=True):
            if count not in (0, len(self._groups.peers)):
                raise UsageError(
                    f"every rank must clip the same parameters: {self._hooks.name_of(parameter)!r} is among the "
                    f"parameters of {count:.0f} ranks of {len(self._groups.peers)}"
                )
        return squares[0]

    def gradient_scale(self, chunk: Chunk) -> float | torch.Tensor:
        """The factor that the update applies to a summed gradient."""
        return self._unscale(chunk) * self._clip

    def facts(self) -> Facts:
        """Returns the facts on which ranks agree; asks all ranks again after new reductions. Collective."""
        if self._facts is not None and self._counted == self._scheduler.reductions.issued:
            return self._facts
        if self.loss_scale is not None and self._scheduler.reductions.used and not self._scaled:
            raise UsageError("fp16 gradients need a scaled loss: call optimizer.scale(loss).backward()")
        self._scheduler.reductions.drain()
        begun = 0 if self._early is None else self._early.withdraw()
        self._counted = self._scheduler.reductions.issued
        mine = self._squares_here()
        self._scheduler.streams.fetch_after_compute()  # a gather may overwrite a gradient in the values' place
        if self._on_device is not None and self.loss_scale is None:  # with a loss scale, the host checks for overflow
            norm = self._sum_on_device(mine, self._on_device)
            facts = replace(self._ask(0.0, begun), norm=norm)
        else:
            facts = self._ask(float(mine), begun)
            if not facts.begun and not math.isfinite(facts.norm):
                self._phase.early.clear()  # no update has begun: the step can be given up, and forward may run again
        self._facts = facts
        return facts

    def _squares_here(self) -> float | torch.Tensor:
        """Returns this rank's part of the squared norm; a chunk that k ranks hold counts 1/k on each of them."""
        mine: float | torch.Tensor = 0.0
        for chunk in self._chunks:
            if chunk.shard.has_gradient:
                weight = chunk.spec.shards / len(chunk.spec.key.ranks)
                mine += weight * chunk.squares() * self._unscale(chunk) ** 2
        return mine

    def _ask(self, squares: float, begun: int) -> Facts:
        """Sums the facts of all ranks, whose squared norms are `squares`. Collective.

        Raises, on all ranks, the errors of `_refuse_different` and `_refuse_unseen_writes`, or OutOfStepError.
        """
        asked, self._asked = "; ".join(self._asked), []
        steps, backwards = self._phase.place
        options = self._options()
        alike = zlib.crc32(f"{backwards} {asked} {options} {self.stepped} {self._scheduler.gathers.gathered}".encode())
        unseen = self._scheduler.writes.unseen() is not None
        used_here = [slot in self._scheduler.reductions.used for slot in self._slots]
        for_all: list[Sequence[float]] = [[squares], [begun], [0.0], _bits(steps)]
        for_peers: list[Sequence[float]] = [_bits(alike), [unseen], used_here]  # within a pipeline stage
        sizes = [len(numbers) for numbers in (*for_all, *for_peers)]
        votes = torch.tensor([*chain(*for_all, *for_peers)], dtype=torch.float64, device="cpu")
        total, begun_anywhere, refused, same_steps, same, unseen_anywhere, used = votes.split(sizes)
        with Wait("the all-reduce of the gradient norm over all ranks", turn=self._turns.next()):
            self._groups.sum_over_peers(votes)
            asked_alike = _unanimous(same, len(self._groups.peers))
            refused.fill_(not asked_alike or bool(unseen_anywhere))
            self._groups.sum_over_stages(votes[: sum(sizes[: len(for_all)])])
        if not begun_anywhere and (refused or unseen_anywhere or not asked_alike):
            self._phase.early.clear()  # as in `facts`: the step can be given up, or tried again
        if not _unanimous(same_steps, dist.get_world_size(self._groups.control)):
            self._phase.agree(self._groups.control)
        if not asked_alike:
            self._refuse_different(asked, options, begun=int(begun_anywhere))
        if unseen_anywhere:
            self._refuse_unseen_writes()
        if refused:
            raise UsageError("another pipeline stage refused this step: see the error of its ranks")
        everybody = {p for p, ranks in zip(self._parameters, used.tolist(), strict=True) if ranks}
        return Facts(norm=total.item() ** 0.5, begun=int(begun_anywhere), used=everybody)

    def _sum_on_device(self, mine: float | torch.Tensor, communicator: Communicator) -> torch.Tensor:
        """Returns the square root of the sum of `mine` over all ranks, on the device."""
        squares = torch.zeros((), dtype=torch.float64, device=self._chunks[0].device) + mine
        communicator.all_reduce(squares, lambda *_: None, of="the gradient norm").wait()
        return squares.sqrt()

    def not_finite(self) -> list[str]:
        """Lists the parameters whose gradients are not finite in this rank's shards, in packing order."""
        names = []
        for chunk in self._chunks:
            if chunk.shard.has_gradient and (self._early is None or chunk not in self._early):
                for parameter, piece in _pieces(chunk):
                    if piece.numel and not chunk.shard.gradient(piece.start, piece.stop).isfinite().all():
                        names.append(self._hooks.name_of(parameter))
        return names

    def blame(self, facts: Facts) -> str:
        """Returns the error message for a norm that is not finite, with parameters from this rank's shards."""
        found = ", ".join(self.not_finite()[:8]) or "none in this rank's shards"
        remedy = "The weights are unchanged: call zero_grad() and continue with another batch or a smaller rate"
        if facts.begun:
            remedy = (
                f"{facts.begun} chunks were updated in backward already, and others will not be: continue from a "
                f"checkpoint (em.load), without optimizer.update_in_backward() or with a smaller rate"
            )
        return f"the global gradient norm is {float(facts.norm)}; gradients that are not finite: {found}. {remedy}"

    def _unscale(self, chunk: Chunk) -> float:
        """The factor that converts a summed gradient to the gradient of the unscaled mean loss."""
        return 1.0 / chunk.spec.key.divisor / (self.loss_scale.scale if self.loss_scale else 1.0)

    def _refuse_unseen_writes(self) -> None:
        """Raises UsageError on all ranks for a parameter that a module has written through ``.data``. Collective."""
        names = gathered(self._scheduler.writes.unseen(), self._groups.peers_group)
        name = next(name for name in names if name is not None)
        raise UsageError(
            f"a forward has written parameter {name!r} through .data, and the write is lost: write to the parameter "
            f"itself under torch.no_grad(), as in self.weight.copy_(values)"
        )

    def _options(self) -> Options:
        """Returns the options in `param_groups`, except those on a GPU, for which the host would wait."""
        groups = [{n: v for n, v in group.items() if n not in _NOT_OPTIONS} for group in self._inner.param_groups]
        return [{name: _plain(value) for name, value in group.items()} for group in groups]

    def _refuse_different(self, asked: str, options: Options, begun: int) -> None:
        """Raises UsageError on all ranks, which request different things, or OutOfStepError. Collective."""
        self._phase.agree(self._groups.peers_group)
        chunks = [self._scheduler.chunks[index].label for index in self._scheduler.gathers.gathered]
        everyone = gathered((asked, options, self.stepped, chunks), self._groups.peers_group)
        clips, rates, stepped, gathers = zip(*everyone, strict=True)
        peers = self._groups.peers
        if (found := disagreement("the chunks gathered since the last backward began", gathers, peers)) is not None:
            self._phase.desync(f"{found}, so gradients may come from other weights")
        self.compare_stepped(stepped)
        if (found := disagreement("clipping", [clip or "no call" for clip in clips], peers)) is not None:
            raise UsageError(f"{found}: every rank must clip the same parameters to the same limit")
        if (found := disagreement("the options of the step", _by_group(rates), peers)) is not None:
            remedy = "set the same options on every rank, for example by a scheduler that sees the mean of all losses"
            if begun:
                self._phase.write("a step with different options")
                remedy = f"{begun} chunks were updated in backward already: continue from a checkpoint (em.load)"
            raise UsageError(f"{found}: {remedy}")


def _by_group(everyone: Sequence[Options]) -> list[dict[str, Options]]:
    """Returns the options of each rank under the name of the attribute that users set."""
    return [{"param_groups": options} for options in everyone]


def _plain(value: object) -> object:
    """Converts an option to plain data; None if it is on a GPU, and the type's name if ranks cannot compare it."""
    match value:
        case torch.Tensor():
            return value.tolist() if value.device.type == "cpu" else None
        case tuple() | list():
            return [_plain(one) for one in value]
        case Mapping():
            return {str(name): _plain(one) for name, one in value.items()}
        case Real():
            return float(value)
        case str() | None:
            return value
        case torch.dtype():
            return str(value)
    return type(value).__qualname__


def _pieces(chunk: Chunk) -> Iterator[tuple[nn.Parameter, Piece]]:
    """Yields each parameter of a chunk with its elements in this rank's shard."""
    return zip(chunk.parameters, chunk.pieces, strict=True)


def _bits(number: int) -> list[int]:
    return [number >> i & 1 for i in range(_BITS)]


def _unanimous(bits: torch.Tensor, ranks: int) -> bool:
    """Whether all ranks sent the same number, given the sums of its bits over the ranks."""
    return {0, ranks}.issuperset(bits.tolist())


def _on_host(numbers: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """Returns the numbers as one fp64 tensor in host memory; waits once for those on a GPU."""
    there = [number for number in numbers if isinstance(number, torch.Tensor)]
    came = iter(torch.stack(there).tolist() if there else ())
    known = [next(came) if isinstance(number, torch.Tensor) else number for number in numbers]
    return torch.tensor(known, dtype=torch.float64, device="cpu")
