"""The disk tier: one file for each rank, which holds the master shard and the moments of trainable chunks on disk.

Owns the file, its layout and its checksums, and what it shares with the file of values (`disk_values`). Knows
nothing of the meaning of the arrays or of when they change (`optim.shard_update`).

The file has no name: no other process can open it, two runs can share a folder, and nothing is left behind however the
process ends. The whole file is allocated before training starts, so a full disk shows then. Requests bypass the page
cache (`memory.direct_file`), which would take the memory that the tier is meant to save.

The arrays of a chunk are cut into slices of so many elements of its shard. A slice of all arrays is one record, each in
its own dtype and from a page on, which an update reads and writes at once. Records are long enough for plain ``preadv``
and ``pwritev`` on a few threads to keep a disk busy, so io_uring would gain nothing.
"""

import itertools
import os
import socket
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elixir_moe.chunks.ledger import DISK_THREADS, paged_bytes, record_bytes, spill_slice_numel, spilled_bytes
from elixir_moe.chunks.param_spec import StateArray
from elixir_moe.chunks.plan import size_text
from elixir_moe.errors import DiskError, TierError
from elixir_moe.kernels import work_on
from elixir_moe.memory.direct_file import DirectFile, paged_memory

_HOST = torch.device("cpu")
Arrays = tuple[StateArray, ...]


class DiskFile:
    """A file without a name, allocated on a disk, with threads that use it."""

    def __init__(
        self, directory: str, nbytes: int, *, rank: int = 0, checked: bool = False, device: torch.device = _HOST
    ) -> None:
        """Makes a file of `nbytes` of `rank`, zeros at first, whose threads may copy to and from `device`.

        If `checked`, a checksum of each slice is kept in memory, and compared at each read. Raises TierError: there is
        no such directory, or the disk has too little room.
        """
        self.directory = directory
        self.where = f"disk of {socket.gethostname()}"
        """For messages."""
        self.rank = rank
        self.nbytes = nbytes
        try:
            self._nameless = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  closed by `close`
            self._file = DirectFile(self._nameless)  # type: ignore[arg-type]  # unbuffered, it is a FileIO
            if self.nbytes:
                self._file.allocate(self.nbytes)
        except OSError as error:
            left = f", {size_text(disk_bytes_left(directory))} are left" if os.path.isdir(directory) else ""
            raise TierError(
                f"{self.where}: {size_text(self.nbytes)} for shards cannot be had in "
                f"{directory!r}{left}: {error.strerror}; name another folder (disk=), put fewer chunks on disk, or "
                f"use more ranks"
            ) from error
        numbers, self._thread = itertools.count(), threading.local()

        def begin_thread(thread: threading.local = self._thread) -> None:  # a thread that holds the file never ends
            work_on(device)
            thread.number = next(numbers)

        self.threads = ThreadPoolExecutor(DISK_THREADS, "elixir-disk", begin_thread)
        """The threads that read and write."""
        self._checked, self._checksums = checked, dict[int, int]()
        self.buffer_bytes = 0
        """Bytes of the memory through which data goes to the file and comes from it."""

    def move(self, offset: int, memory: torch.Tensor, *, write: bool) -> None:
        """Reads `memory` from the file, or writes it to the file. Raises DiskError if the disk fails."""
        try:
            (self._file.write if write else self._file.read)(offset, bytes_of(memory))
        except OSError as error:
            verb = "written to" if write else "read from"
            raise DiskError(
                f"{self.where}: shards of rank {self.rank} could not be {verb} {self.directory!r}: {error}; continue "
                f"from a checkpoint, on another disk"
            ) from error

    def store(self, offset: int, content: torch.Tensor) -> None:
        """Writes a slice. Raises DiskError."""
        self._checksums.pop(offset, None)  # an interrupt leaves no checksum, not a wrong one
        self.move(offset, content, write=True)
        self.sign(offset, content)

    def load(self, offset: int, content: torch.Tensor, what: str) -> None:
        """Reads a slice, which `what` names. Raises DiskError if the disk fails, or it is not what was written."""
        self.move(offset, content, write=False)
        self.check(offset, content, what)

    def sign(self, offset: int, content: torch.Tensor) -> None:
        """Keeps the checksum of a slice that was written."""
        if self._checked:
            self._checksums[offset] = zlib.crc32(bytes_of(content))

    def check(self, offset: int, content: torch.Tensor, what: str) -> None:
        """Raises DiskError if a slice that was read is not what was written."""
        wanted = self._checksums.get(offset)
        if wanted is not None and zlib.crc32(bytes_of(content)) != wanted:
            raise DiskError(
                f"{self.where}: what rank {self.rank} read from {self.directory!r} is not what it wrote there "
                f"({what} of its shard): the disk cannot be trusted; continue from a checkpoint, on another one"
            )

    def drop_cached(self) -> bool:
        """Writes what the system caches of the file to the disk and drops it; returns whether it caches nothing.

        Raises DiskError if the disk fails.
        """
        if self._file.is_direct():
            return True
        try:
            os.fsync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise DiskError(f"{self.where}: a file in {self.directory!r} could not be synced: {error}") from error
        return False

    def close(self) -> None:
        """Closes the file, which frees the disk, once all threads have finished."""
        self.threads.shutdown()
        self._nameless.close()


