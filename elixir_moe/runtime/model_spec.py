"""The description of a model before it is packed, for `wrap` and for the planner.

Owns `ModelSpec`, the conversion of a parameter with its pattern to a `ParamSpec`, and the set of ranks that hold the
model. Reads shapes and dtypes, never data.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from elixir_moe.chunks.cache_policy import Schedule, advice
from elixir_moe.chunks.events import StepEvent, by_first_use
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.param_spec import WIDE, ChunkGroupKey, ParamSpec, Precision, has_narrow_state, trainable_of
from elixir_moe.chunks.plan import Plan
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.chunks.units import regions_of
from elixir_moe.errors import ConfigError, LayoutError, PlanError
from elixir_moe.kernels import CODE_BLOCK
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.pattern import Pattern
from elixir_moe.parallel.rules import names_of, pattern_of, replicated_everywhere
from elixir_moe.parallel.state_dict import keys_of, persistent_buffers
from elixir_moe.parallel.tiles import tile_of
from elixir_moe.runtime.units import Parts

TRAINED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Compute dtypes of trainable parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model before it is packed: its parameters in order of first use, its parts, and how a step walks over them."""

    parameters: tuple[nn.Parameter, ...]
    params: tuple[ParamSpec, ...]
    """The description of each parameter for packing."""
    names: dict[nn.Parameter, list[str]]
    """All names of each parameter, in the model's order; later parametrisations do not change them."""
    buffers: tuple[str, ...]
    """All names of the buffers that torch saves."""
    keys: dict[str, str | None]
    """The result of `state_dict.keys_of`: what the model's own state dict has, in its order."""
    parts: Parts
    """The parts, with parameters numbered as in `parameters`."""
    step_order: StepOrder
    ranks: tuple[int, ...]
    """All ranks that wrap this model; other pipeline stages have other ranks."""

    def layout(self, plan: Plan) -> tuple[Layout, Schedule]:
        """The layout under `plan`, and a step's requests. Raises PlanError for too few blocks or too short a chunk."""
        layout = plan.layout(self.params)
        schedule = self.step_order.schedule(layout)
        layout = replace(layout, open_gradients=schedule.open_gradients())
        blocks = plan.blocks(layout)
        if (least := schedule.least_blocks()) > blocks:
            part, own = self.step_order.widest(layout)
            raise PlanError(
                f"forward and backward of this model hold {least} blocks at once, module {self.parts.names[part]!r} "
                f"by itself {own}; the rCache has {blocks} of {layout.chunk_numel} elements: {advice(least)}"
            )
        return layout, schedule


def describe(
    model: nn.Module,
    parts: Parts,
    events: Sequence[StepEvent],
    compute_dtype: torch.dtype | None,
    plan: Plan,
    trained_whole: Mapping[nn.Parameter, str] | None = None,
) -> ModelSpec:
    """The description of `model`, whose `parts` and `events` number parameters as ``model.parameters()`` gives them.

    The `events` are those of a step, or of its forward only. Of the `plan` count the dtype of sums and the precision
    of state. `trained_whole` is that of `param_specs`.

    Raises:
        LayoutError, ConfigError: as `param_specs`; also if no trainable parameter is computed in `reduce_dtype`.
    """
    reduce_dtype = plan.reduce_dtype
    registered, everywhere = list(model.parameters()), replicated_everywhere()
    order, part_specs, events = by_first_use(parts.specs, events, len(registered))
    parameters = tuple(registered[i] for i in order)
    specs = param_specs(
        model,
        parameters,
        everywhere=everywhere,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        precision=plan.precision,
        narrow_state=plan.narrow_state,
        trained_whole=trained_whole,
    )
    regions = regions_of(part_specs)
    params = tuple(replace(spec, region=regions.get(i)) for i, spec in enumerate(specs.values()))
    computed_in = dict.fromkeys(spec.key.dtype for spec in params if spec.key.trainable)
    if reduce_dtype not in (None, torch.float32, *computed_in) and computed_in:
        raise ConfigError(
            f"the plan has reduce_dtype={reduce_dtype}, and trainable parameters are computed in "
            f"{', '.join(map(str, computed_in))}: expected one of these, torch.float32 or None"
        )
    return ModelSpec(
        parameters=parameters,
        params=params,
        names={p: names for p, names in names_of(model).items() if isinstance(p, nn.Parameter)},
        buffers=tuple(chain(*persistent_buffers(model).values())),
        keys=keys_of(model),
        parts=replace(parts, specs=part_specs),
        step_order=StepOrder(part_specs, events, trainable_of(params)),
        ranks=ranks_of(model, everywhere),
    )


