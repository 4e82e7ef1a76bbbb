"""Recovery from out of memory on any rank: all ranks leave the step, save its start, and restart it with less memory.

Owns the message between ranks, the choice of the next smaller setting, and the restart of the process groups. A rank
that runs out of memory in a step cannot join the collectives of its peers any more: it leaves word in the ranks' store
and destroys its process groups, which makes those of the others fail on gloo. On NCCL they would wait on their GPUs,
where no error reaches them: there a thread of each rank reads the store and aborts the collectives of its own rank
(`aborting`).
"""

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elixir_moe import Inspection
from elixir_moe.errors import ElixirError, TierError
from elixir_moe.ext.accelerator import found
from elixir_moe.ext.measure import is_out_of_memory
from elixir_moe.ext.ranks import abort_nccl, world_timeout
from elixir_tools.train.config import PlanConfig, TrainConfig

_KEY = "out of memory"
_BROKEN = ("gloo", "onnection", "Timed out", "timed out", "Broken pipe", "Socket")
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
"""Longest wait for the store."""
T = TypeVar("T")


def smaller(
    plan: PlanConfig, blocks: int, least: int, rows: int, accumulation: int
) -> Iterator[tuple[PlanConfig, int]]:
    """Yields (plan, micro-batches) with less and less memory: first the rCache is halved, then micro-batches.

    A step needs so many blocks at `least`, and has `rows` samples of a rank over all its micro-batches.
    """
    while plan.kind not in ("ddp", "auto") and blocks > least:
        blocks = max(least, blocks // 2)
        options: dict[str, Any] = {"rcache": None, "rcache_blocks": blocks}
        plan = replace(plan, kind="zero3" if plan.kind == "zero2" else plan.kind, **options)
        yield plan, accumulation
    for more in itertools.count(accumulation + 1):
        if more > rows:
            return
        if rows % more == 0 and more >= 2 * accumulation:
            accumulation = more
            yield plan, accumulation


class Scarcity:
    """The sequence of settings with less memory."""

    def __init__(self, config: TrainConfig) -> None:
        self.tries = 0
        self._config = config
        self._steps: Iterator[tuple[PlanConfig, int]] | None = None

    def next(self, found: Inspection, rows: int, accumulation: int) -> TrainConfig:
        """Settings for the next try; `rows` and `accumulation` as in `smaller`. Raises TierError if none are left."""
        config, blocks = self._config, found.plan.blocks(found.layout)
        if self._steps is None:
            least = 1 if found.schedule is None else found.schedule.least_blocks()
            self._steps = smaller(config.plan, blocks, least, rows, accumulation)
        self.tries += 1
        smaller_one = next(self._steps, None) if self.tries <= config.watch.memory_tries else None
        if smaller_one is None:
            raise TierError(
                f"out of memory even with {accumulation} micro-batches a rank and an rCache "
                f"of {blocks} blocks: use more ranks, a smaller model, or plan.kind=offload"
            )
        plan, accumulation = smaller_one
        batches = config.run.eval_batches * accumulation // config.run.accumulation  # smaller ones, of the same rows
        return replace(config, plan=plan, run=replace(config.run, accumulation=accumulation, eval_batches=batches))


def is_broken_collective(error: BaseException) -> bool:
    """Whether the error, or its cause, is a collective that failed because peers are gone or late."""
    if isinstance(error, ElixirError):
        return error.__cause__ is not None and is_broken_collective(error.__cause__)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BROKEN)
    )


def can_be_redone(error: Exception, store: Any, *, updating: bool) -> bool:
    """Whether some rank is out of memory, and can redo its step. `updating`: this rank cannot.

    Every rank calls it with its own error.
    """
    short = is_out_of_memory(error)
    if not short and not is_broken_collective(error):
        return False

    def exchange() -> tuple[str, bool] | None:
        if short:
            say_so(store, dist.get_rank(), redoable=not updating)
        return who(store)

    found = ask(exchange)
    return found is not None and found[1]


def say_so(store: Any, rank: int, *, redoable: bool) -> None:
    """Tells the other ranks that this rank is out of memory, and whether the step can be redone."""
    store.set(_KEY, f"{int(redoable)} rank {rank}")


def who(store: Any) -> tuple[str, bool] | None:
    """(rank that is out of memory, whether the step can be redone); None if there is none."""
    if not store.check([_KEY]):
        return None
    redoable, _, rank = store.get(_KEY).decode().partition(" ")
    return (rank, redoable == "1") if rank else None


def ask(question: Callable[[], T]) -> T | None:
    """The result of `question`, which asks a store; None without an answer: the host of the store may be stopped."""
    answer: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):  # the store is gone
            answer.append(question())

    thread = threading.Thread(target=run, name="elixir-memory-ask", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answer[0] if answer else None


@contextmanager
def aborting(store: Any) -> Iterator[None]:
    """A context in which this rank aborts its NCCL collectives, once for each time that a rank runs out of memory."""
    closing, own = threading.Event(), store.clone()  # its own connection: a stopped store must not block the others

    def watch() -> None:
        done = False
        while not closing.wait(_LOOK_SECONDS):
            short = who(own) is not None
            if short and not done:
                abort_nccl()
            done = short

    threading.Thread(target=watch, name="elixir-memory", daemon=True).start()
    try:
        yield
    finally:
        closing.set()


def forget(store: Any, process_group: dist.ProcessGroup) -> None:
    """Empties the message of `say_so` once all ranks have read it. Collective.

    A key that is deleted between the `check` and the `get` of another thread would make that wait for the next message.
    """
    dist.barrier(group=process_group)
    store.set(_KEY, "")
    dist.barrier(group=process_group)


def regroup(store: Any, attempt: int) -> dist.ProcessGroup:
    """Ends all process groups and restarts torch.distributed with the same ranks. Every rank calls it.

    Returns a gloo process group of all ranks.
    """
    timeout = world_timeout()
    backend, rank, ranks = dist.get_backend_config(), dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        abort_nccl()  # only destroyed, they would wait for what is under way
    dist.destroy_process_group()
    release()
    # A peer may notice only when its collective times out: code below Python can keep a connection open.
    store.set(f"here {attempt} {rank}", "")
    store.wait([f"here {attempt} {other}" for other in range(ranks)], 2 * timeout)
    again = dist.PrefixStore(f"attempt {attempt}", store.clone())
    dist.init_process_group(backend, store=again, rank=rank, world_size=ranks, timeout=timeout)
    return dist.new_group(backend="gloo", timeout=timeout)


def release() -> None:
    """Frees unreferenced memory."""
    gc.collect()
    if found() is not None:
        torch.accelerator.empty_cache()
