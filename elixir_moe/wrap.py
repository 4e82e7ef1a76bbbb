"""`wrap`: from a plain model and optimizer to sharded ones, step by step. Reads as the table of contents.

Owns the order of construction and the agreement of all ranks on it; each step is another file's work.
"""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

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
from elixir_moe.chunks.policy import CacheState
from elixir_moe.chunks.rcache import RCache
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.chunks.spill import Spill
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.chunks.tiers import check_fits, host_bytes_left
from elixir_moe.chunks.walk import Use, Walk
from elixir_moe.errors import ConfigError, LayoutError, PlanError, TierError
from elixir_moe.guard import Guarded
from elixir_moe.hooks import Hooks
from elixir_moe.huggingface import Pretrained, leave_meta
from elixir_moe.optim import ShardedOptimizer
from elixir_moe.parallel import megatron
from elixir_moe.parallel.annotate import annotate_dtensors, pattern_of, replicated_everywhere
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.parallel.pattern import is_whole
from elixir_moe.ranks import gathered, together
from elixir_moe.search.auto import Request, forecast
from elixir_moe.search.prediction import Prediction
from elixir_moe.specs import TRAINED_IN, param_specs, ranks_of
from elixir_moe.state import Wrapped, groups_needed, refuse_plain_state_dicts
from elixir_moe.units import find_units, order_of_first_use, registered_uses, traced_uses
from elixir_moe.updates import check_optimizer, is_adam, moments_of