def param_specs(
    model: nn.Module,
    order: Iterable[nn.Parameter],
    *,
    everywhere: Pattern,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    precision: Precision = WIDE,
    narrow_state: Sequence[str] | None = None,
    trained_whole: Mapping[nn.Parameter, str] | None = None,
) -> dict[nn.Parameter, ParamSpec]:
    """The specs of the model's parameters, in `order`; a parameter with several names is tied.

    Args:
        model: the model they belong to.
        order: the model's parameters, each once.
        everywhere: the pattern of parameters that have none.
        compute_dtype: the dtype of floating-point parameters whose pattern names none; None keeps each one's own. All
            others keep theirs, such as the bytes of quantized weights.
        reduce_dtype: the dtype of their sums over ranks, for parameters in this dtype whose pattern names none.
        precision: that of the state of parameters with narrow state.
        narrow_state: which these are, as in the plan.
        trained_whole: {parameter that is updated as a whole matrix: the optimizer of `WHOLE_MATRIX` that does it}.

    Raises:
        LayoutError: a trainable parameter would be trained in a dtype that has no fp32 master.
        ConfigError: a pattern's `reduce_dtype` is neither fp32 nor the compute dtype; the state is narrow and no
            parameter has it; a parameter whose master is to be bf16 is computed in another dtype; a tile begins
            inside a block of int8 moments; or a parameter that is updated as a whole matrix is cut.
    """
    names = names_of(model)
    ranks: dict[int, tuple[int, ...]] = {}  # found once a pattern: there may be thousands of ranks
    found = {}
    for p in order:
        pattern = pattern_of(p) or everywhere
        if id(pattern) not in ranks:
            ranks[id(pattern)] = pattern.replicate_ranks
        found[p] = _spec(p, names[p], pattern, ranks[id(pattern)], compute_dtype, reduce_dtype)
        if precision.is_narrow and p.requires_grad and has_narrow_state(names[p][0], found[p].shape, narrow_state):
            found[p] = replace(found[p], key=_narrowed(p, found[p], precision))
        if p.requires_grad and (optimizer := (trained_whole or {}).get(p)) is not None:
            _check_matrices(p, found[p], pattern, optimizer)
            rows, columns = pattern.global_shape(found[p].shape)[-2:]
            joined_over = tuple(
                pattern.mesh.ranks_along((axis,))
                for axis, dim in pattern.shard
                if dim >= len(found[p].shape) - 2 and pattern.mesh.size(axis) > 1
            )
            key = replace(found[p].key, optimizer=optimizer)
            found[p] = replace(found[p], key=key, matrix=(rows, columns), joined_over=joined_over)
    trainable = [spec.name for spec in found.values() if spec.key.trainable]
    if precision.is_narrow and trainable and not any(spec.key.precision.is_narrow for spec in found.values()):
        raise ConfigError(
            f"the plan has master={precision.master!r} and moments={precision.moments!r}, and no trainable parameter "
            f"has state like that ({narrow_state or 'matrices of repeated blocks'}); names are as {trainable[:3]}: say "
            f"which with dataclasses.replace(plan, narrow_state=(...))"
        )
    return found


def _narrowed(p: nn.Parameter, spec: ParamSpec, precision: Precision) -> ChunkGroupKey:
    if precision.master == "bf16" and spec.key.dtype != torch.bfloat16:
        raise ConfigError(
            f"master='bf16': parameter {spec.name!r} is computed in {spec.key.dtype}, and its compute shard is to be "
            f"the master: wrap with compute_dtype=torch.bfloat16, or leave the parameter out with narrow_state"
        )
    first = 0 if (tile := tile_of(p)) is None else tile.start * math.prod(spec.shape[1:])
    if precision.moments == "int8" and first % CODE_BLOCK:
        raise ConfigError(
            f"moments='int8': a tile of parameter {spec.name!r} begins at element {first}, inside a block of "
            f"{CODE_BLOCK} that share an exponent: tile with a larger at_most, so that a tile holds a whole number of "
            f"blocks, take moments='bf16', or leave the parameter out with narrow_state"
        )
    return replace(spec.key, precision=precision)


def _check_matrices(p: nn.Parameter, spec: ParamSpec, pattern: Pattern, optimizer: str) -> None:
    """Raises ConfigError unless the ranks' slices of a parameter can be joined to whole matrices."""
    cut, otherwise = None, ""
    if (tile := tile_of(p)) is not None and len(spec.shape) == 2:
        cut, otherwise = (
            "a tile of a matrix",
            f", or give em.tile an at_most of {tile.rows * p[0].nbytes} bytes or more",
        )
    elif pattern.view is not None and any(pattern.mesh.size(axis) > 1 for axis, _ in pattern.shard):
        cut = f"cut over the axes {[axis for axis, _ in pattern.shard]} in several groups of rows"
    if cut is not None:
        raise ConfigError(
            f"parameter {spec.name!r} is {cut}, and {optimizer} updates whole matrices: train it with an elementwise "
            f"optimizer instead, as in em.wrap(model, (muon, adamw), plan=...){otherwise}"
        )


def ranks_of(model: nn.Module, everywhere: Pattern) -> tuple[int, ...]:
    """The ranks that wrap this model: all in the meshes of its patterns. Other pipeline stages have other ranks."""
    patterns = [pattern_of(p) or everywhere for p in model.parameters()]
    return tuple(sorted({rank for pattern in patterns for rank in pattern.mesh.ranks})) or everywhere.mesh.ranks


def _spec(
    parameter: nn.Parameter,
    names: list[str],
    pattern: Pattern,
    ranks: tuple[int, ...],
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> ParamSpec:
    computed_in = (pattern.dtype or compute_dtype) if parameter.is_floating_point() else None  # bytes stay bytes
    dtype = computed_in or parameter.dtype
    if parameter.requires_grad and dtype not in TRAINED_IN:
        raise LayoutError(
            f"parameter {names[0]!r} would be trained in {dtype}, but master shards are float32: convert it, or pass "
            f"compute_dtype"
        )
    own = pattern.reduce_dtype
    if own not in (None, torch.float32, dtype) and parameter.requires_grad:
        raise ConfigError(
            f"parameter {names[0]!r}: its pattern has reduce_dtype={own}, and its compute dtype is {dtype}: expected "
            f"torch.float32, {dtype} or None"
        )
    narrow = parameter.requires_grad and (own or reduce_dtype) == dtype
    key = ChunkGroupKey(
        ranks=ranks,
        dtype=dtype,
        trainable=parameter.requires_grad,
        divisor=pattern.gradient_divisor,
        reduce_dtype=dtype if narrow else torch.float32,
    )
    tile = tile_of(parameter)
    name = names[0] if tile is None else f"{names[0]}[{tile.start}:{tile.stop}]"
    return ParamSpec(name=name, shape=tuple(local_of(parameter).shape), key=key, tied=len(names) > 1 and tile is None)
