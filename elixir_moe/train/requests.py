"""What the world outside asks of a run: to end, by a signal; other settings or a save, by `control.yaml`.

Owns the signal handlers and the reading of the file. Answers nothing: `loop` asks between two steps, on all ranks.
"""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from elixir_moe.errors import ConfigError
from elixir_moe.train import settings

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """What `control.yaml` may say; what it leaves out stays as it is."""

    lr: float | None = None
    """Highest learning rate from now on; the schedule goes on below it."""
    clip_norm: float | None = None
    """Bound of the global gradient norm from now on."""
    save: bool = False
    """Save now; once, when the file changes."""
    stop: bool = False
    """Save and end now; when the file changes."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: expected a finite number above 0, got {value}")


class ControlFile:
    """`control.yaml`, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> Control | None:
        """What the file says, if it has changed since the last call. Raises ConfigError, once, if it makes no sense."""
        try:
            now = self._path.stat()
        except OSError:
            self._seen = None
            return None
        stamp = (now.st_mtime_ns, now.st_size, now.st_ino)
        if stamp == self._seen:
            return None
        self._seen = stamp
        return settings.build(Control, settings.read_yaml(self._path))


class Signals:
    """SIGTERM and SIGUSR1 are noted and change nothing else; a context. A second one finds the first one noted."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal; 0 if there was none."""
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python takes handlers from no other
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
