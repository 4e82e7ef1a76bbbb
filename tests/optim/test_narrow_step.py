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
from tests.support.every import every

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


def in_codes(values: list[float], words: list[int], *, signed: bool) -> list[float]:
    """The values that the codes of each block stand for."""
    shift, half, least = (20, 64, 39) if signed else (18, 128, 99)
    found: list[float] = []
    for start in range(0, len(values), CODE_BLOCK):
        block = [abs(x) if signed else float(np.sqrt(np.sqrt(np.float32(x)))) for x in values[start:][:CODE_BLOCK]]
        drawn = [w % 2**20 if signed else w >> 14 for w in words[start:][:CODE_BLOCK]]
        of_block = words[start] >> 20 if signed else words[start]
        q = [(bits_of(x) + low) >> shift for x, low in zip(block, drawn, strict=True)]
        top = max(least, max(q) >> 23 - shift)
        fine = (top + 1 << 23 - shift) - half
        lowest = fine - 4 * half + 4
        for place, (x, steps) in enumerate(zip(values[start:], q, strict=False)):
            kept = steps if steps >= fine else (steps + (of_block + place) % 4) // 4 * 4
            if signed:
                kept = kept if kept >= lowest else 0
            else:
                kept = max(kept, lowest, bits_of(2.0**-31) >> shift) if steps else 0
            size = np.float32(float_of(kept << shift))
            found.append(math.copysign(float(size if signed else size * size * (size * size)), x))
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
        ms = in_codes(ms, words, signed=True)
        vs = in_codes(vs, words, signed=False)
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
        assert every(map(torch.equal, found[0], other))


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
        assert every(map(torch.equal, states[0].raw(), states[1].raw()))
        before = states[1].raw()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_native", None)
            skip = torch.ones(())
            narrow_step(states[1].weight, states[1].m, states[1].v, grad, None, rounding, skip=skip, **settings)
        assert every(map(torch.equal, before, states[1].raw()))


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
            encode(given, codes, exponents, signed=signed, random=torch.randint(2**32, (1000,), generator=draw))
            found = decode(codes, exponents, signed=signed)
            again = torch.empty_like(codes), torch.empty_like(exponents)
            for random in (None, torch.randint(2**32, (1000,), generator=draw)):
                encode(found, *again, signed=signed, random=random)
                assert torch.equal(again[0], codes) and torch.equal(again[1], exponents)
            assert torch.equal(decode(codes[300:], exponents[1:], signed=signed, first=300 - 256), found[300:])
            if not signed:
                assert torch.equal(found > 0, given > 0)
            if scale < 1e-20:
                continue
            for start in range(0, 1000, CODE_BLOCK):
                block, kept = (t[start : start + CODE_BLOCK] for t in (given, found.float()))
                largest, off = block.abs().amax(), (kept - block).abs()
                fine, coarse = (2.0**-7, 2.0**-38) if signed else (2.0**-12, 2.0**-76)
                within = (1 / 8, 1 / 2) if signed else ((33 / 32) ** 4 - 1, (9 / 8) ** 4 - 1)
                for reach, error in zip((fine, coarse), within, strict=True):
                    assert (off <= error * block.abs())[block.abs() > reach * largest].all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("scale", "steps"), [(1.0, (8, 32)), (2.0**-12, (2, 8))], ids=["fine", "coarse"])