@dataclass(frozen=True, slots=True)
class Record:
    """Memory for one record, in use while somebody holds the lock; an interrupt in ``with lock:`` leaves it free."""

    memory: torch.Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)


class DiskStore(DiskFile):
    """The masters and moments of one rank."""

    def __init__(
        self, directory: str, shards: Sequence[tuple[int, Arrays]], *, rank: int = 0, checked: bool = False
    ) -> None:
        """Makes the file in a directory on a disk, not on a file system in memory; the rest as for `DiskFile`.

        `shards` are the elements of each chunk's shard and its arrays, in the order in which they are taken: the master
        shard, the optimizer's moments, and perhaps the gradient's sum.
        """
        super().__init__(directory, sum(spilled_bytes(*shard) for shard in shards), rank=rank, checked=checked)
        self.slice_numel = spill_slice_numel()
        self._left, self._taken = deque(shards), 0
        longest = max(record_bytes(min(numel, self.slice_numel), arrays) for numel, arrays in shards)
        self.buffer_bytes = DISK_THREADS * longest
        self._memory = torch.frombuffer(paged_memory(self.buffer_bytes), dtype=torch.uint8)
        self.records = [Record(part) for part in self._memory.chunk(DISK_THREADS)]

    def allocate(self, numel: int, chunk: int) -> "DiskShard":
        """The place of the next chunk's arrays; `chunk` is its number, for messages."""
        return DiskShard(self, *self.reserve(numel), numel, chunk)

    def reserve(self, numel: int) -> tuple[int, Arrays]:
        """Hands out the bytes of the next shard, of `numel` elements; returns their offset and its arrays."""
        given, arrays = self._left.popleft()
        assert given == numel, "shards are taken in the order in which they were given"
        start, self._taken = self._taken, self._taken + spilled_bytes(numel, arrays)
        return start, arrays

    def record(self) -> Record:
        """Memory for one record, as bytes; each of the file's threads has its own."""
        return self.records[getattr(self._thread, "number", 0) % len(self.records)]


