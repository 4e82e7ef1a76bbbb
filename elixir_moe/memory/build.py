"""The memory and the files of all shards of a rank.

Owns the allocation: one slab for each tier and dtype, and the parts that each shard is put together from
(`shard_state`). Decides nothing: the plan says in which tier a chunk is.
"""

from collections import defaultdict, deque
from collections.abc import Mapping

import torch

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.ledger import values_bytes
from elixir_moe.chunks.packing import ChunkSpec
from elixir_moe.chunks.plan import Tier, keeps_values, reads_disk
from elixir_moe.memory.disk import DiskStore
from elixir_moe.memory.disk_values import FullDiskShard, ValuesFile
from elixir_moe.memory.gate import Gate
from elixir_moe.memory.gradient_sum import SumApart, SumInMemory, SumOnDisk
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.memory.slabs import LOCKED_BYTES, Slab, allocation, untouched_zeros
from elixir_moe.memory.values import ValuesInMemory, ValuesOnDevice, ValuesOnDisk


def filled_later(spec: ChunkSpec, tier: Tier, device: torch.device) -> bool:
    """Whether a chunk in memory has pages of its own, which the system provides when its weights move there."""
    return not spec.key.trainable and (tier is Tier.HOST or (tier is Tier.DEVICE and device.type == "cpu"))


def build_shards(
    chunks: list[tuple[ChunkSpec, Tier]],
    device: torch.device,
    store: DiskStore | None = None,
    host_sums: HostSums | None = None,
    values: ValuesFile | None = None,
    *,
    values_on_disk: bool = False,
    values_on_device: bool = False,
    shared: Mapping[int, torch.Tensor] | None = None,
    rank: int = 0,
) -> list[ShardState]:
    """Allocates the state of all chunks: one slab for each tier and dtype, several where one would be page-locked
    beyond `LOCKED_BYTES`.

    For chunks on disk, `store` is the file of masters and moments, and `values` that of values: of frozen chunks, and
    with `values_on_disk` of trainable ones too. With `values_on_device`, trainable chunks outside the device have a
    copy of their values on `device`. `shared` has the memory of whole chunks that ranks of this host share:
    the shards of global rank `rank` are parts of it. `host_sums` adds gradients of chunks outside the device tier
    while backward runs.

    With a GPU, host state in the compute dtype has slabs of its own: it is copied to the GPU, and so page-locked.

    Frozen chunks in host memory have no slab. The system provides their pages, and `lock` page-locks them, as the
    weights of one chunk after the other move there. Each chunk frees its part of the model as given, and so the whole
    model and all chunks are never in memory together.
    """
    to_gpu = is_accelerator(device)

    def slab_of(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> tuple[Tier, torch.dtype, bool]:
        return tier, dtype, to_gpu and tier is Tier.HOST and dtype == spec.key.dtype

    wanted: defaultdict[tuple[Tier, torch.dtype, bool], list[int]] = defaultdict(lambda: [0])

    def want(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> None:
        key = slab_of(spec, tier, dtype)
        _, _, travels = key
        last = wanted[key][-1]
        if travels and last and (last + spec.shard_numel) * dtype.itemsize > LOCKED_BYTES:
            wanted[key].append(0)
        wanted[key][-1] += spec.shard_numel

    shared = shared or {}
    for spec, tier in chunks:
        in_memory = not reads_disk(spec, tier, values_on_disk=values_on_disk) and spec.index not in shared
        if in_memory and not filled_later(spec, tier, device):
            want(spec, tier.of_compute, spec.key.dtype)
        if keeps_values(spec, tier, values_on_device=values_on_device):
            want(spec, Tier.DEVICE, spec.key.dtype)
        if spec.key.trainable and tier is not Tier.DISK:
            want(spec, tier, spec.key.dtype if spec.key.master_in_values else torch.float32)
    slabs = {
        (tier, dtype, travels): deque(Slab(numel, dtype, tier, device, travels=travels) for numel in numels)
        for (tier, dtype, travels), numels in wanted.items()
    }

    def allocate(spec: ChunkSpec, tier: Tier, dtype: torch.dtype) -> torch.Tensor:
        left = slabs[slab_of(spec, tier, dtype)]
        while left[0].left < spec.shard_numel:
            left.popleft()
        return left[0].allocate(spec.shard_numel)

    def whole(spec: ChunkSpec) -> ShardState:
        """A chunk with nothing in memory."""
        assert values is not None, "values on disk without a file"
        numel, dtype, nbytes, gate = spec.shard_numel, spec.key.dtype, values_bytes(spec), Gate()
        if not spec.key.trainable:
            place = values.allocate(nbytes, spec.index)
            return ShardState(spec, Tier.DISK, ValuesOnDisk(place, dtype, numel, gate), gate)
        assert store is not None, "chunks on disk without a file"
        place = values.allocate(nbytes, spec.index, store.slice_numel * dtype.itemsize)
        source = ValuesOnDisk(place, dtype, numel, gate)
        disk = FullDiskShard(store, numel, spec.index, source.elements())
        return ShardState(spec, Tier.DISK, source, gate, SumOnDisk(disk, gate, host_sums), disk=disk)

    def in_slab(spec: ChunkSpec, tier: Tier, own: torch.Tensor, gate: Gate) -> ValuesInMemory:
        """The values of a chunk in a slab."""
        if keeps_values(spec, tier, values_on_device=values_on_device):
            return ValuesOnDevice(own, gate, allocate(spec, Tier.DEVICE, spec.key.dtype))
        return ValuesInMemory(own, gate)

    def build(spec: ChunkSpec, tier: Tier) -> ShardState:
        if reads_disk(spec, tier, values_on_disk=values_on_disk):
            return whole(spec)
        if (together := shared.get(spec.index)) is not None:
            gate, (start, stop) = Gate(), spec.shard_bounds(rank)
            return ShardState(spec, tier, ValuesInMemory(together[start:stop], gate), gate, whole=together)
        gate, adder = Gate(), None if tier is Tier.DEVICE else host_sums
        if filled_later(spec, tier, device):
            with allocation(values_bytes(spec), "shards", tier):
                own = untouched_zeros(spec.shard_numel, spec.key.dtype, shown=not to_gpu)
            return ShardState(spec, tier, ValuesInMemory(own, gate, to_lock=to_gpu), gate)
        own = allocate(spec, tier.of_compute, spec.key.dtype)
        if not spec.key.trainable:
            return ShardState(spec, tier, ValuesInMemory(own, gate), gate)
        if tier is Tier.DISK:
            assert store is not None, "chunks on disk without a file"
            disk = store.allocate(spec.shard_numel, spec.index)
            source = in_slab(spec, tier, own, gate)
            return ShardState(spec, tier, source, gate, SumInMemory(None, gate, adder), disk=disk)
        if spec.key.precision.master == "bf16":
            gradient = allocate(spec, tier, spec.key.dtype)
            return ShardState(spec, tier, in_slab(spec, tier, own, gate), gate, SumApart(gradient, gate, adder))
        master = allocate(spec, tier, torch.float32)
        if spec.key.dtype == torch.float32:  # the master is what a gather sends, and the other memory is for gradients
            source, sink = in_slab(spec, tier, master, gate), SumInMemory(own, gate, adder)
        else:
            source, sink = in_slab(spec, tier, own, gate), SumInMemory(None, gate, adder)
        return ShardState(spec, tier, source, gate, sink, master=master)

    return [build(spec, tier) for spec, tier in chunks]
