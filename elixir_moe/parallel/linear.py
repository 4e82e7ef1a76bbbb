"""Linear layers sharded over tensor-parallel ranks: the outputs of one layer, then the inputs of the next.

Owns the slice that a rank holds, its initial values and its pattern, and the two sums over the ranks: of the pair's
outputs in forward, and of the gradients of its input in backward. Never decides which layers to shard.
Source: Megatron-LM, section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.distributed.waits import Wait
from elixir_moe.parallel.meta_tensors import has_data
from elixir_moe.parallel.pattern import Pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRanks:
    """The ranks that share sharded layers; copies of a layer share it, like the process groups."""

    rank: int
    """This rank's place among them."""
    size: int
    """Number of ranks."""
    process_group: dist.ProcessGroup | None
    """None once the process groups are gone: the layer can then be saved, but not run."""

    @classmethod
    def on(cls, mesh: DeviceMesh | None) -> Self | None:
        """Returns the ranks along ``tp`` of a mesh ("dp", "tp"); None if that is a single rank."""
        if mesh is None or mesh.size(1) == 1:
            return None
        return cls(rank=mesh.get_local_rank("tp"), size=mesh.size(1), process_group=mesh.get_group("tp"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class CutLinear(nn.Linear):
    """This rank's part of a linear layer; `in_features` and `out_features` are those of the whole layer.

    Its initial values are those of the whole layer from the same random generator, and advance the generator equally.

    Args:
        d_in: inputs of the whole layer.
        d_out: outputs of the whole layer.
        ranks: the ranks that share the layer.
        dim: the sharded dim of the weight. 0: every rank has the whole input, and computes its part of the outputs;
            1: every rank has its part of the inputs, and computes the whole output.
        pieces: equal ranges of outputs, each sharded separately; 3 for q, k and v in one weight.
        bias: add a bias; with `dim` 1, every rank has all of it.
    """

    def __init__(
        self, d_in: int, d_out: int, ranks: TensorRanks, *, dim: int, pieces: int = 1, bias: bool = True
    ) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.ranks, self.dim, self.pieces = ranks, dim, pieces
        for name, parameter in list(self._cut_parameters()):
            setattr(self, name, nn.Parameter(self._part(parameter)))

    @torch.no_grad()
    def draw_weight(self, std: float) -> None:
        """Draws the whole weight from the global RNG, and keeps this rank's part."""
        whole = torch.empty(self.out_features, self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        self.weight.copy_(self._part(nn.init.normal_(whole, std=std)))

    def patterns(self, mesh: DeviceMesh) -> dict[str, Pattern]:
        """Returns the patterns of the sharded parameters, by name; `mesh` is ("dp", "tp")."""
        patterns = {}
        for name, parameter in self._cut_parameters():
            view = (self.pieces, len(parameter) // self.pieces, *parameter.shape[1:]) if self.pieces > 1 else None
            dim = self.dim if view is None else self.dim + 1
            patterns[name] = Pattern(mesh, replicate=("dp",), shard={"tp": dim}, view=view)
        return patterns

    def forward(self, x: Tensor) -> Tensor:
        """(..., i) -> (..., o), where this rank has its part of i or of o."""
        if self.dim == 0:
            return F.linear(_SumBackward.apply(x, self.ranks), self.weight, self.bias)
        out = _SumForward.apply(F.linear(x, self.weight), self.ranks)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """Returns the text that `print` shows."""
        return f"{super().extra_repr()}, dim {self.dim} cut over {self.ranks.size} ranks"

    def _cut_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight
        if self.dim == 0 and self.bias is not None:
            yield "bias", self.bias

    def _part(self, whole: Tensor) -> Tensor:
        pieces = whole.detach().unflatten(0, (self.pieces, -1))
        part = pieces.chunk(self.ranks.size, 1 + self.dim)[self.ranks.rank].flatten(0, 1)
        return part.clone(memory_format=torch.contiguous_format)  # so that the whole tensor is freed


def linear(
    d_in: int, d_out: int, ranks: TensorRanks | None, *, dim: int, pieces: int = 1, bias: bool = True
) -> nn.Linear:
    """Returns a `CutLinear`, or a plain linear layer without ranks."""
    if ranks is None:
        return nn.Linear(d_in, d_out, bias=bias)
    return CutLinear(d_in, d_out, ranks, dim=dim, pieces=pieces, bias=bias)


class _SumBackward(torch.autograd.Function):
    """The identity for an input that all ranks have; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0].clone(memory_format=torch.contiguous_format), ctx.ranks), None


class _SumForward(torch.autograd.Function):
    """The sum over ranks, in place; its gradient is already the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.mark_dirty(x)
        return _summed(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    if has_data(x):
        group = ranks.process_group
        assert group is not None, "the process groups are gone"
        with Wait("a sum over tensor-parallel ranks", dist.get_process_group_ranks(group)):
            dist.all_reduce(x, group=group)
    return x
