"""One chunk at run time: where its weights are gathered, what its parameters show, where its gradients are stored.

Owns the state of the weights, the parameters' views of them, and `Gradients`. Issues no collective: `scheduler` does.

    state      weights are in                             next state
    SHARDED    the shards alone                           GATHERING
    GATHERING  a block or the shard, being filled         GATHERED
    GATHERED   a block or the shard, parameters view it   SHARDED

Gradients are never written into a block that holds weights. An `ATTACHED` chunk is gathered once and stays gathered. A
released parameter is one NaN (0 for integers) expanded to its shape: shape, dtype and device stay correct, no memory is
held, and a mistaken read shows.
"""

import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import accumulate
from operator import mul
from zlib import crc32

import torch

from elixir_moe.chunks.packing import ChunkSpec
from elixir_moe.chunks.residence import ATTACHED, IN_PLACE
from elixir_moe.distributed.collectives import Communicator, Work
from elixir_moe.errors import UsageError
from elixir_moe.kernels import host_threads
from elixir_moe.memory.blocks import Block, ShardBlock
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.parallel.dtensor import local_of, recast
from elixir_moe.torch_private import DisableTorchFunctionSubclass, foreach_copy_


class ChunkState(Enum):
    """The state of a chunk's weights; see the table above."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


SHARDED, GATHERING, GATHERED = ChunkState
"""The members as globals: looking a member up in its class is slow, and they are read all the time."""

_LEGAL = {(SHARDED, GATHERING), (GATHERING, GATHERED), (GATHERED, SHARDED)}


class Placeholder:
    """The tensors that released parameters show: one NaN for each dtype, expanded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device of forward."""
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self.addresses: set[int] = set()
        """Addresses of the NaNs' storages."""

    def like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `parameter`'s shape without memory of its own."""
        nan = self._by_dtype.get(dtype)
        if nan is None:
            fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            nan = self._by_dtype[dtype] = torch.full((), fill, dtype=dtype, device=self.device)
            self.addresses.add(nan.untyped_storage().data_ptr())
        return nan.expand(parameter.shape)


