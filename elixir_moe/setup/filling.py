"""From a model's weights to its shards: each chunk is filled, broadcast and cut before its `Chunk` is created.

Owns the copy of the values, and the creation of the files for chunks on disk. No rank holds more than one chunk of full
weights besides the model as given.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.plan import Plan, Tier, frozen_bytes
from elixir_moe.distributed.all_ranks import raise_on_all_ranks
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.errors import TierError
from elixir_moe.memory.disk import Spill
from elixir_moe.memory.frozen_disk import FrozenFile
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.runtime.chunk import Chunk, Placeholder
from elixir_moe.runtime.model_spec import ModelSpec
from elixir_moe.state.huggingface import Pretrained, leave_meta


def build_chunks(
    layout: Layout,
    model: ModelSpec,
    shards: Sequence[ShardState],
    communicators: Mapping[tuple[int, ...], Communicator],
    placeholder: Placeholder,
    pretrained: Pretrained | None,
) -> list[Chunk]:
    """Creates the chunks one after another, with the weights of the model in their shards. Collective.

    Parameters and buffers on meta are read from `pretrained`.

    Raises:
        CheckpointError: `pretrained` could not be read; on all ranks.
    """
    if pretrained is not None:
        pretrained.fill_buffers()
    chunks = []
    for spec, shard in zip(layout.chunks, shards, strict=True):
        members = [model.parameters[slot.param] for slot in spec.slots]
        communicator = communicators[spec.key.ranks]
        _move_in(spec, members, shard, communicator, placeholder.device, pretrained)
        names = [model.params[slot.param].name for slot in spec.slots]
        chunks.append(Chunk(spec, members, names, shard, communicator, placeholder))
    if pretrained is not None:
        pretrained.settle()
    return chunks


@torch.no_grad()
def _move_in(
    spec: ChunkSpec,
    members: list[nn.Parameter],
    shard: ShardState,
    communicator: Communicator,
    device: torch.device,
    pretrained: Pretrained | None,
) -> None:
    """Fills a chunk's shard from the parameters of the first rank of its process group, or from a folder."""
    dtype = torch.float32 if spec.key.trainable else spec.key.dtype
    whole = torch.zeros(spec.numel, dtype=dtype, device=device)
    for slot, parameter in zip(spec.slots, members, strict=True):
        local = local_of(parameter)
        place = whole[slot.start : slot.stop].view(local.shape)
        if not local.is_meta:
            place.copy_(local)
            continue
        leave_meta(parameter)
        if pretrained is not None and communicator.index == 0:
            pretrained.fill(place, parameter)
    communicator.broadcast(whole)
    start, stop = spec.shard_bounds(communicator.rank)
    shard.fill(whole[start:stop])


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves all buffers to `device`; a buffer with several names stays shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(buffer, buffer.to(device))


def open_files(plan: Plan, layout: Layout, arrays: int, device: torch.device) -> tuple[Spill | None, FrozenFile | None]:
    """Creates the files for trainable and for frozen chunks on disk; None without such chunks.

    Raises TierError on all ranks if one fails.
    """
    there = [chunk for chunk in layout.chunks if plan.home(layout, chunk) is Tier.DISK]
    numels = [chunk.shard_numel for chunk in there if chunk.key.trainable]
    sizes = [frozen_bytes(chunk) for chunk in there if not chunk.key.trainable]
    if not there:
        return None, None
    assert plan.disk is not None, "checked with the other arguments"
    directory, checked, rank = plan.disk, plan.verify, dist.get_rank()
    spill: Spill | None = None
    frozen: FrozenFile | None = None

    def make() -> None:
        nonlocal spill, frozen
        if numels:
            spill = Spill(directory, numels, arrays, rank=rank, checked=checked)
        if sizes:
            frozen = FrozenFile(directory, sizes, device, rank=rank, checked=checked)

    try:
        raise_on_all_ranks("made the files for chunks on disk", make, error=TierError)
    except BaseException:
        for file in (spill, frozen):
            if file is not None:
                file.close()
        raise
    return spill, frozen
