"""Which parameters may share a chunk: the chunk groups.

Owns `ParamSpec`, which is all that the pure part of the package knows about a parameter, the key that sorts parameters
into chunk groups, and the precision of their optimizer's state. Two parameters share a chunk group if one collective
can serve both, and one layout their state: the same ranks, compute dtype, trainability, gradient divisor, dtype of the
sum and precision. The key has the identity of the ranks, never their number: two process groups of equal size are
different.
Source: Elixir v1, sections IV-A ("parameters with different DP groups can not communicate together").
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import torch

from elixir_moe.kernels import CODE_BLOCK
from elixir_moe.names import Master, Moments


@dataclass(frozen=True, slots=True)
class StateArray:
    """One flat array of the optimizer's state of a shard, in memory or on disk."""

    name: str
    """For messages."""
    dtype: torch.dtype = torch.float32
    block: int = 1
    """Elements of the shard that share one of its elements."""

    def numel(self, shard_numel: int) -> int:
        """Its elements for so many of the shard."""
        return -(-shard_numel // self.block)

    def nbytes(self, shard_numel: int) -> int:
        """Its bytes for so many elements of the shard."""
        return self.numel(shard_numel) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How the optimizer's state of a parameter is stored. What is narrower than fp32 is rounded stochastically."""

    master: Master = "fp32"
    """bf16: there is no master besides the compute shard, in which the update writes the weight."""
    moments: Moments = "fp32"
    """int8: codes of 8 bits, and for each `CODE_BLOCK` elements an exponent of 8 bits (csrc/narrow.hpp)."""

    @property
    def is_narrow(self) -> bool:
        """Whether anything is narrower than fp32."""
        return (self.master, self.moments) != ("fp32", "fp32")

    def arrays(self, moments: int) -> tuple[StateArray, ...]:
        """The master and so many moments, where each has an array of its own: on disk."""
        kept = [StateArray("master", _DTYPES[self.master])]
        for name in (f"moment {number}" for number in range(1, moments + 1)):
            kept.append(StateArray(name, _DTYPES[self.moments]))
            if self.moments == "int8":
                kept.append(StateArray(f"exponents of {name}", torch.uint8, CODE_BLOCK))
        return tuple(kept)

    def moment_bytes(self, numel: int) -> int:
        """Bytes of one moment of a shard of `numel` elements."""
        return sum(array.nbytes(numel) for array in self.arrays(1)[1:])


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
WIDE = Precision()
"""The state that torch's optimizers keep."""
_ROUTERS = {"gate", "router"}
"""Names of the modules that send tokens to experts: those of this library and of Hugging Face's mixtures."""


def has_narrow_state(name: str, shape: Sequence[int], chosen: Sequence[str] | None) -> bool:
    """Whether a parameter's state is as the plan's `master` and `moments` say; else it is fp32.

    It is for parameters whose names match one of `chosen`, with ``*`` for anything. None chooses the matrices of
    repeated blocks: parameters with two or more dims and a number in their names, but for routers. Norms and biases
    have one dim, embeddings and heads no number.
    """
    if chosen is not None:
        return any(fnmatchcase(name, pattern) for pattern in chosen)
    parts = name.split(".")
    return len(shape) > 1 and any(part.isdecimal() for part in parts) and not _ROUTERS.intersection(parts)


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
    precision: Precision = WIDE
    """How the optimizer's state is stored."""

    @property
    def master_in_values(self) -> bool:
        """Whether the compute shard is the only weight at home, so that no gradient may take its place."""
        return self.trainable and (self.dtype == torch.float32 or self.precision.master == "bf16")

    @property
    def label(self) -> str:
        """A short name for tables and counters."""
        frozen = "" if self.trainable else " frozen"
        summed = "" if self.reduce_dtype == torch.float32 else " narrow sums"
        dtype = str(self.dtype).removeprefix("torch.")
        state = f" {self.precision.master}+{self.precision.moments}" if self.precision.is_narrow else ""
        return f"ranks {_ranges(self.ranks)} /{self.divisor} {dtype}{frozen}{summed}{state}"


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
    region: int | None = None
    """The part of the model that backward is known to recompute at once with the parameter, the outermost one."""

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
