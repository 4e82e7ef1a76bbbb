"""Memory of the tiers: slabs on the device and in host memory, and the host memory that is left.

Owns the slabs of shards; `disk` owns the file.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from elixir_moe.accelerator import api, is_integrated, name_of, register_host_memory
from elixir_moe.chunks.ledger import paged_bytes
from elixir_moe.chunks.plan import Tier, size_bytes, size_text
from elixir_moe.errors import TierError
from elixir_moe.kernels import helpers, host_threads
from elixir_moe.memory.direct_file import paged_memory
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.torch_private import sparse_parts

LOCKED_BYTES = 64 << 30
"""The most that one slab page-locks: drivers refuse hundreds of GiB in one call."""
_FOR_THREADS_BYTES = 4 << 20
"""A shorter copy ends before other threads have begun."""
_STATE_BYTES = 16
"""Most bytes of a trained parameter's element: value, master, two moments, and what its update needs besides."""

HOST_MEMORY = "ELIXIR_HOST_MEMORY"
"""The environment variable for the memory of this host, as in ``120 GiB``, where the system shows less than it gives.
"""
_CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""(folder, limit, usage, droppable part of the usage) of cgroup versions 2 and 1."""

_RELIEF = {
    Tier.DEVICE: "keep less on the device (em.Plan.offload(device=..., rcache=...))",
    Tier.HOST: "put more on the device or on disk (em.Plan.offload(device=..., disk=...))",
}
"""Advice for a tier that is too small; `disk` has its own."""


@contextlib.contextmanager
def allocation(nbytes: int, what: str, tier: Tier) -> Iterator[None]:
    """A context that allocates `nbytes` for `what`: raises TierError if the tier has no more."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        size = size_text(nbytes)
        raise TierError(
            f"{tier} memory: cannot allocate {size} for {what}: {error}; {_RELIEF[tier]}, or use more ranks"
        ) from error


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, sparse or not."""
    parts = sparse_parts(tensor) if tensor.layout is torch.sparse_coo else (tensor,)
    return sum(part.nbytes for part in parts)


class Slab:
    """One allocation of exactly `numel` elements, handed out piece by piece.

    `travels` marks a host slab that is copied to a GPU and back. It is page-locked, registered once at its exact size
    (torch's own pinned allocator rounds up to powers of two); if the system refuses, it stays pageable, with a warning.
    Processes that are forked later have no page-locked memory: fork would copy all of it at once, for a process that
    cannot use the GPU.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, tier: Tier, device: torch.device, *, travels: bool = False
    ) -> None:
        self._taken = 0
        nbytes = numel * dtype.itemsize
        with allocation(nbytes, "shards", tier):
            if tier is Tier.DEVICE:
                self._memory = torch.zeros(numel, dtype=dtype, device=device)
            elif travels and nbytes:
                self._memory = locked_zeros(nbytes, host_threads(device)).view(dtype)
            else:
                self._memory = host_zeros(numel, dtype, host_threads(device), shown=device.type == "cpu")

    @property
    def left(self) -> int:
        """Elements that can still be taken."""
        return self._memory.numel() - self._taken

    def allocate(self, numel: int) -> torch.Tensor:
        """The next `numel` elements, zeros."""
        piece = self._memory[self._taken : self._taken + numel]
        assert piece.numel() == numel, "slab handed out beyond its size"
        self._taken += numel
        return piece


def host_zeros(numel: int, dtype: torch.dtype, threads: int, *, shown: bool = True) -> torch.Tensor:
    """Zeros in host memory, touched first by many threads.

    Unless parameters are views of it (`shown`), forked processes do not inherit the memory: while the workers of a
    DataLoader live, the system would keep a second copy of each page that an update writes.
    """
    if shown or not numel:
        memory = torch.empty(numel, dtype=dtype, device="cpu")
    else:
        memory = untouched_zeros(numel, dtype, shown=False)
    _clear(memory, threads)
    return memory


def untouched_zeros(numel: int, dtype: torch.dtype, *, shown: bool) -> torch.Tensor:
    """Zeros in host memory, in pages of their own that the system provides when they are written.

    `shown` is as for `host_zeros`.
    """
    nbytes = numel * dtype.itemsize
    pages = mmap.mmap(-1, paged_bytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not shown:
        pages.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to provide, and to page-lock
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes).view(dtype)


