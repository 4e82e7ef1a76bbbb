"""Ctrl-C at any line of the library: after `zero_grad` the step is taken again, and no bit is lost."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.optim.optimizer import ShardedOptimizer
from tests.support.cases import placed

D = 16
PLANS = {
    "ddp": em.Plan.ddp(),
    "offload": em.Plan.offload(rcache_blocks=3, chunk_numel=800),
    "disk": em.Plan.offload(rcache_blocks=3, disk_chunks=2, chunk_numel=800),
}


class Tied(nn.Module):
    """Two blocks, and a weight that is also read outside its own module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x, self.first.weight)


class Interrupt:
    """Raises KeyboardInterrupt at one line of all that run in the library."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.lines = 0

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_function(self, frame: Any, _event: str, _arg: Any) -> Any:
        ours = "elixir_moe/" in frame.f_code.co_filename and frame.f_code.co_name != "__del__"
        return self._run_line if ours else None

    def _run_line(self, _frame: Any, event: str, _arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._run_line


def gradients(model: nn.Module, optimizer: ShardedOptimizer, seed: int) -> None:
    """Two micro-batches, an evaluation between them, a read of a weight and a clip."""
    draw = torch.Generator().manual_seed(seed)
    model(torch.randn(4, D, generator=draw)).square().mean().backward()
    with torch.no_grad():
        model(torch.ones(1, D))
    model(torch.randn(4, D, generator=draw)).square().mean().backward()
    next(model.parameters()).norm()
    optimizer.clip_grad_norm_(0.1)


def train(plan: em.Plan, at: int | None) -> tuple[dict[str, Tensor], int]:
    """The weights after three steps, the second of which is interrupted; and the lines it has run."""
    model = Tied()
    model, optimizer = em.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        plan=placed(plan),
    )
    lines = 0
    enabled = torch._C.DisableTorchFunctionSubclass()
    with enabled:
        pass
    for step in range(3):
        with Interrupt(at if step == 1 else None) as interrupt:
            try:
                gradients(model, optimizer, step)
            except KeyboardInterrupt:
                torch.set_grad_enabled(True)  # torch's own guards are interrupted too: a trace comes before an exit
                enabled.__exit__(None, None, None)
                optimizer.zero_grad()
                gradients(model, optimizer, step)
        lines = interrupt.lines if step == 1 else lines
        optimizer.step()
        optimizer.zero_grad()
    weights = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return weights, lines


@pytest.mark.parametrize("name", PLANS)
def test_an_interrupt_at_any_line_loses_nothing(name: str) -> None:
    wanted, lines = train(PLANS[name], None)
    assert lines > 1000
    for at in sorted(random.Random(0).sample(range(1, lines), 25)):
        found, _ = train(PLANS[name], at)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), f"interrupted at line {at} of {lines}"
