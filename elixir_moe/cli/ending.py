"""What a command says when it fails, and how its process ends. Which rank this process is, and of how many.

Owns both for the verbs. Starts nothing.
"""

import os
import sys
import threading
import traceback
from typing import NoReturn

from elixir_moe.errors import ConfigError
from elixir_moe.train import launch

_SECONDS_FOR_RANK_0 = 10.0


def leave(code: int) -> NoReturn:
    """Ends this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads and process groups would wait for ranks that are gone


def tell(error: Exception, exit_code: int, traced: bool) -> None:
    """Prints an error, only once if several ranks have the same one."""
    text = "".join(traceback.format_exception(error)) if traced else f"{type(error).__name__}: {error}"
    if launch.leave_error(text, exit_code):
        return
    rank = rank_here()
    if rank and exit_code == 2:
        # All ranks read the same settings. Rank 0 prints their error, and torchrun then ends the others. A rank that
        # is not ended has an error of its own.
        threading.Event().wait(_SECONDS_FOR_RANK_0)
    print(f"elixir-moe: {f'[rank {rank}] ' if rank else ''}{text}", file=sys.stderr)


def number_of_ranks(nproc: int | None) -> int:
    """Number of ranks of this run, whether they are started yet or not."""
    if not launch.under_torchrun():
        if nproc is not None and nproc < 1:
            raise ConfigError(f"--nproc: expected at least 1, got {nproc}")
        return nproc or 1
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise ConfigError(f"--nproc {nproc}, but torchrun has already started {world} ranks: leave --nproc out")
    return world


def rank_here() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK", "0"))
