"""Activation checkpoints in host memory: what checkpointed regions keep from forward to backward.

Owns the page-locked buffers, the copies, and the order in which tensors come back. `saved_tensors` shows each tensor
that autograd saves; `Plan.host_checkpoints` says how many may leave.

    forward   a region keeps its inputs: their copies to buffers begin; those of the region before leave the device
    backward  a region asks for its inputs: they are there, and the copies of those of the region before begin

Copies run while regions compute, and the device holds the inputs of two regions. Those of the last one need not come
back.
Source: ZeRO-Infinity, 5.1.2 (CPU offload of activation checkpoints).
"""

import weakref
from bisect import bisect_left
from dataclasses import dataclass, field
from inspect import currentframe
from itertools import islice
from traceback import walk_stack

import torch

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.slabs import Slab, check_fits, host_bytes_left
from elixir_moe.runtime.streams import Streams
from elixir_moe.torch_private import FakeTensor, next_sequence_number

_CHECKPOINTING = ("torch.utils.checkpoint", "megatron.core.tensor_parallel.random")
"""Modules whose autograd functions keep the inputs of a region."""
_RELIEF = "keep fewer there (host_checkpoints=), or use a smaller batch or shorter sequences"
_CALLERS = 4
"""Callers of `kept_by_region` up to the one that makes the region: the pack hook, `apply` in Python and in C++."""


