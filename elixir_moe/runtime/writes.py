"""The writes of user code into gathered weights: stored in the shards, refused, or noticed too late.

Owns the storing of writes before weights leave, and the search for writes that leave no trace: in watched steps by
checksums on the device, in `em.unsharded` by fingerprints. Gathers and drops nothing: `gathers` tells when weights have
come and when they leave.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from elixir_moe.accelerator import api
from elixir_moe.chunks.residence import ATTACHED
from elixir_moe.chunks.step_machine import ParamId
from elixir_moe.errors import UsageError
from elixir_moe.runtime.autograd import unrecorded
from elixir_moe.runtime.phase import WHOLE, Phase
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.weights import GATHERED, Weights
from elixir_moe.torch_private import DisableTorchFunctionSubclass


class _Seen:
    """The known writes to one chunk."""

    def __init__(self, versions: list[int]) -> None:
        self.versions = versions
        """The parameters' versions when writes were last stored."""
        self.checksums: torch.Tensor | None = None
        """Checksums of this rank's part of each parameter at the last look for writes that leave no trace, until the
        weights leave. Frozen weights may stay from one watched step to the next."""
        self.altered: torch.Tensor | None = None
        """Whether such a write was found, by parameter; None if nobody has looked."""
        self.sums: dict[int, int] = {}
        """The results of `kept_sum`, by parameter; until one is written."""


