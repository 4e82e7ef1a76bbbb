"""Which cases of a parametrised test run every time, and which only with `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_further(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All `cases`; those that are not `quick` are marked slow: further cases of what the quick ones test."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
