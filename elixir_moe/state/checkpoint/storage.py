"""Checkpoint directories: complete or absent.

Owns everything of a checkpoint in the file system except the contents of its files (`tensors`). A checkpoint is a
directory::

    step-100/   manifest.json            written last
                rank-00000.safetensors   flat tensors, one for each run of elements that the rank held
                ...

It is written as ``.step-100.partial`` in the same folder (`marked`), every file and directory is synced to disk, and
one rename makes it appear. A save first removes partial folders of dead processes; a reader removes nothing. Removal
works in reverse: one rename makes the checkpoint partial.
"""

import os
import re
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from elixir_moe.errors import CheckpointError, ConfigError, ElixirError
from elixir_moe.state.checkpoint.manifest import FORMAT, Manifest, parse
from elixir_moe.state.checkpoint.tensors import hash_file, open_regular
from elixir_moe.state.marked import (
    PARTIAL_SUFFIX,
    StagingFolder,
    name_in_errors,
    partial_of,
    remove_abandoned,
    remove_owned,
    sync_directory,
)

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's directory."""
_HEAD_BYTES = 512
"""The format and the time of the save lie within the first bytes of a manifest, this many."""
_HEAD = re.compile(rb'\{"digest":"[0-9a-f]{64}",\n"format":"' + FORMAT.encode() + rb'",')
"""The beginning of every manifest; a damaged one may still have it."""


