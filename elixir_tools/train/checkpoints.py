"""The checkpoints of a run: regular ones, the last good one, and those of an abandoned course of the run.

Owns the directory of checkpoints and the save in progress. `loop` decides when to save and when to go back. Methods are
collective unless stated otherwise.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from elixir_moe import Saving
from elixir_moe.errors import CheckpointError
from elixir_moe.ext.checkpoints import CHECKPOINTS, Manifest, checkpoints
from elixir_tools.report.directory import APART
from elixir_tools.train.config import SaveConfig
from elixir_tools.train.directory import extra_of
from elixir_tools.train.training import Training
from elixir_tools.watch.supervisor import Supervisor


class CheckpointManager:
    """Keeps the checkpoints of one training.

    Args:
        training: the training to save.
        supervisor: its state is saved too.
        config: settings of checkpoints.
        directory: directory of the run.
        event: called with kind and text of each event.
        tell: called after each new checkpoint.
    """

    def __init__(
        self,
        training: Training,
        supervisor: Supervisor,
        config: SaveConfig,
        directory: Path,
        event: Callable[[str, str], None],
        tell: Callable[[], None],
    ) -> None:
        self.training, self.supervisor = training, supervisor
        self.room, self._apart = directory.absolute() / CHECKPOINTS, directory.absolute() / APART
        self.latest: Path | None = None
        """The latest checkpoint."""
        self._config, self._event, self._tell = config, event, tell
        self._writes = dist.get_rank() == 0
        self._saving: Saving | None = None

    @property
    def done(self) -> bool:
        """Whether this rank's part of the save in progress has ended, or there is none. Not collective."""
        return self._saving is None or self._saving.done()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and is not settled. Not collective, but the same on all ranks."""
        return self._saving is not None

    def take(self, source: Path) -> None:
        """Continues from, or goes back to, a checkpoint; moves later checkpoints of this run apart."""
        source = source.absolute()
        self.settle()
        self.supervisor.restore(self.training.load(source))
        if source.parent == self.room:
            self.latest = source
        self.move_apart(self.training.progress.step)

    def save_apart(self) -> Path:
        """Saves the state of a run that diverged outside the regular checkpoints; returns its path."""
        self.settle()
        box = [self._free_name(self._apart, self.training.progress.step)]
        dist.broadcast_object_list(box, group=self.training.wrapped.groups.control)
        self.training.save(box[0], self.supervisor.state())
        return box[0]

    def abandon(self) -> None:
        """Blocks until this rank's part of a save has ended; process groups are about to end. Not collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()

    def save(self, *, asynchronous: bool, must: bool = False) -> None:
        """Saves the present state, unless it is saved already. A failure ends the run if `must`, or by policy."""
        self.settle(must=must)
        step = self.training.progress.step
        path = self.room / f"step-{step:08d}"
        if self.latest == path:
            return
        try:
            state, keep = self.supervisor.state(), self._config.keep
            saving = self.training.save(path, state, keep=keep, asynchronous=asynchronous)
        except CheckpointError as error:
            self._failed(error, must)
            return
        if asynchronous:
            self._saving = saving
        else:
            self.latest = path
            self._tell()

    def settle(self, *, must: bool = False) -> None:
        """Blocks until the save in progress has ended. A failure ends the run if `must`, or by policy."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                self.latest = saving.result()
                self._tell()
            except CheckpointError as error:
                self._failed(error, must)

    def _failed(self, error: CheckpointError, must: bool) -> None:
        self._event("save failed", f"{error}; the latest checkpoint is {self.latest}")
        if must or self._config.on_failure == "stop":
            raise error

    def last_good(self, before: int) -> Path | None:
        """The latest checkpoint with fewer than `before` steps, as rank 0 sees the directory; None if there is none."""
        self.settle()
        found: list[Path | None] = [None]
        if self._writes and self.room.is_dir():
            for path, manifest in checkpoints(self.room):
                if isinstance(manifest, Manifest) and extra_of(path)["progress"]["step"] < before:
                    found[0] = path
        dist.broadcast_object_list(found, group=self.training.wrapped.groups.control)
        return found[0]

    def move_apart(self, step: int) -> None:
        """Rank 0 moves checkpoints of steps after `step`, complete or damaged, out of the regular checkpoints."""
        if not self._writes or not self.room.is_dir():
            return
        whole = {path for path, manifest in checkpoints(self.room) if isinstance(manifest, Manifest)}
        for path in sorted(self.room.iterdir()):
            own = path.name.removeprefix("step-")
            if path.name != own and own.isdecimal() and int(own) > step:
                self._apart.mkdir(exist_ok=True)
                target = self._free_name(self._apart, int(own))
                shutil.move(path, target)  # `checkpoints` may be a link to another file system
                damaged = "" if path in whole else ", which is damaged,"
                self._event("moved apart", f"{path.name}{damaged} is now {target}")

    def _free_name(self, room: Path, step: int) -> Path:
        """An unused path for a checkpoint in `room`."""
        name, number = f"step-{step:08d}", 1
        while (room / name).exists():
            number += 1
            name = f"step-{step:08d}-{number}"
        return room / name
