"""A Python program in a process that is forked, not started: as `subprocess.Popen`, without another import of torch.

Owns the process and its pipes. It ends as a process of `multiprocessing` does; a test of how an interpreter ends, or of
what an import does, starts one.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch

from tests.support.ranks import prepare_server


def _text(pipe: Connection, mode: str) -> TextIO:
    """The end of a pipe as a file of lines; the connection is closed."""
    file = os.fdopen(os.dup(pipe.fileno()), mode, encoding="utf-8", buffering=1)
    pipe.close()
    return file  # type: ignore[return-value]


def _main(path: str, arguments: Sequence[str], environment: Mapping[str, str], *pipes: Connection) -> None:
    """What `python path arguments` does."""
    for descriptor, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read by the import
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


class Program:
    """A script that runs with torch imported, and its standard streams; unread, they hold what fits into a pipe."""

    def __init__(self, path: str, *arguments: str, environment: Mapping[str, str]) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        prepare_server()
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = (context.Pipe(duplex=False) for _ in range(3))
        theirs = (their_in, their_out, their_err)
        self._process = context.Process(target=_main, args=(path, arguments, environment, *theirs), daemon=True)
        self._process.start()
        for pipe in theirs:
            pipe.close()
        self.stdin, self.stdout, self.stderr = _text(our_in, "w"), _text(our_out, "r"), _text(our_err, "r")

    @property
    def ended(self) -> bool:
        return not self._process.is_alive()

    def kill(self) -> None:
        """Ends it at once, also if it is stopped."""
        self._process.kill()
        self._process.join()

    def wait(self, seconds: float) -> int:
        """The exit code, when it has ended by itself; -n for signal n.

        Raises:
            TimeoutError: it has not.
        """
        self._process.join(seconds)
        code: int | None = self._process.exitcode
        if code is None:
            raise TimeoutError(f"no end within {seconds:g} s")
        return code

    def close(self) -> None:
        """Ends it and lets go of the streams."""
        self.kill()
        for stream in (self.stdout, self.stderr):
            stream.close()
        with suppress(BrokenPipeError):  # a line that it has not read
            self.stdin.close()
