"""The messages of a command that fails, and the end of its process. Which rank this process is, and of how many.

Owns both for the verbs. Starts nothing.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

from elixir_moe.errors import ConfigError
from elixir_tools.train import launch

_SECONDS_FOR_RANK_0 = 10.0


def leave(code: int) -> NoReturn:
    """Ends this process at once, and stopped ranks, for which torchrun would wait."""
    for process in launch.stopped_ranks().values():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads and process groups would wait for ranks that are gone


def tell(error: Exception, exit_code: int, traced: bool) -> None:
    """Prints an error, only once if several ranks have the same one."""
    text = "".join(traceback.format_exception(error)) if traced else f"{type(error).__name__}: {error}"
    stopped = launch.stopped_ranks()
    for rank, process in stopped.items():
        text = f"rank {rank} (process {process}) is stopped by a signal, so it is killed. {text}"
    if launch.leave_error(text, exit_code, stopped):
        return
    rank = rank_here()
    if rank and exit_code == 2:
        # All ranks read the same settings. Rank 0 prints their error, and torchrun then ends the others. A rank that
        # is not ended has an error of its own.
        threading.Event().wait(_SECONDS_FOR_RANK_0)
    print(f"elixir-moe: {f'[rank {rank}] ' if rank else ''}{text}", file=sys.stderr)


def tell_end(text: str, exit_code: int, *, shown: bool) -> int:
    """Says, once, why a run ended early: by the launcher, or where it is `shown`; returns the exit code."""
    if not (exit_code and launch.leave_error(text, exit_code)) and shown:
        print(f"elixir-moe: {text}", file=sys.stderr)
    return exit_code


def number_of_ranks(nproc: int | None, excluded: Collection[int] = ()) -> int:
    """Number of ranks of this run, whether they are started yet or not, without those `excluded`."""
    if not launch.under_torchrun():
        if nproc is not None and nproc < 1:
            raise ConfigError(f"--nproc: expected at least 1, got {nproc}")
        if excluded:
            launch.leave_out(nproc or 1, excluded)
        return (nproc or 1) - len(excluded)
    world = int(os.environ["WORLD_SIZE"])
    if excluded and not launch.has_launcher():
        raise ConfigError("--exclude is for --nproc: hide the GPUs from torchrun with CUDA_VISIBLE_DEVICES instead")
    if nproc not in (None, world + len(excluded)):
        raise ConfigError(f"--nproc {nproc}, but torchrun has already started {world} ranks: leave --nproc out")
    return world


def rank_here() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK", "0"))
