"""What user code writes into gathered weights: stored in the shards, refused, or noticed too late.

Owns the storing of writes before weights leave, and the search for writes that leave no trace: in the first step by
checksums on the device, in `em.unsharded` by fingerprints. Gathers and drops nothing: `scheduler` tells when weights
have come and when they leave.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from elixir_moe.chunks.step_machine import ParamId
from elixir_moe.errors import UsageError
from elixir_moe.runtime.autograd import unrecorded
from elixir_moe.runtime.chunk import GATHERED, Chunk
from elixir_moe.runtime.phase import WHOLE, Phase
from elixir_moe.runtime.streams import Streams


class Writes:
    """The writes of user code into the chunks of one wrapped model on one rank."""

    def __init__(
        self, chunks: Sequence[Chunk], streams: Streams, phase: Phase, order_behind_reduction: Callable[[Chunk], None]
    ) -> None:
        """`order_behind_reduction` orders the current stream behind a chunk's last reduction."""
        self._chunks, self._streams, self._phase = chunks, streams, phase
        self._order_behind_reduction = order_behind_reduction
        self._unseen: str | None = None
        """The name of a parameter that was written without a trace before the end of the first backward (as by
        ``self.weight.data`` in forward), or given other memory."""

    def keep(self, chunk: Chunk) -> None:
        """Stores in-place writes to a gathered chunk in its shard.

        Every rank has whole parameters and stores its own part of them.
        """
        if chunk.state is not GATHERED:
            return
        if chunk.arrived is not None:
            chunk.arrived.wait()
        with unrecorded():
            self._store(chunk, [])
            if self._phase.first and self._unseen is None:
                self._unseen = chunk.moved()

    def keep_all(self, chunks: Iterable[int] | None = None) -> None:
        """Stores in-place writes to those of these chunks that are gathered; by default of all chunks."""
        for chunk in self._chunks if chunks is None else map(self._chunks.__getitem__, chunks):
            self.keep(chunk)

    def store(self, slots: Sequence[ParamId]) -> None:
        """Stores the current values of whole gathered parameters."""
        with unrecorded():
            for chunk in dict.fromkeys(self._chunks[index] for index, _ in slots):
                self._store(chunk, [position for index, position in slots if index == chunk.spec.index])

    def _store(self, chunk: Chunk, positions: list[int]) -> None:
        """Stores the current values of some parameters of a gathered chunk, and in-place writes to its others."""
        positions = list(dict.fromkeys([*positions, *chunk.written()]))
        if positions and chunk.shard.whole is not None:
            self._streams.join_compute()
            positions = chunk.differ_from_shared(positions)  # `register_parametrization` sets a weight to itself
            chunk.forget_writes()
            if positions:
                chunk.show_home()
            self.refuse_shared((chunk.spec.index, position) for position in positions)
        if positions:
            if chunk.spec.index in self._phase.early:
                chunk.forget_writes()  # said once: `step` goes on without them
                self._phase.check(WHOLE, f"a write to parameter {chunk.names[positions[0]]!r}, which is lost,")
            self._order_behind_reduction(chunk)  # it may still be writing in the values' place
            self._streams.join_compute()
            chunk.store(positions)
        if self._phase.first:
            self._look(chunk, positions)

    def keep_exactly(self, slot: ParamId, values: torch.Tensor) -> None:
        """Gives the fp32 master of a parameter `values`, of which the shard has stored what the compute dtype holds."""
        with unrecorded():
            self._chunks[slot[0]].store_exactly(slot[1], values)

    # ------------------------------------------------------------------------------------------ memory of several ranks

    def refuse_shared(self, slots: Iterable[ParamId]) -> None:
        """Raises UsageError if a parameter is in memory that ranks share."""
        for index, position in slots:
            if self._chunks[index].shard.whole is not None:
                raise UsageError(
                    f"parameter {self._chunks[index].names[position]!r} is frozen, and all ranks of this host read "
                    f"one copy of it, so it cannot be written: wrap with a plan of shared_frozen=False to write it"
                )

    def finish_shared_reads(self) -> None:
        """Blocks until this rank reads no memory that ranks share, so that others may write their parts of it."""
        if self._streams.asynchronous and any(chunk.shard.whole is not None for chunk in self._chunks):
            torch.cuda.synchronize(self._chunks[0].device)

    # ------------------------------------------------------------------------------------------- writes without a trace

    def watch(self, chunk: Chunk) -> None:
        """Called when a chunk has been gathered: in the first step, remembers its checksums."""
        if self._phase.first:
            with unrecorded():
                self._look(chunk)

    def _look(self, chunk: Chunk, written: Sequence[int] = ()) -> None:
        """As `Chunk.look`, behind all that may have written; its small memory is used on one stream alone."""
        with self._streams.allocating():
            self._streams.join_compute()
            if chunk.arrived is not None:
                chunk.arrived.wait()
            chunk.look(written)

    def end_backward(self) -> None:
        """Called at the end of a backward: the first one ends the watch."""
        if self._phase.first:
            self.keep_all()
            for chunk in self._chunks:
                chunk.checksums = None
            if not self._streams.asynchronous:  # else the next clip or step waits for it
                self.unseen()

    def unseen(self) -> str | None:
        """The name of a parameter that was written without a trace in the first backward or before; blocks for it."""
        found = [chunk for chunk in self._chunks if chunk.altered is not None]
        if found and self._unseen is None:
            flags = torch.cat([chunk.altered for chunk in found if chunk.altered is not None]).tolist()
            names = [name for chunk in found for name in chunk.names]
            self._unseen = next((name for name, flag in zip(names, flags, strict=True) if flag), None)
        for chunk in found:
            chunk.altered = None
        return self._unseen

    def forget_unseen(self) -> None:
        """Forgets writes without a trace, whose step is given up."""
        self._unseen = None
        for chunk in self._chunks:
            chunk.altered = None

    def fingerprints(self, slots: Iterable[ParamId]) -> dict[ParamId, tuple[int, int]]:
        """`Chunk.fingerprint` of gathered parameters."""
        return {(index, position): self._chunks[index].fingerprint(position) for index, position in slots}

    def refuse_changes(self, before: dict[ParamId, tuple[int, int]]) -> None:
        """Undoes a write without a trace since the fingerprints in `before`, and raises UsageError."""
        for (index, position), now in self.fingerprints(before).items():
            version, values = before[index, position]
            if now[0] == version and now[1] != values:
                self._undo(self._chunks[index])
                raise UsageError(
                    f"parameter {self._chunks[index].names[position]!r} was written through .data or its address "
                    f"inside em.unsharded(...): pass write=True"
                )

    def refuse_different(self, slots: Sequence[ParamId]) -> None:
        """Undoes what was written into gathered parameters, and raises UsageError, if ranks differ. Collective."""
        different: list[tuple[Chunk, int]] = []
        for index in dict.fromkeys(index for index, _ in slots):
            chunk, positions = self._chunks[index], [position for i, position in slots if i == index]
            if chunk.communicator.size > 1:
                with unrecorded(), self._phase.issuing(chunk.label):
                    table = chunk.checksums_by_rank(positions).cpu()
                unlike = (table != table[0]).any(0).tolist()
                different += [(chunk, each) for each, differs in zip(positions, unlike, strict=True) if differs]
        for chunk in dict.fromkeys(chunk for chunk, _ in different):
            chunk.forget_writes()
            self._undo(chunk)
        for chunk, position in different:
            raise UsageError(
                f"parameter {chunk.names[position]!r} has other values on each rank inside em.unsharded(..., "
                f"write=True): every rank must write the same values. Write on all ranks, not on rank 0 alone, from "
                f"the same seed, or broadcast the values before"
            )

    def _undo(self, chunk: Chunk) -> None:
        with unrecorded():
            chunk.checksums = None  # they are said already
            self._store(chunk, [])
            chunk.checksums = None
            chunk.show_home()
        self._phase.torn = True  # the block still has the written values in other ranks' parts
