"""An operation in flight: what waits for it, and what the host does when it has ended."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from elixir_moe.distributed import collectives
from elixir_moe.distributed.collectives import Communicator, Work

Wait = Callable[[Work], None]


@pytest.mark.parametrize("wait", [Work.wait, Work.synchronize])
def test_the_host_ends_an_operation_once(wait: Wait) -> None:
    calls = Mock()
    work = Work([calls.first, calls.second], calls.finish)
    for _ in range(2):
        wait(work)
    assert [name for name, *_ in calls.mock_calls] == ["first.wait", "second.wait", "finish"]
    assert not work.pending


def test_a_sum_that_the_stream_waits_for_is_given_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "goes_over_gloo", lambda *_: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda terms, group: terms.mul_(2))
    communicator, given = Communicator((0, 1), (Mock(), Mock()), torch.device("cpu")), list[torch.Tensor]()
    work = communicator.all_reduce(torch.ones(2), lambda reduced, squares=None: given.append(reduced))
    assert [reduced.tolist() for reduced in given] == [[2.0, 2.0]]
    assert not work.pending
