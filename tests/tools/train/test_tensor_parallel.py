"""A training on tensor-parallel ranks: the losses of one rank, also if it goes on under another degree.

Tolerance: some steps of AdamW, whose sums are over other ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elixir_moe.errors import ConfigError, LayoutError
from elixir_tools.train.trainer import Trainer
from tests.support.every import every
from tests.support.ranks import RankPool
from tests.support.train_cases import run, settings_of

Ranks = Callable[[int], RankPool]


def config_of(out: Path, tp: int = 1, ep: int = 1, **run_settings: Any) -> Any:
    return settings_of(
        out, model={"dropout": 0.0, "ep": [1, ep]}, run={"tp": tp, "accumulation": 2, **run_settings}, save={"every": 1}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> list[dict[str, Any]]:
    """What one rank writes of each step."""
    lines: list[dict[str, Any]] = ranks(1).run(run, config_of(tmp_path_factory.mktemp("whole") / "out"))[0]["metrics"]
    return lines


def assert_like(
    found: list[dict[str, Any]], whole: list[dict[str, Any]], names: tuple[str, ...] = ("loss", "grad_norm", "lr")
) -> None:
    for line, other in zip(found, whole, strict=True):
        for name in names:
            assert line[name] == (None if other[name] is None else pytest.approx(other[name], rel=1e-4)), name


def test_losses_are_those_of_one_rank_also_after_a_resume_with_another_tp(
    ranks: Ranks, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    stopped = ranks(2).run(run, config_of(tmp_path / "out", tp=2), {3: "SIGTERM"}, 1)
    assert every("stopped after step 4" in found["ended"] for found in stopped), stopped
    assert "ranks: 2 (tp 2), micro-batches: 2" in stopped[0]["said"]
    found = ranks(2).run(run, config_of(tmp_path / "out", ep=2))[0]
    assert found["ended"] == ""
    assert_like(found["metrics"], whole, ("loss", "grad_norm", "val_loss", "lr"))
    for line in found["metrics"]:  # each choice counts once: samples x bytes of a micro-batch
        assert sum(line["tokens_per_expert"]["blocks.1.mlp"]) == 8 // 2 * 16


def short_of_memory(config: Any) -> dict[str, Any]:
    """(rank) The run, in which the last rank finds no memory in step 3, once."""
    before, tries = Trainer.forward_backward, []

    def forward_backward(training: Trainer, *, early: bool = False) -> float:
        if training.progress.step == 2 and dist.get_rank() == dist.get_world_size() - 1 and not tries:
            tries.append(1)
            raise torch.OutOfMemoryError("out of memory, so the test says")
        return before(training, early=early)

    Trainer.forward_backward = forward_backward  # type: ignore[method-assign]
    try:
        return run(config)
    finally:
        Trainer.forward_backward = before  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp", "ep"), [(2, 2, 1), (4, 2, 2)])
def test_a_step_without_memory_is_done_again(
    world: int, tp: int, ep: int, ranks: Ranks, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    found = ranks(world).run(short_of_memory, config_of(tmp_path / "out", tp=tp, ep=ep))[0]
    assert found["ended"] == "" and "out of memory" in [kind for kind, _ in found["events"]]
    assert_like(found["metrics"], whole)


def test_degrees_are_checked_before_anything_starts(tmp_path: Path) -> None:
    config_of(tmp_path, tp=2, ep=2).check_ranks(4)
    with pytest.raises(LayoutError, match=r"run\.tp=2 does not divide the 3 ranks of this run: choose one of \[1, 3\]"):
        config_of(tmp_path, tp=2).check_ranks(3)
    with pytest.raises(LayoutError, match=r"model\.ep\[1\]=2 does not divide the 2 ranks of this run / run\.tp=2"):
        config_of(tmp_path, tp=2, ep=2).check_ranks(2)
    with pytest.raises(LayoutError, match="tp=4 does not divide n_heads=2"):
        config_of(tmp_path, tp=4).check_ranks(4)
    with pytest.raises(ConfigError, match=r"12 ranks / run\.tp=2 x run\.accumulation=2: choose a multiple of 12"):
        config_of(tmp_path, tp=2).check_ranks(12)
    with pytest.raises(ConfigError, match=r"run\.tp: expected at least 1, got 0"):
        config_of(tmp_path, tp=0)
