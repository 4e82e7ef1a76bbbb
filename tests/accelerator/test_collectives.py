"""Collectives: they run in stream order, wait for what was issued before them, and keep what they read."""

import torch
import torch.distributed as dist

from tests.accelerator.device import delayed, held
from tests.accelerator.runner import on_device
from tests.support.every import every


def mine(numel: int = 4) -> torch.Tensor:
    """Ones and a rank's number, on the device."""
    return torch.full((numel,), 1.0 + dist.get_rank(), device="threads")


@on_device(2)
def test_results_are_those_of_gloo() -> None:
    rank = dist.get_rank()
    with delayed(200, 200, seed=rank):
        total = mine()
        dist.all_reduce(total)
        gathered = torch.empty(8, device="threads")
        dist.all_gather_into_tensor(gathered, mine())
        scattered = torch.empty(2, device="threads")
        dist.reduce_scatter_tensor(scattered, mine())
        swapped = torch.empty(4, device="threads")
        dist.all_to_all_single(swapped, mine())
        pieces = [torch.empty(4, device="threads") for _ in range(2)]
        dist.all_gather(pieces, mine())
        sent = mine()
        dist.broadcast(sent, 1)
        dist.barrier()
    wanted = {
        "all_reduce": (total, [3.0] * 4),
        "all_gather": (gathered, [1.0] * 4 + [2.0] * 4),
        "reduce_scatter": (scattered, [3.0] * 2),
        "all_to_all": (swapped, [1.0, 1.0, 2.0, 2.0]),
        "all_gather of a list": (torch.cat(pieces), [1.0] * 4 + [2.0] * 4),
        "broadcast": (sent, [2.0] * 4),
    }
    assert every(found.cpu().tolist() == numbers for found, numbers in wanted.values()), wanted


@on_device(2)
def test_an_operation_waits_for_what_was_issued_before_it() -> None:
    main = torch.accelerator.current_stream()
    numbers = torch.zeros(4, device="threads")
    with held(main):
        numbers.add_(1)
        work = dist.all_reduce(numbers, async_op=True)
        assert not work.is_completed()
    work.wait()
    assert numbers.cpu().tolist() == [2.0] * 4


@on_device(2)
def test_wait_orders_the_stream_and_not_the_host() -> None:
    main = torch.accelerator.current_stream()
    numbers = mine()
    with held(main):
        work = dist.all_reduce(numbers, async_op=True)
        work.wait()
        doubled = numbers * 2
        assert not main.query()
    assert doubled.cpu().tolist() == [6.0] * 4


@on_device(2)
def test_a_read_without_a_wait_is_too_early() -> None:
    late = torch.Stream(device="threads")
    numbers = mine()
    late.wait_stream(torch.accelerator.current_stream())
    with held(late):
        with late:
            work = dist.all_reduce(numbers, async_op=True)
        early = numbers.cpu().tolist()
    assert early == [1.0 + dist.get_rank()] * 4
    work.wait()
    assert numbers.cpu().tolist() == [3.0] * 4


@on_device(2)
def test_memory_of_an_operation_in_flight_is_kept() -> None:
    main = torch.accelerator.current_stream()
    gathered = torch.empty(8, device="threads")
    with held(main):
        work = dist.all_gather_into_tensor(gathered, mine(), async_op=True)
    work.wait()
    assert gathered.cpu().tolist() == [1.0] * 4 + [2.0] * 4
