"""Operators: what they compute is what a CPU computes, and random numbers follow the host's order."""

import copy

import pytest
import torch
from torch import nn

from tests.accelerator.device import delayed, held
from tests.accelerator.runner import on_device
from tests.support.every import every

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, LR, EPS = 3, 1e-2, 1e-3
TOLERANCES = {"fp32": STEPS * LR * 64 * 2**-24 * 0.5 / EPS, "bf16": STEPS * 2**-7}
"""Torch decomposes some operators otherwise than for a CPU. In fp32, a gradient of at most 0.5 is a sum of 64 terms in
another order, and Adam moves by lr / eps of its error. In bf16, a weight of at most 1 is rounded elsewhere."""


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@on_device()
def test_steps_are_close_to_those_of_a_cpu(dtype: str) -> None:
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(4)).to(DTYPES[dtype])
    here = network().to(DTYPES[dtype])
    there = copy.deepcopy(here).to("threads")
    with delayed(1000, 0):
        for model, device in ((here, "cpu"), (there, "threads")):
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(rows.to(device)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    for (name, p), q in zip(here.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(
            q.cpu(), p, rtol=0, atol=TOLERANCES[dtype], msg=lambda text, name=name: f"{name}: {text}"
        )


@on_device()
def test_shapes_that_depend_on_data_make_the_host_wait() -> None:
    numbers = torch.arange(10).to("threads")
    assert torch.nonzero(numbers > 6).cpu().flatten().tolist() == [7, 8, 9]
    assert numbers[numbers > 7].cpu().tolist() == [8, 9]
    assert torch.equal(numbers, numbers.clone())
    assert numbers.sum().item() == 45


@on_device()
def test_a_call_alike_has_the_shape_and_dtype_of_its_own_numbers() -> None:
    numbers = torch.arange(6).to("threads")
    for step in (1, 2, 1):
        assert numbers[::step].cpu().tolist() == list(range(0, 6, step))
        assert numbers.repeat(step).shape == (6 * step,)
    assert (numbers * 0.5).dtype is (torch.arange(6) * 0.5).dtype is torch.float32
    assert (numbers * torch.tensor(0.5, dtype=torch.float64).to("threads")).dtype is torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        assert (numbers * 0.5).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@on_device()
def test_out_is_resized() -> None:
    out = torch.empty(0, device="threads")
    for numel in (5, 7, 5):
        torch.add(torch.ones(numel, device="threads"), 1, out=out.resize_(0))
        assert out.cpu().tolist() == [2.0] * numel


@on_device()
def test_random_numbers_follow_the_order_of_the_host() -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device="threads")

    def draw(late: torch.Stream) -> list[torch.Tensor]:
        torch.manual_seed(11)
        with held(late):
            drawn = [torch.randn(8, device="threads")]
            with side:
                drawn.append(torch.rand(8, device="threads"))
            drawn.append(nn.functional.dropout(torch.ones(64, device="threads"), 0.5))
        torch.accelerator.synchronize()
        return [numbers.cpu() for numbers in drawn]

    one, other = draw(main), draw(side)
    assert every(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert set(one[2].tolist()) == {0.0, 2.0}


@on_device()
def test_the_state_of_the_generator_is_the_device_s_own() -> None:
    torch.manual_seed(5)
    state, host_state = torch.threads.get_rng_state(), torch.get_rng_state()
    first = torch.randn(8, device="threads").cpu()
    assert torch.equal(torch.get_rng_state(), host_state)
    torch.threads.set_rng_state(state)
    assert torch.equal(torch.randn(8, device="threads").cpu(), first)


@on_device()
def test_a_generator_of_the_caller_is_used() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator("threads").manual_seed(seed)
        return torch.randn(8, device="threads", generator=generator).cpu()

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(8, device="threads", generator=torch.Generator("cpu"))