class Draft:
    """A checkpoint being written, on the rank that commits it."""

    def __init__(self, target: Path) -> None:
        """Creates the partial directory, after removing those of dead processes.

        Raises:
            CheckpointError: the target exists, its folder cannot be made, or another process is writing it.
            ConfigError: the file system has no locks.
            OSError: the directory cannot be created.
        """
        check_target(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            kind = "a broken link" if target.parent.is_symlink() else "not a folder"
            raise CheckpointError(f"{target.parent} is {kind}: save in another one") from error
        remove_abandoned(target.parent)
        self.target, self._folder = target, StagingFolder(partial_of(target))
        self.path = self._folder.path

    def commit(self, manifest: bytes) -> None:
        """Writes the manifest and makes the checkpoint appear; all other files must be complete and synced.

        Raises CheckpointError if the target was created meanwhile.
        """
        with name_in_errors(self.path / MANIFEST), open(self.path / MANIFEST, "xb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.path)
        self._folder.move_to(self.target)

    def abandon(self) -> None:
        """Removes the partial directory if it still exists: an interrupt may come right after the rename."""
        self._folder.remove(moved_to=self.target)


def path_of(path: str | os.PathLike[str]) -> Path:
    """Returns an absolute path, with the home directory for ``~``. Raises ConfigError if it is not a path."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise ConfigError(f"{path!r}: expected the path of a checkpoint, a directory")
    return Path(os.path.abspath(os.path.expanduser(path)))


def check_target(target: Path) -> None:
    """Raises CheckpointError if the name is taken or is that of a partial checkpoint."""
    if target.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(
            f"{target}: names that end in {PARTIAL_SUFFIX} are for partial checkpoints: save under another name"
        )
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: save under another name, or remove it first")


def remove(path: Path) -> None:
    """Removes a checkpoint, damaged or not. If interrupted, the checkpoint is either complete or absent.

    Raises:
        CheckpointError: the directory has no manifest of this library, or its partial name is taken.
        ConfigError: the file system has no locks.
        OSError: for example, this user may not remove it.
    """
    if not is_checkpoint(path):
        raise CheckpointError(f"{path} is not removed: its {MANIFEST} is not that of an {FORMAT}; move it yourself")
    remove_owned(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory, which is not a link, has a manifest that this library wrote, damaged or not."""
    return not path.is_symlink() and _HEAD.match(_head(path)) is not None


def retain(directory: Path, keep: int) -> None:
    """Removes all checkpoints in `directory` but the `keep` latest, except links and damaged ones.

    A checkpoint that cannot be removed stays, with a warning, since the save itself has succeeded.
    """
    found = [(path, manifest) for path, manifest in checkpoints(directory) if not path.is_symlink()]
    whole = [path for path, manifest in found if isinstance(manifest, Manifest)]
    for path in whole[:-keep]:
        try:
            remove(path)
        except (ElixirError, OSError) as error:
            warnings.warn(f"{path} stays, although keep={keep}: {error}", stacklevel=2)


def next_save_time(directory: Path) -> int:
    """Returns nanoseconds since 1970, increased past every checkpoint in `directory` if clocks differ."""
    moments = [time.time_ns()]
    for path in directory.glob("[!.]*"):
        found = re.search(rb'"saved_ns":(\d{1,19}),', _head(path))
        moments += [int(found[1]) + 1] if found else []
    return max(moments)


def latest(directory: str | Path, *, fall_back: bool = False) -> Path | None:
    """Returns the latest checkpoint in `directory`; None if there is none. Not collective.

    It writes and removes nothing, so any process may call it while another one saves.

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
            if not os.path.lexists(path):
                return latest(directory, fall_back=fall_back)  # removed meanwhile by a save, which made a later one
            warnings.warn(f"{path} is passed over: {error}", stacklevel=2)
    return None


def checkpoints(directory: Path) -> list[tuple[Path, Manifest | CheckpointError]]:
    """Returns (path, manifest) of all checkpoints in `directory`, latest last; damaged ones first, with their error.

    A link to a checkpoint elsewhere counts, a link to one in `directory` does not.
    """
    while (found := _checkpoints_in(directory)) is None:
        pass  # one was removed meanwhile by a save, which made a later one
    return sorted(found, key=lambda item: item[1].saved_ns if isinstance(item[1], Manifest) else -1)


def _checkpoints_in(directory: Path) -> list[tuple[Path, Manifest | CheckpointError]] | None:
    """Returns the unsorted result of `checkpoints`; None if one was removed after it was listed."""
    found: list[tuple[Path, Manifest | CheckpointError]] = []
    for path in sorted(directory.iterdir()):
        again = path.is_symlink() and path.resolve().parent == directory.resolve()
        if again or path.name.endswith(PARTIAL_SUFFIX):
            continue
        manifest: Manifest | CheckpointError | None = None
        if os.path.exists(path / MANIFEST):  # False also where this user may not look, as in lost+found
            try:
                manifest = _parsed(path)
            except CheckpointError as error:
                manifest = error
        if not isinstance(manifest, Manifest) and not os.path.lexists(path):
            return None
        if manifest is not None:
            found.append((path, manifest))
    return found


def checkpoints_folder(directory: Path) -> Path:
    """The folder of checkpoints of `directory`: `CHECKPOINTS` in it if that exists and it has none, else itself."""
    own = directory / CHECKPOINTS
    return own if own.is_dir() and not checkpoints(directory) else directory


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint at `path`. Raises CheckpointError if it is missing or damaged."""
    if path.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{path} is an unfinished save: use another checkpoint")
    if not path.is_dir():
        partial = partial_of(path)
        left = f": its save is still running or was interrupted, see {partial}" if partial.is_dir() else ""
        raise CheckpointError(f"{path}: no such checkpoint{left}")
    if not os.path.lexists(path / MANIFEST):
        if checkpoints(checkpoints_folder(path)):
            where = str(checkpoints_folder(path))
            raise CheckpointError(
                f"{path} contains checkpoints and is not one itself: load em.latest({where!r}), the last of them"
            )
        raise CheckpointError(f"{path / MANIFEST} does not exist, so {path} is not a complete checkpoint")
    return _parsed(path)


def _parsed(path: Path) -> Manifest:
    with name_in_errors(path / MANIFEST), open(open_regular(path / MANIFEST), "rb") as file:
        return parse(file.read(), str(path / MANIFEST))


def verify(path: Path, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Hashes `files` of the checkpoint, by default all. Raises CheckpointError for the first damaged one."""
    for name in manifest.files if files is None else files:
        record, found = manifest.files[name], hash_file(path / name)
        if found.nbytes != record.nbytes:
            wrong = f"{found.nbytes} bytes of {record.nbytes}"
            raise CheckpointError(f"{path / name} is damaged: {wrong}; use another checkpoint")
        if found.digest != record.digest:
            raise CheckpointError(f"{path / name} is damaged: its hash is not the manifest's; use another checkpoint")


def _head(path: Path) -> bytes:
    """Reads the beginning of the manifest at `path`; empty if there is none, or it cannot be read."""
    try:
        with open(open_regular(path / MANIFEST), "rb") as file:
            return file.read(_HEAD_BYTES)
    except CheckpointError:
        return b""
