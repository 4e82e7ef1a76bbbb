"""What a chunk is between two uses: its long-lived state on one rank.

Owns `Home`, which knows what a compute shard holds at the moment, and where master shard and gradient are. Moves
nothing between ranks. Source: "master copy of each scattered shard", Elixir v1, VII; memory of a chunk, v2, 4.1.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch

from elixir_moe.chunks.layout import ChunkSpec
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.spill import Spill, Spilled
from elixir_moe.chunks.tiers import Slab
from elixir_moe.kernels import sum_of_squares


class Holds(Enum):
    """What the compute shard of a chunk holds."""

    VALUES = "values"
    """The compute dtype's copy of the master shard: what a gather sends."""
    GRADIENT = "gradient"
    """The reduced gradient, which took the values' place (v2, 4.1: one buffer serves both)."""
    STALE = "stale"
    """Neither: to be cast from the master shard before it is sent."""


class Kept(Protocol):
    """Flat elements of a shard at home, wherever that is. Having them waits for no update; `read` and `write` do."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        ...

    def read(self) -> torch.Tensor:
        """They themselves where they are in memory, else a copy."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Takes these values for them; of what `read` gave, changed, nothing is copied in memory."""
        ...

    def __getitem__(self, part: slice) -> "Kept":
        """Some of them."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Elements that are at hand."""

    tensor: torch.Tensor
    await_update: Callable[[], None]
    """Blocks until an update of them that is under way has ended (`Home.await_update`)."""

    @property
    def dtype(self) -> torch.dtype:
        """As `Kept.dtype`."""
        return self.tensor.dtype

    def read(self) -> torch.Tensor:
        """As `Kept.read`."""
        self.await_update()
        return self.tensor

    def write(self, values: torch.Tensor) -> None:
        """As `Kept.write`."""
        self.await_update()
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
    await_update: Callable[[], None]
    """As `InMemory.await_update`."""
    dtype = torch.float32

    def read(self) -> torch.Tensor:
        """As `Kept.read`."""
        self.await_update()
        return self.spilled.read(self.array, self.start, self.stop)

    def write(self, values: torch.Tensor) -> None:
        """As `Kept.write`."""
        self.await_update()
        self.spilled.write(self.array, self.start, values.cpu())

    def __getitem__(self, part: slice) -> "OnDisk":
        start, stop, _ = part.indices(self.stop - self.start)
        return replace(self, start=self.start + start, stop=self.start + max(start, stop))


