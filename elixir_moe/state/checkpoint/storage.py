"""Checkpoint directories: complete or absent.

Owns everything of a checkpoint in the file system except the contents of its files (`tensors`). A checkpoint is a
directory::

    step-100/   manifest.json            written last
                rank-00000.safetensors   flat tensors, one for each run of elements that the rank held
                ...

It is written as ``.step-100.partial`` in the same folder, every file and directory is synced to disk, and one rename
makes it appear. The manifest is locked (flock) from the beginning of the write: a partial directory without a lock has
no living writer and is removed. Removal works in reverse: one rename makes the checkpoint partial.
"""

import errno
import fcntl
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.state.checkpoint.manifest import Manifest, parse
from elixir_moe.state.checkpoint.tensors import hash_file, open_regular, sync_directory

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's directory."""
_PARTIAL = ".partial"
_HEAD_BYTES = 512
"""A manifest has its time of save within this many bytes."""


class Draft:
    """A checkpoint being written, on the rank that commits it."""

    def __init__(self, target: Path) -> None:
        """Creates the partial directory, after removing those of dead processes.

        Raises:
            CheckpointError: the target exists, or another process is writing it.
            OSError: the directory cannot be created.
        """
        self.target, self.path = target, partial_of(target)
        check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        collect(target.parent)
        try:
            self.path.mkdir()
        except FileExistsError:
            raise CheckpointError(f"{self.path} exists: another process is saving {target}") from None
        self._manifest = open(self.path / MANIFEST, "xb", buffering=0)  # noqa: SIM115 - its lock lives as long as it
        fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, manifest: bytes) -> None:
        """Writes the manifest and makes the checkpoint appear. All other files must be complete and synced.

        Raises:
            CheckpointError: the target was created meanwhile.
        """
        while manifest:
            manifest = manifest[self._manifest.write(manifest) :]
        os.fsync(self._manifest)
        sync_directory(self.path)
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} was created meanwhile: save under another name")
        os.rename(self.path, self.target)
        self._manifest.close()
        sync_directory(self.target.parent)

    def abandon(self) -> None:
        """Removes the partial directory if it is still there: an interrupt may come right behind the rename."""
        mine = self.path.exists()
        if mine:
            _empty(self.path)
        self._manifest.close()
        if mine:
            _drop(self.path)


