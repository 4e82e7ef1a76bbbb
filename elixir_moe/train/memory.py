"""Too little memory on any rank: all get out of the step, save it as it began, and come together again with less.

Owns what counts as out of memory, which setting is made smaller next, and the new beginning of the process groups. A
rank that runs out of memory in the middle of a step cannot join its peers' collectives any more: it says so in the
store that brought the ranks together and destroys its process groups, at which those of the others fail. Those of gloo
do; NCCL waits for what was begun when it is destroyed, so there the ranks end instead, and a new start goes on.
"""

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.distributed.collectives import world_timeout
from elixir_moe.errors import TierError
from elixir_moe.inspect import inspect
from elixir_moe.train.config import PlanConfig, TrainConfig
from elixir_moe.train.training import Training

_SAID_BY_THE_SYSTEM = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
_KEY = "out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host refused an allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _SAID_BY_THE_SYSTEM)


def smaller(
    plan: PlanConfig, blocks: int, least: int, rows: int, accumulation: int
) -> Iterator[tuple[PlanConfig, int]]:
    """(plan, micro-batches) that need less and less memory: half the rCache, and so on; then half the micro-batch.

    Args:
        plan: as it is.
        blocks: of the rCache now.
        least: blocks without which no step can run.
        rows: samples of a rank in a step, over all its micro-batches.
        accumulation: micro-batches now.
    """
    while plan.kind not in ("ddp", "auto") and blocks > least:
        blocks = max(least, blocks // 2)
        kind = "zero3" if plan.kind == "zero2" else plan.kind
        plan = replace(plan, kind=kind, rcache=None, rcache_blocks=blocks)
        yield plan, accumulation
    for more in itertools.count(accumulation + 1):
        if more > rows:
            return
        if rows % more == 0 and more >= 2 * accumulation:
            accumulation = more
            yield plan, accumulation


class Scarcity:
    """What becomes smaller, try by try."""

    def __init__(self, config: TrainConfig) -> None:
        self.tries = 0
        self._config = config
        self._steps: Iterator[tuple[PlanConfig, int]] | None = None

    def next(self, training: Training) -> TrainConfig:
        """Settings for the next try. Raises TierError when there is none left."""
        config, found = self._config, inspect(training.model)
        rows, blocks = config.run.global_batch // training.ranks, found.plan.blocks(found.layout)
        if self._steps is None:
            least = 1 if found.schedule is None else found.schedule.least_blocks()
            self._steps = smaller(config.plan, blocks, least, rows, training.progress.accumulation)
        self.tries += 1
        smaller_one = next(self._steps, None) if self.tries <= config.watch.memory_tries else None
        if smaller_one is None:
            raise TierError(
                f"memory is too short, also with {training.progress.accumulation} micro-batches a rank and an rCache "
                f"of {blocks} blocks: use more ranks, a smaller model, or plan.kind=offload"
            )
        plan, accumulation = smaller_one
        return replace(config, plan=plan, run=replace(config.run, accumulation=accumulation))


def say_so(store: Any, rank: int, *, redoable: bool) -> None:
    """Tells the other ranks that this one is out of memory."""
    store.set(_KEY, f"{int(redoable)} rank {rank}")


def who(store: Any) -> tuple[str, bool] | None:
    """Which rank has said so, and whether the step can be redone; None if nobody has."""
    if not store.check([_KEY]):
        return None
    redoable, _, rank = store.get(_KEY).decode().partition(" ")
    return rank, redoable == "1"


def forget(store: Any, process_group: dist.ProcessGroup) -> None:
    """What was said is heard by all. Collective."""
    dist.barrier(group=process_group)
    store.delete_key(_KEY)
    dist.barrier(group=process_group)


def regroup(store: Any, attempt: int) -> dist.ProcessGroup:
    """Ends all process groups and starts torch.distributed anew, with the same ranks. Every rank calls it.

    Returns:
        A gloo process group of all ranks.
    """
    timeout = world_timeout()
    backend, rank, ranks = dist.get_backend_config(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    release()
    # A peer may hear of it only when its collective has timed out: something below Python can keep a connection open.
    store.set(f"here {attempt} {rank}", "")
    store.wait([f"here {attempt} {other}" for other in range(ranks)], 2 * timeout)
    again = dist.PrefixStore(f"attempt {attempt}", store.clone())
    dist.init_process_group(backend, store=again, rank=rank, world_size=ranks, timeout=timeout)
    return dist.new_group(backend="gloo", timeout=timeout)


def release() -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
