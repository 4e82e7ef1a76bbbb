"""The kernels for 64-bit ARM, compiled where a compiler for it is there; only such a machine can run them.

On it the tests of `test_adam` and `test_narrow_step` hold them against the scalar reference.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = ("adam.cpp", "adam_scalar.cpp", "adam_neon.cpp", "numa.cpp")
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-DELIXIR_NEON", "-Wall", "-Wextra", "-Werror")


def compiler() -> list[str] | None:
    """The command of a C++ compiler for aarch64: GCC's cross compiler, or Zig's."""
    if found := shutil.which("aarch64-linux-gnu-g++"):
        return [found]
    zig = [found] if (found := shutil.which("zig")) else None
    if zig is None and importlib.util.find_spec("ziglang"):
        zig = [sys.executable, "-m", "ziglang"]
    return [*zig, "c++", "-target", "aarch64-linux-gnu"] if zig else None


@pytest.mark.parametrize("source", SOURCES)
def test_kernels_compile_for_arm(source: str, tmp_path: Path) -> None:
    command = compiler()
    if command is None:
        pytest.skip("no compiler for aarch64: apt-get install g++-aarch64-linux-gnu, or pip install ziglang")
    path = Path(__file__).parents[2] / "csrc" / source
    done = subprocess.run([*command, *FLAGS, "-c", str(path), "-o", str(tmp_path / "out.o")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
