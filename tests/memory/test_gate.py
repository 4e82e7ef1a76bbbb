"""The users of a shard: who uses it next waits for each of them, and hears of the errors that concern it."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from elixir_moe.memory.elements import InMemory, OnDisk
from elixir_moe.memory.gate import Gate
from elixir_moe.memory.gradient_sum import SumInMemory, SumOnDisk
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.optim.shard_update import AdamUpdate
from tests.memory.test_shards import gradient, shard_of


class Ended(Future[Any]):
    """A future that has ended, and counts who has waited for it."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.waits = 0
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.waits += 1
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.waits += 1
        return super().exception(timeout)


class Read(threading.Event):
    """The end of a save, which counts who has waited for it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return True


def updating(*parts: Ended) -> Gate:
    gate = Gate()
    gate.begin_update(Ended(parts))
    return gate


@pytest.mark.parametrize("wait", [Gate.wait_for_update, Gate.finish_update, Gate.open_for_writing])
def test_an_update_is_waited_for_until_it_succeeds(wait: Any) -> None:
    parts = Ended(), Ended(error=OSError("full"))
    gate = updating(*parts)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            wait(gate)
    gate = updating(parts[0])
    before = parts[0].waits
    wait(gate)
    assert parts[0].waits == before + 1
    assert gate.has_update == (wait is Gate.wait_for_update)


def test_an_update_that_is_dropped_has_ended() -> None:
    parts = Ended(error=OSError("full")), Ended()
    gate = updating(*parts)
    gate.drop_update()
    assert [part.waits for part in parts] == [1, 1]
    assert not gate.has_update


@pytest.mark.parametrize("wait", [Gate.wait_for_reader, Gate.open_for_writing])
def test_a_save_is_waited_for(wait: Any) -> None:
    gate = Gate()
    wait(gate)
    gate.reader = read = Read()
    wait(gate)
    assert read.waits == 1


@pytest.mark.parametrize("fails", [False, True])
def test_additions_are_waited_for(fails: bool) -> None:
    gate = Gate()
    gate.finish_sum()
    gate.adding = adding = Ended(error=OSError("full") if fails else None)
    if fails:
        with pytest.raises(OSError, match="full"):
            gate.finish_sum()
    else:
        gate.finish_sum()
    gate.leave_sum()
    assert adding.waits == 2
    assert gate.adding is None


@pytest.mark.parametrize("use", ["read", "write"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_elements_are_used_behind_an_update(use: str, on_disk: bool) -> None:
    part = Ended()
    gate, numbers = updating(part), torch.ones(4)
    elements = OnDisk(MagicMock(), 0, 0, 4, gate) if on_disk else InMemory(numbers, gate)
    getattr(elements, use)(*[numbers] * (use == "write"))
    assert part.waits == 1


@pytest.mark.parametrize("use", ["read", "change"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_sum_is_used_behind_its_additions(use: str, on_disk: bool) -> None:
    gate = Gate()
    gate.adding = adding = Ended()
    total = SumOnDisk(MagicMock(), gate, None) if on_disk else SumInMemory(torch.ones(4), gate, None)
    getattr(total, use)(*((0, 4) if use == "read" else ([(0, 4)], torch.Tensor.zero_)))
    assert adding.waits == 1


def prepare(shard: ShardState) -> None:
    """Prepares an update of no parameters."""
    chunk: Any = SimpleNamespace(spec=shard.spec, shard=shard)
    AdamUpdate(cast(Any, []), [], seed=0).prepare(chunk, [], set(), 1.0)


GRADIENT = gradient(torch.float32, 0)
USES: list[tuple[Any, set[str]]] = [
    (ShardState.values, {"update"}),
    (ShardState.place_for_gradient, {"update"}),
    (lambda shard: shard.add_gradient(GRADIENT), {"update"}),
    (ShardState.finish_update, {"update"}),
    (ShardState.drop_update, {"update"}),
    (lambda shard: shard.store(0, GRADIENT), {"update", "save"}),
    (ShardState.open_for_writing, {"update", "save"}),
    (lambda shard: shard.sum_of_squares(1), {"additions"}),
    (ShardState.finish_sum, {"additions"}),
    (prepare, {"additions"}),
    (ShardState.clear_gradient, {"additions"}),
    (ShardState.updated, {"additions"}),
]


@pytest.mark.parametrize(("use", "awaited"), USES)
def test_a_shard_is_used_behind_its_other_users(use: Any, awaited: set[str]) -> None:
    shard = shard_of(torch.float32)
    shard.add_gradient(GRADIENT)
    shard.keep_squares(1.0)
    users: dict[str, Any] = {"update": Ended(), "save": Read(), "additions": Ended()}
    shard.begin_update(Ended((users["update"],)))
    shard.begin_save(users["save"])
    shard._gate.adding = users["additions"]
    use(shard)
    assert {name for name, user in users.items() if user.waits} == awaited
