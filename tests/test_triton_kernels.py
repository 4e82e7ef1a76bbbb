"""The kernels in Triton beside the native ones, to the bit, in Triton's interpreter; and when they are chosen.

The interpreter runs in a process of its own, since Triton asks `TRITON_INTERPRET` when it is imported. It drops the low
bits of what becomes bfloat16, which a GPU rounds to nearest even, as torch does: here torch rounds for it. It rounds a
fused multiply-add twice: here x86's long doubles hold the product and the sum. `tests/gpu` runs the same on a GPU.
"""

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

from elixir_moe import kernels
from elixir_moe.quantized import decoders
from tests.optim.test_adam import DTYPES as GRAD_DTYPES
from tests.optim.test_adam import SETTINGS, VARIANTS, Shard, assert_same_bits
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
    """Decoders and Adam on this CPU are those in Triton from now on."""
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

    def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(numpy.longdouble) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.cast_impl = rounded
    interpreter.InterpreterBuilder.create_fma = fused
    kernels._adam_in_triton = lambda device: triton_kernels
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


def updated(
    numel: int, grad: torch.dtype, compute: torch.dtype | None, settings: dict[str, Any], on_device: bool
) -> list[Tensor]:
    """The arrays after three steps of Adam, with what lies around them: at odd places, or all of them aligned.

    With `on_device` the scale is a scalar tensor, where kernels take one, and the last step is one that is skipped.
    """
    in_triton = on_device and kernels._adam_in_triton(torch.device("cpu")) is not None
    shard = Shard(numel, grad, compute, offset=numel % 2)
    scale = settings.get("grad_scale", 1.0)
    for number in range(1, 4):
        shard.draw_grad()
        if number == 3 and on_device:
            shard.grad.zero_().div_(0.0)
            if not in_triton:
                if shard.compute is not None:
                    shard.compute.copy_(shard.master)
                continue
        there = {"skip": torch.tensor(float(number == 3))} if in_triton else {}
        given = torch.tensor(scale, dtype=torch.float64) if in_triton else scale
        kernels.adam_step(*shard.arrays(), step=number, **{**SETTINGS, **settings, "grad_scale": given}, **there)
    return shard.wholes


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("grad", GRAD_DTYPES, ids=str)
def test_adam_gives_the_native_kernels_bits(
    grad: torch.dtype, settings: dict[str, Any], on_device: bool, interpreter: Callable[..., Any]
) -> None:
    for numel, compute in ((2069, torch.bfloat16), (2048, torch.float16), (7, None)):
        case = (numel, grad, compute, settings, on_device)
        for found, wanted in zip(interpreter(updated, *case), updated(*case), strict=True):
            assert_same_bits(found, wanted)


def test_adam_writes_values_over_the_gradient(interpreter: Callable[..., Any]) -> None:
    for found, wanted in zip(interpreter(updated_in_place), updated_in_place(), strict=True):
        assert_same_bits(found, wanted)


def updated_in_place() -> list[Tensor]:
    shard = Shard(3000, torch.bfloat16, None)
    shard.draw_grad()
    shard.compute = shard.grad
    kernels.adam_step(*shard.arrays(), step=1, **SETTINGS)
    return shard.wholes


@pytest.mark.parametrize("choose", [decoders._triton_on.__wrapped__, kernels._adam_in_triton.__wrapped__])
@pytest.mark.parametrize("fails", [False, True])
def test_triton_is_chosen_once_it_has_run(
    choose: Callable[[torch.device], Any], fails: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """An image without a C compiler has Triton, and decodes and updates all the same."""
    tried = []

    def run(*arrays: Tensor, **_: Any) -> None:
        tried.append(arrays[0].numel())
        if fails:
            raise RuntimeError("Failed to find C compiler.")

    fake = SimpleNamespace(decode_octets=run, adam_step=run, __spec__=sys)  # a spec, by which it counts as imported
    monkeypatch.setitem(sys.modules, "elixir_moe.triton_kernels", fake)
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    assert choose(torch.device("cpu")) is None and not tried, "its kernels are not for a CPU"
    monkeypatch.setattr(kernels, "runs_triton", lambda device: True)
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert choose(torch.device("cpu")) is None and not recwarn and not tried
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    assert choose(torch.device("cpu")) is (None if fails else fake)
    said = [str(warning.message) for warning in recwarn]
    assert len(tried) == 1 and tried[0] > 0
    assert ["torch's" in text and "C compiler" in text for text in said] == [True] * fails
