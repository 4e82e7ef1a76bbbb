"""Optimizers with `train` and `eval`, as schedule-free ones: on shards as in one plain process, or refused by name.

All ranks have the same rows, so that the mean of their gradients is the gradient of one process, to the bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import elixir_moe as em
from elixir_moe.errors import ConfigError, UsageError
from tests.support.cases import with_further
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLANS: dict[str, em.Plan] = {
    "ddp": em.Plan.ddp(),
    "zero3": em.Plan.zero3(chunk_numel=160),
    "offload": em.Plan.offload(chunk_numel=160),
}


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): trains at y, between the iterate z and the average x."""

    def __init__(self, parameters: Any, lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        """From x to y."""
        self._switch(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        """From y to x."""
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _switch(self, train: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() in the mode of evaluation")
            group["k"] += 1
            share = 1 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share)
                    p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                    z.sub_(p.grad, alpha=group["lr"])

    def restart(self) -> None:
        """Another method that torch's optimizers do not have."""


class Net(nn.Module):
    """With a parameter that gets no gradient, and one that only one rank of two holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(x)))
        return hidden * self.scale


def made(seed: int = 0, plan: em.Plan | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = ScheduleFree([{"params": [p for p in model.parameters() if p.dim()]}, {"params": [model.scale]}])
    return (model, optimizer) if plan is None else em.wrap(model, optimizer, plan=plan, **options)


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    """Steps of two micro-batches, with a `train` before each, as Trainer has it."""
    for step in range(first, last):
        for micro in range(2):
            optimizer.train()
            x = batch(2 * step + micro).to(model.first.weight.dtype)
            ((model(x) - 1).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: Any) -> dict[str, Tensor]:
    if hasattr(model, "_elixir"):
        return em.full_state_dict(model, all_ranks=True)
    return {name: value.clone() for name, value in model.state_dict().items()}


def seen(model: Any, optimizer: Any) -> dict[str, Any]:
    """The weights, the model's answer, and the options but for the parameters."""
    with torch.no_grad():
        answer = model(batch(100).to(model.first.weight.dtype))
    options = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
    return {"weights": weights(model), "answer": answer, "options": options}


def run(plan: em.Plan | None, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """(rank) What is seen behind each change of the mode; under a plan, also by models that have loaded it."""
    if plan is not None:
        mesh_of_world()
    model, optimizer = made(0, plan, **options)
    found = []

    def change(mode: str) -> None:
        getattr(optimizer, mode)()
        found.append(seen(model, optimizer))
        if plan is not None:
            em.save(folder / str(len(found)), model, optimizer)

    change("train")
    steps(model, optimizer, 0, 3)
    for mode in ("eval", "eval", "train"):
        change(mode)
    steps(model, optimizer, 3, 5)
    change("eval")
    if plan is not None:
        optimizer.close()
        for number, before in ((2, 3), (4, 3)):  # in the mode of evaluation, and of training
            model, optimizer = made(1, plan, **options)
            steps(model, optimizer, 7, 8)
            em.load(folder / str(number), model, optimizer)
            found.append(seen(model, optimizer))
            optimizer.train()
            steps(model, optimizer, before, 5)
            optimizer.eval()
            found.append(seen(model, optimizer))
            optimizer.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_change_with_the_mode_as_in_one_plain_process(
    plan: str, world: int, ranks: Ranks, tmp_path: Path
) -> None:
    wanted = run(None, tmp_path)
    wanted += [wanted[1], wanted[4], wanted[3], wanted[4]]
    assert not torch.equal(wanted[1]["answer"], wanted[3]["answer"])
    for found in ranks(world).run(run, PLANS[plan], tmp_path):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("plan", "world"), with_further([(p, w) for p in PLANS for w in (1, 2)], [("offload", 2)]))
def test_what_is_computed_in_bf16_follows_the_masters(plan: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(world).run(run, PLANS[plan], tmp_path, compute_dtype=torch.bfloat16):
        for each in found:
            rounded = {name: value.bfloat16() for name, value in each["weights"].items()}
            with torch.no_grad():
                answer = functional_call(Net().bfloat16(), rounded, batch(100).bfloat16())
            torch.testing.assert_close(each["answer"], answer, rtol=0, atol=0)
        assert not torch.equal(found[1]["answer"], found[3]["answer"])
        torch.testing.assert_close(found[5]["weights"], found[1]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(found[8]["weights"], found[4]["weights"], rtol=0, atol=0)


def around(folder: Path) -> None:
    """(rank) A save beside training, a write by an operator, gradients that wait, and calls that are refused."""
    mesh_of_world()
    model, optimizer = made(0, PLANS["offload"])
    steps(model, optimizer, 0, 2)
    trained = weights(model)
    saving = em.save(folder / "beside", model, optimizer, asynchronous=True)
    optimizer.eval()
    averaged = weights(model)
    saving.result()
    em.load(folder / "beside", model, optimizer)
    torch.testing.assert_close(weights(model), trained, rtol=0, atol=0)
    with torch.no_grad():
        model.unused.weight.fill_(3.0)
    optimizer.eval()
    averaged["unused.weight"].fill_(3.0)
    torch.testing.assert_close(weights(model), averaged, rtol=0, atol=0)

    model(batch(9)).sum().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) in the mode of evaluation"):
        optimizer.step()
    torch.testing.assert_close(weights(model), averaged, rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"optimizer\.train\(\) while gradients wait for a step"):
        optimizer.train()
    optimizer.zero_grad()

    optimizer.train()
    model(batch(9)).sum().backward()
    with pytest.raises(UsageError, match=r"optimizer\.eval\(\) while gradients wait for a step"):
        optimizer.eval()
    optimizer.train()  # which changes nothing
    with pytest.raises(UsageError, match=r"optimizer\.restart\(\) of ScheduleFree after wrap.*call restart\(\) before"):
        optimizer.restart()
    with pytest.raises(AttributeError, match="'ShardedOptimizer' object has no attribute 'swap'"):
        optimizer.swap()
    torch.testing.assert_close(
        weights(model), trained | {"unused.weight": averaged["unused.weight"]}, rtol=1e-6, atol=1e-7
    )
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("world", [1, 2])
def test_what_else_goes_on_is_neither_lost_nor_mixed(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world).run(around, tmp_path)


class Norm(ScheduleFree):
    """Evaluates weights that are scaled by their norm."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(p.norm())


class Attribute(ScheduleFree):
    """Keeps its mode where no checkpoint finds it."""

    evaluates = False

    def eval(self) -> None:
        super().eval()
        self.evaluates = True


class Argument(ScheduleFree):
    """Needs an argument."""

    def eval(self, mode: str) -> None:  # type: ignore[override]
        super().eval()


class Around(torch.optim.SGD):
    """Steps by another optimizer."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Norm, r"Norm\.eval\(\) looks at whole tensors or at all parameters together"),
        (Attribute, r"Attribute\.eval\(\) .*\['evaluates'\]"),
        (Argument, r"Argument\.eval\(\).*missing 1 required"),
        (Around, r"Around has another optimizer in its attribute 'base', which updates whole parameters"),
    ],
)
def test_what_cannot_be_called_on_pieces_is_refused_by_wrap(kind: Any, says: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=says):
        em.wrap(model, kind(model.parameters()), plan=em.Plan.zero3())


def test_an_optimizer_without_modes_has_none_after_wrap() -> None:
    """Accelerate and Trainer ask for the methods before they call them."""
    model, optimizer = em.wrap(model := Net(), torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())
    assert not hasattr(optimizer, "eval") and not hasattr(optimizer, "train")
    optimizer.close()
