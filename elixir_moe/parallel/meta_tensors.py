"""Tensors without data (meta and fake tensors), on which the planner runs a model.

Owns the test whether a tensor has data, the routing assumed without data, and loops that a trace shortens. Never makes
a tensor.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from elixir_moe.torch_private import FakeTensor, TorchDispatchMode, dispatch_modes


class Recording(TorchDispatchMode):
    """A dispatch mode that records events, in order of time."""

    events: list[Any]
    scratch_bytes: int = 0
    """The most bytes of experts' weights that the planned device decodes at a time."""


def recordings() -> list[Recording]:
    """Returns the modes that record the running code."""
    return [mode for mode in dispatch_modes() if isinstance(mode, Recording)]


def has_data(tensor: Tensor) -> bool:
    """Returns False for meta and fake tensors, which cannot be read or sent."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def even_counts(total: int, num_experts: int) -> list[int]:
    """Distributes `total` choices over the experts as evenly as whole numbers allow, like balanced routing."""
    share, rest = divmod(total, num_experts)
    return [share + (e < rest) for e in range(num_experts)]


def cut(total: int, size: int) -> list[int]:
    """Returns the lengths of pieces of `size` that add up to `total`; the last one may be shorter."""
    whole, rest = divmod(total, size)
    return [size] * whole + [rest] * (rest > 0)


def pieces(lengths: Sequence[int], on: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (number, slice) of consecutive pieces of these lengths, for a loop with the same work in each iteration.

    While a trace records tensors without data, the loop has two iterations for each run of equal lengths. The events of
    the second then stand for those of all later ones: each iteration frees what the one before left in memory.
    """
    recording = [] if has_data(on) else recordings()
    number = start = 0
    for length, run in groupby(lengths):
        times = len(list(run))
        for turn in range(min(times, 2) if recording else times):
            began = [len(mode.events) for mode in recording]
            yield number + turn, slice(start + turn * length, start + (turn + 1) * length)
        if times > 2:
            for mode, first in zip(recording, began, strict=True):
                mode.events += (times - 2) * mode.events[first:]
        number, start = number + times, start + times * length
