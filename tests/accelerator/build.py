"""Compiles the backend once for each torch and each state of its sources.

Owns the folders ``build/accelerator-*``. Imports nothing of what it compiles.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
BUILDS = Path(__file__).parents[2] / "build"
NAME = "_accelerator.so"
FLAGS = ("-std=c++20", "-O0", "-g0", "-DNDEBUG", "-fPIC", "-shared", "-Wall")
"""Torch's own libraries are built with NDEBUG, too: some checks of its headers fail where only one side has them."""


class CannotBuildError(Exception):
    """The sources do not compile."""


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or one on PATH."""
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    return next((found for name in wanted if (found := shutil.which(name))), None)


def why_not() -> str | None:
    """Why this machine cannot compile the backend; None if it can."""
    if sys.platform != "linux":
        return "the accelerator of threads needs Linux"
    if torch.__version__ < "2.12":
        return "the accelerator of threads corrupts the heap on torch 2.11, for a reason that has not been found"
    if compiler() is None:
        return "the accelerator of threads needs a C++ compiler"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.exists() else f"the accelerator of threads needs {header}"


def build() -> Path:
    """Returns the extension module, compiled if it is not there; other processes wait meanwhile.

    Raises:
        CannotBuildError: with what the compiler wrote.
    """
    folder = BUILDS / f"accelerator-{torch.__version__}-py{sys.version_info.major}{sys.version_info.minor}-{_hash()}"
    module = folder / NAME
    if module.exists():
        return module
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            _compile(folder / "unfinished.so")
            os.replace(folder / "unfinished.so", module)
    return module


def _hash() -> str:
    texts = [" ".join(FLAGS).encode(), *(path.read_bytes() for path in sorted(SOURCES.iterdir()))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def _compile(to: Path) -> None:
    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [
        *(compiler() or "c++", *FLAGS),
        *(part for folder in headers for part in ("-isystem", str(folder))),
        *(str(SOURCES / "accelerator.cpp"), "-o", str(to)),
        *(f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", f"-Wl,-rpath,{root / 'lib'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuildError(f"{' '.join(command)}\n{done.stderr}")
