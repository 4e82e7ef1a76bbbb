"""Unchanged Megatron-core models: patterns from Megatron's process groups and parameter attributes.

Owns the reading of Megatron: its process groups, the dim on which it shards each parameter, and which are experts.
Never imports Megatron before `annotate` is called.

The gradient that Megatron leaves in `parameter.grad` before its own DistributedDataParallel touches it, and its pattern
(dp includes context parallelism; P is the number of ranks of a pipeline stage)::

    sharded over tp                 the slice's gradient     replicate dp,     shard {tp: dim}     divisor dp
    sequence-parallel, q/k norms    a part on each tp rank   replicate dp, tp, partial tp          divisor dp
    anything else outside experts   all of it on each        replicate dp, tp                      divisor dp * tp
    experts                         of the tokens sent here  replicate edp, shard {ep: 0, tp: dim} divisor dp

Why dp for experts. A stage has P = dp * tp = edp * ep * etp ranks, and each token of the P / tp batches reaches one
replica of its expert, with the gradient of that batch's own mean loss. The sum over edp collects all of them, and the
mean over the batches is 1 / dp of it, for any ep and etp.

The logical parameter of an expert. Ranks along ep hold different experts under the same names, so the logical parameter
is all of them stacked along dim 0, which a pattern can express. `as_one_process` returns the names one process would
use.

A slice that is not along a dim of the tensor is one along a dim of a `Pattern.view` (F: a rank's hidden features)::

    first weight of a gated MLP     (2 F, n)          gate and up: viewed as (2, F, n), sharded on F
    the same in an expert                             viewed as (1, 2, F, n): ep stacks, tp shards F
    GroupedMLP.weight1              (hidden, e g F)   memory is (e, hidden, g, F), g = 2 if gated: ep e, tp F
    GroupedMLP.weight2              (e F, hidden)     memory is (e, F, hidden)

Routers count tokens, which Megatron's finalize_model_grads uses to balance the experts at the end of a step. That
function belongs to Megatron's data parallelism; `Routers` does the same for a wrapped model.
"""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import ConfigError, LayoutError, UsageError
from elixir_moe.parallel.pattern import EXPERT_AXIS, Pattern, RankMesh
from elixir_moe.parallel.rules import attach, pattern_of, replicated_everywhere
from elixir_moe.torch_private import process_groups

TRIED = ("0.16.", "0.19.")
"""Versions of megatron-core that this file is tested with."""
_CUT = {
    "ColumnParallel": {"weight": 0, "bias": 0},
    "RowParallel": {"weight": 1},
    "VocabParallel": {"weight": 0},
    "DotProductAttention": {"softmax_offset": 0},
}
"""{part of a class name: {parameter: tensor dim that is sharded over tensor-parallel ranks}}; ``weight0`` is a weight
too. The ``softmax_offset`` has one element per head of a rank, which no attribute of it tells."""
_EXPERTS = ("SequentialMLP", "GroupedMLP", "TEGroupedMLP")
_LATE = "weight gradients would arrive after the backward that awaits them"
_ONE_TENSOR = "a rank's experts become one tensor of TransformerEngine's own class"
_UNFIT = {
    "gradient_accumulation_fusion": "it writes gradients to main_grad, which Megatron's own data parallelism owns",
    "calculate_per_token_loss": "gradients are averaged over ranks here: return the mean loss of each micro-batch",
    "delay_wgrad_compute": _LATE,
    "overlap_dispatch_backward_with_experts_wgrad": _LATE,
    "moe_single_grouped_weight": _ONE_TENSOR,
    "moe_single_grouped_bias": _ONE_TENSOR,
    "finalize_model_grads_func": "em.wrap reduces gradients, and optimizer.step() updates the biases of experts",
}
"""Settings that bypass autograd for gradients or hide parameters, with the reason."""
_REPLACED = {
    "finish_grad_sync": "em.wrap reduces gradients, and optimizer.step() updates the biases of experts: do not call "
    "finalize_model_grads, and set config.finalize_model_grads_func = None",
    "zero_grad_buffer": "em.wrap keeps gradients in shards: call optimizer.zero_grad()",
}
"""Methods of Megatron's data parallelism that programs call, with their replacement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The two meshes of this pipeline stage's ranks: for dense layers and for experts."""

    dense: RankMesh
    """("dp", "tp"); ``dp`` includes context parallelism."""
    expert: RankMesh
    """("edp", "ep", "tp"); ``tp`` is tensor parallelism inside an expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A parameter under one of its names, with Megatron's facts about it."""

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    expert: bool
    cut: int | None
    """Tensor dim that is sharded over tensor-parallel ranks; None if it is not sharded."""
    partial: bool
    """Whether each tensor-parallel rank has a part of the gradient."""


