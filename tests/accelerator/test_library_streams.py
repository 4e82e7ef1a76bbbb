"""Single waits of the library on late streams: without one, memory is read or used again too early."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

import elixir_moe as em
from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import CACHED
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.async_copy import copy_to_host_async
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.blocks import Block
from elixir_moe.runtime.gathers import Gathers
from elixir_moe.runtime.gradients import GradientBuffer
from elixir_moe.runtime.host_checkpoints import HostCheckpoints
from elixir_moe.runtime.phase import Phase
from elixir_moe.runtime.reductions import Reductions
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.writes import Writes
from elixir_moe.state.checkpoint.save import _stream_behind
from elixir_moe.state.wrapped import Wrapped
from tests.accelerator.device import NAME, UNTIL_AWAITED, delayed, native
from tests.accelerator.runner import on_device


def a_step() -> tuple[Streams, torch.Stream, torch.Stream]:
    """The library's streams, that of compute, and a second one."""
    return Streams(torch.device(NAME, 0)), torch.accelerator.current_stream(), torch.Stream(device=NAME)


def ones() -> Tensor:
    return torch.ones(1000, device=NAME)


def make_late(stream: AbstractContextManager[object]) -> None:
    """Makes a stream, entered by a context, late too; its waits then make nobody else run."""
    with stream:
        native().delay_one(torch.accelerator.current_stream().stream_id, UNTIL_AWAITED)


@contextmanager
def late_compute() -> Iterator[None]:
    with delayed(UNTIL_AWAITED, 0):
        yield


@contextmanager
def late_others() -> Iterator[None]:
    with delayed(0, UNTIL_AWAITED):
        yield


@on_device()
def test_numbers_come_to_the_host_and_only_they_are_awaited() -> None:
    main = torch.accelerator.current_stream()
    with late_compute():
        numbers = torch.zeros(4, device=NAME)
        numbers.add_(1)
        before = main.record_event()
        end = copy_to_host_async(numbers)
        numbers.add_(1)
        assert not before.query()
        assert end() == [1.0] * 4
        assert not main.query()


@on_device()
def test_fetches_wait_for_compute_from_the_start() -> None:
    streams, _, _ = a_step()
    with late_compute():
        make_late(streams.reducing())
        numbers = ones()
        streams.fetch_after_compute()
        with streams.fetching():
            assert (numbers * 2).cpu()[0].item() == 2


@on_device()
def test_the_first_fetch_waits_for_what_filled_shards_and_blocks() -> None:
    streams, _, _ = a_step()
    cache, blocks, writes = (cast(Any, None) for _ in range(3))
    with late_compute():
        numbers = ones()
        Gathers([], [], cache, blocks, streams, Statistics(), Phase(), writes)
        with streams.fetching():
            assert (numbers * 2).cpu()[0].item() == 2


@pytest.mark.parametrize("then", [Scheduler.updated, Scheduler.reset])
@on_device()
def test_fetches_read_what_compute_has_written_to_shards(then: Any) -> None:
    streams, _, _ = a_step()
    blocks = cast(Any, SimpleNamespace(own={}))
    scheduler = Scheduler([], CacheState(0), blocks, None, streams, Statistics())
    with late_compute():
        numbers = ones()
        then(scheduler)
        with streams.fetching():
            assert (numbers * 2).cpu()[0].item() == 2


@on_device()
def test_a_block_is_written_when_its_gradients_have_moved_out() -> None:
    streams, _, side = a_step()
    spec: Any = SimpleNamespace(index=0, nbytes=4000, key=SimpleNamespace(dtype=torch.float32))
    chunk: Any = SimpleNamespace(spec=spec, views=lambda memory: [memory])
    block = Block(torch.empty(4000, dtype=torch.uint8, device=NAME), Statistics())
    buffer = GradientBuffer(chunk, [], block.claim(spec))
    buffer.add([(0, ones())])
    gradients: Any = [SimpleNamespace(chunk=chunk, block=block, buffer=buffer)]
    blocks, others = SimpleNamespace(foreseen_gradients=0), MagicMock()
    reductions = Reductions(
        [], gradients, others, cast(Any, blocks), None, None, streams, Statistics(), Phase(), others, others
    )
    reductions._gradient_blocks = 1
    torch.accelerator.synchronize()
    with late_compute():
        assert reductions._move_gradients_out()
        with side:
            block.claim(spec).zero_()
        assert buffer.complete().cpu()[0].item() == 1


@on_device()
def test_gathers_wait_for_fetches_and_reductions_for_compute() -> None:
    streams, _, _ = a_step()
    with late_others():
        with streams.fetching():
            numbers = ones()
        with streams.gathering():
            assert (numbers * 2).cpu()[0].item() == 2
    with late_compute():
        numbers = ones()
        with streams.reducing():
            assert (numbers * 2).cpu()[0].item() == 2


