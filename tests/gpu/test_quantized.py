"""LoRA of a quantized mixture on the CPU and on a GPU: the steps of plain torch with the decoded weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

import elixir_moe as em
from benchmarks.launches import accelerated
from elixir_moe.moe.experts import Groups
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.packed import Packed, as_bytes
from elixir_moe.quantized.products import grouped_linear
from tests.support.cases import with_further
from tests.support.parity import LOSS_TOLERANCE

TOLERANCE = 3 * 3e-5
"""Of an element after three steps, as `tests.support.parity` derives it."""
CASES = [("qwen3-moe", "nf4", plan) for plan in ("ddp", "zero3", "offload", "disk")]
CASES += [("qwen3-moe", scheme, "offload") for scheme in ("int8", "fp8")] + [("gpt-oss", "mxfp4", "zero3")]


@pytest.mark.parametrize(("family", "scheme", "plan"), with_further(CASES, [("qwen3-moe", "nf4", "disk")]))
def test_adapters_train_as_in_plain_torch(family: str, scheme: str, plan: str, device: str, run_on: Any) -> None:
    pytest.importorskip("transformers", reason="the models are its own")
    pytest.importorskip("peft", reason="the adapters are its own; --wheels brings it")
    run_on(device, 1)(adapts_as_plain_torch, family, scheme, plan, device)


def adapts_as_plain_torch(family: str, scheme: str, plan: str, device: str) -> None:
    """(rank) Losses and adapters after the steps."""
    em.init_mesh(device_type=device)
    from tests.support import quantized_cases as cases

    wanted = cases.built(family, scheme, decoded=True).to(device)
    losses = [loss.item() for loss in cases.steps(wanted, cases.optimizer_of(wanted))]
    found, trained = cases.run(family, scheme, cases.PLANS[plan], device=device)
    assert found == pytest.approx(losses, abs=LOSS_TOLERANCE)
    for name, value in wanted.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(trained[name].cpu(), value.detach().cpu(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("counts", [[0, 70, 1, 0, 129, 0], [0, 0, 0, 0, 0, 64], [64, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stacks_are_multiplied_as_each_expert(scheme: str, counts: list[int], device: str) -> None:
    """The device's own way, by a fused kernel where there is one; only the order of sums in fp32 may differ."""
    experts, outputs, inputs = len(counts), 192, 256
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, outputs, inputs, generator=generator) / inputs**0.5
    codes, scales = (as_bytes(part).to(device) for part in SCHEMES[scheme].encode(weight))
    packed = Packed(scheme=scheme, shape=(experts, outputs, inputs), dtype=torch.bfloat16)
    values = torch.randn(sum(counts), inputs, generator=generator).bfloat16().to(device)
    grad = torch.randn(sum(counts), outputs, generator=generator).bfloat16().to(device)
    bounds = torch.tensor([0, *counts], device=device).cumsum(0).int()
    numbers = torch.arange(experts).repeat_interleave(torch.tensor(counts)).to(device)

    def product() -> tuple[Tensor, Tensor]:
        rows = values.clone().requires_grad_()
        out = grouped_linear(rows, codes, scales, Groups(experts=numbers, bounds=bounds), packed)
        (gradient,) = torch.autograd.grad(out, rows, grad)
        return out.detach(), gradient

    with accelerated(fused=False, scratch_bytes=0):
        wanted = product()
    for _ in range(2):  # the second gets memory that is no longer fresh
        torch.testing.assert_close(product(), wanted, rtol=2**-7, atol=2**-7)
