"""Things people do with torch models, unmodified: each scenario under plain torch and under every kind of plan.

A scenario is a model, a loss on a batch of rows, an optimizer and anything unusual in between. It runs in one process
under plain torch on all rows, and wrapped on one and two ranks, each on its part of the rows. Tolerances as in
`tests.parity`: fp32 with a smooth optimizer.
"""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, D = 4, 8, 16


class Layer(nn.Module):
    """A residual MLP with a parameter of its own beside its children's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Four layers; subclasses change what is unusual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(D, D)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


class Reentrant(Net):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class NonReentrant(Net):
    def body(self, x: Tensor) -> Tensor:
        for start in (0, 2):
            x = checkpoint(self.pair, x, start, use_reentrant=False)
        return x

    def pair(self, x: Tensor, start: int) -> Tensor:
        return self.layers[start + 1](self.layers[start](x))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight
        self.layers[3].up.weight = self.layers[0].up.weight


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "layers.1" not in name and "layers.2.up" not in name


class MostlyFrozen(NonReentrant):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "gain" in name


class Unused(Net):
    """One layer is never called, one parameter is called for by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Layer()
        self.layers[1].idle = nn.Parameter(torch.ones(7))


class SometimesUsed(Net):
    """A layer that every other forward skips."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def body(self, x: Tensor) -> Tensor:
        self.forwards += 1
        for i, layer in enumerate(self.layers):
            if i != 2 or self.forwards % 2:
                x = layer(x)
        return x


class Shared(Net):
    """One layer called three times."""

    def body(self, x: Tensor) -> Tensor:
        for i in (0, 1, 0, 2, 0):
            x = self.layers[i](x)
        return x


class ReadElsewhere(Net):
    """Reads parameters outside their own modules, and weights in detached form."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.first(x))
        h = F.linear(h, self.layers[1].up.weight[:D])
        return self.last(h) + F.linear(h, self.last.weight.detach())


class Experts(nn.Module):
    """Experts in a list, of which only those with rows run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] * 10).long().abs() % 3  # never the last; which ones depends on the rank's rows
        out = torch.zeros_like(x) + 0 * self.router(x).sum()
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class ExpertLists(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))


def mean_square(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.flip(1)).pow(2).mean()


def with_penalty(model: nn.Module, rows: Tensor) -> Tensor:
    return mean_square(model, rows) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


def two_forwards(model: nn.Module, rows: Tensor) -> Tensor:
    return mean_square(model, rows) + mean_square(model, rows.roll(1, 1))


def forward_thrown_away(model: nn.Module, rows: Tensor) -> Tensor:
    model(rows + 1)
    return mean_square(model, rows)


def backward(loss: Tensor, model: nn.Module, rows: Tensor) -> None:
    loss.backward()


def backward_twice(loss: Tensor, model: nn.Module, rows: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def evaluate_between(loss: Tensor, model: nn.Module, rows: Tensor) -> None:
    """Evaluation between forward and backward, and between two micro-batches."""
    with torch.no_grad():
        model(rows)
    loss.backward()
    with torch.inference_mode():
        model(rows)
    mean_square(model, rows).backward()


def fail_between(loss: Tensor, model: nn.Module, rows: Tensor) -> None:
    """A forward that raises in the middle, caught by the user."""
    with contextlib.suppress(RuntimeError):
        model(rows[:, :3])
    loss.backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4, momentum=0.5)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, amsgrad=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


@dataclass(frozen=True)
class Scenario:
    model: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square
    backward: Callable[[Tensor, nn.Module, Tensor], None] = backward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    least_only: bool = False
    """Needs more blocks than the small plan has."""


SCENARIOS = {
    "plain": Scenario(),
    "reentrant": Scenario(Reentrant),
    "non-reentrant": Scenario(NonReentrant),
    "tied": Scenario(Tied),
    "frozen": Scenario(Frozen),
    "mostly-frozen": Scenario(MostlyFrozen),
    "unused": Scenario(Unused),
    "sometimes-used": Scenario(SometimesUsed),
    "shared": Scenario(Shared),
    "read-elsewhere": Scenario(ReadElsewhere),
    "expert-lists": Scenario(ExpertLists),
    "penalty": Scenario(loss=with_penalty, least_only=True),
    "two-forwards": Scenario(loss=two_forwards),
    "forward-thrown-away": Scenario(loss=forward_thrown_away),
    "backward-twice": Scenario(backward=backward_twice),
    "evaluate-between": Scenario(backward=evaluate_between),
    "fail-between": Scenario(backward=fail_between),
    "sgd": Scenario(optimizer=sgd),
    "rmsprop": Scenario(optimizer=rmsprop),
    "amsgrad": Scenario(optimizer=amsgrad),
    "adam": Scenario(optimizer=adam),
}
PLANS = {
    "zero2": em.Plan.zero2(chunk_numel=600),
    "small": em.Plan.zero3(rcache_blocks=6, chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=7, device_chunks=2, chunk_numel=700),
    "ddp": em.Plan.ddp(),
}


def train(scenario: Scenario, plan: em.Plan | None) -> dict[str, Any]:
    """The training loop; plain torch on all rows if `plan` is None."""
    torch.manual_seed(1)
    model = scenario.model()
    optimizer: Any = scenario.optimizer(model)
    rank, world = (dist.get_rank(), dist.get_world_size()) if plan else (0, 1)
    if plan is not None:
        model, optimizer = em.wrap(model, optimizer, plan=plan)
    norms = []
    for step in range(STEPS):
        rows = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step))[rank * ROWS // world :][
            : ROWS // world
        ]
        loss = scenario.loss(model, rows)
        scenario.backward(loss, model, rows)
        if plan is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            norm = optimizer.clip_grad_norm_(0.5)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    if plan is None:
        return {"norms": norms, "state": model.state_dict()}
    result = {"norms": norms, "state": em.full_state_dict(model), "replaced": optimizer.statistics().blocks_replaced}
    optimizer.close()
    del model, optimizer
    gc.collect()
    return result


def train_all(names: list[str], plans: dict[str, em.Plan]) -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for name in names:
        for plan_name, plan in plans.items():
            if not (SCENARIOS[name].least_only and plan_name in ("small", "offload")):
                results[name, plan_name] = train(SCENARIOS[name], plan)
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, world: int, ranks: Ranks) -> None:
    wanted = train(SCENARIOS[name], None)
    for found in ranks(world).run(train_all, [name], PLANS):
        for case, result in found.items():
            assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-5), case
            assert set(result["state"]) == set(wanted["state"])
            for key, value in wanted["state"].items():
                torch.testing.assert_close(
                    result["state"][key], value, rtol=0, atol=2e-5, msg=lambda m, c=case, k=key: f"{c} {k}: {m}"
                )
