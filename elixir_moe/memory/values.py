"""The values of one shard that a gather sends: in memory, or on disk and read ahead.

Owns the three kinds, which answer the same questions: may a gather begin, will it wait, and what does it copy. Knows
nothing of masters and gradients (`shard_state`).
"""

from collections.abc import Callable

import torch

from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import DiskError
from elixir_moe.memory.disk_values import ValuesElements, ValuesPlace
from elixir_moe.memory.elements import Elements, InMemory
from elixir_moe.memory.gate import Gate
from elixir_moe.memory.slabs import page_lock


class ValuesInMemory:
    """Values in memory, which parameters of a chunk used in place are views of."""

    disk_bytes = 0
    """Bytes of the file of values."""
    copy: torch.Tensor | None = None
    """The copy on the device, if there is one."""
    fresh = False
    """Whether `read` does not read `memory`."""

    def __init__(self, memory: torch.Tensor, gate: Gate, *, to_lock: bool = False) -> None:
        """`to_lock`: `lock` is to page-lock the memory."""
        self.memory: torch.Tensor = memory
        """The values, or for a while the gradient in their place."""
        self._gate = gate
        self._to_lock = to_lock

    def prepare(self) -> bool:
        """Starts what `read` would wait for; returns False if that cannot start yet."""
        return True

    @property
    def ready(self) -> bool:
        """Whether a gather need not wait."""
        return not self._gate.updating

    @property
    def may_wait(self) -> bool:
        """Whether a gather may wait. It depends on the calls so far and on no time: it is the same on all ranks."""
        return self._gate.has_update

    def read(self) -> torch.Tensor:
        """The values to copy to a block."""
        return self.memory

    def sent(self, mark: Callable[[], Work]) -> None:
        """Called when the copy was issued; `mark` gives an operation that ends with it."""

    def elements(self) -> Elements:
        """The values as elements."""
        return InMemory(self.memory, self._gate)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the values from element `start` on."""
        self.memory[start : start + values.numel()].copy_(values)

    def changed(self) -> None:
        """Called when the values in memory have changed, or will before the next `read`."""

    def lock(self) -> None:
        """Page-locks memory that is not locked yet and travels, and thereby makes the system provide its pages."""
        if self._to_lock:
            page_lock(self.memory)


class ValuesOnDevice(ValuesInMemory):
    """Values in host memory, where updates write them and gradients take their place, and a copy on the device.

    The first gather after a change of the values makes the copy, and so waits only for the update of its own chunk.
    Later ones read the copy: gradients may be in host memory by then.
    """

    def __init__(self, memory: torch.Tensor, gate: Gate, copy: torch.Tensor) -> None:
        super().__init__(memory, gate)
        self.copy: torch.Tensor = copy

    def read(self) -> torch.Tensor:
        """The copy, made on the current stream unless it is fresh."""
        if not self.fresh:
            self.copy.copy_(self.memory, non_blocking=True)
            self.fresh = True
        return self.copy

    def changed(self) -> None:
        """Called when the values in host memory have changed, or will before the next `read`."""
        self.fresh = False

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the values from element `start` on."""
        super().write(start, values)
        self.changed()


class ValuesOnDisk:
    """Values on disk. From `prepare` to `sent` they are in a buffer in host memory."""

    memory = None
    copy = None
    fresh = False
    may_wait = True
    """It depends on the disk."""

    def __init__(self, place: ValuesPlace, dtype: torch.dtype, numel: int, gate: Gate) -> None:
        self._place = place
        self._elements = ValuesElements(place, dtype, 0, numel)
        self._gate = gate

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file of values; the buffers are the file's."""
        return self._place.nbytes

    def prepare(self) -> bool:
        """Starts to read, if no update runs and a buffer is free."""
        if self._place.reading is None and self._gate.updating:
            return False
        return self._place.begin() is not None

    @property
    def ready(self) -> bool:
        """Whether the values are in a buffer."""
        return (reading := self._place.reading) is not None and reading.done

    def read(self) -> torch.Tensor:
        """The values to copy to a block. Blocks until they are read. Raises DiskError."""
        reading = self._place.begin()
        assert reading is not None, "gathers take buffers in their order"
        try:
            return reading.values().view(self._elements.dtype)
        except DiskError:
            self.sent(Work)
            raise

    def sent(self, mark: Callable[[], Work]) -> None:
        """Frees the buffer, which is filled again when the operation of `mark` has ended."""
        if self._place.reading is not None:
            self._place.give_back(mark())

    def elements(self) -> ValuesElements:
        """The values as elements."""
        return self._elements

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites the values from element `start` on; forgets those that were read ahead."""
        self.sent(Work)
        self._elements[start : start + values.numel()].write(values)

    def changed(self) -> None:
        """Does nothing: what was read ahead is given back before an update."""

    def lock(self) -> None:
        """Does nothing: the buffers are locked."""
