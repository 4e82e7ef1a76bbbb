"""The loss of a head without its logits on a device: whole, tiled, or of bytes, as on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em

TOKENS, WIDTH, VOCABULARY = 70, 128, 768


def found_on(device: str, head: str, dtype: torch.dtype) -> list[Tensor]:
    """The loss, and the gradients of tokens and head, on the host. Chunks are of 20 tokens."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, VOCABULARY))
    if head == "tiled":
        em.tile(model, at_most=VOCABULARY * WIDTH * 4 // 3)
    if head == "nf4":
        model = em.quantize(model.requires_grad_(False), "nf4", targets="0*")
    model.to(device=device, dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH).to(device, dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,)).to(device)
    labels[::9] = -100
    options: Any = {"label_smoothing": 0.1, "softcap": 4.0, "chunk_bytes": 20 * VOCABULARY * 4, "reduction": "sum"}
    loss = em.linear_cross_entropy(hidden, model[0], labels, **options)
    loss.backward()
    gradients = [p.grad for p in (hidden, *model.parameters()) if p.grad is not None]
    return [found.detach().cpu() for found in (loss, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", ["whole", "tiled", "nf4"])
def test_a_loss_without_logits_is_that_of_a_cpu(head: str, dtype: torch.dtype, device: str) -> None:
    """A GPU rounds the gradient of the logits, of at most 1, to the weight's dtype: by half of `eps`. It then meets 70
    tokens below 4, or 768 weights below 0.1, whose errors add up at random.
    """
    eps = torch.finfo(dtype).eps
    wanted, found = found_on("cpu", head, dtype), found_on(device, head, dtype)
    assert len(found) == len(wanted) == {"whole": 4, "tiled": 8, "nf4": 2}[head]
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
    for gradient, exact in zip(found[1:], wanted[1:], strict=True):
        assert gradient.dtype == exact.dtype == dtype
        torch.testing.assert_close(gradient.float(), exact.float(), rtol=2 * eps, atol=max(4 * eps, 1e-5))
