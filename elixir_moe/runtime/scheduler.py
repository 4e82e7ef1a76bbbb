"""The chunks of one wrapped model on this rank, and what gathers and reductions do together.

Owns the moves that concern both: the end of a hold, of a round, an update, a reset. `gathers`, `reductions` and, in an
update, `whole_updates` issue every collective on chunks, and nobody else does.
"""

from collections.abc import Mapping, Sequence

import torch

from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.memory.blocks import Blocks
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.gathers import Gathers
from elixir_moe.runtime.gradients import Gradients
from elixir_moe.runtime.peers import Agreement, of_one_rank
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.reductions import Reductions
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.weights import Weights
from elixir_moe.runtime.whole_updates import WholeUpdates
from elixir_moe.runtime.writes import Writes


class Scheduler:
    """Moves the weights and gradients of one wrapped model on one rank."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: CacheState,
        blocks: Blocks,
        staging: torch.Tensor | None,
        streams: Streams,
        statistics: Statistics,
        agreement: Agreement = of_one_rank,
        sums: HostSums | None = None,
        communicators: Mapping[tuple[int, ...], Communicator] | None = None,
        update_buffer: torch.Tensor | None = None,
    ) -> None:
        """`communicators`: those of slices of matrices; chunks have their own. `update_buffer`: for `WholeUpdates`."""
        self.chunks, self.statistics = chunks, statistics
        self.phase = Phase()
        weights = [Weights(chunk, blocks.own.get(chunk.spec.index)) for chunk in chunks]
        gradients = [Gradients(chunk) for chunk in chunks]
        self.writes = Writes(weights, streams, self.phase)
        """The writes of user code to gathered weights."""
        self.gathers = Gathers(weights, gradients, cache, blocks, streams, statistics, self.phase, self.writes)
        self.reductions = Reductions(
            weights,
            gradients,
            self.gathers,
            blocks,
            staging,
            sums,
            streams,
            statistics,
            self.phase,
            self.writes,
            agreement,
        )
        self.whole_updates = WholeUpdates(
            self.gathers, blocks, staging, streams, statistics, self.phase, communicators or {}, update_buffer
        )
        self.streams, self._blocks, self._staging = streams, blocks, staging

    @property
    def communicators(self) -> list[Communicator]:
        """All communicators, each once."""
        of_chunks = [chunk.communicator for chunk in self.chunks]
        found = {id(one): one for one in (*of_chunks, *self.whole_updates.communicators.values())}
        return list(found.values())

    @property
    def cache(self) -> CacheState:
        """The state of the rCache."""
        return self.gathers.cache

    @property
    def buffer_bytes(self) -> int:
        """Bytes of blocks and staging on the device."""
        return self._blocks.nbytes + (0 if self._staging is None else self._staging.nbytes)

    def release(self, chunks: tuple[int, ...], *, tracked: bool) -> None:
        """Ends one hold on each of `chunks`."""
        for index in self.gathers.release(chunks, tracked=tracked):
            self.reductions.add_waiting(index)

    def release_chunk(self, index: int) -> None:
        """Implements `StepActions.release_chunk`."""
        self.release((index,), tracked=True)

    def learn(self) -> None:
        """Ends a round of requests, which may become the schedule."""
        if self.reductions.apart:  # other ranks have made other requests
            self.rewind()
        else:
            self.gathers.learn()

    def rewind(self) -> None:
        """Starts another step."""
        self.reductions.rewind()
        self.gathers.rewind()

    def updated(self) -> None:
        """Called when the optimizer has written new values, or begun to: drops gathered weights, which are stale."""
        self.gathers.drop()
        for chunk in self.chunks:
            if chunk.spec.residence is ATTACHED and chunk.spec.key.trainable:
                torch.autograd.graph.increment_version(chunk.locals)  # invalidates tensors that autograd has saved
        self.streams.fetch_after_compute()

    def reset(self) -> None:
        """Gives up all unfinished work; reduced gradients and in-place writes stay."""
        self.reductions.drain()
        self.gathers.finish_queued()
        self.gathers.reset()
        self.reductions.reset()
        self.streams.fetch_after_compute()

    def abandon_groups(self) -> None:
        """Drops the process groups in the middle of a step; only the shards stay, without gradients."""
        self.gathers.abandon()
        self.reductions.abandon()
        for communicator in self.communicators:
            communicator.drop()
