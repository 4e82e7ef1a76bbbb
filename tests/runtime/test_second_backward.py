"""Two backwards in a step, and forwards that fail: what is kept meanwhile, and what is forgotten."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em

D = 16


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    em.init_mesh(device_type="cpu")


def rows(seed: int) -> Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(seed))


class Keeps(nn.Linear):
    """Keeps a view of its weight from one forward to the next."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach()
        return super().forward(x)


def losses(kind: type[nn.Linear]) -> list[float]:
    """Two micro-batches a step in bf16, and an evaluation behind each."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(kind(D, D), nn.Tanh(), nn.Linear(D, D))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero2(), compute_dtype=torch.bfloat16)
    found = []
    for step in range(3):
        for micro in range(2):
            x = rows(10 * step + micro).bfloat16()
            loss = model(x).float().square().mean()
            loss.backward()
            with torch.no_grad():
                found += [loss.item(), model(x).float().sum().item()]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return found


def test_a_view_that_is_kept_changes_nothing_in_the_next_micro_batch() -> None:
    assert losses(Keeps) == losses(nn.Linear)


class Reentrant(nn.Module):
    """All of its parameters are inside reentrant checkpoints: none has a node in the outer graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_reentrant_checkpoints_around_everything_and_a_forward_that_fails() -> None:
    """Gradients are reduced while backward runs, in blocks; what had failed awaits no backward."""
    model: Any = Reentrant()
    plain = Reentrant()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    plan = em.Plan.offload(rcache_blocks=3, chunk_numel=272)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    for step in range(3):
        if step == 1:
            failing = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(rows(step))
            failing.remove()
            optimizer.zero_grad()
        for net, its in ((model, optimizer), (plain, other)):
            net(rows(step)).square().mean().backward()
            its.step()
            its.zero_grad()
        assert em.inspect(model).statistics.blocks_replaced == 0
    for name, value in em.full_state_dict(model, all_ranks=True).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-7)
    optimizer.close()
