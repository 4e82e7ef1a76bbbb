"""Products with quantized weights, which decode a weight for the product, and again for its backward.

Owns the two autograd functions. They save only the bytes, with ``save_for_backward``, so that saved-tensor hooks see
them, or read them again in backward. Never keeps a decoded weight after a product. Gradients reach inputs and biases;
the weights are frozen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from elixir_moe.accelerator import has_grouped_kernel
from elixir_moe.errors import UsageError
from elixir_moe.moe.experts import Groups, multiply_each, runs_fused
from elixir_moe.parallel.meta_tensors import has_data, recordings
from elixir_moe.parallel.regather import RegatheredParameter
from elixir_moe.quantized.formats import decoding_itemsize
from elixir_moe.quantized.packed import Packed

GROUPED_SCRATCH_BYTES = 1 << 30
"""Limits what is decoded at a time for the fused kernel: all 128 experts of a layer of Qwen3-30B-A3B, 32 of gpt-oss."""
LOOP_SCRATCH_BYTES = 1 << 27
"""Limits what is decoded at a time for a product of each expert, which gains nothing from more."""
CPU_SCRATCH_BYTES = 1 << 20
"""Limits what is decoded at a time on a CPU, to what stays in the cache until a product reads it."""


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
    rows: Tensor, codes: Tensor, scales: Tensor, groups: Groups, packed: Packed, *, again: bool = False
) -> Tensor:
    """Multiplies (n, in) rows sorted by expert by their expert's weight, (out, in) -> (n, out).

    One call decodes as many experts as fit in `scratch_bytes`, and a fused kernel, if there is one, multiplies their
    rows at once. The host waits for the number of rows of each expert only if there is no such kernel, or the experts
    do not all fit. If there are fewer rows than experts, only experts with rows are decoded, one at a time. With
    `again`, saves no weight.
    """
    rows = rows.to(computed_in(rows, packed))
    at_once = _experts_at_once(rows, packed.shape)
    fused = at_once > 1 and runs_fused(rows, packed.shape)
    if fused and at_once == len(codes):
        counts = None
    elif has_data(rows):
        counts = groups.on_host()
    else:  # a trace needs only the memory of one decoding and the sum of products of one size
        counts = [len(rows)] + [0] * (len(codes) - 1)
    way = _Way(at_once=at_once, fused=fused, counts=counts)
    return _GroupedLinear.apply(rows, codes, scales, groups.bounds, packed, way, again)


def scratch_bytes(device: torch.device | None, *, grouped_kernel: bool = False) -> int:
    """Returns the most bytes of experts' weights that a product on `device` decodes at a time, or else one expert.

    None stands for an accelerator that is not here, with or without a `grouped_kernel`.
    """
    if device is not None and device.type == "cpu":
        return CPU_SCRATCH_BYTES
    fused = grouped_kernel if device is None else has_grouped_kernel(device)
    return GROUPED_SCRATCH_BYTES if fused else LOOP_SCRATCH_BYTES


def _experts_at_once(rows: Tensor, shape: Sequence[int]) -> int:
    """Returns how many experts of a stack of this shape (experts, out, in) are decoded at a time."""
    experts, *matrix = shape
    if len(rows) < experts:
        return 1
    scratch = scratch_bytes(rows.device) if has_data(rows) else max((r.scratch_bytes for r in recordings()), default=0)
    return min(experts, max(1, scratch // (math.prod(matrix) * decoding_itemsize(rows.dtype))))


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


def _keep(ctx: Any, codes: Tensor, scales: Tensor, again: bool, *others: Tensor) -> None:
    """Keeps the bytes for `_kept`: saved, after `others`, or to be read again from the parameters."""
    ctx.save_for_backward(*others, *(() if again else (codes, scales)))
    ctx.again = (RegatheredParameter(codes), RegatheredParameter(scales)) if again else ()


def _kept(ctx: Any) -> tuple[Tensor, ...]:
    """Returns the `others` of `_keep`, codes and scales."""
    return *ctx.saved_tensors, *(part.values() for part in ctx.again)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How a stack of experts is multiplied."""

    at_once: int
    """Experts that are decoded at a time."""
    fused: bool
    """Whether one fused kernel multiplies their rows, instead of one product for each expert."""
    counts: list[int] | None
    """Rows of each expert; None if all experts are decoded at once for the fused kernel."""


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, codes: Tensor, scales: Tensor, bounds: Tensor, packed: Packed, way: _Way, again: bool
    ) -> Tensor:
        _keep(ctx, codes, scales, again, bounds)
        ctx.packed, ctx.way = packed, way
        return _multiply(rows, codes, scales, bounds, packed, way, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bounds, codes, scales = _kept(ctx)
        grad = _multiply(grads[0], codes, scales, bounds, ctx.packed, ctx.way, transposed=False)
        return grad, None, None, None, None, None, None


def _multiply(
    rows: Tensor, codes: Tensor, scales: Tensor, bounds: Tensor, packed: Packed, way: _Way, *, transposed: bool
) -> Tensor:
    """Multiplies rows by their expert's weight (out, in), with `transposed` (n, in) -> (n, out), else the reverse."""
    if way.counts is None:
        return F.grouped_mm(rows.contiguous(), _decoded(packed, codes, scales, rows.dtype, transposed), offs=bounds[1:])
    out = rows.new_empty(len(rows), packed.shape[-2 if transposed else -1])
    start = 0
    for first in range(0, len(codes), way.at_once):
        experts = slice(first, min(first + way.at_once, len(codes)))
        counts = way.counts[experts]
        here = slice(start, start + sum(counts))
        start = here.stop
        if not any(counts):
            continue
        matrices = _decoded(packed, codes[experts], scales[experts], rows.dtype, transposed)
        if way.fused:
            ends = bounds[experts.start + 1 : experts.stop + 1] - here.start
            out[here] = F.grouped_mm(rows[here].contiguous(), matrices, offs=ends)
        else:
            multiply_each(rows[here], matrices, counts, out[here])
        del matrices  # before the next ones are decoded
    return out


def _decoded(packed: Packed, codes: Tensor, scales: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Decodes experts' weights to (experts, out, in), with `transposed` viewed as (experts, in, out)."""
    weights = packed.decode(codes, scales, dtype, (len(codes), *packed.shape[-2:]))
    return weights.transpose(1, 2) if transposed else weights
