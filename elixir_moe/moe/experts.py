"""The networks of a layer: a dense MLP, and many MLPs in stacked parameters.

Owns their parameters, their initial values and their products. Never knows more of ranks than which experts are here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe.accelerator import has_grouped_kernel
from elixir_moe.distributed.async_copy import copy_to_host_async
from elixir_moe.parallel.linear import TensorRanks, linear
from elixir_moe.parallel.meta_tensors import even_counts, has_data, pieces
from elixir_moe.parallel.regather import RegatheredParameter, saves_no_weights
from elixir_moe.torch_private import cpu_has_amx, cpu_has_amx_fp16, cpu_has_avx512_bf16, never_twice


class MLP(nn.Module):
    """Linear, GELU, linear: (..., d) -> (..., d); its hidden features may be sharded over tensor-parallel ranks."""

    def __init__(self, *, d_model: int, d_hidden: int, bias: bool = True, ranks: TensorRanks | None = None) -> None:
        super().__init__()
        self.w_in = linear(d_model, d_hidden, ranks, dim=0, bias=bias)
        self.w_out = linear(d_hidden, d_model, ranks, dim=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return self.w_out(gelu(self.w_in(x)))


@dataclass(kw_only=True, slots=True)
class Groups:
    """Rows sorted by expert."""

    experts: Tensor
    """(n,) int64: the expert of each row, counted from this rank's first."""
    bounds: Tensor
    """(L + 1,) int32: expert e has the rows from ``bounds[e]`` to ``bounds[e + 1]``."""
    counts: list[int] | None = None
    """Rows of each expert; None if the host has not needed them so far."""

    def on_host(self) -> list[int]:
        """Returns `counts`; waits for the device the first time."""
        if self.counts is None and not has_data(self.bounds):
            self.counts = even_counts(len(self.experts), len(self.bounds) - 1)
        elif self.counts is None:
            self.counts = [end - start for start, end in pairwise(copy_to_host_async(self.bounds)())]
        return self.counts


class GroupedExperts(nn.Module):
    """Experts `first_expert` .. `first_expert + num_local` of a layer, each an MLP, in four stacked parameters.

    ``w_in`` (L, d, h), ``b_in`` (L, h), ``w_out`` (L, h, d), ``b_out`` (L, d): expert parallelism cuts dim 0.
    An expert's initial values depend on the layer's seed and on its number in the layer, never on the layout.
    """

    def __init__(
        self, *, d_model: int, d_hidden: int, num_local: int, first_expert: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        self.first_expert = first_expert
        self.w_in = nn.Parameter(torch.empty(num_local, d_model, d_hidden))
        self.w_out = nn.Parameter(torch.empty(num_local, d_hidden, d_model))
        self.b_in = nn.Parameter(torch.empty(num_local, d_hidden)) if bias else None
        self.b_out = nn.Parameter(torch.empty(num_local, d_model)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std_in: float | None = None, std_out: float | None = None) -> None:
        """Draws one seed from the global RNG, then every expert's weights from a generator of its own; biases are zero.

        Standard deviations are ``1 / sqrt(d)`` for ``w_in`` and ``1 / sqrt(h)`` for ``w_out`` by default.
        """
        for bias in (self.b_in, self.b_out):
            if bias is not None:
                nn.init.zeros_(bias)
        if not has_data(self.w_in):
            return
        seed = int(torch.randint(2**62, (), device="cpu").item())
        num_local, d, h = self.w_in.shape
        for i in range(num_local):
            generator = torch.Generator(self.w_in.device).manual_seed(_expert_seed(seed, self.first_expert + i))
            nn.init.normal_(self.w_in[i], std=std_in or 1 / math.sqrt(d), generator=generator)
            nn.init.normal_(self.w_out[i], std=std_out or 1 / math.sqrt(h), generator=generator)

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """(n, d) rows, sorted by expert -> (n, d).

        An expert without rows gets a gradient of zeros. Uses a fused kernel of `torch.nn.functional.grouped_mm` if
        there is one (see `runs_fused`); else a loop, as fast as grouped_mm on a CPU, which loops too.
        """
        rows = rows.to(self.w_in.dtype)
        saves = not saves_no_weights(self)
        hidden = grouped_linear(rows, self.w_in, self.b_in, groups, saves=saves)
        return grouped_linear(gelu(hidden), self.w_out, self.b_out, groups, saves=saves)


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    outputs_first: bool = False,
    saves: bool = True,
) -> Tensor:
    """Multiplies each row by its expert's weight and adds its bias: (n, i) rows sorted by expert -> (n, o).

    The weight is (L, i, o), or with `outputs_first` (L, o, i), in the dtype of the rows; the bias is (L, o). Unless it
    `saves`, backward reads the parameter again.
    """
    counts = None if runs_fused(rows, weight.shape) else groups.on_host()
    return _GroupedLinear.apply(rows, weight, bias, groups, counts, outputs_first, saves)


