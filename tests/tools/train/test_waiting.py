"""Lines about waits: once they are long, on stderr alone, a spinner on a terminal."""

import io
import re
import sys
import threading

import pytest

from elixir_tools.train.waiting import Waits


class Stream(io.StringIO):
    """Says when something has been written."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        found = super().write(text)
        if "reading" in self.getvalue():
            self.written.set()
        return found


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_wait_is_told(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Waits(after_seconds=0)("reading the data"):
        assert stream.written.wait(60)
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert bool(re.fullmatch(r" *\d+ s  reading the data \.\.\.\n", stream.getvalue())) != terminal


def test_what_follows_is_told_by_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with Waits(after_seconds=0)("reading the data") as tell:
        assert stream.written.wait(60)
        for number in range(3):
            tell(f"tracing a step (layer {number} of 3)")
        tell("searching")
    told = [line.split("s  ")[1] for line in stream.getvalue().splitlines()]
    assert told == ["reading the data ...", "tracing a step ...", "searching ..."]


def test_a_short_wait_and_a_quiet_one_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with Waits(after_seconds=3600)("reading the data"):
        pass
    before = set(threading.enumerate())
    with Waits(quiet=True, after_seconds=0)("reading the data"):
        assert set(threading.enumerate()) <= before
    assert stream.getvalue() == ""
