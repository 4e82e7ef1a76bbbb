"""Ctrl-C on several ranks: they go on together, or an error says that they cannot. No step is mixed with another."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_moe as em
from tests.runtime.test_interrupts import Interrupt, restore_torch, same, wrapped
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
PLANS = ("ddp", "zero2", "zero3", "offload")
APART = r"after {} steps and {} backwards .* on rank 0, after {} steps and {} backwards .* on rank 1"


def micro_batch(model: nn.Module) -> None:
    model(torch.ones(2, 16)).square().mean().backward()


def step_given_up(model: nn.Module, optimizer: Any) -> None:
    """Rank 1 is stopped after the clipping, and gives the step up."""
    micro_batch(model)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step() if dist.get_rank() == 0 else optimizer.zero_grad()


def micro_batch_given_up(model: nn.Module, optimizer: Any) -> None:
    """Rank 1 is stopped after the first of two micro-batches, and gives it up."""
    micro_batch(model)
    if dist.get_rank() == 1:
        optimizer.zero_grad()


def what_is_said(name: str, give_up: Callable[..., None], next_call: str, folder: str) -> list[str]:
    """(rank) What the next agreement and all that follow say."""
    model, optimizer = wrapped(name, torch.float32)
    micro_batch(model)
    optimizer.step()
    give_up(model, optimizer)
    calls: dict[str, Callable[[], Any]] = {
        "backward": lambda: micro_batch(model),
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "step": optimizer.step,
        "full_state_dict": lambda: em.full_state_dict(model),
        "save": lambda: em.save(folder, model, optimizer),
    }
    said = []
    for call in (next_call, "backward"):
        with pytest.raises(em.OutOfStepError) as raised:
            calls[call]()
        said.append(str(raised.value))
    optimizer.close()
    return said


@pytest.mark.parametrize(
    ("name", "give_up", "next_call"),
    [
        ("ddp", step_given_up, "backward"),  # elsewhere the next gather meets no other, until the timeout
        *((name, micro_batch_given_up, "backward") for name in PLANS),
        ("zero3", step_given_up, "full_state_dict"),
        ("ddp", step_given_up, "full_state_dict"),
        ("zero2", step_given_up, "save"),
        ("ddp", micro_batch_given_up, "clip"),
        ("offload", micro_batch_given_up, "step"),
    ],
)
def test_ranks_that_part_learn_it_at_their_next_agreement(
    name: str, give_up: Callable[..., None], next_call: str, ranks: Ranks, tmp_path: Path
) -> None:
    places = (2, 0, 1, 0) if give_up is step_given_up else (1, 1, 1, 0)
    for said in ranks(2).run(what_is_said, name, give_up, next_call, str(tmp_path / "mixed")):
        for text in said:
            with pytest.raises(em.OutOfStepError, match=APART.format(*places) + ".*start all ranks again"):
                raise em.OutOfStepError(text)
    assert not (tmp_path / "mixed").exists()


def stages_apart() -> str:
    """(rank) Each rank has a pipeline stage of its own; the second gives up a step that the first takes."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    stage = nn.Linear(4, 4)
    em.annotate(stage, {"*": em.Pattern(mesh, replicate=("dp",))})
    stage, optimizer = em.wrap(stage, torch.optim.AdamW(stage.parameters()), plan=em.Plan.ddp())
    for _ in range(2):
        stage(torch.ones(1, 4)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step() if dist.get_rank() == 0 else optimizer.zero_grad()
    optimizer.close()
    return "nothing"


def test_pipeline_stages_that_part_learn_it_at_the_norm(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=APART.format(1, 1, 0, 1)) as raised:
        ranks(2).run(stages_apart)
    assert raised.value.types == {0: "OutOfStepError", 1: "OutOfStepError"}


def loaded_together(folder: str) -> bool:
    """(rank) Ranks that have taken different numbers of steps are together again after a load."""
    model, optimizer = wrapped("zero2", torch.float32)
    em.save(folder, model, optimizer)
    before = em.full_state_dict(model, all_ranks=True)
    step_given_up(model, optimizer)
    em.load(folder, model, optimizer)
    equal = same(em.full_state_dict(model, all_ranks=True), before)
    micro_batch(model)
    optimizer.step()
    moved = not same(em.full_state_dict(model, all_ranks=True), before)
    optimizer.close()
    return equal and moved


def test_a_load_brings_ranks_together(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(loaded_together, str(tmp_path / "start")) == [True, True]


def train(model: Any, optimizer: Any, number: int) -> None:
    """A step of two micro-batches, which are other ones on each rank."""
    draw = torch.Generator().manual_seed(2 * number + dist.get_rank())
    for _ in range(2):
        model(torch.randn(4, 16, generator=draw)).square().mean().backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()


def steps(name: str, numbers: list[int], at: list[int | None]) -> tuple[str, int, dict[str, Tensor]]:
    """(rank) Takes steps, the second with an interrupt; returns an error's text, places in a step and the weights."""
    model, optimizer = wrapped(name, torch.float32)
    stop, places = at[dist.get_rank()], 0
    try:
        for place, number in enumerate(numbers):
            with Interrupt(stop if place == 1 else None) as interrupt, contextlib.suppress(KeyboardInterrupt):
                train(model, optimizer, number)
            restore_torch()
            optimizer.zero_grad()
            places = interrupt.places
        full = em.full_state_dict(model, all_ranks=True)
        optimizer.close()
    except em.ElixirError as error:
        return f"{type(error).__name__}: {error}", places, {}
    return "", places, full


@pytest.fixture
def impatient() -> Iterator[Callable[[], RankPool]]:
    """As `ranks(2)`, with a pool that waits for a lost rank for seconds alone."""
    pools: list[RankPool] = []

    def get() -> RankPool:
        if not pools or not pools[-1].alive:
            pools.append(RankPool(2, timeout_seconds=5))
        return pools[-1]

    yield get
    for pool in pools:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_random_interrupts_on_two_ranks_lose_nothing_silently(name: str, impatient: Callable[[], RankPool]) -> None:
    """What both ranks end with is what steps with or without the interrupted one give, to the bit."""
    nobody: list[int | None] = [None, None]
    (_, places, taken), _ = impatient().run(steps, name, [0, 1, 2], nobody)
    (_, _, skipped), _ = impatient().run(steps, name, [0, 2], nobody)
    draw, went_on = random.Random(0), 0
    for _ in range(60):
        second = draw.randrange(1, places)
        at = [draw.choice([None, second, draw.randrange(1, places)]), second]
        try:
            found = impatient().run(steps, name, [0, 1, 2], at)
        except RankError as error:  # gloo ends a process that gets a message of another size
            assert set(error.types.values()) <= {"Died"}, f"{at}: {error}"
            continue
        if any(said for said, _, _ in found):
            impatient().close()
            continue
        went_on += 1
        for _, _, full in found:
            assert same(full, taken) or same(full, skipped), at
        assert same(found[0][2], found[1][2]), at
    assert went_on > 2