M = TypeVar("M", bound=nn.Module)
_OTHER_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
"""Classes of torch that reduce or shard what they wrap."""


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
        sample: with `step`, a batch: ``step(model, sample)`` runs once, without gradients, to learn the order in which
            parameters are first used, which is the order they are packed in. By default the order of registration.
            With ``plan="auto"`` both are needed, and the step runs on tensors without data instead.
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
        ConfigError: the optimizer is not elementwise, has been stepped, or does not belong to the model.
        TierError: host memory or the disk is too small.
        CheckpointError: `weights` lacks something the model has on meta, or has it in another shape.
    """
    _check_arguments(model, optimizer, plan, sample, step, compute_dtype)
    _check_search(plan, step, hardware, budget_bytes, accumulation)
    _check_spill(plan, optimizer, spill, check_spill)
    device = _start(device)
    _check_modules(model)
    annotate_dtensors(model)
    megatron.check(model)
    staged = backend_of(dist.group.WORLD, device) == "gloo"  # type: ignore[arg-type]
    prediction = None
    if isinstance(plan, Plan):
        _check_data(model, weights, step)
        uses = registered_uses(model) if step is None else traced_uses(model, step, sample)
    else:
        _check_data(model, weights, None)
        assert step is not None, "checked above"
        request = Request(
            step=step,
            sample=sample,
            device=device,
            compute_dtype=compute_dtype,
            moments=moments_of(optimizer),
            staged=staged,
            hardware=None if hardware is None else os.fspath(hardware),
            budget_bytes=budget_bytes,
            accumulation=accumulation,
            spill=None if spill is None else os.fspath(spill),
            adam=is_adam(optimizer),
        )
        prediction = Prediction(*forecast(model, request))
        plan, uses = prediction.forecast.plan, list(prediction.forecast.uses)
    order = order_of_first_use(model, uses)
    specs = param_specs(model, order, everywhere=replicated_everywhere(), compute_dtype=compute_dtype)
    parameters = list(specs)
    layout = plan.layout(list(specs.values()))
    peers = _agree(model, plan, specs)
    spare = _check_blocks(model, uses, plan, layout, parameters)
    pretrained = None
    if weights is not None:
        pretrained = Pretrained(model, weights)
        pretrained.fill_buffers()

    size = footprint(plan, layout, moments=moments_of(optimizer), staged=staged)
    _check_host_memory(size.host_bytes + (size.device_bytes if device.type == "cpu" else 0))

    file = _open_spill(plan, layout, 1 + moments_of(optimizer), spill, check_spill)
    communicators = build_communicators([chunk.key.ranks for chunk in layout.chunks], device)
    homes = build_homes([(chunk, plan.home(layout, chunk)) for chunk in layout.chunks], device, file)
    cache = CacheState(plan.blocks(layout), prefetch=plan.prefetch)
    statistics = Statistics(cache=cache.counts)
    rcache = RCache(layout, plan.blocks(layout), homes, device, statistics)
    placeholder = Placeholder(device)
    named = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    keys = tuple(name for name in model.state_dict() if name in named)
    chunks = []
    for spec, home in zip(layout.chunks, homes, strict=True):
        members = [parameters[slot.param] for slot in spec.slots]
        _move_in(spec, members, home, communicators[spec.key.ranks], device, pretrained)
        names = [specs[member].name for member in members]
        chunks.append(Chunk(spec, members, names, home, communicators[spec.key.ranks], placeholder))
    if pretrained is not None:
        pretrained.settle()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))

    staging = torch.empty(size.staging_bytes, dtype=torch.uint8, device=device) if size.staging_bytes else None
    control = dist.new_group(backend="gloo", timeout=world_timeout())
    groups = make_groups([peers, *groups_needed(model, layout.chunks)], backend="gloo")
    agreement = Peers(groups[peers], chunks) if len(peers) > 1 else alone
    scheduler = Scheduler(chunks, cache, rcache, staging, device, statistics, agreement)
    hooks = Hooks(model, scheduler, placeholder, 1 if spare else 0)
    model.elixir = Wrapped(scheduler=scheduler, groups=groups, keys=keys)  # type: ignore[assignment]
    refuse_plain_state_dicts(model)
    sharded = ShardedOptimizer(
        optimizer, scheduler, hooks, control, groups, peers=peers, plan=plan, layout=layout, footprint=size, spill=file
    )
    if prediction is not None:
        sharded.prediction = prediction
        sharded.register_step_post_hook(prediction)
    model.zero_grad = sharded.zero_grad  # type: ignore[method-assign]
    return model, sharded


def _check_arguments(
    model: Any, optimizer: Any, plan: Any, sample: Any, step: Any, compute_dtype: torch.dtype | None
) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap needs a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"wrap needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not isinstance(plan, Plan) and plan != "auto":
        raise ConfigError(f"plan={plan!r}: expected an em.Plan, such as em.Plan.zero2(), or 'auto'")
    if (step is None) != (sample is None):
        raise ConfigError("sample and step go together: step(model, sample) is run to learn the order of first use")
    if step is not None and not callable(step):
        raise ConfigError(f"step={step!r}: expected a function of model and batch")
    if compute_dtype not in (None, *TRAINED_IN):
        raise ConfigError(f"compute_dtype={compute_dtype!r}: expected one of {TRAINED_IN}, or None")
    guarded = any(isinstance(parameter, Guarded) for parameter in model.parameters())
    if guarded or isinstance(optimizer, ShardedOptimizer) or any(hasattr(m, "elixir") for m in model.modules()):
        raise ConfigError("this model, a part of it or the optimizer is wrapped already: call wrap once, on the whole")
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if others := sorted(kinds & _OTHER_WRAPPERS):
        raise ConfigError(f"{others[0]} holds this model's parameters already: wrap the plain model instead")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise ConfigError("the model has lazy modules: run a forward before wrap, so that their shapes are known")
    check_optimizer(optimizer)
    names = {p: name for name, p in model.named_parameters()}
    given = {p for group in optimizer.param_groups for p in group["params"]}
    if not given <= names.keys():
        raise ConfigError("the optimizer has parameters that are not the model's: build it from model.parameters()")
    missing = [name for p, name in names.items() if p.requires_grad and p not in given]
    if missing:
        raise ConfigError(f"trainable parameters are in no param_group of the optimizer: {missing}; add or freeze them")


def _check_search(plan: Any, step: Any, hardware: Any, budget_bytes: Any, accumulation: Any) -> None:
    if plan != "auto":
        given = {"hardware": hardware, "budget_bytes": budget_bytes, "accumulation": accumulation}
        for name, default in (("hardware", None), ("budget_bytes", None), ("accumulation", 1)):
            if given[name] != default:
                raise ConfigError(
                    f"{name}={given[name]!r} means nothing for a given plan: leave it out, or plan='auto'"
                )
        return
    if step is None:
        raise ConfigError(
            "plan='auto' needs sample and step: a batch, and the forward of a training step, as in "
            "em.wrap(model, optimizer, plan='auto', sample=batch, step=lambda model, batch: loss)"
        )
    if hardware is not None and not isinstance(hardware, (str, os.PathLike)):
        raise ConfigError(f"hardware={hardware!r}: expected a machine's name, a file, or None to measure this one")
    if budget_bytes is not None and not is_whole(budget_bytes, least=1):
        raise ConfigError(f"budget_bytes={budget_bytes!r}: expected a whole number of bytes, at least 1, or None")
    if not is_whole(accumulation, least=1):
        raise ConfigError(f"accumulation={accumulation!r}: expected the number of backwards in a step, at least 1")


def _check_spill(plan: Any, optimizer: torch.optim.Optimizer, spill: Any, check_spill: Any) -> None:
    on_disk = plan.disk_chunks if isinstance(plan, Plan) else None
    if not isinstance(check_spill, bool):
        raise ConfigError(f"check_spill={check_spill!r}: expected True or False")
    if spill is None:
        if on_disk:
            raise ConfigError(f"the plan has disk_chunks={on_disk}: say with spill= in which folder their file goes")
        if check_spill:
            raise ConfigError("check_spill=True means nothing without spill=, the folder of what is on disk")
        return
    if not isinstance(spill, (str, os.PathLike)) or not str(spill) or "\0" in str(spill):
        raise ConfigError(f"spill={spill!r}: expected a folder, or None")
    if on_disk == 0:
        raise ConfigError(f"spill={os.fspath(spill)!r} means nothing for a plan without disk_chunks: leave it out")
    if not is_adam(optimizer):
        raise ConfigError(
            f"chunks on disk are updated by Adam and AdamW of torch, without amsgrad; this is "
            f"{type(optimizer).__name__}: use one of them, or leave spill and disk_chunks out"
        )


def _check_modules(model: nn.Module) -> None:
    """What forward does behind the back of autograd and hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"{name!r} is of torch.jit, which holds its parameters where wrap cannot reach: wrap the plain module, "
                f"not what torch.jit makes of it"
            )
        if getattr(module, "max_norm", None) is not None and dist.get_world_size() > 1:
            raise ConfigError(
                f"{name!r} writes to its weight in forward (max_norm), on each rank to the rows it meets: ranks would "
                f"diverge; clip row norms after optimizer.step() instead, on all ranks alike"
            )


