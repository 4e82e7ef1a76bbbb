"""Several ranks on this machine: the short form of `torchrun --standalone --nproc-per-node N -m elixir_moe ...`.

Owns the start of the ranks through torchrun's own agent, and the path of a rank's error to the user: each rank writes
its error to the file torchrun gave it, and the launcher prints the first one, once. The launcher passes Ctrl-C, SIGTERM
and SIGUSR1 on to the ranks, which save and end with a special exit code; torchrun's own agent would give them 30
seconds and lose the code. Ranks have sessions of their own, so a terminal's Ctrl-C reaches the launcher only. Never
restarts anything.
"""

import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from elixir_moe.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LAUNCHED = "ELIXIR_LAUNCHED"
"""Environment variable of ranks whose launcher prints their errors."""
_EXCLUDED = "ELIXIR_EXCLUDED"
"""Environment variable with the numbers of the GPUs that the launcher has left out."""


class RanksFailed(Exception):  # noqa: N818 (it passes on an error that has a name of its own)
    """The first failure of a rank, as text for the user."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def under_torchrun() -> bool:
    """Whether this process is a rank started by torchrun or a similar launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_launcher() -> bool:
    """Whether this process is a rank started by `launch`, which prints the errors of its ranks."""
    return _LAUNCHED in os.environ and under_torchrun()


def leave_out(ranks: int, excluded: Collection[int]) -> None:
    """Hides the GPUs of the ranks `excluded`, of `ranks` in all, from this process and those that it starts.

    Raises ConfigError if there are no such ranks, or not each has a GPU.
    """
    from elixir_moe.ext.accelerator import count, visible_without

    words = f"--exclude {','.join(map(str, excluded))}"
    if not all(0 <= rank < ranks for rank in excluded) or len(excluded) >= ranks:
        raise ConfigError(f"{words}: expected some of the {ranks} ranks, from 0 to {ranks - 1}, and not all of them")
    if (gpus := count()) < ranks:
        raise ConfigError(
            f"{words} leaves out the GPUs of ranks, and {ranks} ranks have {gpus} GPUs here: start fewer ranks instead"
        )
    os.environ.update(visible_without(excluded))
    os.environ[_EXCLUDED] = ",".join(map(str, excluded))


def place_here(device_type: str) -> str:
    """Where this rank runs, and how the launcher starts the next run without its GPU."""
    host, rank = socket.gethostname(), int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cpu":
        return f"{host}, CPU"
    excluded = [int(number) for number in os.environ.get(_EXCLUDED, "").split(",") if number]
    gpu = [number for number in range(rank + len(excluded) + 1) if number not in excluded][rank]
    without = ",".join(map(str, sorted([*excluded, gpu])))
    return f"{host}, GPU {gpu}" + f"; --exclude {without} starts without it" * has_launcher()


def launch(ranks: int, arguments: Sequence[str], threads: int) -> None:
    """Runs ``python -m elixir_moe ARGUMENTS`` on `ranks` ranks, with so many CPU threads each, and waits for them.

    Raises:
        RanksFailed: a rank failed, or stopped at a signal; the others were ended.
        KeyboardInterrupt: a second Ctrl-C ended launcher and ranks at once.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from elixir_tools.watch.control import answering, exit_code_of

    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        ranks = [rank for rank, state in _children(os.getpid()) if state != "Z"]
        if not ranks:
            raise KeyboardInterrupt
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)

    # The agent logs each failure with its own traceback; the exception below reports the cause.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[_LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # those that are not passed on
    )
    try:
        with answering(pass_on):
            elastic_launch(config, sys.executable)("-m", "elixir_moe", *arguments)
    except ChildFailedError as error:
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt from None
        failure = _first_failure(error.failures, asked=bool(received))
        if failure is None:  # the signal came before the ranks could handle it
            failure = RanksFailed(ended_early(received[0]), exit_code_of(received[0]))
        raise failure from None
    except (SignalException, KeyboardInterrupt) as error:
        if received:
            raise RanksFailed(ended_early(received[0]), exit_code_of(received[0])) from None
        raise KeyboardInterrupt(str(error)) from None


def ended_early(number: int) -> str:
    """The message for a run that a signal ended before its first step."""
    from elixir_tools.watch.control import named

    return f"ended by {named(number)} before the first step; the same command starts it again"


def program() -> str:
    """This program as a command for the shell that started it."""
    own = Path(sys.executable).with_name("elixir-moe")
    if shutil.which("elixir-moe") == str(own):
        return "elixir-moe"
    path = os.path.relpath(own)
    return shlex.quote(str(own) if path.startswith("..") else path)


def _children(parent: int) -> Iterator[tuple[int, str]]:
    """(process, state as in /proc) of the children of a process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, its_parent, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_parent) == parent:
                yield int(path.parent.name), state


