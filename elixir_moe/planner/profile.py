"""The demands of one training step on the machine: the input of a search for a plan.

Owns `Profile`. Pure: `trace` makes it and `cost` prices it. A profile can be stored and compared; it never holds a
module or a tensor.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.events import ModuleInfo, StepEvent, renumbered
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.param_spec import ParamSpec, trainable_of
from elixir_moe.chunks.replay import StepOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class SentCollective:
    """All-to-alls of one mixture layer in one step."""

    ep: int
    """Ranks that share the experts."""
    nbytes: int
    """Bytes from one rank in each all-to-all under balanced routing, its own part included."""
    times: int
    """All-to-alls in a step: two per forward, two in its backward, and two per recomputation."""
    expert_flops: int
    """Floating-point operations of this rank's experts in a step under balanced routing."""
    row_bytes: int
    """Bytes of activations that grow with the rows this rank receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The model's own collectives over one process group in one step, for example of tensor parallelism."""

    ranks: tuple[int, ...]
    """Global ranks."""
    nbytes: int
    """Bytes that are gathered, reduce-scattered or exchanged; an all-reduce counts twice."""
    times: int
    """Number of collectives."""


@dataclass(frozen=True, kw_only=True)  # no slots, for the values that are computed once and asked at every price
class Profile:
    """One rank's training step: one forward and one backward."""

    params: tuple[ParamSpec, ...]
    """All parameters, in order of first use; shapes are this rank's slices."""
    order: tuple[int, ...]
    """For each position in `params`, the parameter's number in ``model.parameters()``."""
    parts: tuple[ModuleInfo, ...]
    """Modules that have parameters; see `chunks.events`."""
    events: tuple[StepEvent, ...]
    """The events of parts and parameters in a step, in order of time; without the backward if it is unknown."""
    parameters: int
    """Parameters of the whole model, on all ranks."""
    tokens: int
    """Tokens of one rank's batch: D of 8·M·D, on one rank."""
    flops: int
    """Floating-point operations of matrix products and attention, recomputation included."""
    traffic_bytes: int
    """Bytes read and written in device memory by all other operators, decoders of quantized weights among them."""
    activation_bytes: int
    """Peak bytes of all tensors of a step that are neither parameters nor buffers, gradients included until
    the chunk copies them."""
    buffer_bytes: int
    kept: tuple[int, ...] = ()
    """Bytes of the inputs that each checkpointed region keeps, in order of forward."""
    kept_peaks: tuple[int, ...] = ()
    """`activation_bytes` if the inputs of the first n regions are in host memory, for each n from 0 on."""
    pass_peaks: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each n again: (bytes with one micro-batch, bytes of each further one that passes each layer with it) at some
    moments of a step. With several micro-batches, `activation_bytes` is the most of any."""
    work: tuple[tuple[int, int], ...] = ()
    """(floating-point operations, bytes of other operators) between each event and the one before, and after the last.
    Empty if they are unknown, or if the device waits for each copy, as a CPU does."""
    exchanges: tuple[SentCollective, ...] = ()
    sent: tuple[Sent, ...] = ()

    @property
    def key(self) -> str:
        """A hash that identifies the step: the same model, batch, ranks and patterns have the same key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @cached_property
    def trained_numel(self) -> int:
        """Elements of this rank's trainable parameters."""
        return sum(p.numel for p in self.params if p.key.trainable)

    @cached_property
    def orthogonalized_flops(self) -> float:
        """Floating-point operations with which this rank orthogonalizes its share of the matrices in a step."""
        return sum(p.newton_schulz_flops / len(p.key.ranks) for p in self.params)

    @cached_property
    def joins(self) -> tuple[tuple[tuple[int, ...], int, float], ...]:
        """(ranks, bytes, number) of the gathers that join this rank's share of cut matrices before they are updated."""
        found: dict[tuple[int, ...], list[float]] = {}
        for p in self.params:
            share, nbytes = math.prod(p.shape[:-2]) / len(p.key.ranks), 2 * math.prod(p.matrix)
            for ranks in p.joined_over:  # those of inner axes join what is a slice for the outer ones
                of = found.setdefault(ranks, [0, 0])
                of[0], of[1] = of[0] + share * nbytes, of[1] + share
                nbytes //= len(ranks)
        return tuple((ranks, int(nbytes), times) for ranks, (nbytes, times) in found.items())

    def peak_bytes(self, regions: int, together: int) -> int:
        """`activation_bytes` of micro-batches that pass each layer together, with the inputs of regions on the host."""
        one = self.kept_peaks[regions] if self.kept_peaks else self.activation_bytes
        if together == 1:
            return one
        if not self.pass_peaks:
            return together * one
        return max(first + (together - 1) * further for first, further in self.pass_peaks[regions])

    def over(self, ranks: int) -> "Profile":
        """Returns this step with every parameter replicated over this number of ranks, without tracing it again."""
        assert not self.exchanges and not self.sent, "sharded experts and slices depend on the number of ranks"
        keys = {p.key: replace(p.key, ranks=tuple(range(ranks)), divisor=ranks) for p in self.params}
        return replace(self, params=tuple(replace(p, key=keys[p.key]) for p in self.params))

    @property
    def registered_events(self) -> tuple[StepEvent, ...]:
        """`events`, with parameters numbered as in ``model.parameters()``."""
        return renumbered(self.events, self.order)

    @cached_property
    def step_order(self) -> StepOrder:
        """The order of the step, for any layout."""
        return StepOrder(self.parts, self.events, trainable_of(self.params))

    def schedule(self, layout: Layout) -> Schedule:
        """The requests of forward and backward to the rCache, as the runtime would record them."""
        return self.step_order.schedule(layout)
