"""Rules on the files of the repository: where something stands, and one failure that names every place.

Knows no rule; those are in tests/test_house.py, tests/test_torch_private.py and tests/test_documents.py.
"""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all rules of a process; a rule only reads it."""
    return ast.parse(path.read_text())


def place(path: Path, line: int) -> str:
    """A file of the repository and a line of it, as editors open it."""
    return f"{path.relative_to(ROOT)}:{line}"


def assert_none(violations: Iterable[str]) -> None:
    """Fails with one line for each violation."""
    found = list(violations)
    assert not found, f"{len(found)} violation(s)\n" + "\n".join(found)
