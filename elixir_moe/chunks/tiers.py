"""Where bytes are at home: slabs of device and host memory, and the long-lived state of each chunk cut from them.

Owns the allocation of everything that outlives a step, and `Home`, which knows what a compute shard holds at the
moment. Moves nothing between ranks. Source: "master copy of each scattered shard", Elixir v1, VII; memory of a chunk,
v2, 4.1.
"""

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from enum import Enum
from pathlib import Path

import torch

from elixir_moe.chunks.layout import ChunkSpec
from elixir_moe.chunks.plan import Tier
from elixir_moe.errors import TierError

_CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of both versions: (folder, limit, usage, droppable part of it)."""


class Slab:
    """One allocation of exactly `numel` elements, handed out piece by piece.

    Host slabs are page-locked where there is a GPU, registered once at their exact size (the framework's own pinned
    allocator rounds up to powers of two); if the system refuses, they stay pageable, with one warning.
    """

    def __init__(self, numel: int, dtype: torch.dtype, tier: Tier, device: torch.device) -> None:
        self._taken = 0
        nbytes = numel * dtype.itemsize
        try:
            self._memory = torch.zeros(numel, dtype=dtype, device=device if tier is Tier.DEVICE else "cpu")
        except (MemoryError, RuntimeError) as error:
            raise TierError(f"{tier} memory: cannot allocate {nbytes / 2**30:.2f} GiB for shards: {error}") from error
        if tier is Tier.HOST and device.type == "cuda" and nbytes:
            _page_lock(self._memory)

    def take(self, numel: int) -> torch.Tensor:
        """The next `numel` elements, zeros."""
        piece = self._memory[self._taken : self._taken + numel]
        assert piece.numel() == numel, "slab handed out beyond its size"
        self._taken += numel
        return piece


def _page_lock(memory: torch.Tensor) -> None:
    cudart, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[attr-defined]
    if int(cudart.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    else:
        with contextlib.suppress(RuntimeError):  # the error is pending: the next launch would raise it
            torch.zeros(1, device="cuda")
        warnings.warn(
            f"host memory of {memory.nbytes} bytes could not be page-locked; transfers will be slower", stacklevel=3
        )


def check_fits(nbytes: int, left: int, where: str) -> None:
    """Raises TierError if `nbytes` is more than what is `left`."""
    if nbytes > left:
        raise TierError(
            f"host memory: the plan needs {nbytes / 2**30:.2f} GiB for {where}, {left / 2**30:.2f} GiB are left "
            f"({(nbytes - left) / 2**30:.2f} GiB short): put more chunks on the device, use more ranks or hosts"
        )


def host_bytes_left(root: Path = Path("/")) -> int:
    """Memory this process can still have: what Linux has available, or less where its cgroup (1 or 2) allows less.

    Cached files count as free, as the system drops them before it refuses memory. Without limits (another system) it is
    `sys.maxsize`.
    """
    left = [sys.maxsize]
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        left.append(_table(meminfo)["MemAvailable:"] * 1024)
    for folder, limit, usage, cached in _CGROUPS:
        here = root / "sys/fs/cgroup" / folder
        if (here / limit).exists() and (allowed := (here / limit).read_text().strip()) != "max":
            left.append(int(allowed) - int((here / usage).read_text()) + _table(here / "memory.stat")[cached])
    return min(left)


def _table(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}


class Holds(Enum):
    """What the compute shard of a chunk holds."""

    VALUES = "values"
    """The compute dtype's copy of the master shard: what a gather sends."""
    GRADIENT = "gradient"
    """The reduced gradient, which took the values' place (v2, 4.1: one buffer serves both)."""
    STALE = "stale"
    """Neither: to be cast from the master shard before it is sent."""


