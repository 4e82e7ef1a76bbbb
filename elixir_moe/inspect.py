"""`inspect`: what a wrapped model is made of, what it holds, and what it has moved.

Owns the answer, and reads it from where it is kept. Changes nothing, and asks no other rank.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import Footprint, Plan
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.state.full import require_wrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """A wrapped model as this rank sees it, at one moment."""

    plan: Plan
    """The plan it runs under; `plan.to_json()` repeats it, `plan.explain()` says why."""
    layout: Layout
    """Its chunks, with the place of every parameter."""
    footprint: Footprint
    """The bytes that the plan foresees."""
    held_bytes: dict[str, int]
    """By tier: the bytes that the library holds in a backward, gradients counted as if all were there."""
    rows: list[dict[str, Any]]
    """What this rank holds for each chunk group and tier; resident chunks apart."""
    statistics: Statistics
    """What has been moved so far; subtract two of them."""
    schedule: Schedule | None
    """The recorded order of chunk uses in a step; None before the first."""
    prediction: Any
    """What a step was expected to take, beside what steps take; None for a plan that nobody searched for."""


def inspect(model: nn.Module) -> Inspection:
    """What `model` is made of, what it holds on this rank, and what it has moved. Not collective.

    Args:
        model: a model that went through `wrap`.

    Raises:
        ConfigError: the model is not wrapped.
    """
    optimizer = require_wrapped(model, "inspect").optimizer
    return Inspection(
        plan=optimizer.plan,
        layout=optimizer.layout,
        footprint=optimizer.footprint,
        held_bytes=optimizer.held_bytes(),
        rows=optimizer.plan_table(),
        statistics=optimizer.statistics(),
        schedule=optimizer.schedule,
        prediction=optimizer.prediction,
    )
