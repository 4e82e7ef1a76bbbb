"""Frozen layers with trainable products beside them, without peft."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32


class Adapted(nn.Module):
    """A frozen layer with a trainable product beside it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x -> base(x) + up(down(x))."""
        return self.base(x).tanh() + self.up(self.down(x))


def build() -> tuple[nn.Module, Any]:
    """Six layers, and an optimizer of the adapters."""
    model = nn.Sequential(*[Adapted() for _ in range(6)])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
