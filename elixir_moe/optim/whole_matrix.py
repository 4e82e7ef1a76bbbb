"""The matrices in chunks, and the rank that computes the update of each.

Owns the places of matrices in their chunks and the choice of owners. Pure: never touches a tensor.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from elixir_moe.chunks.packing import ChunkSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix in a gathered chunk."""

    slot: int
    """The number of its parameter in the chunk."""
    start: int
    """First element, counted in the chunk."""
    shape: tuple[int, int]
    """Rows and columns."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.shape[0] * self.shape[1]

    @property
    def cost(self) -> int:
        """The work of a Newton-Schulz iteration, which multiplies by matrices of the shorter side, up to a factor."""
        rows, columns = self.shape
        return rows * columns * min(rows, columns)


def matrices_of(spec: ChunkSpec, shapes: Sequence[tuple[int, ...]]) -> tuple[Matrix, ...]:
    """The matrices of a chunk whose parameters have these shapes, in the order of their elements."""
    return tuple(
        Matrix(slot=index, start=slot.start, shape=(shape[0], shape[1]))
        for index, (slot, shape) in enumerate(zip(spec.slots, shapes, strict=True))
    )


def owners(chunks: Sequence[tuple[ChunkSpec, Sequence[Matrix]]]) -> list[tuple[int, ...]]:
    """The global rank that updates each matrix of each chunk: the same answer on all ranks.

    In each chunk, the costliest matrix goes first, to the rank with the least work in this chunk, and of such ranks to
    the one with the least work in the chunks before. So a chunk takes as short as it can, and chunks of few matrices
    take turns.
    """
    total: defaultdict[int, int] = defaultdict(int)
    found = []
    for spec, matrices in chunks:
        here = dict.fromkeys(spec.key.ranks, 0)
        chosen = [0] * len(matrices)
        for number in sorted(range(len(matrices)), key=lambda number: -matrices[number].cost):
            rank = min(here, key=lambda rank: (here[rank], total[rank]))
            chosen[number] = rank
            here[rank] += matrices[number].cost
            total[rank] += matrices[number].cost
        found.append(tuple(chosen))
    return found
