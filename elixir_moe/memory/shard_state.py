"""The long-lived state of one rank's shard of a chunk.

Owns what the shard holds when (`Contents`), and through it every read and change of weights and gradients. A shard is
put together from four parts: the values that a gather sends (`values`), an fp32 master, the sum of gradients
(`gradient_sum`), and a gate for whoever uses them besides the training thread (`gate`). Other files call this one; only
updates open a part, the master. Nothing here moves bytes between ranks. No property blocks; methods may, until an
update, a save or an addition has ended (`gate`).

    chunk                      values              master         a first gradient is in   several are summed in
    frozen                     memory, or disk     -              -                        -
    fp32                       memory              the values     the sum                  memory, from the start
    bf16, and so its master    memory              the values     memory of its own        memory, from the first time
    16 bits; any on disk       memory              memory, disk   the values' place        memory, from the first time
    with `values_on_disk`      disk                disk           the sum                  disk
    with `values_on_device`    memory, and a copy  as without it, and so is the rest

The sum's memory stays once it is there, and then even a single gradient goes to it. That a gradient takes the values'
place saves its memory (v2, 4.1). If the values are needed before the update, the gradient moves to the sum, and they
are cast from the master again. Source: "master copy of each scattered shard", Elixir v1, VII; memory of a chunk, v2,
4.1.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum

import torch

from elixir_moe.chunks.packing import ChunkSpec
from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.collectives import Work
from elixir_moe.kernels import sum_of_squares
from elixir_moe.memory.disk import DiskShard
from elixir_moe.memory.elements import Elements, InMemory, OnDisk
from elixir_moe.memory.gate import Gate
from elixir_moe.memory.gradient_sum import SumApart, SumInMemory, SumOnDisk
from elixir_moe.memory.values import ValuesInMemory, ValuesOnDisk


class Contents(Enum):
    """The content of the values' place, and where the gradient is.

    from         place taken   gradient added    values wanted     cleared   updated
    VALUES       STALE         SUM, or STALE     -                 -         -
    STALE        -             GRADIENT, or      VALUES            -         VALUES
                               STALE_SUM
    GRADIENT     refused       STALE_SUM         SUM, by way of    STALE     VALUES
                                                 STALE_SUM
    SUM          refused       -                 -                 VALUES    VALUES
    STALE_SUM    refused       -                 SUM               STALE     VALUES

    Where a first gradient goes to the sum, VALUES stays when its place is taken. Elsewhere a gradient is copied to the
    values' place by way of STALE, so that an interrupt in the copy leaves neither; once the shard has a sum, it goes
    there from STALE too, as STALE_SUM. An assignment of the state is the last act of each move.
    """

    VALUES = "values"
    """The values, which a gather sends; no gradient. While an update runs, the gate keeps readers out."""
    STALE = "stale"
    """Neither values nor a gradient; a gather needs the values cast from the master first."""
    GRADIENT = "gradient"
    """The reduced gradient, in the values' place."""
    SUM = "values, and a sum of gradients"
    """The values; the gradient is in the sum, or on its way to it while the gate has an addition."""
    STALE_SUM = "stale, and a sum of gradients"
    """Nothing of use; the gradient is as in SUM."""


VALUES, STALE, GRADIENT, SUM, STALE_SUM = Contents
_LEGAL = {
    VALUES: {VALUES, STALE, SUM},
    STALE: {STALE, VALUES, GRADIENT, STALE_SUM},
    GRADIENT: {STALE_SUM, STALE, VALUES},
    SUM: {SUM, VALUES},
    STALE_SUM: {STALE_SUM, SUM, STALE, VALUES},
}
_ADDED = {VALUES: SUM, STALE: STALE_SUM, SUM: SUM, STALE_SUM: STALE_SUM}
_CLEARED = {VALUES: VALUES, STALE: STALE, GRADIENT: STALE, SUM: VALUES, STALE_SUM: STALE}


