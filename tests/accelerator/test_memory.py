"""Memory: the host cannot read the device's, what is fresh or freed is garbage, and copies keep CUDA's rules."""

import ctypes
import os
import signal

import pytest
import torch

from elixir_moe.chunks.plan import Tier
from elixir_moe.memory.host_mapping import HostMapping
from elixir_moe.memory.slabs import Slab
from tests.accelerator.device import NAME, delayed, held, limited, native
from tests.accelerator.runner import on_device

MIB = 1 << 20


def ends_by_signal(address: int) -> int:
    """The signal that ends a process which reads there; 0 if none does."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def read_after_free(*, record: bool) -> float:
    """What a stream, which is held, reads of ones that the host has dropped before the stream went on."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device="threads")
    numbers = torch.ones(1000, device="threads")
    side.wait_stream(main)
    with held(side):
        with side:
            read = numbers * 3
        if record:
            numbers.record_stream(side)
        del numbers
        main.synchronize()
    with side:
        return read.cpu()[0].item()


@on_device()
def test_the_host_cannot_read_device_memory() -> None:
    there, here = torch.ones(10, device="threads"), torch.ones(10)
    assert ends_by_signal(there.data_ptr()) == signal.SIGSEGV
    assert ends_by_signal(here.data_ptr()) == 0


@on_device()
def test_fresh_memory_is_garbage() -> None:
    assert torch.empty(1000, device="threads").cpu().isnan().all()


@on_device()
def test_freed_memory_is_garbage_for_another_stream() -> None:
    found = read_after_free(record=False)
    assert found != found


@on_device()
def test_record_stream_keeps_freed_memory() -> None:
    assert read_after_free(record=True) == 3


@on_device()
def test_memory_is_free_for_its_own_stream_at_once() -> None:
    main = torch.accelerator.current_stream()
    with held(main):
        first = torch.ones(MIB, device="threads")
        address, doubled = first.data_ptr(), first * 2
        del first
        second = torch.ones(MIB, device="threads")
        assert second.data_ptr() == address
    assert doubled.cpu().sum().item() == 2 * MIB
    assert second.cpu().sum().item() == MIB


@on_device()
def test_recorded_memory_is_free_when_its_user_has_ended() -> None:
    side = torch.Stream(device="threads")
    numbers = torch.ones(3 * MIB, device="threads")
    address = numbers.data_ptr()
    with held(side):
        with side:
            numbers * 2
        numbers.record_stream(side)
        del numbers
        assert torch.empty(3 * MIB, device="threads").data_ptr() != address
    side.synchronize()
    kept = [torch.empty(3 * MIB, device="threads") for _ in range(2)]
    assert address in [numbers.data_ptr() for numbers in kept]


@on_device()
def test_a_copy_to_pinned_memory_is_late() -> None:
    main = torch.accelerator.current_stream()
    numbers, host = torch.ones(1000, device="threads"), torch.zeros(1000).pin_memory()
    assert host.is_pinned()
    with held(main):
        numbers.mul_(5)
        host.copy_(numbers, non_blocking=True)
        copied = main.record_event()
        assert host[0].item() == 0
    copied.synchronize()
    assert host[0].item() == 5


@on_device()
def test_a_copy_to_pageable_memory_waits() -> None:
    numbers, host = torch.ones(1000, device="threads"), torch.zeros(1000)
    assert not host.is_pinned()
    numbers.mul_(5)
    host.copy_(numbers, non_blocking=True)
    assert host[0].item() == 5


@on_device()
def test_a_copy_from_pinned_memory_reads_it_late() -> None:
    main = torch.accelerator.current_stream()
    host = torch.ones(1000).pin_memory()
    with held(main):
        numbers = host.to("threads", non_blocking=True)
        host.fill_(7)
    assert numbers.cpu()[0].item() == 7


@on_device()
def test_a_copy_from_pageable_memory_reads_it_at_once() -> None:
    main = torch.accelerator.current_stream()
    host = torch.ones(1000)
    with held(main):
        numbers = host.to("threads", non_blocking=True)
        host.fill_(7)
    assert numbers.cpu()[0].item() == 1


@on_device()
def test_a_blocking_copy_from_the_host_waits() -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device="threads")
    numbers = torch.zeros(1000, device="threads")
    with delayed(1000, 0):
        numbers.add_(1)
        numbers.copy_(torch.full((1000,), 7.0))
        assert main.query()
    with side:
        assert numbers.cpu()[0].item() == 7


@on_device()
def test_registered_memory_is_pinned_until_it_is_unregistered() -> None:
    main = torch.accelerator.current_stream()
    memory = torch.zeros(1000)
    native().register_host(memory.data_ptr(), memory.nbytes)
    view = memory[10:20]
    assert view.is_pinned()
    with held(main):
        view.copy_(torch.ones(10, device="threads"), non_blocking=True)
        assert view[0].item() == 0
    main.synchronize()
    native().unregister_host(memory.data_ptr())
    assert not view.is_pinned()
    assert memory.sum().item() == 10


@on_device()
def test_a_device_is_out_of_memory_at_its_limit() -> None:
    torch.accelerator.empty_cache()
    used = torch.accelerator.memory_reserved()
    with limited(used + 10 * MIB):
        kept = torch.empty(4 * MIB, dtype=torch.uint8, device="threads")
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 8388608 bytes"):
            torch.empty(8 * MIB, dtype=torch.uint8, device="threads")
        del kept
        torch.empty(8 * MIB, dtype=torch.uint8, device="threads")  # what the cache holds is given back


@on_device()
def test_memory_is_counted() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    reserved = torch.accelerator.memory_reserved()
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device="threads")
    assert torch.accelerator.memory_allocated() - before == 5 * MIB
    del kept
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.memory_reserved() - reserved == 5 * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == reserved
    assert torch.accelerator.max_memory_allocated() >= before + 5 * MIB


@on_device()
def test_a_resized_storage_keeps_its_content() -> None:
    numbers = torch.ones(1000, device="threads")
    storage = numbers.untyped_storage()
    storage.resize_(8000)
    assert numbers.cpu().sum().item() == 1000
    storage.resize_(0)
    assert storage.nbytes() == 0


@on_device()
def test_host_memory_of_the_library_that_travels_is_pinned() -> None:
    device, nbytes = torch.device(NAME, 0), 4096
    torch.ones(1).pin_memory()  # before, torch takes no memory for pinned
    slab = Slab(nbytes, torch.uint8, Tier.HOST, device, travels=True)
    assert slab.allocate(nbytes).is_pinned()
    descriptor = os.memfd_create("shared")
    os.truncate(descriptor, nbytes)
    assert HostMapping(descriptor, nbytes, device).memory.is_pinned()
