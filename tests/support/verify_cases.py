"""Models for `elixir-moe verify`: a sound one, and the same with faults that others have shipped.

Each function is given as `--module` and runs in the ranks alone, so that what it patches ends with them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.verify import training

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


def overwritten() -> Case:
    """Experts are drawn anew after they have been loaded."""
    load = training.load

    def broken(path: Any, model: Any, optimizer: Any) -> Any:
        extra = load(path, model, optimizer)
        with torch.no_grad():
            model.experts.weight.normal_(std=0.3)
        return extra

    training.load = broken
    return sound()


def scaled() -> Case:
    """The loss is multiplied by the number of ranks."""
    return Mixture(), lambda model, x: loss_of(model, x) * dist.get_world_size(), sample


def stale() -> Case:
    """The moments of experts stay as they were."""
    step = em.ShardedOptimizer.step

    def broken(self: Any, closure: Any = None) -> Any:
        experts = [p for chunk in self._kept._chunks for p in chunk.parameters if p.dim() == 3]
        kept = [
            (elements, elements.read().clone())
            for p in experts
            if self._kept.piece_of(p) is not None
            for name, elements in self._kept.of(p).items()
            if name.startswith("exp_avg")
        ]
        result = step(self, closure)
        for elements, before in kept:
            elements.write(before)
        return result

    em.ShardedOptimizer.step = broken  # type: ignore[method-assign]
    return sound()


def averaged() -> Case:
    """The squares of the experts' gradients are averaged over the ranks in the norm."""
    clip = em.ShardedOptimizer.clip_grad_norm_

    def broken(self: Any, max_norm: float) -> Tensor:
        norms = self.grad_norms()
        squares = [norm**2 / (dist.get_world_size() if "experts" in name else 1) for name, norm in norms.items()]
        found = sum(squares) ** 0.5
        clip(self, max_norm * sum(norm**2 for norm in norms.values()) ** 0.5 / found)
        return torch.tensor(found)

    em.ShardedOptimizer.clip_grad_norm_ = broken  # type: ignore[method-assign]
    return sound()


def lost_adapters() -> Case:
    """The adapters of experts are left out of what is exported."""
    save_pretrained = training.save_pretrained

    def broken(model: nn.Module, folder: Any) -> None:
        from safetensors.torch import load_file, save_file

        save_pretrained(model, folder)
        if dist.get_rank() == 0:
            file = Path(folder) / "adapter_model.safetensors"
            kept = {name: value for name, value in load_file(file).items() if "experts" not in name}
            save_file(kept, file, {"format": "pt"})

    training.save_pretrained = broken
    return sound()
