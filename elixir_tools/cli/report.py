"""The command `report`: what runs were, or are.

Owns its output. Decides nothing: `report.history` reads runs.
"""

import argparse
import json

from rich.console import Console

from elixir_moe.errors import ConfigError
from elixir_tools.report import history, page, picture


def run(known: argparse.Namespace) -> int:
    """Prints, draws or writes what the runs were; returns 0. Raises ConfigError."""
    if known.picture is not None and len(known.directory) > 1:
        raise ConfigError(f"--picture draws one run, got {len(known.directory)}: name one directory")
    try:
        accounts = [history.account(directory) for directory in known.directory]
        if known.activations:
            for directory, one in zip(known.directory, accounts, strict=True):
                one["activations"] = history.distributions(directory)
        if known.picture is not None:
            picture.draw(known.picture, known.directory[0], accounts[0])
        if known.html is not None:
            page.write(known.html, [history.story(directory) for directory in known.directory])
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename!r}: {error.strerror}: ask its owner for it") from error
    if known.json:
        print(json.dumps({"runs": accounts}, allow_nan=False))
    else:
        history.show(Console(), accounts)
    return 0