def annotate(model: nn.Module) -> None:
    """Gives every parameter of a Megatron-core model, or of a pipeline stage, the pattern that Megatron built it with.

    Call it between building the model and `wrap`, after Megatron's ``initialize_model_parallel`` and without Megatron's
    DistributedDataParallel, which `wrap` replaces. An equivalent pattern given before is kept. Not collective.

    Warns once if this version of megatron-core has not been tested.

    Raises:
        ConfigError: model parallelism is not initialized; a setting bypasses autograd for gradients, puts experts into
            one tensor of TransformerEngine, or leaves work to Megatron's own data parallelism.
        LayoutError: the model was built on other process groups than Megatron has now; a pattern given by hand, or
            another name of a tied parameter, contradicts Megatron's attributes; pipeline stages share a weight;
            tensor-parallel ranks shard a state-space mixer (Mamba, gated delta net).
    """
    import megatron.core

    if not megatron.core.__version__.startswith(TRIED):
        warnings.warn(
            f"megatron-core {megatron.core.__version__} has not been tested ({' and '.join(f'{v}x' for v in TRIED)} "
            f"have): compare a few steps with your own data parallelism before you trust it",
            stacklevel=2,
        )
    for parameter, pattern in _derive(model).items():
        attach(parameter, pattern_of(parameter, pattern) or pattern)


def check(model: nn.Module) -> None:
    """Compares the patterns of a Megatron-core model with Megatron's attributes; does nothing for other models.

    Raises:
        LayoutError: a parameter's pattern, or the lack of one, contradicts the attributes.
    """
    core: ModuleType | None = sys.modules.get("megatron.core.parallel_state")
    if core is None or not core.model_parallel_is_initialized():
        return
    if any(_of_megatron(type(module)) for module in model.modules()):
        _derive(model, complete=True)


def refuse_replaced(model: nn.Module) -> None:
    """Makes methods that Megatron's data parallelism and checkpoints call on a wrapped model raise UsageError."""
    modules = [module for module in model.modules() if _megatron_classes(type(module))]
    for module in modules:
        if hasattr(module, "sharded_state_dict"):
            module.sharded_state_dict = partial(  # type: ignore[assignment]
                _refuse,
                "model.sharded_state_dict() of a wrapped model: its parameters are in shards. Save with "
                "em.save(folder, model, optimizer) and load with em.load(folder, model, optimizer); load a checkpoint "
                "of megatron.core.dist_checkpointing before em.wrap",
            )
    for method, instead in _REPLACED.items() if modules else ():
        setattr(model, method, partial(_refuse, f"model.{method}() of a wrapped model: {instead}"))


def _refuse(message: str, *_: object, **__: object) -> NoReturn:
    raise UsageError(message)


