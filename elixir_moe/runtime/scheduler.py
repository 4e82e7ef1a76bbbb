"""The gathers and reductions of a step, issued here and nowhere else, and their order.

Owns the requests to the cache and its decisions, the queue of gathers that have not begun, and the reductions in
flight. Knows nothing of modules and autograd (`hooks`) or of updates (`optim`).

    unshard   ->  cache.acquire  ->  queue  ->  begin (fetch, gather)  ->  wait, parameters attached
    gradient  ->  cache.acquire  ->  copied to a block  ->  reduce  ->  cache.release  ->  shard

Ranks that run the same scattered modules cannot deadlock: gathers follow requests, which come from modules,
`chunks.cache_policy` decides evictions from the requests alone, and `reduction_order` gives the order of reductions.

Overlap. Compute waits for a gather when it needs the weights, an update waits for reductions, and a refill waits for
the last use of its block. A prefetched gather begins when `_may_begin` allows it.
Sources: Elixir v1, VI and VII (no write on eviction); v2, 4.3 (prefetch in the calling order).
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from elixir_moe.chunks.cache_policy import (
    ACQUIRE,
    RELEASE,
    CacheRequest,
    CacheState,
    Load,
    Schedule,
    Verb,
    gradients_of,
)
from elixir_moe.chunks.ledger import REDUCTIONS_IN_FLIGHT
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import ATTACHED, CACHED
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.chunks.step_machine import Answer, ParamId
from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import PlanError
from elixir_moe.memory.blocks import Blocks
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.runtime.autograd import unrecorded
from elixir_moe.runtime.chunk import GATHERED, GATHERING, SHARDED, Chunk
from elixir_moe.runtime.phase import READABLE, WHOLE, Phase
from elixir_moe.runtime.reduction_order import Agreement, alone
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.writes import Writes
from elixir_moe.spans import span

_LOG = logging.getLogger(__name__)
_MISSES_BEFORE_NEW_SCHEDULE = 3
_SMALL_BYTES, _MOST_SMALL = 1 << 16, 16
"""Gradients of at most so many bytes are copied together, at most so many."""


class Scheduler:
    """Carries out what the cache decides, for one wrapped model on one rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: CacheState,
        blocks: Blocks,
        staging: torch.Tensor | None,
        streams: Streams,
        statistics: Statistics,
        agreement: Agreement = alone,
        sums: HostSums | None = None,
    ) -> None:
        self.chunks = chunks
        self.cache = cache
        self.sums = sums
        """Adds gradients in host memory beside backward, if anybody does."""
        self.statistics = statistics
        self.phase = Phase()
        self.writes = Writes(chunks, streams, self.phase, self._order_behind_reduction)
        """What user code writes to gathered weights."""
        self.used: set[tuple[int, int]] = set()
        """(chunk, index in the chunk) of parameters that got a gradient since the last update, on this rank."""
        self.reduced_early: Callable[[Chunk, Callable[[], None]], None] | None = None
        """Called with a chunk of `Phase.early` whose gradient is on its way home, and a function that waits for it.

        Set in the backward in which updates may begin."""
        self._has_host_shards = any(chunk.shard.tier is not Tier.DEVICE for chunk in chunks)
        self.in_order = not all(chunk.communicator.tagged for chunk in chunks)
        """Some collectives are not `Communicator.tagged`."""
        cached = [chunk.spec for chunk in chunks if chunk.spec.residence is CACHED]
        self.gathers_cached = any(spec.shards > 1 for spec in cached)
        """Requests to the rCache decide gathers of several ranks: all ranks must make them in one order."""
        self._apart = False
        """The ranks await different gradients in this backward."""
        self._agreement = agreement
        self.gathered: list[int] = []
        """Chunks whose shards were gathered since the last backward."""
        self.shown_at: dict[int, Chunk] = {}
        """The gathered chunk at each memory address."""
        self.reductions_issued = 0
        """Number of reductions issued so far."""
        self._blocks = blocks
        self._staging = staging
        self._streams = streams
        self._cached: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._record: list[CacheRequest] = []
        self._rounds_missed = 0
        self._queue: deque[Chunk] = deque()
        """Gathers decided and not yet begun, in the order of the decisions, which is the same on all ranks."""
        self._gradient_blocks = 0
        """Number of blocks that hold gradients."""
        self._in_flight: deque[Work] = deque()
        """Reductions that the host must wait for."""
        self._outside: deque[Chunk] = deque()
        """Chunks whose gradients left memory outside the blocks, which the device may still use; oldest first."""
        for chunk in chunks:
            chunk.block = blocks.own.get(chunk.spec.index)
        streams.fetch_after_compute()  # shards and blocks were filled on the current stream

    # ------------------------------------------------------------------------------------------------------- unshard

    def unshard(self, chunks: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Gathers the weights of `chunks` and holds them until `release`; returns when they can be read.

        Args:
            chunks: all chunks that `who` needs at once.
            tracked: whether the request is part of a training step; evaluation is not, and does not move the schedule.
            who: the module that asks, for messages.

        Raises:
            PlanError: the rCache is too small for these chunks.
            UsageError: `optimizer.close` was called.
        """
        self.phase.check(READABLE, who)
        self._streams.enter_compute()
        cached = self._cached_of(chunks)
        with unrecorded():  # once: what is called here finds nothing left to leave
            if cached:
                self._ask(ACQUIRE, cached, tracked=tracked, who=who)
            try:
                for index in chunks:
                    chunk = self.chunks[index]
                    if chunk.spec.residence is not CACHED:
                        chunk.holds += 1
                        if chunk.state is SHARDED:
                            self._queue_gather(chunk)
                    if chunk.state is GATHERING:
                        self._wait_for_unshard(chunk)
                    elif chunk.arrived is not None:
                        chunk.arrived.wait()  # for the first time, if this is another stream
            except BaseException:  # an update that failed, a rank that is gone, an interrupt
                self.phase.torn = True
                raise

    def release(self, chunks: tuple[int, ...], *, tracked: bool) -> None:
        """Ends one hold on each of `chunks`."""
        cached = self._cached_of(chunks)
        if cached:
            self._ask(RELEASE, cached, tracked=tracked, who="a release")
        if len(cached) < len(chunks):
            for index in chunks:
                chunk = self.chunks[index]
                if chunk.spec.residence is not CACHED:
                    chunk.holds = max(chunk.holds - 1, 0)  # a reset may have run before
                    if self.phase.first:
                        self.writes.keep(chunk)
                    self._add_waiting(chunk)

    def holds(self, index: int) -> bool:
        """Whether somebody holds the weights of chunk `index`; weights left in an unneeded block do not count."""
        chunk = self.chunks[index]
        if chunk.spec.residence is CACHED:
            return self.cache.holds(index)
        return chunk.state is GATHERED and chunk.holds > 0

    def hold_chunk(self, index: int) -> bool:
        """As `Carrier.hold_chunk`."""
        if self.chunks[index].spec.residence is ATTACHED or self.holds(index):
            return False
        self.unshard((index,), tracked=True, who="backward")
        return True

    def let_go_chunk(self, index: int) -> None:
        """As `Carrier.let_go_chunk`."""
        self.release((index,), tracked=True)

    def uses_cache(self, chunks: tuple[int, ...]) -> bool:
        """Whether any of `chunks` uses the rCache."""
        return bool(self._cached_of(chunks))

    def _cached_of(self, chunks: tuple[int, ...]) -> tuple[int, ...]:
        """The chunks among `chunks` that use the rCache."""
        found = self._cached.get(chunks)
        if found is None:
            found = self._cached[chunks] = tuple(c for c in chunks if self.chunks[c].spec.residence is CACHED)
        return found

    def _ask(self, verb: Verb, items: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Passes a request to the cache and carries out its decisions.

        Weights that find no block get one from gradients, if gradients use more blocks than foreseen.
        """
        ask = self.cache.acquire if verb is ACQUIRE else self.cache.release
        try:
            loads = ask(items, tracked=tracked)
        except PlanError as error:
            if items[0] >= 0 and self._move_gradients_out():
                self._ask(verb, items, tracked=tracked, who=who)
                return
            raise PlanError(f"{who} needs a block for each of {sorted({max(i, ~i) for i in items})}: {error}") from None
        if tracked:
            self._record.append(CacheRequest(verb, items))
        try:
            for load in loads:
                self._carry_out(load)
            if self._queue:
                self._begin_gathers(released=verb is RELEASE)
        except BaseException:
            self.phase.torn = True
            raise

    def _carry_out(self, load: Load) -> None:
        if load.evicted is not None and load.evicted >= 0:
            self._reshard(self.chunks[load.evicted])
        if load.chunk >= 0:  # for gradients, `_has_gradient_block` looks the block up
            self.chunks[load.chunk].block = self._blocks.shared[load.block]
            self._queue_gather(self.chunks[load.chunk])

    # -------------------------------------------------------------------------------------------------------- gather

    def _queue_gather(self, chunk: Chunk) -> None:
        """Appends the gather of a chunk to the queue."""
        if chunk.spec.index in self.phase.early:
            self.phase.check(WHOLE, f"{chunk.label} is to be gathered")
        chunk.transition(GATHERING)
        parts = chunk.spec.shards if chunk.shard.whole is None else 1
        if not chunk.spec.residence.in_shard:
            self.statistics.bytes_fetched[chunk.shard.compute_tier.value] += chunk.spec.nbytes // parts
        if parts > 1:
            self._count(chunk, "all_gather", chunk.spec.nbytes)
        self._queue.append(chunk)
        if parts > 1:
            self.gathered.append(chunk.spec.index)

    def _begin_gathers(self, until: Chunk | None = None, *, released: bool = False) -> None:
        """Begins gathers while the first in the queue may begin, and in any case up to `until`, which is queued.

        `released`: what was held has been used, so that the device has work while the host waits.
        """
        for chunk in self._queue:
            if not chunk.shard.source.prepare():
                break  # buffers are taken in the order of the queue, so its first gather finds one
        while self._queue:
            chunk = self._queue[0]
            if until is None and not self._may_begin(chunk, released=released):
                break
            if chunk.arriving is None:  # else an interrupt came before `popleft`
                self._begin_gather(chunk)
            self._queue.popleft()
            until = None if chunk is until else until

    def _may_begin(self, chunk: Chunk, *, released: bool) -> bool:
        """Whether a prefetched gather may begin.

        Where collectives are `in_order`: at once if no update of its shard can be running, else when a unit is left and
        the chunk is needed next, so that the unit's kernels run while the host waits. Elsewhere: when the update has
        ended and the block is free, or the chunk is needed next.
        """
        assert chunk.block is not None
        if self.in_order:
            return not chunk.shard.source.may_wait or (released and chunk.spec.index in self.cache.upcoming)
        return chunk.shard.source.ready and (chunk.block.quiet or chunk.spec.index in self.cache.upcoming)

    def _begin_gather(self, chunk: Chunk) -> None:
        assert chunk.block is not None
        with unrecorded(), self._streams.fetching():
            self._order_behind_reduction(chunk)
            values, whole = chunk.shard.values(), chunk.shard.whole
            chunk.buffer = chunk.block.claim(chunk.spec, self._streams.fetch_after_compute)
            if not chunk.spec.residence.in_shard:
                start, stop = chunk.spec.shard_bounds(chunk.communicator.rank)
                with span("fetch", chunk.label):
                    if whole is None:
                        chunk.buffer[start:stop].copy_(values, non_blocking=True)
                    else:
                        chunk.buffer.copy_(whole, non_blocking=True)
                chunk.shard.source.sent(lambda: self._streams.marked(Work()))
            if chunk.spec.shards == 1 or whole is not None:
                chunk.arriving = self._streams.marked(Work())
                return
            with self._streams.gathering(), self.phase.issuing(chunk.label), span("gather", chunk.label):
                work = chunk.communicator.all_gather(chunk.block.wire(chunk.spec), chunk.spec.index, of=chunk.label)
                chunk.arriving = self._streams.marked(work)

    def _wait_for_unshard(self, chunk: Chunk) -> None:
        if chunk.arriving is None:
            self._begin_gathers(until=chunk)
        assert chunk.arriving is not None and chunk.buffer is not None
        with span("wait", chunk.label):
            chunk.arriving.wait()
        with unrecorded():
            chunk.attach()
        self.shown_at[chunk.buffer.data_ptr()] = chunk
        chunk.arriving, chunk.arrived = None, chunk.arriving
        chunk.transition(GATHERED)
        self.writes.watch(chunk)

    def _reshard(self, chunk: Chunk) -> None:
        """Drops gathered weights; the shards have them already, so only writes of user code are stored."""
        if chunk.state is GATHERING:
            self._wait_for_unshard(chunk)
        self.writes.keep(chunk)
        assert chunk.buffer is not None and chunk.block is not None
        self.shown_at.pop(chunk.buffer.data_ptr(), None)
        chunk.transition(SHARDED)
        with unrecorded():
            chunk.detach()
        chunk.block.vacate(self._streams.all_compute())

    # -------------------------------------------------------------------------------------------------------- reduce

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """Takes the gradient of parameter `position` of chunk `index`, of the parameter's shape.

        Small ones that follow the first stay as autograd made them until a large one comes, or the reduction. Then they
        are copied together.
        """
        chunk = self.chunks[index]
        if index in self.phase.early:
            hint = "reentrant checkpoints bring them; train without update_in_backward, a Trainer by =False"
            self.phase.check(WHOLE, f"a second gradient of {chunk.names[position]!r} ({hint})")
        self._streams.enter_compute()  # autograd may have made it on a stream of its own
        self.used.add((index, position))
        chunk.loose.append((position, gradient))
        waits = chunk.gradients is not None and gradient.nbytes <= _SMALL_BYTES and len(chunk.loose) <= _MOST_SMALL
        if not waits:
            self._copy_in(chunk)

    def reserve_gradients(self, index: int) -> None:
        """Requests a block for gradients that only some ranks get, so that all ranks request it at the same time."""
        if self.chunks[index].spec.residence is CACHED:
            self._copy_in(self.chunks[index])

    def _copy_in(self, chunk: Chunk, *, at_once: bool = False) -> None:
        """Copies the gradients that have come to the chunk's memory.

        While there is no block for them, gradients stay the tensors autograd made. `at_once`: they get temporary memory
        outside the rCache instead, since the plan did not foresee the order in which they have come.
        """
        self._streams.enter_compute()
        with unrecorded():
            if chunk.gradients is None:
                if chunk.spec.residence is CACHED and not self._has_gradient_block(chunk):
                    if not at_once:
                        return
                    self.statistics.blocks_replaced += 1
                self._order_behind_reduction(chunk)  # a second sum in one backward is added to the first
                self._make_way(chunk)
                chunk.open_gradients()
            self._streams.join_compute(gradient for _, gradient in chunk.loose)
            chunk.copy_loose()

    def _make_way(self, chunk: Chunk) -> None:
        """Has the host wait until another gradient outside the blocks keeps within the plan.

        Its memory is not used again before the host knows that the reduction has ended, and a host runs far ahead.
        """
        if chunk.gradient_block is None and chunk.spec.residence is not ATTACHED:
            while len(self._outside) > REDUCTIONS_IN_FLIGHT or chunk in self._outside:
                leaving = self._outside.popleft().leaving
                if leaving is not None:
                    leaving.synchronize()

    def _has_gradient_block(self, chunk: Chunk) -> bool:
        """Requests a block for the gradients of `chunk`; returns whether they got one."""
        if self._gradient_blocks >= (self._blocks.foreseen_gradients if self._apart else self._blocks.for_gradients):
            return False  # where ranks differ, weights leave for no gradients: each rank would drop others
        item = gradients_of(chunk.spec.index)
        try:
            self._ask(ACQUIRE, (item,), tracked=True, who=f"a gradient of {chunk.label}")
        except PlanError:
            return False
        chunk.gradient_block = self._blocks.shared[self.cache.block_of(item)]
        self._gradient_blocks += 1
        return True

    def _move_gradients_out(self) -> bool:
        """Moves the gradients of one block to temporary memory; False if all blocks of gradients were foreseen."""
        if self._gradient_blocks <= self._blocks.foreseen_gradients:
            return False
        chunk = next(chunk for chunk in self.chunks if chunk.gradient_block is not None)
        assert chunk.gradients is not None
        self.statistics.blocks_replaced += 1
        with unrecorded():
            chunk.gradients.move_out()
        self._leave_gradient_block(chunk, self._streams.all_compute())
        return True

    def _leave_gradient_block(self, chunk: Chunk, work: Work) -> None:
        """Releases the gradients' block, which may be written again when `work` has ended."""
        assert chunk.gradient_block is not None
        chunk.gradient_block.vacate(work)
        chunk.gradient_block = None
        self._gradient_blocks -= 1
        self._ask(RELEASE, (gradients_of(chunk.spec.index),), tracked=True, who="a release")

    def agree(self, used: Sequence[int], awaited: Sequence[ParamId]) -> Callable[[], Answer]:
        """As `Carrier.agree`. Collective; waits for the other ranks only where backward may gather."""
        answer = self._agreement(used, awaited, self.gathered, self.phase)
        self.phase.count_backward()
        self.gathered.clear()
        if not self.gathers_cached:
            return answer
        agreed = answer()  # before this rank asks for what another does not need
        if not agreed.same_gradients:
            self._apart = True
            self.cache.leave_schedule()
            for chunk in self.chunks:  # the schedule may have let weights go; from here on, none leave before the end
                if chunk.spec.residence is CACHED:
                    self.unshard((chunk.spec.index,), tracked=False, who="a backward that differs between ranks")
                    self.release((chunk.spec.index,), tracked=False)
        return lambda: agreed

    def finish_backward(self) -> None:
        """Reduces the remaining gradients; to be called when no further gradient can come."""
        for chunk in reversed(self.chunks):
            if chunk.gradients is not None or chunk.loose:
                self.reduce(chunk.spec.index)
        self.writes.end_backward()

    def reduce(self, index: int) -> None:
        """Issues the reduction of a chunk's gradients: every rank gets the sum for its shard."""
        chunk = self.chunks[index]
        self._copy_in(chunk, at_once=True)
        assert chunk.gradients is not None
        self.phase.reduce()
        self._let_update(chunk)
        with unrecorded():
            gradients = chunk.gradients.complete()
        issuing = self.phase.issuing(chunk.label) if chunk.communicator.size > 1 else nullcontext()
        with self._streams.reducing(), issuing, span("reduce", chunk.label):
            work = self._streams.marked(self._issue_reduction(chunk, gradients))
            work.lost = self.phase.lose
            if work.pending:
                self._in_flight.append(work)
            chunk.leaving, chunk.gradients = work, None
        if chunk.gradient_block is None:
            self._streams.keep_for_reducing(gradients)
            if chunk.spec.residence is not ATTACHED:
                self._outside.append(chunk)
        self.reductions_issued += 1
        self._leave_in_flight(REDUCTIONS_IN_FLIGHT)
        if chunk.gradient_block is not None:
            self._leave_gradient_block(chunk, work)

    def _let_update(self, chunk: Chunk) -> None:
        """Lets the chunk's update begin once its gradient is reduced, if it may in this backward; alike on all ranks.

        A gather in the queue would read the shard during the update. The first backward still looks for writes.
        """
        if self.reduced_early is None or self.phase.first or chunk.shard.tier is Tier.DEVICE:
            return
        if chunk.state is not GATHERING and chunk.moved() is None:
            self.writes.keep(chunk)
            self.phase.early.setdefault(chunk.spec.index)

    def _add_waiting(self, chunk: Chunk) -> None:
        """Adds gradients to the shard that waited for the last use of the values, as the end of their reduction."""
        if chunk.reduced and not chunk.holds:
            self._streams.join_compute()  # any compute stream may have used the values
            with unrecorded(), self._streams.reducing():
                self._finish(chunk.add_waiting)
                chunk.leaving = self._streams.marked(Work())

    def _leave_in_flight(self, most: int) -> None:
        while len(self._in_flight) > most:
            self._in_flight[0].wait()
            self._in_flight.popleft()  # not before: after an interrupt `drain` waits again

    def _finish(self, end: Callable[[], None]) -> None:
        """Does the last part of reductions; if it fails or is interrupted, a sum is lost."""
        try:
            end()
        except BaseException:
            self.phase.lose()
            raise

    def _issue_reduction(self, chunk: Chunk, buffer: torch.Tensor) -> Work:
        def add(reduced: torch.Tensor, squares: float | None = None) -> None:
            with unrecorded():
                chunk.add_reduced(reduced, squares)
                if self.reduced_early is not None and chunk.spec.index in self.phase.early:
                    self.reduced_early(chunk, self._streams.issued())
            self.statistics.bytes_offloaded[chunk.shard.compute_tier.value] += reduced.nbytes

        communicator, spec = chunk.communicator, chunk.spec
        nbytes = spec.reduced_bytes(over_gloo=communicator.over_gloo)
        staging = self._staging_for(chunk, spec.key.reduce_dtype) if nbytes > spec.nbytes else None
        if spec.shards == 1:
            if communicator.size > 1:
                self._count(chunk, "all_reduce", 2 * nbytes)
            return communicator.all_reduce(buffer, add, staging, of=chunk.label)
        self._count(chunk, "reduce_scatter", nbytes)
        near = chunk.shard.tier is Tier.DEVICE or buffer.device.type == "cpu"
        place = chunk.shard.take_place() if near and communicator.over_gloo else None
        if communicator.needs_staging(place):
            staging = self._staging_for(chunk, buffer.dtype)
        return communicator.reduce_scatter(buffer, staging, add, place, tag=spec.index, of=chunk.label)

    def _staging_for(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The staging buffer, which serves one reduction at a time."""
        assert self._staging is not None
        self._leave_in_flight(0)
        return self._staging[: chunk.spec.staging_bytes(over_gloo=chunk.communicator.over_gloo)].view(dtype)

    def drain(self) -> None:
        """Waits until every gradient is in its shard; the host waits too if a shard is outside the device tier."""
        self._leave_in_flight(0)
        for chunk in self.chunks:
            self._add_waiting(chunk)
        self._finish(partial(self._streams.end_step, host=self._has_host_shards))
        if self.sums is not None:
            self._finish(self.sums.finish)

    # --------------------------------------------------------------------------------------------------- between steps

    def fetch_after_compute(self) -> None:
        """To be called when compute has read shards: a gather may overwrite a gradient that is in the values' place."""
        self._streams.fetch_after_compute()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of blocks and staging on the device."""
        return self._blocks.nbytes + (0 if self._staging is None else self._staging.nbytes)

    def learn(self) -> None:
        """Ends a round of requests; it becomes the schedule if there is none or several rounds in a row missed it."""
        if self._apart:  # other ranks have made other requests
            self.rewind()
            return
        record, self._record = self._record, []
        self._rounds_missed = 0 if self.cache.rewind() else self._rounds_missed + 1
        if self.cache.schedule is None or self._rounds_missed >= _MISSES_BEFORE_NEW_SCHEDULE:
            kept = {chunk.spec.index for chunk in self.chunks if not chunk.spec.key.trainable}
            self.cache.follow(Schedule(record, kept=kept))
            _LOG.debug("the rCache follows a schedule learned in the last step: %d requests", len(record))
            self._rounds_missed = 0

    def forget_round(self) -> None:
        """Forgets the requests of this round, which becomes no schedule."""
        self._record.clear()

    def rewind(self) -> None:
        """Starts another step."""
        self._apart = False
        self.forget_round()
        self.cache.rewind()

    def drop_weights(self, *, frozen: bool = False) -> None:
        """Drops gathered trainable weights, which an update makes stale; with `frozen`, frozen ones too."""
        gathered = [
            chunk
            for chunk in self.chunks
            if chunk.state is not SHARDED
            and chunk.spec.residence is not ATTACHED
            and (frozen or chunk.spec.key.trainable)
        ]
        torn, self.phase.torn = self.phase.torn, True
        for chunk in gathered:
            self._reshard(chunk)
        self.cache.drop(chunk.spec.index for chunk in gathered if chunk.spec.residence is CACHED)
        self.phase.torn = torn

    def updated(self) -> None:
        """Called when the optimizer has written new values: drops gathered weights, which are stale."""
        self.drain()
        self.drop_weights()
        for chunk in self.chunks:
            if chunk.spec.residence is ATTACHED and chunk.spec.key.trainable:
                torch.autograd.graph.increment_version(chunk.locals)  # invalidates tensors that autograd has saved
        self._streams.fetch_after_compute()

    def reset(self) -> None:
        """Gives up all unfinished work; reduced gradients and in-place writes stay."""
        self.drain()
        if self._queue:  # another rank may have begun these gathers, and waits for this one
            self._begin_gathers(until=self._queue[-1])
        for chunk in self.chunks:
            if chunk.arriving is not None:
                chunk.arriving.wait()
            self.writes.keep(chunk)
            for block in (chunk.block, chunk.gradient_block):
                if block is not None:
                    block.vacate(self._streams.all_compute())
            with unrecorded():
                self._finish(chunk.reset)
        self._streams.fetch_after_compute()
        self._gradient_blocks = 0
        self.shown_at.clear()
        self.cache.restart()
        self._record.clear()

    def abandon_groups(self) -> None:
        """Drops the process groups in the middle of a step; only the shards stay, without gradients."""
        self._queue.clear()
        self._in_flight.clear()
        for chunk in self.chunks:
            chunk.leaving = None
            chunk.reset()
            chunk.clear_gradient()
            chunk.communicator.drop()

    # ------------------------------------------------------------------------------------------------------- helpers

    def _order_behind_reduction(self, chunk: Chunk) -> None:
        """Orders the current stream behind the chunk's last reduction; the host too if it will read the gradient."""
        if chunk.leaving is None:
            return
        host = chunk.shard.tier is not Tier.DEVICE and chunk.shard.gradient_moves
        (chunk.leaving.synchronize if host else chunk.leaving.wait)()

    def _count(self, chunk: Chunk, collective: str, nbytes: int) -> None:
        self.statistics.collective_bytes[chunk.group, collective] += nbytes
