"""Files, their hashes, and how a directory comes to be whole or absent.

Owns everything about a checkpoint that a file system sees. A checkpoint is a directory::

    step-100/   manifest.json            written last
                rank-00000.safetensors   flat tensors, one for each run of elements that rank held
                ...

It is written as ``.step-100.partial`` beside its place, every file and directory is synced to the disk, and then one
rename makes it appear. The manifest is locked (flock) from the first moment of the writing: what is called partial and
is not locked belongs to nobody alive, and is collected. Removing goes the same way back: one rename makes it partial.
"""

import errno
import fcntl
import json
import math
import os
import re
import stat
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from elixir_moe.checkpoint.manifest import FileRecord, Manifest, digest_of, parse
from elixir_moe.checkpoint.values import DTYPES
from elixir_moe.errors import CheckpointError

MANIFEST = "manifest.json"
_PARTIAL = ".partial"
_SEGMENT_BYTES = 1 << 24
"""A file's hash is that of the hashes of its segments, so that several threads can share a file."""
_HASHERS = 4
_SEGMENTS_BEHIND = 16
"""How far hashing may lag behind writing: what bounds the memory of tensors that were brought to the host for it."""
_HEAD_BYTES = 512
"""In so many bytes a manifest says when it was saved."""


# ------------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A tensor that is to be written."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Callable[[], torch.Tensor]
    """Gives it when its turn has come."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_tensors(path: Path, items: Iterable[Item], metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Writes a new safetensors file and syncs it, hashing beside the writing (the library's own writer does not hash).

    Args:
        path: of the file.
        items: its tensors.
        metadata: texts for the header.

    Raises:
        OSError: the disk is full, the file exists, and the like.
    """
    ordered = sorted(items, key=lambda item: -DTYPES[item.dtype].itemsize)  # so each tensor is aligned to its dtype
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for item in ordered:
        header[item.key] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [at, at := at + item.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digests: list[bytes] = []
    behind: deque[Future[bytes]] = deque()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(_HASHERS) as hashers:
        for segment in _segments(_contents(text, ordered)):
            behind.append(hashers.submit(_digest, segment))
            for part in segment:
                while part:
                    part = part[file.write(part) :]
            if len(behind) > _SEGMENTS_BEHIND:
                digests.append(behind.popleft().result())
        os.fsync(file.fileno())
        digests += [future.result() for future in behind]
    sync_directory(path.parent)
    return FileRecord(nbytes=8 + len(text) + at, digest=digest_of(b"".join(digests)))


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file as it is. Raises CheckpointError if it is missing, a link or no file."""
    with open(_open(path), "rb") as file, ThreadPoolExecutor(_HASHERS) as hashers:
        nbytes = os.fstat(file.fileno()).st_size
        starts = range(0, nbytes, _SEGMENT_BYTES)
        digests = hashers.map(lambda start: _digest([_read(file.fileno(), start)]), starts)
        return FileRecord(nbytes=nbytes, digest=digest_of(b"".join(digests)))


def _contents(header: bytes, items: Iterable[Item]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for item in items:
        flat = item.tensor().detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        assert data.nbytes == item.nbytes, f"{item.key} has {data.nbytes} bytes, not {item.nbytes}"
        yield data


def _segments(contents: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, in pieces of `_SEGMENT_BYTES` and a last one, each of several parts."""
    segment, room = list[memoryview](), _SEGMENT_BYTES
    for data in contents:
        while data:
            part, data = data[:room], data[room:]
            segment.append(part)
            room -= len(part)
            if not room:
                yield segment
                segment, room = [], _SEGMENT_BYTES
    if segment:
        yield segment


def _digest(parts: Iterable[memoryview]) -> bytes:
    digest = blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read(descriptor: int, start: int) -> memoryview:
    """The segment from `start` on, as far as there is one."""
    segment = memoryview(bytearray(_SEGMENT_BYTES))
    filled = 0
    while count := os.preadv(descriptor, [segment[filled:]], start + filled):
        filled += count
    return segment[:filled]


class Files:
    """The files of one checkpoint, opened when they are first read, and read only where they are asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}

    def check(self, file: str, key: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless `file` has such a tensor."""
        path = self._directory / file
        try:
            found = self._handle(file).get_slice(key)
        except Exception as error:  # the type is safetensors' own, which is not to be imported here
            raise CheckpointError(f"{path}: tensor {key!r} cannot be read: {error}") from error
        if (found.get_dtype(), tuple(found.get_shape())) != (dtype, shape):
            raise CheckpointError(
                f"{path}: tensor {key!r} is {found.get_dtype()} of shape {tuple(found.get_shape())}, but the manifest "
                f"says {dtype} of shape {shape}"
            )

    def read(self, file: str, key: str) -> torch.Tensor:
        """The tensor, mapped from the file: only what is used of it is read."""
        tensor: torch.Tensor = self._handle(file).get_tensor(key)
        return tensor

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            from safetensors import safe_open

            os.close(_open(self._directory / file))  # no link
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file]


# ----------------------------------------------------------------------------------------------------------- directory


