"""Steps, each in a process of its own with a time limit, and the journal of their results.

Owns how a step is run and what is kept of it. Knows nothing of what a step does. Imports only the standard library.

The journal holds one JSON object a line, written when its step has ended; the latest line of a step counts. A line that
was cut off counts for nothing, so a step that was interrupted is run again::

    {"step", "outcome", "seconds", "exit", "figures": {...} or null, "tail", "device", "status"}
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIGURES = "figures: "
"""How the line begins in which a step tells its figures; libraries print too."""
TAIL_CHARACTERS = 2000

GOOD, LEFT_OUT, FAILED, OVER_LIMIT = "good", "left out", "failed", "over its limit"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to run, by name."""

    name: str
    command: tuple[str, ...]
    seconds: float
    """The limit."""
    environment: dict[str, str] = field(default_factory=dict)
    left_out: str | None = None
    """Why it cannot be run here; None if it can."""


def tell(figures: dict[str, Any]) -> None:
    """Called in the process of a step: its figures. ``{"left_out": why}`` says that it could not be run here."""
    print("\n" + FIGURES + json.dumps(figures), flush=True)


def run(step: Step, log: Path, limit: float) -> dict[str, Any]:
    """Runs the step for at most `limit` seconds; appends its output to `log`, and returns what it reports."""
    if step.left_out is not None:
        return _result(step, LEFT_OUT, figures={"left_out": step.left_out})
    with log.open("ab") as out:
        out.write(f"\n===== {step.name}\n".encode())
        out.flush()
        begin, start = out.tell(), time.monotonic()
        process = subprocess.Popen(
            step.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | step.environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also if this process is told to end: nothing is left running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = log.read_bytes()[begin:].decode(errors="replace")
    told = [line for line in output.split("\n")[:-1] if line.startswith(FIGURES)]  # the last may be cut short
    figures = json.loads(told[-1].removeprefix(FIGURES)) if told else None
    if code is None:
        outcome = OVER_LIMIT
    elif code:
        outcome = FAILED
    else:
        outcome = LEFT_OUT if figures and "left_out" in figures else GOOD
    tail = output.replace(f"{Path.cwd()}/", "")[-TAIL_CHARACTERS:] if outcome in (FAILED, OVER_LIMIT) else ""
    return _result(step, outcome, seconds=time.monotonic() - start, exit=code, figures=figures, tail=tail)


def _result(step: Step, outcome: str, *, seconds: float = 0.0, **found: Any) -> dict[str, Any]:
    nothing = {"exit": None, "figures": None, "tail": ""}
    return {"step": step.name, "outcome": outcome, "seconds": round(seconds, 1)} | nothing | found


def status(device: str | None) -> str:
    """Says whether a result is a measurement: only a GPU's is."""
    return "measured" if device else "not measured (no GPU)"


class Journal:
    """The results of one kind of device so far, by step; those of others stay in the file.

    Args:
        path: the file.
        device: name of the GPU; None without one.
        earlier: a file to begin with, if there is none at `path`.
    """

    def __init__(self, path: Path, device: str | None, earlier: Path | None = None) -> None:
        self.path, self.device = path, device
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() and earlier is not None and earlier.exists():
            path.write_bytes(earlier.read_bytes())
        self.results = {line["step"]: line for line in _lines(path) if line["device"] == device}

    def is_good(self, step: str) -> bool:
        """Whether the step has a good result."""
        return step in self.results and self.results[step]["outcome"] == GOOD

    def add(self, result: dict[str, Any]) -> None:
        """Keeps a result, at once on disk."""
        result = result | {"device": self.device, "status": status(self.device)}
        self.results[result["step"]] = result
        with self.path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():  # what was cut off gets a line of its own
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read() == b"\n" else b"\n")
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def figures(self, step: str) -> dict[str, Any] | None:
        """The report of a step that succeeded."""
        return self.results[step]["figures"] if self.is_good(step) else None


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a line that was cut off counts for nothing: {line[:60]!r}", file=sys.stderr)
    return found
