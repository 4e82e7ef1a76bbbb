"""The only place that issues a step's gathers and reductions, and their order.

Owns what the cache was asked and has decided, the queue of gathers that have not begun, and the reductions in flight.
Knows nothing of modules or autograd (`hooks`) nor of updates (`optim`).

    unshard   ->  cache.acquire  ->  queue  ->  begin (fetch, gather)  ->  wait, parameters attached
    gradient  ->  cache.acquire  ->  lands in a block  ->  reduce  ->  cache.release  ->  home

No deadlock where every rank runs the same scattered modules. Gathers follow requests, which come from modules.
`chunks.cache_policy` decides evictions from the requests alone. `reduction_order` gives the order of reductions.

Overlap. Compute waits for a gather where it needs it, the update for reductions, a refill for the last use of its
block. A gather that was decided ahead of time begins when its home's update has ended; it holds up only gathers that
were decided ahead of time after it.
Sources: Elixir v1, VI and VII (no write on eviction); v2, 4.3 (prefetch in the calling order).
"""

from collections import deque
from collections.abc import Callable, Sequence

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
from elixir_moe.chunks.plan import REDUCTIONS_IN_FLIGHT, Tier
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import OutOfStepError, PlanError, UsageError
from elixir_moe.memory.blocks import Blocks
from elixir_moe.runtime.chunk import ATTACHED, CACHED, GATHERED, GATHERING, SHARDED, Chunk, Landings
from elixir_moe.runtime.reduction_order import Agreement, Reductions, alone
from elixir_moe.runtime.streams import Streams

_MISSES_BEFORE_NEW_SCHEDULE = 3
_LONGEST_RECORD = 1 << 20
"""Where recording stops, for programs that run forward for ever and never backward."""


