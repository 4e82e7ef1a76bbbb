"""What the pure part of the package is told of a model's parameters, for `wrap` and for the planner alike.

Owns the way from a parameter with its pattern to a `ParamSpec`, and who holds the model at all. Looks at shapes and
dtypes, never at data.
"""

from collections.abc import Iterable

import torch
from torch import nn

from elixir_moe.chunks.group import ChunkGroupKey, ParamSpec
from elixir_moe.errors import LayoutError
from elixir_moe.parallel.annotate import names_of, pattern_of
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.pattern import Pattern

TRAINED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Compute dtypes of trainable parameters."""


def param_specs(
    model: nn.Module, order: Iterable[nn.Parameter], *, everywhere: Pattern, compute_dtype: torch.dtype | None
) -> dict[nn.Parameter, ParamSpec]:
    """The specs of the model's parameters, in `order`; one that has several names is tied, and so resident.

    Args:
        model: the model they belong to.
        order: its parameters, each once.
        everywhere: the pattern of those that have none of their own.
        compute_dtype: of floating-point parameters whose pattern names no dtype; None is their own.

    Raises:
        LayoutError: a trainable parameter would be trained in a dtype that has no fp32 master.
    """
    names = names_of(model)
    ranks: dict[int, tuple[int, ...]] = {}  # by pattern, which many parameters share: there may be thousands of ranks
    found = {}
    for p in order:
        pattern = pattern_of(p) or everywhere
        if id(pattern) not in ranks:
            ranks[id(pattern)] = pattern.replicate_ranks
        found[p] = _spec(p, names[p], pattern, ranks[id(pattern)], compute_dtype)
    return found


def ranks_of(model: nn.Module, everywhere: Pattern) -> tuple[int, ...]:
    """The ranks that wrap this model: all in the meshes of its patterns. Another pipeline stage has others."""
    patterns = [pattern_of(p) or everywhere for p in model.parameters()]
    return tuple(sorted({rank for pattern in patterns for rank in pattern.mesh.ranks})) or everywhere.mesh.ranks


def _spec(
    parameter: nn.Parameter,
    names: list[str],
    pattern: Pattern,
    ranks: tuple[int, ...],
    compute_dtype: torch.dtype | None,
) -> ParamSpec:
    dtype = pattern.dtype or (compute_dtype if parameter.is_floating_point() else None) or parameter.dtype
    if parameter.requires_grad and dtype not in TRAINED_IN:
        raise LayoutError(
            f"parameter {names[0]!r} would be trained in {dtype}, but master shards are float32: convert it, or pass "
            f"compute_dtype"
        )
    key = ChunkGroupKey(ranks=ranks, dtype=dtype, trainable=parameter.requires_grad, divisor=pattern.gradient_divisor)
    return ParamSpec(name=names[0], shape=tuple(local_of(parameter).shape), key=key, resident=len(names) > 1)
