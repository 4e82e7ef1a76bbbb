"""Processes on this machine that run one function and end: on its CPU, or each on a GPU of its own.

Owns their start, their process group and the way of an error back. Ranks are forked from a server that has imported the
library and never computed. Never leaves a process behind.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe import errors
from elixir_moe.ext import accelerator
from elixir_moe.ext.ranks import prepare_process
from elixir_moe.ext.torch_versions import IMPORTED_LATE

_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other."""
_SECONDS_FOR_OTHERS = 5.0
"""For ranks to report their error after another has: the cause may be theirs."""


PRELOADED = ("elixir_moe.public", IMPORTED_LATE)
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
"""Products in fp32 have the bits of fp32: containers for training set the second variable to 1."""


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, gpus: bool = False, at_most: float | None = None
) -> Any:
    """Calls ``function(*arguments)`` on so many ranks, for at most so many seconds; returns what rank 0 returned.

    With `gpus`, rank i sees all GPUs and starts on GPU i; without, ranks see no GPU. Raises ElixirError of the type
    that the first rank raised, with its message; errors of other libraries come as ElixirError with their traceback.
    Also if ranks have not answered in time.
    """
    context: Any = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(list(PRELOADED))  # a server that runs already is left as it is
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            parts = (rank, ranks, folder, theirs, gpus, function, arguments)
            processes.append(context.Process(target=_serve, args=parts, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            results = _answers(pipes, at_most)
            for process in processes:
                process.join(_SECONDS_FOR_OTHERS)
            return results[0]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], at_most: float | None) -> list[Any]:
    """The results of all ranks. The first failure is raised."""
    deadline = None if at_most is None else time.monotonic() + at_most
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready: Any = wait(list(waiting), timeout=_SECONDS_FOR_OTHERS if failures else left)
        if not ready and not failures:
            silent = ", ".join(map(str, sorted(waiting.values())))
            raise errors.ElixirError(f"of {len(pipes)} ranks, these have not answered within {at_most:g} s: {silent}")
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                fine, result = pipe.recv()
            except EOFError:
                fine, result = False, ("ElixirError", "the process ended without a word: was its memory enough?")
            (results if fine else failures)[rank] = result
    if failures:
        rank, (name, text) = min(failures.items(), key=lambda item: item[1][0] == "DistBackendError")
        kind = getattr(errors, name, None)
        own = isinstance(kind, type) and issubclass(kind, errors.ElixirError)
        raise (kind if own else errors.ElixirError)(f"[rank {rank}] {text}")  # type: ignore[misc]
    return [results[rank] for rank in range(len(pipes))]


def _serve(
    rank: int, ranks: int, folder: str, pipe: Connection, gpus: bool, function: Callable[..., Any], arguments: Any
) -> None:
    """The life of one rank; what it prints goes to stderr, since stdout has the result of a command."""
    os.dup2(2, 1)
    prepare_process()
    torch.set_num_threads(1)
    os.environ |= QUIET | (_NO_TF32 if gpus else accelerator.HIDDEN)
    warnings.simplefilter("ignore", FutureWarning)  # libraries' words to each other
    meeting = f"file://{folder}/meeting"
    try:
        kind = accelerator.found() if gpus else None
        if kind is not None:
            accelerator.api(kind).set_device(rank)
        backend = accelerator.backends("cpu" if kind is None else kind.type)
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=_TIMEOUT)
        pipe.send((True, function(*arguments)))
        dist.destroy_process_group()
    except Exception as error:  # whatever it is, the user is told by the process that started this one
        own = isinstance(error, errors.ElixirError)
        pipe.send((False, (type(error).__name__, str(error) if own else traceback.format_exc())))
