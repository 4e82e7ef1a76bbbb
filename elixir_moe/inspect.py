"""`inspect`: what a wrapped model is made of, what it holds, and what it has moved.

Owns the answers, and reads each where it is kept, when it is asked for. Changes nothing, and asks no other rank.
"""

from typing import Any

from torch import nn

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import HELD_HEAD, Footprint, Plan, held_line, held_rows, size_text
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.search.prediction import Prediction
from elixir_moe.state.wrapped import Wrapped, require_wrapped


class Inspection:
    """A wrapped model as this rank sees it. Each property is read when it is asked for."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = wrapped

    @property
    def plan(self) -> Plan:
        """The plan it runs under, in numbers; `plan.to_json()` repeats it, `plan.explain()` says why."""
        return self._wrapped.plan

    @property
    def layout(self) -> Layout:
        """Its chunks, with the place of every parameter."""
        return self._wrapped.layout

    @property
    def footprint(self) -> Footprint:
        """The bytes that the plan foresees."""
        return self._wrapped.footprint

    @property
    def held_bytes(self) -> dict[str, int]:
        """By tier: the bytes that the library holds in a backward, gradients counted as if all were there."""
        return self._wrapped.held_bytes()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What this rank holds: a row for each chunk group and tier, resident chunks apart.

        `numel` are the elements of their parameters when gathered, `shard_bytes` what this rank has of their state.
        """
        return held_rows(self.plan, self.layout, self._wrapped.moments)

    @property
    def statistics(self) -> Statistics:
        """A snapshot of what has been moved so far; subtract two of them."""
        return self._wrapped.scheduler.statistics.copy()

    @property
    def schedule(self) -> Schedule | None:
        """The recorded order of chunk uses in a step; None before the first."""
        return self._wrapped.scheduler.cache.schedule

    @property
    def prediction(self) -> Prediction | None:
        """What a step was expected to take, beside what steps take; None for a plan that nobody searched for."""
        return self._wrapped.prediction

    def __str__(self) -> str:
        """The plan, and what this rank holds under it, as a table."""
        held = ", ".join(f"{tier}: {size_text(nbytes)}" for tier, nbytes in self.held_bytes.items())
        return "\n".join([f"{self.plan}", held, HELD_HEAD, *map(held_line, self.rows)])


def inspect(model: nn.Module) -> Inspection:
    """What `model` is made of, what it holds on this rank, and what it has moved. Not collective.

    Args:
        model: a model that went through `wrap`.

    Raises:
        ConfigError: the model is not wrapped.
    """
    return Inspection(require_wrapped(model, "inspect"))
