"""Fetch, reduction and update overlap compute: shown by the order of events, never by time."""

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.distributed.collectives import Communicator, Work
from elixir_moe.memory.gate import Gate
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.runtime.phase import CLOSED
from elixir_moe.runtime.streams import Streams
from tests.lanes.late import issue_in_order
from tests.support.cases import placed
from tests.support.every import every, same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D, LAYERS = 16, 6
CHUNK = D * D + D
"""One layer."""
PATIENCE_SECONDS = 60


class Stack(nn.Module):
    """Equal layers, each a chunk of its own; tells when each begins forward and when its gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(LAYERS))
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.events.append(f"forward {index}")
            x = layer(x).tanh()
            if x.requires_grad:
                x.register_hook(lambda _, index=index: self.events.append(f"backward {index}"))
        return x


def sharded(plan: em.Plan) -> tuple[Stack, ShardedOptimizer]:
    model = Stack()
    return em.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        plan=placed(plan),
    )


def take_step(model: Stack, optimizer: ShardedOptimizer, seed: int) -> None:
    model(torch.randn(4, D, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


class Logged:
    """A communicator that tells when a collective begins, and when somebody has to have it ended."""

    def __init__(self, communicator: Communicator, events: list[str]) -> None:
        self._communicator = communicator
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def all_gather(self, buffer: Tensor, tag: int, **what: Any) -> Work:
        self._events.append(f"gather {tag}")
        return self._told(self._communicator.all_gather(buffer, tag, **what), f"gathered {tag}")

    def reduce_scatter(self, *args: Any, tag: int, **what: Any) -> Work:
        self._events.append(f"reduce {tag}")
        return self._told(self._communicator.reduce_scatter(*args, tag=tag, **what), f"reduced {tag}")

    def _told(self, work: Work, end: str) -> Work:
        events = self._events

        class Told(Work):
            def wait(self) -> None:
                if work.pending:
                    events.append(end)
                work.wait()

            @property
            def pending(self) -> bool:
                return work.pending

        return Told()


def events_of_a_step(plan: em.Plan) -> list[str]:
    model, optimizer = sharded(plan)
    take_step(model, optimizer, 0)  # which records the schedule
    for chunk in optimizer._scheduler.chunks:
        object.__setattr__(chunk, "communicator", Logged(chunk.communicator, model.events))
    model.events.clear()
    take_step(model, optimizer, 1)
    optimizer.close()
    return model.events


@pytest.mark.parametrize("blocks", [4, 5])
def test_gathers_overlap_the_layers_before(blocks: int, ranks: Ranks) -> None:
    """In forward three ahead, and again in backward as blocks become free; one of them is for gradients."""
    for events in ranks(2).run(events_of_a_step, em.Plan.zero3(rcache_blocks=blocks, chunk_numel=CHUNK)):
        assert events.count("gather 0") == 2, "the cache is too small to keep it until its backward"
        for layer in range(1, LAYERS):
            begun, ended = events.index(f"gather {layer}"), events.index(f"gathered {layer}")
            assert begun < events.index(f"forward {max(layer - 2, 1)}")
            assert events.index(f"forward {layer - 1}") < ended
        again = events[events.index(f"backward {LAYERS - 1}") :]
        for layer in range(LAYERS - blocks, -1, -1):
            begun, ended = again.index(f"gather {layer}"), again.index(f"gathered {layer}")
            assert begun < again.index(f"reduce {layer + 1}") < ended


def test_reductions_overlap_the_layers_behind(ranks: Ranks) -> None:
    for events in ranks(2).run(events_of_a_step, em.Plan.zero2(chunk_numel=CHUNK)):
        for layer in range(LAYERS - 1, 0, -1):
            begun, ended = events.index(f"reduce {layer}"), events.index(f"reduced {layer}")
            assert begun < events.index(f"backward {layer - 1}") < ended


def run_in_order(run: Callable[..., list[str]], plan: em.Plan) -> list[str]:
    """What `run` returns where only their order matches collectives, as on NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        issue_in_order(patch)
        return run(plan)


