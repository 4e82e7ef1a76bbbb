"""The chunk groups: which parameters may share a chunk.

Owns `ParamSpec` (all that the pure part of the package knows about a parameter), the key that sorts parameters into
chunk groups, and the precision of their optimizer state. Two parameters share a chunk group if one collective can serve
both, and their state has one layout: the same ranks, compute dtype, trainability, gradient divisor, dtype of the sum,
precision and kind of optimizer. The key contains the ranks themselves, never only their number: two process groups of
equal size differ. Never looks at a tensor.
Source: Elixir v1, section IV-A ("parameters with different DP groups can not communicate together").
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
    """One flat array of the optimizer state of a shard, in memory or on disk."""

    name: str
    """Used in messages."""
    dtype: torch.dtype = torch.float32
    block: int = 1
    """Number of elements of the shard that share one element of the array."""

    def numel(self, shard_numel: int) -> int:
        """Elements of the array for a shard of `shard_numel` elements."""
        return -(-shard_numel // self.block)

    def nbytes(self, shard_numel: int) -> int:
        """Bytes of the array for a shard of `shard_numel` elements."""
        return self.numel(shard_numel) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of a parameter's optimizer state. Anything narrower than fp32 is rounded stochastically."""

    master: Master = "fp32"
    """With bf16 there is no separate master: the update writes the compute shard."""
    moments: Moments = "fp32"
    """int8: codes of 8 bits, and an exponent of 8 bits per `CODE_BLOCK` elements (csrc/narrow.hpp)."""

    @property
    def is_narrow(self) -> bool:
        """Whether anything is narrower than fp32."""
        return (self.master, self.moments) != ("fp32", "fp32")

    def arrays(self, moments: int) -> tuple[StateArray, ...]:
        """The master and `moments` moments, each in an array of its own, as on disk."""
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
WHOLE_MATRIX = {"Muon": 1, "Muon in fp32": 1}
"""{optimizer that updates whole matrices: moments that it keeps for each element}. Muon iterates in bf16 otherwise."""
WIDE = Precision()
"""The precision of state in torch's optimizers."""
_ROUTERS = {"gate", "router"}
"""Names of the modules that send tokens to experts, in this library and in Hugging Face's mixtures."""


def has_narrow_state(name: str, shape: Sequence[int], chosen: Sequence[str] | None) -> bool:
    """Whether the plan's `master` and `moments` apply to a parameter; if not, its state is fp32.

    They apply to parameters whose names match one of the globs in `chosen`. None selects the matrices of repeated
    blocks: parameters with two or more dims and a number in their names, except routers. Norms and biases have one dim,
    and embeddings and heads have no number.
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
    """The precision of the optimizer state."""
    optimizer: str = ""
    """The optimizer of `WHOLE_MATRIX` that trains the parameters; empty for an elementwise one."""

    def moments(self, elementwise: int) -> int:
        """The moments that are kept for each element; `elementwise` is the number for an elementwise optimizer."""
        return WHOLE_MATRIX.get(self.optimizer, elementwise)

    @property
    def iterates_in(self) -> torch.dtype:
        """The dtype in which whole matrices are updated."""
        return torch.float32 if self.optimizer.endswith("fp32") else torch.bfloat16

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype in which whole updates travel: bf16, unless blocks have room for more and it is of use."""
        return self.iterates_in if self.dtype == torch.float32 else torch.bfloat16

    @property
    def master_in_values(self) -> bool:
        """Whether the compute shard is the master, so that no gradient may overwrite it."""
        return self.trainable and (self.dtype == torch.float32 or self.precision.master == "bf16")

    @property
    def label(self) -> str:
        """A short name for tables and counters."""
        frozen = "" if self.trainable else " frozen"
        summed = "" if self.reduce_dtype == torch.float32 else " narrow sums"
        dtype = str(self.dtype).removeprefix("torch.")
        state = f" {self.precision.master}+{self.precision.moments}" if self.precision.is_narrow else ""
        trained_by = f" {self.optimizer}" if self.optimizer else ""
        return f"ranks {_ranges(self.ranks)} /{self.divisor} {dtype}{frozen}{summed}{state}{trained_by}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter, for grouping and packing."""

    name: str
    """First name in the model."""
    shape: tuple[int, ...]
    """Shape of this rank's slice."""
    key: ChunkGroupKey
    """The chunk group it belongs to."""
    tied: bool = False
    """Whether several modules use it: its chunk then has a buffer of its own and stays gathered during a step."""
    matrix: tuple[int, int] = (0, 0)
    """Rows and columns of each of its matrices, of all ranks' slices, if an optimizer updates whole matrices."""
    joined_over: tuple[tuple[int, ...], ...] = ()
    """The ranks with slices of each of its matrices, for each axis over which they are cut, the outermost first."""
    region: int | None = None
    """The outermost part of the model around the parameter that backward is known to recompute as a whole."""

    @property
    def numel(self) -> int:
        """Elements of this rank's slice."""
        return math.prod(self.shape)

    @property
    def newton_schulz_flops(self) -> int:
        """Floating-point operations that orthogonalize its matrices, if its optimizer does that in five iterations.

        An iteration multiplies a matrix by its transpose, the product by itself, and the sum of both by the matrix.
        """
        short, long = sorted(self.matrix)
        return 5 * math.prod(self.shape[:-2]) * (4 * short * short * long + 2 * short**3)


def group_parameters(params: Iterable[ParamSpec]) -> dict[ChunkGroupKey, list[int]]:
    """Indices of the parameters of each chunk group; groups and parameters in order of first use."""
    groups: dict[ChunkGroupKey, list[int]] = {}
    for index, param in enumerate(params):
        groups.setdefault(param.key, []).append(index)
    return groups


def trainable_of(params: Iterable[ParamSpec]) -> dict[int, int]:
    """Returns {index: number of elements} of the trainable parameters."""
    return {index: param.numel for index, param in enumerate(params) if param.key.trainable}


def _ranges(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f" step {step}" if step != 1 else "")
    return ",".join(map(str, ranks))
