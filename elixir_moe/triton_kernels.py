"""The kernels in Triton: the decoders of quantized weights, and Adam's step in one pass.

Owns three kernels, with the arguments and the bits of those in csrc/. Never imported without a GPU: importing it needs
triton, and `kernels.triton_on` imports it at the first use. Each decoded weight is one fp32 product, rounded once by
the store. Adam's operations are rounded one by one, fused multiply-adds only where csrc/adam.hpp has them.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from elixir_moe.accelerator import api

NUMEL = 2048
"""Elements that one program decodes."""
COLS = 128
"""Columns of a matrix that one program decodes; they share a scale."""
ADAM_NUMEL = 1024
"""Elements that one program updates: 4 per thread, which loads and stores 16 bytes of fp32 at once."""
ADAM_WARPS = 8
ALIGNED = 16
"""Triton moves several elements at once only if it knows that the mask ends at a multiple of this."""


def decode_nibbles(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor, *, block: int, high_first: bool) -> None:
    """Writes ``values[code] * scale`` to a flat array, as `quantized.decoders`; a block is a power of two."""
    programs = triton.cdiv(out.numel(), NUMEL)
    sizes = {"BLOCK": block, "HIGH_FIRST": high_first, "AT_ONCE": NUMEL // block}
    with api(out.device).device_of(out):  # Triton launches on the current device
        _nibbles[(programs,)](codes, scales, values, out, out.numel(), codes.numel(), **sizes)


def decode_octets(
    codes: Tensor, scales: Tensor, out: Tensor, *, e4m3fn: bool, block_rows: int, block_cols: int
) -> None:
    """Writes ``code * scale`` to matrices (..., rows, cols), as `quantized.decoders`.

    `codes` are bytes of float8_e4m3fn or int8. Columns that share a scale are all, or a multiple of `COLS`.
    """
    *matrices, rows, cols = out.shape
    programs = math.prod(matrices) * triton.cdiv(rows, NUMEL // COLS) * triton.cdiv(cols, COLS)
    sizes = {"E4M3FN": e4m3fn, "ROWS": NUMEL // COLS, "COLS": COLS}
    with api(out.device).device_of(out):
        _octets[(programs,)](codes, scales, out, rows, cols, block_rows, block_cols, **sizes)


def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    compute: Tensor | None,
    *,
    skip: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float | Tensor,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Takes the step of `kernels.adam_step`, whose arguments these are, on arrays of one GPU.

    The scalars are computed in fp64 and rounded once to fp32, when they are passed.
    """
    on_device = grad_scale if isinstance(grad_scale, Tensor) else None
    scale = 1.0 if isinstance(grad_scale, Tensor) else float(grad_scale)
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    settings = (
        -scale if maximize else scale,
        0.0 if decoupled else float(weight_decay),
        1.0 - lr * weight_decay if decoupled else 1.0,
        1.0 - beta1,
        float(beta2),
        1.0 - beta2,
        correction2**0.5,
        float(eps),
        -(lr / correction1),
    )
    numel = master.numel()
    aligned = numel // ALIGNED * ALIGNED
    with api(master.device).device_of(master):
        for first, last in ((0, aligned), (aligned, numel)):
            if first < last:
                arrays = (master, exp_avg, exp_avg_sq, grad, compute, on_device, skip)
                grid = (triton.cdiv(last - first, ADAM_NUMEL),)
                sizes = {"NUMEL": ADAM_NUMEL, "num_warps": ADAM_WARPS}
                _adam[grid](*arrays, first, last, *settings, **sizes, enable_fp_fusion=False)


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    master,
    exp_avg,
    exp_avg_sq,
    grad,
    compute,
    scale_on_device,
    skip,
    first,
    last,
    scale,
    l2_decay,
    shrink,
    lerp_weight,
    beta2,
    one_minus_beta2,
    sqrt_correction2,
    eps,
    neg_step_size,
    NUMEL: tl.constexpr,
):
    """Updates `NUMEL` elements per program, operation by operation like csrc/adam_scalar.cpp."""
    place = first + tl.program_id(0).to(tl.int64) * NUMEL + tl.arange(0, NUMEL)
    inside = place < last
    old_p, old_m = tl.load(master + place, mask=inside, other=0), tl.load(exp_avg + place, mask=inside, other=0)
    old_v = tl.load(exp_avg_sq + place, mask=inside, other=0)
    if scale_on_device is not None:
        scale = scale * tl.load(scale_on_device).to(tl.float32)  # by 1 or -1
    g = tl.load(grad + place, mask=inside, other=0).to(tl.float32) * scale
    g = tl.where(l2_decay != 0, tl.fma(old_p, l2_decay, g), g)
    lerp_from_avg = tl.abs(lerp_weight) < 0.5
    m = tl.fma(tl.where(lerp_from_avg, lerp_weight, lerp_weight - 1), g - old_m, tl.where(lerp_from_avg, old_m, g))
    v = tl.fma(one_minus_beta2 * g, g, old_v * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), sqrt_correction2) + eps
    p = old_p * shrink + tl.div_rn(neg_step_size * m, denominator)
    if skip is not None:
        skipped = tl.load(skip) == 1
        p, m, v = tl.where(skipped, old_p, p), tl.where(skipped, old_m, m), tl.where(skipped, old_v, v)
    tl.store(master + place, p, mask=inside)
    tl.store(exp_avg + place, m, mask=inside)
    tl.store(exp_avg_sq + place, v, mask=inside)
    if compute is not None:  # may be the gradient's memory, whose elements this program has read
        tl.store(compute + place, p.to(compute.dtype.element_ty), mask=inside)


