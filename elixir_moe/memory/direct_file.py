"""A file that goes around the system's cache where the file system lets it, and the memory such a file needs.

Owns O_DIRECT: who may use it, and what happens where it is refused. Knows nothing of what the bytes are.

The cache would cost a copy of everything, and would push out what training has in it. Without it, addresses, offsets
and lengths must be whole pages.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO

from elixir_moe.chunks.plan import PAGE_BYTES


class DirectFile:
    """An open file that several threads read and write at offsets of their own."""

    def __init__(self, file: FileIO) -> None:
        """Of a file that is open for what is to be done, and closed by whoever has opened it."""
        self._file = file
        with suppress(OSError):  # a file system in memory
            self._set_direct(True)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data`, which is whole pages, as is `offset`. Raises OSError."""
        self._move(os.pwritev, offset, data)

    def read(self, offset: int, data: memoryview) -> None:
        """Fills `data`, which is whole pages, as is `offset`. Raises OSError, also where the file ends before."""
        self._move(os.preadv, offset, data)

    def allocate(self, nbytes: int) -> None:
        """Gives the file its length, and the room on the disk. Raises OSError where there is none."""
        os.posix_fallocate(self.fileno(), 0, nbytes)

    def finish(self, nbytes: int) -> None:
        """Cuts the file to its length; returns when it will last."""
        os.ftruncate(self.fileno(), nbytes)
        os.fsync(self.fileno())

    def fileno(self) -> int:
        """Its descriptor."""
        return self._file.fileno()

    def _move(self, move: Callable[[int, list[memoryview], int], int], offset: int, data: memoryview) -> None:
        while data:
            direct = self._is_direct()
            try:
                moved = move(self.fileno(), [data], offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(False)  # pages longer than ours, or the rest of a request that was cut short
                continue
            if not moved:
                raise OSError("the file ends there")
            data, offset = data[moved:], offset + moved

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def whole_pages(nbytes: int) -> int:
    """So many bytes, or as many more as fill a page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def paged_memory(nbytes: int) -> mmap.mmap:
    """Writable memory of at least `nbytes`, in whole pages."""
    memory = mmap.mmap(-1, whole_pages(nbytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):  # few large pages: the system's giving out of small ones takes most of a copy
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
