"""Backward on a thread of its own, as autograd runs it for tensors on a GPU: forward here, every hook there."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from tests.support.every import every

D, LAYERS, STEPS = 8, 4, 3
CHUNK = 256
"""Room for one layer."""
PLANS = {
    "ddp": em.Plan.ddp(),
    "offload, three blocks": em.Plan.offload(rcache_blocks=3, chunk_numel=CHUNK),
    "offload, all blocks": em.Plan.offload(rcache_blocks="all", chunk_numel=CHUNK),
}
PATIENCE_SECONDS = 60


class Stack(nn.Module):
    """Layers of two modules each, in checkpoints of a kind or in none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = (nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(LAYERS))
        self.layers = nn.ModuleList(pairs)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.kind == "none" else checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


def backward_here(loss: Tensor) -> None:
    loss.backward()


def backward_elsewhere(loss: Tensor) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def trained(plan: em.Plan, kind: str, backward: Callable[[Tensor], None]) -> list[Tensor]:
    """Loss and norm of each step, and the weights behind the last."""
    model = Stack(kind)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan)
    seen = []
    for step in range(STEPS):
        rows = torch.randn(4, D, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = model(rows).square().mean()
        backward(loss)
        seen += [loss.detach(), optimizer.clip_grad_norm_(1.0)]
        optimizer.step()
        optimizer.zero_grad()
    seen += em.full_state_dict(model, all_ranks=True).values()
    optimizer.close()
    return seen


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("plan", PLANS)
def test_backward_on_another_thread_changes_no_bit(plan: str, kind: str) -> None:
    here, elsewhere = (trained(PLANS[plan], kind, backward) for backward in (backward_here, backward_elsewhere))
    assert every(torch.equal(a, b) for a, b in zip(here, elsewhere, strict=True))
