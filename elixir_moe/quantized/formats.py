"""The four formats of frozen weights in 4 or 8 bits: the shapes of their bytes, encoding and decoding.

Owns the encoding, in torch operators that run on any device and on fake tensors; `decoders` decodes. Never touches a
module.

    name   codes (of a weight (..., out, in))       scales                                      bytes/weight
    nf4    uint8 (..., out, in / 2), high nibble     fp32 (..., out, in / 64): the largest        0.5625
           first: the index of a quantile            magnitude of 64 weights of a row
    mxfp4  uint8 (..., out, in / 2), low nibble      uint8 (..., out, in / 32): the exponent,     0.53125
           first: E2M1                               plus 127, of 32 weights of a row (E8M0)
    fp8    float8_e4m3fn (..., out, in)              fp32 (..., ceil(out / 128), ceil(in / 128)): 1.0002
                                                     the factor of a block of 128 x 128
    int8   int8 (..., out, in)                       fp32 (..., out, 1): the factor of a row      1 + 4 / in

Leading dims are experts, and no block holds weights of two of them. A decoded weight is the product of code and scale
in fp32, rounded once to the requested dtype.
Sources: QLoRA, appendix E, with the codes and scales of bitsandbytes (NF4); OCP Microscaling 1.0 (MXFP4), as shipped
with gpt-oss; DeepSeek-V3, 3.3 (FP8), which calls the scales `weight_scale_inv`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from elixir_moe.errors import ConfigError, unknown_name
from elixir_moe.names import SchemeName
from elixir_moe.parallel.meta_tensors import has_data
from elixir_moe.quantized.decoders import (
    E2M1_VALUES,
    FP8_BLOCK,
    MXFP4_BLOCK,
    NF4_BLOCK,
    NF4_VALUES,
    decode_nibbles,
    decode_octets,
)
from elixir_moe.torch_private import DisableTorchFunction

SLICE_NUMEL = 1 << 22
"""Number of weights that are encoded at a time: their temporaries take at most about five times 16 MiB."""
_E2M1_LARGEST, _E4M3_LARGEST, _INT8_LARGEST = 6.0, 448.0, 127.0
_DECODED_TO = (torch.bfloat16, torch.float32)
_NF4_SMALLEST_SCALE = 1e-38
"""The smallest scale by which bitsandbytes divides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A format of quantized weights; `SCHEMES` has all by name. Shapes are those of a contiguous weight."""

    name: SchemeName
    """The argument of `quantize`."""
    block: tuple[int, int]
    """Rows (outputs) and columns (inputs) that share a scale; 0 columns are a whole row."""
    codes_a_byte: int
    """Number of a row's weights per byte: 2, or 1."""
    codes_dtype: torch.dtype
    scales_dtype: torch.dtype
    ragged: bool
    """Whether the last block of rows and of columns may be smaller."""
    encode_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Encodes an fp32 weight (out, in) to codes and scales."""
    decode_into: Callable[[Tensor, Tensor, Tensor], None]
    """Decodes codes and scales of a weight (..., out, in) into a third tensor, bf16 or fp32."""

    @property
    def inputs_in_multiples_of(self) -> int:
        """The number that must divide a weight's inputs."""
        return 1 if self.ragged else self.block[1] or 1

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Returns why a weight of this shape cannot have the format; None if it can."""
        columns = self.inputs_in_multiples_of
        if len(shape) < 2:
            return f"has the shape {tuple(shape)}: expected (..., outputs, inputs)"
        if shape[-1] % columns:
            return (
                f"has {shape[-1]} inputs: {self.name} needs a multiple of {columns}; leave it out with skip, or choose "
                f"fp8 or int8"
            )
        return None

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the codes of a weight."""
        return (*shape[:-1], shape[-1] // self.codes_a_byte)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight."""
        *experts, rows, columns = shape
        return (*experts, math.ceil(rows / self.block[0]), math.ceil(columns / (self.block[1] or columns)))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of a weight's codes and scales."""
        codes = math.prod(self.codes_shape(shape)) * self.codes_dtype.itemsize
        return codes + math.prod(self.scales_shape(shape)) * self.scales_dtype.itemsize

    @torch.no_grad()
    def encode(self, weight: Tensor, *, name: str = "weight") -> tuple[Tensor, Tensor]:
        """Encodes a weight (..., out, in) of any floating dtype to codes and scales, on its device.

        Raises:
            ConfigError: the shape is not a multiple of the block, or a weight is not finite; names the parameter.
        """
        shape = tuple(weight.shape)
        if (problem := self.problem(shape)) is not None:
            raise ConfigError(f"quantize: parameter {name!r} {problem}")
        codes = weight.new_empty(self.codes_shape(shape), dtype=self.codes_dtype)
        scales = weight.new_empty(self.scales_shape(shape), dtype=self.scales_dtype)
        if weight.is_meta and type(weight) is Tensor:  # not from `sharded_init`: its values are never computed
            return codes, scales
        for part, its_codes, its_scales in self._slices(weight, codes, scales):
            check_finite(name, part)
            new_codes, new_scales = self.encode_rows(part.float())
            its_codes.copy_(new_codes)
            its_scales.copy_(new_scales)
        return codes, scales

    @torch.no_grad()
    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decodes a weight of `shape` (..., out, in) and a floating `dtype`, on the device of its codes.

        Codes and scales may have any shape with the same elements, because checkpoints differ: gpt-oss's codes are
        (experts, out, in / 32, 16), those of bitsandbytes (numel / 2, 1).
        """
        codes, scales = codes.reshape(self.codes_shape(shape)), scales.reshape(self.scales_shape(shape))
        weight = torch.empty(shape, dtype=_written(dtype), device=codes.device)
        if has_data(weight):  # a trace would record many small operators for each expert of each layer
            self.decode_into(codes.contiguous(), scales.contiguous(), weight)
        return weight.to(dtype)

    def _slices(self, weight: Tensor, codes: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns views of whole blocks of rows of one expert, with about `SLICE_NUMEL` weights each."""
        if 0 in weight.shape:
            return []
        rows, columns = weight.shape[-2:]
        step = max(1, SLICE_NUMEL // columns // self.block[0]) * self.block[0]
        weights, codes = weight.reshape(-1, rows, columns), codes.reshape(-1, *codes.shape[weight.dim() - 2 :])
        scales = scales.reshape(-1, *scales.shape[weight.dim() - 2 :])
        return [
            (
                weights[expert, begin : begin + step],
                codes[expert, begin : begin + step],
                scales[expert, begin // self.block[0] : math.ceil((begin + step) / self.block[0])],
            )
            for expert in range(len(weights))
            for begin in range(0, rows, step)
        ]


def _written(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a decoder writes for weights in `dtype`."""
    return dtype if dtype in _DECODED_TO else torch.float32


def decoding_itemsize(dtype: torch.dtype) -> int:
    """The bytes that decoding takes for each weight in `dtype`, including what the decoder writes before it."""
    written = _written(dtype)
    return dtype.itemsize + (0 if written is dtype else written.itemsize)


def _nf4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes like bitsandbytes: multiplies by the reciprocal of the scale, and rounds ties to the lower value."""
    values = torch.tensor(NF4_VALUES, device=weight.device)
    blocks = weight.unflatten(-1, (-1, NF4_BLOCK))
    scales = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / scales.clamp(min=_NF4_SMALLEST_SCALE)).unsqueeze(-1)).clamp(-1, 1)
    codes = torch.bucketize(scaled.flatten(-2), (values[:-1] + values[1:]) / 2, out_int32=True)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def _mxfp4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes with the least exponent that clips no weight, and rounds ties to the even code."""
    blocks = weight.unflatten(-1, (-1, MXFP4_BLOCK))
    fraction, exponent = torch.frexp(blocks.abs().amax(-1))  # fraction * 2^exponent; 6 is 0.75 * 2^3
    exponent = torch.where(fraction <= _E2M1_LARGEST / 8, exponent - 3, exponent - 2).clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1)).flatten(-2)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))  # these ties go up
    codes = torch.bucketize(scaled.abs(), middles, out_int32=True) | scaled.signbit().int() << 3
    return codes[:, ::2] | codes[:, 1::2] << 4, exponent + 127


def _fp8_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    largest = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK)).abs().amax((1, 3))
    scales = _factor(largest, _E4M3_LARGEST)
    return (weight / _by_block(scales, rows, columns)).clamp(-_E4M3_LARGEST, _E4M3_LARGEST), scales


def _by_block(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Repeats the scales of blocks of 128 x 128 for each weight."""
    return scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


def _int8_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = _factor(weight.abs().amax(-1, keepdim=True), _INT8_LARGEST)
    return (weight / scales).round().clamp(-_INT8_LARGEST, _INT8_LARGEST), scales


def _factor(largest: Tensor, code: float) -> Tensor:
    """Returns the scale that maps the largest `code` to the largest weight; 1 where all weights are 0."""
    scales = largest / code
    return torch.where(scales > 0, scales, 1.0)


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="nf4",
            block=(1, NF4_BLOCK),
            codes_a_byte=2,
            codes_dtype=torch.uint8,
            scales_dtype=torch.float32,
            ragged=False,
            encode_rows=_nf4_encode,
            decode_into=partial(decode_nibbles, values=NF4_VALUES, block=NF4_BLOCK, high_first=True),
        ),
        Scheme(
            name="fp8",
            block=(FP8_BLOCK, FP8_BLOCK),
            codes_a_byte=1,
            codes_dtype=torch.float8_e4m3fn,
            scales_dtype=torch.float32,
            ragged=True,
            encode_rows=_fp8_encode,
            decode_into=partial(decode_octets, block=(FP8_BLOCK, FP8_BLOCK)),
        ),
        Scheme(
            name="mxfp4",
            block=(1, MXFP4_BLOCK),
            codes_a_byte=2,
            codes_dtype=torch.uint8,
            scales_dtype=torch.uint8,
            ragged=False,
            encode_rows=_mxfp4_encode,
            decode_into=partial(decode_nibbles, values=E2M1_VALUES, block=MXFP4_BLOCK, high_first=False),
        ),
        Scheme(
            name="int8",
            block=(1, 0),
            codes_a_byte=1,
            codes_dtype=torch.int8,
            scales_dtype=torch.float32,
            ragged=True,
            encode_rows=_int8_encode,
            decode_into=partial(decode_octets, block=(1, 0)),
        ),
    )
}
"""The formats by name."""


def check_finite(name: str, weight: Tensor) -> None:
    """Raises ConfigError, with the parameter's name, for a weight that has data and is not finite."""
    with DisableTorchFunction():  # otherwise a tensor of `sharded_init` would draw its values
        has_values = has_data(weight)
    if has_values and not weight.isfinite().all():
        raise ConfigError(
            f"quantize: parameter {name!r} has weights that are not finite: the checkpoint is damaged, or its training "
            f"has diverged"
        )


def scheme_named(name: str) -> Scheme:
    """Returns the format of this name. Raises ConfigError with the nearest name for an unknown one."""
    if name not in SCHEMES:
        raise unknown_name("scheme", str(name), SCHEMES)
    return SCHEMES[name]