class Draft:
    """A checkpoint that is being written, on the one rank that commits it."""

    def __init__(self, target: Path) -> None:
        """Makes the partial directory, after those of the dead are collected.

        Raises:
            CheckpointError: the target exists, or another process is writing it.
            OSError: the directory cannot be made.
        """
        self.target, self.path = target, partial_of(target)
        self.committed = False
        if os.path.lexists(target):
            raise CheckpointError(f"{target} exists: save under another name, or remove it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        collect(target.parent)
        try:
            self.path.mkdir()
        except FileExistsError:
            raise CheckpointError(f"{self.path} exists: another process is saving {target}") from None
        self._manifest = os.open(self.path / MANIFEST, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, manifest: bytes) -> None:
        """Writes the manifest and makes the checkpoint appear. All other files must be there and synced."""
        while manifest:
            manifest = manifest[os.write(self._manifest, manifest) :]
        os.fsync(self._manifest)
        sync_directory(self.path)
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} has come into being meanwhile: save under another name")
        os.rename(self.path, self.target)
        self.committed = True
        os.close(self._manifest)
        sync_directory(self.target.parent)

    def abandon(self) -> None:
        """Removes what was written, unless it was committed."""
        if not self.committed:
            _remove(self.path)
            os.close(self._manifest)


def partial_of(target: Path) -> Path:
    """Where a checkpoint is while it is not whole."""
    return target.parent / f".{target.name}{_PARTIAL}"


def collect(directory: Path) -> list[Path]:
    """Removes partial checkpoints that nobody writes any more; returns them."""
    return [path for path in partials(directory) if _remove_if_dead(path)]


def retain(directory: Path, keep: int) -> list[Path]:
    """Removes all checkpoints in `directory` but the `keep` latest; returns them. Damaged manifests stay."""
    whole = [path for path, manifest in checkpoints(directory) if isinstance(manifest, Manifest)]
    for path in whole[:-keep]:
        os.rename(path, partial_of(path))
        sync_directory(directory)
        _remove_if_dead(partial_of(path))
    return whole[:-keep]


def moment_after_all(directory: Path) -> int:
    """Nanoseconds since 1970, but later than every checkpoint in `directory`, whatever clocks say."""
    moments = [time.time_ns()]
    for path in directory.glob(f"[!.]*/{MANIFEST}"):
        if path.is_symlink():
            continue
        with open(_open(path), "rb") as file:
            found = re.search(rb'"saved_ns":(\d{1,19}),', file.read(_HEAD_BYTES))
        moments += [int(found[1]) + 1] if found else []
    return max(moments)


def latest(directory: str | Path, *, fall_back: bool = False) -> Path | None:
    """The checkpoint in `directory` that was saved last; None if there is none. Not collective.

    Partial ones, left by a process that was killed while it saved, are ignored, and removed.

    Args:
        directory: where checkpoints lie side by side.
        fall_back: hash all files, and pass over damaged checkpoints, each with a warning. By default `em.load` finds
            damaged files, and a damaged manifest is an error here.

    Raises:
        CheckpointError: a manifest is damaged, and `fall_back` is off.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return None
    collect(directory)
    found = checkpoints(directory)
    for _, manifest in found if not fall_back else ():
        if isinstance(manifest, CheckpointError):
            raise manifest
    for path, manifest in reversed(found):
        try:
            if isinstance(manifest, CheckpointError):
                raise manifest
            if fall_back:
                verify(path, manifest)
            return path
        except CheckpointError as error:
            warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
    return None


def checkpoints(directory: Path) -> list[tuple[Path, Manifest | CheckpointError]]:
    """All checkpoints in `directory` with their manifests, the latest last; damaged manifests first, as errors."""
    found: list[tuple[Path, Manifest | CheckpointError]] = []
    for path in sorted(path for path in directory.iterdir() if not path.is_symlink() and (path / MANIFEST).exists()):
        if not path.name.endswith(_PARTIAL):
            try:
                found.append((path, read_manifest(path)))
            except CheckpointError as error:
                found.append((path, error))
    return sorted(found, key=lambda item: item[1].saved_ns if isinstance(item[1], Manifest) else -1)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointError if there is none, or it is damaged."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    with open(_open(path / MANIFEST), "rb") as file:
        return parse(file.read(), str(path / MANIFEST))


def verify(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Hashes `files` (by default all) of the checkpoint. Raises CheckpointError, naming the first that is damaged."""
    for name in manifest.files if files is None else files:
        record, found = manifest.files[name], hash_file(path / name)
        if found.nbytes != record.nbytes:
            wrong = f"{found.nbytes} bytes of {record.nbytes}"
            raise CheckpointError(f"{path / name} is damaged: {wrong}; use another checkpoint")
        if found.digest != record.digest:
            raise CheckpointError(f"{path / name} is damaged: its hash is not the manifest's; use another checkpoint")


def sync_directory(path: Path) -> None:
    """Makes the entries of a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """A descriptor of a regular file, for reading. Raises CheckpointError for links and all that is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{path} {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file")
    return descriptor


def partials(directory: Path) -> list[Path]:
    """Checkpoints in `directory` that are not whole: being written, or left by the dead."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.startswith(".") and path.name.endswith(_PARTIAL) and path.is_dir() and not path.is_symlink()
    )


def _remove_if_dead(partial: Path) -> bool:
    """Deletes a partial checkpoint unless its writer lives, or another process deletes it at this moment."""
    try:
        if not (partial / MANIFEST).exists():
            # None is there between the first two and the last two system calls of a writer: the directory is empty.
            return not any(partial.iterdir()) and _remove(partial)
        with open(partial / MANIFEST, "r+b") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(manifest.fileno()), os.stat(partial / MANIFEST))
            return mine and _remove(partial)
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove(partial: Path) -> bool:
    """Deletes a partial checkpoint, its manifest, by which it is known, last."""
    for path in partial.iterdir():
        if path.name != MANIFEST:
            path.unlink()
    (partial / MANIFEST).unlink(missing_ok=True)
    partial.rmdir()
    return True
