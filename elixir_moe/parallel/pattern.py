"""The pattern of a parameter: the axes over which it is replicated, the axes and tensor dims on which it is sharded.

Owns `RankMesh`, a device mesh as plain data, and `Pattern` with its algebra. Never communicates or creates a process
group: everything here is arithmetic on ranks, so it can be tested, hashed and planned without a cluster.
Source: "parallel pattern", Elixir v1, section I; the divisor rule is derived below.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

import torch

from elixir_moe.errors import ConfigError, LayoutError

EXPERT_AXIS = "ep"
"""The only sharded axis along which ranks hold different tokens: experts receive tokens of every rank along it."""


@runtime_checkable
class MeshLike(Protocol):
    """The attributes of a `torch.distributed.DeviceMesh` that `RankMesh.of` reads."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def mesh(self) -> torch.Tensor: ...

    def get_rank(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMesh:
    """A mesh of ranks as plain data: named axes, their sizes, and the ranks in row-major order."""

    axes: tuple[str, ...]
    """Axis names, outermost first."""
    sizes: tuple[int, ...]
    """Ranks along each axis."""
    ranks: tuple[int, ...]
    """Global ranks, row-major over `axes`."""
    rank: int
    """The global rank whose view this is."""

    def __post_init__(self) -> None:
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.sizes):
            raise LayoutError(f"mesh axes {self.axes} with sizes {self.sizes}: each size needs one unique name")
        if math.prod(self.sizes) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            needed = math.prod(self.sizes)
            raise LayoutError(f"mesh of sizes {self.sizes} needs {needed} distinct ranks, got {self.ranks}")
        if self.rank not in self.ranks:
            raise LayoutError(
                f"rank {self.rank} is not in its own mesh {dict(zip(self.axes, self.sizes, strict=True))} over ranks "
                f"{self.ranks}: build the pattern on a mesh that contains every rank that wraps the model"
            )

    @classmethod
    def of(cls, mesh: "RankMesh | MeshLike") -> "RankMesh":
        """Converts a `DeviceMesh` to a `RankMesh`. Raises LayoutError for other objects and for axes without names."""
        if isinstance(mesh, RankMesh):
            return mesh
        if not isinstance(mesh, MeshLike):
            raise LayoutError(
                f"mesh={mesh!r}: expected a DeviceMesh with named axes, as em.init_mesh() and em.expert_mesh() return"
            )
        if mesh.mesh_dim_names is None:
            raise LayoutError(f"{mesh!r} has no axis names: pass mesh_dim_names when you build it")
        table = mesh.mesh
        return cls(
            axes=tuple(mesh.mesh_dim_names),
            sizes=tuple(table.shape),
            ranks=tuple(cast(list[int], table.flatten().tolist())),
            rank=mesh.get_rank(),
        )

    @classmethod
    def world(cls, size: int, rank: int) -> Self:
        """Returns a mesh with one axis ``dp`` over all `size` ranks."""
        return cls(axes=("dp",), sizes=(size,), ranks=tuple(range(size)), rank=rank)

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.sizes[self.axes.index(axis)]

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's index along each axis."""
        return _unravel(self.ranks.index(self.rank), self.sizes)

    def ranks_along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that share this rank's coordinate on every *other* axis, in row-major order of the given `axes`."""
        chosen = [self.axes.index(axis) for axis in axes]
        coordinate = list(self.coordinate)
        members = []
        for flat in range(math.prod(self.sizes[i] for i in chosen)):
            for axis, index in zip(chosen, _unravel(flat, [self.sizes[i] for i in chosen]), strict=True):
                coordinate[axis] = index
            members.append(self.ranks[_ravel(coordinate, self.sizes)])
        return tuple(members)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The parallel pattern of a parameter.

    ``Pattern(expert, replicate=("edp",), shard={"ep": 0})``: equal on the ranks of ``edp`` (the chunk is sharded over
    them and gradients are reduced over them), and a different slice of tensor dim 0 on each rank of ``ep``.

    Gradient divisor. Every rank's loss is the mean over its own tokens, and the wanted gradient is that of the mean
    over all B ranks that hold different tokens, ``1/B * sum_r dloss_r/dw``. The sum over `replicate` collects them; for
    experts it includes the gradients of all ranks of ``ep``, whose tokens were sent here. So the divisor is B: the
    product of the replicated axes that are not `partial`, times ``ep`` if sharded over it. For experts that is dp, not
    edp.

    Raises LayoutError for unknown or repeated axes, an axis of more than one rank that is neither replicated nor
    sharded, a negative dim, a rank outside the mesh, or a value of a wrong type; ConfigError for a wrong
    `reduce_dtype`.
    """

    mesh: RankMesh
    """The mesh; a `DeviceMesh` with named axes is converted to its `RankMesh`."""
    replicate: tuple[str, ...] = field(kw_only=True)
    """Axes over which the parameter is the same on every rank: its data-parallel process group."""
    shard: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    """(axis, tensor dim) pairs, given as a mapping; if two axes shard one dim, the first is the outer one."""
    partial: tuple[str, ...] = field(default=(), kw_only=True)
    """Replicated axes whose ranks see the same tokens, each with a part of the gradient: summed, not averaged."""
    divisor: int | None = field(default=None, kw_only=True)
    """Overrides the derived gradient divisor; needed if the axes' names do not determine which ranks share a batch."""
    dtype: torch.dtype | None = field(default=None, kw_only=True)
    """Compute dtype of this parameter, regardless of `wrap`; None follows `wrap`. Integers keep their dtype."""
    reduce_dtype: torch.dtype | None = field(default=None, kw_only=True)
    """Dtype in which gradients are summed over the ranks, or its name: fp32, or the compute dtype. None follows
    `Plan.reduce_dtype`, which documents the cost of either."""
    view: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Another shape of this rank's slice, to whose dims `shard` refers, if the slice is not along a dim of the tensor:
    ``(2, n, k)``, sharded on dim 1, for a ``(2 n, k)`` weight that holds gate and up one after the other."""
    grows: int = field(default=0, kw_only=True)
    """With a `view`, the tensor dim that is longer in the logical parameter than in the slice."""

    if TYPE_CHECKING:  # the types it accepts; the fields above have the types it holds

        def __init__(
            self,
            mesh: RankMesh | MeshLike,
            *,
            replicate: str | Sequence[str],
            shard: Mapping[str, int] | Sequence[tuple[str, int]] = (),
            partial: str | Sequence[str] = (),
            divisor: int | None = None,
            dtype: torch.dtype | None = None,
            reduce_dtype: torch.dtype | str | None = None,
            view: Sequence[int] | None = None,
            grows: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        mesh = RankMesh.of(self.mesh)
        object.__setattr__(self, "mesh", mesh)
        for name in ("replicate", "partial"):
            value = getattr(self, name)
            axes = (value,) if isinstance(value, str) else value
            if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
                raise LayoutError(
                    f"Pattern: {name}={value!r}: expected the name of a mesh axis or a sequence of names of {mesh.axes}"
                )
            object.__setattr__(self, name, tuple(axes))
        pairs = tuple(self.shard.items()) if isinstance(self.shard, Mapping) else self.shard
        if not isinstance(pairs, Sequence) or not all(_is_cut(pair) for pair in pairs):
            raise LayoutError(
                f"Pattern: shard={self.shard!r}: expected a mapping of mesh axes to tensor dims, which count from 0, "
                f"such as {{{EXPERT_AXIS!r}: 0}}"
            )
        shard = tuple((axis, dim) for axis, dim in pairs)
        object.__setattr__(self, "shard", shard)
        if self.divisor is not None and not is_whole(self.divisor, least=1):
            raise LayoutError(f"Pattern: divisor={self.divisor!r}: expected a whole number of at least 1 or None")
        if not isinstance(self.dtype, torch.dtype | None):
            raise LayoutError(
                f"Pattern: dtype={self.dtype!r}: expected a torch.dtype, such as torch.bfloat16, or None to follow wrap"
            )
        object.__setattr__(self, "reduce_dtype", reduction_dtype("Pattern: reduce_dtype", self.reduce_dtype))
        if self.view is not None:
            if not isinstance(self.view, Sequence) or not all(is_whole(n, least=0) for n in self.view):
                raise LayoutError(f"Pattern: view={self.view!r}: expected a shape without -1, such as (2, 128, 64)")
            object.__setattr__(self, "view", tuple(self.view))
        if not is_whole(self.grows, least=0):
            raise LayoutError(f"Pattern: grows={self.grows!r}: expected a tensor dim, which counts from 0")
        named = self.replicate + tuple(axis for axis, _ in shard)
        unknown = [axis for axis in (*named, *self.partial) if axis not in mesh.axes]
        if unknown:
            raise LayoutError(f"{self}: axes {unknown} are not among the mesh's axes {mesh.axes}")
        if len(set(named)) != len(named):
            raise LayoutError(f"{self}: an axis is either replicated or sharded, once; got {named}")
        missing = [axis for axis in mesh.axes if axis not in named and mesh.size(axis) > 1]
        if missing:
            raise LayoutError(
                f"{self}: lacks the axes {missing}; add each to replicate=(...) or to shard={{axis: tensor dim}}"
            )
        if not set(self.partial) <= set(self.replicate):
            raise LayoutError(f"{self}: partial axes must be among the replicated axes {self.replicate}")

    def __str__(self) -> str:
        sizes = ", ".join(f"{a}={n}" for a, n in zip(self.mesh.axes, self.mesh.sizes, strict=True))
        extra = "".join(
            f", {name}={value}"
            for name, value in (
                ("shard", dict(self.shard)),
                ("partial", self.partial),
                ("dtype", self.dtype),
                ("reduce_dtype", self.reduce_dtype),
                ("view", self.view),
            )
            if value
        )
        return f"Pattern(mesh({sizes}), replicate={self.replicate}{extra})"

    @property
    def replicate_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same parameter as this rank, this rank among them."""
        return tuple(sorted(self.mesh.ranks_along(self.replicate)))  # the order in which process groups number them

    @property
    def gradient_divisor(self) -> int:
        """The divisor of the gradient summed over `replicate_ranks` (see the class)."""
        if self.divisor is not None:
            return self.divisor
        batch_axes = [a for a in self.replicate if a not in self.partial]
        batch_axes += [a for a, _ in self.shard if a == EXPERT_AXIS]
        return math.prod(self.mesh.size(a) for a in batch_axes)

    def shards_of(self, dim: int) -> int:
        """Number of parts into which tensor dim `dim` of the logical parameter is sharded."""
        return math.prod(self.mesh.size(axis) for axis, d in self.shard if d == dim)

    def global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the logical parameter whose slice on each rank has `local_shape`."""
        grid = self.grid_shape(local_shape)
        if self.view is None:
            return grid
        more = math.prod(self.mesh.size(axis) for axis, _ in self.shard)
        return tuple(n * more if dim == self.grows else n for dim, n in enumerate(local_shape))

    def grid_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in which the slices of all ranks are equal adjacent boxes; not `global_shape` with a `view`."""
        return tuple(n * self.shards_of(dim) for dim, n in enumerate(self.cell_shape(local_shape)))

    def cell_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this rank's box in `grid_shape`."""
        self.check_shape(local_shape)
        return tuple(local_shape) if self.view is None else self.view

    def local_offset(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The start of this rank's slice in `grid_shape`, one index per dim."""
        coordinate = dict(zip(self.mesh.axes, self.mesh.coordinate, strict=True))
        offset = []
        for dim, n in enumerate(self.cell_shape(local_shape)):
            index = 0
            for axis, d in self.shard:
                if d == dim:
                    index = index * self.mesh.size(axis) + coordinate[axis]
            offset.append(index * n)
        return tuple(offset)

    def check_shape(self, local_shape: Sequence[int]) -> None:
        """Raises LayoutError if a slice of `local_shape` lacks a sharded dim, or cannot be seen as `view`."""
        dims = len(local_shape)
        if self.view is not None:
            if math.prod(self.view) != math.prod(local_shape) or self.grows >= dims:
                raise LayoutError(f"{self}, growing on dim {self.grows}, does not fit the shape {tuple(local_shape)}")
            dims = len(self.view)
        missing = [(axis, dim) for axis, dim in self.shard if dim >= dims]
        if missing:
            raise LayoutError(f"{self} shards {missing}, but the tensor has only {dims} dims")

    def describe(self) -> str:
        """Describes the pattern equally on every rank of the mesh; ranks compare it to check that they agree."""
        return f"{self}, divisor={self.gradient_divisor}, ranks={self.mesh.ranks}"


def is_whole(value: object, *, least: int) -> bool:
    """Whether `value` is a whole number of at least `least`; True and 1.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_REDUCED_IN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def reduction_dtype(name: str, given: object) -> torch.dtype | None:
    """Converts a dtype of a sum, or its name, to the dtype. Raises ConfigError, whose message calls it `name`."""
    found = _REDUCED_IN.get(given) if isinstance(given, str) else given
    if given is None or (isinstance(found, torch.dtype) and found in _REDUCED_IN.values()):
        return found  # type: ignore[return-value]
    raise ConfigError(f"{name}={given!r}: expected float32, bfloat16 or float16 (of torch, or as a string), or None")


def _is_cut(pair: object) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str) and is_whole(pair[1], least=0)


def _unravel(flat: int, sizes: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(sizes):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))


def _ravel(index: Sequence[int], sizes: Sequence[int]) -> int:
    flat = 0
    for i, size in zip(index, sizes, strict=True):
        flat = flat * size + i
    return flat
