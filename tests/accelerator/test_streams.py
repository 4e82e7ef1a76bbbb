"""Streams and events: what runs late, what waits, and which races show."""

import pytest
import torch

from tests.accelerator.device import UNTIL_AWAITED, delayed, held
from tests.accelerator.runner import on_device

LATE_MICROSECONDS = 300


def two_streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream(), torch.Stream(device="threads")


def ones_read_on(side: torch.Stream, *, wait: bool) -> float:
    """What `side` reads of a tensor that the current stream, which is held, is still to fill with ones."""
    main = torch.accelerator.current_stream()
    numbers = torch.zeros(100, device="threads")
    main.synchronize()
    with held(main):
        numbers.add_(1.0)
        if wait:
            side.wait_stream(main)
        with side:
            read = numbers * 2
        if not wait:
            side.synchronize()
    side.synchronize()
    with side:
        return read.cpu()[0].item()


@on_device()
def test_the_host_runs_ahead() -> None:
    main, _ = two_streams()
    numbers = torch.zeros(100, device="threads")
    main.synchronize()
    with held(main):
        for _ in range(20):
            numbers = numbers + 1
        assert not main.query()
    assert numbers.cpu()[0].item() == 20
    assert main.query()


@on_device()
def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    _, side = two_streams()
    assert ones_read_on(side, wait=False) == 0


@on_device()
def test_a_stream_that_waits_reads_what_was_written() -> None:
    _, side = two_streams()
    assert ones_read_on(side, wait=True) == 2


@on_device()
def test_an_event_covers_what_was_issued_before_it() -> None:
    main, side = two_streams()
    before, after = torch.Event("threads"), torch.Event("threads")
    with held(main):
        numbers = torch.ones(100, device="threads")
        before.record(main)
        numbers.mul_(3)
        after.record(main)
        assert not before.query()
    side.wait_event(after)
    with side:
        assert numbers.cpu()[0].item() == 3
    assert before.query()


@on_device()
def test_a_wait_is_for_the_last_record_at_its_time() -> None:
    main, side = two_streams()
    event = torch.Event("threads")
    event.record(main)
    side.wait_event(event)
    main.synchronize()
    with held(main):
        torch.ones(100, device="threads")
        event.record(main)  # side does not wait for this one
        side.synchronize()
        assert not event.query()


@on_device()
def test_an_event_that_was_never_recorded_is_over() -> None:
    main, side = two_streams()
    event = torch.Event("threads")
    assert event.query()
    side.wait_event(event)
    event.synchronize()
    side.synchronize()
    assert main.query()


@on_device()
def test_events_have_times() -> None:
    main, _ = two_streams()
    begin, end = (torch.Event("threads", enable_timing=True) for _ in range(2))
    begin.record(main)
    torch.ones(100, device="threads")
    end.record(main)
    end.synchronize()
    assert begin.elapsed_time(end) > 0


@on_device()
def test_streams_come_from_a_pool() -> None:
    made = [torch.Stream(device="threads").stream_id for _ in range(40)]
    assert len(set(made)) == 32
    assert 0 not in made


@pytest.mark.parametrize("seed", [0, 1])
@on_device()
def test_delays_change_no_result(seed: int) -> None:
    main, side = two_streams()
    with delayed(LATE_MICROSECONDS, LATE_MICROSECONDS, seed):
        numbers = torch.zeros(100, device="threads")
        for _ in range(10):
            numbers.add_(1)
            side.wait_stream(main)
            with side:
                numbers.mul_(2)
            main.wait_stream(side)
        found = numbers.cpu()
    assert torch.equal(found, torch.full((100,), 2046.0))


@on_device()
def test_a_stream_can_be_as_late_as_others_allow() -> None:
    main, side = two_streams()
    with delayed(UNTIL_AWAITED, 0):
        numbers = torch.ones(100, device="threads")
        before = main.record_event()
        numbers.mul_(3)
        side.wait_event(before)
        with side:
            read = numbers * 2
        side.synchronize()
        assert before.query()
        assert not main.query()
    assert (read.cpu()[0].item(), numbers.cpu()[0].item()) == (2, 3)


@on_device()
def test_an_error_reaches_the_next_synchronization() -> None:
    table, index = torch.ones(4, 2, device="threads"), torch.tensor([9]).to("threads")
    found = torch.nn.functional.embedding(index, table)
    with pytest.raises(RuntimeError, match=r"on the device: aten::index_select: index out of range"):
        found.cpu()
    torch.accelerator.synchronize()  # the error is raised once
    assert table.cpu()[0, 0].item() == 1


@on_device()
def test_an_error_in_a_shape_is_raised_at_once() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="threads") + torch.ones(4, device="threads")
