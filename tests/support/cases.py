"""Which cases of a parametrised test run only with `make test-all`; where chunks on disk go; what steps ask for."""

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

import elixir_moe as em
from elixir_moe.chunks.cache_policy import CacheRequest
from elixir_moe.runtime.scheduler import Scheduler


def with_further(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All `cases`; those that are not `quick` are marked slow: further cases of what the quick ones test."""
    further = pytest.mark.slow

    def one(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=[] if case in quick else further)

    return [one(case) for case in cases]


def every_pair(*options: Iterable[Any]) -> list[Any]:
    """All combinations of options; quick are as many as it takes for every two values of two options to meet."""
    cases = list(product(*map(list, options)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    unmet, quick = set().union(*pairs.values()), []
    while unmet:
        quick.append(max(cases, key=lambda case: len(pairs[case] & unmet)))
        unmet -= pairs[quick[-1]]
    return with_further(cases, quick)


def worlds_in_turn(names: Iterable[str], quick: Collection[str] | None = None) -> list[Any]:
    """(name, ranks, under every plan): one and two ranks under a few plans, and two under all of them.

    Quick are one rank and two in turn, and of the names those in `quick`, or all.
    """
    params = []
    for i, name in enumerate(names):
        for world, every in ((1, False), (2, False), (2, True)):
            now = (quick is None or name in quick) and not every and world == 1 + i % 2
            params.append(pytest.param(name, world, every, marks=[] if now else pytest.mark.slow))
    return params


def placed(plan: em.Plan) -> em.Plan:
    """The plan with a folder for its chunks on disk, if it has any."""
    return replace(plan, disk=tempfile.gettempdir()) if getattr(plan, "disk_chunks", None) else plan


def least_said(error: em.PlanError) -> int:
    """The fewest blocks with which `wrap` would not have raised `error`."""
    said = re.search(r"set rcache_blocks to at least (\d+), or a larger chunk_numel", str(error))
    assert said is not None, error
    return int(said[1])


@contextmanager
def rounds_asked() -> Iterator[list[tuple[CacheRequest, ...]]]:
    """The requests to the rCache of each forward and backward that ends in the context."""
    rounds: list[tuple[CacheRequest, ...]] = []
    learn = Scheduler.learn

    def learned(scheduler: Scheduler) -> None:
        rounds.append(tuple(scheduler.gathers._record))
        learn(scheduler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "learn", learned)
        yield rounds
