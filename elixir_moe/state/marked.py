"""Folders that this library creates and may remove, identified by a mark and locked by the process that writes them.

Owns the mark, the lock, and the removal of folders. Removes only folders with the mark. Does not look at their
contents.

A folder in progress has a file ``.elixir_moe``. The process that creates the folder creates this file, locks it
(flock), and only then writes the mark into it. So a folder with the mark and without a lock belongs to a dead process,
whenever another process looks. A folder without the mark is never touched. A kill between two of these calls leaves an
empty folder, or one with an empty ``.elixir_moe``; the next `StagingFolder` of that path uses it.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self

from elixir_moe.errors import CheckpointError, ConfigError

MARK = ".elixir_moe"
"""Name of the file in a folder that holds the mark."""
MARK_BYTES = b"elixir_moe made this folder and may remove it\n"
"""The mark: the beginning of the file `MARK`."""
PARTIAL_SUFFIX = ".partial"
"""End of the names of folders in progress."""
_PATIENCE_SECONDS = 1.0
"""How long a new folder waits for another process that may be removing an abandoned one there."""


def partial_of(target: Path) -> Path:
    """The folder in which `target` is written, before one rename makes it appear."""
    return target.parent / f".{target.name}{PARTIAL_SUFFIX}"


class StagingFolder:
    """A new folder with the mark, locked by this process until it is moved or removed.

    Used as a context manager, it removes the folder at the end unless it was moved to its target.
    """

    def __init__(self, path: Path, *, without_locks: bool = False) -> None:
        """Creates the folder, or empties and reuses one that a dead process left.

        Args:
            path: the folder.
            without_locks: also work on a file system without locks. Cleanups remove nothing there, and two processes
                that write to one target at the same time are not detected.

        Raises:
            CheckpointError: the folder was not made by this library, or another process writes in it.
            ConfigError: the file system has no locks.
            OSError: the folder cannot be made.
        """
        self.path = path
        self._lock: int | None = None
        self._without_locks = without_locks
        until = time.monotonic() + _PATIENCE_SECONDS
        while (descriptor := self._made_or_taken()) is None:
            if time.monotonic() > until:
                raise CheckpointError(f"{path} exists: another process is writing there")
            time.sleep(0.01)
        self._lock = descriptor
        try:
            _clear(path)
            _write_mark(self._lock, path)
        except BaseException:
            self.remove()
            raise

    def _made_or_taken(self) -> int | None:
        """The locked file for the mark; None while another process writes here, or removes an abandoned folder."""
        try:
            self.path.mkdir()
        except FileExistsError:
            try:
                left_over = _is_left_over(self.path)
            except FileNotFoundError:
                return None  # another process has removed it meanwhile
            if not left_over and os.path.lexists(self.path):
                raise CheckpointError(
                    f"{self.path} exists and was not made by elixir_moe, which needs this name for its work: move it, "
                    f"or choose another target"
                ) from None
        try:
            return _locked(self.path, create=True, without_locks=self._without_locks)
        except ConfigError:
            if not is_marked(self.path / MARK):
                (self.path / MARK).unlink(missing_ok=True)
                self.path.rmdir()
            raise

    def move_to(self, target: Path) -> None:
        """Renames the folder, on disk when this returns. Raises CheckpointError if `target` was created meanwhile."""
        if os.path.lexists(target):
            raise CheckpointError(f"{target} was created meanwhile: save under another name")
        os.rename(self.path, target)
        sync_directory(target.parent)
        self._unmark(target)

    def remove(self, *, moved_to: Path | None = None) -> None:
        """Removes the folder. If an interrupt came after the rename to `moved_to`, only removes the mark there."""
        if self._lock is not None and _is_in(self._lock, self.path):
            _remove(self._lock, self.path)
        elif self._lock is not None and moved_to is not None and _is_in(self._lock, moved_to):
            self._unmark(moved_to)
        self._lock = None

    def _unmark(self, target: Path) -> None:
        assert self._lock is not None
        os.close(self._lock)  # first: NFS keeps a deleted file in its folder until it is closed
        self._lock = None
        (target / MARK).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def is_marked(path: Path) -> bool:
    """Whether the file `path` begins with the mark."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # missing, a link, or another user's
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and os.pread(descriptor, len(MARK_BYTES), 0) == MARK_BYTES
    finally:
        os.close(descriptor)


