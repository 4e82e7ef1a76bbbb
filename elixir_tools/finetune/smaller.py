"""The smaller step that fits after a trainer ran out of memory, and the command that takes it.

Owns the order of what is tried: fewer rows in a micro-batch with as many more micro-batches, then shorter rows. The
planner says what fits: `planner.trace` has a step's activations, the plan its bytes. Nothing is changed by itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elixir_moe.ext.planner import Profile, cost

_SHORTEST = 128
"""Tokens of a row below which nobody wants to train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The size of a rank's step."""

    rows: int
    """Rows of a micro-batch."""
    accumulation: int
    """Micro-batches."""
    length: int
    """Tokens of the longest row."""


def smaller(step: Step) -> Iterator[Step]:
    """Smaller and smaller steps: of as many rows, as long as a micro-batch can be cut; then with shorter rows."""
    whole, rows = step.rows * step.accumulation, step.rows
    while rows > 1:
        rows = max(fewer for fewer in range(1, rows // 2 + 1) if rows % fewer == 0)
        yield Step(rows=rows, accumulation=whole // rows, length=step.length)
    length = step.length // 2
    while length >= _SHORTEST:
        yield Step(rows=1, accumulation=whole, length=length)
        length //= 2


def that_fits(
    step: Step, trace: Callable[[Step], Profile], held: Callable[[Step], int], capacity_bytes: int
) -> Step | None:
    """The first step smaller than `step`, which ran out of memory, that fits in a device's memory; None if none does.

    A step that ran out of memory although it should fit says that less is free than was thought. What fits then leaves
    more than that step would have left. The plan itself holds `held` bytes on the device in a step.
    """

    def spare(other: Step) -> int:
        return cost.allowed_bytes(trace(other), capacity_bytes) - held(other)

    least = max(spare(step), -1)
    return next((other for other in smaller(step) if spare(other) > least), None)


def command_with(words: Sequence[str], changes: Mapping[str, object]) -> list[str]:
    """The words of a command with other values of some arguments."""
    names = {f"--{name}" for name in changes} | {f"--{name.replace('_', '-')}" for name in changes}
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in names:
            next(rest, None)  # its value
        elif word.partition("=")[0] not in names:
            found.append(word)
    return [*found, *(text for name, value in changes.items() for text in (f"--{name}", str(value)))]
