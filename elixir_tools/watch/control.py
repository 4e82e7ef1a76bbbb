"""Requests from outside to a run: to end, by a signal; new settings or a save, by `control.yaml`.

Owns the signal handlers and the reading of the file. The trainer acts on requests between two steps, on all ranks.
Before the first step, a signal ends the process. So does a second Ctrl-C at any time.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from elixir_moe.errors import ConfigError
from elixir_moe.ext.records import ABOVE_0
from elixir_tools import settings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REQUEUE = 75
"""Exit code of a run ended by a scheduler's signal without loss of work, to be started again."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells and make expect it."""


def exit_code_of(number: int) -> int:
    """The exit code of a run that this signal ended."""
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def named(number: int) -> str:
    """The signal in a message."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


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


def changes(asked: Control, now: Mapping[str, float | None], step: int) -> Iterator[tuple[str, float, str]]:
    """(name, value, what happens in words) of the numbers that `asked` changes, from `step` on.

    `now`: the present numbers; those that a schedule has computed may differ in their last digits.
    """
    for name, before in now.items():
        value = getattr(asked, name)
        if value is not None and (before is None or not math.isclose(value, before)):
            yield name, value, f"{name} is {value:g} from step {step} on, it was {before}"


class ControlFile:
    """`control.yaml`, on rank 0."""

    def __init__(self, path: Path, kind: type[Control] = Control) -> None:
        """`kind`: the settings that the run follows."""
        self._path, self._kind = path, kind
        self._seen: tuple[int, int, int] | None = None

    def asked(self) -> Control | ConfigError | None:
        """Returns what has changed since the last call, to be sent to all ranks; an error where the file is wrong."""
        try:
            return self.changed()
        except ConfigError as error:
            return error

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
        return settings.build(self._kind, settings.read_yaml(self._path))


@contextmanager
def answering(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """While open, the signals call `handler`, unless this process ignores them; only in the main thread."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python accepts handlers from no other
        # A shell lets its background jobs ignore Ctrl-C.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def listening(heard: Callable[[int], object]) -> Iterator[None]:
    """While open, another thread calls `heard` with each signal that has a handler.

    The main thread may be blocked in a library, where Python runs no signal handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)

    def listen() -> None:
        while byte := os.read(ear, 1):
            heard(byte[0])
        os.close(ear)

    threading.Thread(target=listen, name="elixir-signals", daemon=True).start()
    before = signal.set_wakeup_fd(mouth)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(mouth)


def _forget_in_child() -> None:
    """Ends the writing of signals to the parent's pipe: a terminal signals workers of a data loader, too."""
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def leaving(leave: Callable[[int], object]) -> Iterator[None]:
    """While open, unless another handler is set, a signal calls `leave` at once, on another thread."""

    def ours(_number: int, _frame: FrameType | None) -> None: ...

    def heard(number: int) -> None:
        if signal.getsignal(number) is ours:
            leave(number)

    with listening(heard), answering(ours):
        yield


class Signals:
    """A context in which signals are only recorded: the first one. A second Ctrl-C ends the process.

    Args:
        interrupt: called on another thread at the second Ctrl-C.
        tells: whether the first Ctrl-C is answered with a line on stderr.
    """

    def __init__(self, interrupt: Callable[[], object], *, tells: bool) -> None:
        self.received = 0
        """Number of the first signal received; 0 if none."""
        self._interrupt, self._tells = interrupt, tells
        self._presses = 0
        self._open = ExitStack()

    def __enter__(self) -> "Signals":
        self._open.enter_context(listening(self._heard))
        self._open.enter_context(answering(self._note))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number

    def _heard(self, number: int) -> None:
        if number != signal.SIGINT:
            return
        self._presses += 1
        if self._presses > 1:
            self._interrupt()
        elif self._tells:
            text = "\nCtrl-C: the run ends and saves after this step; a second Ctrl-C ends it at once, without a save"
            print(text, file=sys.stderr, flush=True)
