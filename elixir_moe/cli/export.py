"""The command `export`: a run's model for other libraries.

Owns its output. Decides nothing: `train.export` writes and checks.
"""

import argparse
import json

from elixir_moe.train.export import export
from elixir_moe.train.waiting import Waits


def run(known: argparse.Namespace) -> int:
    """Prints what was written and how it compares; returns 0."""
    with Waits(quiet=known.quiet)("writing the model, and reading it back"):
        found = export(known.directory, known.out, known.what)
    if known.json:
        print(json.dumps(found.as_dict()))
        return 0
    alike = f"differ by at most {found.difference:.2g}, which is rounding" if found.difference else "are equal"
    print(
        f"Wrote {found.out}: {found.what} of {found.checkpoint}.\n"
        f"Check passed, without this library: exported and trained {found.compared} {alike} "
        f"(largest {found.largest:.3g})."
    )
    if found.change is not None:
        print(f"The adapters change {found.compared} by up to {found.change:.3g}.")
    return 0