@on_device()
def test_compute_waits_for_the_compute_that_it_joins() -> None:
    streams, _, side = a_step()
    with late_others():
        with side:
            streams.enter_compute()
            numbers = ones()
        streams.join_compute([numbers])
        assert (numbers * 2).cpu()[0].item() == 2


@on_device()
def test_what_compute_joins_may_be_dropped() -> None:
    streams, main, side = a_step()
    with late_compute():
        with side:
            streams.enter_compute()
            numbers = ones()
        streams.join_compute([numbers])
        read = numbers * 2
        del numbers
        side.synchronize()
        assert not main.query()
        assert read.cpu()[0].item() == 2


@on_device()
def test_the_end_of_a_step_waits_for_all_compute_and_all_reductions() -> None:
    streams, _, side = a_step()
    with late_others():
        with side:
            streams.enter_compute()
            computed = ones()
        with streams.reducing():
            reduced = ones()
        streams.end_step(host=False)
        assert (computed + reduced).cpu()[0].item() == 2


@on_device()
def test_the_host_may_write_shards_at_the_end_of_a_step() -> None:
    streams, _, _ = a_step()
    for moving in (streams.fetching, streams.reducing):
        host = torch.zeros(1000).pin_memory()
        numbers = ones()
        torch.accelerator.synchronize()
        with late_others():
            with moving():
                host.copy_(numbers, non_blocking=True)
            streams.end_step(host=True)
            assert host[0].item() == 1


@on_device()
def test_a_sum_dies_behind_the_compute_that_reads_it() -> None:
    streams, main, _ = a_step()
    with streams.reducing():
        total = ones()
    streams.end_step(host=False)
    main.synchronize()
    with late_compute():
        make_late(streams.fetching())
        read = total * 2
        streams.fetch_after_compute()
        with streams.fetching():
            del total
        assert read.cpu()[0].item() == 2


@on_device()
def test_a_thread_waits_for_what_was_issued() -> None:
    streams, _, _ = a_step()
    host = torch.zeros(1000).pin_memory()
    with late_compute():
        host.copy_(ones(), non_blocking=True)
        wait = streams.until_issued_ends()
        assert host[0].item() == 0
        wait()
        assert host[0].item() == 1


@on_device()
def test_a_copy_to_keep_is_awaited_by_compute_and_by_the_host() -> None:
    streams, _, _ = a_step()
    host = torch.full((1000,), 3.0).pin_memory()
    numbers = ones()
    torch.accelerator.synchronize()
    with late_others():
        with streams.keeping():
            numbers.copy_(host, non_blocking=True)
            copied = streams.marked(Work())
        streams.finish_keeping(numbers, copied)
        assert (numbers * 2).cpu()[0].item() == 6
        with streams.keeping():
            host.copy_(numbers * 0, non_blocking=True)
        streams.end_keeping()
        assert host[0].item() == 0


@on_device()
def test_what_was_kept_may_be_dropped_by_any_compute() -> None:
    streams, main, side = a_step()
    with late_others():
        numbers = ones()
        with side:
            streams.enter_compute()
            streams.finish_keeping(numbers, Work())
            side.wait_stream(main)
            read = numbers * 2
        del numbers
        main.synchronize()
        with side:
            assert read.cpu()[0].item() == 2


@on_device()
def test_a_save_reads_shards_behind_the_step_that_writes_them() -> None:
    with late_compute():
        shard = SimpleNamespace(tier=Tier.DEVICE, storage=ones())
        scheduler = SimpleNamespace(chunks=[SimpleNamespace(shard=shard)])
        with _stream_behind(cast(Wrapped, SimpleNamespace(scheduler=scheduler))):
            assert (shard.storage * 2).cpu()[0].item() == 2


@on_device()
def test_a_buffer_of_checkpoints_is_freed_behind_the_copy_from_it() -> None:
    streams, _, _ = a_step()
    kept = HostCheckpoints(math.inf, torch.device(NAME, 0), streams)
    away = kept.offload(ones())
    assert away is not None
    kept.forget()
    with delayed(UNTIL_AWAITED, UNTIL_AWAITED):
        back = kept.fetch(away)
        with streams.keeping():
            copied = torch.accelerator.current_stream().record_event()
        del away
        assert not copied.query()
        kept.offload(back.repeat(2))
        assert copied.query()


@on_device()
def test_a_checkpoint_that_nobody_asks_for_dies_behind_its_copy() -> None:
    streams, _, _ = a_step()
    kept = HostCheckpoints(math.inf, torch.device(NAME, 0), streams)
    away = []
    for _ in range(2):
        away.append(kept.offload(ones()))
        ones().requires_grad_().exp()  # autograd counts: the next region begins
    first, second = away
    assert first is not None and second is not None
    kept.forget()
    with late_others():
        assert kept.fetch(second)[0].item() == 1
        kept.forget()  # the first one, too, was on its way
        every = [torch.full((1000,), 5.0, device=NAME) for _ in range(16)]  # one of them where it was
        streams.end_keeping()
        assert {numbers.cpu()[0].item() for numbers in every} == {5.0}