class Home:
    """The long-lived state of one chunk on one rank: compute shard and master shard of `shard_numel` elements.

    The gradient shard takes the place of the compute shard, which the update rewrites anyway. If the values are wanted
    again before the update (a second micro-batch), the gradient moves to an fp32 accumulator, allocated then and kept,
    and the values are cast anew from the master. An fp32 chunk sends its master shard itself and needs neither, if that
    is in memory.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        tier: Tier,
        compute: torch.Tensor,
        master: torch.Tensor | None,
        spilled: Spilled | None = None,
    ) -> None:
        """`spilled` has the master shard, first of its arrays, where it is not in memory."""
        self.spec = spec
        self.tier = tier
        self.spilled = spilled
        self._compute = compute
        self._master = master
        self._update: Future[Sequence[Future[None]]] | None = None
        self.accumulator: torch.Tensor | None = None
        self.pieces: dict[int, torch.Tensor] | None = {} if compute is master else None
        """Of a chunk used in place that no other rank has: by first element, the fp32 gradients as autograd made them,
        never copied and in no one piece of memory."""
        self.sends_compute = master is None or spec.key.dtype != torch.float32
        """Gathers send the compute shard, and not the master itself."""
        self.holds = Holds.VALUES if self.sends_compute else Holds.STALE
        self.squares: float | torch.Tensor | None = None
        """The sum of squares of the gradient, if it was found on the way here; on a GPU if it was found there."""
        self.reader: threading.Event | None = None
        """Set when a save beside the training has copied what is kept here; whoever changes it waits for that."""
        self._accumulated = False

    @property
    def compute(self) -> torch.Tensor:
        """The compute shard. Whoever asks waits for an update that is under way; so it is with `master`."""
        self.finish_update()
        return self._compute

    @property
    def master(self) -> torch.Tensor | None:
        """The master shard; None of a frozen chunk, or where it is not in memory."""
        self.finish_update()
        return self._master

    @property
    def weights(self) -> Kept:
        """What a checkpoint keeps: the master shard, or the compute shard of a frozen chunk."""
        if self.spilled is not None:
            return OnDisk(self.spilled, 0, 0, self.spec.shard_numel, self.await_update)
        return InMemory(self._compute if self._master is None else self._master, self.await_update)

    @property
    def device(self) -> torch.device:
        """Where the compute shard lies; waits for no update."""
        return self._compute.device

    def fill(self, values: torch.Tensor) -> None:
        """Takes the shard's first values, in the master's dtype."""
        self.compute.copy_(values)
        self.weights.write(values)

    def update_beside(self, update: "Future[Sequence[Future[None]]]") -> None:
        """An update, and what it begins in its turn, end later and take what is here now; until then nobody sees it."""
        self._update = update
        self.updated()

    @property
    def has_update(self) -> bool:
        """Whether an update was begun that nobody has waited for yet, be it under way or not."""
        return self._update is not None

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        update = self._update
        if update is None or not update.done():
            return update is not None
        return update.exception() is None and not all(part.done() for part in update.result())

    def finish_update(self) -> None:
        """Blocks until an update that is under way has ended; raises what it failed of, each time."""
        self.await_update()
        self._update = None

    def await_update(self) -> None:
        """As `finish_update`, on any thread: that one beside training has waited decides nothing (`has_update`)."""
        update = self._update
        if update is not None:
            for part in update.result():
                part.result()

    @property
    def shows_master(self) -> bool:
        """Whether what a chunk used in place shows is all that is kept: no rounded copy of a master."""
        return not (self.spec.key.trainable and self.sends_compute)

    def place(self) -> torch.Tensor:
        """Where `values` lie."""
        return self.compute if self.sends_compute else self._in_memory()

    def _in_memory(self) -> torch.Tensor:
        master = self.master
        assert master is not None, f"chunk {self.spec.index} has no master in memory"
        return master

    def move_to(self, memory: torch.Tensor) -> None:
        """`place` is in `memory`, flat uint8, from now on; somebody else keeps the old one and what it shows."""
        place = memory.view(self.compute.dtype)
        if self.pieces is not None:
            self._compute = self._master = place
        elif self.place() is self.compute:
            self._compute = place
        else:
            self._master = place

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of all that is kept at home, by where it lies; gradients included as if they were there.

        Waits for no update, as none changes them.
        """
        kept = [t for t in (self._compute, self._master, self.accumulator) if t is not None]
        memory = sum(t.nbytes for t in kept)  # where there are pieces, the compute shard is the master: as many bytes
        on_disk = {} if self.spilled is None else {Tier.DISK: self.spilled.nbytes}
        return {self.tier.of_compute: memory, **on_disk}

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has landed since the last update."""
        return self._accumulated or self.holds is Holds.GRADIENT or bool(self.pieces)

    def values(self) -> torch.Tensor:
        """The shard a gather sends, in the compute dtype."""
        if not self.sends_compute:
            return self._in_memory()
        if self.holds is Holds.GRADIENT:
            self._sum().add_(self.compute)
        if self.holds is not Holds.VALUES:
            self.compute.copy_(self.weights.read())
            self.holds = Holds.VALUES
        return self.compute

    def await_reader(self) -> None:
        """Returns when values, master and moments may be changed."""
        if self.reader is not None:
            self.reader.wait()

    def store(self, start: int, written: torch.Tensor) -> None:
        """Takes values that user code wrote, for the elements from `start` of the shard.

        What it left alone keeps its master's precision.
        """
        self.await_reader()
        here = slice(start, start + written.numel())
        if not self.spec.key.trainable:
            self.compute[here].copy_(written)
        elif not self.sends_compute:
            self._in_memory()[here].copy_(written)
        else:
            kept, written = self.weights[here], written.to(self.compute.device)
            master = kept.read()
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))
            kept.write(master)
            if self.holds is Holds.VALUES:
                self.compute[here].copy_(written)

    def shows(self, shard: torch.Tensor) -> bool:
        """Whether `shard`, on any device, is what `values` gives."""
        kept = self.compute if self.holds is Holds.VALUES else self.weights.read()
        return torch.equal(shard, kept.to(shard.device, shard.dtype))

    def free_place(self) -> torch.Tensor | None:
        """Where the next gradient can be summed to save `add_gradient` the copy; None if it is to be added."""
        return self.compute if self.accumulator is None and self.holds is not Holds.GRADIENT else None

    def add_gradient(self, reduced: torch.Tensor, squares: float | torch.Tensor | None = None) -> None:
        """Adds the gradient summed over the process group, of any dtype and device.

        `squares` is its sum of squares, where that is known. On a GPU it is found before the gradient leaves, and stays
        there: nobody waits for it, and the host need not pass over what has come.
        """
        if self.has_gradient:
            self.squares = None
        elif squares is None and reduced.device.type != "cpu":
            self.squares = sum_of_squares(reduced)
        else:
            self.squares = squares
        if reduced.data_ptr() == self.compute.data_ptr():
            self._take_in_place()
        elif self.accumulator is not None:
            self._sum().add_(reduced.to(self.accumulator.device))
        elif self.holds is Holds.GRADIENT and self.sends_compute:
            self._sum().add_(self.compute).add_(reduced.to(self.compute.device))
            self.holds = Holds.STALE
        elif self.holds is Holds.GRADIENT:
            self.compute.add_(reduced.to(self.compute.device))
        else:
            self.compute.copy_(reduced, non_blocking=True)
            self.holds = Holds.GRADIENT

    def _take_in_place(self) -> None:
        """A gradient was summed where the compute shard lies, over what earlier ones have left there."""
        self.holds = Holds.GRADIENT
        if self.accumulator is not None:
            self._sum().add_(self.compute)
            self.holds = Holds.STALE

    def overwrite(self) -> None:
        """Gradients begin to take the place of the values, of a chunk used in place."""
        self.holds = Holds.STALE

    def take_piece(self, start: int, gradient: torch.Tensor) -> None:
        """Keeps the gradient of the parameter that starts at `start`, or adds it to what is kept."""
        assert self.pieces is not None
        if start in self.pieces:
            self.pieces[start].add_(gradient.reshape(-1))
        else:
            self.pieces[start] = gradient.reshape(-1)

    def gradient(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The summed gradients of some elements of the shard, or of one parameter where there are `pieces`.

        They are unscaled, fp32 if they were accumulated, else in the compute dtype.
        """
        if self.pieces is not None:
            piece = self.pieces.get(start)
            return torch.zeros_like(self.compute[start:stop]) if piece is None else piece
        found = self.accumulator if self._accumulated else self.compute
        assert self._accumulated or self.holds is Holds.GRADIENT, f"chunk {self.spec.index} has no gradient"
        assert found is not None
        return found if stop is None else found[start:stop]

    def gradients(self) -> Iterable[torch.Tensor]:
        """All of it, in one piece or several."""
        return (self.gradient(),) if self.pieces is None else self.pieces.values()

    def updated(self) -> None:
        """The update has written master and compute shard: no gradient is left."""
        self.holds = Holds.VALUES if self.sends_compute else Holds.STALE
        self._drop_sums()

    def clear_gradient(self) -> None:
        """Forgets the gradient without an update."""
        if self.holds is Holds.GRADIENT:
            self.holds = Holds.STALE
        self._drop_sums()

    def _drop_sums(self) -> None:
        self._accumulated = False
        if self.pieces is not None:
            self.pieces.clear()

    def _sum(self) -> torch.Tensor:
        """The accumulator, zeroed if it is not in use."""
        if self.accumulator is None:
            self.accumulator = torch.zeros_like(self.compute, dtype=torch.float32)
        elif not self._accumulated:
            self.accumulator.zero_()
        self._accumulated = True
        return self.accumulator


