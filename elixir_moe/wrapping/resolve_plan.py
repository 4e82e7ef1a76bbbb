"""The second stage of `wrap`: what the model is, and the plan with all its numbers.

Owns the order of these decisions and the record of them, the same on all ranks that hold the model, and the
communicators: a search needs them first. Reads shapes and the step, moves no weight. The search is imported where it is
needed: a plan that is given without a step needs none.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.events import StepEvent
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.chunks.resolve import resolve_counts
from elixir_moe.distributed.all_ranks import make_on_all_ranks, raise_on_all_ranks
from elixir_moe.distributed.collectives import Communicator, build_communicators, goes_over_gloo
from elixir_moe.memory.disk import DiskFile
from elixir_moe.memory.host_sums import adds_async
from elixir_moe.optim.accepted import is_adam, moments_of, updates_on_disk
from elixir_moe.optim.cut_matrix import check_parts, ranks_of_cuts
from elixir_moe.optim.joined import trained_whole
from elixir_moe.runtime.model_spec import ModelSpec, describe
from elixir_moe.runtime.units import Parts, find_parts, registered_forward
from elixir_moe.wrapping.agreement import agree_on, host_bytes_of_a_rank
from elixir_moe.wrapping.checks import warn_of_one_memory
from elixir_moe.wrapping.prepare import Request

if TYPE_CHECKING:
    from elixir_moe.planner.prediction import Prediction

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The plan with all its numbers, and the model that it packs."""

    plan: Plan
    spec: ModelSpec
    layout: Layout
    schedule: Schedule
    """The requests of a step to the rCache."""
    moments: int
    """Values the optimizer keeps per element."""
    over_gloo: bool
    """Reductions run over gloo."""
    async_sums: bool
    """Whether gradients are summed in host memory while backward runs."""
    communicators: Mapping[tuple[int, ...], Communicator]
    """By the ranks of their process group. A search comes after them, since their memory is not free for the plan."""
    prediction: "Prediction | None"
    """The predicted cost of a step; None for a plan without a search."""


def resolve_plan(request: Request) -> Resolved:
    """Describes the model, searches for a plan if one is to be searched, resolves its numbers, connects the ranks.

    Collective. Raises as `wrap`.
    """
    model, plan, device = request.model, request.plan, request.device
    moments, over_gloo = moments_of(request.optimizer), goes_over_gloo(dist.group.WORLD, device)  # type: ignore[arg-type]
    async_sums, parts = adds_async(device), find_parts(model)
    whole = trained_whole(request.optimizer)
    prediction: Prediction | None = None
    raise_on_all_ranks("checked matrices", lambda: check_parts(whole, request.optimizer.param_groups))
    communicators: Mapping[tuple[int, ...], Communicator] = {}
    events: Sequence[StepEvent]
    if isinstance(plan, AutoPlan):
        from elixir_moe.planner.auto import groups_of

        communicators = _communicators(request, groups_of(model) | ranks_of_cuts(whole))
        prediction = _search(request, plan, moments=moments, over_gloo=over_gloo)
        plan, events = prediction.forecast.plan, prediction.forecast.events
        _LOG.debug("the search chose a plan: %s", plan.explanation)
    else:
        events = _events(request, parts)
    describe_it = partial(describe, model, parts, events, request.compute_dtype, plan, whole)
    spec = make_on_all_ranks("described the model", describe_it)
    agree_on(plan, spec)
    free_host_bytes = host_bytes_of_a_rank(spec.ranks, spec.parameters)
    resolve = partial(_resolve, plan, spec, moments=moments, free_host_bytes=free_host_bytes, async_sums=async_sums)
    plan, layout, schedule = make_on_all_ranks("resolved the plan", resolve)
    tiers = Counter(plan.tier_of(layout, chunk).value for chunk in layout.chunks)
    _LOG.debug("the plan: %s", plan.to_json())
    _LOG.debug("tiers of %d chunks: %s", len(layout.chunks), ", ".join(f"{n} {tier}" for tier, n in tiers.items()))
    warn_of_one_memory(plan, layout, device)
    communicators = communicators or _communicators(
        request, {chunk.key.ranks for chunk in layout.chunks} | ranks_of_cuts(whole)
    )
    return Resolved(
        plan=plan,
        spec=spec,
        layout=layout,
        schedule=schedule,
        moments=moments,
        over_gloo=over_gloo,
        async_sums=async_sums,
        communicators=communicators,
        prediction=prediction,
    )


def _events(request: Request, parts: Parts) -> Sequence[StepEvent]:
    """The events of the step that was given; without one, of a forward in the order of registration. Collective."""
    if request.step is None:
        return registered_forward(parts)
    from elixir_moe.planner.auto import events_of

    return events_of(request.model, parts, request.step, request.sample, request.compute_dtype)


def _communicators(request: Request, groups: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], Communicator]:
    """The communicators of process groups, given their ranks. Collective."""
    communicators = build_communicators(groups, request.device)
    request.undo.callback(close_all, communicators.values())
    return communicators


def _search(request: Request, wanted: AutoPlan, *, moments: int, over_gloo: bool) -> "Prediction":
    """The fastest plan that fits, and what its step is to cost. Collective."""
    from elixir_moe.planner.auto import SearchRequest, forecast
    from elixir_moe.planner.prediction import Prediction

    facts = SearchRequest(
        wanted=wanted,
        device=request.device,
        compute_dtype=request.compute_dtype,
        adam=is_adam(request.optimizer),
        updates_on_disk=updates_on_disk(request.optimizer),
        moments=moments,
        over_gloo=over_gloo,
        trained_whole=trained_whole(request.optimizer),
    )
    return Prediction(*forecast(request.model, facts))


def _resolve(plan: Plan, described: ModelSpec, **given: Any) -> tuple[Plan, Layout, Schedule]:
    """The plan with all numbers, its layout and its schedule. Raises as `resolve_counts` and `ModelSpec.layout` do."""
    plan = resolve_counts(plan, described.params, described.step_order, **given)
    return plan, *described.layout(plan)


def close_all(those: Iterable[DiskFile | Communicator]) -> None:
    """Closes each of them."""
    for each in those:
        each.close()
