"""One chunk at run time: a state machine between its home and a block.

Owns the state of a chunk, the views its parameters have of the block, and what parameters are while it is away. Issues
no transfer and no collective: `scheduler` does.

    state      memory beside the home                     may become
    SHARDED    none                                       GATHERING
    GATHERING  a block, being filled                      GATHERED
    GATHERED   a block with values, parameters view it    SHARDED, GRADIENT
    GRADIENT   the same block, values and gradients       REDUCING
    REDUCING   the block until the gradient has left      SHARDED

A chunk that is used in place and shows what its home keeps (`direct`) is GATHERED once, and again after REDUCING. From
wherever a failed step has left it, `restart` leads back.

A gathered parameter has a storage of its own on the block's memory. How often it is in use tells, parameter by
parameter, whether somebody still reads it: a tensor saved for backward, a view in the hands of the user.

A released parameter is one NaN expanded to its shape: shape, dtype and device stay true, no memory is held, and a read
that should not have happened shows. Source: gradients in the place of parameters, Elixir v2, figure 3.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from operator import mul

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from elixir_moe.chunks.collectives import Communicator, Ticket
from elixir_moe.chunks.home import Home
from elixir_moe.chunks.layout import ChunkSpec
from elixir_moe.chunks.rcache import Block, storage_uses
from elixir_moe.errors import ElixirError
from elixir_moe.kernels import host_threads, sum_of_squares
from elixir_moe.parallel.dtensor import local_of, recast


class ChunkState(Enum):
    """What a chunk is doing; see the table above."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"
    GRADIENT = "gradient"
    REDUCING = "reducing"


SHARDED, GATHERING, GATHERED, GRADIENT, REDUCING = ChunkState
"""The states by names of their own: to look a member up in its class is slow, and they are asked for all the time."""

_LEGAL = {
    (SHARDED, GATHERING),
    (GATHERING, GATHERED),
    (GATHERED, SHARDED),
    (GATHERED, GRADIENT),
    (GRADIENT, REDUCING),
    (REDUCING, SHARDED),
    (REDUCING, GATHERED),  # what shows its home keeps showing it
}


class Placeholder:
    """What released parameters look like: one NaN for each dtype, expanded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """That of forward."""
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self.keys: set[int] = set()
        """Storages of the NaNs, as `Block.key`."""

    def like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `parameter`'s shape that holds nothing."""
        nan = self._by_dtype.get(dtype)
        if nan is None:
            fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            nan = self._by_dtype[dtype] = torch.full((), fill, dtype=dtype, device=self.device)
            self.keys.add(nan.untyped_storage().data_ptr())
        return nan.expand(parameter.shape)


@dataclass(slots=True, eq=False)
class Lent:
    """A view of a whole parameter in the hands of user code, which may write through it long after."""

    index: int
    tensor: torch.Tensor
    """Shares the view's storage and version counter."""
    version: int
    """Of the last content that is at home."""
    outdated: bool = False
    """An update has given the parameter values that the view does not show."""


