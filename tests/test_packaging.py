"""What the ways of installing say is what pyproject.toml says."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

from tests.support.every import every

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONDA_NAMES = {"torch": "pytorch", "blake3": "python-blake3", "matplotlib": "matplotlib-base", "pyyaml": "pyyaml"}
"""Packages that have another name at conda-forge."""


def conda(requirement: str) -> str:
    """``torch>=2.11`` -> ``pytorch >=2.11``."""
    name, bound = re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", requirement).groups()
    return f"{CONDA_NAMES.get(name.lower(), name.lower())} {bound}"


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    project, needs = PROJECT["project"], recipe["requirements"]
    python = f"python {project['requires-python']}"
    assert sorted(needs["run"]) == sorted([python, *map(conda, project["dependencies"])])
    assert sorted(needs["run_constraints"]) == sorted(map(conda, project["optional-dependencies"]["train"]))
    assert sorted(needs["host"]) == sorted(["pip", python, *map(conda, PROJECT["build-system"]["requires"])])
    assert recipe["context"]["version"] == project["version"]
    assert recipe["about"]["summary"] == project["description"]
    scripts = [f"{name} = {function}" for name, function in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts


def test_the_image_is_given_what_it_copies() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "packaging/Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    given = re.findall(r"^!(.*)$", (ROOT / "packaging/Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sources == set(given) and every((ROOT / source).exists() for source in sources)


def test_the_sources_hold_all_of_the_build_and_nothing_of_the_tests() -> None:
    patterns = PROJECT["tool"]["scikit-build"]["sdist"]["exclude"]
    packed = {path.name for path in ROOT.iterdir() if not any(fnmatch(f"/{path.name}", p) for p in patterns)}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "csrc", "elixir_moe", "pyproject.toml"} <= packed
    assert packed.isdisjoint({"benchmarks", "tests", "docs", "packaging"})
