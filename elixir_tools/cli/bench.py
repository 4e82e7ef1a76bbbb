"""The command `bench`: the benchmarks of a checkout.

Owns only their start: they are not part of the package because they need its peers.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from elixir_moe.errors import ConfigError


def run(known: argparse.Namespace) -> int:
    """Runs the benchmarks; returns their exit code. Raises ConfigError outside of a checkout."""
    root = Path(__file__).parents[2]
    if not (root / "benchmarks/run.py").is_file():
        raise ConfigError("the benchmarks are part of the source tree: use `make bench` or this in a checkout of it")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.run", *known.rest, *["--json"] * known.json]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode
