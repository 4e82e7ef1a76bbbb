"""The Adam step on a shard against torch's own optimizers, and each of its paths against the others.

Tolerances, in EPS = 2^-23, the spacing of floats at 1. Native and torch's one-tensor form take the same float32
operations in the same order, so from one state the moments are equal to the bit. Only torch's square root (MKL's) may
be an ulp off the IEEE one: that is at most EPS of the update u, and as the update's other roundings may then fall the
other way (a division, a sum, a division: 1.5 EPS), 2.5 EPS |u|. Added to the weight p, a difference however small may
move the sum to the next float: EPS |p|. Where torch's CPU code does not fuse multiply-adds, the moments differ too.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_moe as em
from elixir_moe import kernels
from elixir_moe.native import native as _native
from tests.support.ranks import RankPool

EPS = 2.0**-23
ISAS = ["scalar", "neon"] if kernels.cpu_features() == "neon" else ["scalar", "avx2", "avx512"]
ISAS = [] if _native is None else ISAS[: ISAS.index(_native.cpu_features()) + 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS: dict[str, Any] = {
    "lr": 3e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_scale": 1.0,
    "decoupled": True,
    "maximize": False,
}
# lerp turns round where 1 - beta1 reaches a half.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"decoupled": False},
    {"weight_decay": 0.0},
    {"maximize": True, "decoupled": False},
    {"maximize": True, "beta1": 0.0},
    {"beta1": 0.5, "beta2": 0.9},
    {"beta1": 0.3, "grad_scale": 0.37},
]
fuses_like_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch does not fuse multiply-adds here"
)


class Shard:
    """A shard's arrays, each at an odd place within a larger tensor."""

    def __init__(self, numel: int, grad: torch.dtype, compute: torch.dtype | None, *, offset: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(numel + offset)
        dtypes = [torch.float32] * 3 + [grad] + ([compute] if compute else [])
        self.wholes = [torch.full((numel + 5 * offset + 3,), -7.0, dtype=dtype) for dtype in dtypes]
        self.parts = [slice(k * offset, k * offset + numel) for k in range(len(dtypes))]
        arrays = [whole[part] for whole, part in zip(self.wholes, self.parts, strict=True)]
        self.master, self.exp_avg, self.exp_avg_sq, self.grad = arrays[:4]
        self.compute = arrays[4] if compute else None
        self.master.normal_(generator=self.generator)
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()

    def draw_grad(self) -> None:
        """Gradients over many orders of magnitude, one in ten of them zero."""
        shape = self.grad.shape
        magnitude = torch.randint(-12, 3, shape, generator=self.generator).float().exp2()
        kept = torch.rand(shape, generator=self.generator) > 0.1
        self.grad.copy_(torch.randn(shape, generator=self.generator) * magnitude * kept)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.compute

    def surroundings(self) -> Tensor:
        """What lies before and after each array, where nobody may write."""
        pairs = zip(self.wholes, self.parts, strict=True)
        return torch.cat([torch.cat((whole[: part.start], whole[part.stop :])).float() for whole, part in pairs])


def step(shard: Shard, number: int, *, isa: str = "", threads: int = 1, **settings: Any) -> None:
    _native.adam_step(*shard.arrays(), **{**SETTINGS, **settings}, step=number, isa=isa, threads=threads)


def oracle(weight: Tensor, **settings: Any) -> torch.optim.Optimizer:
    """torch's optimizer of the same settings, but for the scale of the gradient, over a copy of the weight."""
    s = {**SETTINGS, **settings}
    parameter = torch.nn.Parameter(weight.clone())
    make = torch.optim.AdamW if s["decoupled"] else torch.optim.Adam
    rest = {key: s[key] for key in ("lr", "eps", "weight_decay", "maximize")}
    return make([parameter], betas=(s["beta1"], s["beta2"]), foreach=False, fused=False, **rest)


def oracle_step(optimizer: torch.optim.Optimizer, grad: Tensor, grad_scale: float = 1.0) -> list[Tensor]:
    """Weight and moments after one more step of the oracle."""
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = grad.float() * grad_scale
    optimizer.step()
    state = optimizer.state[parameter]
    return [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits))


