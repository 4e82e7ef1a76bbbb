"""Blocks that somebody still reads: a view keeps its bytes, whoever has taken it and however."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_moe as em
from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.param_spec import ChunkGroupKey
from elixir_moe.chunks.residence import CACHED
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory import blocks
from elixir_moe.memory.blocks import Block, Blocks, ShardBlock
from elixir_moe.memory.shard_state import ShardState
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Records:
    """What views operators have returned under a mode, and the values of each at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[tuple[Tensor, Tensor]] = []

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **(kwargs or {}))
        if "as_strided" in str(function):
            self.views.append((result, result.clone()))
        return result


class Functions(Records, TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(function, args, kwargs)


class Operators(Records, TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(function, args, kwargs)


def recorded(kind: type[Any], *, warm: bool) -> tuple[int, int, int]:
    """(rank) Views that a mode has recorded in a forward, those with other bytes a step later, blocks replaced."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    plan = em.Plan.zero3(rcache_blocks=3, chunk_numel=72)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    x = torch.ones(2, 8)
    if warm:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with kind() as mode:
        loss = model(x).sum()
    loss.backward()
    replaced = em.inspect(model).statistics.blocks_replaced
    optimizer.step()
    model(x).sum().backward()
    stale = sum(not torch.equal(view, then) for view, then in mode.views)
    optimizer.close()
    return len(mode.views), stale, replaced


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", [Functions, Operators])
def test_a_view_that_a_mode_records_keeps_its_bytes(kind: type[Any], warm: bool, ranks: Ranks) -> None:
    for views, stale, replaced in ranks(2).run(recorded, kind, warm=warm):
        assert views >= 12, "those of weights and biases"
        assert stale == 0
        assert replaced > 0


KEY = ChunkGroupKey(ranks=(0,), dtype=torch.float32, trainable=True, divisor=1)
SPECS = [ChunkSpec(index=n, key=KEY, slots=(), numel=8, shards=1, residence=CACHED) for n in range(3)]
NBYTES = SPECS[0].nbytes


class Reading(Work):
    """An operation on a block that has not ended."""

    def __init__(self) -> None:
        self.waits = 0

    @property
    def pending(self) -> bool:
        return not self.waits

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("most", [4096, 4])
def test_a_block_gets_other_memory_only_while_somebody_reads_it(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's own views are no readers, neither when they are kept nor after there were too many to keep."""
    monkeypatch.setattr(blocks, "_MOST_PLACES", most)
    statistics = Statistics()
    block = Block(torch.zeros(NBYTES, dtype=torch.uint8), statistics)
    made = 0
    for spec in SPECS * 3:
        whole = block.claim(spec).fill_(spec.index)
        views = block.param_views(spec.index, whole, lambda whole: [whole[:4], whole[4:]])
        made += len(views)
        block.vacate(Work())
        del whole, views
        assert statistics.blocks_replaced == 0, f"after {made} views"
    view = block.claim(SPECS[0]).fill_(7)[2:4]
    block.claim(SPECS[1]).fill_(1)
    assert statistics.blocks_replaced == 1
    assert view.tolist() == [7, 7]
    block.claim(SPECS[1])
    assert statistics.blocks_replaced == 1


@pytest.mark.parametrize("in_shard", [False, True])
def test_a_block_is_written_when_its_last_reader_has_ended(in_shard: bool) -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    shard = cast(ShardState, SimpleNamespace(storage=memory, values=lambda: None, spec=SPECS[0]))
    block = ShardBlock(shard, Statistics()) if in_shard else Block(memory, Statistics())
    reading = Reading()
    block.vacate(reading)
    assert not block.quiet
    block.claim(SPECS[0])
    assert reading.waits == 1
    assert block.quiet
    block.claim(SPECS[0])
    assert reading.waits == 1


def test_memory_in_place_of_a_read_block_is_freed_by_its_last_reader() -> None:
    entered: list[str] = []

    @contextmanager
    def allocating() -> Iterator[None]:
        entered.append("allocating")
        yield

    layout = cast(Layout, SimpleNamespace(block_bytes=NBYTES, open_gradients=0, chunks=[]))
    [block] = Blocks(layout, 1, 0, [], torch.device("cpu"), Statistics(), allocating).shared
    view = block.claim(SPECS[0])[:1]
    assert entered == []
    block.claim(SPECS[0]).fill_(1)
    assert entered == ["allocating"]
    assert view.item() == 0
