"""Things people do with torch models, unmodified: each scenario under plain torch and under every kind of plan.

A scenario is a model, a loss on a batch of rows, an optimizer and anything unusual in between. It runs in one process
under plain torch on all rows, and wrapped on one and two ranks, each on its part of the rows. Tolerances as in
`tests.support.parity`: fp32 with a smooth optimizer.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.optim.accepted import is_adam
from tests.support.cases import worlds_in_turn
from tests.support.parity import assert_alike, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, D = 3, 8, 16


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


class DetachedInside(Layer):
    """Uses a weight twice, once in detached form, whose backward comes later."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        detached = F.linear(h, self.up.weight.detach())
        return x + self.down(F.gelu(self.up(h))) + self.gain * detached[:, :D]


class DetachedReentrant(Reentrant):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DetachedInside() for _ in range(4))


class DetachedNonReentrant(NonReentrant):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DetachedInside() for _ in range(4))


class SharedReentrant(Net):
    """One layer in three checkpoints, each with a backward of its own, and once outside."""

    def body(self, x: Tensor) -> Tensor:
        for i in (0, 1, 0, 2, 0):
            x = checkpoint(self.layers[i], x, use_reentrant=True)
        return self.layers[1](x)


class TiedReentrant(Tied, Reentrant):
    pass


class Lists(nn.Module):
    """Weights that no module of their own reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(D, D) * 0.2 for _ in range(6))
        self.named = nn.ParameterDict({"scale": torch.ones(D), "unused": torch.ones(3)})
        self.fixed = nn.Parameter(torch.arange(D), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + F.gelu(x @ weight)
        return (x * self.named["scale"])[:, self.fixed]


class Methods(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net()
        self.projection = nn.Parameter(torch.eye(D))
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) @ self.projection * self.log_scale.exp()


class Spread(Net):
    """Returns something that is no tensor and no container of tensors."""

    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Normal(super().forward(x), 1.0)


class Encoder(nn.Module):
    """torch's own encoder reads parameters of its layers' layers, in evaluation others than in training."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.unflatten(1, (2, 8))).flatten(1)


class ActNorm(Layer):
    """Sets a parameter from its first input, and nudges another in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.nudged = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.gain.copy_(torch.linspace(0.5, 1.5, D))
            self.ready = True
        with torch.no_grad():
            self.nudged += 0.125
        return super().forward(x) + self.nudged


class Writing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ActNorm() for _ in range(3))


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


class PartCheckpointed(Layer):
    """Checkpoints a part of itself, with a weight that it uses outside of it too."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.part, self.norm(x), use_reentrant=self.reentrant)
        return x + self.gain * self.down(F.gelu(h + self.up(x)))

    def part(self, x: Tensor) -> Tensor:
        return self.up(self.down(F.gelu(self.up(x))))


class PartNonReentrant(PartCheckpointed):
    reentrant = False


