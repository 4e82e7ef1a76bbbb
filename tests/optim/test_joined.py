"""A pair of optimizers in `wrap`: what may change on either of them, and what is refused."""

import pickle
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import elixir_moe as em
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from tests.support.every import same_tensors

X = torch.linspace(-1, 1, 32).view(4, 8)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def pair(model: Any, elementwise: str = "AdamW", **options: Any) -> tuple[em.Muon, torch.optim.Optimizer]:
    rest = [model.hidden.bias, *model.head.parameters()]
    kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    return em.Muon([model.hidden.weight], lr=0.02, **options), kinds[elementwise](rest, lr=1e-2)  # type: ignore[abstract]


def step(model: Any, *optimizers: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_hooks_of_a_member_run_whenever_they_were_registered_and_end_when_they_are_removed() -> None:
    model = Two()
    both = pair(model)
    seen: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: seen.append(what)

    early = [both[0].register_step_pre_hook(note("muon, before")), both[1].register_step_post_hook(note("adamw"))]
    model, optimizer = em.wrap(model, both, plan=em.Plan.zero3())
    late = both[1].register_step_pre_hook(note("adamw, late"))
    own = optimizer.register_step_pre_hook(note("own"))
    everywhere = register_optimizer_step_pre_hook(note("all"))
    step(model, optimizer)
    assert seen == ["all", "muon, before", "adamw, late", "own", "adamw"]
    everywhere.remove()
    for handle in (*early, late):
        handle.remove()
    seen.clear()
    step(model, optimizer)
    assert seen == ["own"]
    own.remove()
    optimizer.close()


@pytest.mark.parametrize("what", ["add_param_group", "load_state_dict"])
@pytest.mark.parametrize("alone", [True, False])
def test_what_changes_the_groups_of_an_optimizer_after_wrap_is_refused_by_the_next_step(what: str, alone: bool) -> None:
    model = Two()
    if alone:
        model.hidden.bias.requires_grad_(False)
        model.head.requires_grad_(False)
    muon, adamw = pair(model)
    model, optimizer = em.wrap(model, muon if alone else (muon, adamw), plan=em.Plan.zero3())
    if what == "add_param_group":
        muon.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    else:
        muon.load_state_dict(muon.state_dict())
    model(X).square().mean().backward()
    with pytest.raises(UsageError, match=r"after wrap"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("alone", [True, False])
def test_the_optimizers_that_wrap_was_given_refuse_to_step(alone: bool) -> None:
    model = Two()
    given = (torch.optim.AdamW(model.parameters(), lr=1e-2),) if alone else pair(model)
    early = [LambdaLR(one, lambda step: 1 / (1 + step)) for one in given]
    model, optimizer = em.wrap(model, given[0] if alone else given, plan=em.Plan.zero3())
    late = [LambdaLR(one, lambda step: 1.0) for one in given]
    model(X).square().mean().backward()
    for one in given:
        for method in (one.step, one.zero_grad):
            with pytest.raises(
                UsageError, match=rf"of the {type(one).__name__} that .* optimizer that em\.wrap returned"
            ):
                method()
    before = em.full_state_dict(model)
    optimizer.step()
    assert not same_tensors(before, em.full_state_dict(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler steps before its optimizer
        for scheduler in (*early, *late):
            scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["initial_lr"] for group in optimizer.param_groups
    ]
    for one in given:
        assert pickle.loads(pickle.dumps(one.state_dict())) == deepcopy(one.state_dict())
    optimizer.close()


def test_named_and_unnamed_parameters_are_refused_by_what_they_are() -> None:
    model = Two()
    named = {name: p for name, p in model.named_parameters() if name != "hidden.weight"}
    muon, adamw = em.Muon([model.hidden.weight]), torch.optim.AdamW(named.items())
    with pytest.raises(ConfigError, match=r"AdamW was built from named parameters, and another .* Muon and AdamW was"):
        em.wrap(model, (muon, adamw), plan=em.Plan.zero3())
    muon = em.Muon([("hidden.weight", model.hidden.weight)])
    model, optimizer = em.wrap(model, (muon, adamw), plan=em.Plan.zero3())
    step(model, optimizer)
    optimizer.close()


class Mine(torch.optim.Muon):
    """An optimizer that may do anything."""


def test_a_subclass_of_muon_is_refused_by_its_name() -> None:
    model = Two()
    muon, adamw = pair(model)
    with pytest.raises(ConfigError, match=r"Mine is a subclass of Muon.*use torch\.optim\.Muon or em\.Muon"):
        em.wrap(model, (Mine(muon.param_groups), adamw), plan=em.Plan.zero3())


def test_frozen_chunks_beside_muon_alone_hold_no_state() -> None:
    model = Two()
    model.hidden.bias.requires_grad_(False)
    model.head.requires_grad_(False)
    model, optimizer = em.wrap(model, em.Muon([model.hidden.weight]), plan=em.Plan.zero3())
    shown = em.inspect(model)
    assert shown.held_bytes["device"] == shown.footprint.device_bytes
    optimizer.close()


def test_a_vector_in_torchs_muon_is_refused_before_weights_move() -> None:
    model = Two()
    muon = torch.optim.Muon([model.hidden.weight])
    muon.add_param_group({"params": [model.hidden.bias]})
    with pytest.raises(ConfigError, match=r"Muon updates matrices, and a parameter has the shape \(8,\)"):
        em.wrap(model, (muon, torch.optim.AdamW(model.head.parameters())), plan=em.Plan.zero3())
    assert not model.head.weight.is_meta


CYCLES: dict[str, Any] = {
    "OneCycleLR": lambda optimizer, **options: OneCycleLR(optimizer, [0.1, 0.2], total_steps=8, **options),
    "CyclicLR": lambda optimizer, **options: CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, **options),
}


@pytest.mark.parametrize("kind", CYCLES)
def test_a_cyclic_scheduler_sets_the_momentum_that_both_optimizers_have(kind: str) -> None:
    found = []
    for wraps in (False, True):
        model = Two()
        both: tuple[Any, ...] = pair(model, "SGD")
        if wraps:
            model, optimizer = em.wrap(model, both, plan=em.Plan.zero3())
            schedulers = [CYCLES[kind](optimizer)]
            both = (optimizer,)
        elif kind == "OneCycleLR":
            schedulers = [OneCycleLR(one, rate, total_steps=8) for one, rate in zip(both, (0.1, 0.2), strict=True)]
        else:
            schedulers = [CYCLES[kind](one) for one in both]
        for _ in range(4):
            step(model, *both)
            for scheduler in schedulers:
                scheduler.step()
        found.append(em.full_state_dict(model) if wraps else model.state_dict())
        if wraps:
            both[0].close()
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CYCLES)
def test_a_cyclic_scheduler_of_a_momentum_that_one_optimizer_lacks_is_refused(kind: str) -> None:
    model = Two()
    model, optimizer = em.wrap(model, pair(model), plan=em.Plan.zero3())
    with pytest.raises(ValueError, match="momentum or beta1 with `cycle_momentum`"):  # torch's own words
        CYCLES[kind](optimizer)
    scheduler = CYCLES[kind](optimizer, cycle_momentum=False)
    step(model, optimizer)
    scheduler.step()
    optimizer.close()


def test_other_parts_of_a_matrix_after_wrap_are_refused_by_step_and_by_load(tmp_path: Path) -> None:
    model = Two()
    model, optimizer = em.wrap(model, pair(model, split_rows=(4, 4)), plan=em.Plan.zero3())
    step(model, optimizer)
    em.save(tmp_path / "saved", model, optimizer)
    optimizer.param_groups[0]["split_rows"] = 2
    model(X).square().mean().backward()
    with pytest.raises(UsageError, match=r"param_groups\[0\] were .*'split_rows': \(4, 4\).* in wrap and are .*: 2,"):
        optimizer.step()
    optimizer.param_groups[0]["split_rows"] = [4, 4]
    optimizer.step()
    optimizer.close()
    model = Two()
    model, optimizer = em.wrap(model, pair(model), plan=em.Plan.zero3())
    before = em.full_state_dict(model)
    with pytest.raises(CheckpointError, match=r"\['split_rows'\] is \(4, 4\), and 1 in the optimizer"):
        em.load(tmp_path / "saved", model, optimizer)
    assert same_tensors(em.full_state_dict(model), before)
    assert optimizer.param_groups[0]["split_rows"] == 1
    step(model, optimizer)
    optimizer.close()
