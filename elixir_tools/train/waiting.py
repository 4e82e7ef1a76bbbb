"""Tells people who wait what is being done, once it has taken two seconds.

Owns the line on stderr: with a spinner and the time on a terminal, after the seconds so far elsewhere. Steps of a
training have a bar of their own (`report`). Writes nothing on stdout.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

Tell = Callable[[str], None]
"""Says what is being done from now on; on a terminal, what stands in brackets at its end too."""

AFTER_SECONDS = 2.0


class Waits:
    """``with waits("reading the data") as tell: ...``"""

    def __init__(self, *, quiet: bool = False, after_seconds: float | None = None) -> None:
        """`quiet`: nothing is shown; `after_seconds`: how long a wait may be before it is told."""
        self._quiet, self._after = quiet, AFTER_SECONDS if after_seconds is None else after_seconds

    @contextmanager
    def __call__(self, what: str) -> Iterator[Tell]:
        """While open, and once it has been for long enough, says `what` is being done, and what comes after it."""
        if self._quiet:
            yield lambda what: None
            return
        line = _Line(what, sys.stderr)
        timer = threading.Timer(self._after, line.show)
        timer.daemon = True
        timer.start()
        try:
            yield line.tell
        finally:
            timer.cancel()
            line.end()


class _Line:
    """Shown on one thread, ended on another: never after its end."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what, self._stream = what, stream
        self._lock = threading.Lock()
        self._shown = self._ended = False
        self._progress: Any = None
        self._began = time.monotonic()

    def show(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._shown = True
            if not self._stream.isatty():
                self._print()
                return
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            # what is printed meanwhile goes where it belongs
            console = Console(file=self._stream)
            self._progress = Progress(
                *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._progress.add_task(self._what)
            self._progress.start()

    def tell(self, what: str) -> None:
        with self._lock:
            before, self._what = self._what, what
            if self._progress is not None:
                self._progress.update(self._task, description=what)
            elif self._shown and _stage(what) != _stage(before):
                self._print()

    def _print(self) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {_stage(self._what)} ...", file=self._stream, flush=True)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._progress is not None:
                self._progress.stop()


def _stage(what: str) -> str:
    """The text without what stands in brackets at its end."""
    return what.partition(" (")[0]
