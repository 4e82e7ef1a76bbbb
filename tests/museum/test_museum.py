"""The museum: each planted fault is found by `verify`, which says where; without it, the same models pass."""

from pathlib import Path
from typing import Any

import pytest

from tests.museum.cases import CASES, found, page
from tests.support.cases import with_further

QUICK = ("averaged-experts", "plain-momentum", "decayed-though-frozen")
SOUND = ("permuted-columns", "averaged-experts", "divided-by-replicas", "no-gradient-to-the-input")
"""One case of each model; unharmed."""


def test_there_are_twelve_and_the_page_shows_them() -> None:
    assert len(CASES) == 12
    made = Path(__file__).parents[2] / "docs/museum.md"
    assert made.read_text() == page(), "run: python -m tests.museum"


@pytest.mark.parametrize("name", with_further(CASES, QUICK))
def test_a_fault_is_found(ranks: Any, tmp_path: Path, name: str) -> None:
    checks = ranks(2).run(found, name, str(tmp_path))[0]
    first = next((check for check in checks if not check["ok"]), None)
    assert first is not None, "nothing differs"
    assert first["name"] == CASES[name].check, first
    assert CASES[name].says in first["where"]


@pytest.mark.slow
@pytest.mark.parametrize("like", SOUND)
def test_without_a_fault_nothing_differs(ranks: Any, tmp_path: Path, like: str) -> None:
    checks = ranks(2).run(found, None, str(tmp_path), like)[0]
    assert [check for check in checks if not check["ok"]] == []
    assert len(checks) > 10
