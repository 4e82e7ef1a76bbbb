"""Which tests a change reaches: in a small repository, and in this one."""

import ast
from pathlib import Path

import pytest

from tests.support.changed import EVERYTHING, ROOT, Repository, git, is_test
from tests.support.rules import assert_none, place

FILES = {
    "constraints.txt": "",
    "csrc/adam.cpp": "",
    "docs/start.md": "",
    "elixir_moe/__init__.py": "from elixir_moe.public import *",
    "elixir_moe/native.py": "",
    "elixir_moe/public.py": "from elixir_moe.wrap import wrap\nfrom elixir_moe.plan import Plan",
    "elixir_moe/plan.py": "",
    "elixir_moe/wrap.py": "def wrap():\n    from elixir_moe.planner.search import search",
    "elixir_moe/planner/__init__.py": "",
    "elixir_moe/planner/search.py": "from elixir_moe import native",
    "elixir_moe/planner/gpus/cards.json": "",
    "elixir_tools/__init__.py": "",
    "elixir_tools/main.py": "from importlib import import_module\nimport_module(f'{__package__}.train')",
    "elixir_tools/train.py": "",
    "pyproject.toml": '[project]\n[project.scripts]\nelixir = "elixir_tools.main:main"',
    "tests/conftest.py": "",
    "tests/support/cases.py": "import elixir_moe as em\nprint(em.Plan)",
    "tests/support/program.py": "",
    "tests/test_cases.py": "from tests.support.cases import plan",
    "tests/test_everything.py": "import elixir_moe as em\nprint(em)",
    "tests/test_files.py": "import elixir_moe\nprint(elixir_moe.__file__, ROOT / 'docs')",
    "tests/test_module.py": "import elixir_moe.planner.search",
    "tests/test_program.py": "run(ROOT / 'support' / 'program.py')\nrun('import elixir_moe as em; em.Plan')",
    "tests/test_command.py": "'''A docstring that names elixir_moe.plan.'''\nrun('elixir train')",
    "tests/test_wrap.py": "import elixir_moe as em\nem.wrap()",
}

FOREIGN = {"tests/faults/test_chaos.py"}
"""Start processes of other programs only."""


@pytest.fixture
def small(tmp_path: Path) -> Repository:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Repository(tmp_path, FILES)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ("elixir_moe/plan.py", "files cases everything program"),
        ("elixir_moe/wrap.py", "files wrap everything"),
        ("elixir_moe/planner/search.py", "files module wrap everything"),
        ("elixir_moe/planner/gpus/cards.json", "files module wrap everything"),
        ("csrc/adam.cpp", "files module wrap everything"),
        ("elixir_tools/train.py", "command"),
        ("tests/support/program.py", "program"),
        ("tests/test_wrap.py", "wrap"),
        ("docs/start.md", "files"),
        ("elixir_moe/__init__.py", "files cases everything program wrap module"),
    ],
)
def test_a_change_reaches_what_names_it(changed: str, names: str, small: Repository) -> None:
    assert set(small.tests_of([changed])) == {f"tests/test_{name}.py" for name in names.split()}


def test_the_nearest_come_first(small: Repository) -> None:
    found = small.tests_of(["elixir_moe/planner/search.py"])
    assert found.index("tests/test_module.py") < found.index("tests/test_wrap.py")
    assert found.index("tests/test_wrap.py") < found.index("tests/test_everything.py")


def test_what_every_test_needs_reaches_all(small: Repository) -> None:
    assert small.tests_of(["constraints.txt"]) == [file for file in sorted(FILES) if is_test(file)]
    assert [name for name in EVERYTHING if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def whole() -> Repository:
    files = git("ls-files", "--cached", "--others", "--exclude-standard")
    return Repository(ROOT, [file for file in files if (ROOT / file).exists()])


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("elixir_moe/chunks/packing.py", "tests/chunks/test_packing.py"),
        ("csrc/adam.cpp", "tests/optim/test_adam.py"),
        ("docs/index.md", "tests/test_documents.py"),
        ("tests/support/wait_program.py", "tests/distributed/test_waits.py"),
        ("examples/finetune.py", "tests/test_documents.py"),
        ("elixir_moe/errors.py", "tests/test_house.py"),
    ],
)
def test_changes_of_this_repository(changed: str, reached: str, whole: Repository) -> None:
    assert reached in whole.tests_of([changed])


def test_a_test_that_starts_a_process_names_what_it_starts(whole: Repository) -> None:
    """Otherwise no change of the program would reach it."""
    starters = {"subprocess", "runpy", "Program", "posix_spawn"}
    silent = []
    for file in filter(is_test, whole.files):
        tree = ast.parse((ROOT / file).read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named = [one for text in strings if isinstance(text, str) for one in whole.named(text)]
        silent += [place(ROOT / file, 1)] if names & starters and not named and file not in FOREIGN else []
    assert_none(silent)
