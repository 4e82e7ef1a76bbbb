"""The fourth stage of `wrap`: weights move to their shards, one parameter, or a few small ones, after another.

Owns the copy of the values. Weights of one rank go straight to a shard in memory. Those of several ranks, or on their
way to disk, are first joined in a buffer. No rank holds more than the largest parameter besides the model as given and
its shards. After each chunk, the model as given loses the chunk's parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.packing import ChunkSpec, Slot
from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.all_ranks import Deferred, raise_on_all_ranks
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.hf.pretrained import Pretrained, become_assignable
from elixir_moe.kernels import host_threads
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.memory.slabs import allocation, bytes_of, copy_on_host, return_freed_memory
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.wrapping.allocate import Allocated
from elixir_moe.wrapping.deferred_init import Record, drawn, record_of
from elixir_moe.wrapping.prepare import Request
from elixir_moe.wrapping.resolve_plan import Resolved
from elixir_moe.wrapping.shared_memory import attributes_of, items_of
from elixir_moe.wrapping.weight_transfer import WeightTransfer, dtype_moved

_RETURN_BYTES = 256 << 20
"""Freed memory is given back to the system after so many bytes."""


def materialize(
    request: Request, resolved: Resolved, allocated: Allocated, pretrained: Pretrained | None
) -> list[Chunk]:
    """Moves buffers to the device, and then creates the chunks, with the model's weights in their shards. Collective.

    Parameters and buffers on meta are read from `pretrained`, or drawn if the model was built under `sharded_init`.

    Raises:
        CheckpointError: `pretrained` could not be read; on all ranks.
        ElixirError: a parameter or a buffer could not be drawn or moved; on all ranks.
    """
    _settle_buffers(request.model, pretrained, request.device)
    layout, spec, transfer = resolved.layout, resolved.spec, allocated.transfer
    request.undo.callback(transfer.undo)
    moving = Deferred("moved their weights")
    sources = _Sources(pretrained, moving, transfer)
    most = max((slot.numel for chunk in layout.chunks for slot in chunk.slots), default=0) // 2
    chunks, freed_bytes = [], 0
    for chunk, shard in zip(layout.chunks, allocated.shards, strict=True):
        members = {slot: spec.parameters[slot.param] for slot in chunk.slots}
        communicator = resolved.communicators[chunk.key.ranks]
        _move_in(chunk, members, shard, communicator, sources, most)
        for parameter in members.values():
            freed_bytes += local_of(parameter).nbytes if local_of(parameter).is_cpu else 0
            transfer.leave(parameter)
            become_assignable(parameter, request.device)
        names = [spec.params[slot.param].name for slot in chunk.slots]
        chunks.append(Chunk.of(chunk, list(members.values()), names, shard, communicator, allocated.placeholder))
        if freed_bytes >= _RETURN_BYTES:
            return_freed_memory()
            freed_bytes = 0
    if pretrained is not None:
        pretrained.finish()
    moving.finish()
    return chunks


def _runs(slots: Iterable[Slot], most: int) -> Iterator[list[Slot]]:
    """Consecutive slots of at most `most` elements together; a longer one by itself."""
    run: list[Slot] = []
    for slot in slots:
        if run and slot.stop - run[0].start > most:
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


@torch.no_grad()
def _move_in(
    chunk: ChunkSpec,
    members: Mapping[Slot, nn.Parameter],
    shard: ShardState,
    communicator: Communicator,
    sources: "_Sources",
    most: int,
) -> None:
    """Copies the parameters of the first rank of the chunk's process group to the shard; at most `most` are joined."""
    run, memory = sources.moving.run, shard.weights_memory
    straight = communicator.size == 1 and memory is not None and memory.dtype == dtype_moved(chunk)
    place = memory if straight else None
    from_device = place is None or any(is_accelerator(local_of(parameter).device) for parameter in members.values())
    if from_device:  # a GPU copies fast only to locked memory
        run(shard.lock)
    if place is not None:
        run(partial(sources.fill, place, members))
        if (values := shard.values_shard) is not None:
            run(partial(sources.copy, values, place))
    else:
        for slots in _runs(chunk.slots, most):
            _move_joined(chunk, {slot: members[slot] for slot in slots}, shard, communicator, sources)
    if not from_device:  # the copy has touched the pages on many threads, which locking would do on one
        run(shard.lock)


