"""The run directory: its owner, its files, and the checkpoint from which its run continues.

Owns the names of the files, the lock of the process that trains in the directory, and the cleanup of `elixir-moe
clean`. Starts no communication; only rank 0 claims a directory.

    runs/x/   config.yaml           the settings, ready to be used again; also marks the directory as a run's
              plan.json             the plan
              layout.json           the chunks with their tiers and parameters, and the planned bytes
              timeline.json         what ran when in the step that `run.profile` names
              metrics.jsonl         one object per step
              events.jsonl          other events: faults, new settings, failed saves; missing if there were none
              status.json           running, stopped, failed or done; the step and the latest checkpoint
              checkpoints/          step-00000100, ...: see `elixir_moe.state.checkpoint`
              apart/                checkpoints of an abandoned course, and the state of a run that diverged
              control.yaml          written by the user: new settings during the run
              tensorboard/          events for TensorBoard, with `run.tensorboard`
              loss.png              losses against steps
              sample.txt            text that the trained model wrote
              weights.safetensors   full weights, named as in the model without this library; for our own GPT
              summary.json          the output of `--json`
              .lock                 the mark of a run's directory; locked by the process that trains here

Files are removed only where ``.lock`` has the mark, events of TensorBoard only if their names end in `EVENTS`, and
folders only if they are checkpoints of this library.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.state.checkpoint.storage import CHECKPOINTS, MANIFEST, is_checkpoint, latest, read_manifest, remove
from elixir_moe.state.checkpoint.values import decode
from elixir_moe.state.marked import TEXT, collect, is_marked, lock, partials
from elixir_moe.train import settings
from elixir_moe.train.config import TrainConfig, identity
from elixir_moe.train.data import Data
from elixir_moe.train.writers import EVENTS

_OF_THE_END = ("loss.png", "sample.txt", "weights.safetensors", "summary.json")
"""Files that a run writes when it ends."""
FILES: tuple[str, ...] = (
    *("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "status.json", "layout.json", "timeline.json"),
    *_OF_THE_END,
)
APART, CONTROL, TENSORBOARD = "apart", "control.yaml", "tensorboard"
_LOCK = ".lock"
"""What is locked and marked: over NFS other hosts see locks of files, and none of directories."""
_WORDS = ("auto", "fall_back", "never")
"""Values of ``run.resume`` that name no checkpoint."""
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class Claim:
    """A run directory locked by this process, until the process ends or `release` is called."""

    def __init__(self, path: Path, source: Path | None) -> None:
        """Locks and marks `path`.

        Raises:
            ConfigError: another process trains in it, its ``.lock`` is not a run's, or its file system has no locks.
        """
        self.path = path
        self.source = source
        """The checkpoint to continue from; None for a new run."""
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if not lock(self._lock, path / _LOCK):
                raise ConfigError(
                    f"run.out: another process trains in '{path}': wait for it, or choose another directory"
                )
            if os.fstat(self._lock).st_size and not is_marked(path / _LOCK):
                raise ConfigError(f"run.out: {str(path / _LOCK)!r} is no file of a run: choose another directory")
            os.pwrite(self._lock, TEXT, 0)
        except BaseException:
            os.close(self._lock)
            raise

    def release(self) -> None:
        """Releases the lock."""
        os.close(self._lock)


def is_claimed(path: Path) -> bool:
    """Whether a process trains in `path`. Writes nothing there.

    Raises:
        ConfigError: the file system has no locks, so that nobody can tell.
    """
    try:
        with open(path / _LOCK, "rb") as file:
            return not lock(file.fileno(), path / _LOCK, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's, or no file


def restarted() -> bool:
    """Whether a launcher restarted this process after a failure."""
    return any(os.environ.get(name, "0") != "0" for name in _RESTARTS)


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


def check_directory(config: TrainConfig, data: Data) -> Path | None:
    """Raises like `claim_directory`, but changes nothing; returns the checkpoint the run would continue from."""
    run, directory = config.run, Path(config.run.out)
    try:
        used = directory.exists() and bool(set(os.listdir(directory)) - {CONTROL, _LOCK})
    except OSError as error:
        raise _unusable(run.out, error) from error
    if not used:
        return _chosen(config, data)
    if not is_run(directory):
        raise ConfigError(f"run.out: {run.out!r} is not empty and holds no run: choose another directory")
    for room in (directory / CHECKPOINTS, directory / APART):
        if os.path.lexists(room) and not room.is_dir():
            what = f"a link to {os.readlink(room)!r}, which is not there" if room.is_symlink() else "no folder"
            raise ConfigError(
                f"run.out: {str(room)!r} is {what}: put back the folder of its checkpoints, or choose another directory"
            )
    if run.overwrite and not restarted():
        _check_marked(directory)
        return _chosen(config, data)
    if run.resume == "never":
        raise ConfigError(
            f"run.out: {run.out!r} is not empty: choose another directory, or give --run.overwrite true to replace "
            f"the run in it"
        )
    ended = _steps_of_ended_run(directory)
    if ended is not None and ended >= run.steps:
        raise ConfigError(
            f"run.out: {run.out!r} is not empty: the run in it has ended at step {ended}: choose another directory, "
            f"give --run.overwrite true to replace it, or more --run.steps to go on"
        )
    source = latest(directory / CHECKPOINTS, fall_back=run.resume == "fall_back")
    if source is None:
        _check_marked(directory)
        _check_nothing_lost(directory, ended, run.resume)
        return _chosen(config, data)
    _check_chosen(source, config)
    _check_identity(source, config, data)
    return source


def claim_directory(config: TrainConfig, data: Data) -> Claim:
    """Takes the run directory for this run, or raises.

    An unfinished run with the same settings continues from its latest checkpoint, or from the start if it has none.
    With ``run.overwrite``, the files of an earlier run, and no others, are removed first; the checkpoint that
    ``run.resume`` names stays. If it is one of that run, the run goes back to it, and only what it wrote at its end is
    removed.

    Raises:
        ConfigError: the directory holds something else, a finished run, or a run with other settings; another process
            trains in it; or it cannot be written.
        CheckpointError: the manifest of a checkpoint in it is damaged.
    """
    source, directory = check_directory(config, data), Path(config.run.out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        claim = Claim(directory, source)
        if source is None or source.resolve().parent != (directory / CHECKPOINTS).resolve():
            _empty(directory, source, checkpoints=config.run.overwrite and not restarted())
        elif config.run.overwrite and not restarted():  # the run in it goes back, perhaps from its end
            for name in _OF_THE_END:
                (directory / name).unlink(missing_ok=True)
        (directory / "config.yaml").touch()
    except OSError as error:
        raise _unusable(config.run.out, error) from error
    return claim


def extra_of(checkpoint: Path) -> dict[str, Any]:
    """The `extra` that a training saved in a checkpoint. Raises ConfigError if another program saved the checkpoint."""
    extra = decode(read_manifest(checkpoint).extra, str(checkpoint / MANIFEST))
    if not isinstance(extra, dict) or {"progress", "settings"} - extra.keys():
        raise ConfigError(f"run.resume: {str(checkpoint)!r} was not saved by elixir-moe train: load it with em.load")
    return extra


def leftovers(directory: Path) -> Iterator[Path]:
    """Removes partial checkpoints and files of dead processes under `directory`, and yields their paths."""
    for path in (directory, *sorted(directory.rglob("*"))):
        if path.is_dir() and not path.is_symlink() and partials(path):
            yield from collect(path)
    for mark in (path for path in sorted(directory.rglob(_LOCK)) if is_marked(path)):
        halves = [mark.with_name(f"{name}.part") for name in FILES]
        found = [half for half in halves if half.is_file() and not half.is_symlink()]
        for half in found if not is_claimed(mark.parent) else ():
            half.unlink()
            yield half


def _chosen(config: TrainConfig, data: Data) -> Path | None:
    """The checkpoint named by ``run.resume``; None if it names none."""
    named = config.run.resume
    if named in _WORDS:
        return None
    try:
        _check_identity(Path(named), config, data)
    except CheckpointError as error:
        raise ConfigError(f"run.resume: {error}; name a checkpoint, auto, fall_back or never") from error
    return Path(named)


def _check_chosen(source: Path, config: TrainConfig) -> None:
    """Raises ConfigError if ``run.resume`` names another checkpoint than `source`, unless the run began from it."""
    named, mark = config.run.resume, source.parent.parent / "config.yaml"
    if named in _WORDS or restarted() or Path(named).resolve() == source.resolve():
        return
    began = settings.read_yaml(mark).get("run") or {}
    if began.get("resume") != named:
        raise ConfigError(
            f"run.resume: {named!r} is not where the run in {config.run.out!r} goes on: that is {str(source)!r}. Leave "
            f"run.resume out to go on, give --run.overwrite true to begin again from what it names, or another run.out"
        )


def _check_identity(source: Path, config: TrainConfig, data: Data) -> None:
    extra = extra_of(source)
    saved, now, done = extra["settings"], identity(config, data), extra["progress"]["step"]
    for key, value in now.items():
        before = saved.get(key, value)  # an earlier version saved fewer settings
        if before != value:
            raise ConfigError(
                f"{key} is {value}, but was {before} when {str(source)!r} was saved: a run that goes on keeps it (the "
                f"rate and clipping can be changed in {CONTROL}); set it back, or start a new run by another run.out"
            )
    if done > config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: {str(source)!r} has {done} steps already, give at least those"
        )


def _check_marked(directory: Path) -> None:
    """Raises ConfigError unless a run that begins in this directory may remove the files of the run before."""
    if not is_marked(directory / _LOCK):
        raise ConfigError(
            f"run.out: {str(directory)!r} has the files of a run, but its {_LOCK} has no mark of elixir_moe, so "
            f"nothing in it is removed: choose another directory, or remove them yourself"
        )


def _check_nothing_lost(directory: Path, ended: int | None, resume: str) -> None:
    """Raises ConfigError if the run in a directory without a checkpoint has had one, or has ended.

    Args:
        directory: the directory.
        ended: the steps of the run, if it has ended.
        resume: ``run.resume``; a run that names a checkpoint of another directory misses none of this one.
    """
    saved = _object(directory / "status.json").get("checkpoint") if resume in _WORDS else None
    if ended is None and saved is None:
        return
    had = f"has ended at step {ended}" if saved is None else f"saved the checkpoint {saved!r}"
    raise ConfigError(
        f"run.out: the run in {str(directory)!r} {had}, and no whole checkpoint is left in "
        f"{str(directory / CHECKPOINTS)!r} to go on from: put the checkpoints back, give --run.overwrite true to begin "
        f"again from step 0, or choose another directory"
    )


def _steps_of_ended_run(directory: Path) -> int | None:
    steps = _object(directory / "summary.json").get("steps")
    return steps if isinstance(steps, int) else None


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _empty(directory: Path, source: Path | None, *, checkpoints: bool) -> None:
    """Removes the files of a run; with `checkpoints` also those, but for `source`."""
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    for events in (directory / TENSORBOARD).glob(f"events.out.tfevents.*{EVENTS}"):
        events.unlink()
    for room in (directory / CHECKPOINTS, directory / APART):
        if room.is_dir() and not room.is_symlink():
            collect(room)
            for path in list(room.iterdir()) if checkpoints else ():
                is_source = source is not None and path.resolve() == source.resolve()
                if is_checkpoint(path) and not is_source:
                    remove(path)
            if not any(room.iterdir()):
                room.rmdir()


def _unusable(out: str, error: OSError) -> ConfigError:
    return ConfigError(f"run.out: cannot use {out!r}: {error.strerror or error}; choose another directory")
