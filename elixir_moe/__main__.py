"""``python -m elixir_moe``: the command line, for torchrun's ``-m``."""

import sys

from elixir_tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
