"""A pool of ranks that is started once and runs one function after another.

Owns the processes and their process group. A test passes a module-level function; every rank calls it with the same
arguments and the list of results, one a rank, comes back. A pool in which a rank failed is thrown away, since its
process group can no longer be trusted; but not that of one rank which only found a difference.

Ranks are forked from a server that has imported torch and never computed. Ranks on GPUs are spawned. What `prepare`
does in each rank precedes its process group.
"""

import datetime
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
import torch.multiprocessing  # lets tensors through the pipes
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_dtensor_caches

from elixir_moe.parallel.mesh import prepare_process

RUN_TIMEOUT_SECONDS = 240


class RankError(AssertionError):
    """A rank raised; carries the exception types so that tests can assert on them."""

    def __init__(self, failures: dict[int, tuple[str, str]]) -> None:
        super().__init__("\n".join(f"[rank {r}] {text}" for r, (_, text) in failures.items()))
        self.types = {rank: kind for rank, (kind, _) in failures.items()}


def prepare_server() -> None:
    """Says what the server imports when it starts, with the first process that is forked from it."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])


def _nothing() -> None:
    """Prepares a rank that needs nothing."""


def serve(
    rank: int,
    world: int,
    rendezvous: str,
    backend: str,
    timeout_seconds: int,
    prepare: Callable[[], None],
    pipe: Connection,
) -> None:
    """(rank) Runs what comes through the pipe until it ends."""
    gc.freeze()  # tests collect what they leave, not what was imported
    prepare()
    prepare_process()
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        if message is None:
            _let_go_of_groups()
            continue
        fn, args, kwargs = message
        try:
            pipe.send((True, fn(*args, **kwargs)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, traceback.format_exc())))
    dist.destroy_process_group()


def _let_go_of_groups() -> None:
    """Destroys what the last function has left; all ranks are done with it.

    The thread of a gloo process group wakes up a thousand times a second until the group is freed, also one that the
    function has destroyed, also in a pool that waits for its next function. DTensor remembers groups by the meshes they
    belong to, and takes a later mesh that is alike for the same. What is left after that stays, such as modules that
    the function has imported: no later collection looks at it.
    """
    left = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in left:
        dist.destroy_process_group(group)
    if left:
        clear_dtensor_caches()
    gc.collect()
    gc.freeze()


class RankPool:
    """`world` processes in one process group."""

    serve: Callable[..., None] = staticmethod(serve)
    """What each process runs."""

    def __init__(
        self,
        world: int,
        *,
        backend: str = "gloo",
        timeout_seconds: int = 60,
        spawned: bool = False,
        prepare: Callable[[], None] = _nothing,
    ) -> None:
        self.world = world
        context: Any = multiprocessing.get_context("spawn" if spawned else "forkserver")
        prepare_server()
        self._directory = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._directory.name, "rendezvous")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, rendezvous, backend, timeout_seconds, prepare, theirs)
            process = context.Process(target=self.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.alive = True

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` on every rank; returns the results by rank or raises RankError."""
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        results: list[Any] = []
        failures: dict[int, tuple[str, str]] = {}
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(RUN_TIMEOUT_SECONDS if not failures else 70):
                failures[rank] = ("Timeout", f"no answer within {RUN_TIMEOUT_SECONDS} s")
                continue
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                failures[rank] = ("Died", "the process ended")
                continue
            results.append(value)
            if not ok:
                failures[rank] = value
        if failures:
            if self.world > 1 or failures[0][0] != "AssertionError":
                self.close()
            raise RankError(failures)
        for pipe in self._pipes:
            pipe.send(None)
        return results

    def close(self) -> None:
        """Ends the processes."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill() if process.is_alive() else None
            process.join()
        self._directory.cleanup()
