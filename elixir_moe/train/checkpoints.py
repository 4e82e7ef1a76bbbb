"""The checkpoints of a run: one after every so many steps, the last good one, those of another past.

Owns the directory of checkpoints and the save that is under way. When to save, and when to go back, is `loop`'s
question. All methods are collective where nothing else is said.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from elixir_moe.errors import CheckpointError
from elixir_moe.state.checkpoint.manifest import Manifest
from elixir_moe.state.checkpoint.save import Saving
from elixir_moe.state.checkpoint.storage import checkpoints
from elixir_moe.train.config import SaveConfig
from elixir_moe.train.directory import APART, CHECKPOINTS, extra_of
from elixir_moe.train.supervisor import Supervisor
from elixir_moe.train.training import Training


class CheckpointManager:
    """Keeps the checkpoints of one training.

    Args:
        training: what is saved.
        supervisor: its state is saved too.
        config: how many are kept, and the like.
        directory: of the run.
        event: called with kind and text of what happened.
        tell: called when there is a new checkpoint.
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
        """Whether this rank's part of a save under way has ended. Not collective."""
        return self._saving is None or self._saving.done()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and was not settled. Not collective, the same on all ranks."""
        return self._saving is not None

    def take(self, source: Path) -> None:
        """Goes on from, or back to, a checkpoint; what is later in this run's directory is of another past."""
        source = source.absolute()
        self.settle()
        self.supervisor.restore(self.training.load(source))
        if source.parent == self.room:
            self.latest = source
        self.move_apart(self.training.progress.step)

    def save_apart(self) -> Path:
        """The state of a run that diverged, where none looks for the latest."""
        self.settle()
        box = [self._free_name(self._apart, self.training.progress.step)]
        dist.broadcast_object_list(box, group=self.training.optimizer.kept.groups.control)
        self.training.save(box[0], self.supervisor.state())
        return box[0]

    def abandon(self) -> None:
        """Waits for this rank's part of a save under way; the process groups are about to go. Not collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()

    def save(self, *, asynchronous: bool, must: bool = False) -> None:
        """A checkpoint of now, unless there is one. An error is one of the run if it `must` be, or by policy."""
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
        """Ends the save that is under way."""
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
        """The latest checkpoint of fewer than `before` steps, by what rank 0 sees."""
        self.settle()
        found: list[Path | None] = [None]
        if self._writes and self.room.is_dir():
            for path, manifest in checkpoints(self.room):
                if isinstance(manifest, Manifest) and extra_of(path)["progress"]["step"] < before:
                    found[0] = path
        dist.broadcast_object_list(found, group=self.training.optimizer.kept.groups.control)
        return found[0]

    def move_apart(self, step: int) -> None:
        """Checkpoints of steps after `step` are of another past, or what is left of some: rank 0 puts them where none
        looks for the latest.
        """
        if not self._writes or not self.room.is_dir():
            return
        whole = {path for path, manifest in checkpoints(self.room) if isinstance(manifest, Manifest)}
        for path in sorted(self.room.iterdir()):
            own = path.name.removeprefix("step-")
            if path.name != own and own.isdecimal() and int(own) > step:
                self._apart.mkdir(exist_ok=True)
                target = self._free_name(self._apart, int(own))
                os.rename(path, target)
                damaged = "" if path in whole else ", which is damaged,"
                self._event("moved apart", f"{path.name}{damaged} is now {target}")

    def _free_name(self, room: Path, step: int) -> Path:
        """A name for a checkpoint in `room` that is not taken."""
        name, number = f"step-{step:08d}", 1
        while (room / name).exists():
            number += 1
            name = f"step-{step:08d}-{number}"
        return room / name
