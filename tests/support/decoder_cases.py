"""Packed bytes and scales to decode, and what decoders of them are held against.

For every decoder: the native ones, those in Triton, torch's operators. No test of its own, and no native module.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elixir_moe.quantized.formats import SCHEMES

DTYPES = [torch.bfloat16, torch.float32]
NASTY = [0.0, -0.0, 1.0, -3.7, 1e-45, 2.0**-126, 2.0**-133, 1e-39, 3.3e38, -3.3e38, math.inf, -math.inf, math.nan]
"""Scales: zeros, subnormals of both dtypes, and what overflows."""
SHAPES = {
    "nf4": [(1, 1), (1, 63), (3, 43), (5, 64), (33, 129)],
    "mxfp4": [(1, 32), (3, 96), (65, 64)],
    "fp8": [(1, 1), (1, 300), (3, 7), (17, 129), (130, 259)],
    "int8": [(1, 1), (1, 300), (3, 7), (17, 129), (40, 256)],
}
"""For each scheme: less than a program of Triton decodes, borders within its part and beyond, rows of whole vectors."""
EVERY = [(scheme, shape) for scheme in SHAPES for shape in SHAPES[scheme]]


def drawn_scales(*shape: int, seed: int = 0) -> Tensor:
    """Scales over all magnitudes, with the nasty ones among them."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randn(shape, generator=draw) * torch.randint(-130, 127, shape, generator=draw).float().exp2()
    nasty = torch.tensor(NASTY)[torch.randint(len(NASTY), shape, generator=draw)]
    return torch.where(torch.rand(shape, generator=draw) < 0.3, nasty, scales)


def drawn_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bits_of(array: Tensor) -> Tensor:
    return array.contiguous().view(torch.int32 if array.dtype == torch.float32 else torch.int16)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Equal bits, any NaN for a NaN."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(bits_of(found)[~found.isnan()], bits_of(wanted)[~wanted.isnan()])


class Guarded:
    """An output at an odd place within a larger tensor, around which nobody may write."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        numel = math.prod(shape)
        self.whole = torch.full((numel + 8,), -7.0, dtype=dtype)
        self.out = self.whole[3 : 3 + numel].view(shape)

    def check(self) -> None:
        surroundings = torch.cat((self.whole[:3], self.whole[3 + self.out.numel() :]))
        assert torch.equal(surroundings, torch.full_like(surroundings, -7.0))


CASES: dict[str, Callable[[torch.dtype, tuple[int, int]], tuple[Any, ...]]] = {
    "nf4": lambda dtype, shape: (
        SCHEMES["nf4"].decode_into,
        drawn_bytes(-(-math.prod(shape) // 2)),
        drawn_scales(-(-math.prod(shape) // 64)),
    ),
    "mxfp4": lambda dtype, shape: (
        SCHEMES["mxfp4"].decode_into,
        drawn_bytes(shape[0], shape[1] // 2),
        drawn_bytes(shape[0], shape[1] // 32),
    ),
    "fp8": lambda dtype, shape: (
        SCHEMES["fp8"].decode_into,
        drawn_bytes(*shape).view(torch.float8_e4m3fn),
        drawn_scales(-(-shape[0] // 128), -(-shape[1] // 128)),
    ),
    "int8": lambda dtype, shape: (
        SCHEMES["int8"].decode_into,
        drawn_bytes(*shape).view(torch.int8),
        drawn_scales(shape[0], 1),
    ),
}
