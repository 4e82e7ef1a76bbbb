"""Rules on the files of the repository: where something stands, and one failure that names every place.

Knows no rule; those are in tests/test_house.py, tests/test_torch_private.py and tests/test_documents.py.
"""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def place(path: Path, line: int) -> str:
    """A file of the repository and a line of it, as editors open it."""
    return f"{path.relative_to(ROOT)}:{line}"


def assert_none(violations: Iterable[str]) -> None:
    """Fails with one line for each violation."""
    found = list(violations)
    assert not found, f"{len(found)} violation(s)\n" + "\n".join(found)
