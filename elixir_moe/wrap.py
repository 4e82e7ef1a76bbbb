"""`wrap`: from a plain model and optimizer to sharded ones, step by step. Reads as the table of contents.

Owns the order of construction and the agreement of all ranks on it; each step is another file's work.
"""

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.checks import check_arguments, check_data, check_disk, check_modules, check_search
from elixir_moe.chunks.agreement import Peers, alone
from elixir_moe.chunks.chunk import Chunk, Placeholder
from elixir_moe.chunks.collectives import (
    Communicator,
    backend_of,
    build_communicators,
    make_groups,
    world_timeout,
)
from elixir_moe.chunks.group import ParamSpec
from elixir_moe.chunks.home import Home, build_homes
from elixir_moe.chunks.layout import ChunkSpec, Layout
from elixir_moe.chunks.plan import Plan, Tier, footprint
from elixir_moe.chunks.policy import CacheState, advice
from elixir_moe.chunks.rcache import RCache
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.chunks.spill import Spill
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.chunks.tiers import check_fits, host_bytes_left
from elixir_moe.chunks.walk import Use, Walk
from elixir_moe.errors import ConfigError, LayoutError, PlanError, TierError
from elixir_moe.hooks import Hooks
from elixir_moe.huggingface import Pretrained, leave_meta
from elixir_moe.optim import ShardedOptimizer
from elixir_moe.parallel import megatron
from elixir_moe.parallel.annotate import annotate_dtensors, pattern_of, replicated_everywhere
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.parallel.twins import marks_of, warn_of_twins
from elixir_moe.ranks import gathered, together
from elixir_moe.search.auto import Request, forecast, uses_of
from elixir_moe.search.prediction import Prediction
from elixir_moe.specs import param_specs, ranks_of
from elixir_moe.state import Wrapped, groups_needed, parameter_names, plain_keys, refuse_plain_state_dicts
from elixir_moe.units import find_units, registered_uses
from elixir_moe.updates import is_adam, moments_of
from elixir_moe.waits import Wait, watch

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    optimizer: torch.optim.Optimizer,
    *,
    plan: Plan | Literal["auto"],
    sample: Any = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    hardware: str | os.PathLike[str] | None = None,
    budget_bytes: int | None = None,
    accumulation: int = 1,
    spill: str | os.PathLike[str] | None = None,
    check_spill: bool = False,
) -> tuple[M, ShardedOptimizer]:
    """Shards `model` and `optimizer` by `plan`, in place: the model keeps its class and its training loop.

    Collective: every rank calls it with the same model and plan. Weights are taken from the first rank of each
    replicate process group. Parameters without a pattern are replicated over the world.

    Args:
        model: any module, on any device; what is on "meta" comes from `weights`.
        optimizer: an elementwise `torch.optim` optimizer on its parameters, not yet stepped.
        plan: where chunks are at home and how many are gathered at once; "auto" traces one step and finds the fastest
            that fits (docs/planning.md). `optimizer.plan` is what was found, ``optimizer.plan.explain()`` says why, and
            `optimizer.prediction` what a step takes.
        sample: with `step`, a batch: ``step(model, sample)`` and its backward run once on tensors without data, to
            learn the order in which parameters are first used, which is the order they are packed in, and how many
            blocks of the rCache a step needs. A step that cannot run without data runs once on the model instead,
            without gradients. By default the order is that of registration. ``plan="auto"`` needs both, and a step that
            runs without data.
        step: the forward of a training step, as in ``step(model, batch).backward()``.
        compute_dtype: what forward and backward run in; fp32 masters keep the weights as they are now. By default each
            parameter's own dtype. `Pattern.dtype` overrides it.
        device: where forward runs; by default this rank's GPU, or the CPU.
        weights: a folder of safetensors, as `save_pretrained` and Hugging Face write them, that every rank can read.
            Parameters and buffers of a model made under ``torch.device("meta")`` are read from it straight into their
            shards; no rank ever holds more than a chunk of full weights.
        hardware: for "auto", what to plan for: a machine that ships with the package, or a file; None measures this one
            and remembers it.
        budget_bytes: for "auto", device memory of each rank for the library, activations and buffers; None takes what
            is free. On CPUs the rest of the ranks' equal parts of memory is the host tier.
        accumulation: for "auto", backwards in a step; more than one need fp32 sums of narrower gradients.
        spill: the folder in which each rank makes the file for its chunks on disk, if the plan has any; "auto" puts
            chunks there if host memory is too small. A fast disk of each host's own is best. Nothing is left in it.
        check_spill: keep checksums of what is written there, and compare them when it is read.

    Returns:
        The model and a `ShardedOptimizer` with the same `param_groups`.

    Raises:
        PlanError: the plan does not fit the model (a chunk too short, an rCache too small), or "auto" finds none that
            fits: by how many bytes, in which tier, and what would help.
        LayoutError: patterns do not fit the ranks, or ranks disagree.
        ConfigError: the optimizer is not elementwise, keeps what cannot be cut (8-bit moments in blocks), has been
            stepped, or does not belong to the model.
        TierError: host memory or the disk is too small.
        CheckpointError: `weights` lacks something the model has on meta, or has it in another shape.
    """

    def check() -> None:
        check_arguments(model, optimizer, plan, sample, step, compute_dtype)
        check_search(plan, step, hardware, budget_bytes, accumulation)
        check_disk(plan, optimizer, spill, check_spill)
        watch()

    together("checked what wrap was given", check) if dist.is_initialized() else check()
    device = _start(device)
    _check_alike(optimizer, plan=plan, hardware=hardware, spill=spill, weights=weights)
    check_modules(model)
    annotate_dtensors(model)
    megatron.check(model)
    prediction = None
    if isinstance(plan, Plan):
        check_data(model, weights, step)
        names, uses = registered_uses(model) if step is None else uses_of(model, step, sample, compute_dtype)
    else:
        check_data(model, weights, None)
        assert step is not None, "checked above"
        prediction = _search(
            model, optimizer, step, sample, device, compute_dtype, hardware, budget_bytes, accumulation, spill
        )
        plan, names, uses = prediction.forecast.plan, prediction.forecast.params, prediction.forecast.uses
    named = dict(model.named_parameters())  # other names than the rank's that searched are told of in `_agree`
    order = dict.fromkeys([*(named[name] for name in names if name in named), *named.values()])
    specs = param_specs(model, order, everywhere=replicated_everywhere(), compute_dtype=compute_dtype)
    parameters = list(specs)
    peers = _agree(model, plan, specs)
    layout = plan.layout(list(specs.values()))
    spare = _check_blocks(model, uses, plan, layout, parameters)
    pretrained = None
    if weights is not None:
        pretrained = Pretrained(model, weights)
        pretrained.fill_buffers()

    size = footprint(plan, layout, moments=moments_of(optimizer), staged=_staged(device))
    _check_host_memory(size.host_bytes + (size.device_bytes if device.type == "cpu" else 0))

    file = _open_spill(plan, layout, 1 + moments_of(optimizer), spill, check_spill)
    communicators = build_communicators([chunk.key.ranks for chunk in layout.chunks], device)
    homes = build_homes([(chunk, plan.home(layout, chunk)) for chunk in layout.chunks], device, file)
    cache = CacheState(plan.blocks(layout), prefetch=plan.prefetch)
    statistics = Statistics(cache=cache.counts)
    rcache = RCache(layout, plan.blocks(layout), homes, device, statistics)
    placeholder = Placeholder(device)
    keys, all_names = plain_keys(model), parameter_names(model)
    chunks = list(_fill(layout, specs, homes, communicators, placeholder, pretrained))
    if pretrained is not None:
        pretrained.settle()
    _move_buffers(model, device)

    staging = torch.empty(size.staging_bytes, dtype=torch.uint8, device=device) if size.staging_bytes else None
    with Wait("the making of process groups by all ranks"):
        control = dist.new_group(backend="gloo", timeout=world_timeout())
    groups = make_groups([peers, *groups_needed(model, layout.chunks)], backend="gloo")
    agreement = Peers(groups[peers], chunks) if len(peers) > 1 else alone
    scheduler = Scheduler(chunks, cache, rcache, staging, device, statistics, agreement)
    hooks = Hooks(model, scheduler, placeholder, 1 if spare else 0)
    model.elixir = Wrapped(scheduler=scheduler, groups=groups, keys=keys, names=all_names)  # type: ignore[assignment]
    refuse_plain_state_dicts(model)
    sharded = ShardedOptimizer(
        optimizer, scheduler, hooks, control, groups, peers=peers, plan=plan, layout=layout, footprint=size, spill=file
    )
    if prediction is not None:
        sharded.prediction = prediction
        sharded.register_step_post_hook(prediction)
    model.zero_grad = sharded.zero_grad  # type: ignore[method-assign]
    return model, sharded


