"""The Adam step on state in fewer bytes: each path against an oracle of plain numpy and Python, to the bit.

The oracle is what csrc/narrow.hpp describes, in numpy's operators, each of which is rounded by itself, and in Python
integers for random bits and codes, one element after another.
"""

import math
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elixir_moe import _native, kernels
from elixir_moe.kernels import CODE_BLOCK, Rounding, decode, encode, narrow_step, windows
from tests.optim.test_adam import ISAS, SETTINGS, VARIANTS
from tests.support.cases import with_further

BF16, FP32, CODES = torch.bfloat16, torch.float32, torch.uint8
KINDS = [(BF16, CODES), (BF16, BF16), (BF16, FP32), (FP32, CODES), (FP32, BF16)]
"""(weight, moments)."""

# ---------------------------------------------------------------------------------------------------------- the oracle


def random_word(rounding: Rounding, element: int) -> int:
    x = (rounding.first + element) % 2**32 ^ rounding.key[0]
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ rounding.key[1]
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def in_bf16(values: list[float], random: list[int], *, above_zero: bool = False) -> list[float]:
    found = [float_of((bits_of(x) + r >> 16) << 16) for x, r in zip(values, random, strict=True)]
    least = float_of(1 << 16)
    return [least if above_zero and x > 0 and not y else y for x, y in zip(values, found, strict=True)]


def in_codes(values: list[float], random: list[int], *, signed: bool) -> list[float]:
    """The values that the codes of each block stand for."""
    found: list[float] = []
    for start in range(0, len(values), CODE_BLOCK):
        block = values[start : start + CODE_BLOCK]
        q = [(bits_of(abs(x)) + r) >> 20 for x, r in zip(block, random[start:], strict=False)]
        most = 127 if signed else 255
        base = max(8 * (max(q) >> 3) + 7 - most, 0)
        for x, steps in zip(block, (n - base for n in q), strict=True):
            code = max(steps, 0) if signed else (max(steps, 1) if x else 0)
            found.append(math.copysign(float_of(base + code << 20), x) if code else 0.0)
    return found


