"""The largest model, batch or sequence that fits a machine under each strategy.

Owns the search over sizes. Pure: the caller traces each size, `strategies` knows what a strategy needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from elixir_moe.ext.planner import Task
from elixir_tools.fit import strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The answer for one strategy."""

    strategy: str
    size: int | None
    """The largest size that fits; 0 if none does, None without the memory that the strategy is about."""
    parameters: int
    """Parameters of the model of that size; 0 if there is none."""
    more: bool
    """Whether that is the largest size tried: larger ones may fit."""


class Sizes:
    """A family of planning problems by size, of which each is made once."""

    def __init__(self, task_at: Callable[[int], Task]) -> None:
        self._task_at = task_at
        self.tasks: dict[int, Task] = {}

    def at(self, size: int) -> Task:
        """The problem of that size."""
        if size not in self.tasks:
            self.tasks[size] = self._task_at(size)
        return self.tasks[size]

    def spare_bytes(self, strategy: str, size: int) -> int:
        """Bytes left in the tightest tier; negative if it does not fit."""
        task = self.at(size)
        return -max(task.missing_bytes(*strategies.needs(task, strategy)).values())


def largest_each(sizes: Sizes, start: int, most: int, *, disk: bool) -> Iterator[Found]:
    """The largest of `sizes`, tried from `start` up to `most`, that fits under each strategy."""
    for strategy, plan in strategies.LADDER.items():
        if strategy == strategies.OURS_DISK and not disk:
            yield Found(strategy=strategy, size=None, parameters=0, more=False)
            continue
        size = largest(partial(sizes.spare_bytes, strategy), start, most)
        if plan is None:
            start = max(start, size)  # with a disk no less fits
        parameters = sizes.at(size).profile.parameters if size else 0
        yield Found(strategy=strategy, size=size, parameters=parameters, more=size == most)


def largest(spare: Callable[[int], int], start: int, most: int) -> int:
    """The largest size from 1 to `most` for which `spare` is not negative; 0 if there is none.

    `spare` must fall with the size. The size is doubled from `start` until it is too large. Then the bracket is cut
    where a straight line between its ends crosses zero, and in half after two cuts that left more than half of it.
    Bytes grow nearly linearly with the size, so few sizes are tried.
    """
    fits, beyond, left = 0, min(start, most), 0
    while (value := spare(beyond)) >= 0:
        fits, left = beyond, value
        if beyond == most:
            return most
        beyond = min(2 * beyond, most)
    slow = 0
    while (width := beyond - fits) > 1:
        share = 0.5 if fits == 0 or slow == 2 else left / (left - value)
        middle = min(max(fits + int(share * width), fits + 1), beyond - 1)
        found = spare(middle)
        if found >= 0:
            fits, left = middle, found
        else:
            beyond, value = middle, found
        slow = slow + 1 if slow < 2 and beyond - fits > width // 2 else 0
    return fits
