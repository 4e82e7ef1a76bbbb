"""Updates of whole chunks: gathered as weights are, changed as a whole, and brought back as gradients are.

Owns the block that an update takes, and its collectives. They are those of weights and gradients, on the same
communicators: the sum over the ranks has one term for each element that is not zero, and so is exact. To be called
between the last reduction of a step and the first gather of the next one, for one chunk after the other, in the same
order on all ranks. Knows nothing of matrices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, gradients_of
from elixir_moe.chunks.residence import CACHED
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Communicator, Work
from elixir_moe.memory.blocks import Block, Blocks
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.gathers import Gathers
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.streams import Streams
from elixir_moe.spans import span


class WholeUpdates:
    """Brings whole updates together and back, for one wrapped model on one rank."""

    def __init__(
        self,
        gathers: Gathers,
        blocks: Blocks,
        staging: torch.Tensor | None,
        streams: Streams,
        statistics: Statistics,
        phase: Phase,
        communicators: Mapping[tuple[int, ...], Communicator],
        buffer: torch.Tensor | None = None,
    ) -> None:
        """`communicators` are those of chunks and of slices of matrices, by their ranks; `buffer` is host memory for
        updates whose gradients are on disk, flat uint8.
        """
        self.communicators = communicators
        self._gathers, self._blocks, self._staging = gathers, blocks, staging
        self._streams, self._statistics, self._phase = streams, statistics, phase
        self._buffer = buffer

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer in host memory."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def memory(self, chunk: Chunk) -> torch.Tensor:
        """Memory for this rank's part of the update of a chunk, (shard_numel,), until the update of the next one.

        It is that of the gradient, whose place the update takes; where the gradient is on disk, it is the buffer. fp32
        or bf16: an fp16 gradient's memory holds bf16, since an update may be too small for fp16.
        """
        spec = chunk.spec
        if chunk.shard.gradient_comes_along:
            assert self._buffer is not None, "the ledger has counted it"
            return self._buffer[: spec.shard_numel * spec.update_itemsize].view(spec.key.update_dtype)
        gradient = chunk.shard.gradient()
        return gradient.view(torch.bfloat16) if gradient.dtype is torch.float16 else gradient

    def change(self, chunk: Chunk, own: torch.Tensor, change: Callable[[torch.Tensor], None]) -> None:
        """Calls `change` on the gathered update, and puts this rank's part of the sum over the ranks in `own`.

        Args:
            chunk: the chunk; it has no gathered weights.
            own: this rank's part of the update, from `memory`.
            change: works in place on the update of the whole chunk, (numel,).
        """
        spec = chunk.spec
        if spec.residence.in_shard:
            change(own)
            self._add(chunk, own, own)
            return
        with self._block(chunk) as block, span("update", chunk.label):
            whole = block.claim(spec).view(spec.key.update_dtype)[: spec.numel]
            wire = block.wire(spec).view(spec.key.update_dtype)[: spec.numel]
            (chunk.own_part(whole) if spec.shards > 1 else whole).copy_(own)
            if spec.shards > 1:
                self._count(chunk, "all_gather", wire)
                self._exchange(f"the update of {chunk.label}", chunk.communicator.all_gather, wire, spec.index)
            change(whole)
            self._add(chunk, wire, own)
            block.vacate(self._streams.all_compute())

    def join(self, part: torch.Tensor, cuts: Sequence[tuple[tuple[int, ...], int]]) -> torch.Tensor:
        """Returns the whole tensor of which this rank has `part`. Collective over the ranks of each cut.

        Args:
            part: this rank's slice; returned itself if nothing is cut.
            cuts: (ranks, dim on which they have slices), the outermost first.
        """
        for ranks, dim in reversed(cuts):
            communicator = self.communicators[ranks]
            slices = part.new_empty((len(ranks), *part.shape))
            slices[communicator.index].copy_(part)
            self._exchange("the slices of a matrix", communicator.all_gather, slices.view(-1), 0)
            part = torch.cat(list(slices), dim)
        return part

    def _add(self, chunk: Chunk, update: torch.Tensor, own: torch.Tensor) -> None:
        """Sums the `update` over the ranks, and copies this rank's part to `own`."""

        def bring(reduced: torch.Tensor, squares: float | None = None) -> None:
            if reduced is not own:
                own.copy_(reduced)

        communicator, spec, what = chunk.communicator, chunk.spec, f"the update of {chunk.label}"
        if spec.shards == 1:
            if communicator.size > 1:
                self._count(chunk, "all_reduce", update)
            self._exchange(what, communicator.all_reduce, update, bring)
            return
        self._count(chunk, "reduce_scatter", update)
        staging = None
        if communicator.needs_staging(None):
            assert self._staging is not None
            numel = spec.numel if communicator.size > 2 else spec.shard_numel
            staging = self._staging[: numel * update.itemsize].view(update.dtype)
        self._exchange(what, communicator.reduce_scatter, update, staging, bring, tag=spec.index)

    def _exchange(self, what: str, collective: Callable[..., Work], *arguments: Any, **options: Any) -> None:
        """Runs a collective of `what` to its end; an interrupt in it leaves the ranks apart."""
        with self._phase.issuing(what):
            collective(*arguments, of=what, **options).wait()

    def _count(self, chunk: Chunk, kind: str, update: torch.Tensor) -> None:
        self._statistics.collective_bytes[chunk.group, kind] += update.nbytes * (1 + (kind == "all_reduce"))

    @contextmanager
    def _block(self, chunk: Chunk) -> Iterator[Block]:
        """The memory for a gathered chunk, which no weights are in."""
        index = chunk.spec.index
        if chunk.spec.residence is not CACHED:
            yield self._blocks.own[index]
            return
        item = (gradients_of(index),)
        self._gathers.ask(ACQUIRE, item, tracked=False, who=f"the update of {chunk.label}")
        try:
            yield self._blocks.shared[self._gathers.cache.block_of(item[0])]
        finally:
            self._gathers.ask(RELEASE, item, tracked=False, who="a release")
