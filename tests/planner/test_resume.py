"""A run with ``plan.kind=auto`` that is stopped and started again: the same plan, or another one that is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, settings_of

Ranks = Callable[[int], RankPool]
AUTO = {"kind": "auto", "rcache_blocks": None, "chunk_numel": None, "hardware": "a100-80g-pcie-x4"}
TIGHT = "700 kB"
"""Room for the activations and a part of the model."""


def settings(out: Path, **plan: Any) -> Any:
    """The tiny mixture, planned for a machine whose figures do not change."""
    return settings_of(out, plan={**AUTO, **plan})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> tuple[Path, dict[str, Any]]:
    """A run that nothing stops: its directory, and what it wrote."""
    out = tmp_path_factory.mktemp("whole")
    return out, ranks(2).run(run, settings(out))[0]


def test_it_goes_on_to_the_bit_under_the_plan_found_again(whole: Any, tmp_path: Path, ranks: Ranks) -> None:
    pool = ranks(2)
    out, unbroken = whole
    parted = settings(tmp_path / "parted")
    assert "75" in pool.run(run, parted, {3: "SIGTERM"})[0]["ended"]
    planned = (tmp_path / "parted" / "plan.json").read_text()
    found = pool.run(run, parted)[0]
    assert (tmp_path / "parted" / "plan.json").read_text() == planned
    assert found["metrics"] == unbroken["metrics"] and len(found["metrics"]) == 6
    assert found["events"][-1][0] == "resumed" and "another plan" not in found["events"][-1][1]
    expected = last_state(out)
    for name, value in last_state(tmp_path / "parted").items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_less_memory_finds_another_plan_and_says_so(whole: Any, tmp_path: Path, ranks: Ranks) -> None:
    """Each element's gradient is a sum of two in any plan; what differs is the order in which the norm is summed."""
    pool = ranks(2)
    assert "75" in pool.run(run, settings(tmp_path / "parted"), {3: "SIGTERM"})[0]["ended"]
    before = json.loads((tmp_path / "parted" / "plan.json").read_text())
    found = pool.run(run, settings(tmp_path / "parted", budget=TIGHT))[0]
    after = json.loads((tmp_path / "parted" / "plan.json").read_text())
    assert not before["offloaded"] and after["offloaded"]
    kind, text = found["events"][-1]
    assert kind == "resumed"
    told = text.partition("under another plan: ")[2].split(", ")
    assert "offloaded=True (was False)" in told
    assert len(told) == sum(value != before[name] for name, value in after.items())
    for line, same in zip(found["metrics"], whole[1]["metrics"], strict=True):
        assert abs(line["loss"] - same["loss"]) < 1e-5