def path_of(path: str | os.PathLike[str]) -> Path:
    """The absolute path that a user means, with the home directory for ``~``. Raises ConfigError if it is none."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise ConfigError(f"{path!r}: expected the path of a checkpoint, a directory")
    return Path(os.path.abspath(os.path.expanduser(path)))


def check_target(target: Path) -> None:
    """Raises CheckpointError if the name is taken, or is that of a partial checkpoint."""
    if target.name.endswith(_PARTIAL):
        raise CheckpointError(f"{target}: what ends in {_PARTIAL} is no whole checkpoint: save under another name")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: save under another name, or remove it first")


def partial_of(target: Path) -> Path:
    """The partial directory of a checkpoint."""
    return target.parent / f".{target.name}{_PARTIAL}"


def collect(directory: Path) -> list[Path]:
    """Removes partial checkpoints without a living writer; returns their paths."""
    return [path for path in partials(directory) if _remove_if_dead(path)]


def discard(path: Path) -> None:
    """Removes a checkpoint; if interrupted, it is either complete or absent."""
    os.rename(path, partial_of(path))
    sync_directory(path.parent)
    _remove_if_dead(partial_of(path))


def retain(directory: Path, keep: int) -> list[Path]:
    """Removes all checkpoints in `directory` but the `keep` latest; returns their paths. Links and damaged stay."""
    found = [(path, manifest) for path, manifest in checkpoints(directory) if not path.is_symlink()]
    whole = [path for path, manifest in found if isinstance(manifest, Manifest)]
    for path in whole[:-keep]:
        discard(path)
    return whole[:-keep]


def moment_after_all(directory: Path) -> int:
    """Nanoseconds since 1970, raised to be later than every checkpoint in `directory` if clocks differ."""
    moments = [time.time_ns()]
    for path in directory.glob(f"[!.]*/{MANIFEST}"):
        try:
            descriptor = open_regular(path)
        except CheckpointError:
            continue  # no checkpoint, or another user's
        with open(descriptor, "rb") as file:
            found = re.search(rb'"saved_ns":(\d{1,19}),', file.read(_HEAD_BYTES))
        moments += [int(found[1]) + 1] if found else []
    return max(moments)


def latest(directory: str | Path, *, fall_back: bool = False) -> Path | None:
    """The latest checkpoint in `directory`; None if there is none. Not collective.

    Partial checkpoints, left by a process that was killed during a save, are ignored and removed.

    Args:
        directory: the folder that contains checkpoints.
        fall_back: hash all files, and skip damaged checkpoints, each with a warning. By default, files are not hashed
            (`em.load` does that), and a damaged manifest is an error.

    Raises:
        CheckpointError: a manifest is damaged, and `fall_back` is off.
    """
    directory = Path(os.path.expanduser(directory))
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
    """(path, manifest) of all checkpoints in `directory`, the latest last; damaged ones first, with their error.

    A link to a checkpoint elsewhere counts, one to a neighbor does not.
    """
    found: list[tuple[Path, Manifest | CheckpointError]] = []
    for path in sorted(directory.iterdir()):
        again = path.is_symlink() and path.resolve().parent == directory.resolve()
        there = os.path.exists(path / MANIFEST)  # False also where this user may not look, as in lost+found
        if there and not again and not path.name.endswith(_PARTIAL):
            try:
                found.append((path, read_manifest(path)))
            except CheckpointError as error:
                found.append((path, error))
    return sorted(found, key=lambda item: item[1].saved_ns if isinstance(item[1], Manifest) else -1)


def home_of(directory: Path) -> Path:
    """The folder of checkpoints for `directory`: itself, or, if it has none and is a run's, its `CHECKPOINTS`."""
    own = directory / CHECKPOINTS
    return own if own.is_dir() and not checkpoints(directory) else directory


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointError if it is missing or damaged."""
    if path.name.endswith(_PARTIAL):
        raise CheckpointError(f"{path} is what a save has left that did not end: use another checkpoint")
    if not path.is_dir():
        partial = partial_of(path)
        left = f": its save has not ended, or was broken off, and left {partial}" if partial.is_dir() else ""
        raise CheckpointError(f"{path}: no such checkpoint{left}")
    if not os.path.lexists(path / MANIFEST):
        if checkpoints(home_of(path)):
            where = str(home_of(path))
            raise CheckpointError(
                f"{path} holds checkpoints and is none itself: load em.latest({where!r}), the last of them"
            )
        raise CheckpointError(f"{path / MANIFEST} cannot be read: there is none, so this is no whole checkpoint")
    with open(open_regular(path / MANIFEST), "rb") as file:
        return parse(file.read(), str(path / MANIFEST))


def verify(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Hashes `files` (by default all) of the checkpoint. Raises CheckpointError for the first damaged one."""
    for name in manifest.files if files is None else files:
        record, found = manifest.files[name], hash_file(path / name)
        if found.nbytes != record.nbytes:
            wrong = f"{found.nbytes} bytes of {record.nbytes}"
            raise CheckpointError(f"{path / name} is damaged: {wrong}; use another checkpoint")
        if found.digest != record.digest:
            raise CheckpointError(f"{path / name} is damaged: its hash is not the manifest's; use another checkpoint")


def partials(directory: Path) -> list[Path]:
    """Partial checkpoints in `directory`: being written, or left by dead processes."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.startswith(".") and path.name.endswith(_PARTIAL) and path.is_dir() and not path.is_symlink()
    )


def _remove_if_dead(partial: Path) -> bool:
    """Deletes a partial checkpoint unless its writer lives, another process is deleting it, or this one may not."""
    try:
        if not (partial / MANIFEST).exists():
            # A writer has no manifest between its first two, and its last two, system calls: the directory is empty.
            return not any(partial.iterdir()) and _drop(partial)
        with open(partial / MANIFEST, "r+b") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(manifest.fileno()), os.stat(partial / MANIFEST)):
                return False
            _empty(partial)
        return _drop(partial)
    except (BlockingIOError, FileNotFoundError, PermissionError):
        return False
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return False


def _empty(partial: Path) -> None:
    """Deletes the files of a partial checkpoint; the manifest, by which it is recognized, last."""
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MANIFEST:
            path.unlink()
    (partial / MANIFEST).unlink(missing_ok=True)


def _drop(partial: Path) -> bool:
    """Deletes an empty directory; False if another process has, or has begun to write there.

    Its manifest must be closed: NFS leaves a file in the directory until a deleted one is closed.
    """
    try:
        partial.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
        return False
    return True
