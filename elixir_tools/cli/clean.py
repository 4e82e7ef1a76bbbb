"""The command `clean`: removes what dead runs have left.

Owns its output. Decides nothing: `report.directory` knows what is left over.
"""

import argparse
import json

from elixir_moe.errors import ConfigError
from elixir_tools.report.directory import leftovers


def run(known: argparse.Namespace) -> int:
    """Prints what is removed; returns 0. Raises ConfigError."""
    if not known.directory.is_dir():
        raise ConfigError(f"{str(known.directory)!r} is not a directory: name one that holds runs")
    removed = [str(path) for path in leftovers(known.directory)]
    if known.json:
        print(json.dumps({"removed": removed}))
    else:
        print("\n".join(f"removed {path}" for path in removed) or "nothing is left of dead runs")
    return 0