class Nested(PartCheckpointed):
    """Is itself in a checkpoint, and has two inside that run the same part."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.up, self.norm(x), use_reentrant=True)
        h = checkpoint(self.up, self.down(F.gelu(h)), use_reentrant=True)
        return x + self.gain * self.down(F.gelu(h))


class NestedReentrant(Reentrant):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested() for _ in range(4))


class InnerReentrant(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PartCheckpointed() for _ in range(4))


class InnerNonReentrant(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PartNonReentrant() for _ in range(4))


class Guest(Layer):
    """Calls a module, and reads a weight, that belong to another part of the model."""

    def __init__(self, hosts: list[nn.Module]) -> None:
        super().__init__()
        self.hosts = hosts

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        for host in self.hosts:
            x = x + host(x) + F.linear(x, host.weight)
        return x + self.gain * self.down(F.gelu(h))


class Guests(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Guest([self.first, self.last]) for _ in range(3))


def mean_square(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.flip(1)).pow(2).mean()


def with_penalty(model: nn.Module, rows: Tensor) -> Tensor:
    return mean_square(model, rows) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


def detached_in_loss(model: nn.Module, rows: Tensor) -> Tensor:
    weight = model.first.weight
    return (model(rows) @ weight.detach()).pow(2).mean() + weight.sum() + mean_square(model, rows)


def gradient_penalty(model: nn.Module, rows: Tensor) -> Tensor:
    rows = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).pow(2).sum(), rows, create_graph=True)
    return mean_square(model, rows) + slope.pow(2).mean()


def by_methods(model: nn.Module, rows: Tensor) -> Tensor:
    return (model.encode(rows) - rows.flip(1)).pow(2).mean()


def by_parts(model: nn.Module, rows: Tensor) -> Tensor:
    """Nobody calls the model itself, nor the first of its layers."""
    layer = model.layers[0]
    h = checkpoint(model.first, rows.clone().requires_grad_(), use_reentrant=True)
    h = layer.gain * layer.down(F.gelu(layer.up(layer.norm(h))))
    for layer in model.layers[1:]:
        h = layer(h)
    return (model.last(h) - rows.flip(1)).pow(2).mean()


def likelihood(model: nn.Module, rows: Tensor) -> Tensor:
    return -model(rows).log_prob(rows.flip(1)).mean()


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


def leave_alone(model: nn.Module) -> float:
    return 0.0


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        value = model(torch.ones(2, D)).sum().item()
    model.train()
    return value


def look(model: nn.Module) -> float:
    """What loggers and moving averages do between steps, with gradients on and off."""
    average = sum(p.float().norm().item() for p in model.parameters())
    with torch.no_grad():
        copies = [torch.zeros(p.shape).lerp_(p.float(), 0.5) for p in model.parameters()]
    return average + sum(copy.abs().sum().item() for copy in copies)


def write(model: nn.Module) -> float:
    """What constraints on weights do between steps."""
    scale = model.log_scale
    with em.unsharded(scale, write=True) if hasattr(model, "_elixir") else contextlib.nullcontext():
        scale.data.clamp_(max=0.29)
    with torch.no_grad():
        model.projection.mul_(0.9)
        model.encoder.last.bias.fill_(0.25)
    model.encoder.first.bias.data = torch.full((D,), 0.125)
    return model.log_scale.item() + model.projection.norm().item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4, momentum=0.5)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, amsgrad=True)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)


class SignDescent(torch.optim.Optimizer):
    """An optimizer with a constructor and state of its own."""

    def __init__(self, parameters: Any, sharpness: float) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.sharpness = sharpness

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * torch.tanh(self.sharpness * p.grad))


def sign_descent(model: nn.Module) -> torch.optim.Optimizer:
    return SignDescent(model.parameters(), sharpness=3.0)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


@dataclass(frozen=True)
class Scenario:
    model: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square
    backward: Callable[[Tensor, nn.Module, Tensor], None] = backward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    between: Callable[[nn.Module], float] = leave_alone
    """Called before the first step and after every step; what it returns must agree."""
    more_blocks: int = 0
    """Than the plans have: for gradients that stay open from one run of a layer to another."""


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
    "detached-reentrant": Scenario(DetachedReentrant),
    "detached-non-reentrant": Scenario(DetachedNonReentrant),
    "shared-reentrant": Scenario(SharedReentrant, more_blocks=2),
    "tied-reentrant": Scenario(TiedReentrant),
    "nested-reentrant": Scenario(NestedReentrant),
    "inner-reentrant": Scenario(InnerReentrant),
    "inner-non-reentrant": Scenario(InnerNonReentrant),
    "guests": Scenario(Guests),
    "by-parts": Scenario(loss=by_parts),
    "lists": Scenario(Lists, between=look),
    "methods": Scenario(Methods, by_methods, between=write),
    "no-tensor-out": Scenario(Spread, likelihood),
    "encoder": Scenario(Encoder, between=evaluate),
    "writing": Scenario(Writing, between=evaluate),
    "look": Scenario(between=look),
    "penalty": Scenario(loss=with_penalty),
    "detached-in-loss": Scenario(loss=detached_in_loss),
    "gradient-penalty": Scenario(loss=gradient_penalty),
    "two-forwards": Scenario(loss=two_forwards),
    "two-forwards-reentrant": Scenario(Reentrant, two_forwards, more_blocks=9),  # of gradients
    "two-forwards-non-reentrant": Scenario(NonReentrant, two_forwards),
    "forward-thrown-away": Scenario(loss=forward_thrown_away),
    "backward-twice": Scenario(backward=backward_twice),
    "evaluate-between": Scenario(backward=evaluate_between),
    "fail-between": Scenario(backward=fail_between),
    "sgd": Scenario(optimizer=sgd),
    "rmsprop": Scenario(optimizer=rmsprop),
    "amsgrad": Scenario(optimizer=amsgrad),
    "adam": Scenario(optimizer=adam),
    "adagrad": Scenario(optimizer=adagrad),
    "custom-optimizer": Scenario(optimizer=sign_descent),
}
PLANS = {
    "zero2": em.Plan.zero2(chunk_numel=600),
    "small": em.Plan.offload(rcache_blocks=6, chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=7, device_chunks=2, chunk_numel=700),
    "layers": em.Plan.offload(rcache_blocks=6, chunk_numel=1200),  # each in one chunk
    "ddp": em.Plan.ddp(),
    "disk": em.Plan.offload(rcache_blocks=7, disk_chunks=3, chunk_numel=700),
}


def rows_of(step: int, plan: em.Plan | None) -> Tensor:
    """The rows of a step: this rank's part, all of them for plain torch."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if plan else (0, 1)
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def train(scenario: Scenario, plan: em.Plan | None) -> dict[str, Any]:
    if plan is not None and plan.rcache_blocks != "all":
        plan = replace(plan, rcache_blocks=plan.rcache_blocks + scenario.more_blocks)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = scenario.model()
        return model, scenario.optimizer(model)

    def backward(model: nn.Module, step: int) -> None:
        rows = rows_of(step, plan)
        scenario.backward(scenario.loss(model, rows), model, rows)

    return trained(build, backward, plan, STEPS, between=scenario.between)


def train_all(names: list[str], plans: dict[str, em.Plan]) -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for name in names:
        for plan_name, plan in plans.items():
            results[name, plan_name] = train(SCENARIOS[name], plan)
    return results


@pytest.mark.parametrize(("name", "world", "every"), worlds_in_turn(SCENARIOS))
def test_scenario(name: str, world: int, every: bool, ranks: Ranks) -> None:
    """On one rank the plans differ in blocks and tiers alone: the one with the most of both is enough."""
    wanted = train(SCENARIOS[name], None)
    on_disk = {"disk"} if is_adam(SCENARIOS[name].optimizer(SCENARIOS[name].model())) else set()
    several = {*PLANS} - {"disk"} if every else {"zero2", "small"}
    chosen = several if world > 1 else {"offload"} | on_disk
    plans = {plan: PLANS[plan] for plan in sorted(chosen)}
    for found in ranks(world).run(train_all, [name], plans):
        for case, result in found.items():
            assert_alike(result, wanted, case, 2e-5, rel=1e-5, abs=1e-5)
