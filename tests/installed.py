"""The wheel in an empty environment without a compiler: ``python -m tests.installed FOLDER``.

Owns the choice of the wheel in FOLDER, the environment, and what must work there: the native module, the data files,
the examples' quickstart, a training on two ranks, a few tests; and that the sources beside it say what they miss. All
of it runs in a folder outside the checkout, so nothing can be read from there. Needs the standard library alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "cmake", "ninja", "make")
TESTS = ("tests/optim/test_adam.py", "tests/quantized/test_decoders.py", "tests/chunks/test_plan.py")
"""Tests of the native module and of the planner's arithmetic, which start no ranks."""
CHECK = """
import pathlib, sys
import elixir_moe
from elixir_moe import _native, kernels
package = pathlib.Path(elixir_moe.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not of this environment"
assert kernels.cpu_features() == _native.cpu_features()
tools = package.parent / "elixir_tools"
needed = [package / "py.typed", package / "_native.pyi", tools / "fit/gpus.json"]
missing = [str(path) for path in needed if not path.is_file()]
shapes = len(list(tools.glob("models/configs/*/*.json")))
assert not missing and shapes == 21 and list(package.glob("planner/machines/*.json")), f"not in the wheel: {missing}"
surplus = [name for name in ("tests", "benchmarks", "docs") if (package.parent / name).exists()]
assert not surplus, f"the wheel brings {surplus}"
print(f"{package}, kernels: {kernels.cpu_features()}")
"""
TRAINING = ("--run.steps", "6", "--run.eval_every", "3", "--run.eval_batches", "1", "--run.out", "run")


def wheel_in(folder: Path) -> Path:
    """The one wheel in `folder` for the running Python: one for 3.11, one for all versions from 3.12 on."""
    tag = "cp311-cp311" if sys.version_info[:2] == (3, 11) else "cp312-abi3"
    found = [*folder.glob(f"elixir_moe-*-{tag}-*.whl")]
    if len(found) != 1:
        raise SystemExit(
            f"expected one wheel with {tag} in {folder}, found {len(found)}: `make wheel` writes one; remove older ones"
        )
    return found[0].resolve()


def call(arguments: list[str], environment: Mapping[str, str], folder: Path, *, refusal: str | None = None) -> None:
    """Runs a program of the environment in `folder`; ends this one if it fails, or does not fail with `refusal`."""
    print("$", *(arguments if len(arguments[-1]) < 200 else arguments[:-1]), flush=True)
    program, *rest = arguments
    found = shutil.which(program, path=environment["PATH"])
    assert found is not None, f"{program} is not in the environment"
    done = subprocess.run(
        [found, *rest], env=environment, cwd=folder, check=False, text=True, capture_output=refusal is not None
    )
    said = f"{done.stdout}{done.stderr}"
    if refusal is None and done.returncode:
        raise SystemExit(f"failed in the environment of the wheel: {program}")
    if refusal is not None and (not done.returncode or refusal not in " ".join(said.split())):
        raise SystemExit(f"expected {program} to fail with {refusal!r}, got {done.returncode} and:\n{said}")


def main() -> int:
    """Installs and tries the wheel; 0 if all works."""
    wheel = wheel_in(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="elixir-moe-wheel-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        told = ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {key: value for key, value in os.environ.items() if key not in told}
        environment |= {"PATH": str(folder / "venv/bin"), "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        there = [tool for tool in COMPILERS if shutil.which(tool, path=environment["PATH"])]
        assert not there, f"the environment has {there}"
        sources = [str(path.resolve()) for path in Path(sys.argv[1]).glob("elixir_moe-*.tar.gz")]
        refused = ["python", "-m", "pip", "install", "--no-deps", *sources]
        call(refused, environment, folder, refusal="No C++ compiler was found, which the sources of elixir_moe need")
        packages = [f"{wheel}[train]", "pytest", "hypothesis"]
        call(["python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *packages], environment, folder)
        work = folder / "work"
        shutil.copytree(ROOT / "examples", work / "examples")
        shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", work)
        call(["python", "-c", CHECK], environment, work)
        call(["python", "examples/quickstart.py"], environment, work)
        config = ["--config", "examples/pr_moe_small.yaml"]
        call(["elixir-moe", "train", "--nproc", "2", *config, *TRAINING], environment, work)
        call(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], environment, work)
    print(f"{wheel.name} installs and trains without a compiler")
    return 0


if __name__ == "__main__":
    sys.exit(main())
