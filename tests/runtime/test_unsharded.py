"""Blocks of ``with em.unsharded(...)`` on several ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from tests.runtime.test_habits import D, Net, adamw, mean_square
from tests.support.every import same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=5, device_chunks=1, chunk_numel=600),
}


def fill(bias: nn.Parameter) -> None:
    bias.data.fill_(6.0)


def flip(bias: nn.Parameter) -> None:
    bias.data.copy_(bias.data.flip(0))


def replace(bias: nn.Parameter) -> None:
    bias.data = torch.ones(D, dtype=bias.dtype)


def trained(plan: str, write: bool | None) -> dict[str, Tensor]:
    """(rank) The weights after two steps, before each of which a bias is written; None forgets to say so."""
    torch.manual_seed(0)
    model: Any = Net()
    model, optimizer = em.wrap(model, adamw(model), plan=PLANS[plan])
    for step in range(2):
        for change in (fill, flip, replace):
            if write is None:
                with pytest.raises(em.UsageError, match=r"last\.bias.*pass write=True"), em.unsharded(model.last):
                    change(model.last.bias)
            elif write:
                with em.unsharded(model.last, write=True):
                    change(model.last.bias)
                with torch.no_grad():
                    model.last.bias.mul_(0.5)
        mean_square(model, torch.randn(8, D, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.parametrize("plan", ["zero2", "offload"])
def test_a_block_that_forgets_to_say_that_it_writes(plan: str, ranks: Ranks) -> None:
    """An error on all ranks, also on those that have no part of the bias at home; nothing of it is left."""
    untouched = ranks(2).run(trained, plan, False)
    for forgot, wanted in zip(ranks(2).run(trained, plan, None), untouched, strict=True):
        for name, value in wanted.items():
            assert torch.equal(forgot[name], value), name


def test_what_is_written_is_the_same_under_every_plan(ranks: Ranks) -> None:
    found = {plan: ranks(2).run(trained, plan, True) for plan in PLANS}
    untouched = ranks(2).run(trained, "ddp", False)
    for states in found.values():
        for state in states:
            assert not torch.equal(state["last.bias"], untouched[0]["last.bias"])
            for name, value in found["ddp"][0].items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def apart(plan: str) -> dict[str, Any]:
    """(rank) What is said where one rank alone writes, and the weights behind it and behind the same writes of all."""
    torch.manual_seed(0)
    model: Any = Net()
    model, optimizer = em.wrap(model, adamw(model), plan=PLANS[plan])
    found: dict[str, Any] = {"before": em.full_state_dict(model, all_ranks=True)}
    found["said"] = []
    for change in (fill, replace):
        with pytest.raises(em.UsageError) as error, em.unsharded(model.last, write=True):
            if dist.get_rank() == 0:
                change(model.last.bias)
        found["said"].append(str(error.value))
    found["after"] = em.full_state_dict(model, all_ranks=True)
    with em.unsharded(model.last, write=True):
        fill(model.last.bias)
    mean_square(model, torch.ones(8, D)).backward()
    optimizer.step()
    found["trained"] = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_write_of_one_rank_alone_is_an_error_of_all(plan: str, ranks: Ranks) -> None:
    """Nothing of it is stored, but where the weights have no other home than the memory that was written."""
    both = ranks(2).run(apart, plan)
    for found in both:
        for said in found["said"]:
            assert "'last.bias'" in said and "every rank must write the same values" in said
        if plan != "ddp":
            assert same_tensors(found["after"], found["before"])
        assert not torch.equal(found["trained"]["last.bias"], found["before"]["last.bias"])
    torch.testing.assert_close(both[0]["trained"], both[1]["trained"], rtol=0, atol=0)