class Scheduler:
    """Carries out what the cache decides, for one wrapped model on one rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: CacheState,
        blocks: Blocks,
        staging: torch.Tensor | None,
        device: torch.device,
        statistics: Statistics,
        agreement: Agreement = alone,
    ) -> None:
        self.chunks = chunks
        self.cache = cache
        self.statistics = statistics
        self.closed = False
        """The process groups are gone."""
        self.looks_for_writes = True
        """No backward has ended yet: writes that nothing tells of are looked for (``self.weight.data`` in forward)."""
        self.written_unseen: str | None = None
        """A parameter in which such a write was found."""
        self.failed = False
        """A request has failed: what was decided may not have been carried out."""
        self.used: set[tuple[int, int]] = set()
        """(chunk, index in the chunk) of parameters that got a gradient since the last update, on this rank."""
        self.reductions = Reductions(agreement)
        """What the backward under way is to reduce."""
        self.shown_at: dict[int, Chunk] = {}
        """By the address of its memory: the chunk that is gathered there."""
        self.reductions_issued = 0
        """How often gradients were sent off."""
        self.lost_gradients = False
        """A backward or a reduction has failed, and a part of the gradients is gone."""
        self._blocks = blocks
        self._staging = staging
        self._streams = Streams(device)
        self._cached: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._record: list[CacheRequest] = []
        self._rounds_missed = 0
        self._queue: deque[Chunk] = deque()
        """Gathers that were decided and have not begun: their order is that of the decisions, the same on all ranks."""
        self._gradient_blocks = 0
        """Blocks that gradients have."""
        self._in_flight: deque[Work] = deque()
        self._behind = Work()
        """The last reduction that only streams wait for."""
        for chunk in chunks:
            chunk.block = blocks.own.get(chunk.spec.index)

    # ------------------------------------------------------------------------------------------------------- unshard

    def unshard(self, chunks: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Gathers the weights of `chunks` and holds them until `release`; returns when they can be read.

        Args:
            chunks: all that `who` needs at once.
            tracked: part of the training step (evaluation is not, and does not move the schedule).
            who: the module that asks, for messages.

        Raises:
            PlanError: the rCache is too small for them.
            UsageError: `optimizer.close` was called.
        """
        self.check_open()
        cached = self._cached_of(chunks)
        if cached:
            self._ask(ACQUIRE, cached, tracked=tracked, who=who)
        try:
            for index in chunks:
                chunk = self.chunks[index]
                if chunk.placement is not CACHED:
                    chunk.holds += 1
                    if chunk.state is SHARDED:
                        self._queue_gather(chunk)
                if chunk.state is GATHERING:
                    self._wait_for_unshard(chunk)
        except BaseException:  # an update that failed, a rank that is gone, an interrupt
            self.failed = True
            raise

    def release(self, chunks: tuple[int, ...], *, tracked: bool) -> None:
        """Ends one hold on each of `chunks`."""
        cached = self._cached_of(chunks)
        if cached:
            self._ask(RELEASE, cached, tracked=tracked, who="a release")
        if len(cached) < len(chunks):
            for index in chunks:
                chunk = self.chunks[index]
                if chunk.placement is not CACHED:
                    chunk.holds = max(chunk.holds - 1, 0)  # a reset may have come before
                    if self.looks_for_writes:
                        self.keep_writes(chunk)
                    if chunk.reduced and not chunk.holds:
                        self._order_behind_reduction(chunk)
                        chunk.land_waiting()

    def holds(self, index: int) -> bool:
        """Whether the weights of chunk `index` can be read without asking for them: because somebody has asked, and not
        because nobody has needed their block yet."""
        chunk = self.chunks[index]
        return self.cache.holds(index) if chunk.placement is CACHED else chunk.state is GATHERED and chunk.holds > 0

    def _cached_of(self, chunks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `chunks` that come and go through the rCache."""
        found = self._cached.get(chunks)
        if found is None:
            found = self._cached[chunks] = tuple(c for c in chunks if self.chunks[c].placement is CACHED)
        return found

    def _ask(self, verb: Verb, items: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Puts a request to the cache and carries out what it decides.

        Weights that find no block get that of gradients, where more have one than were foreseen.
        """
        ask = self.cache.acquire if verb is ACQUIRE else self.cache.release
        try:
            loads = ask(items, tracked=tracked)
        except PlanError as error:
            if items[0] >= 0 and self._move_gradients_out():
                self._ask(verb, items, tracked=tracked, who=who)
                return
            raise PlanError(f"{who} needs a block for each of {sorted({max(i, ~i) for i in items})}: {error}") from None
        if tracked and len(self._record) < _LONGEST_RECORD:
            self._record.append(CacheRequest(verb, items))
        try:
            for load in loads:
                self._carry_out(load)
            if self._queue:
                self._begin_gathers()
        except BaseException:
            self.failed = True
            raise

    def _carry_out(self, load: Load) -> None:
        if load.evicted is not None and load.evicted >= 0:
            self._reshard(self.chunks[load.evicted])
        if load.chunk >= 0:  # gradients learn where their block is when they come
            self.chunks[load.chunk].block = self._blocks.shared[load.block]
            self._queue_gather(self.chunks[load.chunk])

    def check_open(self) -> None:
        """Raises UsageError after ``optimizer.close()``, OutOfStepError where collectives of the ranks do not meet."""
        if self.reductions.out_of_step:
            raise OutOfStepError(self.reductions.out_of_step)
        if self.closed:
            raise UsageError("optimizer.close() was called: the model cannot run any more; wrap a new one")

    # -------------------------------------------------------------------------------------------------------- gather

    def _queue_gather(self, chunk: Chunk) -> None:
        """Puts the gather of a chunk last in the queue."""
        chunk.transition(GATHERING)
        if not chunk.spec.in_place:
            self.statistics.bytes_fetched[chunk.shard.tier.of_compute.value] += chunk.spec.nbytes // chunk.spec.shards
        if chunk.spec.shards > 1:
            self._count(chunk, "all_gather", 1)
            self.reductions.gathered.append(chunk.spec.index)
        self._queue.append(chunk)

    def _begin_gathers(self, until: Chunk | None = None) -> None:
        """Begins gathers as long as the first in the queue may; in any case up to `until`, which is in it."""
        while self._queue:
            chunk = self._queue[0]
            if until is None and not self._may_begin(chunk):
                break
            if chunk.arriving is None:  # else an interrupt came between these two
                self._begin_gather(chunk)
            self._queue.popleft()
            until = None if chunk is until else until

    def _may_begin(self, chunk: Chunk) -> bool:
        """Nobody waits for an update whose chunk is not needed yet, nor for a gradient on its way out of the block."""
        soon = chunk.spec.index in self.cache.upcoming
        if chunk.communicator.tagged:
            updating = chunk.shard.updating
        else:  # when an update ends differs from rank to rank, and so would the order among process groups
            updating = chunk.shard.has_update and not soon
        assert chunk.block is not None
        return not updating and (chunk.block.quiet or soon)

    def _begin_gather(self, chunk: Chunk) -> None:
        self.check_open()
        assert chunk.block is not None
        behind_compute = self._streams.fetch_behind()
        with torch.inference_mode(False), torch.no_grad(), self._streams.fetching():
            self._order_behind_reduction(chunk)
            values = chunk.shard.values()
            chunk.buffer = chunk.block.claim(chunk.spec, behind_compute)
            if not chunk.spec.in_place:
                start, stop = chunk.spec.shard_bounds(chunk.communicator.rank)
                chunk.buffer[start:stop].copy_(values, non_blocking=True)
            if chunk.spec.shards == 1:
                chunk.arriving = self._streams.marked(Work())
                return
            with self._streams.gathering():
                work = chunk.communicator.all_gather(chunk.block.wire(chunk.spec), chunk.spec.index, of=chunk.label)
                chunk.arriving = self._streams.marked(work)

    def _wait_for_unshard(self, chunk: Chunk) -> None:
        if chunk.arriving is None:
            self._begin_gathers(until=chunk)
        assert chunk.arriving is not None and chunk.buffer is not None
        chunk.arriving.wait()
        with torch.inference_mode(False), torch.no_grad():
            chunk.attach()
        self.shown_at[chunk.buffer.data_ptr()] = chunk
        chunk.arriving = None
        chunk.transition(GATHERED)

    def _reshard(self, chunk: Chunk) -> None:
        """Drops gathered weights: nothing is written, the home has it all, unless user code wrote."""
        if chunk.state is GATHERING:
            self._wait_for_unshard(chunk)
        self.keep_writes(chunk)
        self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        assert chunk.buffer is not None and chunk.block is not None
        self.shown_at.pop(chunk.buffer.data_ptr(), None)
        chunk.transition(SHARDED)
        with torch.inference_mode(False), torch.no_grad():
            chunk.detach()
        chunk.block.vacate(self._streams.marked(Work()))

    # --------------------------------------------------------------------------------------------------------- writes

    def keep_writes(self, chunk: Chunk) -> None:
        """Brings home what was written in place while the chunk was gathered.

        Every rank has whole parameters and keeps its own part of what was written to them.
        """
        if chunk.state is not GATHERED:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._store(chunk, [])
            if self.looks_for_writes and self.written_unseen is None:
                self.written_unseen = chunk.written_unseen()

    def store(self, slots: Sequence[tuple[int, int]]) -> None:
        """Brings home what whole gathered parameters, as (chunk, index in it), are now."""
        with torch.inference_mode(False), torch.no_grad():
            for chunk in dict.fromkeys(self.chunks[index] for index, _ in slots):
                self._store(chunk, [position for index, position in slots if index == chunk.spec.index])

    def _store(self, chunk: Chunk, positions: list[int]) -> None:
        """Brings home what some parameters of a gathered chunk are now, and what was written in place in others."""
        positions = list(dict.fromkeys([*positions, *chunk.take_written()]))
        if positions:
            self._order_behind_reduction(chunk)  # a gradient may be landing in the values' place
            for position in positions:
                chunk.store(position)
            self._streams.fetch_after_compute()

    def fingerprint(self, index: int, position: int) -> tuple[int, int]:
        """Tells, compared with a later one, whether and how a gathered parameter was written; see `Chunk`."""
        return self.chunks[index].fingerprint(position)

    def undo_unseen(self, index: int) -> None:
        """Undoes writes to a gathered chunk that have left no trace."""
        with torch.inference_mode(False), torch.no_grad():
            self._store(self.chunks[index], [])
            self.chunks[index].show_home()
        self.failed = True  # of other ranks' parts the block still has what was written

    def flush(self) -> None:
        """Brings home what was written in place in any gathered chunk."""
        for chunk in self.chunks:
            self.keep_writes(chunk)

    # -------------------------------------------------------------------------------------------------------- reduce

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """Takes the gradient of parameter `position` of chunk `index`, of the parameter's shape."""
        chunk = self.chunks[index]
        self.used.add((index, position))
        chunk.loose.append((position, gradient))
        self._land(chunk)

    def reserve_gradients(self, chunks: Sequence[int]) -> None:
        """Asks for the blocks of gradients that come on some ranks and not on others: all ask at the same time."""
        for index in chunks:
            if self.chunks[index].placement is CACHED and self.reductions.awaits_any(index):
                self._land(self.chunks[index])

    def _land(self, chunk: Chunk, *, at_once: bool = False) -> None:
        """Copies what has come of a chunk's gradients to their memory.

        Where no block is left for them they stay what autograd has made, until there is one. `at_once`: they get
        memory beside the rCache for a while; no plan has foreseen the order in which they have come.
        """
        with torch.inference_mode(False), torch.no_grad():
            if chunk.gradients is None:
                if chunk.placement is CACHED and not self._has_gradient_block(chunk):
                    if not at_once:
                        return
                    self.statistics.blocks_replaced += 1
                self._order_behind_reduction(chunk)  # a second sum in one backward goes on top of the first
                chunk.open_gradients()
            chunk.land_loose()

    def _has_gradient_block(self, chunk: Chunk) -> bool:
        """Asks for a block for the gradients of `chunk`; returns whether they have one."""
        if self._gradient_blocks >= self._blocks.for_gradients:
            return False
        item = gradients_of(chunk.spec.index)
        try:
            self._ask(ACQUIRE, (item,), tracked=True, who=f"a gradient of {chunk.label}")
        except PlanError:
            return False
        chunk.gradient_block = self._blocks.shared[self.cache.block_of(item)]
        self._gradient_blocks += 1
        return True

    def _move_gradients_out(self) -> bool:
        """Empties a block of gradients, which get memory beside it for a while; False if all of them keep theirs."""
        if self._gradient_blocks <= self._blocks.foreseen_gradients:
            return False
        chunk = next(chunk for chunk in self.chunks if chunk.gradient_block is not None)
        assert isinstance(chunk.gradients, Landings)
        self.statistics.blocks_replaced += 1
        with torch.inference_mode(False), torch.no_grad():
            chunk.gradients.move_out()
        self._leave_gradient_block(chunk, self._streams.marked(Work()))
        return True

    def _leave_gradient_block(self, chunk: Chunk, work: Work) -> None:
        """The block may be written again when `work` has ended."""
        assert chunk.gradient_block is not None
        chunk.gradient_block.vacate(work)
        chunk.gradient_block = None
        self._gradient_blocks -= 1
        self._ask(RELEASE, (gradients_of(chunk.spec.index),), tracked=True, who="a release")

    def expect_no_more(self, index: int, position: int) -> None:
        """Parameter `position` of chunk `index` has its gradient, or gets none in this backward."""
        if self.reductions.expect_no_more(index, position):
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        for index in self.reductions.ready():
            self._reduce(self.chunks[index])

    def finish_backward(self) -> None:
        """Sends off what is left; to be called when no more gradient can come."""
        self.reductions.expect_nothing()
        self._reduce_ready()
        for chunk in reversed(self.chunks):
            if chunk.gradients is not None or chunk.loose:
                self._reduce(chunk)
        self.reductions.clear()
        if self.looks_for_writes:
            self.flush()
            self.looks_for_writes = False

    def _reduce(self, chunk: Chunk) -> None:
        """Sends a chunk of gradients off: every rank gets the sum of its shard."""
        self._land(chunk, at_once=True)
        assert chunk.gradients is not None
        with torch.no_grad():
            gradients = chunk.gradients.complete()
        with self._streams.reducing():
            work = self._streams.marked(self._issue_reduction(chunk, gradients))
        if chunk.gradient_block is None:
            self._streams.keep_for_reducing(gradients)
        chunk.leaving, chunk.gradients = work, None
        self.reductions_issued += 1
        if work.pending:
            self._in_flight.append(work)
            self._leave_in_flight(REDUCTIONS_IN_FLIGHT)
        else:
            self._behind = work
        if chunk.gradient_block is not None:
            self._leave_gradient_block(chunk, work)

    def _leave_in_flight(self, most: int) -> None:
        while len(self._in_flight) > most:
            self._finish(self._in_flight[0].wait)
            self._in_flight.popleft()  # not before: what interrupts the wait leaves the rest to `drain`

    def _finish(self, wait: Callable[[], None]) -> None:
        """Waits for a reduction; a sum that is interrupted while it lands is lost."""
        try:
            wait()
        except BaseException:
            self.lost_gradients = True
            raise

    def _issue_reduction(self, chunk: Chunk, buffer: torch.Tensor) -> Work:
        def land(reduced: torch.Tensor, squares: float | None = None) -> None:
            with torch.no_grad():
                chunk.land(reduced, squares)
            self.statistics.bytes_offloaded[chunk.shard.tier.of_compute.value] += reduced.nbytes

        communicator = chunk.communicator
        if chunk.spec.shards == 1:
            if communicator.size > 1:
                self._count(chunk, "all_reduce", 2)
            return communicator.all_reduce(buffer, land, of=chunk.label)
        self._count(chunk, "reduce_scatter", 1)
        staging = None
        near = chunk.shard.shown.device == buffer.device
        place = chunk.shard.take_place() if near and communicator.staged else None
        if communicator.needs_staging(place):
            assert self._staging is not None
            self._leave_in_flight(0)  # the staging buffer serves one reduction at a time
            staging = self._staging[: chunk.spec.staging_bytes].view(buffer.dtype)
        return communicator.reduce_scatter(buffer, staging, land, place, tag=chunk.spec.index, of=chunk.label)

    def drain(self) -> None:
        """Waits until every gradient is at home; the host too where a home is in host memory."""
        host = any(chunk.shard.tier is not Tier.DEVICE for chunk in self.chunks)
        for work in (*self._in_flight, self._behind):
            self._finish(work.synchronize if host else work.wait)
        self._in_flight.clear()
        for chunk in self.chunks:
            chunk.land_waiting()
        self._streams.compute_after_fetch(host=host)  # a gather may still read a home that is about to be updated

    # --------------------------------------------------------------------------------------------------- between steps

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have come since the last update, at home or on their way there."""
        return bool(self._in_flight) or any(chunk.has_gradient for chunk in self.chunks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of blocks and staging on the device."""
        return self._blocks.nbytes + (0 if self._staging is None else self._staging.nbytes)

    def learn(self) -> None:
        """A round of requests is over: it is the schedule if there was none, or several in a row missed it."""
        record, self._record = self._record, []
        self._rounds_missed = 0 if self.cache.rewind() else self._rounds_missed + 1
        if self.cache.schedule is None or self._rounds_missed >= _MISSES_BEFORE_NEW_SCHEDULE:
            kept = {chunk.spec.index for chunk in self.chunks if not chunk.spec.key.trainable}
            self.cache.follow(Schedule(record, kept=kept))
            self._rounds_missed = 0

    def rewind(self) -> None:
        """Another step begins."""
        self._record.clear()
        self.cache.rewind()

    def drop_weights(self, *, frozen: bool = False) -> None:
        """Drops what is gathered and trainable, which an update makes stale; frozen chunks too if so told."""
        gathered = [
            chunk
            for chunk in self.chunks
            if chunk.state is not SHARDED and chunk.placement is not ATTACHED and (frozen or chunk.spec.key.trainable)
        ]
        for chunk in gathered:
            self._reshard(chunk)
        self.cache.drop(chunk.spec.index for chunk in gathered if chunk.placement is CACHED)

    def updated(self) -> None:
        """The optimizer has written new values: what is gathered is stale."""
        self.drain()
        self.drop_weights()
        for chunk in self.chunks:
            if chunk.placement is ATTACHED and chunk.spec.key.trainable:
                torch.autograd.graph.increment_version(chunk.locals)  # what autograd has saved of them is void
        self._streams.fetch_after_compute()

    def reset(self) -> None:
        """Gives up what was begun and left half done; gradients at home, and what was written in place, stay."""
        self.drain()
        if self._queue:  # another rank may have begun what was decided, and waits for this one
            self._begin_gathers(until=self._queue[-1])
        for chunk in self.chunks:
            if chunk.arriving is not None:
                chunk.arriving.wait()
            self.keep_writes(chunk)
            for block in (chunk.block, chunk.gradient_block):
                if block is not None:
                    block.vacate(self._streams.marked(Work()))
            with torch.inference_mode(False), torch.no_grad():
                chunk.reset()
        self._gradient_blocks = 0
        self.shown_at.clear()
        self.reductions.clear()
        self.cache.restart()
        self._record.clear()
        self.failed = False

    def abandon_groups(self) -> None:
        """The process groups go in the middle of a step: nothing is left but what is at home, without gradients."""
        self._queue.clear()
        self._in_flight.clear()
        for chunk in self.chunks:
            chunk.leaving = None
            chunk.reset()
            chunk.clear_gradient()
            chunk.communicator.drop()

    # ------------------------------------------------------------------------------------------------------- helpers

    def _order_behind_reduction(self, chunk: Chunk) -> None:
        """Orders what follows behind the chunk's last reduction; the host too where it is to read the gradient."""
        if chunk.leaving is None:
            return
        if chunk.shard.tier is not Tier.DEVICE and chunk.shard.has_gradient:
            chunk.leaving.synchronize()
        else:
            chunk.leaving.wait()

    def _count(self, chunk: Chunk, collective: str, times: int) -> None:
        self.statistics.collective_bytes[chunk.spec.key.label, collective] += times * chunk.spec.nbytes
