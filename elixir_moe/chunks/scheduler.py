"""The only place that moves bytes: gathers, reductions, and the order they are issued in.

Owns the runtime state of all chunks. Knows nothing of modules or autograd (`hooks`) nor of updates (`optim`).

No deadlock by construction. Gathers follow requests, which come from modules every rank runs; what is evicted for
them is decided by `policy` from the requests alone. Reductions are issued in the order of `agreement`.

Overlap. Compute waits for a gather where it needs it, the update for reductions, a refill for the last use of its
block; a gather that was decided ahead of time starts when its home's update has ended, and holds up nothing else.
Sources: Elixir v1, VI and VII (no write on eviction); v2, 4.3 (prefetch in the calling order).
"""

from collections import deque
from collections.abc import Sequence

import torch

from elixir_moe.chunks.agreement import Agreement, OutOfStepError, Reductions, alone
from elixir_moe.chunks.chunk import GATHERED, GATHERING, GRADIENT, REDUCING, SHARDED, Chunk
from elixir_moe.chunks.collectives import Ticket
from elixir_moe.chunks.gathers import Gathers
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.policy import CacheState
from elixir_moe.chunks.rcache import Block, RCache
from elixir_moe.chunks.requests import Requests
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.chunks.streams import Streams
from elixir_moe.errors import ConfigError, PlanError
from elixir_moe.parallel.dtensor import local_of

_READABLE = (GATHERED, GRADIENT)
_REDUCTIONS_IN_FLIGHT = 3
"""How many the host leaves under way: none waits for a rank that is a little late, and few wait to be summed."""