class _GroupedLinear(torch.autograd.Function):
    """Computes `grouped_linear` by one fused product if `counts` is None, else by a loop with `counts` rows per expert.

    An autograd function, so that each expert's product is written in place and nothing is concatenated: stacking L
    weight gradients took a fifth of a layer's time on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: Groups,
        counts: list[int] | None,
        outputs_first: bool,
        saves: bool,
    ) -> Tensor:
        ctx.again = None if saves else RegatheredParameter(weight)
        ctx.counts, ctx.outputs_first = counts, outputs_first
        kept = rows if ctx.needs_input_grad[1] else None  # only the gradient of the weight needs them
        ctx.save_for_backward(kept, groups.experts, groups.bounds, *([weight] if saves else []))
        matrices = weight.transpose(1, 2) if outputs_first else weight
        if counts is None:
            out = F.grouped_mm(rows, _unit_stride(matrices), offs=groups.bounds[1:])
            return out if bias is None else out.add_(bias.index_select(0, groups.experts))
        out = rows.new_empty(len(rows), matrices.shape[2])
        multiply_each(rows, matrices, counts, out, bias)
        return out

    @staticmethod
    @never_twice
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, experts, bounds, *saved = ctx.saved_tensors
        weight = ctx.again.values() if ctx.again else saved[0]
        grad = grads[0].contiguous()
        if ctx.counts is None:
            found = _gradients_fused(rows, weight, grad, experts, bounds, ctx.outputs_first, ctx.needs_input_grad)
        else:
            found = _gradients_loop(rows, weight, grad, ctx.counts, ctx.outputs_first, ctx.needs_input_grad)
        return *found, None, None, None, None


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of rows, weight and bias; None where none is needed, for example for frozen experts."""


def multiply_each(
    rows: Tensor, matrices: Tensor, counts: Sequence[int], out: Tensor, bias: Tensor | None = None
) -> None:
    """Writes the product of each expert's rows and its matrix (L, i, o), plus its bias, to its rows of `out`."""
    parts, each, outs = rows.split(counts), matrices.unbind(), out.split(counts)  # a view at a time would cost more
    biases = None if bias is None else bias.unbind()
    for e, _ in pieces(counts, rows):
        if counts[e]:
            _product(parts[e], each[e], outs[e], None if biases is None else biases[e])


def _gradients_loop(
    rows: Tensor | None, weight: Tensor, grad: Tensor, counts: list[int], outputs_first: bool, needs: Sequence[bool]
) -> _Gradients:
    inputs, outputs = weight.shape[1:] if not outputs_first else (weight.shape[2], weight.shape[1])
    grad_rows = grad.new_empty(len(grad), inputs) if needs[0] else None
    grad_weight = torch.empty_like(weight) if rows is not None else None
    grad_bias = weight.new_empty(len(weight), outputs) if needs[2] else None
    if grad_rows is not None:
        multiply_each(grad, weight if outputs_first else weight.transpose(1, 2), counts, grad_rows)
    grads = grad.split(counts)
    if grad_weight is not None and rows is not None:  # zeros for an expert without rows
        left, right = (grads, rows.split(counts)) if outputs_first else (rows.split(counts), grads)
        outs = grad_weight.unbind()
        for e, _ in pieces(counts, grad):
            _product(left[e].t(), right[e], outs[e])
    if grad_bias is not None:
        outs = grad_bias.unbind()
        for e, _ in pieces(counts, grad):
            torch.sum(grads[e], dim=0, out=outs[e])
    return grad_rows, grad_weight, grad_bias


def _gradients_fused(
    rows: Tensor | None,
    weight: Tensor,
    grad: Tensor,
    experts: Tensor,
    bounds: Tensor,
    outputs_first: bool,
    needs: Sequence[bool],
) -> _Gradients:
    matrices = weight if outputs_first else weight.transpose(1, 2)
    grad_rows = F.grouped_mm(grad, _unit_stride(matrices), offs=bounds[1:]) if needs[0] else None
    grad_weight = grad_bias = None
    if rows is not None:  # on some GPUs the kernel does not write the gradient of an expert without rows
        idle = (bounds[1:] == bounds[:-1]).view(-1, 1, 1)
        left, right = (grad, rows) if outputs_first else (rows, grad)
        grad_weight = F.grouped_mm(left.t(), right, offs=bounds[1:]).masked_fill_(idle, 0)
    if needs[2]:  # a product with a one-hot matrix sums each expert's rows in fp32, without atomics
        member = torch.arange(len(weight), device=grad.device).unsqueeze(1) == experts
        grad_bias = member.to(grad.dtype) @ grad
    return grad_rows, grad_weight, grad_bias


def _unit_stride(matrices: Tensor) -> Tensor:
    """Returns matrices whose rows or columns are contiguous, which `grouped_mm` needs: peft's factors B are not."""
    return matrices if 1 in matrices.stride()[1:] else matrices.contiguous()


def _product(left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Writes ``left @ right + bias`` to `out`; in fp32, then rounded, if the CPU has no product in a narrower dtype."""
    if out.device.type == "cpu" and has_data(out) and emulates(out.dtype):
        wide = left.float() @ right.float()
        out.copy_(wide if bias is None else wide.add_(bias))
    elif bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias, left, right, out=out)


@cache
def emulates(dtype: torch.dtype) -> bool:
    """Whether torch emulates products of `dtype` on this CPU: bf16 is then 4 times as slow as fp32, fp16 50 times."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    if dtype is torch.bfloat16:
        return not (cpu_has_avx512_bf16() or cpu_has_amx())
    return dtype is torch.float16 and not cpu_has_amx_fp16()


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, with tanh."""
    return F.gelu(x, approximate="tanh")


def _expert_seed(seed: int, expert: int) -> int:
    """Returns a different seed for each expert of a layer; the multiplier is 2^64 over the golden ratio."""
    return (seed + (expert + 1) * 0x9E3779B97F4A7C15) % 2**63


def runs_fused(rows: Tensor, shape: Sequence[int]) -> bool:
    """Whether `grouped_mm` has a fused kernel for these rows and stacked matrices of the same dtype.

    The kernel is for bf16 and 16-byte aligned rows. Elsewhere `grouped_mm` loops, and waits for the device at each
    call to learn the splits.
    """
    if rows.dtype != torch.bfloat16 or not len(rows):
        return False
    return all(n % 8 == 0 for n in shape[1:]) and has_grouped_kernel(rows.device)