class ShardState:
    """The state of one chunk on one rank: arrays of `shard_numel` elements each."""

    def __init__(
        self,
        spec: ChunkSpec,
        tier: Tier,
        source: ValuesInMemory | ValuesOnDisk,
        gate: Gate,
        total: SumInMemory | SumOnDisk | None = None,
        *,
        master: torch.Tensor | None = None,
        disk: DiskShard | None = None,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Puts the shard together: values are its `source`, and gradients are summed in `total`.

        `master` has fp32 weights in memory, which in fp32 are the values themselves, and `disk` those on disk with the
        moments; `tier` is where they are. `whole` is the whole frozen chunk where the ranks of a host share it.
        """
        self.spec = spec
        self.tier = tier
        self.master = master
        self.whole = whole
        self._source, self._gate, self._sum, self._disk = source, gate, total, disk
        self.contents = VALUES
        self._squares: float | torch.Tensor | None = None

    def _become(self, contents: Contents) -> None:
        """Changes the state; asserts that the table allows it."""
        now = self.contents
        assert contents in _LEGAL[now], f"shard of chunk {self.spec.index}: {now.name} -> {contents.name} is not legal"
        self.contents = contents

    @property
    def _has_apart(self) -> bool:
        """Whether the master is other memory than the values."""
        return self._disk is not None or (self.master is not None and self.master is not self._source.memory)

    # ---------------------------------------------------------------------------------------------------------- weights

    @property
    def storage(self) -> torch.Tensor:
        """The memory of the values, which parameters of a chunk used in place are views of."""
        assert self._source.memory is not None, f"chunk {self.spec.index} has its values on disk"
        return self._source.memory

    @property
    def values_shard(self) -> torch.Tensor | None:
        """The values' place, if an update writes them there next to the master."""
        return self._source.memory if self._has_apart else None

    def values(self) -> torch.Tensor:
        """The values that a gather sends, in the compute dtype.

        If a gradient has overwritten them and no copy of them is on the device, the gradient moves to the sum and the
        values are cast from the master. Blocks until a running update has finished, and until values on disk are read.
        """
        self._gate.finish_update()
        if self._source.fresh:
            return self._source.read()
        if self.contents is GRADIENT:
            self._move_to_sum()
        if self.contents in (STALE, STALE_SUM):
            self.storage.copy_(self.weights().read())
            self._become(VALUES if self.contents is STALE else SUM)
        return self._source.read()

    def prefetch(self) -> bool:
        """Starts what `values` would wait for; returns False if it cannot start yet."""
        return self._source.prepare()

    @property
    def ready(self) -> bool:
        """Whether `values` need not wait."""
        return self._source.ready

    @property
    def may_wait(self) -> bool:
        """Whether `values` may wait, by the calls so far: all ranks have the same answer."""
        return self._source.may_wait

    def values_sent(self, mark: Callable[[], Work]) -> None:
        """Called when the copy of `values` was issued; `mark` gives an operation that ends with it."""
        self._source.sent(mark)

    def weights(self) -> Elements:
        """The weights that a checkpoint keeps: masters, or the values of a frozen chunk."""
        if self._disk is not None:
            return OnDisk(self._disk, 0, 0, self.spec.shard_numel, self._gate)
        return self._source.elements() if self.master is None else InMemory(self.master, self._gate)

    def fill(self, values: torch.Tensor, start: int = 0) -> None:
        """Sets the first values of the shard's elements from `start` on, given in the master's dtype."""
        if self._has_apart:
            self.weights()[start : start + values.numel()].write(values)
        self._source.write(start, values)

    @property
    def weights_memory(self) -> torch.Tensor | None:
        """The memory of `weights`; None if they are on disk. Whoever fills it copies it to `values_shard`, too."""
        if self._disk is not None:
            return None
        return self._source.memory if self.master is None else self.master

    def lock(self) -> None:
        """Page-locks memory of the values that travels and came without pages. To be called once."""
        self._source.lock()

    def store(self, start: int, written: torch.Tensor) -> None:
        """Stores values that user code wrote, from element `start` of the shard on. Blocks for an update or a save.

        Unchanged elements keep the precision of the master.
        """
        self._gate.open_for_writing()
        if self._has_apart:
            written = _write_master(self.weights()[start : start + written.numel()], written)
        if self.contents in (VALUES, SUM):
            self._source.write(start, written)

    def write_values(self, start: int, weights: torch.Tensor) -> None:
        """Writes the values of elements from `start` on, whose `weights` were written; only where these are apart."""
        if self._has_apart:
            self._source.write(start, weights)

    def kept_values(self) -> torch.Tensor:
        """The result of `values`, computed from `weights`. Blocks until a running update has finished."""
        return self.weights().read().to(self.spec.key.dtype)

    def move_to(self, memory: torch.Tensor) -> None:
        """Makes `memory`, flat uint8, the place of the values; other tensors keep the old one."""
        assert isinstance(self._source, ValuesInMemory)
        self._source.memory = memory.view(self._source.memory.dtype)

    # -------------------------------------------------------------------------------------------------------- gradients

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has been added since the last update."""
        return self.contents in (GRADIENT, SUM, STALE_SUM)

    @property
    def gradient_moves(self) -> bool:
        """Whether a second gradient, or a gather, makes the host read the gradient to begin a sum with it."""
        apart = isinstance(self._sum, SumApart) and self._sum.total is None
        return self.contents is GRADIENT or (apart and self.has_gradient)

    @property
    def sum_memory(self) -> torch.Tensor:
        """The memory in which gradients of an fp32 chunk are summed, whether or not there are any."""
        assert self._sum is not None and self._sum.total is not None
        return self._sum.total

    def place_for_gradient(self) -> torch.Tensor | None:
        """Memory for the sum of the next gradient, so that `add_gradient` copies nothing; None if it must be added.

        The content of the memory is lost, whether or not a gradient follows. Blocks until a running update has
        finished.
        """
        self._gate.finish_update()
        place = self._first_place()
        if place is not None and place is self._source.memory:
            self._become(STALE)
        return place

    def _first_place(self) -> torch.Tensor | None:
        """Memory for the next gradient, if it is the first one and may be copied there."""
        assert self._sum is not None
        return None if self.has_gradient else self._sum.place(self._source.memory)

    def add_gradient(self, reduced: torch.Tensor, squares: float | torch.Tensor | None = None) -> None:
        """Adds the gradient summed over the process group, of any dtype and device.

        `squares` is the gradient's sum of squares, if known. For a gradient on a GPU it is computed there before the
        gradient is copied, and stays there, so that nobody waits for it. Blocks until a running update, which reads the
        last gradient, has finished. A second gradient makes the sum of squares unknown: the norm then reads the sum.
        """
        self._gate.finish_update()
        if self.has_gradient:
            self._squares = None
        elif squares is None and reduced.device.type != "cpu":
            self._squares = sum_of_squares(reduced)
        else:
            self._squares = squares
        self._add(reduced)

    def _add(self, reduced: torch.Tensor) -> None:
        assert self._sum is not None
        place = self._first_place()
        if self._sum.total is not None and reduced.data_ptr() == self._sum.total.data_ptr():
            self._become(_ADDED[self.contents])  # summed where it lies
        elif place is None:
            self._add_to_sum(reduced)
        elif place is not self._source.memory:
            place.copy_(reduced, non_blocking=True)
            self._become(_ADDED[self.contents])
        else:
            self._become(STALE)  # in case the copy is interrupted
            if reduced.data_ptr() != place.data_ptr():
                place.copy_(reduced, non_blocking=True)
            self._become(GRADIENT)

    def _add_to_sum(self, reduced: torch.Tensor) -> None:
        assert self._sum is not None
        if self.contents is GRADIENT:
            self._move_to_sum()
        self._sum.add(reduced, first=not self.has_gradient)
        self._become(_ADDED[self.contents])

    def _move_to_sum(self) -> None:
        """Begins the sum with the gradient that is in the values' place."""
        assert isinstance(self._sum, SumInMemory)
        self._sum.begin(self.storage)
        self._become(STALE_SUM)

    def gradient(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The summed gradient of elements `start` to `stop` of the shard, before unscaling; a copy of what is on disk.

        fp32 if summed here, else in the chunk's dtype. Blocks until nobody adds to it.
        """
        assert self.has_gradient, f"chunk {self.spec.index} has no gradient"
        if self.contents is GRADIENT:
            return self.storage[start:stop]
        assert self._sum is not None
        return self._sum.read(start, self.spec.shard_numel if stop is None else stop)

    @property
    def gradient_comes_along(self) -> bool:
        """Whether an update gets the gradient along with master and moments, and so need not ask for it."""
        return self._sum is not None and self._sum.on_disk

    @property
    def squares(self) -> float | torch.Tensor | None:
        """The sum of squares of the gradient, if it is known already; on a GPU if it was computed there."""
        if self._squares is None and self._sum is not None and self.contents is not GRADIENT:
            return self._sum.squares
        return self._squares

    def keep_squares(self, squares: float) -> None:
        """Keeps the sum of squares of the gradient, computed from its value on the GPU."""
        self._squares = squares

    def sum_of_squares(self, threads: int) -> float | torch.Tensor:
        """The sum of squares of the gradient; a scalar on the device if it was computed there.

        `threads` is for a sum on the host. Blocks until nobody adds to the gradient.
        """
        self._gate.finish_sum()
        squares = self.squares
        return sum_of_squares(self.gradient(), threads=threads) if squares is None else squares

    def change_gradient(self, ranges: Sequence[tuple[int, int]], change: Callable[[torch.Tensor], object]) -> None:
        """Calls `change`, which works in place and element by element, on the gradient of parts of parameters."""
        if self.contents is GRADIENT:
            for start, stop in ranges:
                change(self.storage[start:stop])
            self._squares = None
        else:
            assert self._sum is not None
            self._squares = self._sum.change(ranges, change)

    def clear_gradient(self) -> None:
        """Forgets the gradient without an update. Blocks until nobody adds to it."""
        self._gate.leave_sum()
        self._become(_CLEARED[self.contents])

    # --------------------------------------------------------------------------------------------- updates and saves

    @property
    def on_disk(self) -> bool:
        """Whether master and moments are on disk."""
        return self._disk is not None

    def elements_of(self, state: torch.Tensor) -> Elements:
        """The elements of an array in memory that updates of this shard write."""
        return InMemory(state, self._gate)

    def moments(self, in_memory: Sequence[torch.Tensor]) -> list[Elements]:
        """The arrays of the moments: those on disk, else the given ones."""
        if self._disk is None:
            return [self.elements_of(array) for array in in_memory]
        key, numel = self.spec.key, self.spec.shard_numel
        arrays = key.precision.arrays(key.moments(2))
        return [OnDisk(self._disk, i, 0, array.numel(numel), self._gate) for i, array in enumerate(arrays) if i]

    def change(
        self, work: Callable[[int, list[torch.Tensor]], None], moments: Sequence[torch.Tensor]
    ) -> Sequence[Future[None]]:
        """Calls ``work(start, arrays)`` on master and moments of all elements from `start` on, or of slices of them.

        `moments` are those in memory. Returns the work that has not ended: that on slices on disk.
        """
        if self._disk is not None:
            return self._disk.change(work)
        work(0, [self.storage if self.master is None else self.master, *moments])
        return ()

    def begin_update(self, update: "Future[Sequence[Future[None]]]") -> None:
        """Registers an update that ends later, with the tasks that it starts."""
        self._gate.begin_update(update)

    def withdraw_update(self) -> None:
        """Forgets an update that will change nothing."""
        self._gate.withdraw_update()

    def updated(self) -> None:
        """Drops the gradient: an update has written master and values, or is registered in the gate."""
        self._gate.leave_sum()
        self._become(VALUES)
        self._source.changed()

    def update_async(self, update: "Future[Sequence[Future[None]]]") -> None:
        """Registers an update that ends later, with the tasks it starts, and counts the shard as updated.

        Until they end, the update still reads the gradient, which may lie in the values' place. Only the gate keeps
        other readers out: one that went past it would take the gradient for weights.
        """
        self.begin_update(update)
        self.updated()

    def finish_update(self) -> None:
        """Blocks until a running update has ended; raises its error."""
        self._gate.finish_update()

    def drop_update(self) -> None:
        """Blocks until a running update has ended, and forgets its error: all that it writes is replaced."""
        self._gate.drop_update()

    def finish_sum(self) -> None:
        """Blocks until nobody adds to the gradient; raises the error of an addition."""
        self._gate.finish_sum()

    def open_for_writing(self) -> None:
        """Blocks until master, moments and values may be changed: no update and no save uses them."""
        self._gate.open_for_writing()

    def begin_save(self, copied: threading.Event) -> None:
        """Registers a save that reads the shard until it sets `copied`."""
        self._gate.reader = copied

    @property
    def being_saved(self) -> bool:
        """Whether a save still reads the shard."""
        return self._gate.being_saved

    # ------------------------------------------------------------------------------------------------------------ bytes

    @property
    def compute_tier(self) -> Tier:
        """The tier that the next gather reads."""
        return Tier.DEVICE if self._source.fresh else self.gradient_tier

    @property
    def values_tier(self) -> Tier:
        """The tier that gathers read, but for the first one after an update."""
        return self.gradient_tier if self._source.copy is None else Tier.DEVICE

    @property
    def gradient_tier(self) -> Tier:
        """The tier that gradients go to."""
        return Tier.DISK if self._source.memory is None else self.tier.of_compute

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of the state, by tier; gradients count as if they were there."""
        on_disk = self._source.disk_bytes + (0 if self._disk is None else self._disk.nbytes)
        in_memory = sum(tensor.nbytes for tensor in self._tensors())
        copied = 0 if self._source.copy is None else self._source.copy.nbytes
        held = (self.tier.of_compute, in_memory), (Tier.DISK, on_disk), (Tier.DEVICE, copied)
        return {tier: nbytes for tier, nbytes in held if nbytes}

    def _tensors(self) -> list[torch.Tensor]:
        total = None if self._sum is None else self._sum.total
        apart = self.master if self._has_apart else None
        own = self._sum.own if isinstance(self._sum, SumApart) else None
        return [tensor for tensor in (self._source.memory, apart, own, total) if tensor is not None]


def _write_master(kept: Elements, written: torch.Tensor) -> torch.Tensor:
    """Writes values of user code to their masters; returns them where the masters are read."""
    master = kept.read()
    written = written.to(master.device)
    master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))
    kept.write(master)
    return written
