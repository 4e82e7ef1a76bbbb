"""`elixir-moe train` whose micro-batches pass each layer together: the run of the plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.hf.test_one_pass import passes
from tests.support.every import same_tensors
from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, settings_of

Ranks = Callable[[int], RankPool]


def ran(out: Path, together: int, at: dict[int, str] | None = None, **changes: Any) -> Any:
    """(rank) What a run of three micro-batches a step has left, and its passes."""
    changes = {
        "model": {"dropout": 0.0, "n_layers": 3, "experts": [0, 4, 0], "ep": [1, dist.get_world_size(), 1]},
        "run": {"accumulation": 3, "global_batch": 12},
        **changes,
    }
    plan = {"batches_per_pass": together, "chunk_numel": 4096, "rcache_blocks": 6}
    with passes() as found:
        left = run(settings_of(out, plan=plan, **changes), at)
    assert left["metrics"], left["ended"]
    return left, last_state(out), found


UNCLIPPED: dict[str, Any] = {"optimizer": {"clip_norm": None}, "watch": {"on_nan": "back", "memory_tries": 0}}


@pytest.mark.parametrize("changes", [{}, UNCLIPPED], ids=["clipped", "updated in backward"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_in_one_pass_is_that_of_the_plain_loop(
    ranks: Ranks, tmp_path: Path, world: int, changes: dict[str, Any]
) -> None:
    plain = ranks(world).run(ran, tmp_path / "plain", 1, **changes)
    for together, expected in ((3, [3]), (2, [2])):
        ours = ranks(world).run(ran, tmp_path / str(together), together, **changes)
        for (found, _, counts), (wanted, _, none) in zip(ours, plain, strict=True):
            assert counts == expected * 6 and not none and found["ended"] == wanted["ended"] == ""
            for entry, other in zip(found["metrics"], wanted["metrics"], strict=True):
                numbers = {name: value for name, value in other.items() if isinstance(value, float)}
                assert {**entry, **numbers} == other
                assert {name: entry[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)


def test_a_run_in_one_pass_resumes_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Dropout included: its seeds are drawn from the generator that a checkpoint holds."""
    model = {"dropout": 0.1, "n_layers": 3, "experts": [0, 4, 0], "ep": [1, 1, 1]}
    ((wanted, state, _),) = ranks(1).run(ran, tmp_path / "whole", 3, model=model)
    ((stopped, _, _),) = ranks(1).run(ran, tmp_path / "stopped", 3, {3: "SIGTERM"}, model=model)
    ((found, again, _),) = ranks(1).run(ran, tmp_path / "stopped", 3, model=model)
    assert "SIGTERM" in stopped["ended"] and found["metrics"] == wanted["metrics"]
    assert same_tensors(again, state)
