"""Ranges of elements of a logical parameter that a rank holds, and the overlap of two such ranges.

Owns `Span`: a run of consecutive elements of one rank's slice. A slice is a box of the logical parameter (given by the
pattern). A shard cuts the slice without regard to dims, so a run is not a box but a sequence of a few boxes. Pure
arithmetic.

Elements 7 .. 31 of a slice of shape (4, 10)::

    . . . . . . . 7 8 9    one row's end
    x x x x x x x x x x    whole rows
    x x x x x x x x x x
    30 31 . . . . . . .    one row's start
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elixir_moe.records import Size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Elements `start` .. `stop` of a box, in row-major order of the box."""

    offset: tuple[Size, ...]
    """Start of the box in the logical parameter, one index per dim."""
    shape: tuple[Size, ...]
    start: Size
    stop: Size

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of_uncut(self, shape: tuple[int, ...]) -> "Span":
        """Returns the same elements of a box that is the whole parameter, viewed as `shape`."""
        return replace(self, offset=(0,) * len(shape), shape=shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box inside a run: elements from `start` of the run, viewed as `shape`, cut to `window`."""

    start: int
    shape: tuple[int, ...]
    window: tuple[slice, ...]

    @property
    def stop(self) -> int:
        """One past the last element of `shape`, counted from the start of the run."""
        return self.start + math.prod(self.shape)

    def of(self, run: "torch.Tensor") -> "torch.Tensor":
        """Returns the box as a view of the (numel,) run."""
        return run[self.start : self.stop].view(self.shape)[self.window]


def overlap(a: Span, b: Span) -> Iterator[tuple[Box, Box]]:
    """Yields the common elements of two runs as pairs of equal boxes: (in `a`, in `b`)."""
    if (a.offset, a.shape) == (b.offset, b.shape):
        low, high = max(a.start, b.start), min(a.stop, b.stop)
        if low < high:
            yield _line(low - a.start, high - low), _line(low - b.start, high - low)
        return
    theirs = list(rectangles(b))
    for start, offset, shape in rectangles(a):
        for other_start, other_offset, other_shape in theirs:
            lows = [max(i, j) for i, j in zip(offset, other_offset, strict=True)]
            ends = zip(offset, shape, other_offset, other_shape, strict=True)
            highs = [min(i + n, j + m) for i, n, j, m in ends]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                yield (
                    Box(start=start, shape=shape, window=_window(offset, lows, highs)),
                    Box(start=other_start, shape=other_shape, window=_window(other_offset, lows, highs)),
                )


def flaw(shape: Sequence[int], spans: Iterable[Span]) -> str | None:
    """The reason why `spans` do not hold each element of a parameter of `shape` exactly once; None if they do.

    Slices must be the equal cells of a grid, as patterns cut them.
    """
    runs: dict[tuple[int, ...], list[Span]] = {}
    cells = set()
    for span in spans:
        runs.setdefault(span.offset, []).append(span)
        cells.add(span.shape)
    if not math.prod(shape):
        return "elements of an empty parameter" if runs else None
    if len(cells) != 1:
        return f"slices of {len(cells)} shapes, expected one"
    (cell,) = cells
    if len(cell) != len(shape) or any(n < 1 or whole % n for n, whole in zip(cell, shape, strict=True)):
        return f"slices of shape {cell}, which do not tile it"
    wanted = math.prod(shape) // math.prod(cell)
    for offset, parts in runs.items():
        fits = len(offset) == len(shape) and all(
            i % n == 0 and 0 <= i < whole for i, n, whole in zip(offset, cell, shape, strict=True)
        )
        if not fits:
            return f"a slice at {offset}, where no slice of shape {cell} can begin"
        at = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.start != at or part.stop <= at:
                return f"elements {min(at, part.start)} .. {max(at, part.start)} of the slice at {offset} not once"
            at = part.stop
        if at != math.prod(cell):
            return f"elements {at} .. {math.prod(cell)} of the slice at {offset} not once"
    return None if len(runs) == wanted else f"{len(runs)} slices of {wanted}"


def rectangles(span: Span) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields (first element in the run, offset in the parameter, shape) of the boxes of the run, in order."""
    for start, offset, shape in _split(span.shape, span.start, span.stop):
        yield start - span.start, tuple(i + j for i, j in zip(offset, span.offset, strict=True)), shape


def _split(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if not shape:
        yield start, (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row = start // inner
        rows = (stop - start) // inner if start % inner == 0 else 0
        if rows:
            yield start, (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for first, offset, box in _split(shape[1:], start - row * inner, end - row * inner):
            yield first + row * inner, (row, *offset), (1, *box)
        start = end


def _line(start: int, numel: int) -> Box:
    return Box(start=start, shape=(numel,), window=(slice(0, numel),))


def _window(offset: Sequence[int], lows: Sequence[int], highs: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - i, high - i) for i, low, high in zip(offset, lows, highs, strict=True))
