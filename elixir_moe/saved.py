"""What autograd saves for backward, while a wrapped model runs.

Owns the pair of saved-tensor hooks. A tensor that views a gathered parameter is packed as (chunk, parameter, size,
stride, offset) and rebuilt from wherever the chunk is when it is unpacked, so that its block can be reused meanwhile.
All others are kept as torch keeps them, versions checked; hooks that somebody else has set around the model get them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from elixir_moe.chunks.chunk import Chunk, Placeholder
from elixir_moe.chunks.scheduler import Scheduler
from elixir_moe.errors import PlanError
from elixir_moe.parallel.dtensor import local_of, spec_of, wrap_local

_PLAIN = (torch.Tensor, nn.Parameter)


class Packed:
    """A saved tensor that was a view of a gathered parameter: what it takes to rebuild it.

    While it lives its parameter has a reader (`Chunk.readers` counts them), whose gradient must not overwrite it yet.
    """

    __slots__ = ("_readers", "chunk", "dtype", "index", "offset", "size", "spec", "stride", "update", "version")

    def __init__(self, chunk: Chunk, index: int, tensor: torch.Tensor, update: int) -> None:
        chunk.readers[index] += 1
        self._readers, self.index = chunk.readers, index
        self.chunk = chunk
        self.spec = None
        if type(tensor) not in _PLAIN:
            self.spec, tensor = spec_of(tensor), local_of(tensor)
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.update = update
        self.version = chunk.version(index)

    def __del__(self) -> None:
        self._readers[self.index] -= 1

    def view(self) -> torch.Tensor:
        """The tensor, as a view of the parameter where it is gathered now."""
        with torch._C.DisableTorchFunctionSubclass():
            whole = self.chunk.locals[self.index].data.view(self.dtype)
        return wrap_local(whole.as_strided(self.size, self.stride, self.offset), self.spec)


class SavedTensors:
    """The saved-tensor hooks of one wrapped model."""

    def __init__(self, scheduler: Scheduler, placeholder: Placeholder, unpacking: Callable[[], None]) -> None:
        """Makes the hooks; `unpacking` is called before a weight is rebuilt."""
        self._scheduler = scheduler
        self._placeholder = placeholder
        self._unpacking = unpacking
        self.updates = 0
        """Number of updates so far."""

    def check_current(self, updates: int) -> None:
        """Raises PlanError if there have been updates since there were so many."""
        if updates != self.updates:
            raise PlanError(
                "backward through a forward that ran before the last optimizer.step(): its weights are gone; run the "
                "forward again"
            )

    def hooks(self) -> saved_tensors_hooks:
        """A context in which weights are packed."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            return saved_tensors_hooks(self._pack, self._unpack)
        pack, unpack = outer
        return saved_tensors_hooks(lambda tensor: pack(self._lasting(tensor)), unpack)

    def _lasting(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter's values as they are now, for hooks that keep what they are given."""
        return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor

    def _pack(self, tensor: torch.Tensor) -> Any:
        local = tensor if type(tensor) in _PLAIN else local_of(tensor)
        if type(local) in _PLAIN or isinstance(local, nn.Parameter):  # others may have no storage of their own
            address = local.untyped_storage().data_ptr()
            owner = self._scheduler.owners.get(address)
            if owner is not None:
                chunk, index = owner
                return Packed(self._scheduler.chunks[chunk], index, tensor, self.updates)
            if address in self._placeholder.keys:
                raise PlanError(
                    f"an autograd function saves parameter {self._name_of(tensor)!r} of shape {tuple(tensor.shape)}, "
                    f"which it has not read and which is not gathered: read it in forward, or call its module"
                )
        # An output that is saved as it is would keep its own graph alive, beyond the reach of the garbage collector.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    def _name_of(self, tensor: torch.Tensor) -> str:
        named = (pair for chunk in self._scheduler.chunks for pair in zip(chunk.names, chunk.parameters, strict=True))
        return next((name for name, parameter in named if parameter is tensor or parameter is tensor._base), "unknown")

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Packed):
            tensor, version = packed
            if tensor._version != version:
                _refuse_written(tensor._version, version, tensor.shape)
            return tensor
        self.check_current(packed.update)
        chunk = packed.chunk
        version = chunk.version(packed.index)
        if version != packed.version:
            _refuse_written(version, packed.version, packed.size)
        self._unpacking()
        if chunk.direct or self._scheduler.requests.holds(chunk.spec.index):
            return packed.view()
        chunks = (chunk.spec.index,)
        self._scheduler.unshard(chunks, tracked=True, who="backward")
        view = packed.view()
        self._scheduler.release(chunks, tracked=True)
        return view


def _refuse_written(now: int, then: int, shape: torch.Size) -> NoReturn:
    """What torch does for tensors saved without hooks."""
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {list(shape)} is at version {now}; expected version {then} instead"
    )