class Routers:
    """The routers of a Megatron model, and the balancing of experts that its `finalize_model_grads` would do.

    A router counts its tokens in every forward that records gradients. Other models have no such routers.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keeps counts and biases in fp32, even in a model that was converted to 16 bits."""
        self._routers: list[Any] = [m for m in model.modules() if _named_so(type(m), ("TopKRouter",))]
        for router in self._routers:
            for name, buffer in router._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    router._buffers[name] = buffer.float()

    @torch.no_grad()
    def end_step(self) -> None:
        """Moves the biases of experts towards balance, given the tokens of all ranks, and resets the counts.

        Collective if a router in training mode has biases.

        Source: https://arxiv.org/abs/2408.15664, as in Megatron's ``get_updated_expert_bias``.
        """
        biased = [r for r in self._routers if r.enable_expert_bias and r.training]
        biased = [r for r in biased if not getattr(r, "frozen_expert_bias", False)]  # an attribute since 0.19
        if biased:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            counts = torch.cat([router.local_tokens_per_expert for router in biased])
            with Wait("the sum of the tokens of each expert", dist.get_process_group_ranks(group)):
                dist.all_reduce(counts, group=group)
            for router, tokens in zip(biased, counts.split([len(r.expert_bias) for r in biased]), strict=True):
                missing = tokens.sum() / len(tokens) - tokens
                router.expert_bias += torch.sign(missing) * router.config.moe_router_bias_update_rate
        self.forget_counts()

    def forget_counts(self) -> None:
        """Resets the counts for the biases, and those for an auxiliary loss over the batches of a step."""
        for router in self._routers:
            if router.enable_expert_bias:
                router.local_tokens_per_expert.zero_()
            router.reset_global_aux_loss_tracker()


class TokenDispatchers:
    """Megatron's token dispatchers, which keep parts of a forward: each micro-batch has attributes of its own.

    The global memory buffer is one of them: it holds the input of a product that then asks for its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if _of_megatron(type(module))]
        found = [layer.token_dispatcher for layer in layers if hasattr(layer, "token_dispatcher")]
        self._dispatchers = [*found, *(one._comm_manager for one in found if hasattr(one, "_comm_manager"))]
        buffer = getattr(sys.modules.get("megatron.core.parallel_state"), "_GLOBAL_MEMORY_BUFFER", None)
        if layers and buffer is not None:
            buffer.buffer = {}
            self._dispatchers.append(buffer)
        self._before = self._present()
        self._left: dict[int, list[dict[str, Any]]] = {}
        """By micro-batch: the attributes when its turn ended."""

    def _present(self) -> list[dict[str, Any]]:
        return [dict(vars(dispatcher)) for dispatcher in self._dispatchers]

    def suspend(self, number: int) -> None:
        """Keeps the attributes that a micro-batch leaves."""
        self._left[number] = self._present()

    def resume(self, number: int) -> None:
        """Restores the attributes that a micro-batch has left, or those before the first one."""
        for dispatcher, kept in zip(self._dispatchers, self._left.pop(number, self._before), strict=True):
            own = {name: dict(value) if type(value) is dict else value for name, value in kept.items()}
            vars(dispatcher).clear()
            vars(dispatcher).update(own)


def as_one_process(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames `state`, a `full_state_dict` of an annotated Megatron model, to the names that one process would use.

    Experts get their numbers among all experts of the layer. Layers keep their numbers within the pipeline stage. Not
    collective.
    """
    whole: dict[str, Tensor] = {}
    found = {item.name: item for item in _owned(model)}
    for name, value in state.items():
        item = found.get(name)
        pattern = None if item is None else pattern_of(item.parameter)
        if item is None or pattern is None or not item.expert or _named_so(type(item.owner), ("GroupedMLP",)):
            whole[name] = value
        else:
            for rank, part in enumerate(value.chunk(pattern.mesh.size(EXPERT_AXIS))):
                whole[_renumber(model, item, rank)] = part
    return whole


# ------------------------------------------------------------------------------------------------------------- reading


