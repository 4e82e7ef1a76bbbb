"""The ranges that a profiler sees, by the field's names; without a profiler there are none."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile

import elixir_moe as em
from elixir_moe.spans import span
from elixir_tools.report.timeline import COMPUTE, joined, recorded
from tests.support.every import every


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(
    plan: em.Plan, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return em.wrap(net, optimizer(net.parameters(), lr=0.1), plan=plan)


def test_a_profiler_sees_what_the_library_does_by_chunk(tmp_path: Path) -> None:
    model, optimizer = wrapped(em.Plan.offload(rcache_blocks=3, chunk_numel=80))
    step(model, optimizer)
    with profile() as found:
        step(model, optimizer)
    names = [event.name for event in found.events() if event.name.startswith("elixir::")]
    chunks = [f"chunk {i} ({i}.weight, {i}.bias)" for i in range(4)]
    for verb in ("fetch", "wait", "reduce"):
        assert {f"elixir::{verb} {chunk}" for chunk in chunks} <= set(names), verb
    assert [name for name in names if "reduce" in name] == [f"elixir::reduce {chunk}" for chunk in reversed(chunks)]
    assert not [name for name in names if "update" in name], "updates run on a thread, which a profiler leaves out"
    told: dict[str, str] = {}
    with recorded(3, told.__setitem__):
        step(model, optimizer)
        step(model, optimizer)  # its forward waits for the updates of the first
    timeline = json.loads(told["timeline.json"])
    updates = {one["name"] for one in timeline["spans"] if one["lane"] == "update"}
    assert updates == set(chunks), "the trainer's profiler records all threads"
    assert timeline["step"] == 3 and timeline["spans"][0]["lane"] == COMPUTE
    assert {one["lane"] for one in timeline["spans"]} == {COMPUTE, "fetch", "wait", "reduce", "update"}
    assert min(one["begin"] for one in timeline["spans"]) == 0
    assert every(one["begin"] <= one["end"] for one in timeline["spans"])
    optimizer.close()


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> None:
        raise AssertionError(name)

    model, optimizer = wrapped(em.Plan.offload(rcache_blocks=3, chunk_numel=80), torch.optim.SGD)  # runs no thread
    monkeypatch.setattr(torch.profiler, "record_function", never)
    step(model, optimizer)
    with pytest.raises(AssertionError, match="elixir::fetch chunk 0"), profile():
        model(torch.ones(2, 8))
    assert span("gather", "chunk 0") is span("reduce", "chunk 1")
    optimizer.close()


def test_operators_that_touch_are_one_span() -> None:
    assert joined([(0, 10), (500, 600), (5, 20), (20.5, 30), (599, 1000)]) == [(0, 30), (500, 1000)]
    assert joined([]) == []
