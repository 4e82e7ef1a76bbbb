"""Products with quantized weights, which decode a weight for the product, and again for its backward.

Owns the two autograd functions. They save only the bytes, with ``save_for_backward``, so that saved-tensor hooks see
them, or read them again in backward. Never keeps a decoded weight after a product. Gradients reach inputs and biases;
the weights are frozen.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from elixir_moe.errors import UsageError
from elixir_moe.parallel.meta_tensors import has_data
from elixir_moe.parallel.regather import RegatheredParameter
from elixir_moe.quantized.packed import Packed


def linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, packed: Packed, *, again: bool = False
) -> Tensor:
    """Computes `F.linear`, (..., in) -> (..., out), in the dtype of `x` or autocast's. With `again`, saves no weight.

    If the weight has its own dtype for products (`Packed.computed_in`), that is used even under autocast, and the
    result has the dtype of `x`.
    """
    dtype = computed_in(x, packed)
    out: Tensor = _Linear.apply(x.to(dtype), codes, scales, None if bias is None else bias.to(dtype), packed, again)
    return out if packed.computed_in is None else out.to(x.dtype)


def grouped_linear(
    rows: Tensor, codes: Tensor, scales: Tensor, counts: Sequence[int], packed: Packed, *, again: bool = False
) -> Tensor:
    """Multiplies (n, in) rows sorted by expert by their expert's weight, (out, in) -> (n, out).

    Decodes one expert at a time, and only experts with rows. `counts` are the rows of each expert. With `again`, saves
    no weight.
    """
    if not has_data(rows):  # a trace needs only the sum of products of one size
        counts = [sum(counts)]
    return _GroupedLinear.apply(rows.to(computed_in(rows, packed)), codes, scales, list(counts), packed, again)


def computed_in(x: Tensor, packed: Packed) -> torch.dtype:
    """Returns the dtype of a product of `x` and a weight. Raises UsageError for an input of integers."""
    if not x.is_floating_point():  # weights decoded to integers would be zeros
        raise UsageError(
            f"a product of {x.dtype} with quantized weights: expected an input of a floating dtype; if a module casts "
            f"its input to the dtype of the weight, do not quantize that weight: em.quantize(..., skip=...)"
        )
    if packed.computed_in is not None:
        return packed.computed_in
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64  # autocast does not change fp64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def _keep(ctx: Any, codes: Tensor, scales: Tensor, again: bool) -> None:
    """Keeps the bytes for `_kept`: saved, or to be read again from the parameters."""
    ctx.save_for_backward(*(() if again else (codes, scales)))
    ctx.again = (RegatheredParameter(codes), RegatheredParameter(scales)) if again else ()


def _kept(ctx: Any) -> tuple[Tensor, Tensor]:
    codes, scales = [part.values() for part in ctx.again] or ctx.saved_tensors
    return codes, scales


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, packed: Packed, again: bool
    ) -> Tensor:
        _keep(ctx, codes, scales, again)
        ctx.packed = packed
        return F.linear(x, packed.decode(codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (codes, scales) = grads[0], _kept(ctx)
        rows = grad.reshape(-1, grad.shape[-1])
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.packed.decode(codes, scales, grad.dtype)
            for_x = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[3]:
            for_bias = rows.sum(0)
        return for_x, None, None, for_bias, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, codes: Tensor, scales: Tensor, counts: list[int], packed: Packed, again: bool
    ) -> Tensor:
        _keep(ctx, codes, scales, again)
        ctx.counts, ctx.packed, shape = counts, packed, packed.shape[-2:]
        out = rows.new_empty(len(rows), shape[0])
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                weight = packed.decode(codes[expert], scales[expert], rows.dtype, shape)
                torch.mm(rows[begin : begin + count], weight.t(), out=out[begin : begin + count])
                begin += count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (codes, scales) = grads[0], _kept(ctx)
        shape = ctx.packed.shape[-2:]
        out = grad.new_empty(len(grad), shape[1])
        begin = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                weight = ctx.packed.decode(codes[expert], scales[expert], grad.dtype, shape)
                torch.mm(grad[begin : begin + count], weight, out=out[begin : begin + count])
                begin += count
        return out, None, None, None, None, None
