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
def decode_nibbles(
    codes: Tensor, scales: Tensor, out: Tensor, *, values: tuple[float, ...], block: int, high_first: bool
) -> None:
    """Writes ``values[code] * scale`` to `out`, bf16 or fp32, the fp32 product rounded to nearest even.

    A byte has two codes, the first in its high four bits if `high_first`. A scale is that of `block` elements in memory
    order: fp32, or uint8 for ``2 ** (scale - 127)`` (255 is NaN). All are contiguous and on one device: on a CPU
    the native decoder runs, on a GPU Triton's if it works, elsewhere and on fake tensors torch's operators.
    """
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
def decode_octets(codes: Tensor, scales: Tensor, out: Tensor, *, block: tuple[int, int]) -> None:
    """Writes ``code * scale`` to matrices (..., rows, columns), as `decode_nibbles` does.

    A code is float8_e4m3fn or int8. An fp32 scale is that of a `block` of rows and columns, of whole rows if it has 0
    columns; blocks at the border may be smaller.
    """
    if not out.numel():
        return
    rows, cols = out.shape[-2:]
    block = block[0], block[1] or cols
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
