"""The decoders in Triton beside the native ones, to the bit, in Triton's interpreter; and when they are chosen.

The interpreter runs in a process of its own, since Triton asks `TRITON_INTERPRET` when it is imported. It drops the low
bits of what becomes bfloat16, which a GPU rounds to nearest even, as torch does: here torch rounds for it.
`tests/gpu/test_decoders.py` runs the same on a GPU.
"""

import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elixir_moe.quantized import decoders
from tests.quantized import test_wrapped
from tests.support.cases import with_further
from tests.support.decoder_cases import CASES, DTYPES, EVERY, Guarded, assert_same, drawn_bytes


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process in which Triton interprets."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; `make test-megatron` installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), choose_triton) as pool:
            yield lambda *call: pool.submit(*call).result()


def choose_triton() -> None:
    """Decoders on this CPU are those in Triton from now on."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    from elixir_moe import triton_kernels

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(builder: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, to)
        halves = torch.from_numpy(numpy.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(halves.numpy().view(numpy.uint16), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = rounded
    decoders._in_host_memory = lambda out: False
    decoders._in_triton = lambda out: triton_kernels


def decoded(scheme: str, dtype: torch.dtype, shape: tuple[int, ...], given: tuple[Tensor, Tensor] | None) -> Tensor:
    """What a decoder writes, after a check that it writes to nothing else."""
    decode, codes, scales = CASES[scheme](dtype, shape)
    guarded = Guarded(shape, dtype)
    decode(*(given or (codes, scales)), guarded.out)
    guarded.check()
    return guarded.out.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "shape"), EVERY)
def test_weights_are_the_native_decoders(
    scheme: str, shape: tuple[int, int], dtype: torch.dtype, interpreter: Callable[..., Any]
) -> None:
    """Scales are of all magnitudes, zeros, subnormals and NaNs among them."""
    assert_same(interpreter(decoded, scheme, dtype, shape, None), decoded(scheme, dtype, shape, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["mxfp4", "fp8", "int8"])
def test_all_codes_and_exponents_are_the_native_decoders(
    scheme: str, dtype: torch.dtype, interpreter: Callable[..., Any]
) -> None:
    """Of experts, too."""
    every = torch.arange(256, dtype=torch.uint8)
    shape, given = {
        "mxfp4": ((256, 32), (drawn_bytes(256, 16), every.view(256, 1))),
        "fp8": ((3, 2, 256), (every.repeat(6).view(3, 2, 256).view(torch.float8_e4m3fn), torch.rand(3, 1, 2))),
        "int8": ((3, 2, 256), (every.repeat(6).view(3, 2, 256).view(torch.int8), torch.rand(3, 2))),
    }[scheme]
    assert_same(interpreter(decoded, scheme, dtype, shape, given), decoded(scheme, dtype, shape, given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_without_elements_is_left(dtype: torch.dtype, interpreter: Callable[..., Any]) -> None:
    for scheme, shape in (("nf4", (0, 64)), ("mxfp4", (0, 32)), ("fp8", (0, 5)), ("int8", (4, 0))):
        assert interpreter(decoded, scheme, dtype, shape, None).shape == shape


def trained(scheme: str) -> list[float]:
    losses, _ = test_wrapped.run("qwen3-moe", scheme, test_wrapped.PLANS["zero3"])
    return losses


@pytest.mark.parametrize("scheme", with_further(["nf4", "fp8", "int8"], ["nf4"]))
def test_a_wrapped_model_has_the_same_losses(scheme: str, interpreter: Callable[..., Any], ranks: Any) -> None:
    """The kernels are handed parameters in shards, by address."""
    (wanted,) = ranks(1).run(trained, scheme)
    assert interpreter(trained, scheme) == wanted


@pytest.mark.parametrize("fails", [False, True])
def test_triton_is_chosen_once_it_has_run(fails: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    """An image without a C compiler has Triton, and decodes all the same."""

    def decode_octets(codes: Tensor, scales: Tensor, out: Tensor, **_: Any) -> None:
        assert math.prod(out.shape) == codes.numel() == scales.numel() == 1
        if fails:
            raise RuntimeError("Failed to find C compiler.")

    fake = SimpleNamespace(decode_octets=decode_octets, __spec__=sys)  # a spec, by which it counts as imported
    monkeypatch.setitem(sys.modules, "elixir_moe.triton_kernels", fake)
    choose = decoders._triton_on.__wrapped__
    monkeypatch.setattr(decoders, "has_triton", lambda: False)
    assert choose(torch.device("cpu")) is None and not recwarn
    monkeypatch.setattr(decoders, "has_triton", lambda: True)
    assert choose(torch.device("cpu")) is (None if fails else fake)
    said = [str(warning.message) for warning in recwarn]
    assert ["torch's operators" in text and "C compiler" in text for text in said] == [True] * fails
