"""Runs tests in a process of their own while the library is changed there, and in the ranks that they start.

Owns the processes, and the marks that say what a test reaches. The change is one of `mutations`, or marks in place of
all of them. All ranks come from one server, which has imported what takes long. Programs that a test starts are not
changed.
"""

import functools
import json
import mmap
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.accelerator.mutations import applied, marked, mutations
from tests.support import ranks

FOLDER = "ELIXIR_CHANGED_TESTS"
"""In the environment of the process and its ranks: where they say what they reach, and who they are."""


@dataclass(frozen=True)
class Ran:
    """What became of a test."""

    test: str
    seconds: float
    failure: str
    """Empty if it passed."""
    reached: list[int]
    """Numbers of mutations; of a run with marks."""


def run(tests: Sequence[str], number: int | None, seconds: float, *options: str) -> list[Ran]:
    """Runs tests with a mutation, given by its number, or with marks; one without a name has not ended in time."""
    _start_server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "marks").write_bytes(bytes(len([*mutations()])))
        (folder / "results").touch()
        process = os.fork()
        if not process:
            _run_in_child(tests, number, folder, options)
        end = time.monotonic() + seconds
        while not (ended := os.waitpid(process, os.WNOHANG)[0]) and time.monotonic() < end:
            time.sleep(0.02)
        for group in (process, *map(int, os.listdir(folder / "ranks"))) if (folder / "ranks").exists() else (process,):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if not ended:
            os.waitpid(process, 0)
        ran = [Ran(**json.loads(line)) for line in (folder / "results").read_text().splitlines()]
        return ran if ended else [*ran, Ran("", seconds, "hangs", [])]


@functools.cache
def _start_server() -> None:
    ranks.prepare_server()
    multiprocessing.forkserver.ensure_running()


def _run_in_child(tests: Sequence[str], number: int | None, folder: Path, options: Sequence[str]) -> None:
    try:
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ[FOLDER] = str(folder)
        # It would ask whether the server is a child of this process.
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        ranks.RankPool.serve = functools.partial(_serve_changed, number, folder)
        with _change(number), open(folder / "results", "w") as results:
            pytest.main(["-q", "-p", "no:cacheprovider", *options, *tests], plugins=[_Results(results)])
    finally:
        os._exit(0)


def _serve_changed(number: int | None, folder: Path, *arguments: Any) -> None:
    """(rank) Serves with the library changed."""
    os.setsid()
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / str(os.getpid())).touch()
    os.environ[FOLDER] = str(folder)
    with _change(number):
        ranks.serve(*arguments)


@contextmanager
def _change(number: int | None) -> Iterator[None]:
    with marked() if number is None else applied([*mutations()][number]):
        yield


def reached(number: int) -> None:
    """Marks a mutation as reached; the marks in the library call it."""
    _marks()[number] = 1


@functools.cache
def _marks() -> mmap.mmap:
    with open(Path(os.environ[FOLDER], "marks"), "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


class _Results:
    """Writes what becomes of each test as it ends."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._failure, self._since = "", time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failure:
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            self._failure = ([line for line in lines if line.startswith("E  ")] or lines)[-1].lstrip("E ")[:160]
        if report.when == "teardown":
            found = [number for number, byte in enumerate(_marks()[:]) if byte]
            _marks()[:] = bytes(len(_marks()))
            seconds = round(time.monotonic() - self._since, 2)
            self._file.write(json.dumps(asdict(Ran(report.nodeid, seconds, self._failure, found))) + "\n")
            self._file.flush()
            self._failure, self._since = "", time.monotonic()
