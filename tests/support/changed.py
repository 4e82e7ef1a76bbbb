"""The test files that a change can reach: ``python -m tests.support.changed [REF]``, which `make test-changed` calls.

Reads syntax trees and imports nothing. A file reaches what it imports, also inside functions and as strings, and all
that those files reach. A public name, as in `em.wrap`, reaches the file that defines it. A file of tests reaches, too,
each module, command, file and folder of the repository that one of its strings names: so a test of a program that is
started as a process needs only the name of the program. Data in a package belong to the Python files of its folder.

The tests that are nearest to a change come first.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
LIBRARY = "elixir_moe"
EVERYTHING = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "tests/support/ranks.py")
"""A change of one of these reaches each test."""
NATIVE = (("csrc/", "CMakeLists.txt"), f"{LIBRARY}/native.py")
"""Sources that are compiled, and the file that imports what comes of them."""
PRELOADED = "tests/support/preloaded.py"
"""Imported for speed; no test needs it."""
_MODULE = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")
_PUBLIC = re.compile(r"\bem\.(\w+)")


class Repository:
    """The files of a repository and what each of them reaches."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root = root
        self.files = sorted(files)
        self._known = set(self.files)
        self._direct: dict[str, set[str]] = {}

    @cached_property
    def commands(self) -> dict[str, str]:
        """{name of an installed command: its file}."""
        scripts = tomllib.loads((self.root / "pyproject.toml").read_text())["project"].get("scripts", {})
        found = {name: self.module(target.partition(":")[0]) for name, target in scripts.items()}
        return {name: file for name, file in found.items() if file is not None}

    @cached_property
    def public(self) -> dict[str, set[str]]:
        """{public name of the library: the files that define it}."""
        found: dict[str, set[str]] = {}
        for node in ast.walk(self._tree(f"{LIBRARY}/public.py")):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    package = self.below(f"{node.module}.{alias.name}".replace(".", "/"))
                    found[alias.name] = package or set(self._imported(node.module or "", alias.name))
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in self.files:
            found.setdefault(PurePosixPath(file).name, []).append(file)
        return found

    @cached_property
    def _folders(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for file in self.files:
            for folder in PurePosixPath(file).parents:
                found.setdefault(str(folder), set()).add(file)
        return found

    def below(self, folder: str) -> set[str]:
        """The files of a folder, at any depth; none if there is no such folder."""
        return self._folders.get(folder, set())

    def module(self, name: str) -> str | None:
        """The file of a module or a package; None if it is not one of the repository."""
        path = name.replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self._known), None)

    def distance(self, start: str, goals: Iterable[str]) -> int | None:
        """How many files lead from one to the nearest of some others; None if it reaches none of them."""
        goals, found, ring, steps = set(goals), {start}, {start}, 0
        while ring:
            if ring & goals:
                return steps
            ring = {near for file in ring for near in self.direct(file)} - found
            found |= ring
            steps += 1
        return None

    def direct(self, file: str) -> set[str]:
        """The files that a file names itself."""
        if file not in self._direct:
            found = set(self._read(file)) if file.endswith(".py") else set()
            self._direct[file] = (found & self._known) - {file, PRELOADED}
            if file == f"{LIBRARY}/__init__.py":  # its users name what they take from public.py
                self._direct[file] = set()
        return self._direct[file]

    def tests_of(self, changed: Iterable[str]) -> list[str]:
        """The test files that reach one of the files, the nearest first."""
        tests = [file for file in self.files if is_test(file)]
        wanted = {near for file in changed for near in self._stand_ins(file)}
        if wanted & set(EVERYTHING):
            return tests
        distances = {test: self.distance(test, wanted) for test in tests}
        near = [(steps, test) for test, steps in distances.items() if steps is not None]
        return [test for _, test in sorted(near)]

    def _stand_ins(self, file: str) -> set[str]:
        """The file, and the Python files that use it without importing it."""
        found = {file}
        if file.startswith(NATIVE[0]):
            found.add(NATIVE[1])
        if not file.endswith(".py"):
            for folder in map(str, PurePosixPath(file).parents):
                beside = {one for one in self.below(folder) if one.endswith(".py") and os.path.dirname(one) == folder}
                if beside and folder != ".":
                    return found | beside
        return found

    def _tree(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text(), file)

    def _read(self, file: str) -> Iterator[str]:
        tree = self._tree(file)
        in_tests = file.startswith("tests/")
        aliases = {"em"} if in_tests else set()
        attributes, descriptions = {}, set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._packages(alias.name)
                    aliases |= {alias.asname or alias.name} if alias.name == LIBRARY else set()
            elif isinstance(node, ast.ImportFrom):
                yield from self._packages(node.module or "")
                for alias in node.names:
                    yield from self._imported(node.module or "", alias.name)
            elif isinstance(node, ast.Expr):
                descriptions.add(id(node.value))
            elif isinstance(node, ast.Attribute):
                attributes[id(node.value)] = node.attr
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in descriptions:
                yield from self.named(node.value) if in_tests else self._packages(node.value)
            elif isinstance(node, ast.Name) and node.id == "__package__":
                yield from self.below(os.path.dirname(file))
            elif isinstance(node, ast.Name) and node.id in aliases:
                yield from self._of_the_library(attributes.get(id(node)))

    def _of_the_library(self, name: str | None) -> Iterable[str]:
        """`em.name`, or `em` as a value."""
        if name == "__file__":
            return self.below(LIBRARY)
        return [f"{LIBRARY}/public.py"] if name in (None, "__all__") else self.public.get(name, ())

    def _imported(self, module: str, name: str) -> Iterator[str]:
        """`from module import name`."""
        if inner := self.module(f"{module}.{name}"):
            yield inner
        elif module == LIBRARY:
            yield from self.public.get(name, ())
        elif file := self.module(module):
            yield file

    def _packages(self, name: str) -> Iterator[str]:
        """The file of a module and those of the packages around it."""
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            if file := self.module(".".join(parts[:n])):
                yield file

    def named(self, text: str) -> Iterator[str]:
        """What a string of a test names."""
        yield from self.below(text.strip("/")) if text != "." else ()
        if text in self._known:
            yield text
        for word in text.split():
            named = self._by_name.get(PurePosixPath(word).name, [])
            if len(named) == 1:
                yield named[0]
        for name in (*_MODULE.findall(text), *text.split()):
            yield from self._packages(name)
        for name in _PUBLIC.findall(text):
            yield from self.public.get(name, ())
        for command, file in self.commands.items():
            if command in text.split():
                yield file