class Gradients:
    """The gradients of one chunk until their reduction, at their parameters' places in a flat tensor."""

    def __init__(
        self,
        chunk: "Chunk",
        memory: torch.Tensor,
        wire: torch.Tensor,
        places: list[torch.Tensor],
        *,
        adds: bool = False,
    ) -> None:
        """`places` are the parameters' views of `memory`. `wire` is the same memory, for collectives.

        `adds`: the memory holds the sum of earlier backwards.
        """
        self._chunk, self._memory, self._wire, self._places, self._adds = chunk, memory, wire, places, adds
        self._copied: set[int] = set()

    def add(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Stores gradients of parameters, given by index, or adds them to earlier ones.

        One launch copies several that all come first.
        """
        indices = [index for index, _ in gradients]
        places = [self._places[index] for index in indices]
        several = len(indices) > 1 and len(set(indices)) == len(indices)
        if several and not self._adds and self._copied.isdisjoint(indices):
            foreach_copy_(places, [gradient for _, gradient in gradients])
            self._copied.update(indices)
            return
        for (index, gradient), place in zip(gradients, places, strict=True):
            (place.add_ if self._adds or index in self._copied else place.copy_)(gradient)
            self._copied.add(index)

    def move_out(self) -> None:
        """Moves the gradients to new memory."""
        self._memory = self._wire = self._memory.clone()
        self._places = self._chunk.places_in(self._memory)

    def complete(self) -> torch.Tensor:
        """Zeroes elements without a gradient; returns the tensor to sum over the ranks, (numel,)."""
        if not self._adds:
            for index, place in enumerate(self._places):
                if index not in self._copied:
                    place.zero_()
            for start, stop in self._chunk.gaps:
                self._memory[start:stop].zero_()
        return self._wire


class Chunk:
    """A chunk with its parameters, its shard and, while it is gathered, its buffer."""

    def __init__(
        self,
        spec: ChunkSpec,
        parameters: list[torch.nn.Parameter],
        names: list[str],
        shard: ShardState,
        communicator: Communicator,
        placeholder: Placeholder,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        """In the order of `spec.slots`."""
        self.names = names
        self.label = f"chunk {spec.index} ({', '.join(names[:3])})"
        """For messages."""
        self.group = spec.key.label
        """The label of its chunk group, for statistics."""
        self.shard = shard
        self.communicator = communicator
        self.original_dtypes = [parameter.dtype for parameter in parameters]
        """Dtypes of the parameters before `wrap`, which a full state dict restores."""
        for parameter in parameters:
            recast(parameter, spec.key.dtype)
        self._weak = [weakref.ref(parameter) for parameter in parameters]
        """Torch swaps no tensors that have weak references: a swap would be lost without a word."""
        self.locals = [local_of(parameter) for parameter in parameters]
        """The parameters themselves; for DTensors their local tensors."""
        self.device = placeholder.device
        """Where forward runs."""
        self.state = SHARDED
        self.buffer: torch.Tensor | None = None
        """(numel,) in the compute dtype while the weights are in a block."""
        self.block: Block | None = None
        """The block of the weights; a chunk that shares no blocks always has the same one."""
        self.arriving: Work | None = None
        """The gather in flight."""
        self.arrived: Work | None = None
        """The gather that has brought the weights; each stream waits for it before it uses them."""
        self.leaving: Work | None = None
        """The last reduction; on a GPU it may still run on its stream."""
        self.gradients: Gradients | None = None
        """Set from `open_gradients` until the reduction."""
        self.loose: list[tuple[int, torch.Tensor]] = []
        """(index, gradient) of gradients not yet copied to the chunk's memory."""
        self.gradient_block: Block | None = None
        """The block of the rCache that holds the gradients."""
        self.holds = 0
        """Number of uses that have not ended; for a chunk that shares no blocks."""
        self.reduced: list[tuple[torch.Tensor, float | torch.Tensor | None]] = []
        """(reduced gradient, sum of squares), waiting until nobody holds the values that the gradient overwrites."""
        self.checksums: torch.Tensor | None = None
        """Of this rank's part of each parameter when somebody last looked for writes that leave no trace."""
        self.altered: torch.Tensor | None = None
        """Whether such a write was found, by parameter; None if nobody has looked."""
        self.frozen_sums: dict[int, int] = {}
        """The part of a frozen parameter's hash that this rank has computed, by index; until a parameter is written."""
        self.gaps = _gaps(spec)
        """(start, stop) of elements that belong to no parameter."""
        self.starts = [slot.start for slot in spec.slots]
        self.pieces = spec.pieces_of(communicator.rank)
        """The elements of each parameter in this rank's shard."""
        self._placeholders = [placeholder.like(local, spec.key.dtype) for local in self.locals]
        self._shapes = [
            (tuple(t.shape), _contiguous_stride(t.shape), s.start) for s, t in zip(spec.slots, self.locals, strict=True)
        ]
        self._show(self._placeholders)
        self._versions = self._present_versions()

    def transition(self, to: ChunkState) -> None:
        """Changes the state; asserts that the table allows it."""
        assert (self.state, to) in _LEGAL, f"chunk {self.spec.index}: {self.state.value} -> {to.value} is not legal"
        self.state = to

    # ---------------------------------------------------------------------------------------------------------- weights

    def places_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' views of a flat tensor, in their shapes; one operator makes each."""
        offset = memory.storage_offset()
        return [memory.as_strided(shape, stride, offset + start) for shape, stride, start in self._shapes]

    def _places_in(self, block: Block, memory: torch.Tensor) -> list[torch.Tensor]:
        """The same, for memory that the chunk has claimed of a block, which keeps them for the next time."""
        return block.places(self.spec.index, memory, self.places_in)

    def attach(self) -> None:
        """Makes the parameters views of the buffer."""
        if self.spec.residence is not ATTACHED:
            self._refuse_old_views()
        assert self.buffer is not None and self.block is not None
        self._show(self._places_in(self.block, self.buffer))

    def detach(self) -> None:
        """Makes the parameters placeholders and drops the buffer."""
        self._show(self._placeholders)
        self.buffer = self.arrived = self.checksums = None

    def _show(self, tensors: Sequence[torch.Tensor]) -> None:
        with DisableTorchFunctionSubclass():
            for local, tensor in zip(self.locals, tensors, strict=True):
                local.data = tensor

    def version(self, index: int) -> int:
        """How often parameter `index` has been written in place."""
        with DisableTorchFunctionSubclass():
            return self.parameters[index]._version

    def written(self) -> list[int]:
        """Indices of the parameters written in place since the last `store`."""
        present = self._present_versions()
        if present == self._versions:
            return []
        return [i for i, (then, now) in enumerate(zip(self._versions, present, strict=True)) if then != now]

    def differ_from_shared(self, indices: Iterable[int]) -> list[int]:
        """Those of these parameters that differ from the memory that ranks share; blocks for the device."""
        assert self.buffer is not None and self.block is not None and self.shard.whole is not None
        shown, shared, places = self.buffer, self.shard.whole, self._places_in(self.block, self.buffer)
        words = _WORDS[shown.itemsize]

        def differs(index: int) -> bool:
            here = slice(self.spec.slots[index].start, self.spec.slots[index].stop)
            with DisableTorchFunctionSubclass():
                if self.locals[index].data_ptr() != places[index].data_ptr():
                    return True
            return not torch.equal(shown[here].view(words), shared[here].to(shown.device).view(words))

        return [index for index in indices if differs(index)]

    def store(self, indices: Iterable[int]) -> None:
        """Copies this rank's part of these parameters from the buffer to the shard; `written` must be among them."""
        for index in indices:
            self._store(index)
        self.forget_writes()  # not before: after an interrupt they are stored again

    def forget_writes(self) -> None:
        """Counts in-place writes so far as stored."""
        self._versions = self._present_versions()

    def _store(self, index: int) -> None:
        assert self.buffer is not None and self.block is not None
        self.frozen_sums.clear()
        local, place = self.locals[index], self._places_in(self.block, self.buffer)[index]
        with DisableTorchFunctionSubclass():
            if local.data_ptr() != place.data_ptr():  # user code gave it other memory: ``parameter.data = …``
                if local.shape != place.shape:
                    raise UsageError(
                        f"parameter {self.names[index]!r} of shape {tuple(place.shape)} was given data of shape "
                        f"{tuple(local.shape)}: its shape is fixed in wrap"
                    )
                local.data = place.copy_(local)
        if self.spec.residence is ATTACHED:
            return
        piece = self.pieces[index]
        if piece.numel:
            self.shard.store(piece.start, self._own_part()[piece.here])

    def store_exactly(self, index: int, values: torch.Tensor) -> None:
        """Copies this rank's part of `values`, those of parameter `index`, to the fp32 master, if there is one."""
        if not self.spec.key.trainable or self.spec.key.dtype is torch.float32:
            return
        piece = self.pieces[index]
        if piece.numel:
            self.shard.weights()[piece.here].write(values.reshape(-1)[piece.there].float())

    def look(self, written: Sequence[int]) -> None:
        """Notes in `altered` which parameters have changed since the last look, but for the `written` ones.

        The first look after a gather only remembers checksums. Everything stays on the device, and nobody waits for it.
        """
        if self.spec.shows_only_weights or self.buffer is None:
            return
        before, self.checksums = self.checksums, self._present_checksums()
        if before is not None:
            changed = before != self.checksums
            for index in written:
                changed[index] = False
            self.altered = changed if self.altered is None else self.altered | changed

    def _present_checksums(self) -> torch.Tensor:
        own = self._own_part()
        return torch.stack([_checksum(own[piece.here]) for piece in self.pieces])

    def _own_part(self) -> torch.Tensor:
        """This rank's part of the buffer, (shard_numel,)."""
        assert self.buffer is not None
        low, high = self.spec.shard_bounds(self.communicator.rank)
        return self.buffer[low:high]

    def fingerprint(self, index: int) -> tuple[int, int]:
        """(version counter of gathered parameter `index`, checksum of its values).

        The checksum is 0 where the buffer is the shard, since writes there need not be stored.
        """
        if self.spec.residence.in_shard:
            return self.version(index), 0
        with torch.no_grad(), DisableTorchFunctionSubclass():
            values = self.locals[index].detach().reshape(-1).view(torch.uint8).cpu()
        return self.version(index), crc32(values.numpy().data)

    def checksums_by_rank(self, indices: Iterable[int]) -> torch.Tensor:
        """(ranks, indices) Checksums of gathered parameters on each rank of the chunk. Collective."""
        indices = list(indices)
        size, device = self.communicator.size, torch.device("cpu") if self.communicator.over_gloo else self.device
        table = torch.zeros(size, len(indices), dtype=torch.int64, device=device)
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for column, index in enumerate(indices):
                table[self.communicator.index, column] = _checksum(self.locals[index].detach().reshape(-1))
        self.communicator.all_gather(table, self.spec.index, of=f"checksums of {self.label}").wait()
        return table

    def show_home(self) -> None:
        """Restores this rank's part of the buffer from the shard, or all of it where ranks share the chunk."""
        self.attach()
        if self.shard.whole is not None:
            assert self.buffer is not None
            self.buffer.copy_(self.shard.whole)
        elif self.spec.residence is not ATTACHED:
            self._own_part().copy_(self.shard.kept_values())

    def moved(self) -> str | None:
        """The name of a gathered parameter that is not in the buffer, as after ``parameter.data = …`` in forward."""
        if self.buffer is None or self.state is not GATHERED:
            return None
        base, size = self.buffer.data_ptr(), self.buffer.itemsize
        with DisableTorchFunctionSubclass():
            for local, start, name in zip(self.locals, self.starts, self.names, strict=True):
                if local.numel() and local.data_ptr() != base + start * size:
                    return name
        return None

    def _refuse_old_views(self) -> None:
        """Raises UsageError if a parameter was written while it was not gathered."""
        for index in self.written():
            raise UsageError(
                f"parameter {self.names[index]!r} was written through a view that was taken before its weights moved: "
                f"write to the parameter itself under torch.no_grad(), or inside `with em.unsharded(parameter, "
                f"write=True)`"
            )

    def _present_versions(self) -> list[int]:
        with DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self.parameters]

    # -------------------------------------------------------------------------------------------------------- gradients

    def open_gradients(self) -> None:
        """Chooses the memory for the gradients of a backward.

        If all ranks already hold a sum, one keeps it and the others start at zero, so that the reduction adds it once.
        """
        if self.spec.residence is ATTACHED:
            memory = self.shard.sum_memory
            if self.shard.has_gradient and self.communicator.index:
                memory.zero_()
            self.gradients = Gradients(self, memory, memory, self.places_in(memory), adds=self.shard.has_gradient)
        elif self.gradient_block is not None:
            memory, wire = self.gradient_block.claim(self.spec), self.gradient_block.wire(self.spec)
            self.gradients = Gradients(self, memory, wire, self._places_in(self.gradient_block, memory))
        else:
            memory = torch.empty(self.spec.numel, dtype=self.spec.key.dtype, device=self.device)
            self.gradients = Gradients(self, memory, memory, self.places_in(memory))

    def copy_loose(self) -> None:
        """Copies the gradients in `loose` to their places."""
        assert self.gradients is not None
        self.gradients.add(self.loose)
        self.loose.clear()

    def add_reduced(self, reduced: torch.Tensor, squares: float | torch.Tensor | None = None) -> None:
        """Adds this rank's part of the reduced gradient to the shard, after the last use of values it overwrites."""
        if self.spec.residence is IN_PLACE:
            if self.holds:
                self.reduced.append((reduced, squares))
                return
            self._make_room()
        self.shard.add_gradient(reduced, squares)

    def _make_room(self) -> None:
        if self.state is GATHERED:
            self.store(self.written())
            self.detach()
            self.transition(SHARDED)
        assert isinstance(self.block, ShardBlock)
        self.block.make_writable()

    def add_waiting(self) -> None:
        """Adds the gradients in `reduced` to the shard once nobody holds the values."""
        if self.reduced and not self.holds:
            waiting, self.reduced = self.reduced, []
            for reduced, squares in waiting:
                self.add_reduced(reduced, squares)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has been reduced since the last update."""
        return self.shard.has_gradient or bool(self.reduced)

    def clear_gradient(self) -> None:
        """Drops the gradient without an update."""
        self.reduced.clear()
        self.shard.clear_gradient()

    def squares(self) -> float | torch.Tensor:
        """The sum of squares of the gradient in the shard; a scalar on the device if it was computed there."""
        return self.shard.sum_of_squares(host_threads(self.device))

    # ------------------------------------------------------------------------------------------------------------ reset

    def reset(self) -> None:
        """Drops gathered weights and gradients that are not reduced yet; the shard stays."""
        self.holds = 0
        self.add_waiting()
        self.arriving = self.gradients = self.gradient_block = None
        self.loose.clear()
        if self.spec.residence is not ATTACHED or self.state is GATHERING:
            self.detach()
            self.state = SHARDED


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_SUMMED_TOGETHER = 1 << 22
"""Words of a checksum that are widened at once, which bounds its temporary memory."""


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of flat values, weighted by place, modulo 2^64; a scalar on their device."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for words in values.view(_WORDS[values.itemsize]).split(_SUMMED_TOGETHER):
        odd = torch.arange(len(words), device=values.device).mul_(2).add_(1)
        total = total * 3 + odd.mul_(words).sum()
    return total


def _gaps(spec: ChunkSpec) -> list[tuple[int, int]]:
    ends = [0, *(slot.stop for slot in spec.slots)]
    starts = [*(slot.start for slot in spec.slots), spec.numel]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next in each dim of a contiguous tensor."""
    strides = accumulate(reversed(shape[1:]), mul, initial=1) if len(shape) else ()
    return tuple(reversed(tuple(strides)))
