"""The memory through which weights go to other ranks, and the way back if they cannot all go.

Owns what the parameters were before their weights moved.
"""

import torch
from torch import nn

from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.plan import Tier
from elixir_moe.hf.pretrained import replace_data
from elixir_moe.memory.slabs import allocation
from elixir_moe.parallel.dtensor import local_of

_PIECE_BYTES = 64 << 20
"""Most bytes of weights that are sent to other ranks at once."""
_MOST_ITEMSIZE = 16
"""Bytes of the longest elements, complex numbers of double precision."""


def dtype_moved(chunk: ChunkSpec) -> torch.dtype:
    """The dtype in which weights go to their shards."""
    return torch.float32 if chunk.key.trainable else chunk.key.dtype


class WeightTransfer:
    """A buffer on the device of forward, and each parameter as it was before its weights moved."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Raises TierError: the device has too little memory."""
        sent = [chunk for chunk in layout.chunks if len(chunk.key.ranks) > 1]
        largest = max((slot.numel * dtype_moved(chunk).itemsize for chunk in sent for slot in chunk.slots), default=0)
        nbytes = min(_PIECE_BYTES, -(-largest // _MOST_ITEMSIZE) * _MOST_ITEMSIZE)
        with allocation(nbytes, "weights on their way to other ranks", Tier.DEVICE):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.device = device
        """The device of forward."""
        self._former: list[tuple[torch.Tensor, torch.Tensor]] = []

    def leave(self, parameter: nn.Parameter) -> None:
        """To be called before the parameter loses its data."""
        local = local_of(parameter)
        self._former.append((local, local.detach() if local.is_meta else torch.empty_like(local, device="meta")))

    def undo(self) -> None:
        """Puts parameters whose weights have moved back on meta: as they were, if they were there, or without data."""
        for local, former in self._former:
            replace_data(local, former)