def build_homes(chunks: list[tuple[ChunkSpec, Tier]], device: torch.device, spill: Spill | None = None) -> list[Home]:
    """Allocates the state of all chunks: one slab a tier and dtype, and `spill` for what is on disk.

    Beside a GPU there are two in host memory: what is sent there is page-locked, other masters are not.
    """

    def slab_of(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> tuple[Tier, torch.dtype, bool]:
        return tier, dtype, device.type == "cuda" and tier is Tier.HOST and dtype == spec.key.dtype

    wanted: Counter[tuple[Tier, torch.dtype, bool]] = Counter()
    for spec, tier in chunks:
        if not spec.keeps_pieces:
            wanted[slab_of(spec, tier.of_compute, spec.key.dtype)] += spec.shard_numel
        if spec.key.trainable and tier is not Tier.DISK:
            wanted[slab_of(spec, tier, torch.float32)] += spec.shard_numel
    slabs = {
        (tier, dtype, travels): Slab(numel, dtype, tier, device, travels=travels)
        for (tier, dtype, travels), numel in wanted.items()
    }
    homes = []
    for spec, tier in chunks:
        master = spilled = None
        if tier is Tier.DISK:
            assert spill is not None, "chunks on disk without a file"
            spilled = spill.take(spec.shard_numel, spec.index)
        elif spec.key.trainable:
            master = slabs[slab_of(spec, tier, torch.float32)].take(spec.shard_numel)
        compute = (
            master
            if spec.keeps_pieces
            else slabs[slab_of(spec, tier.of_compute, spec.key.dtype)].take(spec.shard_numel)
        )
        assert compute is not None
        homes.append(Home(spec, tier, compute, master, spilled))
    return homes
