"""Traces one training step on fake tensors, and derives its `Profile`.

Owns the run of forward and backward under torch's fake tensors, and the list of its events. Never computes or sends
anything, so a model of any size is traced in seconds. The model is restored afterwards.
Sources: Elixir v2, 3.1 (pre-runtime profiler) and A.3 (the detector of checkpointed regions).

Identical layers are traced once. A run of layers with equal modules, shapes and settings is cut to its first two
periods and the last one; the events of the second period then stand for those of all omitted periods. In forward, they
reach from the entry of the period to the entry of the next; in backward, from the gradient of its output to the
gradient of its input. Memory that one period allocates and another frees is thus counted as often as in the whole run.
Loops over experts and over the tokens of a loss are cut in the same way (`parallel.meta_tensors.pieces`).
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elixir_moe.chunks.events import by_first_use
from elixir_moe.chunks.param_spec import WIDE, ParamSpec, Precision
from elixir_moe.chunks.units import regions_of
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.memory.slabs import bytes_of
from elixir_moe.moe.layer import MoE
from elixir_moe.parallel.dtensor import local_of, placed_as
from elixir_moe.parallel.pattern import Pattern, RankMesh
from elixir_moe.parallel.rules import logical_numel
from elixir_moe.parallel.tiles import mark, tile_of
from elixir_moe.planner import megatron_meta
from elixir_moe.planner.decoding import decoding_bytes
from elixir_moe.planner.events import (
    Cost,
    CostEvent,
    Recorder,
    TraceEvent,
    costs_of,
    kept_peaks,
    kept_regions,
    peak_of,
    steps_of,
    work_of,
)
from elixir_moe.planner.passes import pass_peaks
from elixir_moe.planner.profile import Profile, Sent, SentCollective
from elixir_moe.planner.repeat import Cut, Names, cuts_of, with_all_periods
from elixir_moe.quantized.decoders import decodes_in_one_pass
from elixir_moe.quantized.packed import weights_behind
from elixir_moe.quantized.products import scratch_bytes
from elixir_moe.runtime.model_spec import param_specs
from elixir_moe.runtime.units import find_parts
from elixir_moe.torch_private import FakeTensorMode

Step = Callable[[nn.Module, Any], Tensor]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns cyclic garbage collection off, which takes a tenth of a trace's time; reference counts free the tensors."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def trace(
    model: nn.Module,
    step: Step,
    sample: Any,
    *,
    world: int = 1,
    rank: int = 0,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    precision: Precision = WIDE,
    trained_whole: Mapping[nn.Parameter, str] | None = None,
    tokens: int | None = None,
    whole: bool = False,
    device: torch.device | None = None,
    grouped_kernel: bool = False,
) -> Profile:
    """Profiles one forward and backward of ``step(model, sample)``, which returns the loss.

    Args:
        model: any module, on any device, "meta" included. Parameters with a pattern have this rank's slices.
        step: the forward of a training step.
        sample: a batch: tensors in lists, tuples and dicts. Only shapes and dtypes are read.
        world: number of ranks over which parameters without a pattern are replicated.
        rank: the rank to trace.
        compute_dtype: the argument of `wrap`.
        reduce_dtype: the field of the plan.
        precision: the precision of the plan's narrow state.
        trained_whole: the parameters that are updated as whole matrices, as for `param_specs`.
        tokens: tokens of this rank's batch; by default the elements of the first integer tensor in `sample`.
        whole: trace every layer, identical or not.
        device: the device that will run the step; None for an accelerator that is not here, on which a kernel is taken
            to decode quantized weights in one pass.
        grouped_kernel: `Hardware.grouped_kernel` of an accelerator that is not here.

    Raises:
        ConfigError: the step does not return a scalar loss, reads values of tensors, or keeps tensors outside the
            model.
    """
    everywhere = Pattern(RankMesh.world(world, rank), replicate=("dp",))
    dtypes: dict[str, Any] = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype, "precision": precision}
    dtypes["trained_whole"] = trained_whole
    specs = param_specs(model, model.parameters(), everywhere=everywhere, **dtypes)
    behind = weights_behind(model)
    listed = list(specs.values())
    parts = find_parts(model)
    names = Names(parts.names, [name for name, _ in model.named_parameters()])
    cuts = [] if whole else cuts_of(model)
    try:
        scratch = scratch_bytes(device, grouped_kernel=grouped_kernel)
        recorder = Recorder(model, parts, [pair for cut in cuts for pair in cut.boundaries], scratch)
        events = with_all_periods(_run(recorder, model, step, sample, specs, cuts), cuts, names)
    except ConfigError:
        if not cuts:
            raise
        events = None  # the model may depend on the number of its layers
    if events is None:
        where: dict[str, Any] = {"world": world, "rank": rank, "device": device, "grouped_kernel": grouped_kernel}
        return trace(model, step, sample, **where, **dtypes, tokens=tokens, whole=True)
    steps, costs = list(steps_of(events)), list(costs_of(events))
    order, part_specs, step_events = by_first_use(parts.specs, steps, len(listed))
    regions = regions_of(part_specs)
    numels = {place: listed[i].numel for place, i in enumerate(order) if listed[i].key.trainable}
    on_cpu = device is not None and device.type == "cpu"
    one_pass = device is None or decodes_in_one_pass(device)
    return Profile(
        params=tuple(replace(listed[i], region=regions.get(place)) for place, i in enumerate(order)),
        order=tuple(order),
        parts=part_specs,
        events=step_events,
        parameters=sum(behind.get(p, logical_numel(p)) for p in specs),
        tokens=_tokens(sample) if tokens is None else tokens,
        flops=sum(event.flops for event in costs),
        traffic_bytes=sum(event.traffic for event in costs)
        + decoding_bytes(model, parts.names, steps, compute_dtype, native=one_pass),
        activation_bytes=peak_of(costs),
        buffer_bytes=sum(map(bytes_of, model.buffers())),
        kept=tuple(nbytes for nbytes, _, _ in kept_regions(costs)),
        kept_peaks=tuple(kept_peaks(costs)),
        pass_peaks=tuple(pass_peaks(part_specs, events, step_events, numels)),
        work=() if on_cpu else tuple(work_of(events)),
        exchanges=tuple(_exchanges(model, costs, compute_dtype)),
        sent=tuple(_sent(costs)),
    )


def _run(
    recorder: Recorder,
    model: nn.Module,
    step: Step,
    sample: Any,
    specs: Mapping[nn.Parameter, ParamSpec],
    cuts: Sequence[Cut],
) -> list[TraceEvent]:
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for cut in cuts:
            stack.enter_context(cut.applied())
        stack.enter_context(megatron_meta.isolated(model))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(_fake_tensors(model, {p: spec.key.dtype for p, spec in specs.items()}, mode))
        stack.enter_context(mode)
        batch = _fake(sample)
        stack.enter_context(recorder)
        try:
            loss = step(model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(f"step returned a {type(loss).__name__}: expected the loss, a tensor of one element")
            recorder.events.append(CostEvent(Cost.LOSS))
            loss.backward()  # type: ignore[no-untyped-call]
        except ElixirError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the step cannot run on tensors without data: {type(error).__name__}: {error}; if the step reads "
                "values of tensors, pass a plan instead of Plan.auto"
            ) from error
    del loss, batch
    if recorder.alive:
        FakeTensorMode.cache_clear()  # it keeps the storages of ``storage.copy_``, by which Megatron restores outputs
        gc.collect()
    if recorder.alive:
        raise ConfigError(
            "the step keeps tensors outside the model (in a list, or in the cache of a function); here they have no "
            "data, and later steps would read them: keep none of them, or pass a plan instead of Plan.auto"
        )
    return recorder.events


@contextmanager
def _fake_tensors(model: nn.Module, dtypes: Mapping[Tensor, torch.dtype], mode: FakeTensorMode) -> Iterator[None]:
    """Replaces parameters, buffers and tensor attributes by fake tensors while open, and undoes all changes at the end.

    Also clears the caches of memoised forwards.
    """
    before = []
    for module in model.modules():  # its registries, plain dicts, are those of parameters and hooks, which forward adds
        registries = {name: copy(value) for name, value in vars(module).items() if type(value) in (dict, OrderedDict)}
        before.append((module, dict(vars(module)), registries))
    fakes: dict[Tensor, Tensor] = {}

    def fake(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if tensor not in fakes:
            local = torch.empty(local_of(tensor).shape, dtype=dtypes.get(tensor, tensor.dtype), device="cpu")
            empty = placed_as(local, tensor).detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            if (tile := tile_of(tensor)) is not None:
                mark(fakes[tensor], tile)
        return fakes[tensor]

    with mode:
        for module, attributes, registries in before:
            module._parameters.update({name: fake(p) for name, p in registries["_parameters"].items()})
            module._buffers.update({name: fake(b) for name, b in registries["_buffers"].items()})
            vars(module).update({name: fake(t) for name, t in attributes.items() if isinstance(t, Tensor)})
    try:
        yield
    finally:
        for module, attributes, registries in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            for name, content in registries.items():
                vars(module)[name].clear()
                vars(module)[name].update(content)
            getattr(type(module).forward, "cache_clear", lambda: None)()


def _fake(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu", requires_grad=value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _fake(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(item) for item in value)
    return value


def _exchanges(model: nn.Module, events: Sequence[CostEvent], dtype: torch.dtype | None) -> Iterator[SentCollective]:
    """Yields the all-to-alls and matrix products of the mixture layers under balanced routing."""
    modules = dict(model.named_modules())
    calls: dict[str, list[CostEvent]] = {}
    for event in events:
        if event.kind in (Cost.MIXTURE, Cost.MIXTURE_RECOMPUTE):
            calls.setdefault(event.name, []).append(event)
    for name, its in calls.items():
        layer = modules[name]
        if not isinstance(layer, MoE):
            yield _megatron_exchange(layer, its, dtype)
            continue
        weight = next(layer.experts.parameters())  # the first tile, if there are several
        _, width, inner = weight.shape
        rows = max(event.nbytes for event in its) * layer.router.top_k
        itemsize = (dtype or weight.dtype).itemsize
        recomputed = sum(event.kind is Cost.MIXTURE_RECOMPUTE for event in its)
        forward = len(its) - recomputed
        yield SentCollective(
            ep=layer.place.ep,
            nbytes=rows * width * itemsize,
            times=4 * forward + 2 * recomputed,
            expert_flops=4 * rows * width * inner * (3 * forward + recomputed),
            row_bytes=rows * (2 * width + 2 * inner) * itemsize,
        )


def _megatron_exchange(layer: Any, events: Sequence[CostEvent], dtype: torch.dtype | None) -> SentCollective:
    """Returns the load-dependent cost of a Megatron-core mixture layer; its collectives are events of their own."""
    config, rows = layer.config, max(event.nbytes for event in events) * layer.config.moe_router_topk
    width, inner = config.hidden_size, config.moe_ffn_hidden_size
    recomputed = sum(event.kind is Cost.MIXTURE_RECOMPUTE for event in events)
    products = 2 + config.gated_linear_unit
    return SentCollective(
        ep=layer.token_dispatcher.ep_size,
        nbytes=0,
        times=0,
        expert_flops=2 * products * rows * width * inner * (3 * (len(events) - recomputed) + recomputed),
        row_bytes=rows * (2 * width + products * inner) * (dtype or config.params_dtype).itemsize,
    )


def _sent(events: Sequence[CostEvent]) -> Iterator[Sent]:
    """Yields the model's own collectives, by process group."""
    found: dict[str, list[CostEvent]] = {}
    for event in events:
        if event.kind is Cost.SENT:
            found.setdefault(event.name, []).append(event)
    for name, its in found.items():
        ranks = tuple(int(rank) for rank in name.split())
        yield Sent(ranks=ranks, nbytes=sum(event.nbytes for event in its), times=len(its))


def _tokens(sample: Any) -> int:
    """Returns the elements of the first tensor that is not floating point; 0 if there is none."""
    if isinstance(sample, Tensor):
        return sample.numel() if not sample.is_floating_point() else 0
    items = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (list, tuple)) else ()
    return next((n for n in map(_tokens, items) if n), 0)