def locked_zeros(nbytes: int, threads: int) -> torch.Tensor:
    """Page-locked bytes, all zero, touched first by many threads.

    Forked processes do not have them. They are whole pages, since such a process has what lies next to them.
    """
    pages = paged_memory(nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    _clear(memory, threads)
    if page_lock(memory):
        pages.madvise(mmap.MADV_DONTFORK)
    return memory


def _clear(memory: torch.Tensor, threads: int) -> None:
    """Writes zeros on many threads: the system finds and clears each page when it is touched first.

    torch uses its own number of threads, which torchrun sets to one, and page-locking touches pages on a single thread.
    """
    parts = helpers(threads)
    if parts == 1:
        memory.zero_()
        return
    with ThreadPoolExecutor(parts, "elixir-zeros") as pool:
        list(pool.map(torch.Tensor.zero_, memory.chunk(parts)))


def copy_on_host(place: torch.Tensor, values: torch.Tensor, threads: int) -> None:
    """Does ``place.copy_(values)``, both in host memory; many elements on many threads."""
    parts = helpers(threads)
    if parts == 1 or not place.dim() or place.nbytes < _FOR_THREADS_BYTES:
        place.copy_(values)
        return
    with ThreadPoolExecutor(parts, "elixir-copy") as pool:
        list(pool.map(torch.Tensor.copy_, place.chunk(parts), values.expand_as(place).chunk(parts)))


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system.

    The C library gives back large blocks by itself. Others it keeps for later, though a model of experts with a few MiB
    each consists of nothing else.
    """
    with contextlib.suppress(AttributeError, OSError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


def page_lock(memory: torch.Tensor) -> bool:
    """Registers host memory with the GPU for as long as its storage lives; warns if the system refuses.

    Returns whether it is registered.
    """
    if (unregister := register_host_memory(memory)) is not None:
        weakref.finalize(memory.untyped_storage(), unregister).atexit = False
        return True
    warnings.warn(
        f"host memory of {memory.nbytes} bytes could not be page-locked; transfers will be slower", stacklevel=3
    )
    return False


def check_fits(nbytes: int, left: int, what: str, tier: Tier = Tier.HOST, *, relief: str = "") -> None:
    """Raises TierError if `nbytes` exceeds the bytes that are `left`; `relief` is what to change, if not the plan."""
    if nbytes > left:
        raise TierError(
            f"{tier} memory: the plan needs {size_text(nbytes)} for {what}, {size_text(left)} are left "
            f"({size_text(nbytes - left)} short): {relief or f'{_RELIEF[tier]}, use more ranks or hosts'}"
        )


def is_one_memory(device: torch.device) -> bool:
    """Whether a GPU has the memory of its host, as integrated ones have (GB10, Strix Halo); a GH200 has its own.

    Not measured on such a GPU. The result is False for a CPU, which stands in for a GPU with its host.
    """
    return is_integrated(device)


def device_left(device: torch.device) -> tuple[str, int]:
    """(name of the GPU, alike for all processes that use it; bytes of its memory this process can still allocate).

    In one memory with the host, the GPU's driver does not count as free what the system would drop, such as cached
    files.
    """
    unused = api(device).memory_reserved(device) - api(device).memory_allocated(device)
    free, total = api(device).mem_get_info(device)
    if is_one_memory(device):
        free = min(total, host_bytes_left())
    return name_of(device), free + unused


def host_bytes_left(root: Path = Path("/")) -> int:
    """Bytes this process can still allocate: Linux's available memory, or less if its cgroup (1 or 2) allows less.

    Cached files count as free, since the system drops them before it refuses memory. On other systems the result is
    `sys.maxsize`. Where `ELIXIR_HOST_MEMORY` says how much the host has, what is in use is all that is taken off.

    Raises:
        PlanError: the variable does not give a size.
    """
    left = [sys.maxsize]
    whole = size_bytes(HOST_MEMORY, os.environ.get(HOST_MEMORY))
    meminfo = root / "proc/meminfo"
    table = _table(meminfo) if meminfo.exists() else {}
    if whole is not None:
        return max(0, whole - (table.get("MemTotal:", 0) - table.get("MemAvailable:", 0)) * 1024)
    if table:
        left.append(table["MemAvailable:"] * 1024)
    for folder, limit, usage, cached in _CGROUPS:
        here = root / "sys/fs/cgroup" / folder
        if (here / limit).exists() and (allowed := (here / limit).read_text().strip()) != "max":
            left.append(int(allowed) - int((here / usage).read_text()) + _table(here / "memory.stat")[cached])
    return min(left)


def bytes_freed(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of host memory that the system gets back when the frozen ones of `parameters` have lost their data.

    What is mapped from a file counts as free before, and what was never written has no memory.
    """
    held = sum(local_of(p).nbytes for p in parameters if not p.requires_grad and local_of(p).is_cpu)
    return min(held, _anonymous_bytes()) if held else 0


def host_bytes_for_plan(parameters: Iterable[nn.Parameter], left: int) -> int:
    """Bytes of host memory that a plan may use: those that are `left`, and those of frozen `parameters`.

    Frozen chunks take the place of these parameters, one after the other. All other state is allocated before: the
    parameters do not count unless half of what is left is enough for it.
    """
    given = list(parameters)
    state_bytes = _STATE_BYTES * sum(local_of(p).numel() for p in given if p.requires_grad)
    return left + (bytes_freed(given) if state_bytes <= left // 2 else 0)


def _anonymous_bytes(root: Path = Path("/")) -> int:
    """Memory that this process has written and that no file has; 0 if the system does not say."""
    status = root / "proc/self/status"
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _table(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
