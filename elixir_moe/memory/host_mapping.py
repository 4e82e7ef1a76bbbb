"""Memory that several processes of a host map: one copy for all of them, and no name by which it could be left behind.

Owns a memfd and its mapping. Knows no ranks and no process group (`wrapping.shared_frozen` does).

The file has no name anywhere: it dies with the last process that maps it, however that ends. Another process of the
same user opens it through the maker's ``/proc/PID/fd``. Its first bytes hold a token until everybody has it open: in
another container the number may mean another process. The memory is allocated at once, for the cgroup of its maker.
Where there is too little, that is an error here and no SIGBUS later.
Source: MegaTrain's one host copy for all GPUs of a host; NVIDIA's `cudaHostRegister` on shared mappings.
"""

import mmap
import os
from contextlib import suppress
from typing import Self

import torch

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.ledger import PAGE_BYTES
from elixir_moe.chunks.plan import Tier
from elixir_moe.memory.slabs import LOCKED_BYTES, allocation, page_lock

TOKEN_BYTES = 16
_NAME = "elixir-moe"
"""The mapping's name in ``/proc/PID/maps``; no file has it."""


class HostMapping:
    """A mapping of memory that other processes may map too; flat uint8 in `memory`."""

    def __init__(self, descriptor: int, nbytes: int, device: torch.device) -> None:
        """Maps `descriptor`, and closes it. With a GPU, the mapping is page-locked for this process."""
        try:
            pages = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        if is_accelerator(device):  # not measured
            locked = [page_lock(part) for part in self.memory.split(LOCKED_BYTES)]
            if all(locked):
                pages.madvise(mmap.MADV_DONTFORK)

    @classmethod
    def of(cls, maker: int, descriptor: int, token: bytes, nbytes: int, device: torch.device) -> Self:
        """The mapping of the memory that process `maker` has open as `descriptor`.

        Raises OSError: this process cannot open it, or it is other memory.
        """
        found = os.open(f"/proc/{maker}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(found, TOKEN_BYTES, 0) != token:
                raise OSError(f"process {maker} is another one here")
        except BaseException:
            os.close(found)
            raise
        return cls(found, nbytes, device)


class SharedFile:
    """The file of a mapping while others open it."""

    def __init__(self, nbytes: int) -> None:
        """Allocates it. Raises OSError if the system has no such files, and TierError if host memory is too small."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self.token = os.urandom(TOKEN_BYTES)
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            with allocation(self.nbytes, "frozen chunks, once for all ranks of the host", Tier.HOST):
                os.posix_fallocate(self.descriptor, 0, self.nbytes)
            os.pwrite(self.descriptor, self.token, 0)
        except BaseException:
            self.close()
            raise

    def clear_token(self) -> None:
        """Makes the memory all zeros; to be called when everybody has it open."""
        os.pwrite(self.descriptor, bytes(TOKEN_BYTES), 0)

    def close(self) -> None:
        """Closes the file here; who maps it keeps it."""
        with suppress(OSError):
            os.close(self.descriptor)
