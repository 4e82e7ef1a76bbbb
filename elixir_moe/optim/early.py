"""Updates that begin in backward, chunk by chunk, before `step` knows the global norm.

Owns the start of these updates, which `Phase.early` lists, and the withdrawal of those that have not begun when `step`
asks: `step` then makes them as usual. Never begins the update of a shard whose gradient is not finite, of a chunk with
a parameter that has no gradient on this rank, of a chunk of whole matrices, or of one on the device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elixir_moe.distributed.async_copy import copy_to_host_async
from elixir_moe.errors import UsageError
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.optim.shard_update import AdamUpdate, TrainedPiece
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.spans import in_span

Update = Callable[[], Sequence[Future[None]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """An update that was submitted to the thread."""

    shard: ShardState
    prepared: "Future[Update | None]"
    """The update, once the gradient has arrived; None if the gradient is not finite."""
    done: "Future[Sequence[Future[None]]]"
    """The argument of `ShardState.begin_update`."""


class EarlyUpdates:
    """The updates of one optimizer that begin in a backward."""

    def __init__(
        self,
        scheduler: Scheduler,
        update: AdamUpdate,
        pieces: dict[int, list[TrainedPiece]],
        groups: list[dict[str, Any]],
        thread: ThreadPoolExecutor,
    ) -> None:
        """`pieces` are those of each chunk, by index. `thread` runs one update after the other."""
        self._scheduler, self._update, self._pieces, self._groups = scheduler, update, pieces, groups
        self._phase = scheduler.phase
        self._thread = thread
        self._options: list[dict[str, Any]] = []

    @contextmanager
    def open(self, scale: Callable[[Chunk], float | torch.Tensor]) -> Iterator[None]:
        """Begins updates while open, with the options at its start and the `scale` of gradients."""
        self._options = deepcopy(self._present_options())
        self._scheduler.reductions.update_early(lambda chunk, arrived: self._begin(chunk, arrived, scale(chunk)))
        try:
            yield
        finally:
            self._scheduler.reductions.update_early(None)

    def _begin(self, chunk: Chunk, arrived: Callable[[], None], scale: float | torch.Tensor) -> None:
        """Submits an update whose gradient has arrived when `arrived` returns."""
        index, shard = chunk.spec.index, chunk.shard
        complete = all(
            (index, position) in self._scheduler.reductions.used for position in range(len(chunk.parameters))
        )
        if not complete or shard.being_saved or chunk.spec.key.optimizer:
            return
        squares = copy_to_host_async(shard.squares) if isinstance(shard.squares, torch.Tensor) else chunk.squares

        def prepare() -> Update | None:
            arrived()
            found = float(squares())  # type: ignore[arg-type]
            shard.keep_squares(found)
            if not math.isfinite(found):
                return None
            mine = self._pieces[index]
            work = self._update.prepare(chunk, mine, set(chunk.parameters), scale, options=self._options)
            return partial(in_span, "update", chunk.label, work)

        prepared = self._thread.submit(prepare)
        done = self._thread.submit(_run, prepared)
        shard.begin_update(done)
        self._phase.early[index] = _Begun(shard=shard, prepared=prepared, done=done)

    @property
    def _begun(self) -> dict[int, _Begun]:
        """The updates of this step that were submitted and not withdrawn, by chunk."""
        return {index: one for index, one in self._phase.early.items() if one is not None}

    def withdraw(self) -> int:
        """Withdraws the updates that have not changed anything yet; returns the number of the others."""
        for index, one in self._begun.items():
            withdrawn = one.done.cancel()
            if withdrawn and not one.prepared.cancel():
                one.prepared.exception()  # waits until it no longer reads the gradient
            if withdrawn or one.prepared.result() is None:
                self._phase.early[index] = None
                one.shard.withdraw_update()
        return len(self._begun)

    def __contains__(self, chunk: Chunk) -> bool:
        """Whether the chunk's update of this step has begun; call `withdraw` first."""
        return self._phase.early.get(chunk.spec.index) is not None

    def check_options(self) -> None:
        """Raises UsageError if options have changed since updates began."""
        if not self._phase.early:
            return
        for index, (then, now) in enumerate(zip(self._options, self._present_options(), strict=True)):
            if changed := [name for name in now if name not in then or then[name] != now[name]]:
                raise UsageError(
                    f"param_groups[{index}] has changed {changed} since updates began in backward: expected "
                    f"{[then.get(name) for name in changed]}, found {[now[name] for name in changed]}; set them back "
                    f"and call step(), and change them before the backward or after the step"
                )

    def _present_options(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self._groups]


def _run(prepared: "Future[Update | None]") -> Sequence[Future[None]]:
    update = prepared.result()  # has ended, since one thread runs both
    return () if update is None else update()