class Writes:
    """The writes of user code into the chunks of one wrapped model on one rank."""

    def __init__(self, weights: Sequence[Weights], streams: Streams, phase: Phase) -> None:
        self._weights, self._streams, self._phase = weights, streams, phase
        self._seen = [_Seen(one.chunk.versions()) for one in weights]
        self._allowed: Counter[ParamId] = Counter()
        """Parameters that user code may write in any way, until it stores them."""
        self._unseen: str | None = None
        """The name of a parameter that was written without a trace in a watched step (as by ``self.weight.data`` in
        forward), or given other memory."""

    # ------------------------------------------------------------------------------------------------ writes are stored

    def keep(self, weights: Weights) -> None:
        """Stores in-place writes to a gathered chunk in its shard.

        Every rank has whole parameters and stores its own part of them.
        """
        if weights.state is not GATHERED:
            return
        with unrecorded():
            self._store(weights, [])
            if self._phase.watched and self._unseen is None and not self._allowed_of(weights):
                self._unseen = weights.moved()

    def keep_all(self, chunks: Iterable[int] | None = None) -> None:
        """Stores in-place writes to those of these chunks that are gathered; by default of all chunks."""
        for weights in self._weights if chunks is None else map(self._weights.__getitem__, chunks):
            self.keep(weights)

    def store(self, slots: Sequence[ParamId]) -> None:
        """Stores the current values of whole gathered parameters."""
        with unrecorded():
            for index in dict.fromkeys(index for index, _ in slots):
                self._store(self._weights[index], [position for i, position in slots if i == index])

    @contextmanager
    def allowing(self, slots: Sequence[ParamId]) -> Iterator[None]:
        """A context in which user code may write gathered parameters in any way; `store` must follow."""
        self._allowed.update(slots)
        try:
            yield
        finally:
            self._allowed.subtract(slots)

    def _allowed_of(self, weights: Weights) -> list[int]:
        """Positions of the parameters that user code may write in any way now."""
        here = weights.chunk.spec.index
        return [position for (index, position), times in self._allowed.items() if index == here and times]

    def store_written(self, weights: Weights) -> None:
        """Stores in-place writes to a chunk used in place, whose values its gradient is about to overwrite."""
        self._copy_home(weights, self._written(weights))

    def _store(self, weights: Weights, positions: list[int]) -> None:
        """Stores the current values of some parameters of a gathered chunk, and in-place writes to its others."""
        chunk = weights.chunk
        index = chunk.spec.index
        positions = list(dict.fromkeys([*positions, *self._written(weights)]))
        if positions and chunk.shard.whole is not None:
            self._streams.join_compute()
            positions = _differ_from_shared(weights, positions)  # `register_parametrization` sets a weight to itself
            self._forget(weights)
            if positions:
                _restore(weights)
            self.refuse_shared((index, position) for position in positions)
        if positions:
            if index in self._phase.early:
                self._forget(weights)  # reported once: `step` continues without them
                self._phase.check(WHOLE, f"a write to parameter {chunk.names[positions[0]]!r}, which is lost,")
            self._streams.join_compute()
            self._copy_home(weights, positions)
        if self._phase.watched or (positions and self._seen[index].checksums is not None):
            self._look(weights, positions)

    def _copy_home(self, weights: Weights, positions: Iterable[int]) -> None:
        """Copies this rank's part of these parameters to the shard; those written must be among them."""
        for position in positions:
            self._copy_one_home(weights, position)
        self._forget(weights)  # not before: after an interrupt they are stored again

    def _copy_one_home(self, weights: Weights, position: int) -> None:
        chunk = weights.chunk
        self._seen[chunk.spec.index].sums.clear()
        local, view = chunk.locals[position], weights.views[position]
        with DisableTorchFunctionSubclass():
            if local.data_ptr() != view.data_ptr():  # user code gave it other memory: ``parameter.data = …``
                if local.shape != view.shape:
                    raise UsageError(
                        f"parameter {chunk.names[position]!r} of shape {tuple(view.shape)} was given data of shape "
                        f"{tuple(local.shape)}: its shape is fixed in wrap"
                    )
                local.data = view.copy_(local)
        if chunk.spec.residence is ATTACHED:
            return
        piece = chunk.pieces[position]
        if piece.numel:
            chunk.shard.store(piece.start, weights.own_part[piece.here])

    def keep_exactly(self, slot: ParamId, values: torch.Tensor) -> None:
        """Gives the fp32 master of a parameter `values`, of which the shard has stored what the compute dtype holds."""
        chunk = self._weights[slot[0]].chunk
        if not chunk.spec.key.trainable or chunk.spec.key.dtype is torch.float32:
            return
        piece = chunk.pieces[slot[1]]
        if piece.numel:
            with unrecorded():
                chunk.shard.weights()[piece.here].write(values.reshape(-1)[piece.there].float())

    def refuse_old_views(self, weights: Weights) -> None:
        """Raises UsageError if a parameter was written while it was not gathered."""
        for position in self._written(weights):
            raise UsageError(
                f"parameter {weights.chunk.names[position]!r} was written through a view that was taken before its "
                f"weights moved: write to the parameter itself under torch.no_grad(), or inside `with "
                f"em.unsharded(parameter, write=True)`"
            )

    def _written(self, weights: Weights) -> list[int]:
        """Positions of the parameters written in place since writes were last stored."""
        then, now = self._seen[weights.chunk.spec.index].versions, weights.chunk.versions()
        return [] if now == then else [i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b]

    def _forget(self, weights: Weights) -> None:
        """Counts in-place writes so far as stored."""
        self._seen[weights.chunk.spec.index].versions = weights.chunk.versions()

    # ------------------------------------------------------------------------------------------------ sums of the shard

    def kept_sum(self, slot: ParamId, compute: Callable[[], int]) -> int:
        """The result of `compute` for this rank's part of a frozen parameter, computed once until somebody writes."""
        sums = self._seen[slot[0]].sums
        if slot[1] not in sums:
            sums[slot[1]] = compute()
        return sums[slot[1]]

    def forget_sums(self, index: int) -> None:
        """Called when a load fills the shard of a chunk."""
        self._seen[index].sums.clear()

    # ------------------------------------------------------------------------------------------ memory of several ranks

    def refuse_shared(self, slots: Iterable[ParamId]) -> None:
        """Raises UsageError if a parameter is in memory that ranks share."""
        for index, position in slots:
            chunk = self._weights[index].chunk
            if chunk.shard.whole is not None:
                raise UsageError(
                    f"parameter {chunk.names[position]!r} is frozen, and all ranks of this host read one copy of it, "
                    f"so it cannot be written: wrap with a plan of shared_frozen=False to write it"
                )

    def finish_shared_reads(self) -> None:
        """Blocks until this rank reads no memory that ranks share, so that others may write their parts of it."""
        if self._streams.asynchronous and any(one.chunk.shard.whole is not None for one in self._weights):
            device = self._weights[0].chunk.device
            api(device).synchronize(device)

    # ------------------------------------------------------------------------------------------- writes without a trace

    def watch(self, weights: Weights) -> None:
        """Called when a chunk has been gathered: in a watched step, remembers its checksums."""
        if self._phase.watched:
            with unrecorded():
                self._look(weights)

    def left(self, weights: Weights) -> None:
        """Called when gathered weights have been dropped."""
        self._seen[weights.chunk.spec.index].checksums = None

    def _look(self, weights: Weights, written: Sequence[int] = ()) -> None:
        """Notes in `altered` which parameters have changed since the last look, but for those `written` or `allowing`.

        The first look after a gather only remembers checksums. Everything stays on the device, behind all that may
        have written, and nobody waits for it. The small memory is used on one stream only.
        """
        chunk = weights.chunk
        seen = self._seen[chunk.spec.index]
        with self._streams.allocating():
            self._streams.join_compute()
            if weights.gather is not None:
                weights.gather.wait()
            if chunk.spec.shows_only_weights or weights.buffer is None:
                return
            own = weights.own_part
            before, seen.checksums = seen.checksums, torch.stack([_checksum(own[p.here]) for p in chunk.pieces])
            if before is not None:
                changed = before != seen.checksums
                for position in (*written, *self._allowed_of(weights)):
                    changed[position] = False
                seen.altered = changed if seen.altered is None else seen.altered | changed
        self._streams.join_compute()  # what follows on the current stream may write what was looked at

    def end_backward(self) -> None:
        """Called at the end of a backward: the first one of a step ends the watch."""
        if self._phase.watched:
            self.keep_all()
            for weights, seen in zip(self._weights, self._seen, strict=True):
                if weights.chunk.spec.key.trainable:  # a step later their weights are others
                    seen.checksums = None
            if not self._streams.asynchronous:  # else the next clip or step waits for it
                self.unseen()

    def unseen(self) -> str | None:
        """The name of a parameter that was written without a trace in a watched step; blocks for it."""
        found = [(w.chunk, seen.altered) for w, seen in zip(self._weights, self._seen, strict=True)]
        altered = [(chunk, flags) for chunk, flags in found if flags is not None]
        if altered and self._unseen is None:
            flags = torch.cat([flags for _, flags in altered]).tolist()
            names = [name for chunk, _ in altered for name in chunk.names]
            self._unseen = next((name for name, flag in zip(names, flags, strict=True) if flag), None)
        for seen in self._seen:
            seen.altered = None
        return self._unseen

    def forget_unseen(self) -> None:
        """Forgets writes without a trace, whose step is given up."""
        self._unseen = None
        for seen in self._seen:
            seen.altered = None

    def fingerprints(self, slots: Iterable[ParamId]) -> dict[ParamId, tuple[int, int]]:
        """{slot: (version counter, checksum of the values)} of gathered parameters.

        The checksum is 0 where the buffer is the shard, since writes there need not be stored.
        """

        def checksum(slot: ParamId) -> int:
            chunk = self._weights[slot[0]].chunk
            if chunk.spec.residence.in_shard:
                return 0
            with torch.no_grad(), DisableTorchFunctionSubclass():
                return crc32(chunk.locals[slot[1]].detach().reshape(-1).view(torch.uint8).cpu().numpy().data)

        return {slot: (self._weights[slot[0]].chunk.version(slot[1]), checksum(slot)) for slot in slots}

    def refuse_changes(self, before: dict[ParamId, tuple[int, int]]) -> None:
        """Undoes a write without a trace since the fingerprints in `before`, and raises UsageError."""
        for (index, position), now in self.fingerprints(before).items():
            version, values = before[index, position]
            if now[0] == version and now[1] != values:
                self._undo(self._weights[index])
                raise UsageError(
                    f"parameter {self._weights[index].chunk.names[position]!r} was written through .data or its "
                    f"address inside em.unsharded(...): pass write=True"
                )

    def refuse_different(self, slots: Sequence[ParamId]) -> None:
        """Undoes what was written into gathered parameters, and raises UsageError, if ranks differ. Collective."""
        different: list[tuple[Weights, int]] = []
        for index in dict.fromkeys(index for index, _ in slots):
            weights, positions = self._weights[index], [position for i, position in slots if i == index]
            if weights.chunk.communicator.size > 1:
                with unrecorded(), self._phase.issuing(weights.chunk.label):
                    table = _checksums_by_rank(weights, positions).cpu()
                unlike = (table != table[0]).any(0).tolist()
                different += [(weights, each) for each, differs in zip(positions, unlike, strict=True) if differs]
        for weights in dict.fromkeys(weights for weights, _ in different):
            self._forget(weights)
            self._undo(weights)
        for weights, position in different:
            raise UsageError(
                f"parameter {weights.chunk.names[position]!r} has other values on each rank inside em.unsharded(..., "
                f"write=True): every rank must write the same values. Write on all ranks, not only on rank 0, from "
                f"the same seed, or broadcast the values before"
            )

    def _undo(self, weights: Weights) -> None:
        seen = self._seen[weights.chunk.spec.index]
        with unrecorded():
            seen.checksums = None  # they are reported already
            self._store(weights, [])
            seen.checksums = None
            _restore(weights)
        self._phase.aborted = True  # the block still has the written values in other ranks' parts