def _derive(model: nn.Module, *, complete: bool = False) -> dict[nn.Parameter, Pattern]:
    """Returns the pattern of each parameter. Raises LayoutError with all contradictions."""
    _refuse_settings(model)
    grid = _grid()
    problems = list(_foreign_groups(model, grid))
    patterns: dict[nn.Parameter, tuple[str, Pattern]] = {}
    for item in _owned(model):
        problems += _contradictions(item, grid)
        pattern = _pattern(item, grid)
        first, chosen = patterns.setdefault(item.parameter, (item.name, pattern))
        if chosen != pattern:
            problems.append(
                f"parameter {item.name!r} is tied to {first!r}, which has another pattern ({chosen}, not {pattern}): "
                f"one tensor has one pattern"
            )
        given = pattern_of(item.parameter, replicated_everywhere() if complete else pattern)
        assert given is not None
        if _meaning(given) != _meaning(pattern):
            problems.append(
                f"parameter {item.name!r} has the {given}, but Megatron built it with {pattern}: let "
                f"em.megatron.annotate(model) set it"
            )
    if problems:
        raise LayoutError("Megatron model: " + "\n  ".join(problems))
    return {parameter: pattern for parameter, (_, pattern) in patterns.items()}


def _grid() -> Grid:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "Megatron's model parallelism is not initialized: call parallel_state.initialize_model_parallel(...) "
            "before the model is built"
        )
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dense = _mesh(
        dp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        tp=parallel_state.get_tensor_model_parallel_group(),
    )
    expert = _mesh(
        edp=parallel_state.get_expert_data_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        tp=parallel_state.get_expert_tensor_parallel_group(),
    )
    for mesh in (dense, expert):
        if sorted(mesh.ranks) != sorted(dist.get_process_group_ranks(stage)):
            raise LayoutError(
                f"Megatron's process groups do not form a grid: {dict(zip(mesh.axes, mesh.sizes, strict=True))} gives "
                f"ranks {mesh.ranks}, its stage has {sorted(dist.get_process_group_ranks(stage))}"
            )
    return Grid(dense=dense, expert=expert)


def _mesh(**axes: dist.ProcessGroup) -> RankMesh:
    """Returns the mesh whose axes through this rank are these process groups; other groups are shifts of these."""
    rank = dist.get_rank()
    along = {axis: dist.get_process_group_ranks(group) for axis, group in axes.items()}
    ranks = [rank]
    for members in along.values():
        ranks = [start + member - rank for start in ranks for member in members]
    return RankMesh(axes=tuple(axes), sizes=tuple(map(len, along.values())), ranks=tuple(ranks), rank=rank)


def _owned(model: nn.Module) -> Iterator[Owned]:
    """Yields every parameter under every name."""
    experts = {id(p) for m in model.modules() if _named_so(type(m), _EXPERTS) for p in m.parameters()}
    for path, owner in model.named_modules():
        split_heads = path.endswith(("q_layernorm", "k_layernorm")) and not _inside_latent_attention(model, path)
        for name, parameter in owner.named_parameters(recurse=False):
            yield Owned(
                name=f"{path}.{name}".lstrip("."),
                parameter=parameter,
                owner=owner,
                expert=id(parameter) in experts or not getattr(parameter, "allreduce", True),
                cut=_cut(owner, name, parameter),
                partial=split_heads or bool(getattr(parameter, "sequence_parallel", False)),
            )


def _inside_latent_attention(model: nn.Module, path: str) -> bool:
    """Whether the norm at `path` is shared by all heads; other q/k norms belong to a rank's own heads."""
    parent = model.get_submodule(path.rpartition(".")[0])
    return path.endswith("kv_layernorm") or _named_so(type(parent), ("MultiLatentAttention",))


def _pattern(item: Owned, grid: Grid) -> Pattern:
    mesh = grid.expert if item.expert else grid.dense
    view, dim = _view(item)
    cut = {} if dim is None else {"tp": dim}
    seen: dict[str, Any] = {} if view is None else {"view": view, "grows": item.cut}
    if item.expert:
        return Pattern(
            mesh,
            replicate=("edp",) if cut else ("edp", "tp"),
            shard={EXPERT_AXIS: 0, **cut},
            divisor=grid.dense.size("dp"),
            **seen,
        )
    if cut:
        return Pattern(mesh, replicate=("dp",), shard=cut, **seen)
    return Pattern(mesh, replicate=("dp", "tp"), partial=("tp",) if item.partial else ())


