"""The formats: their bytes are those of the libraries that ship them, and what they lose is bounded."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from elixir_moe.errors import ConfigError
from elixir_moe.names import SchemeName
from elixir_moe.quantized import formats
from elixir_moe.quantized.decoders import E2M1_VALUES, NF4_VALUES
from elixir_moe.quantized.formats import SCHEMES, scheme_named

NAMES = list(SCHEMES)


def test_every_format_is_offered() -> None:
    assert {*get_args(SchemeName)} == {*SCHEMES}


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights whose rows differ in size by orders of magnitude; one row is zero."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    weight = weight * torch.logspace(-6, 3, shape[-2]).unsqueeze(-1)
    weight[..., 1, :] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_bytes(name: str) -> None:
    scheme = SCHEMES[name]
    weight = weights(3, 256, 192)
    codes, scales = scheme.encode(weight)
    assert codes.shape == scheme.codes_shape(weight.shape) and codes.dtype == scheme.codes_dtype
    assert scales.shape == scheme.scales_shape(weight.shape) and scales.dtype == scheme.scales_dtype
    assert codes.nbytes + scales.nbytes == scheme.nbytes(weight.shape)
    most = {"nf4": 0.5625, "mxfp4": 0.53125, "fp8": 1.01, "int8": 1 + 4 / 192}
    assert scheme.nbytes(weight.shape) <= most[name] * weight.numel()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_slices_change_no_byte(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SCHEMES[name]
    weight = weights(2, 3, 256, 192, dtype=dtype)
    codes, scales = scheme.encode(weight)
    monkeypatch.setattr(formats, "SLICE_NUMEL", 1)
    for i in range(2):
        for j in range(3):
            alone = scheme.encode(weight[i, j])
            assert torch.equal(codes[i, j].view(torch.uint8), alone[0].view(torch.uint8))
            assert torch.equal(scales[i, j], alone[1])
    decoded = scheme.decode(codes, scales, weight.shape, torch.bfloat16)
    monkeypatch.undo()
    assert torch.equal(decoded, scheme.decode(codes, scales, weight.shape, torch.bfloat16))
    assert torch.equal(decoded, scheme.decode(codes, scales, weight.shape, torch.float32).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_becomes_the_nearest_value(name: str) -> None:
    """Half a step between neighboring values, which are all that a block can show, is the most that is lost."""
    scheme = SCHEMES[name]
    weight = weights(256, 192)
    codes, scales = scheme.encode(weight)
    decoded = scheme.decode(codes, scales, weight.shape, torch.float32)
    values = {
        "nf4": torch.tensor(NF4_VALUES),
        "mxfp4": torch.tensor(E2M1_VALUES),
        "int8": torch.arange(-127.0, 128.0),
        "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    }[name]
    values = values[values.isfinite()]
    if name == "mxfp4":
        scales = torch.exp2(scales.double() - 127).float()
    rows, columns = scheme.block
    by_weight = scales.repeat_interleave(rows, 0).repeat_interleave(columns or 192, 1)[:256, :192]
    shown = values.double() * by_weight.double().unsqueeze(-1)
    nearest = (shown - weight.double().unsqueeze(-1)).abs().amin(-1)
    # Beside the nearest value: the quotient and the product are each rounded to 24 bits.
    slack = 2**-22 * shown.abs().amax(-1)
    assert ((decoded.double() - weight.double()).abs() <= nearest + slack).all()


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_were_decoded_lose_nothing_more(name: str) -> None:
    scheme = SCHEMES[name]
    once = scheme.decode(*scheme.encode(weights(256, 192)), (256, 192), torch.float32)
    twice = scheme.decode(*scheme.encode(once), (256, 192), torch.float32)
    # The largest code gives the scale again, rounded: of fp8 and int8, by an ulp.
    torch.testing.assert_close(twice, once, rtol=2**-22, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_is_bitsandbytes_to_the_byte(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weights(128, 192, dtype=dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    codes, scales = SCHEMES["nf4"].encode(weight)
    assert torch.equal(codes.flatten(), packed.flatten())
    assert torch.equal(scales.flatten(), state.absmax)
    theirs = functional.dequantize_4bit(packed, state)
    assert torch.equal(SCHEMES["nf4"].decode(packed, state.absmax, weight.shape, dtype), theirs)


def test_mxfp4_is_read_as_gpt_oss_ships_it() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 140, (3, 64, 4), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(SCHEMES["mxfp4"].decode(blocks, scales, (3, 64, 128), torch.bfloat16), theirs)


def test_mxfp4_at_the_ends_of_its_exponents() -> None:
    codes = torch.full((1, 16 * 3), 0x71, dtype=torch.uint8)  # 0.5, 6, 0.5, 6, …
    decoded = SCHEMES["mxfp4"].decode(codes, torch.tensor([[0, 127, 255]]).byte(), (1, 96), torch.float32)
    assert decoded[0, 0] == 2.0**-128 and decoded[0, 1] == 6 * 2.0**-127
    assert decoded[0, 32] == 0.5 and decoded[0, 33] == 6
    assert decoded[0, 64:].isnan().all()
    for largest in (6 * 2.0**-127, 2.0**-149, 2.0**127):
        weight = torch.full((1, 32), largest)
        codes, scales = SCHEMES["mxfp4"].encode(weight)
        again = SCHEMES["mxfp4"].decode(codes, scales, (1, 32), torch.float32)
        assert (again - weight).abs().max() <= max(weight[0, 0] / 4, 2.0**-129)


def test_fp8_is_read_as_checkpoints_ship_it() -> None:
    """Blocks at the borders may be smaller, as in Qwen's and DeepSeek's files."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    decoded = SCHEMES["fp8"].decode(codes, scales, (200, 300), torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 127), (199, 299), (5, 256)):
        assert decoded[row, column] == codes[row, column].float() * scales[row // 128, column // 128]


@pytest.mark.parametrize(
    ("name", "shape", "says"), [("nf4", (8, 96), "multiple of 64"), ("mxfp4", (8, 48), "of 32"), ("fp8", (8,), "shape")]
)
def test_shapes_that_have_no_blocks_are_refused(name: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=f"'a.weight'.*{says}"):
        SCHEMES[name].encode(torch.zeros(shape), name="a.weight")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    weight = weights(4, 64)
    weight[3, 5] = bad
    with pytest.raises(ConfigError, match=r"'a\.weight' has weights that are not finite"):
        SCHEMES[name].encode(weight, name="a.weight")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mxfp4'"):
        scheme_named("mxfp")


@pytest.mark.parametrize("name", NAMES)
def test_weights_without_data_have_shapes(name: str) -> None:
    codes, scales = SCHEMES[name].encode(torch.empty(2, 128, 128, device="meta"))
    assert codes.is_meta and SCHEMES[name].decode(codes, scales, (2, 128, 128), torch.bfloat16).is_meta