def _restore(weights: Weights) -> None:
    """Restores this rank's part of the buffer from the shard, or all of it where ranks share the chunk."""
    weights.attach()
    shard = weights.chunk.shard
    if shard.whole is not None:
        assert weights.buffer is not None
        weights.buffer.copy_(shard.whole)
    elif weights.chunk.spec.residence is not ATTACHED:
        weights.own_part.copy_(shard.kept_values())


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_WORD_BYTES = 8
_COLUMNS = 1 << 12
"""The words of a checksum are a table of so many columns, whose sums need no temporary copy."""


def _differ_from_shared(weights: Weights, positions: Iterable[int]) -> list[int]:
    """The ones of these parameters that differ from the memory that ranks share; blocks for the device."""
    chunk, shown, shared, views = weights.chunk, weights.buffer, weights.chunk.shard.whole, weights.views
    assert shown is not None and shared is not None
    words = _WORDS[shown.itemsize]

    def differs(position: int) -> bool:
        here = slice(chunk.spec.slots[position].start, chunk.spec.slots[position].stop)
        with DisableTorchFunctionSubclass():
            if chunk.locals[position].data_ptr() != views[position].data_ptr():
                return True
        return not torch.equal(shown[here].view(words), shared[here].to(shown.device).view(words))

    return [position for position in positions if differs(position)]