@fuses_like_torch
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_one_step_from_torchs_state_gives_torchs_bits(isa: str, settings: dict[str, Any]) -> None:
    shard = Shard(1003, torch.float32, None)
    optimizer = oracle(shard.master, **settings)
    for number in range(1, 7):
        shard.draw_grad()
        before = shard.master.clone()
        step(shard, number, isa=isa, **settings)
        weight, exp_avg, exp_avg_sq = oracle_step(optimizer, shard.grad, settings.get("grad_scale", 1.0))
        # Of a zero, the sign is left open: torch's vectors and its odd ends do not agree on it themselves.
        assert torch.equal(shard.exp_avg, exp_avg)
        assert torch.equal(shard.exp_avg_sq, exp_avg_sq)
        tolerance = EPS * (2.5 * (weight - before).abs() + weight.abs())
        assert bool(((shard.master - weight).abs() <= tolerance).all())
        shard.master.copy_(weight)  # Adam's weight decay would carry a difference on into the moments


@pytest.mark.parametrize("isa", ISAS)
def test_many_steps_stay_with_torch(isa: str) -> None:
    # A step's error stays in the weight, so the errors add up: EPS |p| each, and what the update is off by. Two more
    # roundings in the first moment, each EPS of the largest gradient, matter most where the second moment has forgotten
    # that gradient, which leaves sqrt(v) at no less than 1/sqrt(steps) of it: all in all below 10 sqrt(steps) EPS lr.
    steps = 30
    shard = Shard(1003, torch.float32, None)
    optimizer = oracle(shard.master)
    for number in range(1, steps + 1):
        shard.draw_grad()
        step(shard, number, isa=isa)
        weight, _, _ = oracle_step(optimizer, shard.grad)
        tolerance = number * EPS * (weight.abs().max() + 10 * steps**0.5 * SETTINGS["lr"])
        assert (shard.master - weight).abs().max() <= tolerance


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("compute", [None, *DTYPES[1:]], ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(
    grad: torch.dtype, compute: torch.dtype | None, settings: dict[str, Any], isa: str
) -> None:
    for numel, offset in [(0, 0), (1, 0), (15, 1), (16, 0), (64, 0), (67, 3), (1003, 0), (1003, 5)]:
        plain, simd = Shard(numel, grad, compute, offset=offset), Shard(numel, grad, compute, offset=offset)
        outside = plain.surroundings()
        for number in range(1, 4):
            plain.draw_grad()
            simd.draw_grad()
            step(plain, number, isa="scalar", **settings)
            step(simd, number, isa=isa, **settings)
        for found, expected in zip(simd.wholes, plain.wholes, strict=True):
            assert_same_bits(found, expected)
        assert torch.equal(simd.surroundings(), outside)


@pytest.mark.parametrize(
    ("threads", "numel"), [(2, 5 * 65536 + 13), (3, 5 * 65536), (7, 5 * 65536 + 1), (48, 48 * 65536)]
)
def test_threads_share_the_work_without_a_trace(threads: int, numel: int) -> None:
    # A thread gets 65536 elements or more, so of seven only five have work.
    alone, shared = (Shard(numel, torch.bfloat16, torch.bfloat16, offset=1) for _ in range(2))
    for shard, count in ((alone, 1), (shared, threads)):
        shard.draw_grad()
        step(shard, 1, threads=count)
    for found, expected in zip(shared.wholes, alone.wholes, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_compute_shard_is_rounded_as_torch_rounds(dtype: torch.dtype, isa: str) -> None:
    # Every value of the dtype, the float halfway to its neighbor, and the floats beside both: all ties and all edges.
    value = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halfway = (value.view(torch.int32) + (1 << (15 if dtype == torch.bfloat16 else 12))).view(torch.float32)
    exact = torch.cat([value, halfway]).view(torch.int32)
    master = torch.cat([exact - 1, exact, exact + 1]).view(torch.float32)
    expected = master.to(dtype)
    shard = Shard(master.numel(), dtype, dtype)
    shard.master.copy_(master)
    shard.grad.zero_()
    step(shard, 1, isa=isa, lr=0.0, weight_decay=0.0)  # leaves the master shard as it is
    assert shard.compute is not None
    number = ~master.isnan()
    assert_same_bits(shard.compute[number], expected[number])
    assert bool(shard.compute[~number].isnan().all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_finite_gradient_is_read_exactly(dtype: torch.dtype, isa: str) -> None:
    value = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    value = value[value.isfinite()]
    shard = Shard(value.numel(), dtype, None)
    shard.grad.copy_(value)
    step(shard, 1, isa=isa, beta1=0.0)  # the first moment is then the gradient
    assert_same_bits(shard.exp_avg, value.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_compute_may_be_the_memory_of_the_gradient(dtype: torch.dtype, isa: str) -> None:
    apart, together = (Shard(1003, dtype, dtype, offset=1) for _ in range(2))
    together.compute = together.grad
    for shard in (apart, together):
        shard.draw_grad()
        step(shard, 1, isa=isa)
    assert apart.compute is not None
    assert_same_bits(together.grad, apart.compute)
    assert_same_bits(together.master, apart.master)


Change = Callable[[Shard], dict[str, Any]]


def _set(name: str, make: Callable[[Shard], Tensor]) -> Change:
    def change(shard: Shard) -> dict[str, Any]:
        setattr(shard, name, make(shard))
        return {}

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_set("exp_avg", lambda s: s.exp_avg[1:]), ValueError, "exp_avg has 63 elements, master has 64"),
        (_set("exp_avg_sq", lambda s: s.exp_avg_sq[1:]), ValueError, "exp_avg_sq has 63"),
        (_set("grad", lambda s: s.grad[:0]), ValueError, "grad has 0"),
        (_set("compute", lambda s: torch.empty(65, dtype=torch.bfloat16)), ValueError, "compute has 65"),
        (_set("grad", lambda s: s.grad.double()), ValueError, "grad must be float32, bfloat16 or float16"),
        (_set("grad", lambda s: s.grad.to(torch.int16)), ValueError, "grad must be float32, bfloat16 or float16"),
        (_set("compute", lambda s: s.master.clone()), ValueError, "compute is float32"),
        (_set("compute", lambda s: s.master.to(torch.int16)), ValueError, "compute must be"),
        (_set("master", lambda s: s.master.double()), TypeError, "incompatible function arguments"),
        (_set("exp_avg", lambda s: s.exp_avg.bfloat16()), TypeError, "incompatible function arguments"),
        (_set("exp_avg", lambda s: torch.zeros(128)[::2]), TypeError, "incompatible function arguments"),
        (_set("grad", lambda s: torch.zeros(8, 8)), TypeError, "incompatible function arguments"),
        (lambda s: {"number": 0}, ValueError, "step is 0"),
        (lambda s: {"threads": 0}, ValueError, "threads is 0"),
        (lambda s: {"isa": "neon"}, ValueError, "isa is 'neon'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_left_alone(
    change: Change, error: type[Exception], message: str
) -> None:
    shard = Shard(64, torch.bfloat16, torch.bfloat16)
    shard.draw_grad()
    before = [whole.clone() for whole in shard.wholes]
    arguments = {"number": 1, **change(shard)}
    with pytest.raises(error, match=message):
        step(shard, **arguments)
    for found, expected in zip(shard.wholes, before, strict=True):
        assert_same_bits(found, expected)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as it is where nobody built the native module, with slices small enough to need several."""
    monkeypatch.setattr(kernels, "_native", None)
    monkeypatch.setattr(kernels, "TORCH_SLICE_NUMEL", 400)
    assert kernels.cpu_features() == "torch"
    yield


def dispatched(shard: Shard, number: int, **settings: Any) -> None:
    kernels.adam_step(*shard.arrays(), **{**SETTINGS, **settings}, step=number)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
@pytest.mark.fault(40)
def test_torch_path_is_torchs_optimizer(unbuilt: None, grad: torch.dtype, settings: dict[str, Any]) -> None:
    shard = Shard(1003, grad, torch.bfloat16)
    optimizer = oracle(shard.master, **settings)
    for number in range(1, 4):
        shard.draw_grad()
        given = shard.grad.clone()
        dispatched(shard, number, **settings)
        expected = oracle_step(optimizer, shard.grad, settings.get("grad_scale", 1.0))
        # The same operations, yet in slices: elements before or after a whole vector may be rounded otherwise.
        for found, wanted in zip((shard.master, shard.exp_avg, shard.exp_avg_sq), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=4 * number * EPS, atol=4 * number * EPS)
        assert shard.compute is not None
        assert_same_bits(shard.compute, shard.master.bfloat16())
        assert_same_bits(shard.grad, given)


@pytest.fixture
def fused(unbuilt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on a GPU: torch's fused kernel, here that of the CPU."""
    monkeypatch.setattr(kernels, "fuses", lambda device: True)


class Operators(TorchDispatchMode):
    """The operators that write or make tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_a_step_by_the_fused_kernel_is_torchs(
    fused: None, grad: torch.dtype, settings: dict[str, Any], on_device: bool
) -> None:
    """Within some eight roundings a step, each EPS of the update or of the moment it falls in, since torch's fused
    kernel orders its operations in its own way. The moments are sums of what may cancel, so they count against the
    largest gradient. With `on_device` the scale is a scalar tensor.
    """
    shard = Shard(1003, grad, torch.bfloat16)
    optimizer = oracle(shard.master, **settings)
    scale = settings.get("grad_scale", 1.0)
    for number in range(1, 4):
        shard.draw_grad()
        expected = oracle_step(optimizer, shard.grad, scale)
        there = torch.tensor(scale, dtype=torch.float64) if on_device else scale
        dispatched(shard, number, **settings | {"grad_scale": there})
        largest = float(shard.grad.abs().max()) + 1.0
        for found, wanted in zip((shard.master, shard.exp_avg, shard.exp_avg_sq), expected, strict=True):
            atol = 8 * number * EPS * (1 if found is shard.master else largest**2)
            torch.testing.assert_close(found, wanted, rtol=8 * number * EPS, atol=atol)
        assert shard.compute is not None
        assert_same_bits(shard.compute, shard.master.bfloat16())


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_by_the_fused_kernel_is_skipped_by_a_number(fused: None, skipped: bool) -> None:
    shard = Shard(1003, torch.bfloat16, torch.bfloat16)
    shard.draw_grad()
    before = [array.clone() for array in (shard.master, shard.exp_avg, shard.exp_avg_sq)]
    dispatched(shard, 1, skip=torch.tensor(float(skipped)))
    for now, then in zip((shard.master, shard.exp_avg, shard.exp_avg_sq), before, strict=True):
        assert torch.equal(now, then) == skipped
    assert shard.compute is not None
    assert_same_bits(shard.compute, shard.master.bfloat16())


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_scale_of_zero_drops_the_gradient(fused: None, decoupled: bool) -> None:
    shard = Shard(1003, torch.float32, None)
    shard.draw_grad()
    dispatched(shard, 1, grad_scale=0.0, decoupled=decoupled, weight_decay=0.0)
    assert not shard.exp_avg.any() and not shard.exp_avg_sq.any()


def test_a_step_on_a_gpu_is_one_operator(fused: None) -> None:
    count, divisor = torch.tensor(1.0), torch.tensor(2.0)
    cast = ["_to_copy", "_fused_adamw_", "copy_"]
    slices = -(-1003 // kernels.TORCH_SLICE_NUMEL)
    for grad, compute, expected in (
        (torch.float32, None, ["_fused_adamw_"]),
        (torch.float32, torch.bfloat16, ["_fused_adamw_", "copy_"]),
        (torch.bfloat16, torch.bfloat16, cast * slices),
    ):
        shard = Shard(1003, grad, compute)
        with Operators() as seen:
            dispatched(shard, 1, grad_scale=0.5, count=count, divisor=divisor)
        assert seen.names == expected, (grad, compute)


def stepped_on_a_gpu() -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """(rank) The operators of an update of four runs, two of whose chunks have both settings; the weights, and torch's.

    The norm is clipped, so every gradient is scaled.
    """
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer: Any = torch.optim.AdamW(groups, 1e-2, fused=not ours)
        if ours:
            em.annotate(model, {"*": em.Pattern(em.init_mesh(device_type="cpu"), replicate=("dp",))})
            model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero3(chunk_numel=16 * 16 + 16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "fuses", lambda device: True)
            patch.setattr("elixir_moe.optim.shard_update.fuses", lambda device: True)
            for step in range(3):
                inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
                model(inputs).square().sum().backward()
                if ours:
                    optimizer.clip_grad_norm_(1.0)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with Operators() as seen:
                    optimizer.step()
                optimizer.zero_grad()
        if ours:
            found = seen.names
            weights = em.full_state_dict(model)
            optimizer.close()
    return found, weights, dict(model.state_dict())


def test_an_update_on_a_gpu_is_one_operator_for_each_run(ranks: Callable[[int], RankPool]) -> None:
    ((names, ours, plain),) = ranks(1).run(stepped_on_a_gpu)
    assert names.count("_fused_adamw_") == 4
    assert not {"mul", "_to_copy", "copy_", "_foreach_add_", "add_"} & set(names), names
    assert names.count("full") <= 2, "the number of the step and the divisor, for all runs"
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)


def test_dispatch_in_host_memory_is_the_native_kernel() -> None:
    ours, direct = (Shard(1003, torch.bfloat16, torch.float16) for _ in range(2))
    ours.master = ours.master.requires_grad_()  # autograd's opinion does not matter to a shard
    for number in range(1, 3):
        ours.draw_grad()
        direct.draw_grad()
        dispatched(ours, number)
        step(direct, number)
    for found, expected in zip(ours.wholes, direct.wholes, strict=True):
        assert_same_bits(found.detach(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("exp_avg", lambda s: s.exp_avg[1:]), "exp_avg has 63 elements on cpu, master has 64"),
        (_set("exp_avg_sq", lambda s: torch.zeros(128)[::2]), "exp_avg_sq must be one-dimensional and contiguous"),
        (_set("grad", lambda s: s.grad.to("meta")), "grad has 64 elements on meta"),
        (_set("grad", lambda s: s.grad.double()), "grad is torch.float64"),
        (_set("master", lambda s: s.master.bfloat16()), "master is torch.bfloat16"),
        (_set("compute", lambda s: s.master.clone()), "compute is torch.float32"),
        (lambda s: {"number": 0}, "step is 0"),
    ],
)
def test_dispatch_names_the_array_that_does_not_fit(change: Change, message: str) -> None:
    shard = Shard(64, torch.bfloat16, torch.bfloat16)
    arguments = {"number": 1, **change(shard)}
    with pytest.raises(ValueError, match=message):
        dispatched(shard, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 3_000_001])
def test_the_sum_of_squares_is_exact_whatever_the_length(
    dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the native kernel, and as on a GPU."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = gradient.double().square().sum().item()
    assert kernels.sum_of_squares(gradient) == pytest.approx(wanted, rel=1e-6)
    monkeypatch.setattr(kernels, "_native", None)
    assert kernels.sum_of_squares(gradient) == pytest.approx(wanted, rel=1e-6)


class Kernels(TorchDispatchMode):
    """Notes the operators that would launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.launched.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("numel", "most"), [(3 * kernels.NORM_ROW_NUMEL, 3), (3 * kernels.NORM_ROW_NUMEL + 5, 4)])
def test_the_sum_of_squares_on_a_gpu_takes_few_launches(numel: int, most: int) -> None:
    """It is taken for each chunk, and short ones take no longer than their launches."""
    with Kernels() as seen:
        kernels.sum_of_squares(torch.empty(numel, dtype=torch.bfloat16, device="meta"))
    assert len(seen.launched) <= most, seen.launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, kernels.HOT_NUMEL, 3 * kernels.HOT_NUMEL + 4097])
