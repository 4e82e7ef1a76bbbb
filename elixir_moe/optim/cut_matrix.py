"""Matrices that are cut over the axes of a mesh, as tensor parallelism does.

Owns the cuts of a parameter's matrices and this rank's slice of a whole one. The slices are joined by
`runtime.whole_updates`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.optim.muon import check_matrices
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.rules import UNCUT, pattern_of

Cut = tuple[tuple[int, ...], int]
"""(global ranks along an axis, the dim of the matrix on which they have slices)."""


def cuts_of(parameter: torch.Tensor) -> tuple[Cut, ...]:
    """The cuts of a parameter's matrices, the outermost first; cuts of a stack into stacks are none."""
    pattern, stacked = pattern_of(parameter) or UNCUT, local_of(parameter).dim() - 2
    return tuple(
        (pattern.mesh.ranks_along((axis,)), dim - stacked)
        for axis, dim in pattern.shard
        if dim >= stacked and pattern.mesh.size(axis) > 1
    )


def ranks_of_cuts(parameters: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    """The ranks of each process group that joins matrices of these parameters."""
    return {ranks for parameter in parameters for ranks, _ in cuts_of(parameter)}


def check_parts(whole: Mapping[nn.Parameter, str], groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises ConfigError for parameters that do not consist of the matrices that their groups name, and for a fused
    matrix that is cut over ranks: a rank's slice has parts of its parts.

    `whole` are the parameters that are updated as whole matrices, and `groups` those of all parameters.
    """
    for group in groups:
        parts = group.get("split_rows", 1), group.get("split_columns", 1)
        mine = [parameter for parameter in group["params"] if parameter in whole]
        for parameter in mine:
            if parts != (1, 1) and (cuts := cuts_of(parameter)):
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is cut over ranks {cuts[0][0]}, and its group has "
                    f"split_rows={parts[0]!r}, split_columns={parts[1]!r}: leave both out for it, or do not cut it"
                )
        check_matrices({**group, "params": mine})


def whole_shape(shape: tuple[int, int], cuts: Sequence[Cut]) -> tuple[int, int]:
    """Returns the shape of a whole matrix, given that of a slice."""
    rows, columns = (math.prod(len(ranks) for ranks, dim in cuts if dim == here) for here in (0, 1))
    return shape[0] * rows, shape[1] * columns


def slice_of(whole: torch.Tensor, cuts: Sequence[Cut], rank: int) -> torch.Tensor:
    """Returns the slice of global rank `rank`."""
    for ranks, dim in cuts:
        whole = whole.chunk(len(ranks), dim)[ranks.index(rank)]
    return whole
