"""The bytes that the decoding of quantized weights moves, as a trace counts them, and those of a narrow update."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe import kernels
from elixir_moe.kernels import AdamSettings
from elixir_moe.planner.decoding import Moved, bytes_a_weight
from elixir_moe.planner.hardware import NARROW_UPDATE_ON_DEVICE
from elixir_moe.planner.trace import trace
from elixir_moe.quantized import decoders
from elixir_moe.quantized.formats import SCHEMES

WIDTH, LAYERS = 128, 5


class Stack(nn.Module):
    """Equal layers, which the trace cuts to a few, behind something that is trained."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers.requires_grad_(False)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def moved(scheme: str | None, *, again: bool, device: torch.device | None = None) -> int:
    """Bytes moved by all operators of a step that are no products."""
    model: Any = Stack(again=again)
    if scheme is not None:
        em.quantize(model, scheme, targets="layers.*")
    batch = torch.randn(4, WIDTH)
    return trace(model, lambda m, x: m(x).sum(), batch, device=device, tokens=4).traffic_bytes


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_backward_and_recomputation_decode_each_weight(scheme: str, again: bool) -> None:
    """One pass reads the bytes of a weight and writes it in fp32; all layers count, whether traced or not."""
    once = LAYERS * (SCHEMES[scheme].nbytes((WIDTH, WIDTH)) + 4 * WIDTH**2)
    extra = moved(scheme, again=again) - moved(None, again=again)
    per_weight = SCHEMES[scheme].nbytes((512, 512)) / 512**2 - SCHEMES[scheme].nbytes((WIDTH, WIDTH)) / WIDTH**2
    assert extra == pytest.approx((3 if again else 2) * (once + per_weight * LAYERS * WIDTH**2), rel=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torchs_operators_move_more_than_one_pass(scheme: str) -> None:
    assert bytes_a_weight(scheme, torch.bfloat16, native=False) > bytes_a_weight(scheme, torch.bfloat16, native=True)
    one = SCHEMES[scheme].nbytes((512, 512)) / 512**2 + 2
    assert bytes_a_weight(scheme, torch.bfloat16, native=True) == pytest.approx(one)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_kernel_decodes_on_the_cpu_and_on_a_gpu_that_is_not_here(device: torch.device | None) -> None:
    """The steps of a plan for a named GPU are those of the GPU, where Triton decodes."""
    once = LAYERS * (SCHEMES["nf4"].nbytes((WIDTH, WIDTH)) + 4 * WIDTH**2)
    assert moved("nf4", again=False, device=device) - moved(None, again=False, device=device) < 2.1 * once


def test_a_device_on_which_triton_decodes_reads_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("meta")
    without = moved("nf4", again=False, device=device)
    monkeypatch.setattr(decoders, "_triton_on", lambda device: decoders)
    assert moved("nf4", again=False, device=device) == moved("nf4", again=False) < without / 2


def test_operators_of_a_narrow_update_move_what_a_machine_file_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of an update with a bf16 master and codes, by torch's operators, over the 28 of a fused one in fp32."""
    monkeypatch.setattr(kernels, "_native", None)
    numel = 1 << 14
    weight, gradient = (torch.ones(numel, dtype=torch.bfloat16) for _ in range(2))
    codes, exponents = (torch.ones(n, dtype=torch.uint8) for n in (numel, numel // kernels.CODE_BLOCK))
    moments = [(codes.clone(), exponents.clone()) for _ in range(2)]
    settings: AdamSettings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with Moved() as moved:
        kernels.narrow_step(weight, *moments, gradient, None, kernels.Rounding((1, 2)), **settings)
    assert moved.nbytes / numel / 28 == pytest.approx(NARROW_UPDATE_ON_DEVICE, rel=0.1)
