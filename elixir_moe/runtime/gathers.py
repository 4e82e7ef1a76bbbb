"""The gathers of a step: the requests to the cache, and what its decisions do to weights.

Owns the only way to the cache, the queue of gathers that have not begun, and every change of `Weights`.

    unshard   ->  cache.acquire  ->  queue  ->  begin (fetch, gather)  ->  wait, parameters attached

Ranks that run the same scattered modules cannot deadlock: gathers follow requests, which come from modules, and
`chunks.cache_policy` decides evictions from nothing but the requests.

Overlap. Compute waits for a gather when it needs the weights, and a refill waits for the last use of its block. A
prefetched gather begins when `_may_begin` allows it.
Sources: Elixir v1, VI and VII (no write on eviction); v2, 4.3 (prefetch in the calling order).
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, CacheState, Load, Schedule, Verb
from elixir_moe.chunks.residence import ATTACHED, CACHED
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import PlanError
from elixir_moe.memory.blocks import Blocks, ShardBlock
from elixir_moe.runtime.autograd import unrecorded
from elixir_moe.runtime.gradients import Gradients
from elixir_moe.runtime.phase import READABLE, WHOLE, Phase
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.weights import GATHERED, GATHERING, SHARDED, Weights
from elixir_moe.runtime.writes import Writes
from elixir_moe.spans import span

_LOG = logging.getLogger(__name__)
_MISSES_BEFORE_NEW_SCHEDULE = 3


class Gathers:
    """Gathers and releases weights, for one wrapped model on one rank."""

    def __init__(
        self,
        weights: Sequence[Weights],
        gradients: Sequence[Gradients],
        cache: CacheState,
        blocks: Blocks,
        streams: Streams,
        statistics: Statistics,
        phase: Phase,
        writes: Writes,
    ) -> None:
        self.cache = cache
        self.gathered: list[int] = []
        """Chunks whose gather was queued since the last backward began."""
        self.weights_at: dict[int, Weights] = {}
        """The gathered weights at each memory address."""
        self.free_a_block: Callable[[], bool] = lambda: False
        """Called where weights find no block: frees one that gradients have beyond what was foreseen, if any does."""
        self._weights, self._gradients, self._blocks = weights, gradients, blocks
        self._streams, self._statistics, self._phase, self._writes = streams, statistics, phase, writes
        chunks = [one.chunk for one in weights]
        self.in_order = not all(chunk.communicator.tagged for chunk in chunks)
        """Some collectives are not `Communicator.tagged`."""
        self.of_several_ranks = any(c.spec.residence is CACHED and c.spec.shards > 1 for c in chunks)
        """Requests to the rCache decide gathers of several ranks: all ranks must make them in one order."""
        self._cached: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._record: list[CacheRequest] = []
        self._micro_batches = 1
        """How many pass each layer together in this round."""
        self._schedules: dict[int, Schedule | None] = {}
        """By number of micro-batches: the schedule that the last round of so many has followed."""
        self._rounds_missed: Counter[int] = Counter()
        """By number of micro-batches: the last rounds in a row that did not follow the schedule."""
        self._queue: deque[Weights] = deque()
        """Gathers decided and not yet begun, in the order of the decisions, which is the same on all ranks."""
        streams.fetch_after_compute()  # shards and blocks were filled on the current stream

    # ------------------------------------------------------------------------------------------------- unshard, release

    def unshard(self, chunks: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Gathers `chunks`, all that `who` needs at once, and holds them until `release`; they can then be read.

        Requests that are not `tracked`, as in evaluation, do not move the schedule.

        Raises:
            PlanError: the rCache is too small for these chunks.
            UsageError: `optimizer.close` was called.
        """
        self._phase.check(READABLE, who)
        self._streams.enter_compute()
        cached = self._cached_of(chunks)
        with unrecorded():  # once: what is called here finds nothing left to leave
            if cached:
                self.ask(ACQUIRE, cached, tracked=tracked, who=who)
            try:
                for index in chunks:
                    weights = self._weights[index]
                    if weights.chunk.spec.residence is not CACHED:
                        weights.holds += 1
                        if weights.state is SHARDED:
                            self._enqueue(weights)
                    if weights.state is GATHERING:
                        self._wait_for(weights)
                    elif weights.gather is not None:
                        weights.gather.wait()  # for the first time, if this is another stream
            except BaseException:  # an update that failed, a rank that is gone, an interrupt
                self._phase.aborted = True
                raise

    def release(self, chunks: tuple[int, ...], *, tracked: bool) -> Sequence[int]:
        """Ends one hold on each of `chunks`; returns those that share no blocks."""
        cached = self._cached_of(chunks)
        if cached:
            self.ask(RELEASE, cached, tracked=tracked, who="a release")
        if len(cached) == len(chunks):
            return ()
        own = [index for index in chunks if self._weights[index].chunk.spec.residence is not CACHED]
        for index in own:
            weights = self._weights[index]
            weights.holds = max(weights.holds - 1, 0)  # a reset may have run before
        return own

    def acquire_chunk(self, index: int) -> bool:
        """Implements `StepActions.acquire_chunk`. Outside the rCache, a chunk that is held is held once more."""
        residence = self._weights[index].chunk.spec.residence
        if residence is ATTACHED or (residence is CACHED and self.cache.holds(index)):
            return False
        self.unshard((index,), tracked=True, who="backward")
        return True

    def moved(self) -> str | None:
        """The name of a gathered parameter to which user code has given other memory, if there is one."""
        return next((name for weights in self._weights if (name := weights.moved()) is not None), None)

    def uses_cache(self, chunks: tuple[int, ...]) -> bool:
        """Whether any of `chunks` uses the rCache."""
        return bool(self._cached_of(chunks))

    def _cached_of(self, chunks: tuple[int, ...]) -> tuple[int, ...]:
        """The chunks among `chunks` that use the rCache."""
        found = self._cached.get(chunks)
        if found is None:
            cached = (index for index in chunks if self._weights[index].chunk.spec.residence is CACHED)
            found = self._cached[chunks] = tuple(cached)
        return found

    def ask(self, verb: Verb, items: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Passes a request to the cache and carries out its decisions. Raises PlanError if there are too few blocks.

        Weights that find no block get one from gradients, if gradients use more blocks than foreseen.
        """
        request = self.cache.acquire if verb is ACQUIRE else self.cache.release
        try:
            loads = request(items, tracked=tracked)
        except PlanError as error:
            if items[0] >= 0 and self.free_a_block():
                self.ask(verb, items, tracked=tracked, who=who)
                return
            raise PlanError(f"{who} needs a block for each of {sorted({max(i, ~i) for i in items})}: {error}") from None
        if tracked:
            self._record.append(CacheRequest(verb, items))
        try:
            for load in loads:
                self._carry_out(load)
            if self._queue:
                self._begin_queued(released=verb is RELEASE)
        except BaseException:
            self._phase.aborted = True
            raise

    def _carry_out(self, load: Load) -> None:
        if load.evicted is not None and load.evicted >= 0:
            self._reshard(self._weights[load.evicted])
        if load.chunk >= 0:  # gradients look their block up
            weights = self._weights[load.chunk]
            weights.block = self._blocks.shared[load.block]
            self._enqueue(weights)

    # ----------------------------------------------------------------------------------------------------------- gather

    def _enqueue(self, weights: Weights) -> None:
        """Appends the gather of a chunk to the queue."""
        chunk = weights.chunk
        if chunk.spec.index in self._phase.early:
            self._phase.check(WHOLE, f"{chunk.label} is to be gathered")
        weights.move(GATHERING)
        parts = chunk.spec.shards if chunk.shard.whole is None else 1
        if not chunk.spec.residence.in_shard:
            self._statistics.bytes_fetched[chunk.shard.compute_tier.value] += chunk.spec.nbytes // parts
        if parts > 1:
            self._statistics.collective_bytes[chunk.group, "all_gather"] += chunk.spec.nbytes
        self._queue.append(weights)
        if parts > 1:
            self.gathered.append(chunk.spec.index)

    def _begin_queued(self, until: Weights | None = None, *, released: bool = False) -> None:
        """Begins gathers while the first in the queue may begin, and in any case up to `until`, which is queued.

        `released`: what was held has been used, so that the device has work while the host waits.
        """
        for weights in self._queue:
            if not weights.chunk.shard.prefetch():
                break  # buffers are taken in the order of the queue, so its first gather finds one
        while self._queue:
            weights = self._queue[0]
            if until is None and not self._may_begin(weights, released=released):
                break
            if weights.gather is None:  # else an interrupt came before `popleft`
                self._begin(weights)
            self._queue.popleft()
            until = None if weights is until else until

    def _may_begin(self, weights: Weights, *, released: bool) -> bool:
        """Whether a prefetched gather may begin.

        Where collectives are in order: at once if no update of its shard can be running, else when a unit is left and
        the chunk is needed next, so that the unit's kernels run while the host waits. Elsewhere: when the update has
        ended and the block is free, or the chunk is needed next.
        """
        assert weights.block is not None
        shard, index = weights.chunk.shard, weights.chunk.spec.index
        if self.in_order:
            return not shard.may_wait or (released and index in self.cache.upcoming)
        return shard.ready and (weights.block.quiet or index in self.cache.upcoming)

    def _begin(self, weights: Weights) -> None:
        chunk = weights.chunk
        assert weights.block is not None
        with unrecorded(), self._streams.fetching():
            self._gradients[chunk.spec.index].order_behind_reduction()
            values, whole = chunk.shard.values(), chunk.shard.whole
            weights.buffer = weights.block.claim(chunk.spec, self._streams.fetch_after_compute)
            if not chunk.spec.residence.in_shard:
                with span("fetch", chunk.label):
                    if whole is None:
                        weights.own_part.copy_(values, non_blocking=True)
                    else:
                        weights.buffer.copy_(whole, non_blocking=True)
                chunk.shard.values_sent(lambda: self._streams.marked(Work()))
            if chunk.spec.shards == 1 or whole is not None:
                weights.gather = self._streams.marked(Work())
                return
            with self._streams.gathering(), self._phase.issuing(chunk.label), span("gather", chunk.label):
                work = chunk.communicator.all_gather(weights.block.wire(chunk.spec), chunk.spec.index, of=chunk.label)
                weights.gather = self._streams.marked(work)

    def _wait_for(self, weights: Weights) -> None:
        if weights.gather is None:
            self._begin_queued(until=weights)
        assert weights.gather is not None and weights.buffer is not None
        with span("wait", weights.chunk.label):
            weights.gather.wait()
        with unrecorded():
            if weights.chunk.spec.residence is not ATTACHED:
                self._writes.refuse_old_views(weights)
            weights.attach()
        self.weights_at[weights.buffer.data_ptr()] = weights
        weights.move(GATHERED)
        self._writes.watch(weights)

    # ---------------------------------------------------------------------------------------------------------- reshard

    def _reshard(self, weights: Weights) -> None:
        """Drops gathered weights; the shards have them already, so only writes of user code are stored."""
        if weights.state is GATHERING:
            self._wait_for(weights)
        self._writes.keep(weights)
        assert weights.buffer is not None and weights.block is not None
        self.weights_at.pop(weights.buffer.data_ptr(), None)
        weights.move(SHARDED)
        with unrecorded():
            self._detach(weights)
        weights.block.vacate(self._streams.all_compute())

    def _detach(self, weights: Weights) -> None:
        weights.detach()
        self._writes.left(weights)

    def make_room(self, index: int) -> None:
        """Ends the use of a chunk in place, which nobody holds: its reduced gradient is about to overwrite it."""
        weights = self._weights[index]
        if weights.state is GATHERED:
            self._writes.store_written(weights)
            self._detach(weights)
            weights.move(SHARDED)
        assert isinstance(weights.block, ShardBlock)
        weights.block.make_writable()

    def keep_gathered(self) -> None:
        """Gathers all chunks that use the rCache, of which none leaves before the step ends. Collective."""
        self.cache.leave_schedule()
        for weights in self._weights:  # the schedule may have let weights go
            if weights.chunk.spec.residence is CACHED:
                index = (weights.chunk.spec.index,)
                self.unshard(index, tracked=False, who="a backward that differs between ranks")
                self.release(index, tracked=False)

    def drop(self, *, frozen: bool = False) -> None:
        """Drops gathered trainable weights, which an update makes stale; with `frozen`, frozen ones too."""
        gathered = [
            weights
            for weights in self._weights
            if weights.state is not SHARDED
            and weights.chunk.spec.residence is not ATTACHED
            and (frozen or weights.chunk.spec.key.trainable)
        ]
        aborted, self._phase.aborted = self._phase.aborted, True
        for weights in gathered:
            self._reshard(weights)
        self.cache.drop(w.chunk.spec.index for w in gathered if w.chunk.spec.residence is CACHED)
        self._phase.aborted = aborted

    # ----------------------------------------------------------------------------------------------------------- rounds

    def begin_round(self, micro_batches: int, predict: Callable[[], Schedule | None] = lambda: None) -> None:
        """Follows the schedule of a round in which so many micro-batches pass each layer together.

        `predict` gives it the first time. Without one, the cache learns a schedule.
        """
        if micro_batches == self._micro_batches:
            return
        self._schedules[self._micro_batches] = self.cache.schedule
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = predict()
        self._micro_batches = micro_batches
        self.forget_round()
        self.cache.follow(self._schedules[micro_batches])

    def learn(self) -> None:
        """Ends a round of requests; it becomes the schedule if there is none or several rounds in a row missed it."""
        record, self._record = self._record, []
        missed = self._rounds_missed[self._micro_batches]
        self._rounds_missed[self._micro_batches] = missed = 0 if self.cache.rewind() else missed + 1
        if self.cache.schedule is None or missed >= _MISSES_BEFORE_NEW_SCHEDULE:
            kept = {one.chunk.spec.index for one in self._weights if not one.chunk.spec.key.trainable}
            self.cache.follow(Schedule(record, kept=kept))
            _LOG.debug("the rCache follows a schedule learned in the last step: %d requests", len(record))
            self._rounds_missed[self._micro_batches] = 0

    def forget_round(self) -> None:
        """Forgets the requests of this round, which becomes no schedule."""
        self._record.clear()

    def rewind(self) -> None:
        """Starts another step."""
        self.forget_round()
        self.cache.rewind()

    # ------------------------------------------------------------------------------------------------------------ reset

    def finish_queued(self) -> None:
        """Begins and awaits every gather that was decided, which another rank may have begun, and keeps writes."""
        if self._queue:
            self._begin_queued(until=self._queue[-1])
        for weights in self._weights:
            if weights.gather is not None:
                weights.gather.wait()
            self._writes.keep(weights)
            if weights.block is not None:
                weights.block.vacate(self._streams.all_compute())

    def reset(self) -> None:
        """Drops all gathered weights, and forgets the round; to be called when no gather is under way."""
        for weights in self._weights:
            self._reset(weights)
        self.weights_at.clear()
        self.cache.restart()
        self._record.clear()

    def abandon(self) -> None:
        """Does what `reset` does, when the process groups are gone."""
        self._queue.clear()
        for weights in self._weights:
            self._reset(weights)

    def _reset(self, weights: Weights) -> None:
        with unrecorded():
            weights.reset()
        if weights.state is SHARDED:
            self._writes.left(weights)
