"""Which parameters may share a chunk: the chunk groups.

Owns `ParamSpec`, which is all that the pure part of the package knows about a parameter, and the key that sorts
parameters into chunk groups. Two parameters share a chunk group if one collective can serve both: the same ranks,
compute dtype, trainability, gradient divisor and dtype of the sum. The key has the identity of the ranks, never their
number: two process groups of equal size are different.
Source: Elixir v1, sections IV-A ("parameters with different DP groups can not communicate together").
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, kw_only=True, slots=True, order=False)
class ChunkGroupKey:
    """The properties that all parameters of a chunk group share."""

    ranks: tuple[int, ...]
    """Global ranks of the replicate process group, in the order that numbers the shards."""
    dtype: torch.dtype
    """Compute dtype: the dtype of blocks and compute shards."""
    trainable: bool
    """Whether the chunks have gradients, master shards and moments."""
    divisor: int
    """The divisor of summed gradients (`Pattern.gradient_divisor`)."""
    reduce_dtype: torch.dtype = torch.float32
    """The dtype in which gradients are summed over the ranks: fp32, or `dtype`."""

    @property
    def label(self) -> str:
        """A short name for tables and counters."""
        frozen = "" if self.trainable else " frozen"
        summed = "" if self.reduce_dtype == torch.float32 else " narrow sums"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"ranks {_ranges(self.ranks)} /{self.divisor} {dtype}{frozen}{summed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter, as grouping and packing see it."""

    name: str
    """First name in the model."""
    shape: tuple[int, ...]
    """Shape of this rank's slice."""
    key: ChunkGroupKey
    """The chunk group it belongs to."""
    tied: bool = False
    """Used by several modules: its chunk has a buffer of its own and stays gathered during a step."""

    @property
    def numel(self) -> int:
        """Elements of this rank's slice."""
        return math.prod(self.shape)


def group_parameters(params: Iterable[ParamSpec]) -> dict[ChunkGroupKey, list[int]]:
    """Indices of the parameters of each chunk group; groups and parameters in order of first use."""
    groups: dict[ChunkGroupKey, list[int]] = {}
    for index, param in enumerate(params):
        groups.setdefault(param.key, []).append(index)
    return groups


def trainable_of(params: Iterable[ParamSpec]) -> dict[int, int]:
    """{index: number of elements} of the trainable parameters."""
    return {index: param.numel for index, param in enumerate(params) if param.key.trainable}


def _ranges(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f" step {step}" if step != 1 else "")
    return ",".join(map(str, ranks))
