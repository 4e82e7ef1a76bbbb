"""Each wait of the ordering code, left out: what the checker must notice.

Owns the faults. A fault takes one order away and changes nothing else.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from elixir_moe.chunks.step_machine import ReductionOrder
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.blocks import Block
from elixir_moe.memory.disk_values import Reading, ValuesPlace
from elixir_moe.memory.gate import Gate
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.values import ValuesOnDisk
from elixir_moe.optim.agreement import StepDecision
from elixir_moe.runtime.gathers import Gathers
from elixir_moe.runtime.gradients import Gradients
from elixir_moe.runtime.reductions import Reductions
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.streams import Streams
from tests.lanes.machine import Stream

Patch = Callable[..., None]


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _while(patch: Patch, owner: Any, method: str, replace: Callable[[Patch, Any], None]) -> None:
    """While `method` runs, what `replace` sets, given a way to set it and the object, is in place."""
    run = getattr(owner, method)

    def without(one: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            replace(inner.setattr, one)
            return run(one, *args, **kwargs)

    patch(owner, method, without)


def _no_gather_behind_fetch(patch: Patch) -> None:
    patch(Streams, "gathering", lambda streams: torch.cuda.stream(streams._gather))


def _no_reduction_behind_compute(patch: Patch) -> None:
    patch(Streams, "reducing", lambda streams: torch.cuda.stream(streams._reduce))


def _unmarked_on(lane: str) -> Callable[[Patch], None]:
    """The end of what runs on one stream is not recorded."""

    def fault(patch: Patch) -> None:
        marked = Streams.marked

        def mark(streams: Any, work: Work) -> Work:
            here = torch.cuda.current_stream() is getattr(streams, lane)
            return work if here else marked(streams, work)

        patch(Streams, "marked", mark)

    return fault


def _blocks_vacated_at_once(patch: Patch) -> None:
    patch(Streams, "all_compute", lambda streams: Work())


def _blocks_vacated_behind_the_current_stream_alone(patch: Patch) -> None:
    patch(Streams, "all_compute", lambda streams: streams.marked(Work()))


def _blocks_claimed_while_busy(patch: Patch) -> None:
    claim = Block.claim

    def claimed(block: Any, *args: Any) -> Any:
        block.busy = None
        return claim(block, *args)

    patch(Block, "claim", claimed)


def _blocks_claimed_under_late_readers(patch: Patch) -> None:
    claim = Block.claim
    patch(Block, "claim", lambda block, spec, *_: claim(block, spec))


def _no_fetch_behind_compute_in(owner: Any, method: str) -> Callable[[Patch], None]:
    """In this method later fetches are not ordered behind compute."""
    return lambda patch: _while(patch, owner, method, lambda put, _: put(Streams, "fetch_after_compute", _nothing))


def _step_not_behind(lane: str) -> Callable[[Patch], None]:
    """The end of a step is not ordered behind one of the streams."""
    wait = Stream.wait_stream

    def replace(put: Patch, streams: Any) -> None:
        skipped = getattr(streams, lane)
        put(Stream, "wait_stream", lambda one, other: other is skipped or wait(one, other))

    return lambda patch: _while(patch, Streams, "end_step", replace)


def _host_not_behind_reductions(patch: Patch) -> None:
    end = Streams.end_step
    patch(Streams, "end_step", lambda streams, *, host: end(streams, host=False))


def _buffers_read_before_they_are_filled(patch: Patch) -> None:
    patch(Reading, "values", lambda reading: reading._values)


def _buffers_filled_while_they_are_copied(patch: Patch) -> None:
    give_back = ValuesPlace.give_back
    patch(ValuesPlace, "give_back", lambda place, _: give_back(place, Work()))


def _threads_make_compute_wait(patch: Patch) -> None:
    synchronize = Work.synchronize
    patch(Work, "synchronize", lambda work: (work.wait(), synchronize(work)))


def _values_read_before_their_update_has_ended(patch: Patch) -> None:
    def prepare(source: Any) -> bool:
        return source._place.begin() is not None

    patch(ValuesOnDisk, "prepare", prepare)


def _no_wait_for_the_gather(patch: Patch) -> None:
    _while(patch, Gathers, "_wait_for", lambda put, _: put(Stream, "wait_event", _nothing))


def _no_wait_of_a_second_stream(patch: Patch) -> None:
    wait = Work.wait

    def once(work: Any) -> None:
        if not work._behind:
            wait(work)

    patch(Work, "wait", once)


def _no_order_behind_the_last_reduction(patch: Patch) -> None:
    patch(Gradients, "order_behind_reduction", _nothing)


def _gradients_taken_over_unordered(patch: Patch) -> None:
    patch(Streams, "join_compute", _nothing)


def _gradients_dropped_unrecorded(patch: Patch) -> None:
    join = Streams.join_compute
    patch(Streams, "join_compute", lambda streams, tensors=(): join(streams))


def _memory_of_a_reduction_not_kept(patch: Patch) -> None:
    patch(Streams, "keep_for_reducing", _nothing)


def _memory_of_a_kept_view_is_not_computes(patch: Patch) -> None:
    patch(Streams, "allocating", lambda streams: nullcontext())


def _readers_do_not_wait_for_updates(patch: Patch) -> None:
    patch(Gate, "wait_for_update", _nothing)


def _sums_do_not_wait_for_copies(patch: Patch) -> None:
    use = HostSums._use

    def at_once(sums: Any, buffer: Any, arrived: Any, then: Any, behind: Any) -> None:
        use(sums, buffer, torch.cuda.Event(), then, behind)

    patch(HostSums, "_use", at_once)


def _buffers_of_sums_taken_while_busy(patch: Patch) -> None:
    patch(HostSums, "_finish_oldest", lambda sums: sums._running.popleft())


def _readers_do_not_wait_for_sums(patch: Patch) -> None:
    patch(HostSums, "finish", _nothing)
    patch(Gate, "finish_sum", _nothing)
    patch(Gate, "leave_sum", _nothing)


def _updates_do_not_wait_for_a_save(patch: Patch) -> None:
    patch(Gate, "wait_for_reader", _nothing)


def _gathers_begin_when_updates_have_ended(patch: Patch) -> None:
    def by_time(gathers: Any, weights: Any, *, released: bool) -> bool:
        chunk = weights.chunk
        return chunk.shard.ready and (weights.block.quiet or chunk.spec.index in gathers.cache.upcoming)

    patch(Gathers, "_may_begin", by_time)


def _early_updates_do_not_wait_for_gradients(patch: Patch) -> None:
    patch(Streams, "until_issued_ends", lambda streams: _nothing)


def _without(owner: Any, method: str, *, on: Any = Scheduler) -> Callable[[Patch], None]:
    """While a method of `on` runs, one of `owner` does nothing."""
    name, _, within = method.partition(" in ")
    return lambda patch: _while(patch, on, within, lambda put, _: put(owner, name, _nothing))


def _late_sums_on_compute(patch: Patch) -> None:
    def at_once(reductions: Any, index: int) -> None:
        if not reductions._weights[index].holds:
            reductions._add_all_waiting(reductions._gradients[index])

    patch(Reductions, "add_waiting", at_once)


def _late_sums_unmarked(patch: Patch) -> None:
    _while(patch, Reductions, "add_waiting", lambda put, _: put(Streams, "marked", lambda streams, work: work))


def _one_mover_unnoticed(context: str) -> Callable[[Patch], None]:
    """What goes to one of the streams does not count as moving."""

    def fault(patch: Patch) -> None:
        enter = getattr(Streams, context)

        def unnoticed(streams: Any) -> Any:
            moving = streams._moving
            entered = enter(streams)
            streams._moving = moving
            return entered

        patch(Streams, context, unnoticed)

    return fault


def _reductions_at_once(patch: Patch) -> None:
    start = ReductionOrder.__init__
    patch(ReductionOrder, "__init__", lambda sends, *, in_order: start(sends, in_order=False))


def _checkpoints_copied_at_once(patch: Patch) -> None:
    patch(Streams, "keeping", lambda streams: torch.cuda.stream(streams._keep))


FAULTS: dict[str, Callable[[Patch], None]] = {
    "a gather does not wait for its fetch": _no_gather_behind_fetch,
    "a reduction does not wait for compute": _no_reduction_behind_compute,
    "the end of a fetch is not recorded": _unmarked_on("_fetch"),
    "the end of a gather is not recorded": _unmarked_on("_gather"),
    "the end of a reduction is not recorded": _unmarked_on("_reduce"),
    "a block is free at once": _blocks_vacated_at_once,
    "a block is free when one compute stream is": _blocks_vacated_behind_the_current_stream_alone,
    "a block is taken while it is in use": _blocks_claimed_while_busy,
    "a block is taken from a late reader": _blocks_claimed_under_late_readers,
    "a fetch does not wait for the update": _no_fetch_behind_compute_in(Scheduler, "updated"),
    "a fetch does not wait for the start": _no_fetch_behind_compute_in(Gathers, "__init__"),
    "a host's update does not wait for fetches": _step_not_behind("_fetch"),
    "a host's update does not wait for reductions": _host_not_behind_reductions,
    "compute does not wait for a gather": _no_wait_for_the_gather,
    "a second compute stream does not wait for a gather": _no_wait_of_a_second_stream,
    "a fetch does not wait for the reduction before": _no_order_behind_the_last_reduction,
    "a gradient of another compute stream is not waited for": _gradients_taken_over_unordered,
    "a gradient of another compute stream is dropped": _gradients_dropped_unrecorded,
    "the memory of a reduction is not kept": _memory_of_a_reduction_not_kept,
    "the memory of a kept view is the fetch stream's": _memory_of_a_kept_view_is_not_computes,
    "nobody waits for an update": _readers_do_not_wait_for_updates,
    "a sum does not wait for the copy of its gradient": _sums_do_not_wait_for_copies,
    "a buffer of sums is taken while it is in use": _buffers_of_sums_taken_while_busy,
    "nobody waits for sums": _readers_do_not_wait_for_sums,
    "values on disk are used before they are read": _buffers_read_before_they_are_filled,
    "a buffer of values on disk is filled while it is copied": _buffers_filled_while_they_are_copied,
    "a thread that reads from disk makes compute wait": _threads_make_compute_wait,
    "values on disk are read before their update has ended": _values_read_before_their_update_has_ended,
    "a checkpoint is copied before it is computed": _checkpoints_copied_at_once,
    "the copy of a checkpoint is not waited for": _without(Work, "wait in finish_keeping", on=Streams),
    "a fetch does not wait for the norm": _without(Streams, "fetch_after_compute in facts", on=StepDecision),
    "an update does not wait for a save": _updates_do_not_wait_for_a_save,
    "an update does not wait for reductions": _step_not_behind("_reduce"),
    "a gather begins when its update has ended": _gathers_begin_when_updates_have_ended,
    "reductions of ranks that run other modules begin at once": _reductions_at_once,
    "the end of a step does not wait for other compute": _without(Streams, "join_compute in end_step", on=Streams),
    "a gradient is added late on compute, and nobody waits for it": _late_sums_on_compute,
    "the end of a late addition is not recorded": _late_sums_unmarked,
    "an early update does not wait for its gradient": _early_updates_do_not_wait_for_gradients,
    "a sum is added to while it is reduced": _without(Gradients, "order_behind_reduction in _copy_in", on=Reductions),
    "the host does not wait where only fetches run": _one_mover_unnoticed("fetching"),
    "the host does not wait where only reductions run": _one_mover_unnoticed("reducing"),
}