def oracle(
    weight: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    rounding: Rounding,
    step: int,
    moments: torch.dtype,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and moments after a step, fp32, each on the grid of what keeps it."""
    s = {**SETTINGS, **given}
    once = np.float32
    p, m, v = (t.float().numpy() for t in (weight, m, v))
    g = grad.float().numpy() * once(s["grad_scale"])
    g = -g if s["maximize"] else g
    if s["decoupled"]:
        p = p * once(1 - s["lr"] * s["weight_decay"])
    elif s["weight_decay"]:
        g = g + p * once(s["weight_decay"])
    rate = once(1 - s["beta1"])
    m = m + rate * (g - m) if rate < 0.5 else g + (rate - once(1)) * (g - m)
    v = v * once(s["beta2"]) + once(1 - s["beta2"]) * g * g
    denominator = np.sqrt(v) * once(1 / (1 - s["beta2"] ** step) ** 0.5) + once(s["eps"])
    p = p + once(-s["lr"] / (1 - s["beta1"] ** step)) * m / denominator
    words = [random_word(rounding, i) for i in range(p.size)]
    ps, ms, vs = p.tolist(), m.tolist(), v.tolist()
    if weight.dtype == BF16:
        ps = in_bf16(ps, [word % 2**16 for word in words])
    if moments == BF16:
        ms = in_bf16(ms, [word >> 8 & 0xFFFF for word in words])
        vs = in_bf16(vs, [word >> 16 for word in words], above_zero=True)
    elif moments == CODES:
        ms = in_codes(ms, [word % 2**20 for word in words], signed=True)
        vs = in_codes(vs, [word >> 12 for word in words], signed=False)
    return torch.tensor(ps), torch.tensor(ms), torch.tensor(vs)


# ----------------------------------------------------------------------------------------------------------- the paths


class State:
    """A shard's weight and moments, at an odd place in memory."""

    def __init__(self, numel: int, weight: torch.dtype, moments: torch.dtype, seed: int = 0) -> None:
        self.draw = torch.Generator().manual_seed(numel + seed)
        self.weight = torch.randn(numel + 1, generator=self.draw).to(weight)[1:]
        blocks = -(-numel // CODE_BLOCK)
        flat = [torch.zeros(numel + 3, dtype=moments)[3:] for _ in range(2)]
        wide = [(one, torch.zeros(blocks, dtype=CODES)) if moments == CODES else one for one in flat]
        self.m, self.v = wide

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Gradients over many orders of magnitude, one in ten of them zero."""
        n = self.weight.numel()
        size = torch.randint(-12, 3, (n,), generator=self.draw).float().exp2()
        kept = torch.rand(n, generator=self.draw) > 0.1
        return (torch.randn(n, generator=self.draw) * size * kept).to(dtype)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Both in fp32."""
        pairs = (self.m, True), (self.v, False)
        m, v = (decode(*one, signed=s) if isinstance(one, tuple) else one for one, s in pairs)
        return m.float(), v.float()

    def native(
        self, grad: Tensor, compute: Tensor | None, rounding: Rounding, isa: str, threads: int, **s: Any
    ) -> None:
        m, v = (one if isinstance(one, tuple) else (one, None) for one in (self.m, self.v))
        _native.narrow_step(
            *(self.weight, m[0], v[0], m[1], v[1], grad, compute),
            **{**SETTINGS, **s},
            key0=rounding.key[0],
            key1=rounding.key[1],
            first=rounding.first,
            isa=isa,
            threads=threads,
        )

    def raw(self) -> list[Tensor]:
        flat = [*self.m, *self.v] if isinstance(self.m, tuple) else [self.m, self.v]
        return [t.contiguous().view(torch.uint8).clone() for t in (self.weight, *flat)]


CASES = [(*kind, settings) for kind in KINDS for settings in VARIANTS]
QUICK = [CASES[i] for i in range(0, len(CASES), 8)]
"""Each kind and most settings once."""


@pytest.mark.parametrize("weight, moments, settings", with_further(CASES, QUICK), ids=str)
def test_native_steps_are_the_oracles(weight: torch.dtype, moments: torch.dtype, settings: dict[str, Any]) -> None:
    """Two whole blocks and one that is cut, which ends in the middle of a vector."""
    states = [State(600 + 3, weight, moments) for _ in ISAS]
    for step in range(1, 4):
        rounding = Rounding.of(7, "layers.0.weight", step, 2**32 - 300 + 4 if step == 3 else 256 * step)
        dtype = [FP32, BF16, torch.float16][step % 3]
        grad, *_ = [state.gradient(dtype) for state in states]
        expected = oracle(states[0].weight, *states[0].moments(), grad, rounding, step, moments, **settings)
        for isa, state in zip(ISAS, states, strict=True):
            compute = torch.empty(603, dtype=[BF16, torch.float16][step % 2]) if weight == FP32 else None
            state.native(grad, compute, rounding, isa, 1, step=step, **settings)
            for found, wanted in zip((state.weight.float(), *state.moments()), expected, strict=True):
                assert torch.equal(found, wanted), (isa, step)
            if compute is not None:
                assert torch.equal(compute, state.weight.to(compute.dtype))


@pytest.mark.parametrize("weight, moments", KINDS)
def test_instruction_sets_threads_and_cuts_give_the_same_bits(weight: torch.dtype, moments: torch.dtype) -> None:
    """A shard in one piece, on several threads, in every instruction set; and in two pieces cut at a block's border."""
    numel, cut, found = 3 * 2**16 + 77, 2**16 + 512, []
    for isa, threads, cuts in (*((isa, 1, [0, numel]) for isa in ISAS), ("", 3, [0, numel]), ("", 1, [0, cut, numel])):
        state = State(numel, weight, moments)
        for step in (1, 2):
            grad = state.gradient(BF16)
            for start, stop in pairwise(cuts):
                part = State.__new__(State)
                part.weight = state.weight[start:stop]
                part.m, part.v = (
                    (one[0][start:stop], one[1][start // CODE_BLOCK : -(-stop // CODE_BLOCK)])
                    if isinstance(one, tuple)
                    else one[start:stop]
                    for one in (state.m, state.v)
                )
                rounding = Rounding.of(0, "w", step, start)
                part.native(grad[start:stop], None, rounding, isa, threads, step=step)
        found.append(state.raw())
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("weight, moments", KINDS)
def test_torchs_operators_are_the_native_kernel(
    weight: torch.dtype, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's square root on a CPU may be an ulp off; here it is numpy's, and everything else is torch's."""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: torch.from_numpy(np.sqrt(t.numpy())))
    monkeypatch.setattr(kernels, "TORCH_SLICE_NUMEL", 4 * CODE_BLOCK)
    states = [State(2000, weight, moments) for _ in range(2)]
    for step in range(1, 6):
        grad, *_ = [state.gradient(BF16) for state in states]
        rounding = Rounding.of(1, "w", step, 2**32 - 1000)
        settings = {**SETTINGS, **VARIANTS[step], "step": step}
        for state, native in zip(states, (kernels._native, None), strict=True):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "_native", native)
                narrow_step(state.weight, state.m, state.v, grad, None, rounding, **settings)
        assert all(map(torch.equal, states[0].raw(), states[1].raw()))
        before = states[1].raw()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_native", None)
            skip = torch.ones(())
            narrow_step(states[1].weight, states[1].m, states[1].v, grad, None, rounding, skip=skip, **settings)
        assert all(map(torch.equal, before, states[1].raw()))


# ----------------------------------------------------------------------------------------------------------- the codes


def test_codes_are_a_fixed_point_and_keep_what_is_above_zero() -> None:
    draw = torch.Generator().manual_seed(3)
    for scale in (1.0, 1e-20, 1e-38, 1e-44, 1e30):
        values = (
            torch.randn(1000, generator=draw) * torch.randint(-40, 1, (1000,), generator=draw).float().exp2() * scale
        )
        values[::7] = 0
        for signed in (True, False):
            given = values if signed else values.abs()
            codes, exponents = torch.empty(1000, dtype=CODES), torch.empty(4, dtype=CODES)
            encode(given, codes, exponents, signed=signed, random=torch.randint(2**20, (1000,), generator=draw))
            found = decode(codes, exponents, signed=signed)
            again = torch.empty_like(codes), torch.empty_like(exponents)
            for random in (None, torch.randint(2**20, (1000,), generator=draw)):
                encode(found, *again, signed=signed, random=random)
                assert torch.equal(again[0], codes) and torch.equal(again[1], exponents)
            assert torch.equal(decode(codes[300:], exponents[1:], signed=signed, first=300 - 256), found[300:])
            if not signed:
                assert torch.equal(found > 0, given > 0)
            near = given.abs() > 2.0**-12 * given.abs().amax()
            if scale > 1e-38:
                assert ((found.float() - given).abs() <= given.abs() / 8)[near].all()


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_has_no_bias(signed: bool) -> None:
    """A million draws of 1.3 in steps of 1/8: their mean is off by less than 5 standard deviations of it."""
    n = 1 << 20
    values = torch.full((n,), 1.3)
    words = Rounding.of(0, "w", 1, 0).words(0, n, torch.device("cpu"))
    for random in (words >> 12, words & 0xFFFFF):
        codes, exponents = torch.empty(n, dtype=CODES), torch.empty(n // 256, dtype=CODES)
        encode(values, codes, exponents, signed=signed, random=random)
        found = decode(codes, exponents, signed=signed).double()
        assert set(found.tolist()) == {1.25, 1.375}
        assert abs(found.mean().item() - 1.3) < 5 * found.std().item() / n**0.5


def test_an_update_too_small_for_bf16_is_made_on_average() -> None:
    """A weight of 1, of which each of 512 steps takes 2^-12, a sixteenth of half a step of bf16 downwards."""
    n = 4096
    weight, m, v = torch.ones(n, dtype=BF16), torch.zeros(n), torch.zeros(n)
    for step in range(1, 513):
        rounding = Rounding.of(0, "w", step, 0)
        settings = {**SETTINGS, "step": step, "lr": 2.0**-12, "weight_decay": 0.0, "eps": 0.0}
        narrow_step(weight, m, v, torch.ones(n), None, rounding, **settings)
    # Each step is drawn with a deviation below half a step of bf16, 2^-9.
    deviation = 2.0**-9 * 512**0.5
    assert abs(weight.float().mean().item() - (1 - 512 * 2.0**-12)) < 5 * deviation / n**0.5


def test_runs_are_cut_at_the_ends_of_windows() -> None:
    assert windows(0, 10, coded=False) == windows(0, 10, coded=True) == [(0, 10)]
    assert windows(2**32 - 4, 10, coded=False) == [(0, 4), (4, 10)]
    assert windows(2**32 - 4, 300, coded=True) == [(0, 256), (256, 300)]
    assert windows(5, 2**33, coded=False) == [(0, 2**32 - 5), (2**32 - 5, 2**33 - 5), (2**33 - 5, 2**33)]
    assert Rounding.of(0, "w", 1, 2**32).first == 0
    assert Rounding.of(0, "w", 1, 2**32).key != Rounding.of(0, "w", 1, 0).key
    assert len({Rounding.of(seed, w, step, 0).key for seed in (0, 1) for w in "vw" for step in (1, 2)}) == 8