@triton.jit
def _nibbles(  # type: ignore[no-untyped-def]
    codes, scales, values, out, numel, nbytes, BLOCK: tl.constexpr, HIGH_FIRST: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Decodes `AT_ONCE` blocks of `BLOCK` elements per program."""
    block = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    scale = tl.load(scales + block, mask=block * BLOCK < numel, other=0)
    if scale.dtype == tl.uint8:  # E8M0: the exponent of an fp32 number, except for the least one and NaN
        bits = scale.to(tl.int32) << 23
        bits = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, bits))
        scale = bits.to(tl.float32, bitcast=True)
    byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    pair = tl.load(codes + byte, mask=byte < nbytes, other=0).to(tl.int32)
    high, low = tl.load(values + (pair >> 4)), tl.load(values + (pair & 15))
    weight = tl.interleave(high, low) if HIGH_FIRST else tl.interleave(low, high)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + place, weight * scale[:, None], mask=place < numel)


@triton.jit
def _octets(  # type: ignore[no-untyped-def]
    codes, scales, out, rows, cols, block_rows, block_cols, E4M3FN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Decodes `ROWS` x `COLS` elements of one matrix per program."""
    program = tl.program_id(0).to(tl.int64)
    across, down = tl.cdiv(cols, COLS), tl.cdiv(rows, ROWS)
    matrix, first_col = program // across // down, program % across * COLS
    row = program // across % down * ROWS + tl.arange(0, ROWS)
    col = first_col + tl.arange(0, COLS)
    scale_row = matrix * tl.cdiv(rows, block_rows) + row // block_rows
    scale = tl.load(scales + scale_row * tl.cdiv(cols, block_cols) + first_col // block_cols, mask=row < rows, other=0)
    place = (matrix * rows + row)[:, None] * cols + col[None, :]
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    code = tl.load(codes + place, mask=inside, other=0)
    if E4M3FN:  # not by Triton's type, which older GPUs lack: 4 exponent bits, with bias 7 where fp32's bias is 127
        number = code.to(tl.int32)
        bits = (number & 128) << 24 | (number & 127) << 20
        weight = bits.to(tl.float32, bitcast=True) * 2.0**120  # exact, for subnormals too
        weight = tl.where((number & 127) == 127, float("nan"), weight)
    else:
        weight = code.to(tl.int8, bitcast=True).to(tl.float32)
    tl.store(out + place, weight * scale[:, None], mask=inside)
