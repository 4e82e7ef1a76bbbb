"""Updates that begin in the backward of a run that does not clip: the same bits, also where it goes back or clips."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_tools.train.trainer import Trainer
from elixir_tools.watch.supervisor import Observation, Supervisor, Verdict, WatchConfig
from tests.support.every import same_tensors
from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, settings_of

Ranks = Callable[[int], RankPool]


def with_early_steps(out: Path, at: dict[int, str], **watch: Any) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
    """(rank) A run, the steps since the start or the last load whose updates began in backward, its last checkpoint."""
    run_of, save = {"steps": 10, "accumulation": 2}, {"every": 2, "asynchronous": False}
    model, watch = {"ep": [1, dist.get_world_size()]}, {"on_nan": "back", **watch}
    config = settings_of(out, model=model, watch=watch, optimizer={"clip_norm": None}, run=run_of, save=save)
    step, early = ShardedOptimizer.step, []

    def stepping(optimizer: Any) -> None:
        if optimizer._phase.early:
            early.append(optimizer._phase.place[0] + 1)
        step(optimizer)

    ShardedOptimizer.step = stepping  # type: ignore[method-assign, assignment]
    try:
        found = run(config, at)
    finally:
        ShardedOptimizer.step = step  # type: ignore[method-assign]
    return found, early, last_state(out)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_does_not_clip_has_the_bits_of_updates_in_the_step(world: int, ranks: Ranks, tmp_path: Path) -> None:
    """The first checkpoint is that of step 2. Control turns clipping on in step 6, for all that follow."""
    at = {5: "control: {clip_norm: 0.05}"}
    plainly = ranks(world).run(with_early_steps, tmp_path / "plain", at)
    for (found, early, state), (wanted, never, expected) in zip(
        ranks(world).run(with_early_steps, tmp_path / "early", at, memory_tries=0), plainly, strict=True
    ):
        assert (early, never) == ([3, 4, 5, 6], [])
        assert found["ended"] == wanted["ended"] == ""
        assert found["metrics"] == wanted["metrics"] and found["events"] == wanted["events"]
        assert same_tensors(state, expected)


@pytest.mark.fault(13)
def test_a_nan_in_a_step_whose_updates_had_begun_leads_back_to_the_same_run(ranks: Ranks, tmp_path: Path) -> None:
    plainly = ranks(2).run(with_early_steps, tmp_path / "plain", {5: "poison"})
    found_early = ranks(2).run(with_early_steps, tmp_path / "early", {5: "poison"}, memory_tries=0)
    for (found, early, state), (wanted, never, expected) in zip(found_early, plainly, strict=True):
        assert early and not never
        assert found["ended"] == wanted["ended"] == "" and found["metrics"] == wanted["metrics"]
        (kind, text), *_ = found["events"]
        assert kind == "went back" and "back to step 4" in text and "the gradient of" in text
        assert same_tensors(state, expected)


def test_scales_are_those_before_the_update(ranks: Ranks, tmp_path: Path) -> None:
    (_, early, _), *_ = ranks(1).run(with_early_steps, tmp_path, {}, memory_tries=0, scales_every=3)
    assert early == [3, 5, 6, 8, 9], "steps 4, 7 and 10 look at the weights first"


def scales_of_tiles() -> None:
    em.init_mesh(device_type="cpu")
    model: Any = em.tile(torch.nn.Sequential(torch.nn.Linear(16, 64)), at_most=1024)
    assert len(list(model.parameters())) > 2
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())
    scales: Any = Trainer.scales(SimpleNamespace(wrapped=model._elixir))  # type: ignore[arg-type]
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    assert scales == {name: pytest.approx(value.square().mean().sqrt().item()) for name, value in state.items()}


def test_the_scale_of_a_parameter_is_that_of_all_its_tiles(ranks: Ranks) -> None:
    ranks(2).run(scales_of_tiles)


@pytest.mark.fault(13, 14)
@pytest.mark.parametrize("policies", list(product(["skip", "back", "stop"], repeat=2)), ids="-".join)
def test_a_supervisor_knows_before_a_step_whether_it_may_want_the_weights(policies: tuple[str, str]) -> None:
    """Against what it decides, for every state of it and every step."""
    good, off, broken = (2.0, 1.0), (50.0, 1.0), (math.nan, 1.0)
    for patience, tries, before in product((1, 2, 3), (0, 1, 2), product([good, off, broken], repeat=3)):
        config = WatchConfig(on_nan=policies[0], on_divergence=policies[1], patience=patience, tries=tries)  # type: ignore[arg-type]
        supervisor = Supervisor(config)
        steps = [good] * 10 + list(before)
        for step, (loss, norm) in enumerate(steps, 1):
            supervisor.observe(Observation(step=step, batch=step, losses=(loss,), norm=norm))
        keeps, state, backs = supervisor.keeps_weights, supervisor.state(), supervisor._backs
        wants = False
        for loss, norm in (good, off, broken, (2.0, math.inf)):
            again = Supervisor(config)
            again.restore(state)
            action = again.observe(Observation(step=14, batch=14, losses=(loss,), norm=norm))
            wants |= action.verdict not in (Verdict.GO, Verdict.BACK)
            wants |= action.verdict is Verdict.BACK and action.before < 14
        assert again._backs >= backs
        assert keeps or not wants, (policies, patience, tries, before)
        assert wants or not keeps or state["off"], "no step is kept back without a reason"
