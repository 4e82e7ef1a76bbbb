"""Which cases of a parametrised test run every time, and which only with `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_further(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All `cases`; those that are not `quick` are marked slow: further cases of what the quick ones test."""
    further = pytest.mark.slow

    def one(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=[] if case in quick else further)

    return [one(case) for case in cases]