class Chunk:
    """A chunk with its parameters, its home and, while it is in a block, its buffer."""

    def __init__(
        self,
        spec: ChunkSpec,
        parameters: list[torch.nn.Parameter],
        names: list[str],
        home: Home,
        communicator: Communicator,
        placeholder: Placeholder,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        """In the order of `spec.slots`."""
        self.names = names
        self.label = f"chunk {spec.index} ({', '.join(names[:3])})"
        """For messages."""
        self.home = home
        self.communicator = communicator
        self.original_dtypes = [parameter.dtype for parameter in parameters]
        """What the parameters were before `wrap`: what a full state dict gives them back as."""
        for parameter in parameters:
            recast(parameter, spec.key.dtype)
        self.locals = [local_of(parameter) for parameter in parameters]
        """The parameters themselves, or what those that are DTensors hold on this rank."""
        self.device = placeholder.device
        """Where forward runs."""
        self.state = SHARDED
        self.buffer: torch.Tensor | None = None
        """(numel,) in the compute dtype while the chunk is in a block."""
        self.arriving: Ticket | None = None
        """The gather in flight."""
        self.leaving: Ticket | None = None
        """The last reduction; on a GPU it may be under way on its stream when the state is SHARDED again."""
        self.landed: set[int] = set()
        """Indices into `parameters` whose gradient has landed, mostly in the place of their values."""
        self.direct = spec.in_place and home.shows_master
        """What parameters show is at home itself: writes need not be brought there."""
        self.apart = self.direct and spec.key.trainable
        """Gradients land at home too, and not in the place of the values."""
        self._attached = 0
        """Address of the buffer that parameters are views of."""
        self._adds = False
        self._landings: list[torch.Tensor] = []
        self.readers: Counter[int] = Counter()
        """By index into `parameters`: saved tensors of this backward that will be rebuilt from the block."""
        self.lent: list[Lent] = []
        """Views that user code may still hold, of this block or of one the chunk was in before."""
        self.compare = False
        """Somebody writes without a trace: what is in the block is compared with what is at home."""
        self.delayed: dict[int, torch.Tensor] = {}
        """By index into `parameters`: gradients that wait beside the block."""
        self._versions: list[int] = []
        self._sole_uses = storage_uses(torch.zeros(1, device="cpu"))
        self._offsets = [slot.start * spec.key.dtype.itemsize for slot in spec.slots]
        self._placed = [((spec.index, i), offset) for i, offset in enumerate(self._offsets) if spec.slots[i].numel]
        self._placeholders = [placeholder.like(local, spec.key.dtype) for local in self.locals]
        self._views_of = [
            (tuple(t.shape), _contiguous_stride(t.shape), s.start) for s, t in zip(spec.slots, self.locals, strict=True)
        ]
        self.release()
        self.settle()

    def transition(self, to: ChunkState) -> None:
        """Changes the state; asserts that the table allows it."""
        assert (self.state, to) in _LEGAL, f"chunk {self.spec.index}: {self.state.value} -> {to.value} is not legal"
        self.state = to

    def view(self, index: int) -> torch.Tensor:
        """Parameter `index`'s place in the buffer, in its shape."""
        assert self.buffer is not None, f"chunk {self.spec.index} is not in a block"
        return self._place_in(self.buffer, index)

    def _place_in(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        shape, stride, start = self._views_of[index]
        return torch.as_strided(memory, shape, stride, memory.storage_offset() + start)  # one operator, not two

    def addresses(self) -> list[tuple[int, tuple[int, int]]]:
        """(address, (chunk, index)) of every gathered parameter: what its storage is recognised by."""
        assert self.buffer is not None
        base = self.buffer.data_ptr()
        return [(base + offset, slot) for slot, offset in self._placed]

    def attach(self) -> None:
        """Parameters become views of the buffer, each with a storage of its own."""
        present = self._present_versions()
        if self._versions != present and not self.direct:
            index = next(i for i, (then, now) in enumerate(zip(self._versions, present, strict=True)) if then != now)
            raise ElixirError(
                f"parameter {self.names[index]!r} was written through a view of it that is older than its place in "
                f"memory: write to the parameter itself, or take .data or .detach() for it"
            )
        assert self.buffer is not None
        self._attached = self.buffer.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            for index, local in enumerate(self.locals):
                local.data = self._place(index)

    def _place(self, index: int) -> torch.Tensor:
        return from_dlpack(to_dlpack(self.view(index)))

    def release(self) -> None:
        """Parameters become placeholders."""
        with torch._C.DisableTorchFunctionSubclass():
            for local, placeholder in zip(self.locals, self._placeholders, strict=True):
                local.data = placeholder

    def detach(self) -> None:
        """Parameters become placeholders; the buffer is let go."""
        self.release()
        self.buffer = None

    def restart(self) -> None:
        """Leaves the block, whatever the chunk was doing; what shows its home goes on doing so."""
        self.arriving = None
        self.delayed.clear()
        self.landed.clear()
        if not self.direct or self.state is GATHERING:
            self.detach()
            self.settle()
        self.state = SHARDED if self.buffer is None else GATHERED

    def forget(self) -> None:
        """The process groups go, whatever the chunk was doing: nothing is left but its home, without a gradient."""
        self.arriving = self.leaving = None
        self.lent.clear()
        self.delayed.clear()
        self.landed.clear()
        self.home.clear_gradient()
        self.state = SHARDED
        self.detach()

    def lend(self, index: int, view: torch.Tensor) -> None:
        """Notes that user code got `view`, all of parameter `index` with a version counter of its own."""
        if not self.direct:
            self.lent.append(Lent(index, view.detach(), view._version))

    def written(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(index, content) of parameters that user code has written since `settle`, oldest place first."""
        for lent in self.lent:
            if lent.tensor._version != lent.version:
                if lent.outdated:
                    raise ElixirError(
                        f"a view of parameter {self.names[lent.index]!r} taken before the last optimizer.step() was "
                        f"written: it shows old weights; take it anew after each step"
                    )
                yield lent.index, lent.tensor
        if self.buffer is not None:
            for index, (before, now) in enumerate(zip(self._versions, self._present_versions(), strict=True)):
                if before != now and index not in self.landed:
                    yield index, self.view(index)

    def keep_written(self, compare: bool) -> bool:
        """Brings home this rank's part of what user code has written; returns whether there was any.

        `compare` looks for what left no trace, in our part of the block.
        """
        written = list(self.written())
        for index, content in written:
            self.store(index, content)
        if compare:
            start, stop = self.spec.shard_bounds(self.communicator.rank)
            assert self.buffer is not None
            now = self.buffer[start:stop]
            if not self.home.shows(now):
                self.home.store(0, now)
                self.compare = True
                return True
        return bool(written)

    def store(self, index: int, content: torch.Tensor) -> None:
        """Brings home this rank's part of what parameter `index` is now."""
        if self.direct:
            return
        low, high = self.spec.shard_bounds(self.communicator.rank)
        slot = self.spec.slots[index]
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            self.home.store(start - low, content.reshape(-1)[start - slot.start : stop - slot.start])

    def settle(self) -> None:
        """What was written is at home; views that nobody holds any more are forgotten."""
        self._versions = self._present_versions()
        if self.lent:
            places = Counter(_storage(lent.tensor) for lent in self.lent)
            with torch._C.DisableTorchFunctionSubclass():
                places.update(_storage(local) for local in self.locals if self.buffer is not None)
            ours = [self._sole_uses + places[_storage(lent.tensor)] for lent in self.lent]
            self.lent = [lent for lent, n in zip(self.lent, ours, strict=True) if storage_uses(lent.tensor) >= n]
            for lent in self.lent:
                lent.version = lent.tensor._version

    def reseat(self, buffer: torch.Tensor, index: int) -> None:
        """Moves to `buffer`, a copy; views of parameter `index` stay what they are and have no part in it any more."""
        self.buffer = buffer
        self.lent = [lent for lent in self.lent if lent.index != index]
        self.attach()

    def own(self, index: int) -> torch.Tensor | None:
        """What user code has put in the place of parameter `index` (``parameter.data = …``), which is taken back."""
        local = self.locals[index]
        if local.data_ptr() == self._attached + self._offsets[index] or not local.numel():
            return None
        foreign, local.data = local.data, self._place(index)
        return foreign

    def overwritten(self, index: int) -> bool:
        """Whether the gradient of parameter `index` has taken the place of its values."""
        return index in self.landed and not self.apart

    @property
    def at_rest(self) -> ChunkState:
        """The state between two uses."""
        return GATHERED if self.direct else SHARDED

    def expect_gradients(self) -> None:
        """Gradients begin to land: in the place of values, or apart, where they add to what earlier backwards left.

        Of a sum that all ranks have, one keeps it and the others begin at zero, so that it is summed over them once.
        """
        self.transition(GRADIENT)
        if self.apart and self.home.pieces is None:
            if not self._landings:
                self._landings = [self._place_in(self.home.compute, index) for index in range(len(self.parameters))]
            self._adds = self.home.has_gradient
            if self._adds and self.communicator.index:
                self.home.compute.zero_()
        elif self.spec.in_place and not self.apart:
            self.home.overwrite()

    def write_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Puts the gradient of parameter `index` in the place of its values, or adds it to what is there.

        It waits beside the block while somebody still reads the values: a detached use, a retained graph, a graph of
        the gradient itself.
        """
        if self.home.pieces is not None:
            self.home.take_piece(self.spec.slots[index].start, gradient)
        elif self.apart:
            place = self._landings[index]
            place.add_(gradient) if self._adds or index in self.landed else place.copy_(gradient)
            self.landed.add(index)
        elif index in self.delayed or (index not in self.landed and (self.readers[index] or self.in_use(index))):
            self.delay_gradient(index, gradient)
        elif index in self.landed:
            self.view(index).add_(gradient)
        else:
            self.view(index).copy_(gradient)
            self.landed.add(index)

    def delay_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Keeps the gradient of parameter `index` beside the block, which need not be there."""
        self.delayed[index] = self.delayed[index] + gradient if index in self.delayed else gradient

    def complete_gradients(self, block: Block) -> torch.Tensor:
        """Leaves a gradient or zeros in every parameter's place; parameters let go of the block.

        Returns what is to be summed over the ranks, (numel,), for collectives.
        """
        assert self.buffer is not None
        if self.apart:
            for index, place in enumerate(self._landings):
                if index not in self.landed and not self._adds:
                    place.zero_()
            self.landed.clear()
            return self.home.compute
        self.release()
        self.buffer = block.unread(self.buffer)
        for index in range(len(self.parameters)):
            if index in self.delayed:
                self.view(index).copy_(self.delayed.pop(index))
            elif index not in self.landed:
                self.view(index).zero_()
        self.landed.clear()
        self.buffer = None
        return block.wire(self.spec)

    def squares(self) -> float | torch.Tensor:
        """The sum of squares of the gradient at home; a scalar on the device where that is where it was found."""
        if self.home.squares is not None:
            return self.home.squares
        threads = host_threads(self.device)
        return sum(sum_of_squares(part, threads=threads) for part in self.home.gradients())

    def in_use(self, index: int) -> bool:
        """Whether anybody but the parameter itself uses its storage."""
        with torch._C.DisableTorchFunctionSubclass():
            uses = storage_uses(self.locals[index])
            if self.lent:
                uses -= sum(_storage(lent.tensor) == _storage(self.locals[index]) for lent in self.lent)
        return uses > self._sole_uses

    def version(self, index: int) -> int:
        """How often parameter `index` has been written in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameters[index]._version

    def _present_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self.parameters]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next in each dim of a contiguous tensor."""
    strides = accumulate(reversed(shape[1:]), mul, initial=1) if len(shape) else ()
    return tuple(reversed(tuple(strides)))
