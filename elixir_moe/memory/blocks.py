"""The memory of the rCache: blocks, and the check that nobody still reads a block before it is written.

Owns the blocks, and a buffer for each resident chunk. `chunks.cache_policy` decides which chunk gets which block.

A block may be written when the operation that last used it has ended and no tensor shares its storage. The policy only
gives away blocks that nothing holds. The exception is a view of a weight that user code or a checkpointed region keeps:
the view keeps the old storage, and the block gets a new one. That costs memory for a while, counted as
`blocks_replaced`, but the view never shows other bytes. Source: Elixir v1, VI; v2, section 3 ("rCache has n_block
storage blocks of the same length").
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import CACHED, IN_PLACE
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.memory.slabs import allocation
from elixir_moe.torch_private import dispatch_depth, function_depth, storage_uses

Allocating = Callable[[], AbstractContextManager[object]]
_MOST_PLACES = 4096
"""Most views that a block keeps; each takes less than a kilobyte of Python's memory."""


class _Memory:
    """The memory of a block and what is made for it once: one object, so that an interrupt cannot part them."""

    __slots__ = ("flat", "idle_uses", "param_views", "wire")

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat` is uint8, and its storage is nobody else's."""
        self.flat = flat
        self.wire = _own_storage(flat)
        """The block's bytes for collectives."""
        self.idle_uses = storage_uses(flat)
        """Uses of the storage while nobody reads it: by `flat` and `param_views`."""
        self.param_views: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By chunk: the tensor that `Block.claim` returned, and its parameters' views of it."""

    def keep(self, chunk: int, whole: torch.Tensor, made: list[torch.Tensor]) -> None:
        """Keeps `whole`, which is of this memory, and the views `made` of it.

        An interrupt in between leaves `idle_uses` too low. The block then gets other memory, which harms nobody.
        """
        assert whole.data_ptr() == self.flat.data_ptr(), "views of a block's former memory"
        kept = sum(1 + len(views) for _, views in self.param_views.values())
        if kept + len(made) >= _MOST_PLACES:
            self.idle_uses -= kept
            self.param_views.clear()
        self.param_views[chunk] = whole, made
        self.idle_uses += 1 + len(made)


class Block:
    """Device memory for the weights or the gradients of one chunk at a time."""

    def __init__(self, memory: torch.Tensor, statistics: Statistics, allocating: Allocating = nullcontext) -> None:
        """A block on `memory`, flat uint8, whose storage nobody else uses; `allocating` as in `Blocks`."""
        self._statistics = statistics
        self._allocating = allocating
        self._memory = _Memory(memory)
        self.busy: Work | None = None
        """The operation that must end before the block is written again."""
        self._read_later = False
        """A view of the block was left when its chunk was dropped, and may be read after `busy` has ended."""

    def vacate(self, work: Work) -> None:
        """Releases the block, which may be written when `work` has ended and no other tensor shares its storage."""
        self.busy = work
        self._read_later = self._is_read

    @property
    def _is_read(self) -> bool:
        """Whether a tensor of somebody else shares the storage."""
        return storage_uses(self._memory.flat) > self._memory.idle_uses

    @property
    def quiet(self) -> bool:
        """Whether `claim` does not make the host wait."""
        return self.busy is None or not self.busy.pending

    def claim(self, spec: ChunkSpec, wait_for_compute: Callable[[], None] = lambda: None) -> torch.Tensor:
        """The buffer for `spec`'s chunk, (numel,) in its compute dtype, safe to write on the current stream.

        Waits for all compute so far if a view may have been read after `busy` had ended, and before the block gets new
        memory, which may be that of an earlier block and still be read by compute.
        """
        if self.busy is not None:
            self.busy.wait()
            self.busy = None
        kept = self._is_read
        if kept:
            self._replace()
        if kept or self._read_later:
            wait_for_compute()
            self._read_later = False
        if kept:
            self._memory.flat.zero_()
        known = None if _seen_by_modes() else self._memory.param_views.get(spec.index)
        return self._memory.flat[: spec.nbytes].view(spec.key.dtype) if known is None else known[0]

    def param_views(
        self, chunk: int, whole: torch.Tensor, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """The views that `make` returns for `whole`, the memory from `claim`: made once and not to be given away.

        Only the use count tells who reads a block, and it does not tell these views from those of others. While modes
        see them they are made again, and whoever records one is counted.
        """
        if _seen_by_modes():
            return make(whole)
        known = self._memory.param_views.get(chunk)
        if known is None:
            known = whole, make(whole)
            self._memory.keep(chunk, *known)
        return known[1]

    def wire(self, spec: ChunkSpec) -> torch.Tensor:
        """The block's memory for collectives, which may keep their tensors for a moment after they end."""
        return self._memory.wire[: spec.nbytes].view(spec.key.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that belong to the block."""
        return self._memory.flat.nbytes

    def _replace(self) -> None:
        self._statistics.blocks_replaced += 1
        with self._allocating():
            memory = torch.empty_like(self._memory.flat)
        self._memory = _Memory(memory)


class ShardBlock(Block):
    """The shard of a chunk used in place, as a block that holds the values already."""

    def __init__(self, shard: ShardState, statistics: Statistics, allocating: Allocating = nullcontext) -> None:
        super().__init__(_own_storage(shard.storage), statistics, allocating)
        self._shard = shard

    def claim(self, spec: ChunkSpec, wait_for_compute: Callable[[], None] = lambda: None) -> torch.Tensor:
        """The shard's values; `make_writable` protects their readers from a gradient that overwrites them."""
        if self.busy is not None:
            self.busy.wait()
            self.busy = None
        self._shard.values()
        if self._memory.wire.data_ptr() != self._shard.storage.data_ptr():  # an interrupt came before the assignment
            self._memory = _Memory(_own_storage(self._shard.storage))
        return self._memory.flat.view(spec.key.dtype)

    def make_writable(self) -> None:
        """Moves the shard to new memory if anybody still reads the old one."""
        if self._is_read:
            self._replace()

    @property
    def nbytes(self) -> int:
        """0: the bytes are counted with the shard."""
        return 0

    def _replace(self) -> None:
        assert self._shard.spec.residence is IN_PLACE, "no other shard is overwritten by its gradient"
        self._statistics.blocks_replaced += 1
        with self._allocating():
            memory = torch.empty_like(self._memory.flat)
        new = _Memory(memory.copy_(self._memory.flat))
        self._shard.move_to(new.wire)
        self._memory = new


class Blocks:
    """All blocks: those that cached chunks share, and one for each resident chunk."""

    def __init__(
        self,
        layout: Layout,
        count: int,
        for_gradients: int,
        shards: Sequence[ShardState],
        device: torch.device,
        statistics: Statistics,
        allocating: Allocating = nullcontext,
    ) -> None:
        """`allocating`: a context in which memory is allocated that its last reader on the device frees.

        Raises TierError, here and where a block gets other memory: the device has too little.
        """

        @contextmanager
        def replacing(nbytes: int) -> Iterator[None]:
            with allocation(nbytes, "a block in place of one that is still read", Tier.DEVICE), allocating():
                yield

        def block(nbytes: int) -> Block:
            with allocation(nbytes, "a block of the rCache", Tier.DEVICE):
                memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return Block(memory, statistics, partial(replacing, nbytes))

        self.shared = [block(layout.block_bytes) for _ in range(count)]
        self.for_gradients = for_gradients
        """Shared blocks that gradients may use at once; more would leave too few for weights."""
        self.foreseen_gradients = layout.open_gradients or 0
        """Shared blocks that gradients keep even when weights need more."""
        self.own = {
            spec.index: ShardBlock(shard, statistics, partial(replacing, spec.nbytes))
            if spec.residence.in_shard
            else block(spec.nbytes)
            for spec, shard in zip(layout.chunks, shards, strict=True)
            if spec.residence is not CACHED
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks; shards are not counted again."""
        return sum(block.nbytes for block in (*self.shared, *self.own.values()))


def _seen_by_modes() -> bool:
    """Whether torch's modes are on: they see the tensors of each operator, and may keep them."""
    return bool(dispatch_depth() or function_depth())


def _own_storage(memory: torch.Tensor) -> torch.Tensor:
    """A storage of the same bytes, flat uint8, with a use count of its own."""
    return from_dlpack(to_dlpack(memory.view(torch.uint8)))
