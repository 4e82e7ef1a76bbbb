"""How many micro-batches pass a layer together: exact for each number, with the requests that are predicted."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.plan_options import options
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss, lm_loss_without_logits
from tests.optim.test_early import begun
from tests.runtime.test_accumulate import PLANS, Tied, adam, batches_of, loss_of, wrap
from tests.support.cases import rounds_asked
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
DIALS = (None, 1, 2, 3, 8)
COUNTS = (1, 2, 3, 8)


def passes_of(count: int, dial: int | None) -> list[int]:
    """The number of batches in each pass of `count` batches."""
    size = dial or count
    return [min(size, count - first) for first in range(0, count, size)]


def plain_steps() -> list[dict[str, Tensor]]:
    """The weights after a step of each number of batches, by plain torch."""
    model, found = Tied("non-reentrant"), []
    optimizer = adam(model)
    for count in COUNTS:
        for rank in range(dist.get_world_size()):
            for batch in batches_of(count, seed=rank):
                (loss_of(model, batch) / count / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(copy.deepcopy(model.state_dict()))
    return found


def steps_of_every_dial(name: str) -> None:
    """Trains with each dial: weights as by plain torch, and the requests of each pass as predicted."""
    rank = em.init_mesh(device_type="cpu").get_local_rank("dp")
    wanted = plain_steps()
    for dial in DIALS:
        model = Tied("non-reentrant")
        model, optimizer = wrap(model, replace(PLANS[name], batches_per_pass=dial), adam(model))
        record = model._elixir
        for count, weights in zip(COUNTS, wanted, strict=True):
            with rounds_asked() as rounds:
                em.accumulate(model, loss_of, batches_of(count, seed=rank))
            order = record.spec.step_order
            assert rounds == [order.schedule(record.layout, n).entries for n in passes_of(count, dial)], (dial, count)
            optimizer.step()
            optimizer.zero_grad()
            found = em.full_state_dict(model, all_ranks=True)
            for key, value in weights.items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=5e-6, msg=f"{name}, {dial}, {count}, {key}")
        assert em.inspect(model).statistics.as_dict()["off_schedule"] == 0, (name, dial)
        optimizer.close()


@pytest.mark.parametrize(
    ("name", "world"),
    [("offload", 1), ("zero3", 2), ("values on disk", 1), pytest.param("disk", 2, marks=pytest.mark.slow)],
)
def test_each_number_is_as_plain_torch_and_asks_as_predicted(name: str, world: int, ranks: Ranks) -> None:
    """fp32: a mean of at most 16 gradients in another order moves a weight by some ulps in each of four steps."""
    ranks(world).run(steps_of_every_dial, name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_recomputes_its_logits_is_as_plain_torch_and_asks_as_predicted(tied: bool) -> None:
    config = GPTConfig(
        vocab_size=64, seq_len=8, n_layers=3, d_model=16, n_heads=2, tie_embeddings=tied, checkpoint="non_reentrant"
    )
    torch.manual_seed(0)
    plain = GPT(config)
    model = copy.deepcopy(plain)
    batches = [torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    step = partial(lm_loss_without_logits, recompute=True)
    expected = adam(plain)
    model, optimizer = em.wrap(
        model, adam(model), plan=em.Plan.offload(chunk_numel=3400, rcache_blocks=3), step=step, sample=batches[0]
    )
    record = model._elixir
    for _ in range(2):
        losses = [lm_loss(plain, batch) for batch in batches]
        (sum(losses) / 4).backward()
        with rounds_asked() as rounds:
            found = em.accumulate(model, step, batches)
        assert rounds == [record.spec.step_order.schedule(record.layout, 4).entries]
        torch.testing.assert_close(torch.stack(found), torch.stack(losses).detach(), rtol=1e-6, atol=1e-6)
        for one in (expected, optimizer):
            one.step()
            one.zero_grad()
    state = em.full_state_dict(model)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=5e-6)
    optimizer.close()


@pytest.fixture
def alone() -> None:
    em.init_mesh(device_type="cpu")


@pytest.mark.usefixtures("alone")
def test_random_states_do_not_depend_on_it() -> None:
    losses = []
    for dial in DIALS:
        model, optimizer = wrap(Tied("non-reentrant", dropout=0.5), replace(PLANS["offload"], batches_per_pass=dial))
        torch.manual_seed(7)
        found = em.accumulate(model, loss_of, [batches_of(1)[0]] * 5)
        losses.append([loss.item() for loss in found] + [torch.rand(()).item()])
        optimizer.close()
    assert every(found == losses[0] for found in losses)
    assert len(set(losses[0])) == 6


def early_and_late(dial: int | None, *, early: bool) -> tuple[dict[str, Tensor], list[int]]:
    """The weights after three steps of four batches, and how many chunks each step has updated in backward."""
    model = Tied("non-reentrant")
    model, optimizer = wrap(model, replace(PLANS["offload"], batches_per_pass=dial), adam(model))
    counts = []
    for step in range(3):
        with optimizer.update_in_backward() if early else nullcontext():
            em.accumulate(model, loss_of, batches_of(4, seed=step))
        counts.append(len(begun(optimizer)))
        optimizer.step()
        optimizer.zero_grad()
    state = em.full_state_dict(model)
    optimizer.close()
    return state, counts


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dial", DIALS)
def test_updates_begin_in_the_last_pass(dial: int | None) -> None:
    state, none = early_and_late(dial, early=False)
    found, counts = early_and_late(dial, early=True)
    assert none == [0, 0, 0]
    assert min(counts[1:]) > 0, "from the second backward on"
    assert every(torch.equal(found[key], state[key]) for key in state)


class FailsError(Exception):
    """A forward that fails."""


@pytest.mark.usefixtures("alone")
def test_a_failure_in_a_later_pass_gives_the_step_up() -> None:
    model, optimizer = wrap(Tied(), replace(PLANS["offload"], batches_per_pass=2))
    batches, calls = batches_of(5), []

    def fails_third(model: nn.Module, ids: Tensor) -> Tensor:
        calls.append(ids)
        if len(calls) == 3:
            raise FailsError
        return loss_of(model, ids)

    norms: list[Any] = []
    for step in (loss_of, fails_third, loss_of):
        try:
            em.accumulate(model, step, batches)
        except FailsError:
            assert step is fails_third
        else:
            norms.append(optimizer.clip_grad_norm_(float("inf")).item())
        optimizer.zero_grad()
    assert len(norms) == 2 and norms[0] == norms[1]
    optimizer.close()


def test_it_is_a_field_of_the_plan_and_an_option_of_presets() -> None:
    plan = em.Plan.zero3(batches_per_pass=2)
    assert em.Plan.from_json(plan.to_json()) == plan == replace(em.Plan.zero3(), batches_per_pass=2)
    assert "batches_per_pass=2" in str(plan) and "batches_per_pass" not in str(em.Plan.zero3())
    assert em.Plan.from_json(em.Plan.offload().to_json()).batches_per_pass is None
    older = em.Plan.offload().to_json().replace('"batches_per_pass": null, ', "")
    assert "batches_per_pass" not in older and em.Plan.from_json(older) == em.Plan.offload()
    assert {"zero3", "offload"} <= {*options()["batches_per_pass"].presets}
    for wrong in (0, True, 1.5, "all"):
        with pytest.raises(em.PlanError, match=r"batches_per_pass=.*expected a whole number of at least 1 or None"):
            em.Plan.zero3(batches_per_pass=wrong)  # type: ignore[arg-type]
