"""The decoders of quantized weights on a GPU, in Triton: packed bytes and scales in, weights out.

Owns two kernels, with the arguments of those in csrc/. Never imported without a GPU: importing it needs triton, and
`quantized.decoders` imports it when it decodes. Each weight is one fp32 product, rounded once by the store, as in the
other decoders.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMEL = 2048
"""Elements that one program decodes."""
COLS = 128
"""Columns of a matrix that one program decodes; they share a scale."""


def decode_nibbles(codes: Tensor, scales: Tensor, values: Tensor, out: Tensor, *, block: int, high_first: bool) -> None:
    """Writes ``values[code] * scale`` to a flat array on the same device.

    Args:
        codes: uint8, two codes per byte.
        scales: fp32, or uint8 for ``2 ** (scale - 127)``; one per `block` elements, a power of two.
        values: fp32, the values of the 16 codes.
        out: bfloat16 or fp32.
        block: elements that share a scale.
        high_first: whether the first of two codes is in the high four bits.
    """
    programs = triton.cdiv(out.numel(), NUMEL)
    sizes = {"BLOCK": block, "HIGH_FIRST": high_first, "AT_ONCE": NUMEL // block}
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _nibbles[(programs,)](codes, scales, values, out, out.numel(), codes.numel(), **sizes)


def decode_octets(
    codes: Tensor, scales: Tensor, out: Tensor, *, e4m3fn: bool, block_rows: int, block_cols: int
) -> None:
    """Writes ``code * scale`` to matrices on the same device.

    Args:
        codes: uint8, the bytes of `out`'s elements in float8_e4m3fn or int8.
        scales: fp32, (..., ceil(rows / block_rows), ceil(cols / block_cols)).
        out: bfloat16 or fp32, (..., rows, cols).
        e4m3fn: True for float8_e4m3fn, False for int8.
        block_rows: rows that share a scale.
        block_cols: columns that share a scale: all, or a multiple of `COLS`.
    """
    *matrices, rows, cols = out.shape
    programs = math.prod(matrices) * triton.cdiv(rows, NUMEL // COLS) * triton.cdiv(cols, COLS)
    sizes = {"E4M3FN": e4m3fn, "ROWS": NUMEL // COLS, "COLS": COLS}
    with torch.cuda.device_of(out):
        _octets[(programs,)](codes, scales, out, rows, cols, block_rows, block_cols, **sizes)


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
