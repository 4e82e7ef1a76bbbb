"""Each wait of `runtime.streams`, `async_copy` and a save on late streams: without it, memory is read too early."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.async_copy import copy_to_host_async
from elixir_moe.distributed.collectives import Work
from elixir_moe.runtime.streams import Streams
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
