"""The long-lived state of one rank's shard of a chunk.

Owns one class for each kind of shard. The classes differ in what a gather sends, where a reduced gradient is stored and
what an update writes. Nothing here moves bytes between ranks. No property blocks; methods that block say so.

    class            a gather sends        a reduced gradient is stored in         the master is
    FrozenShard      the values            -                                       -
    FrozenDiskShard  values read ahead     -                                       -
    DiskShard        values read ahead     fp32 sums on disk                       on disk
    Fp32Shard        the master            memory of its own, where it is summed   in memory
    MixedShard       the values            the values' place (v2, 4.1)             in memory or on disk

From the first step with two backwards on, `MixedShard` sums all gradients in an fp32 accumulator. If the values are
needed before the update, they are cast from the master again. With a GPU, sums in host memory are computed beside
backward (`host_sums`); whoever reads or clears a gradient waits for them. Source: "master copy of each scattered
shard", Elixir v1, VII; memory of a chunk, v2, 4.1.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Protocol

import torch

from elixir_moe.chunks.packing import ChunkSpec
from elixir_moe.chunks.plan import Tier, values_bytes
from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import DiskError
from elixir_moe.kernels import sum_of_squares
from elixir_moe.memory.disk import Spill, Spilled
from elixir_moe.memory.disk_values import ValuesElements, ValuesFile, ValuesPlace, WhollySpilled
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.slabs import LOCKED_BYTES, Slab


class Elements(Protocol):
    """Flat elements of a shard, in memory or on disk. `read` and `write` block until a running update has finished."""

    @property
    def dtype(self) -> torch.dtype:
        """The elements' dtype."""
        ...

    def read(self) -> torch.Tensor:
        """The elements themselves if they are in memory, else a copy."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Writes new values; in memory, the result of `read`, changed in place, is not copied again."""
        ...

    def __getitem__(self, part: slice) -> "Elements":
        """Some of the elements."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Elements in memory."""

    tensor: torch.Tensor
    wait_for_update: Callable[[], None]
    """As `ShardState.wait_for_update`."""

    @property
    def dtype(self) -> torch.dtype:
        """As `Elements.dtype`."""
        return self.tensor.dtype

    def read(self) -> torch.Tensor:
        """As `Elements.read`."""
        self.wait_for_update()
        return self.tensor

    def write(self, values: torch.Tensor) -> None:
        """As `Elements.write`."""
        self.wait_for_update()
        if values is not self.tensor:
            self.tensor.copy_(values)

    def __getitem__(self, part: slice) -> "InMemory":
        return replace(self, tensor=self.tensor[part])


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Elements of an array on disk, fp32."""

    spilled: Spilled
    array: int
    start: int
    stop: int
    wait_for_update: Callable[[], None]
    """As `ShardState.wait_for_update`."""
    dtype = torch.float32

    def read(self) -> torch.Tensor:
        """As `Elements.read`."""
        self.wait_for_update()
        return self.spilled.read(self.array, self.start, self.stop)

    def write(self, values: torch.Tensor) -> None:
        """As `Elements.write`."""
        self.wait_for_update()
        self.spilled.write(self.array, self.start, values.cpu())

    def __getitem__(self, part: slice) -> "OnDisk":
        start, stop, _ = part.indices(self.stop - self.start)
        return replace(self, start=self.start + start, stop=self.start + max(start, stop))


class ShardState:
    """The state of one chunk on one rank: arrays of `shard_numel` elements each."""

    master: torch.Tensor | None = None
    """fp32 weights, if there are any in memory."""
    spilled: Spilled | None = None
    """fp32 weights and moments, if they are on disk."""
    values_shard: torch.Tensor | None = None
    """The values that gathers send, if an update writes them beside the master."""

    def __init__(self, spec: ChunkSpec, tier: Tier) -> None:
        self.spec = spec
        self.tier = tier
        self.squares: float | torch.Tensor | None = None
        """The sum of squares of the gradient, if it is known already; on a GPU if it was computed there."""
        self.reader: threading.Event | None = None
        """Set when a save beside training has copied this state; changes wait for it."""
        self.beside: HostSums | None = None
        """Adds gradients to a sum in host memory beside backward, if anybody does."""
        self._adding: Future[None] | None = None
        """The last addition that was begun beside backward."""
        self._update: Future[Sequence[Future[None]]] | None = None

    # ------------------------------------------------------------------------------------------ updates beside training

    def update_beside(self, update: "Future[Sequence[Future[None]]]") -> None:
        """Registers an update that ends later, with the tasks it starts; until they end, nobody may read this state."""
        self._update = update
        self.updated()

    def update_early(self, update: "Future[Sequence[Future[None]]]") -> None:
        """As `update_beside`, in backward: the gradient counts as there until `updated`, or `withdraw_update`."""
        self._update = update

    def withdraw_update(self) -> None:
        """Forgets an early update that will change nothing."""
        self._update = None

    @property
    def has_update(self) -> bool:
        """Whether an update was registered and `finish_update` has not waited for it; it may have ended."""
        return self._update is not None

    @property
    def updating(self) -> bool:
        """Whether an update still runs."""
        update = self._update
        if update is None or not update.done():
            return update is not None
        return update.exception() is None and not all(part.done() for part in update.result())

    def wait_for_update(self) -> None:
        """Blocks until a running update has ended; raises the update's error, each time. For any thread."""
        update = self._update
        if update is not None:
            for part in update.result():
                part.result()

    def finish_update(self) -> None:
        """As `wait_for_update`, but for the training thread only; clears `has_update`."""
        self.wait_for_update()
        self._update = None

    @property
    def being_saved(self) -> bool:
        """Whether a save beside training still reads this state."""
        return self.reader is not None and not self.reader.is_set()

    def wait_for_reader(self) -> None:
        """Blocks until values, master and moments may be changed."""
        if self.reader is not None:
            self.reader.wait()

    # ---------------------------------------------------------------------------------------------------------- weights

    @property
    def shown(self) -> torch.Tensor:
        """The memory that parameters of a chunk used in place are views of."""
        raise NotImplementedError

    def values(self) -> torch.Tensor:
        """The values that a gather sends, in the compute dtype. Blocks until a running update has finished."""
        self.finish_update()
        return self.shown

    def prepare(self) -> bool:
        """Starts what `values` would wait for; returns False if that cannot start yet."""
        return True

    @property
    def ready(self) -> bool:
        """Whether `values` returns at once."""
        return not self.updating

    @property
    def may_wait(self) -> bool:
        """Whether `values` may block. It depends on the calls so far and on no time, so it is the same on all ranks."""
        return self.has_update

    def sent(self, mark: Callable[[], Work]) -> None:
        """Called when the copy of `values` to a block was issued; `mark` gives an operation that ends with it."""

    def weights(self) -> Elements:
        """The weights that a checkpoint keeps: fp32 masters, or the values of a frozen chunk."""
        return InMemory(self.shown, self.wait_for_update)

    def fill(self, values: torch.Tensor, start: int = 0) -> None:
        """Sets the first values of the shard's elements from `start` on, given in the master's dtype."""
        self.shown[start : start + values.numel()].copy_(values)

    def store(self, start: int, written: torch.Tensor) -> None:
        """Stores values that user code wrote, from element `start` of the shard on. Blocks for an update or a save."""
        self.finish_update()
        self.wait_for_reader()
        self.shown[start : start + written.numel()].copy_(written)

    def write_values(self, start: int, weights: torch.Tensor) -> None:
        """Writes the values of elements from `start` on, whose `weights` were written; only where these are apart."""

    def kept_values(self) -> torch.Tensor:
        """The result of `values`, computed from `weights`. Blocks as `values` does."""
        return self.weights().read().to(self.spec.key.dtype)

    # -------------------------------------------------------------------------------------------------------- gradients

    has_gradient = False
    """Whether a gradient has landed since the last update."""
    in_values_place = False
    """Whether the gradient is in the place of the values, so that the host reads it before the next gather."""

    def take_place(self) -> torch.Tensor | None:
        """Memory for the sum of the next gradient, so that `add_gradient` copies nothing; None if it must be added.

        The content of the memory is lost, whether or not a gradient follows. Blocks until a running update has
        finished.
        """
        return None

    def add_gradient(self, reduced: torch.Tensor, squares: float | torch.Tensor | None = None) -> None:
        """Adds the gradient summed over the process group, of any dtype and device.

        `squares` is the gradient's sum of squares, if known. For a gradient on a GPU it is computed there before the
        gradient is copied, and stays there, so that nobody waits for it. Blocks until a running update, which reads the
        last gradient, has finished.
        """
        self.finish_update()
        if self.has_gradient:
            self.squares = None
        elif squares is None and reduced.device.type != "cpu":
            self.squares = sum_of_squares(reduced)
        else:
            self.squares = squares
        self._land(reduced)

    def _land(self, reduced: torch.Tensor) -> None:
        raise NotImplementedError

    def _add_to(self, total: torch.Tensor, reduced: torch.Tensor, *, first: bool = False) -> None:
        """Adds a gradient to a sum, now or beside backward; `first`: replaces what the sum holds."""
        if self.beside is not None:
            self._adding = self.beside.add(total, reduced, first=first, behind=self._adding)
        else:
            (total.zero_() if first else total).add_(reduced.to(total.device))

    def finish_sum(self) -> None:
        """Blocks until the gradients that are added beside backward are in their sum; raises the error of one."""
        if self._adding is not None:
            self._adding.result()

    def _leave_sum(self) -> None:
        """Blocks until nobody adds to the sum, which is dropped, and with it the error of an addition."""
        if self._adding is not None:
            self._adding.exception()
            self._adding = None

    def gradient(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The summed gradient of elements `start` to `stop` of the shard, before unscaling. Blocks for `finish_sum`."""
        raise NotImplementedError

    def sum_of_squares(self, threads: int) -> float | torch.Tensor:
        """The sum of squares of the gradient; a scalar on the device if it was computed there. Blocks for `finish_sum`.

        `threads` is for a sum on the host.
        """
        self.finish_sum()
        if self.squares is not None:
            return self.squares
        return sum_of_squares(self.gradient(), threads=threads)

    def change_gradient(self, ranges: Sequence[tuple[int, int]], change: Callable[[torch.Tensor], object]) -> None:
        """Calls `change`, which works in place and element by element, on the gradient of parts of parameters."""
        for start, stop in ranges:
            change(self.gradient(start, stop))
        self.squares = None

    def clear_gradient(self) -> None:
        """Forgets the gradient without an update. Blocks until nobody adds to it."""

    def updated(self) -> None:
        """Called when an update has written, or is about to write, master and values: drops the gradient."""
        self.clear_gradient()

    # ------------------------------------------------------------------------------------------------------------ bytes

    @property
    def compute_tier(self) -> Tier:
        """The tier that gathers read."""
        return self.tier.of_compute

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of the state, by tier; gradients count as if they were there."""
        on_disk = {} if self.spilled is None else {Tier.DISK: self.spilled.nbytes}
        return {self.tier.of_compute: sum(tensor.nbytes for tensor in self._tensors()), **on_disk}

    def _tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError


class FrozenShard(ShardState):
    """Values that no update changes."""

    def __init__(self, spec: ChunkSpec, tier: Tier, values: torch.Tensor) -> None:
        super().__init__(spec, tier)
        self._values = values

    @property
    def shown(self) -> torch.Tensor:
        """As `ShardState.shown`."""
        return self._values

    def _tensors(self) -> list[torch.Tensor]:
        return [self._values]


class _ReadAhead(ShardState):
    """Values on disk. From `prepare` to `sent` they are in a buffer in host memory."""

    compute_tier = Tier.DISK  # type: ignore[assignment]
    may_wait = True  # type: ignore[assignment]

    def __init__(self, spec: ChunkSpec, place: ValuesPlace) -> None:
        super().__init__(spec, Tier.DISK)
        self._place = place

    @property
    def _values(self) -> ValuesElements:
        return ValuesElements(self._place, self.spec.key.dtype, 0, self.spec.shard_numel)

    def prepare(self) -> bool:
        """As `ShardState.prepare`: starts to read, if no update runs and a buffer is free."""
        if self._place.reading is None and self.updating:
            return False
        return self._place.begin() is not None

    @property
    def ready(self) -> bool:
        """As `ShardState.ready`."""
        return (reading := self._place.reading) is not None and reading.done

    def values(self) -> torch.Tensor:
        """As `ShardState.values`. Blocks until they are read. Raises DiskError."""
        self.finish_update()
        reading = self._place.begin()
        assert reading is not None, "gathers take buffers in their order"
        try:
            return reading.values().view(self.spec.key.dtype)
        except DiskError:
            self.sent(Work)
            raise

    def sent(self, mark: Callable[[], Work]) -> None:
        """As `ShardState.sent`."""
        if self._place.reading is not None:
            self._place.give_back(mark())

    def kept_values(self) -> torch.Tensor:
        """As `ShardState.kept_values`."""
        self.finish_update()
        return self._values.read()


class FrozenDiskShard(_ReadAhead):
    """Values on disk that no update changes."""

    def weights(self) -> Elements:
        """As `ShardState.weights`."""
        return self._values

    def fill(self, values: torch.Tensor, start: int = 0) -> None:
        """As `ShardState.fill`."""
        self.weights()[start : start + values.numel()].write(values)

    def store(self, start: int, written: torch.Tensor) -> None:
        """As `ShardState.store`."""
        self.wait_for_reader()
        self.sent(Work)  # what was read ahead is old
        self.weights()[start : start + written.numel()].write(written)

    def held_bytes(self) -> dict[Tier, int]:
        """As `ShardState.held_bytes`; the buffers are the file's."""
        return {Tier.DISK: self._place.nbytes}


class DiskShard(_ReadAhead):
    """Values, master, moments and the gradient's sum on disk, nothing in memory; never used in place."""

    def __init__(self, spec: ChunkSpec, spill: Spill, file: ValuesFile) -> None:
        itemsize = spec.key.dtype.itemsize
        super().__init__(spec, file.take(values_bytes(spec), spec.index, spill.slice_numel * itemsize))
        self.spilled: WhollySpilled = WhollySpilled(spill, spec.shard_numel, spec.index, self._values)

    def weights(self) -> Elements:
        """As `ShardState.weights`."""
        return OnDisk(self.spilled, 0, 0, self.spec.shard_numel, self.wait_for_update)

    def write_values(self, start: int, weights: torch.Tensor) -> None:
        """As `ShardState.write_values`; forgets values that were read ahead."""
        self.sent(Work)
        self._values[start : start + weights.numel()].write(weights)

    def fill(self, values: torch.Tensor, start: int = 0) -> None:
        """As `ShardState.fill`."""
        self.weights()[start : start + values.numel()].write(values)
        self.write_values(start, values)

    def store(self, start: int, written: torch.Tensor) -> None:
        """As `ShardState.store`; unchanged elements keep the precision of the master."""
        self.finish_update()
        self.wait_for_reader()
        _write_master(self.weights()[start : start + written.numel()], written.cpu())
        self.write_values(start, written)

    def _land(self, reduced: torch.Tensor) -> None:
        take = partial(self._take, first=not self.has_gradient)
        if self.beside is None:
            take(reduced)
        else:
            self._adding = self.beside.take(reduced, take, behind=self._adding)
        self.has_gradient = True

    def _take(self, gradient: torch.Tensor, *, first: bool) -> None:
        """Writes a gradient, or adds it to the sum; on the thread of `beside`, if that takes it."""
        squares = self.spilled.add_gradient(gradient, first=first)
        if not first or self.squares is None:
            self.squares = squares

    def gradient(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As `ShardState.gradient`; a copy."""
        assert self.has_gradient, f"chunk {self.spec.index} has no gradient"
        self.finish_sum()
        start, stop, _ = slice(start, stop).indices(self.spec.shard_numel)
        return self.spilled.read(self.spilled.gradient, start, stop)

    def change_gradient(self, ranges: Sequence[tuple[int, int]], change: Callable[[torch.Tensor], object]) -> None:
        """As `ShardState.change_gradient`."""
        self.finish_sum()
        self.squares = self.spilled.change_gradient(ranges, change)

    def clear_gradient(self) -> None:
        """As `ShardState.clear_gradient`."""
        self._leave_sum()
        self.has_gradient = False

    def held_bytes(self) -> dict[Tier, int]:
        """As `ShardState.held_bytes`; the buffers are the files'."""
        return {Tier.DISK: self._place.nbytes + self.spilled.nbytes}


class Fp32Shard(ShardState):
    """fp32 weights that are master and values at once, and memory in which gradients are summed."""

    def __init__(self, spec: ChunkSpec, tier: Tier, master: torch.Tensor, sums: torch.Tensor) -> None:
        super().__init__(spec, tier)
        self.master = master
        self.sums = sums
        """The gradient, once there is one."""

    @property
    def shown(self) -> torch.Tensor:
        """As `ShardState.shown`."""
        assert self.master is not None
        return self.master

    def take_place(self) -> torch.Tensor | None:
        """As `ShardState.take_place`."""
        self.finish_update()
        return None if self.has_gradient else self.sums

    def _land(self, reduced: torch.Tensor) -> None:
        if reduced.data_ptr() == self.sums.data_ptr():
            pass  # summed where they lie
        elif self.has_gradient:
            self._add_to(self.sums, reduced)
        else:
            self.sums.copy_(reduced, non_blocking=True)
        self.has_gradient = True

    def gradient(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As `ShardState.gradient`."""
        assert self.has_gradient, f"chunk {self.spec.index} has no gradient"
        self.finish_sum()
        return self.sums[start:stop]

    def clear_gradient(self) -> None:
        """As `ShardState.clear_gradient`."""
        self._leave_sum()
        self.has_gradient = False

    def _tensors(self) -> list[torch.Tensor]:
        return [self.shown, self.sums]


class Contents(Enum):
    """The content of the values' place in a `MixedShard`."""

    VALUES = "values"
    """The master in the compute dtype, which a gather sends."""
    GRADIENT = "gradient"
    """The reduced gradient."""
    STALE = "stale"
    """Neither; a gather needs the values cast from the master first."""


class MixedShard(ShardState):
    """Values in the compute dtype beside an fp32 master, which may be on disk."""

    def __init__(
        self,
        spec: ChunkSpec,
        tier: Tier,
        values: torch.Tensor,
        master: torch.Tensor | None,
        spilled: Spilled | None = None,
    ) -> None:
        """`spilled` holds the master, as the first of its arrays, if it is not in memory."""
        super().__init__(spec, tier)
        self.values_shard = values
        self.master = master
        self.spilled = spilled
        self.contents = Contents.VALUES
        self.accumulator: torch.Tensor | None = None
        """fp32 sums of a step's gradients, from the first step that has several backwards."""
        self._accumulated = False

    @property
    def shown(self) -> torch.Tensor:
        """As `ShardState.shown`."""
        assert self.values_shard is not None
        return self.values_shard

    def values(self) -> torch.Tensor:
        """As `ShardState.values`; cast from the master again if a gradient has overwritten them."""
        self.finish_update()
        if self.contents is Contents.GRADIENT:
            self._sum().add_(self.shown)
        if self.contents is not Contents.VALUES:
            self.shown.copy_(self.weights().read())
            self.contents = Contents.VALUES
        return self.shown

    def weights(self) -> Elements:
        """As `ShardState.weights`."""
        if self.spilled is not None:
            return OnDisk(self.spilled, 0, 0, self.spec.shard_numel, self.wait_for_update)
        assert self.master is not None
        return InMemory(self.master, self.wait_for_update)

    def fill(self, values: torch.Tensor, start: int = 0) -> None:
        """As `ShardState.fill`."""
        super().fill(values, start)
        self.weights()[start : start + values.numel()].write(values)

    def write_values(self, start: int, weights: torch.Tensor) -> None:
        """As `ShardState.write_values`."""
        self.shown[start : start + weights.numel()].copy_(weights)

    def store(self, start: int, written: torch.Tensor) -> None:
        """As `ShardState.store`; unchanged elements keep the precision of the master."""
        self.finish_update()
        self.wait_for_reader()
        here = slice(start, start + written.numel())
        written = written.to(self.shown.device)
        _write_master(self.weights()[here], written)
        if self.contents is Contents.VALUES:
            self.shown[here].copy_(written)

    def move_to(self, memory: torch.Tensor) -> None:
        """Makes `memory`, flat uint8, the place of the values; other tensors keep the old one."""
        self.values_shard = memory.view(self.shown.dtype)

    @property
    def has_gradient(self) -> bool:  # type: ignore[override]
        """As `ShardState.has_gradient`."""
        return self._accumulated or self.contents is Contents.GRADIENT

    @property
    def in_values_place(self) -> bool:  # type: ignore[override]
        """As `ShardState.in_values_place`."""
        return self.contents is Contents.GRADIENT

    def take_place(self) -> torch.Tensor | None:
        """As `ShardState.take_place`."""
        self.finish_update()
        if self.accumulator is not None or self.contents is Contents.GRADIENT:
            return None
        self.contents = Contents.STALE
        return self.shown

    def _land(self, reduced: torch.Tensor) -> None:
        if reduced.data_ptr() == self.shown.data_ptr():
            self.contents = Contents.GRADIENT
        elif self.contents is Contents.GRADIENT:
            self._add_to(self._sum().add_(self.shown), reduced)
            self.contents = Contents.STALE
        elif self.accumulator is not None:
            first, self._accumulated = not self._accumulated, True
            self._add_to(self.accumulator, reduced, first=first)
        else:
            self.contents = Contents.STALE  # in case the copy is interrupted
            self.shown.copy_(reduced, non_blocking=True)
            self.contents = Contents.GRADIENT

    def gradient(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As `ShardState.gradient`; fp32 if accumulated, else in the compute dtype."""
        assert self.has_gradient, f"chunk {self.spec.index} has no gradient"
        self.finish_sum()
        found = self.accumulator if self._accumulated else self.shown
        assert found is not None
        return found[start:stop]

    def clear_gradient(self) -> None:
        """As `ShardState.clear_gradient`."""
        self._leave_sum()
        if self.contents is Contents.GRADIENT:
            self.contents = Contents.STALE
        self._accumulated = False

    def updated(self) -> None:
        """As `ShardState.updated`."""
        self._leave_sum()
        self.contents = Contents.VALUES
        self._accumulated = False

    def _sum(self) -> torch.Tensor:
        """The accumulator, zeroed if it is not in use."""
        self.finish_sum()
        if self.accumulator is None:
            self.accumulator = torch.zeros_like(self.shown, dtype=torch.float32)
        elif not self._accumulated:
            self.accumulator.zero_()
        self._accumulated = True
        return self.accumulator

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.shown, self.master, self.accumulator) if tensor is not None]


def _write_master(kept: Elements, written: torch.Tensor) -> None:
    """Writes values of user code to their masters; unchanged elements keep the precision of the master."""
    master = kept.read()
    master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))
    kept.write(master)


def build_shards(
    chunks: list[tuple[ChunkSpec, Tier]],
    device: torch.device,
    spill: Spill | None = None,
    beside: HostSums | None = None,
    values: ValuesFile | None = None,
    *,
    values_on_disk: bool = False,
) -> list[ShardState]:
    """Allocates the state of all chunks: one slab for each tier and dtype, several where one would be page-locked
    beyond `LOCKED_BYTES`.

    For chunks on disk, `spill` is the file of masters and moments, and `values` that of values: of frozen chunks, and
    with `values_on_disk` of trainable ones too. `beside` adds gradients of chunks outside the device tier, beside
    backward.

    With a GPU, host state in the compute dtype has slabs of its own: it is copied to the GPU, and so page-locked.
    """

    def slab_of(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> tuple[Tier, torch.dtype, bool]:
        return tier, dtype, device.type == "cuda" and tier is Tier.HOST and dtype == spec.key.dtype

    def is_whole(spec: ChunkSpec, tier: Tier) -> bool:
        return tier is Tier.DISK and (values_on_disk or not spec.key.trainable)

    wanted: defaultdict[tuple[Tier, torch.dtype, bool], list[int]] = defaultdict(lambda: [0])

    def want(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> None:
        key = slab_of(spec, tier, dtype)
        _, _, travels = key
        last = wanted[key][-1]
        if travels and last and (last + spec.shard_numel) * dtype.itemsize > LOCKED_BYTES:
            wanted[key].append(0)
        wanted[key][-1] += spec.shard_numel

    for spec, tier in chunks:
        if not is_whole(spec, tier):
            want(spec, tier.of_compute, spec.key.dtype)
        if spec.key.trainable and tier is not Tier.DISK:
            want(spec, tier, torch.float32)
    slabs = {
        (tier, dtype, travels): deque(Slab(numel, dtype, tier, device, travels=travels) for numel in numels)
        for (tier, dtype, travels), numels in wanted.items()
    }

    def take(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> torch.Tensor:
        left = slabs[slab_of(spec, tier, dtype)]
        while left[0].left < spec.shard_numel:
            left.popleft()
        return left[0].take(spec.shard_numel)

    def build(spec: ChunkSpec, tier: Tier) -> ShardState:
        if is_whole(spec, tier):
            assert values is not None, "values on disk without a file"
            if not spec.key.trainable:
                return FrozenDiskShard(spec, values.take(values_bytes(spec), spec.index))
            assert spill is not None, "chunks on disk without a file"
            return DiskShard(spec, spill, values)
        own = take(spec, tier.of_compute, spec.key.dtype)
        if not spec.key.trainable:
            return FrozenShard(spec, tier, own)
        if tier is Tier.DISK:
            assert spill is not None, "chunks on disk without a file"
            return MixedShard(spec, tier, own, None, spill.take(spec.shard_numel, spec.index))
        master = take(spec, tier, torch.float32)
        if spec.key.dtype == torch.float32:
            return Fp32Shard(spec, tier, master, sums=own)
        return MixedShard(spec, tier, own, master)

    shards = [build(spec, tier) for spec, tier in chunks]
    for shard in shards:
        shard.beside = None if shard.tier is Tier.DEVICE else beside
    return shards
