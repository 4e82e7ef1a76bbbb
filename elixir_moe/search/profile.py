"""What one training step of a model asks of the machine: the data a plan is made from.

Owns `Profile`. Pure: it is found by `trace`, priced by `cost`, and can be kept or compared; it holds no module and no
tensor.
"""

import hashlib
from dataclasses import dataclass, replace

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.param_spec import ParamSpec
from elixir_moe.chunks.step_order import Part, StepOrder, Use


@dataclass(frozen=True, kw_only=True, slots=True)
class SentCollective:
    """All-to-alls of one mixture layer in one step."""

    ep: int
    """Ranks that share the experts."""
    nbytes: int
    """Bytes a rank gives to each all-to-all under balanced routing, its own part included."""
    times: int
    """How often in a step: two in forward, two in backward, two more if recomputed."""
    expert_flops: int
    """Floating-point operations of this rank's experts in a step under balanced routing."""
    row_bytes: int
    """Bytes of activations that grow with the rows this rank receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Collectives that the model issues itself in one step over one process group: tensor parallelism, for one."""

    ranks: tuple[int, ...]
    """Global ranks."""
    nbytes: int
    """Bytes in the measure of all-gathers: those of what is gathered, or reduce-scattered, or exchanged; an all-reduce
    counts twice."""
    times: int
    """How many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One rank's training step: one forward and one backward."""

    params: tuple[ParamSpec, ...]
    """All parameters, in order of first use; shapes are this rank's slices."""
    order: tuple[int, ...]
    """By place in `params`: the parameter's number in ``model.parameters()``."""
    parts: tuple[Part, ...]
    """Modules that have parameters; see `chunks.step_order`."""
    uses: tuple[Use, ...]
    """Runs of parts in forward."""
    parameters: int
    """Parameters of the whole model, on all ranks."""
    tokens: int
    """Elements of the batch a rank's loss is the mean of: D of 8·M·D, on one rank."""
    flops: int
    """Floating-point operations of matrix products and attention, recomputation included."""
    traffic_bytes: int
    """Bytes read and written in device memory by all other operators."""
    activation_bytes: int
    """Peak of all tensors of a step that are neither parameters nor buffers, a gradient before it lands included."""
    buffer_bytes: int
    """Buffers of the model."""
    exchanges: tuple[SentCollective, ...] = ()
    sent: tuple[Sent, ...] = ()

    @property
    def key(self) -> str:
        """Tells one step from another: the same model, batch, ranks and patterns have the same key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def registered_uses(self) -> tuple[Use, ...]:
        """`uses`, with parameters numbered as the model registers them."""
        return tuple(replace(use, params=tuple(self.order[p] for p in use.params)) for use in self.uses)

    @property
    def step_order(self) -> StepOrder:
        """The step, to be read under any layout."""
        return StepOrder(self.parts, self.uses)

    def schedule(self, layout: Layout) -> Schedule:
        """What forward and backward ask of the rCache, as the runtime would record it."""
        return self.step_order.schedule(layout)