def kept_by_region(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is the computed input of a checkpointed region; asked by a pack hook.

    Torch tells a pack hook nothing but the tensor, so the calls that led to it are looked at. Masks, positions and
    the like have no gradient and are most often shared by all regions: they do not count. Nor do subclasses of Tensor,
    except those of a trace, and views with gaps.
    """
    if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.grad_fn is None or not tensor.is_floating_point():
        return False
    callers = islice(walk_stack(currentframe()), 1, 1 + _CALLERS)
    by = {caller.f_globals.get("__name__") for caller, _ in callers}
    return not by.isdisjoint(_CHECKPOINTING) and _without_gaps(tensor)


def _without_gaps(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a piece of memory."""
    if tensor.layout is not torch.strided:
        return False
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return tensor.numel() > 0


@dataclass(slots=True, eq=False)
class _Region:
    """A checkpointed region whose inputs are in host memory."""

    number: int
    before: "_Region | None"
    """The region that ran before it, in the same forward."""
    inputs: list["weakref.ref[OffloadedTensor]"] = field(default_factory=list)


class OffloadedTensor:
    """A tensor in host memory, at the start of a buffer. The last reference to it frees the buffer."""

    def __init__(self, region: _Region, tensor: torch.Tensor, buffer: torch.Tensor, free: list[torch.Tensor]) -> None:
        self.region = region
        self.size, self.stride = tensor.size(), tensor.stride()
        self.version = tensor._version
        self.written: int | None = None
        """The tensor's version when it left, if that is another one: its values may be lost."""
        self._buffer, self._free = buffer, free
        self.values = buffer[: tensor.nbytes].view(tensor.dtype).as_strided(self.size, self.stride)
        region.inputs.append(weakref.ref(self))

    def __del__(self) -> None:
        self._free.append(self._buffer)


@dataclass(slots=True)
class _OnDevice:
    """A tensor that is copied to host memory, or back."""

    tensor: torch.Tensor
    copied: Work


class HostCheckpoints:
    """The inputs of checkpointed regions of one wrapped model."""

    def __init__(self, most: float, device: torch.device, streams: Streams) -> None:
        """`most`: of how many regions of each forward inputs go to host memory, the first ones."""
        self.nbytes = 0
        """Bytes of the buffers, which are used again in each step: at most the most at once, of the largest size."""
        self._most, self._device, self._streams = most, device, streams
        self._free: list[torch.Tensor] = []
        self._leaving: dict[OffloadedTensor, _OnDevice] = {}
        """Inputs of the last region, until the next one begins."""
        self._coming: dict[OffloadedTensor, _OnDevice] = {}
        self._asks: _Region | None = None
        """The region that asked for an input last."""
        weakref.finalize(self, streams.end_keeping).atexit = False  # copies may still use the buffers, which die now
        self.begin_forward()

    def begin_forward(self, *, continues: bool = False) -> None:
        """Counts from the start: what follows belongs to another forward.

        `continues`: the forward takes turns with those before. Backward reverses the order of the regions of all.
        """
        if continues:
            self._may_leave += self._most
            return
        self._count = 0
        self._may_leave: float = self._most
        self._last: _Region | None = None
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[OffloadedTensor]]] = {}

    def offload(self, tensor: torch.Tensor) -> OffloadedTensor | None:
        """Starts to copy the input of a region; None if it stays on the device. Raises TierError."""
        seen, known = self._known.get(id(tensor), (None, None))
        if seen is not None and known is not None and seen() is tensor:  # another region has the same input
            found = known()
            if found is not None and found.version == tensor._version:
                return found
        number = next_sequence_number()  # the same for all inputs of a region, and grows with each region of a thread
        if self._last is None or self._last.number != number:
            self._leave()
            if self._count >= self._may_leave:
                return None
            self._count += 1
            self._last = _Region(number, self._last)
        away = OffloadedTensor(self._last, tensor, self._buffer(tensor.nbytes), self._free)
        self._known[id(tensor)] = weakref.ref(tensor), weakref.ref(away)
        with self._streams.keeping():
            away.values.copy_(tensor.detach(), non_blocking=True)
            self._leaving[away] = _OnDevice(tensor.detach(), self._streams.marked(Work()))
        return away

    def fetch(self, away: OffloadedTensor) -> torch.Tensor:
        """The tensor, on the device. Starts to bring the region's other inputs, and those of the region before."""
        if away.region is not self._asks:
            self._asks = away.region
            self._arrive(kept=away.region)
            for region in (away.region, away.region.before):
                for other in region.inputs if region is not None else ():
                    self._begin_fetch(other())
        if away in self._leaving:
            found = self._leaving[away].tensor
            away.written = None if found._version == away.version else found._version
            return found
        self._begin_fetch(away)
        coming = self._coming.pop(away)
        self._streams.finish_keeping(coming.tensor, coming.copied)
        return coming.tensor

    def forget(self) -> None:
        """Releases the tensors on the device; those in host memory stay."""
        self._leave()
        self._arrive()
        self._asks = None

    def _leave(self) -> None:
        """Lets the inputs of the last region go from the device."""
        while self._leaving:
            away, on_device = self._leaving.popitem()
            self._streams.finish_keeping(on_device.tensor, on_device.copied)
            if on_device.tensor._version != away.version:
                away.written = on_device.tensor._version

    def _begin_fetch(self, away: OffloadedTensor | None) -> None:
        """Starts to bring a tensor, unless it is on the device."""
        if away is None or away in self._leaving or away in self._coming:
            return
        tensor = torch.empty_strided(away.size, away.stride, dtype=away.values.dtype, device=self._device)
        with self._streams.keeping():
            tensor.copy_(away.values, non_blocking=True)
            self._coming[away] = _OnDevice(tensor, self._streams.marked(Work()))

    def _arrive(self, kept: _Region | None = None) -> None:
        """Releases tensors that nobody has asked for, except those of a region."""
        for away in [away for away in self._coming if kept is None or away.region is not kept]:
            coming = self._coming.pop(away)
            self._streams.finish_keeping(coming.tensor, coming.copied)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """The smallest free buffer that is large enough; without one, a new one in place of the largest free one."""
        by_size = sorted((buffer.nbytes, index) for index, buffer in enumerate(self._free))
        enough = bisect_left(by_size, (nbytes, 0))
        if enough < len(by_size):
            return self._free.pop(by_size[enough][1])
        if by_size:
            self._streams.end_keeping()  # a copy may still read the buffer
            self.nbytes -= self._free.pop(by_size[-1][1]).nbytes
        return self._new_buffer(nbytes)

    def _new_buffer(self, nbytes: int) -> torch.Tensor:
        check_fits(nbytes, host_bytes_left(), "an activation checkpoint", relief=_RELIEF)
        slab = Slab(nbytes, torch.uint8, Tier.HOST, self._device, travels=is_accelerator(self._device))
        self.nbytes += nbytes
        return slab.allocate(nbytes)
