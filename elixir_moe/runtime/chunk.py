"""One chunk of a wrapped model on this rank: its parameters, its shard, and the parameters' places in flat memory.

Owns what stays as it is from `wrap` to `close`, and what its parameters show. `weights` has its gathered weights,
`gradients` its gradients, `writes` what users write; each has one writer. Issues no collective.

A released parameter is one NaN (0 for integers) expanded to its shape: shape, dtype and device stay correct, no memory
is held, and a mistaken read shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from elixir_moe.chunks.packing import ChunkSpec, Piece
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.kernels import host_threads
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.parallel.dtensor import local_of, recast
from elixir_moe.torch_private import DisableTorchFunctionSubclass


class Placeholder:
    """The tensors that released parameters show: one NaN for each dtype, expanded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device of forward."""
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self.addresses: set[int] = set()
        """Addresses of the NaNs' storages."""

    def like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `parameter`'s shape without memory of its own."""
        nan = self._by_dtype.get(dtype)
        if nan is None:
            fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            nan = self._by_dtype[dtype] = torch.full((), fill, dtype=dtype, device=self.device)
            self.addresses.add(nan.untyped_storage().data_ptr())
        return nan.expand(parameter.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk with its parameters and its shard; nothing of it changes after `wrap`."""

    spec: ChunkSpec
    parameters: list[torch.nn.Parameter]
    """In the order of `spec.slots`."""
    names: list[str]
    label: str
    """Its number and first parameters, for messages."""
    shard: ShardState
    communicator: Communicator
    group: str
    """The label of its chunk group, for statistics."""
    original_dtypes: list[torch.dtype]
    """Dtypes of the parameters before `wrap`, which a full state dict restores."""
    locals: list[torch.Tensor]
    """The parameters themselves; for DTensors their local tensors."""
    pieces: tuple[Piece, ...]
    """The elements of each parameter in this rank's shard."""
    _shapes: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    """(shape, stride, start in the chunk) of each parameter."""
    _placeholders: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        spec: ChunkSpec,
        parameters: list[torch.nn.Parameter],
        names: list[str],
        shard: ShardState,
        communicator: Communicator,
        placeholder: Placeholder,
    ) -> Self:
        """Makes the parameters those of the chunk: they get its dtype and become placeholders."""
        dtypes = [parameter.dtype for parameter in parameters]
        for parameter in parameters:
            recast(parameter, spec.key.dtype)
        locals_ = [local_of(parameter) for parameter in parameters]
        shapes = [
            (tuple(t.shape), torch.empty(t.shape, device="meta").stride(), s.start)
            for s, t in zip(spec.slots, locals_, strict=True)
        ]
        chunk = cls(
            spec,
            parameters,
            names,
            f"chunk {spec.index} ({', '.join(names[:3])})",
            shard,
            communicator,
            spec.key.label,
            dtypes,
            locals_,
            spec.pieces_of(communicator.rank),
            shapes,
            [placeholder.like(local, spec.key.dtype) for local in locals_],
        )
        chunk.hide()
        return chunk

    @property
    def device(self) -> torch.device:
        """Where forward runs."""
        return self._placeholders[0].device

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' views of a flat tensor, in their shapes; one operator makes each."""
        offset = memory.storage_offset()
        return [memory.as_strided(shape, stride, offset + start) for shape, stride, start in self._shapes]

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes the parameters these tensors."""
        with DisableTorchFunctionSubclass():
            for local, tensor in zip(self.locals, tensors, strict=True):
                local.data = tensor

    def hide(self) -> None:
        """Makes the parameters placeholders."""
        self.show(self._placeholders)

    def version(self, index: int) -> int:
        """How often parameter `index` has been written in place."""
        with DisableTorchFunctionSubclass():
            return self.parameters[index]._version

    def versions(self) -> list[int]:
        """How often each parameter has been written in place."""
        with DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self.parameters]

    def squares(self) -> float | torch.Tensor:
        """The sum of squares of the gradient in the shard; a scalar on the device if it was computed there."""
        return self.shard.sum_of_squares(host_threads(self.device))

    def own_part(self, memory: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, (shard_numel,)."""
        low, high = self.spec.shard_bounds(self.communicator.rank)
        return memory[low:high]