def partial_folders(directory: Path) -> list[Path]:
    """The marked folders in `directory`: those in progress, and those of dead processes."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.startswith(".")
        and path.name.endswith(PARTIAL_SUFFIX)
        and not path.is_symlink()
        and is_marked(path / MARK)
    )


def remove_abandoned(directory: Path) -> list[Path]:
    """Removes unfinished folders of dead processes in `directory`; returns their paths. Raises as `lock`."""
    return [path for path in partial_folders(directory) if _remove_if_dead(path)]


def remove_owned(path: Path) -> None:
    """Removes a folder that the caller knows this library made. If interrupted, the folder is complete or absent.

    Raises:
        CheckpointError: the name to which the folder is moved first is taken.
        ConfigError: the file system has no locks.
        OSError: for example, this user may not remove it.
    """
    descriptor = _locked(path, create=True)
    if descriptor is None:
        return  # another process is removing it
    try:
        _write_mark(descriptor, path)
        os.rename(path, partial_of(path))
    except OSError as error:
        os.close(descriptor)
        (path / MARK).unlink(missing_ok=True)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise CheckpointError(f"{path} cannot be removed: {partial_of(path)} is in the way, move that") from error
    sync_directory(path.parent)
    _remove(descriptor, partial_of(path))


def lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Locks the open file of this path without waiting; False if another process holds the lock.

    Raises ConfigError if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be locked (flock: {error.strerror}), and without a lock two processes could write there: "
            f"mount its file system with locks (Lustre: -o flock), or name a directory on another one"
        ) from error
    _locked_files()[descriptor] = _identity(descriptor)
    return True


@cache  # one hook is enough
def _locked_files() -> dict[int, tuple[int, int]]:
    """Returns {descriptor: file} of the locks of this process; some may be closed by now.

    A lock lives as long as any copy of its descriptor. Forked processes, such as the workers of a data loader, close
    their copies, so that the lock ends with the process that took it.
    """
    files: dict[int, tuple[int, int]] = {}

    def close_copies() -> None:
        for descriptor, file in files.items():
            with suppress(OSError):
                if _identity(descriptor) == file:  # a closed descriptor may have been reused for another file
                    os.close(descriptor)
        files.clear()

    os.register_at_fork(after_in_child=close_copies)
    return files


def _identity(descriptor: int) -> tuple[int, int]:
    """The device and inode of an open file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def sync_directory(path: Path) -> None:
    """Syncs the entries of a directory to disk."""
    with name_in_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Adds the name `path` to system errors that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_left_over(path: Path) -> bool:
    """Whether this library made the folder: it has the mark, or contains nothing but an empty file for it."""
    if path.is_symlink() or not path.is_dir():
        return False
    if is_marked(path / MARK):
        return True
    entries = list(path.iterdir())
    return all(e.name == MARK and stat.S_ISREG((file := e.lstat()).st_mode) and not file.st_size for e in entries)


def _locked(path: Path, *, create: bool, without_locks: bool = False) -> int | None:
    """Opens and locks the mark's file in `path`; None if another process holds the lock, or is removing the folder."""
    mark = path / MARK
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(mark, flags, 0o666)
    except FileNotFoundError:
        return None
    mine = False
    try:
        mine = lock(descriptor, mark) and _is_in(descriptor, path)
    except ConfigError:
        if not without_locks:
            raise
        mine = True
    finally:
        if not mine:
            os.close(descriptor)
    return descriptor if mine else None


def _is_in(descriptor: int, path: Path) -> bool:
    """Whether `descriptor` is the file for the mark in `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path / MARK, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write_mark(descriptor: int, path: Path) -> None:
    with name_in_errors(path / MARK):
        os.pwrite(descriptor, MARK_BYTES, 0)
        os.fsync(descriptor)


def _remove_if_dead(path: Path) -> bool:
    """Deletes a marked folder unless its process lives, another one is deleting it, or permissions forbid it."""
    try:
        descriptor = _locked(path, create=False)
        return descriptor is not None and _remove(descriptor, path)
    except PermissionError:
        return False
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return False


def _remove(descriptor: int, path: Path) -> bool:
    """Deletes a folder whose mark this process has locked, mark last; False if another has begun to write there."""
    try:
        _clear(path)
        (path / MARK).unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # before the folder goes: NFS keeps a deleted file in it until it is closed
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
        return False
    return True


def _clear(path: Path) -> None:
    """Deletes everything in a folder but its mark."""
    for entry in list(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()
