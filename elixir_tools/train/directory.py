"""The run directory of `elixir-moe train`: whether a run may begin or continue there, and from which checkpoint.

Owns the checks, what a run that begins removes of the one before, and where checkpoints of an abandoned course go.
`report.directory` has the files and the lock.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elixir_moe import latest
from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.ext.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    checkpoints,
    decode,
    is_checkpoint,
    is_marked,
    read_manifest,
    remove,
    remove_abandoned,
)
from elixir_tools import settings
from elixir_tools.report.directory import APART, CONTROL, FILES, LOCK, OF_THE_END, Claim, is_run, unused
from elixir_tools.train.config import TrainConfig, identity
from elixir_tools.train.data import Text

_WORDS = ("auto", "fall_back", "never")
"""Values of ``run.resume`` that name no checkpoint."""
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def restarted() -> bool:
    """Whether a launcher restarted this process after a failure."""
    return any(os.environ.get(name, "0") != "0" for name in _RESTARTS)


def check_directory(config: TrainConfig, data: Text) -> Path | None:
    """Raises like `claim_directory`, but changes nothing; returns the checkpoint the run would continue from."""
    run, directory = config.run, Path(config.run.out)
    try:
        used = directory.exists() and bool(set(os.listdir(directory)) - {CONTROL, LOCK})
    except OSError as error:
        raise _unusable(run.out, error) from error
    if not used:
        return _chosen(config, data)
    if not is_run(directory):
        raise ConfigError(f"run.out: {run.out!r} is not empty and holds no run: choose another directory")
    settings_there = settings.read_yaml(directory / "config.yaml")
    if settings_there and "model" not in settings_there:
        raise ConfigError(
            f"run.out: {run.out!r} holds a run of sft or its like, which train neither continues nor replaces: choose "
            f"another directory"
        )
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
            f"give --run.overwrite true to replace it, or more --run.steps to continue"
        )
    source = latest(directory / CHECKPOINTS, fall_back=run.resume == "fall_back")
    if source is None:
        _check_marked(directory)
        _check_nothing_lost(directory, ended, run.resume)
        return _chosen(config, data)
    _check_chosen(source, config)
    _check_identity(source, config, data)
    return source


def claim_directory(config: TrainConfig, data: Text) -> Claim:
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
            for name in OF_THE_END:
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


def last_before(directory: Path, step: int) -> Path | None:
    """The latest complete checkpoint of a run with fewer than `step` steps; None if there is none."""
    steps = {path: extra_of(path)["progress"]["step"] for path in _complete(directory / CHECKPOINTS)}
    return next((path for path in reversed(steps) if steps[path] < step), None)


def move_apart(directory: Path, step: int) -> Iterator[str]:
    """Moves checkpoints of steps after `step`, complete or damaged, out of the regular ones; yields what was moved."""
    room = directory / CHECKPOINTS
    whole = _complete(room)
    for path in sorted(room.iterdir()) if room.is_dir() else ():
        own = path.name.removeprefix("step-")
        if path.name != own and own.isdecimal() and int(own) > step:
            target = path_apart(directory, int(own))
            target.parent.mkdir(exist_ok=True)
            shutil.move(path, target)  # `checkpoints` may be a link to another file system
            yield f"{path.name}{'' if path in whole else ', which is damaged,'} is now {target}"


def path_apart(directory: Path, step: int) -> Path:
    """An unused path for the state after `step` outside the regular checkpoints."""
    return unused(directory / APART / f"step-{step:08d}")


def _complete(room: Path) -> list[Path]:
    """The complete checkpoints in a folder, the latest last."""
    found = checkpoints(room) if room.is_dir() else ()
    return [path for path, manifest in found if isinstance(manifest, Manifest)]


def _chosen(config: TrainConfig, data: Text) -> Path | None:
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
            f"run.resume: {named!r} is not where the run in {config.run.out!r} continues: that is {str(source)!r}. "
            f"Leave run.resume out to continue, give --run.overwrite true to begin again from what it names, or "
            f"another run.out"
        )


def _check_identity(source: Path, config: TrainConfig, data: Text) -> None:
    extra = extra_of(source)
    saved, now, done = extra["settings"], identity(config, data), extra["progress"]["step"]
    for key, value in now.items():
        before = saved.get(key, value)  # an earlier version saved fewer settings
        if before != value:
            raise ConfigError(
                f"{key} is {value}, but was {before} when {str(source)!r} was saved: a run that continues keeps it "
                f"(the rate and clipping can be changed in {CONTROL}); set it back, or choose another run.out"
            )
    if done > config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: {str(source)!r} has {done} steps already, give at least those"
        )


def _check_marked(directory: Path) -> None:
    """Raises ConfigError unless a run that begins in this directory may remove the files of the run before."""
    if not is_marked(directory / LOCK):
        raise ConfigError(
            f"run.out: {str(directory)!r} has the files of a run, but its {LOCK} has no mark of elixir_moe, so "
            f"nothing in it is removed: choose another directory, or remove them yourself"
        )


def _check_nothing_lost(directory: Path, ended: int | None, resume: str) -> None:
    """Raises ConfigError if the run in a directory without a checkpoint has had one, or has ended after steps.

    A run that resumes from a checkpoint of another directory misses none of this one.
    """
    saved = _object(directory / "status.json").get("checkpoint") if resume in _WORDS else None
    if ended is None and saved is None:
        return
    had = f"has ended at step {ended}" if saved is None else f"saved the checkpoint {saved!r}"
    raise ConfigError(
        f"run.out: the run in {str(directory)!r} {had}, and no whole checkpoint is left in "
        f"{str(directory / CHECKPOINTS)!r} to continue from: put the checkpoints back, give --run.overwrite true to "
        f"begin again from step 0, or choose another directory"
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
    for room in (directory / CHECKPOINTS, directory / APART):
        if room.is_dir() and not room.is_symlink():
            remove_abandoned(room)
            for path in list(room.iterdir()) if checkpoints else ():
                is_source = source is not None and path.resolve() == source.resolve()
                if is_checkpoint(path) and not is_source:
                    remove(path)
            if not any(room.iterdir()):
                room.rmdir()


def _unusable(out: str, error: OSError) -> ConfigError:
    return ConfigError(f"run.out: cannot use {out!r}: {error.strerror or error}; choose another directory")