def test_rounding_has_no_bias(signed: bool, scale: float, steps: tuple[int, int]) -> None:
    """A million draws of 1.3, or of its fourth power: the mean of what is rounded is off by less than 5 standard
    deviations of it. One element of each block is so large that the others are in the range that `scale` says.
    """
    n, a_unit = 1 << 20, steps[not signed]
    x = 1.3 * (scale if signed else scale**0.5)
    values = torch.full((n,), x if signed else x**4)
    values[::CODE_BLOCK] = 1.5 if signed else 1.5**4
    random = Rounding.of(0, "w", 1, 0).words(0, n, torch.device("cpu"))
    codes, exponents = torch.empty(n, dtype=CODES), torch.empty(n // CODE_BLOCK, dtype=CODES)
    encode(values, codes, exponents, signed=signed, random=random)
    found = decode(codes, exponents, signed=signed).double().view(-1, CODE_BLOCK)[:, 1:].flatten()
    found = (found if signed else found.sqrt().sqrt()) / (x / 1.3)
    assert set(found.tolist()) == {math.floor(1.3 * a_unit) / a_unit, math.ceil(1.3 * a_unit) / a_unit}
    assert abs(found.mean().item() - 1.3) < 5 * found.std().item() / len(found) ** 0.5


RATIOS = (1.0, 1e-2, 1e-4, 1e-6)


def codes_and_fp32(numel: int) -> list[tuple[Tensor, Any, Any]]:
    """(weight, exp_avg, exp_avg_sq), all zeros: with moments in codes, and in fp32."""
    found: list[tuple[Tensor, Any, Any]] = []
    for moments in (CODES, FP32):
        state = State(numel, FP32, moments)
        found.append((torch.zeros(numel), state.m, state.v))
    return found


@pytest.mark.parametrize("mean, deviation", [(1.0, 3.0), (1.0, 0.0)], ids=["noise", "constant"])
def test_small_gradients_move_a_weight_as_in_fp32(mean: float, deviation: float) -> None:
    """Elements whose gradients are up to a million times smaller than others of their block: the sum of their updates
    is fp32's within 1 %, and within 0.3 % for the largest. Means over 32768 elements are within 0.2 % of the expected.
    """
    numel, draw = 4 * 32768, torch.Generator().manual_seed(1)
    states = codes_and_fp32(numel)
    for step in range(1, 201):
        gradient = mean + deviation * torch.randn(numel // 4, 1, generator=draw).expand(-1, 4)
        gradient = (gradient * torch.tensor(RATIOS)).flatten()
        settings: Any = {**SETTINGS, "step": step, "lr": 1.0, "weight_decay": 0.0, "eps": 1e-30}
        for state in states:
            narrow_step(*state, gradient, None, Rounding.of(0, "w", step, 0), **settings)
    codes, fp32 = (weight.view(-1, 4).double().mean(0) for weight, *_ in states)
    off = (codes / fp32 - 1).abs()
    assert off[0] < 0.003 + 0.002 and off.max() < 0.01 + 0.002, off


@pytest.mark.parametrize("spike", [1e6, 1e8])
def test_a_spike_does_not_stop_its_block(spike: float) -> None:
    """After thirty steps of 1, one gradient is a spike. The others of its block move as in fp32 at once."""
    numel = 4096
    states = codes_and_fp32(numel)
    for step in range(1, 82):
        gradient = torch.ones(numel)
        if step == 31:
            gradient[::CODE_BLOCK] = spike
            before = [weight.clone() for weight, *_ in states]
        settings: Any = {**SETTINGS, "step": step, "lr": 1.0, "weight_decay": 0.0, "eps": 1e-30}
        for state in states:
            narrow_step(*state, gradient, None, Rounding.of(0, "w", step, 0), **settings)
    moved, expected = (
        (weight - old).view(-1, CODE_BLOCK)[:, 1:].mean().item()
        for (weight, *_), old in zip(states, before, strict=True)
    )
    assert abs(moved / expected - 1) < 0.04


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


@pytest.mark.parametrize(("weight", "moments"), KINDS)
def test_what_is_not_finite_stays_so(
    weight: torch.dtype, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the bits of a NaN: CUDA's arithmetic makes 0x7FFFFFFF, and others hand on those that they are given."""
    bits = [0x7FFFFFFF, -1, 0x7FFF0000, -0x10000, 0x7FC00000, -0x400000, 0x7F800001, 0x7F800000, -0x800000]
    places, rounding = torch.arange(len(bits)) * CODE_BLOCK + 3, Rounding.of(0, "w", 1, 0)
    for isa in (*ISAS, None):
        state = State(len(bits) * CODE_BLOCK, weight, moments)
        gradient = state.gradient(FP32)
        gradient[places] = torch.tensor(bits, dtype=torch.int32).view(FP32)
        if isa is None:
            monkeypatch.setattr(kernels, "_native", None)
            narrow_step(state.weight, state.m, state.v, gradient, None, rounding, **{**SETTINGS, "step": 1})
        else:
            state.native(gradient, None, rounding, isa, 1, step=1)
        for what, found in zip(("weight", "exp_avg", "exp_avg_sq"), (state.weight, *state.moments()), strict=True):
            assert not found[places].isfinite().any(), (isa, what, found[places])