def _view(item: Owned) -> tuple[tuple[int, ...] | None, int | None]:
    """Returns `Pattern.view`, and its dim that is sharded over tensor-parallel ranks (see the top of this file)."""
    owner: Any = item.owner
    shape = item.parameter.shape
    gated = bool(getattr(getattr(owner, "config", None), "gated_linear_unit", False))
    if item.cut is not None and _named_so(type(owner), ("GroupedMLP",)):
        experts, hidden = owner.num_local_experts, owner.config.hidden_size
        if item.cut == 0:
            return (experts, shape[0] // experts, hidden), 1
        pieces = 1 + gated
        return (experts, hidden, pieces, shape[1] // experts // pieces), 3
    pieces = 2 if gated and "linear_fc1" in item.name.split(".") else getattr(item.parameter, "partition_stride", 1)
    if item.cut != 0 or pieces == 1:
        return None, item.cut
    return (*(1,) * item.expert, pieces, shape[0] // pieces, *shape[1:]), 1 + item.expert


def _cut(owner: nn.Module, name: str, parameter: nn.Parameter) -> int | None:
    """Returns the sharded dim, by class if known, else by the parameter's attributes.

    Uninitialized weights lack the attributes, and Transformer Engine always sets them.
    """
    if _named_so(type(owner), ("GroupedMLP",)):
        return {"weight1": 1, "weight2": 0}.get(name)
    for kind, dims in _CUT.items():
        if any(kind in cls.__name__ for cls in _megatron_classes(type(owner))):
            return dims.get(name.rstrip("0123456789"))
    if _named_so(type(owner), ("TELinear",)):
        dims = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}.get(str(owner.parallel_mode), {})
        return dims.get(name)
    return _attribute(parameter)


def _attribute(parameter: nn.Parameter) -> int | None:
    dim: int = getattr(parameter, "partition_dim", -1)
    return dim if dim >= 0 and getattr(parameter, "tensor_model_parallel", False) else None


def _megatron_classes(kind: type) -> list[type]:
    return [cls for cls in kind.__mro__ if _of_megatron(cls)]


def _of_megatron(kind: type) -> bool:
    return kind.__module__.startswith("megatron.core.")


def _named_so(kind: type, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in _megatron_classes(kind))


# -------------------------------------------------------------------------------------------------------------- checks


def _refuse_settings(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "ddp_config"):
            raise ConfigError(
                f"module {name or type(module).__name__!r} is in Megatron's own data parallelism, which em.wrap "
                f"replaces: pass the bare model"
            )
        config: Any = getattr(module, "config", None)
        if not _megatron_classes(type(config)):
            continue
        kind = type(config).__name__
        for setting, why in _UNFIT.items():
            if getattr(config, setting, False):
                off = None if callable(getattr(config, setting)) else False
                raise ConfigError(f"{kind}.{setting} is on, but {why}: set {setting}={off}")
        if max(getattr(config, f"{which}gtp_weight_remat_size", 1) for which in ("", "expert_")) > 1:
            raise ConfigError(
                f"{kind} shards weights over more ranks than tensor parallelism has, and gathers them itself: set "
                f"tensor_parallel_num_weight_shards and expert_tensor_parallel_num_weight_shards to None"
            )
        if "quantile_balancing" in getattr(config, "moe_router_load_balancing_type", ()):
            raise ConfigError(
                f"{kind}.moe_router_load_balancing_type is 'quantile_balancing', whose biases only the "
                f"finalize_model_grads of Megatron's own data parallelism updates: use moe_router_enable_expert_bias, "
                f"or one of 'aux_loss', 'seq_aux_loss' and 'global_aux_loss'"
            )


def _foreign_groups(model: nn.Module, grid: Grid) -> Iterator[str]:
    """Yields an error for each module that was built on other process groups than Megatron has now."""
    experts = {id(m) for e in model.modules() if _named_so(type(e), _EXPERTS) for m in e.modules()}
    for name, module in model.named_modules():
        if not _of_megatron(type(module)) or not any(True for _ in module.parameters()):
            continue
        # In layers of TransformerEngine `tp_group` is None if Megatron's dispatcher replaces it; `_tp_group` is not.
        tensor_parallel = "_tp_group" if hasattr(module, "_tp_group") else "tp_group"
        for attribute, axis in ((tensor_parallel, "tp"), ("ep_group", EXPERT_AXIS)):
            if not hasattr(module, attribute):
                continue
            mesh = grid.expert if id(module) in experts or axis == EXPERT_AXIS else grid.dense
            built, now = _ranks(getattr(module, attribute)), mesh.ranks_along((axis,))
            if built != now:
                yield (
                    f"module {name or type(module).__name__!r} was built with {attribute} {list(built) or 'none'}, "
                    f"Megatron's is {list(now)} now: call initialize_model_parallel(...) before the model is built"
                )


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Returns the ranks of a process group; empty if it is None or has been destroyed."""
    alive = group is not None and group in process_groups()
    return tuple(dist.get_process_group_ranks(group)) if alive else ()


def _contradictions(item: Owned, grid: Grid) -> Iterator[str]:
    # TransformerEngine reports dim 0 for every weight that it does not shard itself.
    unknown = getattr(item.owner, "parallel_mode", "known") is None
    stated = None if unknown else _attribute(item.parameter)
    if stated is not None and item.cut is not None and stated != item.cut:
        yield (
            f"parameter {item.name!r} has partition_dim={stated}, but {type(item.owner).__name__} shards it on dim "
            f"{item.cut}"
        )
    if item.cut is not None and item.cut >= item.parameter.dim():
        yield f"parameter {item.name!r} {tuple(item.parameter.shape)} has no dim {item.cut}, on which it is sharded"
    marked = not unknown and getattr(item.parameter, "tensor_model_parallel", False)
    no_dim = marked and stated is None and item.cut is None
    state_space = any(cls.__module__.startswith("megatron.core.ssm.") for cls in type(item.owner).__mro__)
    if (no_dim or state_space) and grid.dense.size("tp") > 1:
        yield (
            f"parameter {item.name!r} of a {type(item.owner).__name__} is sharded in a way that Megatron's attributes "
            f"do not describe (as in Mamba and gated delta nets): build the model with tensor_model_parallel_size=1"
        )
    if item.expert and item.cut is None and grid.expert.size("tp") > 1:
        yield (
            f"parameter {item.name!r} of an expert is not sharded over the {grid.expert.size('tp')} tensor-parallel "
            f"ranks inside experts: each of them would add it once"
        )
    if getattr(item.parameter, "shared_embedding", False) or getattr(item.parameter, "pipeline_parallel", False):
        yield (
            f"parameter {item.name!r} is shared by several pipeline stages, each of which shards its own parameters: "
            f"build the model with share_embeddings_and_output_weights=False, or without pipeline stages"
        )


def _meaning(pattern: Pattern) -> tuple[Any, ...]:
    """Returns the content of a pattern without the names of its axes."""
    mesh = pattern.mesh
    cuts = [(mesh.ranks_along((axis,)), dim) for axis, dim in pattern.shard if mesh.size(axis) > 1]
    return pattern.replicate_ranks, pattern.gradient_divisor, tuple(cuts), pattern.view


# ------------------------------------------------------------------------------------------------- back to one process


def _renumber(model: nn.Module, item: Owned, rank: int) -> str:
    """Returns the name that one process gives to the parameter that rank `rank` of ep holds under this name."""
    parts = item.name.split(".")
    if "local_experts" in parts:  # SequentialMLP: a list of modules
        at = parts.index("local_experts") + 1
        local = len(list(model.get_submodule(".".join(parts[:at])).children()))
        parts[at] = str(rank * local + int(parts[at]))
        return ".".join(parts)
    stem = item.name.rstrip("0123456789")  # TEGroupedMLP: weight0, weight1, ... of one module
    if stem == item.name:
        return item.name
    local = int(item.owner.num_gemms)  # type: ignore[arg-type]
    return f"{stem}{rank * local + int(item.name[len(stem) :])}"