def _check_data(model: nn.Module, weights: Any, step: Any) -> None:
    on_meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if on_meta and weights is None:
        raise LayoutError(
            f"{on_meta[0]!r} and {len(on_meta) - 1} more are on the meta device: pass weights=, a folder of "
            f"safetensors, or materialise the model before wrap"
        )
    if on_meta and step is not None:
        raise ConfigError("step cannot run a model on the meta device: leave step and sample out")


def _start(device: torch.device | str | None) -> torch.device:
    """Where forward runs; torch.distributed is started if nobody has.

    That makes this rank's GPU the current one, so it is asked for behind it; one that was named stays the current one.
    """
    _device(device)  # what is not there is refused before anything is started
    if not dist.is_initialized():
        init_mesh()
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
    everyone = gathered((peers, hashlib.sha256("\n".join(lines).encode()).hexdigest()))
    if all(everyone[rank] == everyone[theirs[0]] for theirs, _ in everyone for rank in theirs):
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


def _check_blocks(
    model: nn.Module, uses: list[Use], plan: Plan, layout: Layout, parameters: list[nn.Parameter]
) -> bool:
    """Raises PlanError if some module, or the order of modules, needs more blocks than there are.

    Returns whether there is a block to spare.
    """
    slot_of = {
        parameters[slot.param]: (chunk.index, i) for chunk in layout.chunks for i, slot in enumerate(chunk.slots)
    }
    blocks = plan.blocks(layout)
    for unit in find_units(model, slot_of):
        needed = [chunk for chunk in unit.chunks if not layout.chunks[chunk].resident]
        if len(needed) > blocks:
            raise PlanError(
                f"module {unit.name!r} needs {len(needed)} chunks at once, the rCache has {blocks} blocks of "
                f"{layout.chunk_numel} elements: set rcache_blocks to at least {len(needed)}, or a larger chunk_numel"
            )
    least = Walk(uses).schedule(layout).least_blocks()
    if least > blocks:
        raise PlanError(
            f"forward and backward of this model hold {least} chunks at once, the rCache has {blocks} blocks of "
            f"{layout.chunk_numel} elements: set rcache_blocks to at least {least}, or another chunk_numel"
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