def _checksums_by_rank(weights: Weights, positions: Sequence[int]) -> torch.Tensor:
    """(ranks, positions) Checksums of gathered parameters on each rank of the chunk. Collective."""
    chunk = weights.chunk
    communicator = chunk.communicator
    device = torch.device("cpu") if communicator.over_gloo else chunk.device
    table = torch.zeros(communicator.size, len(positions), dtype=torch.int64, device=device)
    with torch.no_grad(), DisableTorchFunctionSubclass():
        for column, position in enumerate(positions):
            table[communicator.index, column] = _checksum(chunk.locals[position].detach().reshape(-1))
    communicator.all_gather(table, chunk.spec.index, of=f"checksums of {chunk.label}").wait()
    return table


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of flat values, weighted by place, modulo 2^64; a scalar on their device.

    Each place has an odd weight of its own, so that no change of a single word leaves the sum as it was.
    """
    if len(values) < _COLUMNS:
        return _weighted(values.view(_WORDS[values.itemsize]), 1, 2)
    of_word = max(1, _WORD_BYTES // values.itemsize)
    if values.storage_offset() % of_word:  # user code gave it other memory; chunks align their parameters
        values = values.clone()
    last = len(values) - len(values) % of_word
    words = values[:last].view(torch.int64)
    whole = len(words) - len(words) % _COLUMNS
    rest = torch.cat((words[whole:], values[last:].view(_WORDS[values.itemsize])))
    total = _weighted(rest, -1, -2)
    if whole:
        table = words[:whole].view(-1, _COLUMNS)
        row = 2 * (_COLUMNS + 1)
        total += _weighted(table.sum(0), 1, 2) + _weighted(table.sum(1), row, row)
    return total


def _weighted(words: torch.Tensor, first: int, step: int) -> torch.Tensor:
    weights = torch.arange(first, first + step * len(words), step, device=words.device)
    return weights.mul_(words).sum()
