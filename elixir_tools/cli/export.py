"""The command `export`: adapters of a fine-tuning, or its base with the adapters merged, for other libraries.

Owns its output. Decides nothing: `finetune.export` writes and checks.
"""

import argparse
import json

from elixir_moe.errors import ConfigError
from elixir_tools.train.waiting import Waits


def run(known: argparse.Namespace) -> int:
    """Prints what was written and how it compares; returns 0."""
    try:
        from elixir_tools.finetune.export import export
    except ModuleNotFoundError as error:
        raise ConfigError(f"export needs {error.name}: pip install transformers accelerate peft") from error

    with Waits(quiet=known.quiet)("writing the model, and reading it back"):
        found = export(known.directory, known.out, known.what)
    if known.json:
        print(json.dumps(found.as_dict()))
        return 0
    alike = f"differ by at most {found.difference:.2g}, which is rounding" if found.difference else "are equal"
    print(
        f"Wrote {found.out}: {found.what} of {found.source}, on the base {found.base}.\n"
        f"Check passed, by transformers and peft themselves: its logits and those of base and adapters {alike} "
        f"(largest {found.largest:.3g}; the adapters change them by up to {found.change:.3g})."
    )
    return 0
