"""Which cases of a parametrised test run only with `make test-all`; where chunks on disk go."""

import re
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

import elixir_moe as em


def with_further(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All `cases`; those that are not `quick` are marked slow: further cases of what the quick ones test."""
    further = pytest.mark.slow

    def one(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=[] if case in quick else further)

    return [one(case) for case in cases]


WORLDS = [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)]
"""(ranks, under every plan): two ranks under all plans are further cases of two ranks under a few."""


def placed(plan: em.Plan) -> em.Plan:
    """The plan with a folder for its chunks on disk, if it has any."""
    return replace(plan, disk=tempfile.gettempdir()) if plan.disk_chunks else plan


def least_said(error: em.PlanError) -> int:
    """The fewest blocks with which `wrap` would not have raised `error`."""
    said = re.search(r"set rcache_blocks to at least (\d+), or a larger chunk_numel", str(error))
    assert said is not None, error
    return int(said[1])
