"""What is an error of one rank is an error of all, of the same type and with the same text."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from elixir_moe.distributed.all_ranks import Deferred, agree, disagreement, gathered, raise_on_all_ranks
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
    later.finish()
    for name in ("first", "second", "third"):
        dist.barrier()
        later.run(lambda name=name: done.append(name) if name != "second" or dist.get_rank() else {}[name])
    with pytest.raises(CheckpointError) as error:
        later.finish()
    return done, str(error.value)


def test_a_failure_between_collectives_of_all_waits_for_the_last(ranks: Ranks) -> None:
    first, second = ranks(2).run(deferred)
    assert first == (["first"], "[rank 0] KeyError: 'second'")
    assert second == (["first", "second", "third"], first[1])


def agreed_on(values: list[Any]) -> str:
    """(rank) The error of an agreement on a value for each rank; empty if there is none."""
    try:
        agree("it all", values[dist.get_rank()], remedy="give one", error=PlanError)
    except PlanError as error:
        return str(error)
    return ""


def test_all_ranks_learn_that_they_disagree(ranks: Ranks) -> None:
    assert ranks(2).run(agreed_on, [{"a": [1, 2]}, {"a": [1, 2]}]) == ["", ""]
    said = "ranks disagree about it all: a[1] is 2 on rank 0, 3 on rank 1: give one"
    assert ranks(2).run(agreed_on, [{"a": [1, 2]}, {"a": [1, 3]}]) == [said, said]


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ([1, 1, 2], "it is 1 on rank 4, 2 on rank 9"),
        (["", "x"], "it is '' on rank 4, x on rank 6"),
        ([[1], [1, 2]], "item 1 is nothing on rank 4, 2 on rank 6"),
        ([{"a": 0}, {"a": 0, "b": {"c": 1}}], "b is nothing on rank 4, {'c': 1} on rank 6"),
        ([{"a": {"c": 1}}, {"a": {"c": 2}}], "a['c'] is 1 on rank 4, 2 on rank 6"),
        ([1, 1.0], "it is 1 on rank 4, 1.0 on rank 6"),
        ([math.nan, math.nan], None),
        ([{"a": 0, "b": 1}, {"b": 1, "a": 0}], None),
        ([[], ()], None),
    ],
)
def test_the_first_difference_is_named(values: list[object], where: str | None) -> None:
    found = disagreement("what they do", values, [4, 6, 9][: len(values)])
    assert found == (where and f"ranks disagree about what they do: {where}")
