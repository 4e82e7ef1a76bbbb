"""Activation checkpoints in host memory: what checkpointed regions keep from forward to backward.

Owns the page-locked buffers, the copies, and the order in which tensors come back. `saved_tensors` shows each tensor
that autograd saves; `Plan.host_checkpoints` says how many may leave.

    forward   a region keeps its input: the copy to a buffer begins; the input before it leaves the device
    backward  a region asks for its input: it is there, and the copy of the input before it begins

Copies run beside the regions, and the device holds the inputs of two regions. The last one never has to come back.
Source: ZeRO-Infinity, 5.1.2 (CPU offload of activation checkpoints).
"""

import sys
import weakref
from dataclasses import dataclass

import torch

from elixir_moe.chunks.plan import Tier, size_text
from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import TierError
from elixir_moe.memory.slabs import Slab, host_bytes_left
from elixir_moe.runtime.streams import Streams

_CHECKPOINTING = ("torch.utils.checkpoint", "megatron.core.tensor_parallel.random")
"""Modules whose autograd functions keep the inputs of a region."""
_FRAMES = 3
"""Frames from a pack hook to the one that made the region."""


def kept_by_region(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is the computed input of a checkpointed region; asked within a pack hook.

    Masks, positions and the like have no gradient and are most often shared by all regions: they do not count. Nor do
    subclasses of Tensor, and views with gaps.
    """
    if type(tensor) is not torch.Tensor or tensor.grad_fn is None or not tensor.is_floating_point():
        return False
    files = {sys.modules[name].__file__ for name in _CHECKPOINTING if name in sys.modules}
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_filename in files:
            return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return False


class Away:
    """A tensor in host memory. The last reference to it frees the buffer."""

    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor, free: list[torch.Tensor]) -> None:
        self.size, self.stride = tensor.size(), tensor.stride()
        self.version = tensor._version
        self.written: int | None = None
        """The tensor's version when it left, if that is another one: its values may be lost."""
        self.before: weakref.ref[Away] | None = None
        """The tensor that went away before it, in the same forward."""
        self._buffer, self._free = buffer, free
        self.values = buffer.view(tensor.dtype).as_strided(self.size, self.stride)

    def __del__(self) -> None:
        self._free.append(self._buffer)


@dataclass(slots=True)
class _OnDevice:
    """A tensor on its way."""

    away: Away
    tensor: torch.Tensor
    copied: Work


class HostCheckpoints:
    """The inputs of checkpointed regions of one wrapped model."""

    def __init__(self, most: float, device: torch.device, streams: Streams) -> None:
        """`most`: how many inputs of each forward go to host memory, the first ones."""
        self.nbytes = 0
        """Bytes of the buffers, which are used again in each step."""
        self._most, self._device, self._streams = most, device, streams
        self._free: dict[int, list[torch.Tensor]] = {}
        self._leaving: _OnDevice | None = None
        self._coming: _OnDevice | None = None
        self.begin_forward()

    def begin_forward(self) -> None:
        """Counts from the start: what follows belongs to another forward."""
        self._count = 0
        self._last: weakref.ref[Away] | None = None
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Away]]] = {}

    def take(self, tensor: torch.Tensor) -> Away | None:
        """Starts to copy the input of a region; None if it stays on the device. Raises TierError."""
        seen, known = self._known.get(id(tensor), (None, None))
        if seen is not None and known is not None and seen() is tensor:  # another region has the same input
            found = known()
            if found is not None and found.version == tensor._version:
                return found
        if self._count >= self._most:
            return None
        self._count += 1
        free = self._free.setdefault(tensor.nbytes, [])
        away = Away(tensor, free.pop() if free else self._buffer(tensor.nbytes), free)
        away.before, self._last = self._last, weakref.ref(away)
        self._known[id(tensor)] = weakref.ref(tensor), self._last
        self._leave()
        with self._streams.keeping():
            away.values.copy_(tensor.detach(), non_blocking=True)
            self._leaving = _OnDevice(away, tensor.detach(), self._streams.marked(Work()))
        return away

    def bring_back(self, away: Away) -> torch.Tensor:
        """The tensor, on the device; starts to bring the one before it."""
        if self._leaving is not None and self._leaving.away is away:
            found = self._leaving.tensor
            if found._version != away.version:
                away.written = found._version
        else:
            if self._coming is None or self._coming.away is not away:
                self._fetch(away)
            found = self._arrive()
        before = away.before and away.before()
        if before is not None:
            self._fetch(before)
        return found

    def forget(self) -> None:
        """Lets go of what is on the device; tensors in host memory stay."""
        self._leave()
        if self._coming is not None:
            self._arrive()

    def _leave(self) -> None:
        """Lets the tensor that was copied last go from the device."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._streams.finish_keeping(leaving.tensor, leaving.copied)
            if leaving.tensor._version != leaving.away.version:
                leaving.away.written = leaving.tensor._version

    def _fetch(self, away: Away) -> None:
        if self._coming is not None:
            self._arrive()
        tensor = torch.empty_strided(away.size, away.stride, dtype=away.values.dtype, device=self._device)
        with self._streams.keeping():
            tensor.copy_(away.values, non_blocking=True)
            self._coming = _OnDevice(away, tensor, self._streams.marked(Work()))

    def _arrive(self) -> torch.Tensor:
        coming, self._coming = self._coming, None
        assert coming is not None
        self._streams.finish_keeping(coming.tensor, coming.copied)
        return coming.tensor

    def _buffer(self, nbytes: int) -> torch.Tensor:
        left = host_bytes_left()
        if nbytes > left:
            raise TierError(
                f"host memory: an activation checkpoint needs {size_text(nbytes)}, {size_text(left)} are left "
                f"({size_text(nbytes - left)} short): keep fewer there (host_checkpoints=), or use a smaller batch or "
                f"shorter sequences"
            )
        slab = Slab(nbytes, torch.uint8, Tier.HOST, self._device, travels=self._device.type == "cuda")
        self.nbytes += nbytes
        return slab.take(nbytes)
