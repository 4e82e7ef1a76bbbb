"""The second step of `wrap`: what the model is, and the plan with all its numbers.

Owns the order of these decisions and the record of them, the same on all ranks that hold the model. Reads shapes and
the step, moves no weight. The search is imported where it is needed: a plan that is given without a step needs none.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.events import StepEvent
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.chunks.settle import settled
from elixir_moe.distributed.all_ranks import made_on_all_ranks
from elixir_moe.distributed.collectives import Communicator, build_communicators, goes_over_gloo
from elixir_moe.memory.disk import DiskFile
from elixir_moe.memory.host_sums import adds_async
from elixir_moe.optim.accepted import is_adam, moments_of
from elixir_moe.runtime.model_spec import ModelSpec, describe
from elixir_moe.runtime.units import find_parts, registered_forward
from elixir_moe.wrapping.agreement import agree_on, host_bytes_of_a_rank

if TYPE_CHECKING:
    from elixir_moe.planner.prediction import Prediction

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What is packed, and how."""

    plan: Plan
    """With every number settled."""
    spec: ModelSpec
    layout: Layout
    schedule: Schedule
    """The requests of a step to the rCache."""
    moments: int
    """Values the optimizer keeps per element."""
    over_gloo: bool
    """Reductions run over gloo."""
    beside: bool
    """Sums in host memory run beside backward."""
    communicators: Mapping[tuple[int, ...], Communicator]
    """Those that were made before the search, since their memory is not free for the plan; else empty."""
    prediction: "Prediction | None"
    """The predicted cost of a step; None for a plan without a search."""


def tile_for(
    plan: Plan | AutoPlan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Tiles what no plan that is searched could hold. Collective.

    It comes before weights are looked up in a folder and become its bytes: both are done by tile.
    """
    if isinstance(plan, AutoPlan):
        from elixir_moe.planner.auto import device_room
        from elixir_moe.wrapping.tiling import tile_to_fit

        tile_to_fit(model, optimizer, device_room(model, plan, device), compute_dtype)


def decide(
    made: ExitStack,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | AutoPlan,
    sample: Any,
    step: Callable[[nn.Module, Any], Any] | None,
    compute_dtype: torch.dtype | None,
    device: torch.device,
) -> Decided:
    """Describes the model and settles its plan; `made` undoes what is made. Collective; raises as `wrap`."""
    moments, over_gloo = moments_of(optimizer), goes_over_gloo(dist.group.WORLD, device)  # type: ignore[arg-type]
    beside, prediction, communicators = adds_async(device), None, {}
    events: Sequence[StepEvent]
    if isinstance(plan, Plan):
        parts = find_parts(model)
        if step is None:
            events = registered_forward(parts)
        else:
            from elixir_moe.planner.auto import events_of

            events = events_of(model, parts, step, sample, compute_dtype)
    else:
        from elixir_moe.planner.auto import Request, forecast, groups_of
        from elixir_moe.planner.prediction import Prediction

        request = Request(
            wanted=plan,
            device=device,
            compute_dtype=compute_dtype,
            adam=is_adam(optimizer),
            moments=moments,
            over_gloo=over_gloo,
        )
        parts = find_parts(model)
        communicators = build_communicators(groups_of(model), device)
        made.callback(close_all, communicators.values())
        prediction = Prediction(*forecast(model, request))
        plan, events = prediction.forecast.plan, prediction.forecast.events
        _LOG.debug("the search chose a plan: %s", plan.explanation)
    described = made_on_all_ranks("described the model", partial(describe, model, parts, events, compute_dtype, plan))
    agree_on(plan, described)
    free_host_bytes = host_bytes_of_a_rank(described.ranks)
    settle = partial(_settle, plan, described, moments=moments, free_host_bytes=free_host_bytes, beside=beside)
    plan, layout, schedule = made_on_all_ranks("settled the plan", settle)
    homes = Counter(plan.home(layout, chunk).value for chunk in layout.chunks)
    _LOG.debug("the plan: %s", plan.to_json())
    _LOG.debug("home tiers of %d chunks: %s", len(layout.chunks), ", ".join(f"{n} {tier}" for tier, n in homes.items()))
    return Decided(
        plan=plan,
        spec=described,
        layout=layout,
        schedule=schedule,
        moments=moments,
        over_gloo=over_gloo,
        beside=beside,
        communicators=communicators,
        prediction=prediction,
    )


def _settle(plan: Plan, described: ModelSpec, **given: Any) -> tuple[Plan, Layout, Schedule]:
    """The plan with all numbers, and the chunks and the step under it. Raises as `settled` and `ModelSpec.layout`."""
    plan = settled(plan, described.params, described.step_order, **given)
    return plan, *described.layout(plan)


def close_all(those: Iterable[DiskFile | Communicator]) -> None:
    """Closes each of them."""
    for each in those:
        each.close()