def test_what_is_added_is_squared_on_the_way(dtype: torch.dtype, numel: int) -> None:
    draw = torch.Generator().manual_seed(0)
    total, term = (torch.randn(numel, generator=draw).to(dtype) for _ in range(2))
    wanted = total + term
    assert kernels.add_and_square(total, term) == pytest.approx(kernels.sum_of_squares(wanted), rel=1e-12)
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_sums_the_same_squares(isa: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 15, 16, 17, 4095, 4096, 4097, 10_000):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        found = _native.sum_of_squares(gradient, threads=1, isa=isa)
        assert found == _native.sum_of_squares(gradient, threads=1, isa="scalar"), numel
        # 256 terms to a float sum: an error of at most 256 * 2^-24, in fact of its root
        assert found == pytest.approx(gradient.double().square().sum().item(), rel=2e-5)
    assert math.isinf(_native.sum_of_squares(torch.tensor([1.0, float("inf")]), threads=1, isa=isa))
    assert math.isnan(_native.sum_of_squares(torch.tensor([1.0, float("nan")]), threads=1, isa=isa))
    long = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    assert _native.sum_of_squares(long, threads=3, isa=isa) == pytest.approx(
        _native.sum_of_squares(long, threads=1), rel=1e-12
    )


def test_products_in_bf16_end_no_process_whatever_the_cpu_announces() -> None:
    """Torch is kept from matrix tiles where they trap, and nowhere else."""
    name = "ONEDNN_MAX_CPU_ISA"
    code = f"""
import os, torch, elixir_moe
elixir_moe.init_mesh(device_type="cpu")
ones = torch.ones(64, 64, dtype=torch.bfloat16)
print((ones @ ones).sum().item(), torch.nn.functional.linear(ones, ones).sum().item(), os.environ.get({name!r}))"""
    unset = {key: value for key, value in os.environ.items() if key != name}
    done = subprocess.run([sys.executable, "-c", code], env=unset, capture_output=True, text=True, timeout=120)
    told = "AVX512_CORE_FP16" if _native.tiles_trap() else None
    assert done.stdout.split() == [str(64.0**3)] * 2 + [str(told)], done.stderr


