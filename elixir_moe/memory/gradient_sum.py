"""The sum of the gradients of one shard, in memory or on disk.

Owns the memory of the sum and the ways to add to it: at once, or asynchronously (`host_sums`). Knows nothing of the
values, in whose place a first gradient may be; `shard_state` says when the sum begins.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from elixir_moe.memory.disk_values import FullDiskShard
from elixir_moe.memory.gate import Gate
from elixir_moe.memory.host_sums import HostSums


class SumInMemory:
    """An fp32 sum in memory. An fp32 chunk has it for good, another one from its first use on."""

    on_disk = False
    """Whether an update gets the gradient along with master and moments."""
    squares = None
    """The sum's squares, where additions compute them."""

    def __init__(self, total: torch.Tensor | None, gate: Gate, host_sums: HostSums | None) -> None:
        self.total = total
        """The sum; None until `begin` if the chunk does not have it for good."""
        self._lasts = total is not None
        self.host_sums = host_sums
        """Adds while backward runs, if anybody does."""
        self._gate = gate

    def place(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Where a first gradient is copied: a sum that was there from the start, or the values' place without a sum.

        None if `add` takes it.
        """
        return self.total if self._lasts else values if self.total is None else None

    def begin(self, gradient: torch.Tensor) -> None:
        """Makes a gradient that is in the values' place the sum."""
        if self.total is None:
            self.total = torch.empty_like(gradient, dtype=torch.float32)
        self.total.copy_(gradient)

    def add(self, reduced: torch.Tensor, *, first: bool) -> None:
        """Adds a gradient of any dtype and device, or, `first`, makes it the sum."""
        assert self.total is not None
        if self.host_sums is not None:
            self._gate.adding = self.host_sums.add(self.total, reduced, first=first, after=self._gate.adding)
        else:
            (self.total.zero_() if first else self.total).add_(reduced.to(self.total.device))

    def read(self, start: int, stop: int) -> torch.Tensor:
        """The elements of the sum themselves. Blocks until they are complete."""
        assert self.total is not None
        self._gate.finish_sum()
        return self.total[start:stop]

    def change(self, ranges: Sequence[tuple[int, int]], change: Callable[[torch.Tensor], object]) -> float | None:
        """Calls `change`, which works in place, on parts of the sum; returns the squares of the result, if known."""
        for start, stop in ranges:
            change(self.read(start, stop))
        return None


class SumApart(SumInMemory):
    """A first gradient in 16 bits in memory of its own, where the values are the master and must stay; an fp32 sum in
    memory from the second gradient of a step on, which then takes all of them."""

    def __init__(self, own: torch.Tensor, gate: Gate, host_sums: HostSums | None) -> None:
        super().__init__(None, gate, host_sums)
        self.own = own
        """The gradient, as long as there is no sum."""

    def place(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the memory of its own until there is a sum; see `SumInMemory.place`."""
        return self.own if self.total is None else None

    def add(self, reduced: torch.Tensor, *, first: bool) -> None:
        """Implements `SumInMemory.add`."""
        if self.total is None:
            assert not first, "a first gradient has a place"
            self.begin(self.own)
        super().add(reduced, first=first)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Implements `SumInMemory.read`."""
        return self.own[start:stop] if self.total is None else super().read(start, stop)


class SumOnDisk:
    """An fp32 sum on disk, next to master and moments."""

    on_disk = True
    total = None

    def __init__(self, disk: FullDiskShard, gate: Gate, host_sums: HostSums | None) -> None:
        self._disk = disk
        self.host_sums = host_sums
        self.squares: float | None = None
        """The sum's squares, once the last addition has ended."""
        self._gate = gate

    def place(self, values: torch.Tensor | None) -> None:
        """None: a first gradient goes to disk."""

    def add(self, reduced: torch.Tensor, *, first: bool) -> None:
        """Adds a gradient of any dtype and device, or, `first`, makes it the sum. Raises DiskError."""
        write = partial(self._write, first=first)
        if self.host_sums is None:
            write(reduced)
        else:
            self._gate.adding = self.host_sums.submit(reduced, write, after=self._gate.adding)

    def _write(self, gradient: torch.Tensor, *, first: bool) -> None:
        """Writes a gradient or the new sum; on the thread of `host_sums`, if there is one."""
        self.squares = self._disk.add_gradient(gradient, first=first)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of elements of the sum. Blocks until they are complete. Raises DiskError."""
        self._gate.finish_sum()
        return self._disk.read(self._disk.gradient, start, stop)

    def change(self, ranges: Sequence[tuple[int, int]], change: Callable[[torch.Tensor], object]) -> float | None:
        """Calls `change`, which works in place, on parts of the sum; returns the squares of the result."""
        self._gate.finish_sum()
        return self._disk.change_gradient(ranges, change)
