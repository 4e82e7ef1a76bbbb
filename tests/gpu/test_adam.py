"""Adam on a device: Triton's kernel gives the bits of host memory; torch's fused kernel, in its place, is near them."""

import warnings
from typing import Any

import pytest
import torch

from elixir_moe import kernels
from elixir_moe.torch_private import has_triton
from tests.optim.test_adam import DTYPES, EPS, SETTINGS, VARIANTS, Shard, assert_same_bits


def moved(shard: Shard, device: str) -> Shard:
    """The shard on a device, at the same places of its memory: its parts share the bytes around them."""
    shard.wholes = [whole.to(device) for whole in shard.wholes]
    arrays = [whole[part] for whole, part in zip(shard.wholes, shard.parts, strict=True)]
    shard.master, shard.exp_avg, shard.exp_avg_sq, shard.grad = arrays[:4]
    shard.compute = arrays[4] if len(arrays) > 4 else None
    return shard


def step(shard: Shard, number: int, settings: dict[str, Any], *, scalars: bool) -> None:
    """A step; with `scalars`, whether to skip and the scale are scalars on the device."""
    given = {**SETTINGS, **settings}
    if scalars:
        there = shard.master.new_tensor([given["grad_scale"], 0.0], dtype=torch.float64)
        given |= {"grad_scale": there[0], "skip": there[1].float()}
    kernels.adam_step(*shard.arrays(), step=number, **given)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_triton_gives_the_bits_of_host_memory(grad: torch.dtype, settings: dict[str, Any], device: str) -> None:
    """Of runs that begin anywhere, end anywhere, and take many programs."""
    if kernels.cpu_features() == "torch":
        pytest.skip("no native kernel was built, whose bits these are")
    if device != "cpu" and kernels._adam_in_triton(torch.device(device)) is None:
        pytest.skip("Triton does not work here; its warning says why")
    for numel, offset, compute in ((2069, 3, torch.bfloat16), (1 << 20, 0, torch.float16), (7, 0, None)):
        here, there = (Shard(numel, grad, compute, offset=offset) for _ in range(2))
        there = moved(there, device)
        for number in range(1, 4):
            here.draw_grad()
            there.grad.copy_(here.grad)
            step(here, number, settings, scalars=False)
            step(there, number, settings, scalars=device != "cpu" and number > 1)
        for found, wanted in zip(there.wholes, here.wholes, strict=True):
            assert_same_bits(found.cpu(), wanted)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("grad", DTYPES, ids=str)
def test_without_triton_torchs_kernel_is_near(
    grad: torch.dtype, settings: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tolerances are those of tests/optim/test_adam.py: torch's fused kernel orders its operations in its own way."""
    monkeypatch.setattr(kernels, "_adam_in_triton", lambda device: None)
    here, there = Shard(1003, grad, torch.bfloat16), moved(Shard(1003, grad, torch.bfloat16), device)
    for number in range(1, 4):
        here.draw_grad()
        there.grad.copy_(here.grad)
        largest = float(here.grad.abs().max()) + 1.0
        step(here, number, settings, scalars=False)
        step(there, number, settings, scalars=False)
        near = 8 * number * EPS
        torch.testing.assert_close(there.master.cpu(), here.master, rtol=near, atol=near)
        torch.testing.assert_close(there.exp_avg.cpu(), here.exp_avg, rtol=0, atol=near * largest)
        assert there.compute is not None
        assert_same_bits(there.compute.cpu(), there.master.bfloat16().cpu())


@pytest.mark.parametrize("skipped", [False, True])
def test_values_take_the_gradients_place(skipped: bool, device: str) -> None:
    """Also those of a step that is skipped, which are the old ones."""
    shard = moved(Shard(100_003, torch.bfloat16, None), device)
    shard.grad.fill_(float("nan") if skipped else 1.0)
    shard.compute, before = shard.grad, shard.master.clone()
    there = {} if device == "cpu" else {"skip": torch.tensor(float(skipped), device=device)}
    if device == "cpu" and skipped:
        pytest.skip("on the CPU, the host decides whether to step")
    kernels.adam_step(*shard.arrays(), step=1, **SETTINGS, **there)
    assert torch.equal(shard.master, before) == skipped
    assert_same_bits(shard.compute, shard.master.bfloat16())


def test_triton_updates_where_it_is(device: str) -> None:
    if device == "cpu":
        assert kernels._adam_in_triton(torch.device("cpu")) is None and not kernels.fuses(torch.device("cpu"))
        return
    with warnings.catch_warnings(record=True, action="always") as said:
        found = kernels._adam_in_triton.__wrapped__(torch.device(device))
    assert (found is None) == (bool(said) or not has_triton()), "where it is and its first kernel runs"
    assert kernels.fuses(torch.device(device)) == (found is None)