def weights_of(memory: Tensor, *, shared: bool = False, stored: list[Tensor] | None = None) -> Any:
    """Weights in this memory on the device. `shared`: their values lie in memory that ranks share, and are zeros."""
    part = SimpleNamespace(start=0, stop=1000, numel=1000, here=slice(0, 1000))
    shard = SimpleNamespace(whole=torch.zeros(1000) if shared else None)
    shard.store = lambda start, written: None if stored is None else stored.append(written.clone())
    spec = SimpleNamespace(index=0, slots=[part], residence=CACHED, shows_only_weights=False)
    chunk = SimpleNamespace(shard=shard, device=memory.device, spec=spec, pieces=[part])
    chunk.locals, chunk.names, chunk.versions = [memory], ["weight"], lambda: [0]
    weights = SimpleNamespace(chunk=chunk, buffer=memory, views=[memory], own_part=memory, gather=None)
    weights.attach = lambda: None
    return weights


@on_device()
def test_others_write_shared_memory_when_the_device_has_read_it() -> None:
    streams, _, _ = a_step()
    writes = Writes([weights_of(ones(), shared=True)], streams, Phase())
    host = torch.zeros(1000).pin_memory()
    with late_compute():
        host.copy_(ones(), non_blocking=True)
        writes.finish_shared_reads()
        assert host[0].item() == 1


@on_device()
def test_a_write_to_shared_memory_is_seen_whichever_stream_makes_it() -> None:
    streams, _, side = a_step()
    numbers = torch.zeros(1000, device=NAME)
    torch.accelerator.synchronize()
    writes = Writes([weights_of(numbers, shared=True)], streams, Phase())
    with late_others():
        with side:
            streams.enter_compute()
            numbers.add_(1)
        with pytest.raises(em.UsageError, match="'weight' is frozen"):
            writes.store([(0, 0)])


@on_device()
def test_a_write_is_stored_whichever_stream_makes_it() -> None:
    streams, _, side = a_step()
    numbers, phase, stored = torch.zeros(1000, device=NAME), Phase(), list[Tensor]()
    phase.looked = True
    torch.accelerator.synchronize()
    with late_others():
        with side:
            streams.enter_compute()
            numbers.add_(1)
        Writes([weights_of(numbers, stored=stored)], streams, phase).store([(0, 0)])
        assert stored[0].cpu()[0].item() == 1


@on_device()
def test_a_write_without_a_trace_is_found_whichever_stream_makes_it() -> None:
    streams, _, side = a_step()
    weights = weights_of(ones())
    writes = Writes([weights], streams, Phase())
    writes.watch(weights)
    torch.accelerator.synchronize()
    with late_others():
        with side:
            streams.enter_compute()
            weights.buffer.add_(1)
        writes.watch(weights)
        assert writes.unseen() == "weight"


@on_device()
def test_weights_are_looked_at_when_they_have_come() -> None:
    streams, _, _ = a_step()
    weights = weights_of(ones())
    writes = Writes([weights], streams, Phase())
    torch.accelerator.synchronize()
    with late_others():
        with streams.gathering():
            weights.buffer.add_(1)
            weights.gather = streams.marked(Work())
        writes.watch(weights)
        torch.accelerator.synchronize()
        writes.watch(weights)
        assert writes.unseen() is None


@on_device()
def test_a_look_may_be_compared_on_another_stream() -> None:
    streams, _, side = a_step()
    weights = weights_of(ones())
    writes = Writes([weights], streams, Phase())
    torch.accelerator.synchronize()
    with late_compute():
        with side:
            streams.enter_compute()
            writes.watch(weights)
        writes.watch(weights)
        with side:
            torch.full((1,), 5, device=NAME)
            side.synchronize()
        assert writes.unseen() is None


@on_device()
def test_a_late_gradient_takes_the_place_of_values_that_all_compute_has_used() -> None:
    streams, _, side = a_step()
    values, others = ones(), MagicMock()
    gradients: Any = SimpleNamespace(waiting=[(torch.zeros(1000, device=NAME), None)], reduction=None)
    weights: Any = SimpleNamespace(holds=0, chunk=SimpleNamespace(shard=SimpleNamespace(tier=Tier.DEVICE)))
    reductions = Reductions(
        [weights], [gradients], others, others, None, None, streams, Statistics(), Phase(), others, others
    )
    torch.accelerator.synchronize()
    with delayed(0, 0), patch.object(reductions, "_add_reduced", lambda _, reduced, squares: values.copy_(reduced)):
        make_late(side)
        with side:
            streams.enter_compute()
            read = values * 2
        reductions.add_waiting(0)
        with side:
            assert read.cpu()[0].item() == 2