class DiskShard:
    """The arrays of one chunk on disk."""

    def __init__(self, store: DiskStore, offset: int, arrays: Arrays, numel: int, chunk: int) -> None:
        self._file = store
        self._offset = offset
        self._chunk = chunk
        self.arrays = arrays
        self.numel = numel
        self._slices = range(-(-numel // store.slice_numel))

    @property
    def nbytes(self) -> int:
        """Bytes of the file that belong to this chunk."""
        return spilled_bytes(self.numel, self.arrays)

    def _bounds(self, index: int) -> tuple[int, int]:
        """The elements of slice `index`."""
        start = index * self._file.slice_numel
        return start, min(start + self._file.slice_numel, self.numel)

    def change(self, work: Callable[[int, list[torch.Tensor]], None]) -> "list[Future[None]]":
        """Starts to change all slices: ``work(start, arrays)`` gets the slice of every array from element `start` on.

        Slices are changed in order, several at a time, on threads of their own.
        """
        return [self._file.threads.submit(self._change, index, work) for index in self._slices]

    def _change(self, index: int, work: Callable[[int, list[torch.Tensor]], None]) -> None:
        """Reads slice `index` of all arrays, changes it and writes it back."""
        own = self._file.record()
        with own.lock:
            sizes = [self._paged(index, array) for array in range(len(self.arrays))]
            record = own.memory[: sum(sizes)]
            self._file.move(self._place(index, 0), record, write=False)
            contents = list(record.split(sizes))
            for array, content in enumerate(contents):
                self._file.check(self._place(index, array), content, self._what(index, array))
            work(self._bounds(index)[0], [self._elements(index, i, content) for i, content in enumerate(contents)])
            self._leave(index, record, contents)

    def _leave(self, index: int, record: torch.Tensor, contents: list[torch.Tensor]) -> None:
        """Writes slice `index` of the first arrays, whose `contents` are the first of the `record`."""
        self._file.move(self._place(index, 0), record[: sum(map(len, contents))], write=True)
        for array, content in enumerate(contents):
            self._file.sign(self._place(index, array), content)

    def _elements(self, index: int, array: int, content: torch.Tensor) -> torch.Tensor:
        """The elements in the content of slice `index` of an array."""
        (start, stop), kind = self._bounds(index), self.arrays[array]
        return content[: kind.nbytes(stop - start)].view(kind.dtype)

    def read(self, array: int, start: int, stop: int) -> torch.Tensor:
        """A copy of elements `start` to `stop` of an array."""
        found = torch.empty(stop - start, dtype=self.arrays[array].dtype, device="cpu")
        for index, here, there in self._parts(array, start, stop):
            own = self._file.record()
            with own.lock:
                found[here] = self._elements(index, array, self._load(array, index, own))[there]
        return found

    def write(self, array: int, start: int, values: torch.Tensor) -> None:
        """Overwrites the elements of an array from `start` on with `values`."""
        for index, here, there in self._parts(array, start, start + values.numel()):
            own = self._file.record()
            with own.lock:
                content = self._load(array, index, own)
                self._elements(index, array, content)[there] = values[here]
                self._file.store(self._place(index, array), content)

    def _parts(self, array: int, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """(slice index, its elements in the request, its elements in the slice) for each slice of a request."""
        step = self.arrays[array].numel(self._file.slice_numel)
        for index in range(start // step, -(-stop // step)):
            low, high = max(start, index * step), min(stop, (index + 1) * step)
            yield index, slice(low - start, high - start), slice(low - index * step, high - index * step)

    def _load(self, array: int, index: int, record: Record) -> torch.Tensor:
        content = record.memory[: self._paged(index, array)]
        self._file.load(self._place(index, array), content, self._what(index, array))
        return content

    def _paged(self, index: int, array: int) -> int:
        """Bytes of slice `index` of an array, in whole pages."""
        start, stop = self._bounds(index)
        return paged_bytes(self.arrays[array].nbytes(stop - start))

    def _place(self, index: int, array: int) -> int:
        """The offset of slice `index` of an array."""
        before = index * record_bytes(self._file.slice_numel, self.arrays)
        return self._offset + before + sum(self._paged(index, earlier) for earlier in range(array))

    def _what(self, index: int, array: int) -> str:
        """Slice `index` of an array, for messages."""
        start, stop = self._bounds(index)
        return f"chunk {self._chunk}, {self.arrays[array].name}, elements {start} to {stop}"


def disk_bytes_left(directory: str) -> int:
    """Bytes that can still be written to the disk of a folder. Raises OSError if there is no such folder."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def bytes_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy."""
    return memoryview(memory.numpy()).cast("B")  # type: ignore[arg-type]


def file_system(directory: str) -> str:
    """The type of the file system that a folder is on, such as ``ext4`` or ``tmpfs``; "" where the system names none.

    Raises OSError if there is no such folder.
    """
    device = os.stat(directory).st_dev
    mounts = Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return kind.split()[0]
    return ""
