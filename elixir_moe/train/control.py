"""Requests from outside to a run: to end, by a signal; new settings or a save, by `control.yaml`.

Owns the signal handlers and the reading of the file. `loop` acts on requests between two steps, on all ranks. Before
the first step, a signal ends the process.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from elixir_moe.records import ABOVE_0
from elixir_moe.train import settings

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REQUEUE = 75
"""Exit code of a run ended by a signal without loss of work, to be started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """The settings in `control.yaml`; those left out do not change."""

    lr: Annotated[float | None, ABOVE_0] = None
    """New peak learning rate; the schedule stays the same."""
    clip_norm: Annotated[float | None, ABOVE_0] = None
    """New bound on the global gradient norm."""
    save: bool = False
    """Save now; once per change of the file."""
    stop: bool = False
    """Save and end now, when the file changes."""


class ControlFile:
    """`control.yaml`, on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> Control | None:
        """The contents if the file has changed since the last call, else None. Raises ConfigError, once per change."""
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


@contextmanager
def answering(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """While open, SIGTERM and SIGUSR1 call `handler`; does nothing outside the main thread."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python accepts handlers from no other
        before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leaving(leave: Callable[[int], object]) -> Iterator[None]:
    """While open, unless another handler is set, SIGTERM and SIGUSR1 call `leave` at once, on another thread.

    The main thread may be blocked in a library, where Python runs no signal handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(_number: int, _frame: FrameType | None) -> None: ...

    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)

    def listen() -> None:
        while byte := os.read(ear, 1):
            if signal.getsignal(byte[0]) is heard:
                leave(byte[0])
        os.close(ear)

    threading.Thread(target=listen, name="elixir-signals", daemon=True).start()
    before = signal.set_wakeup_fd(mouth)
    try:
        with answering(heard):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(mouth)


class Signals:
    """A context in which SIGTERM and SIGUSR1 are only recorded: the first one."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal received; 0 if none."""
        self._answering = answering(self._note)

    def __enter__(self) -> "Signals":
        self._answering.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._answering.__exit__(*error)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
