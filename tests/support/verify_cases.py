"""Models for `elixir-moe verify`, each a function that is given as `--module`; tests/museum plants faults in them."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_tools.verify.cases import Named, TestCase

E, D, ROWS = 4, 8, 4
Case = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Callable[[], Tensor]]


class Experts(nn.Module):
    """The weights of all experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(E, D, D))

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        return torch.einsum("ni,eio,ne->no", x, self.weight, share)


class Mixture(nn.Module):
    """Experts weighted by a router, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(D, D), nn.Linear(D, E)
        self.experts, self.last = Experts(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.experts(x, self.router(x).softmax(-1)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


def sample() -> Tensor:
    return torch.randn(ROWS, D)


def sound() -> Case:
    return Mixture(), loss_of, sample


def in_turn() -> Case:
    """A loss that under a plan, in training, must run on the thread of a micro-batch."""

    def loss_in_turn(model: nn.Module, x: Tensor) -> Tensor:
        if hasattr(model, "_elixir") and torch.is_grad_enabled():
            assert threading.current_thread().name.startswith("micro-batch")
        return loss_of(model, x)

    return Mixture(), loss_in_turn, sample


def in_bf16() -> Case:
    """A loss that casts its input as the weights are."""
    return Mixture(), lambda model, x: loss_of(model, x.to(next(model.parameters()).dtype)), sample


def unused() -> Case:
    """A layer that no step uses."""
    model = Mixture()
    model.spare = nn.Linear(D, D)
    return model, loss_of, sample


def three_rows() -> Case:
    return Mixture(), loss_of, lambda: torch.randn(3, D)


def no_step() -> Any:
    return Mixture(), loss_of


def no_model() -> Any:
    return 3


def scaled() -> Case:
    """The loss is multiplied by the number of ranks."""
    return Mixture(), lambda model, x: loss_of(model, x) * dist.get_world_size(), sample


class Orthogonal(torch.optim.Optimizer):
    """Muon in a few lines, by another name: momentum whose update is orthogonalised where a parameter is a matrix."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                update = momentum
                if p.dim() == 2:
                    u, _, v = torch.linalg.svd(momentum, full_matrices=False)
                    update = u @ v
                p.data.add_(update, alpha=-group["lr"])


def with_muon() -> Any:
    """Trained by an optimizer that looks at whole matrices."""
    return *sound(), Orthogonal


def with_both() -> Any:
    """Trained by the library's Muon where a parameter is a matrix or a stack of them, and by AdamW elsewhere."""

    def both(parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
        given = list(parameters)
        matrices = [p for p in given if p.dim() > 1]
        return em.Muon(matrices, lr=1e-3), torch.optim.AdamW([p for p in given if p.dim() < 2], lr=1e-3)

    return *sound(), both


def frozen_first() -> Case:
    """The first layer is frozen."""
    model = Mixture()
    model.first.requires_grad_(False)
    return model, loss_of, sample


class Normalized(nn.Module):
    """Batch normalization between linear layers; a rank that has two rows divides by their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def normalized() -> Case:
    return Normalized(), loss_of, sample


def scaled_unused() -> Case:
    """The loss is multiplied by the number of ranks, and a layer has no gradient."""
    model, _, draw = unused()
    return model, scaled()[1], draw


def talking() -> Case:
    """It prints while it is built and while it runs."""
    print("building")

    def step(model: nn.Module, x: Tensor) -> Tensor:
        print("a step", flush=True)
        return loss_of(model, x)

    return Mixture(), step, sample


class Louder(Named):
    """A GPT whose loss is 1 % larger under a plan than in plain PyTorch."""

    def build(self, *, under_plan: bool = False) -> TestCase:
        case = super().build(under_plan=under_plan)
        step = case.step
        return replace(case, step=lambda model, batch: step(model, batch) * 1.01) if under_plan else case


def rank_1_sleeps() -> None:
    """Rank 1 never comes to the barrier of the others."""
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()