def stopped_ranks() -> dict[int, int]:
    """{rank: process} of the ranks of this torchrun that are stopped, as by SIGSTOP.

    A failed rank kills them: they do not hear torchrun's SIGTERM, and torchrun would wait 30 seconds for them.
    """
    found: dict[int, int] = {}
    mark = f"TORCHELASTIC_RUN_ID={os.environ.get('TORCHELASTIC_RUN_ID')}"
    for process, state in _children(os.getppid()) if under_torchrun() else ():
        with suppress(OSError):
            has = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0") if state == "T" else []
            ranks = [int(text[5:]) for text in has if text.startswith("RANK=")]
            if mark in has and ranks:
                found[ranks[0]] = process
    return found


def leave_error(text: str, exit_code: int, stopped: Iterable[int] = ()) -> bool:
    """Writes this rank's error to the launcher's error file; False if there is no such launcher.

    `stopped`: the ranks that this one kills, which the text names already.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not has_launcher() or not path:
        return False
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    # torchrun's own fields have whole seconds only, too coarse to tell cause from consequence.
    own = {"seconds": time.time(), "text": text, "exit_code": exit_code, "stopped": list(stopped)}
    temporary = Path(path).with_suffix(".part")
    temporary.write_text(
        json.dumps({"message": {"message": text, "extraInfo": extra}, "elixir": own}), encoding="utf-8"
    )
    temporary.replace(path)
    return True


def _first_failure(failures: dict[int, "ProcessFailure"], *, asked: bool) -> RanksFailed | None:
    """The failure that caused the others: a rank killed from outside, or else the first rank that raised.

    Ranks that died of a signal that is passed on come last, because SIGTERM ends the other ranks; so do stopped ranks,
    which a rank that names them has killed. If the ranks were `asked` to end, the failure is that of a rank that
    reports it; None if none does.
    """

    from elixir_tools.watch.control import SIGNALS, exit_code_of

    stopped = {rank for failure in failures.values() for rank in _own(failure).get("stopped", ())}

    def order(item: tuple[int, "ProcessFailure"]) -> tuple[bool, bool, float]:
        rank, failure = item
        own = _own(failure)
        killed = failure.exitcode < 0
        told = -failure.exitcode in SIGNALS or rank in stopped
        return told, (not own if asked else not killed), own.get("seconds", failure.timestamp)

    rank, failure = min(failures.items(), key=order)
    own = _own(failure)
    if own:
        return RanksFailed(("" if asked else f"[rank {rank}] ") + own["text"], own["exit_code"])
    if asked:
        return None
    if -failure.exitcode in SIGNALS:
        return RanksFailed(ended_early(-failure.exitcode), exit_code_of(-failure.exitcode))
    reason = failure.message if failure.exitcode < 0 else f"exit code {failure.exitcode}, without a message"
    return RanksFailed(f"[rank {rank}] {reason}", 1)


def _own(failure: "ProcessFailure") -> dict[str, Any]:
    """The data written by `leave_error`; empty if the rank wrote none."""
    return failure.error_file_data.get("elixir", {})