class Scheduler:
    """Carries out what the cache decides, for one wrapped model on one rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: CacheState,
        rcache: RCache,
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
        self.compare_all = True
        """Look for writes that leave no trace (``parameter.data``) in every chunk, not only in exposed ones."""
        self.requests = Requests(cache, {c.spec.index for c in chunks if not c.spec.key.trainable})
        self.used: set[tuple[int, int]] = set()
        """(chunk, index in the chunk) of parameters that got a gradient since the last update, on this rank."""
        self.reductions = Reductions(agreement)
        """What the backward under way is to reduce."""
        self._rcache = rcache
        self._staging = staging
        self._streams = Streams(device)
        self.owners: dict[int, tuple[int, int]] = {}
        """(chunk, index in the chunk) of the gathered parameter whose storage is at an address."""
        self._block_of: dict[int, Block] = dict(rcache.resident)
        self._splits: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._gathers = Gathers(cache, self._begin_gather)
        self._in_flight: deque[Ticket] = deque()
        self._behind = Ticket()
        """The last reduction that only streams wait for."""
        self.sent = False
        """A gradient was sent off since the last `drain`."""

    # ------------------------------------------------------------------------------------------------------- unshard

    def unshard(self, chunks: tuple[int, ...], *, tracked: bool, who: str) -> None:
        """Gathers `chunks` and holds them until `release`; returns when their parameters can be read.

        Args:
            chunks: all that `who` needs at once.
            tracked: part of the training step (evaluation is not, and does not move the schedule).
            who: the module that asks, for messages.

        Raises:
            PlanError: the rCache is too small for them.
            ConfigError: `optimizer.close` was called.
        """
        self.check_open()
        cached, resident = self._split(chunks)
        if cached and not self.requests.go_on(cached, tracked=tracked):
            try:
                self.requests.acquire(cached, tracked=tracked)
            except PlanError as error:
                raise PlanError(f"{who} needs chunks {cached}: {error}") from None
            try:
                self._carry_out()
                for index in cached:
                    if self.chunks[index].state is GATHERING:
                        self._await(self.chunks[index])
            except BaseException:  # an update that failed, a rank that is gone, an interrupt: nobody will release them
                self.cache.release(cached, tracked=False)
                raise
        for index in resident:
            chunk = self.chunks[index]
            if chunk.direct and chunk.buffer is not None:
                continue
            if chunk.state in (SHARDED, REDUCING):
                self._gather(chunk, self._rcache.resident[index])
            self._await(chunk)

    def release(self, chunks: tuple[int, ...], *, tracked: bool) -> None:
        """Ends one hold on each of `chunks` that a reduction has not ended before."""
        cached, _ = self._split(chunks)
        for index in cached:
            if self.chunks[index].state not in _READABLE:
                cached = tuple(c for c in cached if self.chunks[c].state in _READABLE)
                break
        if cached:
            self.requests.release(cached, tracked=tracked)
            self._carry_out()

    def _split(self, chunks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(those of the rCache, the resident ones)."""
        if chunks not in self._splits:
            resident = tuple(c for c in chunks if self.chunks[c].spec.resident)
            self._splits[chunks] = tuple(c for c in chunks if c not in resident), resident
        return self._splits[chunks]

    def _carry_out(self) -> None:
        decided = self.requests.decided
        while decided:
            load = decided[0]
            if load.evicted is not None and self.chunks[load.evicted].state is not SHARDED:
                self._reshard(self.chunks[load.evicted])
            self._gather(self.chunks[load.chunk], self._rcache.blocks[load.block])
            decided.popleft()  # not before: what interrupts a load leaves it to the next request
        self._gathers.begin()

    def forget(self) -> None:
        """Asks for nothing and awaits nothing any more."""
        self.requests.forget()
        self._gathers.clear()
        self._in_flight.clear()

    def check_open(self) -> None:
        """Raises ConfigError after ``optimizer.close()``, OutOfStepError where collectives of the ranks do not meet."""
        if self.reductions.out_of_step:
            raise OutOfStepError(self.reductions.out_of_step)
        if self.closed:
            raise ConfigError("optimizer.close() was called: the model cannot run any more; wrap a new one")

    def _gather(self, chunk: Chunk, block: Block) -> None:
        """Has `block` filled: our shard from its home, then the others' shards."""
        if chunk.lent:
            self.bring_home(chunk)
        with torch.inference_mode(False), torch.no_grad(), self._streams.fetching():
            self._order(chunk)
        chunk.transition(GATHERING)
        self._block_of[chunk.spec.index] = block
        if not chunk.spec.in_place:
            self.statistics.bytes_fetched[chunk.home.tier.of_compute.value] += chunk.spec.nbytes // chunk.spec.shards
        if chunk.spec.shards > 1:
            self._count(chunk, "all_gather", 1)
            self.reductions.gathered.append(chunk.spec.index)
        self._gathers.add(chunk, block)

    def _begin_gather(self, chunk: Chunk, block: Block) -> None:
        self.check_open()
        behind_compute = self._streams.fetch_behind()
        with torch.inference_mode(False), torch.no_grad(), self._streams.fetching():
            values = chunk.home.values()
            chunk.buffer = block.claim(chunk.spec, behind_compute)
            if not chunk.spec.in_place:
                start, stop = chunk.spec.shard_bounds(chunk.communicator.rank)
                chunk.buffer[start:stop].copy_(values, non_blocking=True)
            if chunk.spec.shards == 1:
                chunk.arriving = self._streams.marked(Ticket())
                return
            with self._streams.gathering():
                ticket = chunk.communicator.all_gather(block.wire(chunk.spec), chunk.spec.index, of=chunk.label)
                chunk.arriving = self._streams.marked(ticket)

    def _await(self, chunk: Chunk) -> None:
        if chunk.state is not GATHERING:
            return
        if chunk.arriving is None:
            self._gathers.begin(until=chunk)
        assert chunk.arriving is not None
        chunk.arriving.wait()
        with torch.inference_mode(False), torch.no_grad():
            chunk.attach()
        self._own(chunk)
        chunk.arriving = None
        chunk.transition(GATHERED)

    def _reshard(self, chunk: Chunk, *, outdated: bool = False) -> None:
        """Drops a gathered chunk: nothing is written, the home has it all, unless user code wrote."""
        self._await(chunk)
        if not outdated:
            self.bring_home(chunk)
        self._disown(chunk)
        chunk.transition(SHARDED)
        with torch.inference_mode(False), torch.no_grad():
            chunk.detach()
        self._vacate(chunk)

    def _vacate(self, chunk: Chunk) -> None:
        """The chunk's block may be filled again behind everything computed so far."""
        self._block_of[chunk.spec.index].vacate(self._streams.marked(Ticket()))

    def _own(self, chunk: Chunk) -> None:
        self.owners.update(chunk.addresses())

    def _disown(self, chunk: Chunk) -> None:
        for address, _ in chunk.addresses():
            self.owners.pop(address, None)

    # --------------------------------------------------------------------------------------------------------- writes

    def flush(self) -> None:
        """Brings home what user code has written into parameters, wherever it got hold of them."""
        for chunk in self.chunks:
            if chunk.lent or chunk.state is GATHERED:
                self.bring_home(chunk)

    def bring_home(self, chunk: Chunk) -> None:
        """Every rank has whole parameters and keeps its own part of what was written to them.

        Raises:
            ElixirError: what was written does not show the present weights.
        """
        if chunk.direct:
            return
        gathered = chunk.state is GATHERED
        with torch.inference_mode(False), torch.no_grad():
            written = chunk.keep_written(gathered and (chunk.compare or self.compare_all))
        if written:
            self._streams.fetch_after_compute()
        chunk.settle()

    def put(self, index: int, position: int, value: torch.Tensor) -> None:
        """Gives parameter `position` of the gathered chunk `index` new values; views of the old ones keep them."""
        chunk, block = self.chunks[index], self._block_of[index]
        assert chunk.buffer is not None
        with torch.inference_mode(False), torch.no_grad():
            if chunk.in_use(position):
                self.bring_home(chunk)
                self._disown(chunk)
                chunk.reseat(block.unread(chunk.buffer), position)
                self._own(chunk)
            chunk.view(position).copy_(local_of(value))
            chunk.store(position, chunk.view(position))
            self._streams.fetch_after_compute()

    # -------------------------------------------------------------------------------------------------------- reduce

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor | None, *, final: bool = True) -> None:
        """Takes the gradient of parameter `position` of chunk `index`.

        Args:
            index: the chunk.
            position: the parameter's index in it.
            gradient: of the parameter's shape; None if it got none, where others of the process group may have one.
            final: nothing in this backward will ask for the parameter's values, or add to the gradient, any more.
        """
        chunk = self.chunks[index]
        if gradient is not None:
            self.used.add((index, position))
            if gradient.requires_grad:  # its own graph wants it as it is
                gradient = gradient.detach().clone()
            if not final and not chunk.apart:
                chunk.delay_gradient(position, gradient)
                return
        if chunk.state is not GRADIENT:
            self._begin_gradients(chunk, position)
        if gradient is not None:
            if chunk.lent:
                self.bring_home(chunk)
            chunk.write_gradient(position, gradient)
        if final:
            self.expect_no_more(index, position)

    def _begin_gradients(self, chunk: Chunk, position: int) -> None:
        """The chunk gets where gradients can land, that of parameter `position` first."""
        self._order(chunk)
        index = chunk.spec.index
        borrowed = not self.requests.holds(index)
        if borrowed:
            self.unshard((index,), tracked=True, who=f"the gradient of {chunk.names[position]!r}")
        if chunk.state is GATHERED:
            self.bring_home(chunk)
            chunk.expect_gradients()
            if not chunk.spec.resident:
                self.requests.hold(index)
                self._carry_out()
        if borrowed:
            self.release((index,), tracked=True)

    def expect_no_more(self, index: int, position: int) -> None:
        """Parameter `position` of chunk `index` has its gradient, or gets none in this backward."""
        if self.reductions.expect_no_more(index, position):
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        for index, unused in self.reductions.ready():
            chunk = self.chunks[index]
            if unused and chunk.state is not GRADIENT:
                self._begin_gradients(chunk, 0)
            if chunk.state is GRADIENT:
                self._reduce_chunk(chunk)

    def finish_backward(self) -> None:
        """Sends off what is left, and ends the last request; to be called when no more gradient can come."""
        self.reductions.expect_nothing()
        self._reduce_ready()
        for chunk in reversed(self.chunks):
            if chunk.delayed and chunk.state is not GRADIENT:
                self.add_gradient(chunk.spec.index, min(chunk.delayed), None)
            if chunk.state is GRADIENT:
                self._reduce_chunk(chunk)
        self.reductions.clear()
        self.settle()

    def settle(self) -> None:
        """Ends the last request, which the next of its kind would go on with: what comes now may differ."""
        self.requests.settle()
        self._carry_out()

    def drain(self) -> None:
        """Waits until every gradient is at home; the host too where a home is in host memory."""
        host = any(chunk.home.tier is not Tier.DEVICE for chunk in self.chunks)
        for ticket in (*self._in_flight, self._behind):
            ticket.synchronize() if host else ticket.wait()
        self._in_flight.clear()
        self.sent = False
        self._streams.compute_after_fetch(host=host)  # a gather may still read a home that is about to be updated

    @property
    def buffer_bytes(self) -> int:
        """Bytes of blocks, resident buffers and staging on the device."""
        return self._rcache.nbytes + (0 if self._staging is None else self._staging.nbytes)

    def drop(self, *, frozen: bool = False) -> None:
        """Lets go of what is gathered and trainable, which an update makes stale; of `frozen` chunks too if so told."""
        self.settle()
        droppable = [c for c in self.chunks if not c.direct and (frozen or c.spec.key.trainable)]
        gathered = [c for c in droppable if c.state in (GATHERED, GATHERING)]
        for chunk in gathered:
            self._reshard(chunk, outdated=chunk.spec.key.trainable)
        self.requests.drop(chunk.spec.index for chunk in gathered)

    def invalidate(self) -> None:
        """Drops every gathered chunk the update has made stale."""
        self.drain()
        self.drop()
        for chunk in self.chunks:
            if chunk.apart:
                torch.autograd.graph.increment_version(chunk.locals)  # what autograd has saved of them is void
            if not chunk.direct:
                chunk.settle()
                for lent in chunk.lent:
                    lent.outdated = True
        self._streams.fetch_after_compute()

    def restart(self) -> None:
        """Gives up what was begun and left half done; what user code wrote and gradients at home stay."""
        self.drain()
        self._gathers.finish()  # another rank may have begun what was decided, and waits for this one
        self.forget()
        for chunk in self.chunks:
            if chunk.arriving is not None:
                chunk.arriving.wait()
            if chunk.lent or chunk.state is GATHERED:
                self.bring_home(chunk)
            if chunk.spec.index in self._block_of:
                self._vacate(chunk)
            with torch.inference_mode(False), torch.no_grad():
                chunk.restart()
        self.owners.clear()
        self.reductions.clear()
        self.cache.restart()
        self.requests.trace.clear()

    def _reduce_chunk(self, chunk: Chunk) -> None:
        """Sends a chunk of gradients off: every rank gets the sum of its shard."""
        index = chunk.spec.index
        if chunk.lent:
            self.bring_home(chunk)
        chunk.transition(REDUCING)
        if not chunk.direct:
            self._disown(chunk)
        with torch.no_grad():
            gradients = chunk.complete_gradients(self._block_of[index])
        with self._streams.reducing():
            ticket = self._streams.marked(self._issue_reduction(chunk, gradients))
        chunk.leaving = ticket
        self._block_of[index].busy = ticket
        self.sent = True
        if ticket.pending:
            self._in_flight.append(ticket)
            self._wait_for(_REDUCTIONS_IN_FLIGHT)
        else:
            self._behind = ticket
        if not chunk.spec.resident:
            self.requests.free(index)
            self._carry_out()

    def _wait_for(self, most: int) -> None:
        """Leaves at most so many reductions under way."""
        while len(self._in_flight) > most:
            self._in_flight.popleft().wait()

    def _issue_reduction(self, chunk: Chunk, buffer: torch.Tensor) -> Ticket:
        def land(reduced: torch.Tensor, squares: float | None = None) -> None:
            if chunk.home.pieces is None:
                with torch.no_grad():
                    chunk.home.add_gradient(reduced, squares)
            self.statistics.bytes_offloaded[chunk.home.tier.of_compute.value] += reduced.nbytes
            chunk.transition(chunk.at_rest)

        communicator = chunk.communicator
        if chunk.spec.shards == 1:
            if communicator.size > 1:
                self._count(chunk, "all_reduce", 2)
            return communicator.all_reduce(buffer, land, of=chunk.label)
        self._count(chunk, "reduce_scatter", 1)
        staging = None
        place = chunk.home.free_place() if chunk.home.compute.device == buffer.device else None
        if communicator.needs_staging(place):
            assert self._staging is not None
            self._wait_for(0)  # the staging buffer serves one reduction at a time
            staging = self._staging[: chunk.spec.nbytes].view(buffer.dtype)
        return communicator.reduce_scatter(buffer, staging, land, place, tag=chunk.spec.index, of=chunk.label)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _order(self, chunk: Chunk) -> None:
        """Orders what follows behind the chunk's last reduction; the host too where it is to read the gradient."""
        if chunk.leaving is None:
            return
        if chunk.home.tier is not Tier.DEVICE and chunk.home.has_gradient:
            chunk.leaving.synchronize()
        else:
            chunk.leaving.wait()

    def _count(self, chunk: Chunk, collective: str, times: int) -> None:
        self.statistics.collective_bytes[chunk.spec.key.label, collective] += times * chunk.spec.nbytes