def updates_held_back(plan: em.Plan) -> list[str]:
    """Holds the update of each layer but the first back until the layer before has run in the next forward."""
    model, optimizer = sharded(plan)
    take_step(model, optimizer, 0)
    run_already = [threading.Event() for _ in range(LAYERS)]
    prepare = optimizer._updates.elementwise.prepare

    def held_back(chunk: Any, *args: Any) -> Callable[[], Any]:
        run, index = prepare(chunk, *args), chunk.spec.index

        def update() -> Any:
            before = run_already[index - 1] if index else None
            assert before is None or before.wait(PATIENCE_SECONDS), "forward waits for updates it does not need yet"
            begun_beside = run()
            model.events.append(f"updated {index}")
            return begun_beside

        return update

    optimizer._updates.elementwise.prepare = held_back  # type: ignore[method-assign]
    take_step(model, optimizer, 1)
    counted = em.inspect(
        model
    ).held_bytes  # waits for no update: after each step it is asked for by what measures steps
    assert counted["host"] == em.inspect(model).footprint.host_bytes
    for chunk in optimizer._scheduler.chunks:
        object.__setattr__(chunk, "communicator", Logged(chunk.communicator, model.events))
    for layer, event in zip(model.layers, run_already, strict=True):  # what ran is issued before the layer is left
        layer.register_forward_hook(lambda *_, event=event: event.set(), prepend=True)
    model(torch.randn(4, D))
    optimizer.close()
    events = model.events
    return events[len(events) - events[::-1].index("backward 0") :]  # what followed the last backward


@pytest.mark.parametrize("blocks", [4, "all"])
@pytest.mark.parametrize("in_order", [False, True])
def test_updates_overlap_the_next_forward(in_order: bool, blocks: Any, ranks: Ranks) -> None:
    """Each gather waits for its own update and for no other; the order of gathers is that of the plan."""
    plan = em.Plan.offload(rcache_blocks=blocks, chunk_numel=CHUNK)
    run = [run_in_order, updates_held_back] if in_order else [updates_held_back]
    for events in ranks(2).run(*run, plan):
        assert events.index("forward 0") < events.index("updated 1")
        gathers = [event for event in events if event.startswith("gather ")]
        assert gathers == [f"gather {layer}" for layer in range(LAYERS)]
        for layer in range(LAYERS):
            assert events.index(f"updated {layer}") < events.index(f"gather {layer}")


def slices_held_back(plan: em.Plan) -> list[str]:
    """Holds all but the first chunk's slices back, while they are in memory, until the next forward has begun."""
    model, optimizer = sharded(plan)
    take_step(model, optimizer, 0)
    begun = threading.Event()
    for chunk in optimizer._scheduler.chunks[1:]:
        change, index = chunk.shard.change, chunk.spec.index

        def held_back(work: Any, moments: Any, change: Any = change, index: int = index) -> Any:
            def later(*part: Any) -> None:
                assert begun.wait(PATIENCE_SECONDS), "forward waits for updates that it does not need yet"
                work(*part)
                model.events.append(f"updated {index}")

            return change(later, moments)

        chunk.shard.change = held_back  # type: ignore[method-assign]
    take_step(model, optimizer, 1)
    model.layers[0].register_forward_hook(lambda *_: begun.set(), prepend=True)
    model(torch.randn(4, D))
    optimizer.close()
    return model.events[len(model.events) - model.events[::-1].index("backward 0") :]


@pytest.mark.parametrize("in_order", [False, True])
def test_updates_on_disk_overlap_the_next_forward(in_order: bool, ranks: Ranks) -> None:
    plan = em.Plan.offload(rcache_blocks="all", disk_chunks=LAYERS, chunk_numel=CHUNK)
    run = [run_in_order, slices_held_back] if in_order else [slices_held_back]
    for events in ranks(2).run(*run, plan):
        assert events.index("forward 0") < events.index("updated 1")
        for layer in range(1, LAYERS - 1):
            assert events.index(f"updated {layer}") < events.index(f"forward {layer + 1}")


def weights_after(plan: em.Plan, beside: bool) -> dict[str, Tensor]:
    model, optimizer = sharded(plan)
    if not beside:
        optimizer._update_thread = None
    for seed in range(4):
        take_step(model, optimizer, seed)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


