"""Hugging Face models nobody prepared: each family under plain torch and sharded, on one rank and on two.

Every family trains five steps under `zero3` and offloaded, with the fewest blocks its schedule can do with: loss, norm
and parameters equal those of one process on the whole batch. Tolerances as in `tests.support.parity`.
"""

import contextlib
import gc
import io
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from tests.support.cases import with_further
from tests.support.hf_cases import FAMILIES, ROWS, Batch, ids
from tests.support.parity import STEPS, compare, make_optimizer
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
CHECKPOINTED = ["gpt2", "llama", "mixtral", "t5", "bert"]


def build(name: str, reentrant: bool | None = None) -> nn.Module:
    """A family's model; with its own gradient checkpointing unless `reentrant` is None."""
    model: Any = FAMILIES[name].build()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def train(
    name: str, model: nn.Module, optimizer: Any, rank: int = 0, world: int = 1, steps: int = STEPS
) -> dict[str, Any]:
    """A few steps on this rank's rows."""
    family = FAMILIES[name]
    losses, norms = [], []
    for step in range(steps):
        loss = family.loss(model, rows_of(family.batch(step), rank, world))
        loss.backward()
        plain = not hasattr(optimizer, "clip_grad_norm_")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) if plain else optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return {"loss": losses, "norm": norms}


def rows_of(batch: Batch, rank: int, world: int) -> Batch:
    """A rank's part of a batch."""
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return {name: value[rows] for name, value in batch.items()}


def plain(name: str, reentrant: bool | None = None) -> dict[str, Any]:
    """The oracle: one process, the whole batch."""
    model = build(name, reentrant)
    result = train(name, model, make_optimizer(model))
    return result | {"state": {key: value.clone() for key, value in model.state_dict().items()}}


def wrapped(name: str, plan: em.Plan, reentrant: bool | None = None) -> dict[str, Any]:
    """The same under `plan`."""
    model = build(name, reentrant)
    model, optimizer = em.wrap(model, make_optimizer(model), plan=plan)
    rank, world = dist.get_rank(), dist.get_world_size()
    result = train(name, model, optimizer, rank, world)
    losses = torch.tensor(result["loss"], dtype=torch.float64)
    dist.all_reduce(losses)
    result |= {"loss": (losses / world).tolist(), "state": em.full_state_dict(model, all_ranks=True)}
    optimizer.close()
    del model, optimizer
    gc.collect()
    return result


def least_blocks(name: str, chunk_numel: int, reentrant: bool | None = None) -> int:
    """The fewest blocks that the schedule of a step can do with, of a plan with blocks for all."""
    model = build(name, reentrant)
    model, optimizer = em.wrap(
        model, make_optimizer(model), plan=em.Plan.offload(rcache_blocks="all", chunk_numel=chunk_numel)
    )
    train(name, model, optimizer, dist.get_rank(), dist.get_world_size(), steps=1)
    assert em.inspect(model).schedule is not None
    least, chunks = em.inspect(model).schedule.least_blocks(), len(em.inspect(model).layout.cached)
    optimizer.close()
    assert least > 0
    assert least < chunks or reentrant is not None, "a cache of all chunks is none; a layer that runs again is one unit"
    return least


def with_the_least(name: str, reentrant: bool | None = None) -> dict[str, dict[str, Any]]:
    """Under zero3 and, without checkpointing, offload, with the fewest blocks there can be; alone, offload only."""
    chunk_numel = max(p.numel() for p in FAMILIES[name].build().parameters())  # the shortest it can be
    least = least_blocks(name, chunk_numel, reentrant)
    plans = {}
    if dist.get_world_size() > 1:  # one rank has all at home on the device, in place
        plans["zero3"] = em.Plan.zero3(rcache_blocks=least, chunk_numel=chunk_numel)
    if reentrant is None:
        plans["offload"] = em.Plan.offload(rcache_blocks=least, device_chunks=1, chunk_numel=chunk_numel)
    return {case: wrapped(name, plan, reentrant) for case, plan in plans.items()}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A world of one in this process: importing everything in yet another costs more than the tests."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", with_further(FAMILIES, ("gpt2", "mixtral", "t5")))
def test_family(name: str, ranks: Ranks, alone: None) -> None:
    wanted = plain(name)
    for found in (*ranks(2).run(with_the_least, name), with_the_least(name)):
        for case, result in found.items():
            compare(result, wanted, f"{name} {case}")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", with_further(CHECKPOINTED, ("llama",)))
def test_their_gradient_checkpointing(name: str, reentrant: bool, ranks: Ranks) -> None:
    wanted = plain(name, reentrant)
    for found in ranks(2).run(with_the_least, name, reentrant):
        compare(found["zero3"], wanted, f"{name} reentrant={reentrant}")


def generate(name: str, model: Any, rows: slice, **options: Any) -> Tensor:
    """Greedy continuations of some rows."""
    model.eval()
    tokens: Tensor = model.generate(ids(8, 6)[rows], max_new_tokens=8, do_sample=False, **options)
    model.train()
    return tokens


def generate_wrapped(name: str, plan: em.Plan, stop: int) -> tuple[list[int], list[int], float]:
    """Continuations of this rank's row before training; the loss of a step behind it is what it would have been."""
    model = build(name)
    model, optimizer = em.wrap(model, make_optimizer(model), plan=plan)
    row = slice(dist.get_rank(), dist.get_rank() + 1)
    free = generate(name, model, row, synced_gpus=dist.get_world_size() > 1)
    stopped = generate(name, model, row, synced_gpus=dist.get_world_size() > 1, eos_token_id=stop)
    loss = train(name, model, optimizer, steps=2)["loss"][-1]
    optimizer.close()
    return free[0].tolist(), stopped[0].tolist(), loss


@pytest.mark.parametrize("name", with_further(["gpt2", "llama", "mixtral", "t5"], ("mixtral",)))
def test_generate(name: str, ranks: Ranks) -> None:
    """Also where one rank's row ends before the other's."""
    model = build(name)
    free = [generate(name, model, slice(r, r + 1))[0].tolist() for r in range(2)]
    stop = next(token for token in free[0][-8:-1] if token not in free[1])
    wanted = [generate(name, model, slice(r, r + 1), eos_token_id=stop)[0].tolist() for r in range(2)]
    assert len(wanted[0]) != len(wanted[1])
    loss = train(name, model, make_optimizer(model), steps=2)["loss"][-1]
    zero3 = em.Plan.zero3(rcache_blocks=5)
    for rank, found in enumerate(ranks(2).run(generate_wrapped, name, zero3, stop)):
        assert found[0] == free[rank]
        assert found[1] == wanted[rank]
        assert found[2] == pytest.approx(loss, abs=1e-4)


def run_example(path: Path) -> str:
    """What the example prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path))
    gc.collect()
    return printed.getvalue()


def test_the_example_runs(ranks: Ranks) -> None:
    path = Path(__file__).parents[2] / "examples" / "hf_finetune.py"
    first, second = ranks(2).run(run_example, path)
    assert "step 9: loss" in second
    assert "saved and read again: 477888 parameters" in first
    losses = [float(line.split()[-1]) for line in first.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 1