def _move_joined(
    chunk: ChunkSpec,
    members: Mapping[Slot, nn.Parameter],
    shard: ShardState,
    communicator: Communicator,
    sources: "_Sources",
) -> None:
    """Copies consecutive parameters of the first rank of the chunk's process group to their places in the shard."""
    start, stop = min(slot.start for slot in members), max(slot.stop for slot in members)
    if start == stop:
        return
    dtype = dtype_moved(chunk)
    values: list[torch.Tensor] = []
    device = sources.transfer.device if communicator.size > 1 or shard.tier is Tier.DEVICE else torch.device("cpu")
    if communicator.index == 0:
        sources.moving.run(lambda: values.append(sources.joined(members, start, stop, dtype, device)))
    first, last = chunk.shard_bounds(communicator.rank)
    for part in sources.parts(values, stop - start, dtype, shared=communicator.size > 1):
        communicator.broadcast(part)
        low, high = max(start, first), min(start + len(part), last)
        if low < high:
            sources.moving.run(partial(shard.fill, part[low - start : high - start], low - first))
        start += len(part)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the values of parameters come from: their memory, a folder, or a drawing."""

    pretrained: Pretrained | None
    moving: Deferred
    transfer: WeightTransfer

    def parts(
        self, values: Sequence[torch.Tensor], numel: int, dtype: torch.dtype, *, shared: bool
    ) -> Iterator[torch.Tensor]:
        """The values in parts that fit the buffer; the buffer itself for values of another rank, or missing ones."""
        length = self.transfer.memory.nbytes // dtype.itemsize if shared else numel
        for start in range(0, numel if shared or values else 0, length):
            part = slice(start, min(start + length, numel))
            yield values[0][part] if values else self.transfer.memory.view(dtype)[: part.stop - start]

    def joined(
        self, members: Mapping[Slot, nn.Parameter], start: int, stop: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Elements `start` to `stop` of a chunk, which are those of `members` and zeros between them."""
        if len(members) == 1 and self.pretrained is None and record_of(local_of(*members.values())) is not None:
            # as it is drawn: the largest parameter is never there twice
            return drawn(local_of(*members.values())).to(device, dtype).flatten()
        tier = Tier.HOST if device.type == "cpu" else Tier.DEVICE
        with allocation((stop - start) * dtype.itemsize, "parameters on their way to shards", tier):
            values = torch.zeros(stop - start, dtype=dtype, device=device)
        self.fill(values, members, start)
        return values

    def fill(self, memory: torch.Tensor, members: Mapping[Slot, nn.Parameter], start: int = 0) -> None:
        """Copies parameters to their places in `memory`, which has the elements of a chunk from `start` on."""
        for slot, parameter in members.items():
            local = local_of(parameter)
            place = memory[slot.start - start : slot.stop - start].view(local.shape)
            copy = partial(self.copy, place)
            if not local.is_meta:
                copy(local)
            elif self.pretrained is not None and self.pretrained.has(parameter):
                self.pretrained.read(parameter, copy)
            else:
                copy(drawn(local))

    def copy(self, place: torch.Tensor, values: torch.Tensor) -> None:
        """Copies to `place`; values for a device are converted there, where torch would convert them on the host."""
        if place.is_cpu and values.is_cpu:
            copy_on_host(place, values, host_threads(self.transfer.device))
        elif place.is_cpu or place.dtype == values.dtype:
            place.copy_(values)
        else:
            place.copy_(values.to(place.device))


def _draw_buffers(model: nn.Module) -> None:
    """Draws buffers and other tensors that modules of `sharded_init` have, also in lists, tuples and dicts."""
    done: dict[int, tuple[Any, Any]] = {id(p): (p, p) for p in model.parameters()}  # what was found, and what it became
    storages: dict[Record, torch.Tensor] = {}

    def with_data(value: Any) -> Any:
        """`value` with what it holds drawn: once, and in the same memory, where it is held twice."""
        if id(value) in done:
            return done[id(value)][1]
        result = value
        if isinstance(value, torch.Tensor) and record_of(value) is not None:
            result = drawn(value, storages)
            if isinstance(value, nn.Parameter):  # no module has registered it
                result = nn.Parameter(result, requires_grad=value.requires_grad)
        done[id(value)] = value, result
        items = items_of(value) if type(value) in (list, dict, tuple) else []
        changed = {at: new for at, item in items if (new := with_data(item)) is not item}
        if changed and type(value) is tuple:
            result = tuple(changed.get(at, item) for at, item in items)
            done[id(value)] = value, result
        elif changed:
            for at, new in changed.items():
                value[at] = new
        return result

    for module in model.modules():
        for tensors, found in ((module._buffers, [*module._buffers.items()]), (module.__dict__, attributes_of(module))):
            for name, value in found:
                if (new := with_data(value)) is not value:
                    tensors[name] = new


def _settle_buffers(model: nn.Module, pretrained: Pretrained | None, device: torch.device) -> None:
    """Moves all buffers to `device`, or none on any rank; a buffer with several names stays shared. Collective.

    Buffers on meta are read from `pretrained` first, or drawn if the model was built under `sharded_init`.

    Raises ElixirError on all ranks if one fails.
    """
    if pretrained is not None:
        pretrained.fill_buffers(lambda buffer: record_of(buffer) is not None)
    moved: dict[torch.Tensor, torch.Tensor] = {}

    def move() -> None:
        _draw_buffers(model)
        for name, buffer in model.named_buffers():
            moved[buffer] = _moved(name, buffer, device)

    raise_on_all_ranks("moved their buffers", move)
    for module in model.modules():
        for name, here in module._buffers.items():
            if here is not None:
                module._buffers[name] = moved[here]


def _moved(name: str, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        with allocation(bytes_of(buffer), f"buffer {name!r}", Tier.DEVICE):
            return buffer.to(device)
    except ElixirError:
        raise
    except Exception as error:
        raise ConfigError(
            f"buffer {name!r}, of {type(buffer).__name__}, cannot be moved to {device} "
            f"({type(error).__name__}: {error}): register a plain tensor"
        ) from error
