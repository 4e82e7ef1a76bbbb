"""The tensors that autograd saves for backward while a wrapped model runs.

Owns the pair of saved-tensor hooks. A view of gathered weights is packed as (chunk, size, stride, offset) and rebuilt
from the chunk's buffer when it is unpacked, so that the block can be reused in between. The inputs of checkpointed
regions may go to host memory (`host_checkpoints`). All other tensors are kept as torch keeps them, versions checked.
Saved-tensor hooks that user code has set around the model get every saved tensor, weights included.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from elixir_moe.chunks.step_machine import StepMachine
from elixir_moe.errors import PlanError
from elixir_moe.parallel.dtensor import local_of, spec_of, wrap_local
from elixir_moe.parallel.regather import refuse_written
from elixir_moe.runtime.chunk import Placeholder
from elixir_moe.runtime.host_checkpoints import HostCheckpoints, OffloadedTensor, kept_by_region
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.weights import Weights
from elixir_moe.torch_private import DisableTorchFunctionSubclass, running_node, top_saved_tensors_hooks

_PLAIN = (torch.Tensor, nn.Parameter)
_start = attrgetter("start")


class Packed:
    """The data that rebuilds a saved view of gathered weights."""

    __slots__ = ("dtype", "index", "offset", "size", "spec", "stride", "update", "version", "weights")

    def __init__(self, weights: Weights, tensor: torch.Tensor, update: int) -> None:
        self.weights, self.update = weights, update
        self.spec = None
        if type(tensor) not in _PLAIN:
            self.spec, tensor = spec_of(tensor), local_of(tensor)
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        buffer, dtype, chunk = weights.buffer, tensor.dtype, weights.chunk
        assert buffer is not None
        first, self.dtype = self.offset, None
        if dtype is not buffer.dtype:  # user code views the bits of a weight
            first, self.dtype = first * dtype.itemsize // buffer.itemsize, dtype
        self.index = bisect_right(chunk.spec.slots, first - buffer.storage_offset(), key=_start) - 1
        self.version = chunk.version(self.index)

    def view(self) -> torch.Tensor:
        """The tensor, as a view of the weights where they are gathered now."""
        buffer = self.weights.buffer
        assert buffer is not None
        whole = buffer if self.dtype is None else buffer.view(self.dtype)
        view = whole.as_strided(self.size, self.stride, self.offset)
        return view if self.spec is None else wrap_local(view, self.spec)


class SavedTensors:
    """The saved-tensor hooks of one wrapped model."""

    def __init__(
        self,
        scheduler: Scheduler,
        placeholder: Placeholder,
        machine: StepMachine,
        unpacking: Callable[[], None],
        checkpoints: HostCheckpoints | None,
    ) -> None:
        """`unpacking` is called before a weight is rebuilt; `checkpoints` takes what regions keep, if it may leave."""
        self._scheduler = scheduler
        self._placeholder = placeholder
        self._machine = machine
        self._unpacking = unpacking
        self._checkpoints = checkpoints
        self.updates = 0
        """Number of updates so far."""

    def check_current(self, updates: int) -> None:
        """Raises PlanError if there were further updates since the count was `updates`."""
        if updates != self.updates:
            raise PlanError(
                "backward through a forward that ran before the last optimizer.step(): its weights are gone; run the "
                "forward again"
            )

    def hooks(self, *, continues: bool = False) -> saved_tensors_hooks:
        """A context in which weights are packed. `continues`: this forward takes turns with one that has begun."""
        if self._checkpoints is not None:
            self._checkpoints.begin_forward(continues=continues)
        outer = top_saved_tensors_hooks(True)
        if outer is None:
            return saved_tensors_hooks(self._pack, self._unpack)
        pack, unpack = outer
        return saved_tensors_hooks(partial(self._hand_over, pack), unpack)

    def _hand_over(self, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Calls a user's hook with a tensor; instead of a parameter it gets the current values, which it may keep."""
        return pack(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)

    def _is_ours(self, pack: Any) -> bool:
        return getattr(pack.func if isinstance(pack, partial) else pack, "__self__", None) is self

    def _pack(self, tensor: torch.Tensor) -> Any:
        strided = type(tensor) in _PLAIN and tensor.layout is torch.strided
        address = tensor.untyped_storage().data_ptr() if strided else _address_of(tensor)
        if address is not None:
            weights = self._scheduler.gathers.weights_at.get(address)
            if weights is not None and weights.buffer is not None and weights.buffer.data_ptr() == address:
                return Packed(weights, tensor, self.updates)
            if address in self._placeholder.addresses:
                raise PlanError(
                    f"an autograd function saves parameter {self._name_of(tensor)!r} of shape {tuple(tensor.shape)}, "
                    f"which it has not read and which is not gathered: read it in forward, or call its module"
                )
        if self._checkpoints is not None and kept_by_region(tensor):
            away = self._checkpoints.offload(tensor)
            if away is not None:
                return away
        # A saved output would keep its own graph alive, in a cycle that the garbage collector cannot see.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    def _name_of(self, tensor: torch.Tensor) -> str:
        named = (pair for chunk in self._scheduler.chunks for pair in zip(chunk.names, chunk.parameters, strict=True))
        return next((name for name, parameter in named if parameter is tensor or parameter is tensor._base), "unknown")

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                refuse_written(tensor._version, version, tensor.shape)
            return tensor
        if isinstance(packed, OffloadedTensor):
            assert self._checkpoints is not None
            tensor = self._checkpoints.fetch(packed)
            if packed.written is not None:
                refuse_written(packed.written, packed.version, packed.size)
            return tensor
        self.check_current(packed.update)
        chunk = packed.weights.chunk
        version = chunk.version(packed.index)
        if version != packed.version:
            refuse_written(version, packed.version, packed.size)
        if self._machine.backward is None:
            self._unpacking()
        self._machine.unpack(chunk.spec.index, running_node)
        view = packed.view()
        if self._machine.unpacked and running_node() is None:  # user code looks at a saved tensor outside of backward
            self._machine.end_operator()
        return view

    def forget(self) -> None:
        """Called when unfinished work is given up. An interrupt may have left hooks, on their way in or out."""
        while (top := top_saved_tensors_hooks(True)) is not None and self._is_ours(top[0]):
            saved_tensors_hooks(*top).__exit__(None, None, None)
        self._leave_device()

    def updated(self) -> None:
        """Called when the optimizer has written new values."""
        self.updates += 1
        self._leave_device()

    def _leave_device(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.forget()


def _address_of(tensor: torch.Tensor) -> int | None:
    """The address of the storage of a tensor, for a DTensor of its local tensor; None if it may have none."""
    if type(tensor) not in _PLAIN:
        tensor = local_of(tensor)
        if type(tensor) not in _PLAIN and not isinstance(tensor, nn.Parameter):
            return None
    if tensor.layout is not torch.strided:  # a sparse tensor
        return None
    if type(tensor) in _PLAIN:
        return tensor.untyped_storage().data_ptr()
    with DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def leave(hooks: saved_tensors_hooks) -> None:
    """Ends the context of `hooks`, unless an interrupt came before it was entered, or after it was left."""
    if top_saved_tensors_hooks(True) == (hooks.pack_hook, hooks.unpack_hook):
        hooks.__exit__(None, None, None)
