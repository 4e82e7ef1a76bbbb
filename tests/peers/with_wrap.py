"""A pytest plugin that trains the models of peft's tests under `em.wrap`.

Tests write ``torch.optim.SGD(model.parameters(), ...)``. They get the sharded optimizer instead, and `model` is wrapped
from there on. They read and save it by `em.full_state_dict` and `em.save_pretrained`, since plain names are refused.
"""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import elixir_moe as em


def _wrapping(plain: type[torch.optim.Optimizer], open_ones: list[em.ShardedOptimizer]) -> Any:
    """What stands in the place of an optimizer's class; adds what it makes to `open_ones`."""

    def make(parameters: Any, **options: Any) -> em.ShardedOptimizer:
        model = parameters.gi_frame.f_locals["self"]  # of `model.parameters()`, a generator that has not started
        _, optimizer = em.wrap(model, plain(parameters, **options), plan=em.Plan.zero3())
        plain_save = model.save_pretrained

        def save_pretrained(folder: str, **given: Any) -> None:
            plain_save(folder, **given) if given else em.save_pretrained(model, folder)  # which calls it with weights

        model.save_pretrained = save_pretrained
        open_ones.append(optimizer)
        return optimizer

    return make


@pytest.fixture(autouse=True)
def _optimizers_wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's module sees a torch whose optimizers wrap; the library sees torch's own."""
    open_ones: list[em.ShardedOptimizer] = []
    torch_of_tests = ModuleType("torch")
    made = {name: _wrapping(getattr(torch.optim, name), open_ones) for name in ("SGD", "Adam")}
    vars(torch_of_tests).update(__getattr__=lambda name: getattr(torch, name), optim=SimpleNamespace(**made))
    plain_state = request.module.get_state_dict
    monkeypatch.setattr(request.module, "torch", torch_of_tests)
    monkeypatch.setattr(
        request.module,
        "get_state_dict",
        lambda model: em.full_state_dict(model) if hasattr(model, "_elixir") else plain_state(model),
    )
    yield
    for optimizer in open_ones:
        optimizer.close()
