"""Files of tensors: written, hashed and read.

Owns the path of bytes to the disk (safetensors' own writer does not hash): tensors are copied into segments, and each
segment is hashed and written by another thread while the next one is filled. If a tensor does not change meanwhile,
the writing thread also fills the segment, and no thread waits for another's copy.
"""

import errno
import math
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elixir_moe.chunks.ledger import paged_bytes
from elixir_moe.errors import CheckpointError
from elixir_moe.memory.direct_file import DirectFile, paged_memory
from elixir_moe.state.checkpoint.hashing import SEGMENT_BYTES, file_digest, segment_digest
from elixir_moe.state.checkpoint.manifest import FileRecord
from elixir_moe.state.marked import name_in_errors, sync_directory
from elixir_moe.state.safetensors_format import DTYPES, head_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_WRITERS = 2
_SEGMENTS_AHEAD = 4
"""Segments that copying may run ahead of writing if the file is `bounded`; bounds the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A tensor to be written."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Callable[[], torch.Tensor]
    """Called for the tensor when it is copied."""
    stays: bool = False
    """The tensor is CPU memory that outlives the save and keeps its values until the save has copied it."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class FileImage:
    """The bytes of a file of tensors, between the tensors and the disk."""

    def __init__(
        self, items: Iterable[Item], metadata: Mapping[str, str] | None = None, *, bounded: bool = True
    ) -> None:
        """Lays out `items`, with `metadata` in the header. Copying waits for writing only if `bounded`."""
        given = {item.key: item for item in items}
        head = head_of({key: (item.dtype, item.shape) for key, item in given.items()}, metadata)
        self._places, self._nbytes = head.places, head.nbytes
        self._left = {key: given[key] for key in head.places}
        self._missing = [min(SEGMENT_BYTES, self._nbytes - at) for at in range(0, self._nbytes, SEGMENT_BYTES)]
        self._bounded = bounded
        self._segments: dict[int, Bytes] = {}
        self._parts: dict[int, list[tuple[int, Bytes]]] = {}
        """{segment: [(start, bytes)]} that the thread which writes the segment still has to copy into it."""
        self._free: list[Bytes] = []
        self._whole = list(self._put(0, np.frombuffer(head.data, dtype=np.uint8)))

    def take(self, keys: Iterable[str]) -> None:
        """Copies these tensors now."""
        for key in keys:
            self._whole += self._take(key, now=True)

    def write(self, path: Path, taken: Callable[[], None] = lambda: None) -> FileRecord:
        """Writes and syncs the new file, or raises OSError; calls `taken` when the last tensor is copied."""
        digests: dict[int, Future[bytes]] = {}
        behind: deque[Future[bytes]] = deque()
        with name_in_errors(path), open(path, "xb", buffering=0) as raw, ThreadPoolExecutor(_WRITERS) as writers:
            file = DirectFile(raw)
            rest = chain.from_iterable(map(self._take, list(self._left)))
            for index in chain(self._whole, rest):
                digests[index] = writers.submit(self._bring, file, index)
                behind.append(digests[index])
                if self._bounded and len(behind) > _SEGMENTS_AHEAD:
                    behind.popleft().result()
            if self._bounded:
                wait(digests.values())
            taken()
            digest = file_digest(digests[index].result() for index in range(len(self._missing)))
            file.finish(self._nbytes)
        sync_directory(path.parent)
        return FileRecord(nbytes=self._nbytes, digest=digest)

    def _take(self, key: str, *, now: bool = False) -> Iterator[int]:
        """Copies a tensor, or leaves it to the writers if it stays and need not be copied `now`; yields as `_put`."""
        item = self._left.pop(key)
        data = item.tensor().detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        assert len(data) == item.nbytes, f"{key} has {len(data)} bytes, not {item.nbytes}"
        return self._put(self._places[key], data, later=item.stays and self._bounded and not now)

    def _put(self, at: int, data: Bytes, *, later: bool = False) -> Iterator[int]:
        """Copies `data` to its place, or notes it for `later`; yields each segment that becomes complete."""
        while len(data):
            index, start = divmod(at, SEGMENT_BYTES)
            part = data[: SEGMENT_BYTES - start]
            if later:
                self._parts.setdefault(index, []).append((start, part))
            else:
                np.copyto(self._segment(index)[start : start + len(part)], part)
            data, at = data[len(part) :], at + len(part)
            self._missing[index] -= len(part)
            if not self._missing[index]:
                yield index

    def _segment(self, index: int) -> Bytes:
        if index not in self._segments:
            try:
                self._segments[index] = self._free.pop()
            except IndexError:  # asked first, another thread might take the last one
                memory = paged_memory(min(SEGMENT_BYTES, self._nbytes))
                self._segments[index] = np.frombuffer(memory, dtype=np.uint8)
        return self._segments[index]

    def _bring(self, file: DirectFile, index: int) -> bytes:
        """Completes a segment, and writes it, padded to whole pages; returns its hash."""
        segment = self._segment(index)
        for start, part in self._parts.pop(index, ()):
            np.copyto(segment[start : start + len(part)], part)
        del self._segments[index]
        length, data = min(SEGMENT_BYTES, self._nbytes - index * SEGMENT_BYTES), memoryview(segment)  # type: ignore[arg-type]
        file.write(index * SEGMENT_BYTES, data[: paged_bytes(length)])
        digest = segment_digest(data[:length])
        self._free.append(segment)
        return digest


def hash_file(path: Path) -> FileRecord:
    """Returns the size and hash of a file. Raises CheckpointError unless it is a regular file."""
    with name_in_errors(path), open(open_regular(path), "rb") as file, ThreadPoolExecutor(_WRITERS) as readers:
        nbytes = os.fstat(file.fileno()).st_size
        starts = range(0, nbytes, SEGMENT_BYTES)
        digests = readers.map(lambda start: segment_digest(_read(file.fileno(), start)), starts)
        return FileRecord(nbytes=nbytes, digest=file_digest(digests))


def _read(descriptor: int, start: int) -> memoryview:
    """The segment at `start`, shorter at the end of the file."""
    segment = memoryview(paged_memory(SEGMENT_BYTES))
    filled = 0
    while count := os.preadv(descriptor, [segment[filled:]], start + filled):
        filled += count
    return segment[:filled]


class Files:
    """The files of one checkpoint; each is opened when first needed, and only requested tensors are read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}

    def check(self, file: str, key: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless `file` has such a tensor."""
        path = self._directory / file
        try:
            found = self._handle(file).get_slice(key)
        except Exception as error:  # safetensors' own error type, which is not imported here
            raise CheckpointError(f"{path}: tensor {key!r} cannot be read: {error}") from error
        if (found.get_dtype(), tuple(found.get_shape())) != (dtype, shape):
            raise CheckpointError(
                f"{path}: tensor {key!r} is {found.get_dtype()} of shape {tuple(found.get_shape())}, but the manifest "
                f"says {dtype} of shape {shape}"
            )

    def read(self, file: str, key: str) -> torch.Tensor:
        """Returns the tensor, memory-mapped: only the parts in use are read."""
        tensor: torch.Tensor = self._handle(file).get_tensor(key)
        return tensor

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            from safetensors import safe_open

            os.close(open_regular(self._directory / file))  # refuses a link
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file]


def open_regular(path: Path) -> int:
    """Opens a regular file for reading; returns its descriptor. Raises CheckpointError for links and anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{path} {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return descriptor
