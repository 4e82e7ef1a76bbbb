"""LoRA of a quantized mixture on the CPU and on a GPU: the steps of plain torch with the decoded weights."""

from typing import Any

import pytest
import torch

import elixir_moe as em
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
