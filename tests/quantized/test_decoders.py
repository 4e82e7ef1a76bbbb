"""The decoders of quantized weights: every instruction set against the scalar one, and all against plain torch.

Plain torch here is the formula of each format, one line, in fp32 and rounded by `Tensor.to`. Instruction sets agree to
the bit. With torch, NaNs agree as NaNs: torch's own vectors give them other payloads than its scalar code does.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elixir_moe import _native
from elixir_moe.quantized import decoders
from elixir_moe.quantized.formats import SCHEMES
from tests.support.decoder_cases import CASES, DTYPES, Guarded, assert_same, bits_of, drawn_bytes, drawn_scales

ISAS = ["scalar", "neon"] if _native.cpu_features() == "neon" else ["scalar", "avx2", "avx512"]
ISAS = ISAS[: ISAS.index(_native.cpu_features()) + 1]
LENGTHS = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 1000, 4096 + 37]
MATRICES = [(1, 1), (1, 300), (3, 7), (128, 128), (127, 129), (130, 259), (256, 64), (0, 5), (4, 0)]


def plain_nibbles(
    codes: Tensor, scales: Tensor, values: tuple[float, ...], block: int, numel: int, high: bool
) -> Tensor:
    """The loop over elements that a reader believes at sight."""
    found = []
    for i in range(numel):
        byte = int(codes[i // 2])
        code = byte >> 4 if (i % 2 == 0) == high else byte & 15
        found.append(torch.tensor(values[code]) * scales[i // block])
    return torch.stack(found) if found else torch.empty(0)


def plain_matrix(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """As above, of one matrix of float8_e4m3fn or int8."""
    rows, cols = codes.shape
    index = torch.arange(rows)[:, None] // block, torch.arange(cols)[None] // block
    return codes.float() * scales[index]


def on_each_isa(decode: Callable[..., None], shape: tuple[int, ...], dtype: torch.dtype, **settings: Any) -> Tensor:
    """What all instruction sets write, after a check that it is the same."""
    found = []
    for isa in ISAS:
        for threads in (1, 3):
            guarded = Guarded(shape, dtype)
            decode(guarded.out.view(-1), isa=isa, threads=threads, **settings)
            guarded.check()
            found.append(guarded.out.clone())
            assert torch.equal(bits_of(found[0]), bits_of(found[-1])), isa
    return found[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_nf4_is_its_formula(numel: int, dtype: torch.dtype) -> None:
    codes, scales = drawn_bytes(-(-numel // 2), seed=numel), drawn_scales(-(-numel // 64), seed=numel)
    wanted = plain_nibbles(codes, scales, decoders.NF4_VALUES, 64, numel, True).to(dtype)

    def decode(out: Tensor, **settings: Any) -> None:
        values = torch.tensor(decoders.NF4_VALUES)
        _native.decode_nibbles(codes, scales, values, out, block=64, high_first=True, **settings)

    assert_same(on_each_isa(decode, (numel,), dtype), wanted)
    out = torch.empty(numel, dtype=dtype)
    SCHEMES["nf4"].decode_into(codes, scales, out)
    assert_same(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_its_formula_for_all_exponents(dtype: torch.dtype) -> None:
    """256 rows of one block, each with another exponent; all pairs of codes are among them."""
    codes, exponents = drawn_bytes(256, 16), torch.arange(256, dtype=torch.uint8).view(256, 1)
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu).float().view(-1)
    assert scales[0] == 2.0**-127 and scales[127] == 1 and scales[255].isnan()
    wanted = plain_nibbles(codes.view(-1), scales, decoders.E2M1_VALUES, 32, 8192, False).to(dtype).view(256, 32)

    def decode(out: Tensor, **settings: Any) -> None:
        values = torch.tensor(decoders.E2M1_VALUES)
        flat = codes.view(-1), exponents.view(-1), values
        _native.decode_nibbles(*flat, out, block=32, high_first=False, **settings)

    assert_same(on_each_isa(decode, (256, 32), dtype), wanted)
    out = torch.empty(256, 32, dtype=dtype)
    SCHEMES["mxfp4"].decode_into(codes, exponents, out)
    assert_same(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MATRICES)
def test_fp8_is_its_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of two matrices with blocks that end at ragged borders; all 256 codes are among them where there is room."""
    rows, cols = shape
    codes = drawn_bytes(2, *shape, seed=rows)
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)[: codes.numel()]
    scales = drawn_scales(2, -(-rows // 128), -(-cols // 128), seed=cols)
    fp8 = codes.view(torch.float8_e4m3fn)
    wanted = torch.stack([plain_matrix(fp8[i], scales[i], 128) for i in range(2)]).to(dtype)
    out = torch.empty(2, *shape, dtype=dtype)
    SCHEMES["fp8"].decode_into(fp8, scales, out)
    assert_same(out, wanted)
    if not codes.numel():
        return

    def decode(out: Tensor, **settings: Any) -> None:
        sizes = {"rows": rows, "cols": cols, "block_rows": 128, "block_cols": 128}
        _native.decode_octets(codes.view(-1), scales.view(-1), out, e4m3fn=True, **sizes, **settings)

    assert_same(on_each_isa(decode, (2, *shape), dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_codes_of_fp8_are_torchs(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 256)
    out = torch.empty(1, 256, dtype=dtype)
    SCHEMES["fp8"].decode_into(codes, torch.ones(1, 2), out)
    assert_same(out, codes.to(dtype))
    assert out.isnan().sum() == 2 and out[0, 0x80].signbit() and out[0, 1] == 2.0**-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MATRICES)
def test_int8_is_its_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, cols = shape
    codes, scales = drawn_bytes(*shape, seed=cols).view(torch.int8), drawn_scales(rows, seed=cols)
    wanted = (codes.float() * scales[:, None]).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    SCHEMES["int8"].decode_into(codes, scales[:, None], out)
    assert_same(out, wanted)
    if not codes.numel():
        return

    def decode(out: Tensor, **settings: Any) -> None:
        sizes = {"rows": rows, "cols": cols, "block_rows": 1, "block_cols": cols}
        _native.decode_octets(codes.view(torch.uint8).view(-1), scales, out, e4m3fn=False, **sizes, **settings)

    assert_same(on_each_isa(decode, shape, dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", CASES)
def test_without_the_native_module_and_on_other_devices_torch_gives_the_same(
    scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices, whose ends fall on no end of the arrays."""
    shape = (300, 160)
    decode, codes, scales = CASES[scheme](dtype, shape)
    native, torchs = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    decode(codes, scales, native)
    monkeypatch.setattr(decoders, "_native", None)
    monkeypatch.setattr(decoders, "TORCH_SLICE_NUMEL", 1 << 13)
    decode(codes, scales, torchs)
    assert_same(torchs, native)


@pytest.mark.parametrize("scheme", CASES)
def test_fake_tensors_decode_to_fake_tensors(scheme: str) -> None:
    decode, codes, scales = CASES[scheme](torch.bfloat16, (128, 64))
    with FakeTensorMode() as fake:
        out = torch.empty(128, 64, dtype=torch.bfloat16)
        decode(fake.from_tensor(codes), fake.from_tensor(scales), out)


def test_the_native_module_checks_what_would_be_read_past_its_end() -> None:
    values, out = torch.tensor(decoders.NF4_VALUES), torch.empty(64)
    codes, scales = drawn_bytes(32), torch.ones(1)
    settings = {"block": 64, "high_first": True, "threads": 1}
    for arrays, message in [
        ((codes[:-1], scales, values, out), "codes has 31 elements, expected 32"),
        ((codes, scales[:0], values, out), "scales has 0 elements, expected 1"),
        ((codes, scales, values[:15], out), "values has 15 elements, expected 16"),
        ((codes, scales.double(), values, out), "scales must be float32 or uint8"),
        ((codes, scales, values, out.half()), "out must be float32 or bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.decode_nibbles(*arrays, **settings)
    with pytest.raises(ValueError, match="block is 48"):
        _native.decode_nibbles(codes, scales, values, out, block=48, high_first=True, threads=1)
    sizes = {"e4m3fn": True, "rows": 3, "cols": 21, "block_rows": 128, "block_cols": 128, "threads": 1}
    with pytest.raises(ValueError, match="out has 64 elements, expected 63"):
        _native.decode_octets(drawn_bytes(64), scales, out, **sizes)
