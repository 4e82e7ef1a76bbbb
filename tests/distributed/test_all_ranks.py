"""What is an error of one rank is an error of all, of the same type and with the same text."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from elixir_moe.distributed.all_ranks import Deferred, gathered, raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ElixirError, PlanError
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def told(raising: dict[int, Exception], error: type[ElixirError] | None) -> tuple[str, str, bool]:
    """(rank) The error of work that raises on some ranks, and whether it names this rank's own as its cause."""

    def work() -> int:
        if dist.get_rank() in raising:
            raise raising[dist.get_rank()]
        return dist.get_rank()

    with pytest.raises(ElixirError) as caught:
        raise_on_all_ranks("worked", work, error=error)
    return type(caught.value).__name__, str(caught.value), caught.value.__cause__ is raising.get(dist.get_rank())


def test_all_get_what_all_have(ranks: Ranks) -> None:
    assert ranks(2).run(everyone) == [([0, 1], [0, 1], [0])] * 2


def everyone() -> tuple[list[int], list[int], list[int]]:
    own = dist.new_group([0])
    alone = gathered(0, own) if dist.get_rank() == 0 else [0]
    return gathered(dist.get_rank()), raise_on_all_ranks("worked", dist.get_rank), alone


@pytest.mark.parametrize(
    ("raising", "error", "kind", "text"),
    [
        ({1: PlanError("too small")}, None, "PlanError", "[rank 1] too small"),
        ({0: PlanError("a"), 1: PlanError("b")}, None, "PlanError", "[rank 0] (2 ranks failed) a"),
        ({1: KeyError("name")}, None, "ElixirError", "[rank 1] KeyError: 'name'"),
        ({1: PlanError("too small")}, CheckpointError, "CheckpointError", "[rank 1] too small"),
        ({0: OSError(28, "No space left", "/a/b")}, CheckpointError, "CheckpointError", "[rank 0] /a/b: No space left"),
    ],
)
def test_one_that_fails_fails_all(
    raising: dict[int, Exception], error: type[ElixirError] | None, kind: str, text: str, ranks: Ranks
) -> None:
    assert ranks(2).run(told, raising, error) == [(kind, text, True)] * 2


def deferred() -> tuple[list[str], str]:
    done: list[str] = []
    later = Deferred("worked", error=CheckpointError)
    later.settle()
    for name in ("first", "second", "third"):
        dist.barrier()
        later.run(lambda name=name: done.append(name) if name != "second" or dist.get_rank() else {}[name])
    with pytest.raises(CheckpointError) as error:
        later.settle()
    return done, str(error.value)


def test_a_failure_between_collectives_of_all_waits_for_the_last(ranks: Ranks) -> None:
    first, second = ranks(2).run(deferred)
    assert first == (["first"], "[rank 0] KeyError: 'second'")
    assert second == (["first", "second", "third"], first[1])
