"""Experts without a token, on a rank or on all, or other ones on each rank and step: training is plain torch's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import elixir_moe as em
from elixir_moe.moe.layer import MoE
from elixir_moe.parallel.mesh import expert_mesh
from tests.moe.test_moe import B, E, S, bias_towards, build, inputs, starve, world_mesh
from tests.support.every import every
from tests.support.ranks import RankPool
from tests.support.train_cases import run, settings_of

Ranks = Callable[[int], RankPool]
STEPS = 3
HALF = B * S // 2
TOLERANCE = 1e-5
"""Sums of at most 24 rows in another order, in fp32: gradients below 1 differ by some 1e-7, and AdamW, at this rate
and eps, passes on at most 1e-3 / 1e-4 of it a step."""


def chosen(case: str, step: int) -> Callable[[int], list[int]]:
    """The expert of token t; tokens of the first half are those of rank 0, which holds experts 0 and 1."""
    if case == "other experts each time":  # of each rank one, and another in the next step
        return lambda t: [(step + 2 * (t >= HALF)) % E]
    return starve(case, 1) if case else lambda t: [t % E]


def steps(layer: MoE, optimizer: Any, case: str, rank: int, ranks: int) -> Iterator[Tensor]:
    """Takes them; gives the tokens each expert got."""
    x, grad = inputs()
    rows = slice(rank * B // ranks, (rank + 1) * B // ranks)
    for step in range(STEPS):
        y, aux = layer(bias_towards(build(), x, chosen(case, step))[rows])
        ((y * grad[rows]).mean() + aux).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield layer.tokens_per_expert


def clear_router(layer: MoE) -> MoE:
    """Tokens say by themselves to whom they go (`bias_towards`), by far more than these steps change."""
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :E] = torch.eye(E)
    return layer


def adamw(layer: MoE) -> torch.optim.AdamW:
    return torch.optim.AdamW(layer.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)


def trained(case: str) -> dict[str, Any]:
    """On two ranks that hold two experts each."""
    mesh = world_mesh()
    expert = expert_mesh(mesh, 2)
    layer = clear_router(build(expert))
    rules = {"experts.*": em.Pattern(expert, replicate=("edp", "tp"), shard={"ep": 0})}
    em.annotate(layer, {**rules, "*": em.Pattern(mesh, replicate=("dp", "tp"))})
    layer, optimizer = em.wrap(layer, adamw(layer), plan=em.Plan.zero3(rcache_blocks=2))
    counts = list(steps(layer, optimizer, case, dist.get_rank(), 2))
    moved = em.inspect(layer).statistics.as_dict()
    found = {"weights": em.full_state_dict(layer, all_ranks=True), "counts": counts, "moved": moved}
    optimizer.close()
    return found


def check(case: str, ranks: Ranks) -> list[Tensor]:
    """Two ranks against one plain process, and against an even share: weights, and what the library has moved."""
    plain = clear_router(build())
    counts = list(steps(plain, adamw(plain), case, 0, 1))
    even = ranks(2).run(trained, "")
    for rank, found in enumerate(ranks(2).run(trained, case)):
        assert found["moved"] == even[rank]["moved"], f"rank {rank}: what is gathered and reduced depends on routing"
        assert every(map(torch.equal, found["counts"], counts)), "the same tokens everywhere"
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=TOLERANCE, msg=name)
    return counts


@pytest.mark.fault(15)
def test_an_expert_without_a_token_on_one_rank(ranks: Ranks) -> None:
    counts = check("somewhere", ranks)
    assert every(0 < n[2] < HALF / 2 for n in counts), "of the tokens of rank 1 alone"


@pytest.mark.fault(16)
def test_an_expert_without_a_token_on_all_ranks(ranks: Ranks) -> None:
    """Its gradient is zero, not missing: weight decay and moments go on, as in one process."""
    counts = check("everywhere", ranks)
    assert every(n[2] == 0 for n in counts)


@pytest.mark.fault(16)
def test_an_expert_without_a_token_for_long_is_a_line_in_the_events(ranks: Ranks, tmp_path: Path) -> None:
    config = settings_of(tmp_path / "out", watch={"window": 3})
    found = ranks(2).run(run, config, {1: "starve"})[0]
    said = [text for kind, text in found["events"] if kind == "expert"]
    assert found["ended"] == "" and said == ["expert 2 of blocks.1.mlp has had no token for 3 steps"]
    assert [line["tokens_per_expert"]["blocks.1.mlp"][2] > 0 for line in found["metrics"]] == [True] + [False] * 5


@pytest.mark.fault(17)
def test_other_experts_on_each_rank_and_step(ranks: Ranks) -> None:
    counts = check("other experts each time", ranks)
    used = [set(n.nonzero().flatten().tolist()) for n in counts]
    assert used == [{0, 2}, {1, 3}, {0, 2}], "one of each rank"
