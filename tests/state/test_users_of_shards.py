"""Who changes shards waits for whoever still uses them: for saves, updates, and what moves gradients and weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.optim.muon_update import MuonUpdate
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.runtime.writes import Writes
from elixir_moe.state.checkpoint.save import Saving
from elixir_moe.state.checkpoint.tensors import FileImage
from tests.memory.test_gate import Ended, Read
from tests.optim.test_modes import ScheduleFree
from tests.support.checkpoint_cases import full_disk
from tests.support.every import every


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


def wrapped(kind: Any = torch.optim.AdamW, numel: int = 4) -> tuple[nn.Module, ShardedOptimizer, list[ShardState]]:
    model = nn.Linear(numel, numel)
    model, optimizer = em.wrap(model, kind(model.parameters(), lr=0.1), plan=em.Plan.offload(rcache_blocks=2))
    return model, optimizer, [chunk.shard for chunk in optimizer._chunks]


def being_saved(shards: list[ShardState]) -> list[Read]:
    """What sets an end to saves of all shards."""
    reads = [Read() for _ in shards]
    for shard, read in zip(shards, reads, strict=True):
        shard.begin_save(read)
    return reads


def test_a_step_waits_for_a_save() -> None:
    model, optimizer, shards = wrapped()
    model(torch.ones(1, 4)).sum().backward()
    reads = being_saved(shards)
    optimizer.step()
    assert [read.waits for read in reads] == [1] * len(shards)
    optimizer.close()


def test_a_change_of_mode_waits_for_a_save() -> None:
    model, optimizer, shards = wrapped(ScheduleFree)
    optimizer.train()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    reads = being_saved(shards)
    optimizer.eval()
    assert [read.waits for read in reads] == [1] * len(shards)
    optimizer.close()


def test_a_step_counts_in_the_groups_of_the_user() -> None:
    model, optimizer, _ = wrapped(ScheduleFree)
    optimizer.train()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert [group["k"] for group in optimizer.param_groups] == [1]
    optimizer.close()


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_of_matrices_ends_when_no_slice_is_written_any_more(fails: bool) -> None:
    slices = Ended(error=OSError("full") if fails else None), Ended()
    chunk: Any = SimpleNamespace(spec=SimpleNamespace(index=0), shard=SimpleNamespace(change=lambda *_: slices))
    update = MuonUpdate([], [], cast(Any, None))
    with pytest.raises(OSError, match="full") if fails else nullcontext():
        update._change(chunk, lambda *_: None)
    assert every(each.waits for each in slices)
    assert fails or [each.waits for each in slices] == [2, 2], "for its end, and for its error"


def clip(model: nn.Module, optimizer: ShardedOptimizer, under_way: Callable[[], None]) -> None:
    under_way()
    optimizer.clip_grad_norm_(1.0)


def step(model: nn.Module, optimizer: ShardedOptimizer, under_way: Callable[[], None]) -> None:
    optimizer.clip_grad_norm_(1.0)
    under_way()  # as by an evaluation
    optimizer.step()


def zero_grad(model: nn.Module, optimizer: ShardedOptimizer, under_way: Callable[[], None]) -> None:
    under_way()
    optimizer.zero_grad()


def change_of_mode(model: nn.Module, optimizer: ShardedOptimizer, under_way: Callable[[], None]) -> None:
    optimizer.step()
    under_way()
    optimizer.eval()


@pytest.mark.parametrize("act", [clip, step, zero_grad, change_of_mode])
def test_what_is_under_way_ends_before_shards_change(act: Any) -> None:
    model, optimizer, _ = wrapped(ScheduleFree)
    reductions, ended = optimizer._scheduler.reductions, Mock()
    optimizer.train()
    model(torch.ones(1, 4)).sum().backward()
    act(model, optimizer, lambda: reductions._in_flight.append(Work(finish=ended)))
    ended.assert_called_once()
    optimizer.close()


def test_a_load_waits_for_a_save_that_an_interrupt_has_made_forgotten(tmp_path: Path) -> None:
    model, optimizer, shards = wrapped()
    em.save(tmp_path / "saved", model, optimizer)
    reads = being_saved(shards)
    em.load(tmp_path / "saved", model, optimizer)
    assert every(read.waits for read in reads)
    optimizer.close()


def test_a_load_replaces_what_an_update_has_failed_to_write(tmp_path: Path) -> None:
    model, optimizer, shards = wrapped()
    em.save(tmp_path / "saved", model, optimizer)
    failed = Ended(error=OSError("full"))
    for shard in shards:
        shard.begin_update(Ended((failed,)))
    em.load(tmp_path / "saved", model, optimizer)
    assert failed.waits == len(shards)
    optimizer.close()


def test_a_load_writes_when_shared_memory_has_been_read(tmp_path: Path) -> None:
    model, optimizer, _ = wrapped()
    em.save(tmp_path / "saved", model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = []
    finish = Mock(side_effect=lambda: found.append(em.full_state_dict(model)))
    with patch.object(Writes, "finish_shared_reads", finish):
        em.load(tmp_path / "saved", model, optimizer)
    assert [value.any().item() for value in found[0].values()] == [False, False]
    assert em.full_state_dict(model)["weight"].any()
    optimizer.close()


def test_a_save_uses_shards_until_all_is_copied(tmp_path: Path) -> None:
    model, optimizer, shards = wrapped()
    write, may_write = FileImage.write, threading.Event()

    def late(*given: Any) -> Any:
        may_write.wait()
        return write(*given)

    with patch.object(FileImage, "write", late):
        saving = em.save(tmp_path / "saved", model, optimizer, asynchronous=True)
        used = [shard.being_saved for shard in shards]
        may_write.set()
        saving.result()
    assert used == [True] * len(shards)
    assert [shard.being_saved for shard in shards] == [False] * len(shards)
    optimizer.close()


def test_a_save_is_waited_for_as_far_as_is_asked() -> None:
    future, copied = Ended(), Read()
    saving = Saving(Path("saved"), Mock(), future, copied)
    future.waits = 0
    saving.wait_for_copy()
    assert (future.waits, copied.waits) == (0, 1)
    saving.join()
    assert (future.waits, copied.waits) == (1, 1)


def test_a_save_that_has_failed_says_so_when_it_is_asked(tmp_path: Path) -> None:
    model, optimizer, _ = wrapped(numel=64)
    with full_disk(0):
        saving = em.save(tmp_path / "saved", model, optimizer, asynchronous=True)
        saving.join()
    with pytest.raises(em.CheckpointError, match="File too large"):
        saving.poll()
    optimizer.close()