def test_updates_beside_training_change_no_bit(ranks: Ranks) -> None:
    for plan in (em.Plan.offload(rcache_blocks=2, chunk_numel=CHUNK), em.Plan.offload(rcache_blocks="all")):
        for beside, serial in zip(*(ranks(2).run(weights_after, plan, b) for b in (True, False)), strict=True):
            assert same_tensors(beside, serial)


def fails(chunk: Any, *args: Any) -> Callable[[], None]:
    def update() -> None:
        raise MemoryError("no room for an update")

    return update


def test_an_update_that_fails_is_told_to_whoever_looks(tmp_path: Path) -> None:
    model, optimizer = sharded(em.Plan.offload(rcache_blocks=2, chunk_numel=CHUNK))
    optimizer._updates.elementwise.prepare = fails  # type: ignore[method-assign]
    take_step(model, optimizer, 0)
    for look in (
        lambda: model(torch.zeros(1, D)),
        lambda: em.full_state_dict(model, all_ranks=True),
        lambda: model(torch.zeros(1, D)),
    ):
        with pytest.raises(MemoryError, match="no room"):
            look()
    with pytest.raises(em.CheckpointError, match="no room"):
        em.save(tmp_path / "a", model, optimizer, asynchronous=True).result()
    assert not list(tmp_path.iterdir())
    with pytest.raises(MemoryError, match="no room"):
        optimizer.close()
    assert model._elixir.phase.now is CLOSED, "all the same"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_fetch_waits_for_all_compute_only_if_a_view_of_its_block_is_kept(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = sharded(em.Plan.offload(rcache_blocks=2, chunk_numel=CHUNK))
    take_step(model, optimizer, 0)
    kept: list[Tensor] = []
    for layer in model.layers if keeps else ():
        layer.register_forward_pre_hook(lambda layer, _: kept.append(layer.weight[:1]))
    waits: list[str] = []
    monkeypatch.setattr(Streams, "fetch_after_compute", lambda _: waits.append("for compute"))
    with torch.no_grad():
        model(torch.zeros(1, D))
    assert bool(waits) == keeps
    monkeypatch.undo()
    optimizer.close()


@pytest.mark.parametrize("waits", range(4))
@pytest.mark.parametrize("plan", [em.Plan.offload(rcache_blocks=blocks, chunk_numel=CHUNK) for blocks in (2, None)])
def test_an_interrupt_while_an_update_is_waited_for(
    plan: em.Plan, waits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever it comes before a step: nothing stale is read. Behind the updates of one, a checkpoint helps."""
    expected = weights_after(plan, beside=True)
    model, optimizer = sharded(plan)
    take_step(model, optimizer, 0)
    take_step(model, optimizer, 1)
    assert optimizer._update_thread is not None
    optimizer._update_thread.submit(int).result()  # all updates have ended, so that gathers begin as soon as they may
    finish, calls = Gate.finish_update, count()
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "finish_update", lambda gate: interrupted() if next(calls) == waits else finish(gate))
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(1, D))
    optimizer.zero_grad()
    take_step(model, optimizer, 2)
    em.save(tmp_path / "before", model, optimizer)
    model(torch.randn(4, D, generator=torch.Generator().manual_seed(3))).square().mean().backward()
    optimizer.clip_grad_norm_(0.1)
    with torch.no_grad():
        model(torch.zeros(1, D))  # which gathers old weights
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._hooks, "updated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(em.UsageError, match=r"stopped halfway.*em\.load a checkpoint"):
        optimizer.zero_grad()
    em.load(tmp_path / "before", model, optimizer)
    take_step(model, optimizer, 3)
    assert every(
        torch.equal(value, expected[name]) for name, value in em.full_state_dict(model, all_ranks=True).items()
    )
    seen = model(torch.ones(1, D))
    optimizer.close()
    plain = Stack()
    plain.load_state_dict(expected)
    assert torch.equal(seen, plain(torch.ones(1, D)))


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("plan", [em.Plan.offload(rcache_blocks="all", chunk_numel=CHUNK), em.Plan.ddp()])
def test_nothing_runs_after_close(plan: em.Plan) -> None:
    model, optimizer = sharded(plan)
    take_step(model, optimizer, 0)
    model(torch.zeros(1, D))
    optimizer.close()
    with pytest.raises(em.UsageError, match=r"optimizer\.close\(\) was called"):
        model(torch.zeros(1, D))