def _start(device: torch.device | str | None) -> torch.device:
    """Where forward runs; torch.distributed is started if nobody has.

    That makes this rank's GPU the current one, so it is asked for behind it; one that was named stays the current one.
    """
    _device(device)  # what is not there is refused before anything is started
    if not dist.is_initialized():
        init_mesh()
        watch()
    return _device(device)


def _device(device: torch.device | str | None) -> torch.device:
    available = {"cpu": 1, "cuda": torch.cuda.device_count()}
    try:
        chosen = torch.device(device or ("cuda" if available["cuda"] else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: {error}") from error
    if (chosen.index or 0) >= available.get(chosen.type, 0):
        raise ConfigError(f"device={device!r}: this machine has {available['cuda']} GPUs, and the CPU")
    if chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        torch.cuda.set_device(chosen)  # streams, NCCL and DLPack go by the current device
    return torch.device("cuda", torch.cuda.current_device())


def _check_alike(optimizer: torch.optim.Optimizer, **given: object) -> None:
    """Raises ConfigError on all ranks if some were given what makes them take another way through `wrap`."""
    kinds = {name: value if value in (None, "auto") else type(value).__name__ for name, value in given.items()}
    everyone = gathered({"optimizer": type(optimizer).__name__, **kinds})
    for rank, theirs in enumerate(everyone):
        for name, kind in theirs.items():
            if kind != everyone[0][name]:
                raise ConfigError(
                    f"wrap was given {name}={everyone[0][name]} on rank 0 and {name}={kind} on rank {rank}: give all "
                    f"ranks the same"
                )


def _agree(model: nn.Module, plan: Plan, specs: dict[nn.Parameter, ParamSpec]) -> tuple[int, ...]:
    """Compares what the ranks that wrap this model are about to do; raises LayoutError with the first difference.

    Returns these ranks: all in the meshes of its patterns. Another pipeline stage has ranks and a model of its own.
    """
    lines = [f"plan {plan.to_json()}"]
    for parameter, spec in specs.items():
        pattern = pattern_of(parameter) or replicated_everywhere()
        lines.append(
            f"parameter {spec.name} {spec.shape} {spec.key.dtype} trainable={spec.key.trainable} {pattern.describe()}"
        )
    peers = ranks_of(model, replicated_everywhere())
    told = gathered((peers, hashlib.sha256("\n".join(lines).encode()).hexdigest(), marks_of(list(specs))))
    everyone = [(theirs, digest) for theirs, digest, _ in told]
    if all(everyone[rank] == everyone[theirs[0]] for theirs, _ in everyone for rank in theirs):
        warn_of_twins({parameter: spec.name for parameter, spec in specs.items()}, [marks for *_, marks in told])
        return peers
    models = gathered(lines)
    for theirs, _ in everyone:
        for rank in theirs:
            for one, other in _differences(models[theirs[0]], models[rank]):
                raise LayoutError(
                    f"ranks disagree about the plan or the model. Rank {theirs[0]}: {one}. Rank {rank}: {other}. "
                    f"Build the same model, patterns and plan on every rank of the patterns' meshes"
                )
    raise LayoutError(f"ranks disagree about who wraps this model: {[theirs for theirs, _ in everyone]}")


def _differences(a: list[str], b: list[str]) -> Iterator[tuple[str, str]]:
    for i in range(max(len(a), len(b))):
        mine, other = a[i] if i < len(a) else "nothing", b[i] if i < len(b) else "nothing"
        if mine != other:
            yield mine, other


def _search(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[nn.Module, Any], Any],
    sample: Any,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    hardware: str | os.PathLike[str] | None,
    budget_bytes: int | None,
    accumulation: int,
    spill: str | os.PathLike[str] | None,
) -> Prediction:
    """The fastest plan that fits, and what a step takes under it. Collective."""
    request = Request(
        step=step,
        sample=sample,
        device=device,
        compute_dtype=compute_dtype,
        moments=moments_of(optimizer),
        staged=_staged(device),
        hardware=None if hardware is None else os.fspath(hardware),
        budget_bytes=budget_bytes,
        accumulation=accumulation,
        spill=None if spill is None else os.fspath(spill),
        adam=is_adam(optimizer),
    )
    return Prediction(*forecast(model, request))


def _staged(device: torch.device) -> bool:
    """Whether reductions go through a staging buffer."""
    return backend_of(dist.group.WORLD, device) == "gloo"  # type: ignore[arg-type]


def _check_blocks(
    model: nn.Module, uses: Sequence[Use], plan: Plan, layout: Layout, parameters: list[nn.Parameter]
) -> bool:
    """Raises PlanError if some module, or the order of modules, needs more blocks than there are.

    Returns whether there is a block to spare.
    """
    slot_of = {
        parameters[slot.param]: (chunk.index, i) for chunk in layout.chunks for i, slot in enumerate(chunk.slots)
    }
    blocks = plan.blocks(layout)
    least = Walk(uses).schedule(layout).least_blocks()
    for unit in find_units(model, slot_of):
        needed = [chunk for chunk in unit.chunks if not layout.chunks[chunk].resident]
        if len(needed) > blocks:
            raise PlanError(
                f"module {unit.name!r} needs {len(needed)} chunks at once, the rCache has {blocks} blocks of "
                f"{layout.chunk_numel} elements: {advice(max(len(needed), least))}"
            )
    if least > blocks:
        raise PlanError(
            f"forward and backward of this model hold {least} chunks at once, the rCache has {blocks} blocks of "
            f"{layout.chunk_numel} elements: {advice(least)}"
        )
    return blocks > least or blocks >= len(layout.cached)


def _check_host_memory(nbytes: int) -> None:
    """Raises TierError on all ranks if those of one host need more than it has left."""
    everyone = gathered((socket.gethostname(), nbytes, host_bytes_left()))
    for host in dict.fromkeys(host for host, *_ in everyone):
        needs = [(theirs, left) for name, theirs, left in everyone if name == host]
        check_fits(sum(theirs for theirs, _ in needs), min(left for _, left in needs), f"{len(needs)} ranks on {host}")


def _open_spill(
    plan: Plan, layout: Layout, arrays: int, directory: str | os.PathLike[str] | None, checked: bool
) -> Spill | None:
    """The file for chunks on disk; None without such. Raises TierError on all ranks if one of them cannot have it."""
    numels = [chunk.shard_numel for chunk in layout.chunks if plan.home(layout, chunk) is Tier.DISK]
    if not numels:
        return None
    assert directory is not None, "checked with the other arguments"
    made: list[Spill] = []
    try:
        together(
            "made the files for chunks on disk",
            lambda: made.append(Spill(os.fspath(directory), numels, arrays, rank=dist.get_rank(), checked=checked)),
            error=TierError,
        )
    except BaseException:
        for file in made:
            file.close()
        raise
    return made[0]


def _fill(
    layout: Layout,
    specs: dict[nn.Parameter, ParamSpec],
    homes: Iterable[Home],
    communicators: Mapping[tuple[int, ...], Communicator],
    placeholder: Placeholder,
    pretrained: Pretrained | None,
) -> Iterator[Chunk]:
    """The chunks, one after another, each with the weights of the model at home."""
    parameters, names = list(specs), [spec.name for spec in specs.values()]
    for spec, home in zip(layout.chunks, homes, strict=True):
        members = [parameters[slot.param] for slot in spec.slots]
        communicator = communicators[spec.key.ranks]
        _move_in(spec, members, home, communicator, placeholder.device, pretrained)
        yield Chunk(spec, members, [names[slot.param] for slot in spec.slots], home, communicator, placeholder)


@torch.no_grad()
def _move_in(
    spec: ChunkSpec,
    members: list[nn.Parameter],
    home: Home,
    communicator: Communicator,
    device: torch.device,
    pretrained: Pretrained | None,
) -> None:
    """Fills a chunk's home from the parameters of the first rank of its group, or from a folder."""
    dtype = torch.float32 if spec.key.trainable else spec.key.dtype
    whole = torch.zeros(spec.numel, dtype=dtype, device=device)
    for slot, parameter in zip(spec.slots, members, strict=True):
        local = local_of(parameter)
        place = whole[slot.start : slot.stop].view(local.shape)
        if not local.is_meta:
            place.copy_(local)
            continue
        leave_meta(parameter)
        if pretrained is not None and communicator.index == 0:
            pretrained.fill(place, parameter)
    communicator.broadcast(whole)
    start, stop = spec.shard_bounds(communicator.rank)
    home.fill(whole[start:stop])


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """All buffers; one that has several names keeps them."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(buffer, buffer.to(device))
