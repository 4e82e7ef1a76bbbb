"""The directory of a run: its files, and the process that trains in it.

Owns the names of the files, the lock of that process, and the cleanup of `elixir-moe clean`. Starts no communication;
only rank 0 claims a directory.

    runs/x/   config.yaml           the settings, ready to be used again; also marks the directory as a run's
              plan.json             the plan
              layout.json           the chunks with their tiers and parameters, and the planned bytes
              about.json            what the run is, in words: command, model, data, machine
              timeline.json         what ran when in the step that `run.profile` names
              metrics.jsonl         one object per step
              events.jsonl          other events: faults, new settings, failed saves; missing if there were none
              status.json           running, stopped, failed or done; the step and the latest checkpoint
              checkpoints/          step-00000100, ...: see `elixir_moe.state.checkpoint`
              apart/                checkpoints of an abandoned course, and the state of a run that diverged
              control.yaml          written by the user: new settings during the run
              loss.png              losses against steps
              sample.txt            text that the trained model wrote
              weights.safetensors   full weights, named as in the model without this library; for our own GPT
              summary.json          the output of `--json`
              .lock                 the mark of a run's directory; locked by the process that trains here

Files are removed only where ``.lock`` has the mark, and folders only if they are checkpoints of this library.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from elixir_moe.errors import ConfigError
from elixir_moe.ext.checkpoints import MARK_BYTES, is_marked, lock, partial_folders, remove_abandoned
from elixir_tools import settings

OF_THE_END = ("loss.png", "sample.txt", "weights.safetensors", "summary.json")
"""Files that a run writes when it ends."""
_OF_THE_RUN = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "status.json", "layout.json")
FILES = (*_OF_THE_RUN, "timeline.json", "about.json", *OF_THE_END)
APART, CONTROL = "apart", "control.yaml"
LOCK = ".lock"
"""The file that is locked and marked: over NFS other hosts see locks of files, and none of directories."""


class Claim:
    """A run directory locked by this process, until the process ends or `release` is called."""

    def __init__(self, path: Path, source: Path | None = None, *, name: str = "run.out") -> None:
        """Locks and marks `path`. `name`: of the setting, for messages.

        Raises:
            ConfigError: another process trains in it, its ``.lock`` is not a run's, or its file system has no locks.
        """
        self.path = path
        self.source = source
        """The checkpoint to continue from; None for a new run."""
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if not lock(self._lock, path / LOCK):
                raise ConfigError(
                    f"{name}: another process trains in '{path}': wait for it, or choose another directory"
                )
            if os.fstat(self._lock).st_size and not is_marked(path / LOCK):
                raise ConfigError(f"{name}: {str(path / LOCK)!r} is not a file of a run: choose another directory")
            os.pwrite(self._lock, MARK_BYTES, 0)
        except BaseException:
            os.close(self._lock)
            raise

    def release(self) -> None:
        """Releases the lock."""
        os.close(self._lock)


def is_claimed(path: Path) -> bool:
    """Whether a process trains in `path`. Writes nothing there.

    Raises ConfigError if the file system has no locks, so that nobody can tell.
    """
    try:
        with open(path / LOCK, "rb") as file:
            return not lock(file.fileno(), path / LOCK, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's, or no file


def is_run(directory: Path) -> bool:
    """Whether a run owns this directory: its `config.yaml` is there, perhaps still empty."""
    mark = directory / "config.yaml"
    if not mark.is_file():
        return False
    try:
        found = settings.parse_yaml(mark.read_text(encoding="utf-8"), mark)
    except (ConfigError, UnicodeDecodeError):
        return False
    return not found or (isinstance(found.get("run"), dict) and "out" in found["run"])


def unused(path: Path) -> Path:
    """The path, or the first one with a number behind its name, at which nothing is."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not os.path.lexists(free))


def leftovers(directory: Path) -> Iterator[Path]:
    """Removes partial checkpoints and files of dead processes under `directory`, and yields their paths."""
    for path in (directory, *sorted(directory.rglob("*"))):
        if path.is_dir() and not path.is_symlink() and partial_folders(path):
            yield from remove_abandoned(path)
    for mark in (path for path in sorted(directory.rglob(LOCK)) if is_marked(path)):
        halves = [mark.with_name(f"{name}.part") for name in FILES]
        found = [half for half in halves if half.is_file() and not half.is_symlink()]
        for half in found if not is_claimed(mark.parent) else ():
            half.unlink()
            yield half