def is_test(file: str) -> bool:
    """Whether pytest collects the file."""
    return file.startswith("tests/") and PurePosixPath(file).name.startswith("test_")


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_since(ref: str | None) -> list[str]:
    """Files that differ from a commit, untracked ones included.

    Without a commit, it is the one at which this branch has left main; on main itself, the last commit if files have
    changed since, and otherwise the commit before.
    """
    untracked = git("ls-files", "--others", "--exclude-standard")
    if ref is None:
        head = git("rev-parse", "HEAD")
        fork = git("merge-base", "HEAD", "main") if "main" in git("branch", "--format=%(refname:short)") else head
        uncommitted = untracked or git("diff", "--name-only", "HEAD")
        ref = fork[0] if fork != head else "HEAD" if uncommitted else "HEAD~1"
    return sorted({*git("diff", "--name-only", "--no-renames", ref), *untracked})


def main(arguments: list[str]) -> int:
    """Prints the test files, one a line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.changed", description="Tests that a change reaches.")
    parser.add_argument("ref", nargs="?", help="the commit that the working tree is compared with")
    changed = changed_since(parser.parse_args(arguments).ref)
    files = git("ls-files", "--cached", "--others", "--exclude-standard")
    repository = Repository(ROOT, [file for file in files if (ROOT / file).exists()])
    tests = repository.tests_of(changed)
    print(f"{len(changed)} files have changed, {len(tests)} files of tests reach them", file=sys.stderr)
    print("\n".join(tests))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