@pytest.mark.parametrize(("before", "after"), [(None, "AVX512_CORE_FP16"), ("AVX2", "AVX2")])
def test_what_the_user_has_told_torch_stays(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "tiles_trap", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", before or "")  # what was there comes back behind the test
    if before is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    kernels.spare_tiles()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == after


def test_memory_lies_on_a_node_of_this_machine() -> None:
    """Threads are kept near it where there are several; where there is one, nobody asks."""
    online = Path("/sys/devices/system/node/online")
    listed = online.read_text().strip() if online.exists() else "0"
    ends = [[int(n) for n in part.split("-")] for part in listed.split(",")]
    nodes = {node for first, *last in ends for node in range(first, (last or [first])[0] + 1)}
    found = _native.node_of(torch.ones(1 << 20, dtype=torch.uint8))
    assert found == -1 if len(nodes) == 1 else found in {-1, *nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 17, 3 * kernels.HOT_NUMEL + 4097])
def test_a_sum_has_the_bits_of_torchs(dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every instruction set that runs here, and without the native kernel."""
    draw = torch.Generator().manual_seed(0)
    start, term = torch.randn(numel, generator=draw), torch.randn(numel, generator=draw).to(dtype)
    wanted = start + term.float()
    for isa in ISAS:
        total = start.clone()
        _native.add_to(total, term, threads=3, isa=isa)
        assert torch.equal(total, wanted), isa
    for native in (kernels._native, None):
        monkeypatch.setattr(kernels, "_native", native)
        total = start.clone()
        kernels.add_to(total, term, threads=2)
        assert torch.equal(total, wanted)
