"""The decoders of quantized weights: packed codes and scales in, weights in bf16 or fp32 out, in one pass.

Owns the tables and blocks of the formats, and the choice between the native decoders (csrc/), those in Triton and
torch's operators, which all write the same values. Never encodes.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from elixir_moe.kernels import TORCH_SLICE_NUMEL, triton_on
from elixir_moe.native import native as _native

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of the codes of NF4, in units of the block's largest magnitude (QLoRA, appendix E): fp32 numbers."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the codes of MXFP4 (OCP Microscaling Formats, 5.3.3)."""
NF4_BLOCK, MXFP4_BLOCK, FP8_BLOCK = 64, 32, 128
"""Elements that share a scale; for FP8 in both dimensions of a matrix."""

_DECODED_DTYPES = (torch.bfloat16, torch.float32)


def decode_nf4(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``NF4_VALUES[code] * scale`` to `out`, the fp32 product rounded to nearest even.

    Blocks of `NF4_BLOCK` elements in memory order share a scale, which bitsandbytes calls `absmax`. The last block may
    be shorter.

    Args:
        codes: uint8, half as many elements as `out`, rounded up; the first of two codes is in the high four bits.
        scales: fp32, one per block.
        out: bfloat16 or fp32, of any shape.

    All are contiguous and on one device. On a CPU the native decoder runs, on as many threads as torch uses; on a GPU
    Triton's, if Triton works; elsewhere, and on fake tensors, torch's operators. All give the same values, and NaN
    where a scale is NaN.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.uint8, torch.float32)
    _check_numel("codes", codes, -(-out.numel() // 2))
    _check_numel("scales", scales, -(-out.numel() // NF4_BLOCK))
    _decode_nibbles(codes, scales, out, NF4_VALUES, NF4_BLOCK, high_first=True)


def decode_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``E2M1_VALUES[code] * 2 ** (scale - 127)`` to `out`, the fp32 product rounded to nearest even.

    Blocks of `MXFP4_BLOCK` elements of a row share a scale, as in gpt-oss. A scale of 255 is NaN.

    Args:
        codes: uint8, half as many elements as `out`; the first of two codes is in the low four bits.
        scales: uint8, one per block.
        out: bfloat16 or fp32; its last dimension is a multiple of a block.

    Devices, memory layout and NaNs are as for `decode_nf4`.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.uint8, torch.uint8)
    if out.ndim < 1 or out.shape[-1] % MXFP4_BLOCK:
        raise ValueError(f"out has shape {tuple(out.shape)}; its last dimension must be a multiple of {MXFP4_BLOCK}")
    _check_numel("codes", codes, out.numel() // 2)
    _check_numel("scales", scales, out.numel() // MXFP4_BLOCK)
    _decode_nibbles(codes, scales, out, E2M1_VALUES, MXFP4_BLOCK, high_first=False)


def decode_fp8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``code * scale`` to `out`, the fp32 product rounded to nearest even.

    Blocks of `FP8_BLOCK` x `FP8_BLOCK` elements of a matrix share a scale, as in DeepSeek-V3, which calls it
    `weight_scale_inv`. Blocks at the border may be smaller.

    Args:
        codes: float8_e4m3fn, of the shape of `out`.
        scales: fp32, (..., ceil(rows / FP8_BLOCK), ceil(cols / FP8_BLOCK)).
        out: bfloat16 or fp32, (..., rows, cols): one matrix or several.

    Devices, memory layout and NaNs are as for `decode_nf4`.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.float8_e4m3fn, torch.float32)
    if out.ndim < 2:
        raise ValueError(f"out has shape {tuple(out.shape)}; FP8 has blocks of matrices, at least two dimensions")
    _check_shape("codes", codes, tuple(out.shape))
    blocks = tuple(-(-size // FP8_BLOCK) for size in out.shape[-2:])
    _check_shape("scales", scales, (*out.shape[:-2], *blocks))
    _decode_octets(codes, scales, out, (FP8_BLOCK, FP8_BLOCK))


def decode_int8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``code * scale`` to `out`, the fp32 product rounded to nearest even. Each row has a scale.

    Args:
        codes: int8, of the shape of `out`.
        scales: fp32, of the shape of `out` without its last dimension.
        out: bfloat16 or fp32, (..., cols).

    Devices, memory layout and NaNs are as for `decode_nf4`.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.int8, torch.float32)
    if out.ndim < 1:
        raise ValueError("out has no dimension; int8 has a scale for each row")
    _check_shape("codes", codes, tuple(out.shape))
    _check_shape("scales", scales, tuple(out.shape[:-1]))
    _decode_octets(codes, scales.unsqueeze(-1), out, (1, out.shape[-1]))


def _check_packed(codes: Tensor, scales: Tensor, out: Tensor, code: torch.dtype, scale: torch.dtype) -> None:
    for name, array, dtypes in (("codes", codes, (code,)), ("scales", scales, (scale,)), ("out", out, _DECODED_DTYPES)):
        if array.dtype not in dtypes:
            raise ValueError(f"{name} is {array.dtype}, expected {' or '.join(map(str, dtypes))}")
        if not array.is_contiguous():
            raise ValueError(f"{name} must be contiguous, found shape {tuple(array.shape)}, strides {array.stride()}")
        if array.device != out.device:
            raise ValueError(f"{name} is on {array.device}, out on {out.device}; they must agree")


def _check_numel(name: str, array: Tensor, numel: int) -> None:
    if array.numel() != numel:
        raise ValueError(f"{name} has {array.numel()} elements, expected {numel} for this out")


def _check_shape(name: str, array: Tensor, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {shape} for this out")


def decodes_in_one_pass(device: torch.device) -> bool:
    """Whether a kernel decodes on this device in one pass, instead of torch's operators."""
    return device.type == "cpu" or _triton_on(device) is not None


def _in_host_memory(out: Tensor) -> bool:
    """Whether the native decoders can write to `out`; a fake tensor reports a CPU, but has no memory."""
    return _native is not None and out.device.type == "cpu" and type(out) is Tensor


def _in_triton(out: Tensor) -> ModuleType | None:
    """Returns Triton's decoders if they can write to `out`; not under `torch.compile`, which makes its own kernels."""
    return _triton_on(out.device) if type(out) is Tensor and not torch.compiler.is_compiling() else None


@cache
def _triton_on(device: torch.device) -> ModuleType | None:
    """Returns Triton's decoders if one runs on `device`."""

    def decode(triton: ModuleType) -> None:
        codes, scale = (torch.zeros(1, 1, dtype=dtype, device=device) for dtype in (torch.uint8, torch.float32))
        triton.decode_octets(codes, scale, scale, e4m3fn=True, block_rows=1, block_cols=1)

    return triton_on(device, decode, "torch's operators decode quantized weights, to the same values")


@cache
def _values_on(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns the table of a format on a device, copied once: each copy would make the host wait."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@torch.no_grad()
def _decode_nibbles(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    values: tuple[float, ...],
    block: int,
    *,
    high_first: bool,
) -> None:
    codes, scales, out = codes.detach().view(-1), scales.detach().view(-1), out.detach().view(-1)
    if (triton := _in_triton(out)) is not None:
        table = _values_on(values, out.device)
        triton.decode_nibbles(codes, scales, table, out, block=block, high_first=high_first)
        return
    table = torch.tensor(values, dtype=torch.float32, device=out.device)
    if _in_host_memory(out):
        _native.decode_nibbles(
            to_dlpack(codes),
            to_dlpack(scales),
            to_dlpack(table),
            to_dlpack(out),
            block=block,
            high_first=high_first,
            threads=torch.get_num_threads(),
        )
        return
    for start in range(0, out.numel(), TORCH_SLICE_NUMEL):
        stop = min(start + TORCH_SLICE_NUMEL, out.numel())
        pairs = codes[start // 2 : -(-stop // 2)]
        halves = (pairs >> 4, pairs & 15) if high_first else (pairs & 15, pairs >> 4)
        wide = table[torch.stack(halves, -1).view(-1).int()][: stop - start]
        part = scales[start // block : -(-stop // block)]
        part = part if part.dtype == torch.float32 else part.view(torch.float8_e8m0fnu).float()
        out[start:stop] = wide.mul_(part.repeat_interleave(block, output_size=len(part) * block)[: stop - start])


@torch.no_grad()
def _decode_octets(codes: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int]) -> None:
    """Decodes matrices; `scales` has as many dimensions as `out`."""
    if not out.numel():
        return
    rows, cols = out.shape[-2:] if out.ndim > 1 else (1, out.numel())
    codes, scales, out = codes.detach(), scales.detach(), out.detach().view(-1, rows, cols)
    if _in_host_memory(out):
        _native.decode_octets(
            to_dlpack(codes.view(torch.uint8).view(-1)),
            to_dlpack(scales.view(-1)),
            to_dlpack(out.view(-1)),
            e4m3fn=codes.dtype == torch.float8_e4m3fn,
            rows=rows,
            cols=cols,
            block_rows=block[0],
            block_cols=block[1],
            threads=torch.get_num_threads(),
        )
        return
    if (triton := _in_triton(out)) is not None:
        form = {"e4m3fn": codes.dtype == torch.float8_e4m3fn, "block_rows": block[0], "block_cols": block[1]}
        triton.decode_octets(codes.view(torch.uint8), scales, out, **form)
        return
    codes = codes.view(out.shape)
    scales = scales.reshape(len(out), -(-rows // block[0]), -(-cols // block[1]))
    step = max(1, TORCH_SLICE_NUMEL // cols // block[0]) * block[0]
    for matrix in range(len(out)):
        for start in range(0, rows, step):
            part = scales[matrix, start // block[0] : -(-min(start + step, rows) // block[0])]
            part = part.repeat_interleave(block[0], 0)[: rows - start].repeat_interleave(block[1], 1)[:, :cols]
            out[matrix, start : start + step] = codes[matrix, start : start + step].float() * part