class Home:
    """The long-lived state of one chunk on one rank: compute shard and master shard of `shard_numel` elements.

    The gradient shard takes the place of the compute shard, which the update rewrites anyway. If the values are wanted
    again before the update (a second micro-batch), the gradient moves to an fp32 accumulator, allocated then and kept,
    and the values are cast anew from the master. An fp32 chunk sends its master shard itself and needs neither.
    """

    def __init__(self, spec: ChunkSpec, tier: Tier, compute: torch.Tensor, master: torch.Tensor | None) -> None:
        self.spec = spec
        self.tier = tier
        self._compute = compute
        self._master = master
        self._update: Future[None] | None = None
        self.accumulator: torch.Tensor | None = None
        self.pieces: dict[int, torch.Tensor] | None = {} if compute is master else None
        """Of a chunk used in place that no other rank has: by first element, the fp32 gradients as autograd made them,
        never copied and in no one piece of memory."""
        self.holds = Holds.VALUES if self._sends_compute else Holds.STALE
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
        """The master shard; None of a frozen chunk."""
        self.finish_update()
        return self._master

    def update_beside(self, update: "Future[None]") -> None:
        """An update that ends later takes what is here now; until then nobody gets to see it."""
        self._update = update
        self.updated()

    @property
    def has_update(self) -> bool:
        """Whether an update was begun that nobody has waited for yet, be it under way or not."""
        return self._update is not None

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._update is not None and not self._update.done()

    def finish_update(self) -> None:
        """Blocks until an update that is under way has ended; raises what it failed of, each time."""
        update = self._update
        if update is not None:
            update.result()
            self._update = None

    @property
    def _sends_compute(self) -> bool:
        return self._master is None or self.spec.key.dtype != torch.float32

    @property
    def shows_master(self) -> bool:
        """Whether what a chunk used in place shows is all that is kept: no rounded copy of a master."""
        return self.master is None or not self._sends_compute

    def place(self) -> torch.Tensor:
        """Where `values` lie."""
        return self.compute if self.master is None or self._sends_compute else self.master

    def move_to(self, memory: torch.Tensor) -> None:
        """`place` is in `memory`, flat uint8, from now on; somebody else keeps the old one and what it shows."""
        place = memory.view(self.compute.dtype)
        if self.pieces is not None:
            self._compute = self._master = place
        elif self.place() is self.compute:
            self._compute = place
        else:
            self._master = place

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept at home, gradients included as if they were there."""
        kept = [t for t in (self.compute, self.master, self.accumulator) if t is not None]
        return sum(t.nbytes for t in kept)  # where there are pieces, the compute shard is the master: as many bytes

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has landed since the last update."""
        return self._accumulated or self.holds is Holds.GRADIENT or bool(self.pieces)

    def values(self) -> torch.Tensor:
        """The shard a gather sends, in the compute dtype."""
        if self.master is None or not self._sends_compute:
            return self.compute if self.master is None else self.master
        if self.holds is Holds.GRADIENT:
            self._sum().add_(self.compute)
        if self.holds is not Holds.VALUES:
            self.compute.copy_(self.master)
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
        if self.master is None:
            self.compute[here].copy_(written)
        elif not self._sends_compute:
            self.master[here].copy_(written)
        else:
            master, written = self.master[here], written.to(self.compute.device)
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))
            if self.holds is Holds.VALUES:
                self.compute[here].copy_(written)

    def shows(self, shard: torch.Tensor) -> bool:
        """Whether `shard`, on any device, is what `values` gives."""
        kept = self.compute if self.master is None else self.master
        return torch.equal(shard, kept.to(shard.device, shard.dtype))

    def free_place(self) -> torch.Tensor | None:
        """Where the next gradient can be summed to save `add_gradient` the copy; None if it is to be added."""
        return self.compute if self.accumulator is None and self.holds is not Holds.GRADIENT else None

    def add_gradient(self, reduced: torch.Tensor) -> None:
        """Adds the gradient summed over the process group, of any dtype and device."""
        if reduced.data_ptr() == self.compute.data_ptr():
            self._take_in_place()
        elif self.accumulator is not None:
            self._sum().add_(reduced.to(self.accumulator.device))
        elif self.holds is Holds.GRADIENT and self._sends_compute:
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
            own = gradient.clone() if gradient.requires_grad else gradient  # a graph needs it as it is
            self.pieces[start] = own.reshape(-1)

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
        self.holds = Holds.VALUES if self._sends_compute else Holds.STALE
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


def build_homes(chunks: list[tuple[ChunkSpec, Tier]], device: torch.device) -> list[Home]:
    """Allocates the state of all chunks: one slab a tier and dtype."""
    wanted: dict[tuple[Tier, torch.dtype], int] = {}
    for spec, tier in chunks:
        if not spec.keeps_pieces:
            wanted[tier, spec.key.dtype] = wanted.get((tier, spec.key.dtype), 0) + spec.shard_numel
        if spec.key.trainable:
            wanted[tier, torch.float32] = wanted.get((tier, torch.float32), 0) + spec.shard_numel
    slabs = {(tier, dtype): Slab(numel, dtype, tier, device) for (tier, dtype), numel in wanted.items()}
    homes = []
    for spec, tier in chunks:
        master = slabs[tier, torch.float32].take(spec.shard_numel) if spec.key.trainable else None
        compute = master if spec.keeps_pieces else slabs[tier, spec.key.dtype].take(spec.shard_numel)
        assert compute is not None
        homes.append(Home(spec, tier, compute, master))
    return homes
