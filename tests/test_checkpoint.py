"""Save and load of wrapped models: exact under every layout, exact over a resume, all ranks failing together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_cases import assert_same, everything, load_and_save, train_and_save, unbroken_and_resumed
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
LAYOUTS = [(2, 2, "ddp"), (3, 1, "zero3"), (1, 1, "offload"), (2, 1, "zero2"), (4, 2, "zero3"), (4, 1, "offload")]
"""(ranks, ep, plan), each loading what the one before has saved; 4 -> 2 -> 3 -> 1 ranks, ep 4 -> 2 -> 1 -> 2 -> 1."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("checkpoints") / "start"
    return path, ranks(4).run(train_and_save, path, 4, "zero3", 3)[0]


def test_any_layout_loads_what_any_other_saved(trained: tuple[Path, dict[str, Any]], ranks: Ranks) -> None:
    """Fault 10, 11, 12: parameters, moments and numbers of updates are the same to the bit after every move."""
    path, state = trained
    first = everything(path)
    for name, value in state.items():
        if name != "head.weight":
            assert_same({name: first[f"{name} weight"]}, {name: value}, "weights")
    losses = None
    for world, ep, plan in LAYOUTS:
        target = path.parent / f"{world}-{ep}-{plan}"
        found = ranks(world).run(load_and_save, path, target, ep, plan, 1 if world != 3 else 0)[0]
        assert_same(everything(target), first, target.name)
        if found:
            losses = losses or found
            assert found == pytest.approx(losses, rel=1e-6), target.name  # fp32 sums of the loss in another order
        path = target


@pytest.mark.parametrize(
    ("world", "first", "second"),
    [
        (2, {"ep": 2, "plan": "zero3", "dropout": 0.1, "clip": 0.5}, {}),
        (2, {"ep": 1, "plan": "zero2", "dropout": 0.1}, {"ep": 1, "plan": "offload", "dropout": 0.1}),
        (1, {"ep": 1, "plan": "zero3", "dropout": 0.1}, {"ep": 1, "plan": "ddp", "dropout": 0.1}),
    ],
    ids=["same plan, clipped", "another plan", "another plan, one rank"],
)
def test_a_resumed_run_is_the_unbroken_one(
    world: int, first: dict[str, Any], second: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Faults 38, 39, 12: bit for bit, dropout, LR schedule and all. (The norm of clipping is a sum over shards, whose
    rounding a plan may change: so there is no clipping where the plan changes.)
    """
    for found in ranks(world).run(unbroken_and_resumed, tmp_path, first, second or first):
        assert found["resumed"] == found["unbroken"]
    assert_same(everything(tmp_path / "resumed"), everything(tmp_path / "unbroken"), "the last step")
