"""A file that bypasses the page cache where the file system allows it, and the memory such a file needs.

Owns O_DIRECT and the fallback where it is refused. Knows nothing of the content.

The page cache would cost a copy of all data, and would evict what training has in it. Without it, addresses, offsets
and lengths must be whole pages.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO

from elixir_moe.chunks.ledger import paged_bytes


class DirectFile:
    """An open file that several threads read and write at offsets of their own."""

    def __init__(self, file: FileIO) -> None:
        """Uses `file`, which the caller has opened and must close."""
        self._file = file
        with suppress(OSError):  # a file system in memory refuses it
            self._set_direct(True)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data` at `offset`; both are whole pages. Raises OSError."""
        self._move(os.pwritev, offset, data)

    def read(self, offset: int, data: memoryview) -> None:
        """Fills `data` from `offset`; both are whole pages. Raises OSError, also if the file is too short."""
        self._move(os.preadv, offset, data)

    def allocate(self, nbytes: int) -> None:
        """Sets the file's length and allocates it on the disk. Raises OSError if there is no room."""
        os.posix_fallocate(self.fileno(), 0, nbytes)

    def finish(self, nbytes: int) -> None:
        """Truncates the file to `nbytes` and syncs it to the disk."""
        os.ftruncate(self.fileno(), nbytes)
        os.fsync(self.fileno())

    def fileno(self) -> int:
        """The file descriptor."""
        return self._file.fileno()

    def _move(self, move: Callable[[int, list[memoryview], int], int], offset: int, data: memoryview) -> None:
        while data:
            direct = self.is_direct()
            try:
                moved = move(self.fileno(), [data], offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(False)  # the disk has longer pages, or a short transfer left part of a page
                continue
            if not moved:
                raise OSError("the file ends there")
            data, offset = data[moved:], offset + moved

    def is_direct(self) -> bool:
        """Whether requests bypass the page cache; a request that the disk refuses so may end it."""
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def paged_memory(nbytes: int) -> mmap.mmap:
    """Writable memory of at least `nbytes`, in whole pages."""
    memory = mmap.mmap(-1, paged_bytes(nbytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):  # allocating small pages takes most of the time of a copy
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
