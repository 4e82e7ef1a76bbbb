"""The matrices in parameters and chunks, and the rank that computes the update of each.

Owns the places of matrices, those of the parts of a fused matrix, and the choice of owners. Pure: never touches a
tensor.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from elixir_moe.chunks.packing import MATRICES_AT_ONCE_NUMEL, ChunkSpec
from elixir_moe.errors import ConfigError

Rows = int | Sequence[int]
"""Parts of a fused matrix, one below the other: their number, or the rows of each."""


FIXED: Mapping[str, Any] = {"split_rows": 1, "split_columns": 1, "ns_dtype": "bf16"}
"""{option of a group on which layout and memory depend: its value where a group has none}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix in a flat parameter or chunk."""

    start: int
    """First element."""
    shape: tuple[int, int]
    """Rows and columns."""
    stride: int
    """Elements from one row to the next."""
    slot: int = 0
    """The number of its parameter in the chunk."""

    @property
    def cost(self) -> int:
        """The work of a Newton-Schulz iteration, which multiplies by matrices of the shorter side, up to a factor."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)


def matrices(shape: Sequence[int], options: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yields the matrices of a parameter: of two dims one, of more dims one for each index of the first ones.

    `split_rows` and `split_columns` in the `options` of its group cut each matrix into parts. Raises ConfigError for a
    parameter of less than two dims, and for parts that do not make up the matrix.
    """
    if len(shape) < 2:
        raise ConfigError(f"Muon updates matrices, and a parameter has the shape {tuple(shape)}: give it to AdamW")
    if not math.prod(shape):
        return
    *stacked, rows, columns = shape
    row_ends = _ends(rows, options.get("split_rows", 1), "split_rows", shape)
    if not isinstance(across := options.get("split_columns", 1), int):
        raise ConfigError(f"split_columns={across!r}: expected the number of equal parts")
    column_ends = _ends(columns, across, "split_columns", shape)
    for number in range(math.prod(stacked)):
        for top, bottom in row_ends:
            for left, right in column_ends:
                start = (number * rows + top) * columns + left
                yield Matrix(start=start, shape=(bottom - top, right - left), stride=columns)


def at_once(found: Iterable[Matrix], options: Mapping[str, Any]) -> Iterator[list[Matrix]]:
    """Yields the matrices of a parameter that are orthogonalized together, in order: in fp32, small ones of a shape.

    In bf16 each is by itself, as in torch: a batched product may round an element otherwise, and the iteration in bf16
    makes that more.
    """
    for (rows, columns), alike in groupby(found, key=lambda matrix: matrix.shape):
        most = MATRICES_AT_ONCE_NUMEL // (rows * columns) if options.get("ns_dtype") == "fp32" else 1
        rest = list(alike)
        for first in range(0, len(rest), max(most, 1)):
            yield rest[first : first + max(most, 1)]


def fixed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group in `FIXED`, comparable by value."""
    found = {name: options.get(name, default) for name, default in FIXED.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _ends(whole: int, parts: Rows, option: str, shape: Sequence[int]) -> list[tuple[int, int]]:
    """First and one past the last row or column of each part."""
    if isinstance(parts, int):
        sizes = [whole // parts] * parts if parts > 0 else []
    elif isinstance(parts, Sequence) and all(isinstance(size, int) for size in parts):
        sizes = list(parts)
    else:
        raise ConfigError(f"{option}={parts!r}: expected the number of equal parts, or the rows of each, (4096, 1024)")
    if sum(sizes) != whole or min(sizes) < 1:
        raise ConfigError(f"{option}={parts!r} does not make up the {whole} of a parameter of shape {tuple(shape)}")
    return list(pairwise(accumulate(sizes, initial=0)))


def bands(found: Sequence[Matrix], columns: int) -> list[tuple[int, int, tuple[int, int]]]:
    """(start, stop, shape of the matrices) of consecutive rows of a parameter whose matrices are of one shape.

    `columns` are those of the parameter.
    """
    merged: list[tuple[int, int, tuple[int, int]]] = []
    for matrix in (one for one in found if one.start % columns == 0):
        stop = matrix.start + matrix.shape[0] * columns
        if merged and merged[-1][2] == matrix.shape:
            merged[-1] = (merged[-1][0], stop, matrix.shape)
        else:
            merged.append((matrix.start, stop, matrix.shape))
    return merged


def in_chunk(spec: ChunkSpec, of_parameters: Sequence[Sequence[Matrix]]) -> tuple[Matrix, ...]:
    """The matrices of a chunk, given those of its parameters."""
    return tuple(
        replace(matrix, start=slot.start + matrix.start, slot=index)
        for index, (slot, found) in enumerate(zip(spec.slots, of_parameters, strict=True))
        for matrix in found
    )


def owners(chunks: Sequence[tuple[ChunkSpec, Sequence[Matrix]]]) -> list[tuple[int, ...]]:
    """The global rank that updates each matrix of each chunk: the same answer on all ranks.

    In each chunk, the costliest matrix goes first, to the rank with the least work in this chunk, and of such ranks to
    the one with the least work in earlier chunks of as many ranks. So a chunk takes as short as it can, and chunks of
    few matrices take turns. Ranks count by their place in the chunk's process group: process groups that hold slices of
    the same matrices make the same choice.
    """
    total: defaultdict[tuple[int, int], int] = defaultdict(int)
    found = []
    for spec, theirs in chunks:
        ranks = spec.key.ranks
        here = [0] * len(ranks)
        chosen = [0] * len(theirs)
        for number in sorted(range(len(theirs)), key=lambda number: -theirs[number].cost):
            place = min(range(len(ranks)), key=lambda place: (here[place], total[len(ranks), place]))
            chosen[number] = ranks[place]
            here[place] += theirs[number].cost
            total[len(ranks), place] += theirs[number].cost
        found.append(tuple(chosen))
    return found
