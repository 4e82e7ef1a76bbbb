"""`python -m tests.certificate.compare PEER`: is a model that another library trains that of plain PyTorch?

Owns the command, whose other arguments are those of `elixir-moe verify`. `peers` sets the library up, and `script`
writes its first difference as a program without this library.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from elixir_moe.errors import ConfigError, ElixirError
from elixir_tools.cli.arguments import Parser, add_common, add_verify
from elixir_tools.cli.verify import check_numbers, compare, resumed_ranks, show
from elixir_tools.verify.certificate import first_failed
from elixir_tools.verify.training import ADAPTERS, HALF, OTHER_RANKS, QUANTIZED
from tests.certificate.peers import PEERS, Peer, peer
from tests.certificate.script import script_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the checks; returns 0 if everything agrees, 1 if not, and 2 for a wrong argument."""
    parser = Parser(prog="python -m tests.certificate.compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("peer", metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--script", type=Path, metavar="FILE", help="write the first difference as a program")
    add_verify(parser)
    add_common(parser)
    try:
        return _run(parser.parse_args(arguments))
    except ElixirError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(known: argparse.Namespace) -> int:
    check_numbers(known)
    other, out = _peer(known), sys.stdout
    deepspeed = ["deepspeed"] if known.peer.startswith("deepspeed") else []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr if known.json else out):
        setup, checks, facts = compare(known, other, Path(folder), f"with {known.peer}", *deepspeed)
        failed = first_failed(checks)
        script = script_of(setup, failed, facts["versions"]) if known.script and failed else None
    if script is not None:
        known.script.write_text(script)
    if known.json:
        facts |= {"with": known.peer, "not_done": dict(other.not_done), "script": script and str(known.script)}
        print(json.dumps(facts))
    else:
        notes = [f"not done by the peer: {part}: {reason}" for part, reason in other.not_done.items()]
        show(checks, facts["versions"], notes)
        if known.script and failed:
            print(f"script: {known.script if script else 'only a step before the save can be shown by one'}")
    return int(failed is not None)


def _peer(known: argparse.Namespace) -> Peer:
    """The peer. Raises ConfigError if it does not do what is asked."""
    if known.script is not None and not known.script.absolute().parent.is_dir():
        raise ConfigError(f"--script: there is no folder {str(known.script.parent)!r}: make it, or name another file")
    found = peer(known.peer)
    if known.model is not None:
        raise ConfigError("a peer needs --hf or --module: other libraries have no model of this name")
    parts = {
        "--quantize": (QUANTIZED, known.quantize is not None),
        "--lora": (ADAPTERS, known.lora is not None),
        "--compute-dtype bf16": (HALF, known.compute_dtype != "fp32"),
        "--resume-ranks": (OTHER_RANKS, resumed_ranks(known) != known.ranks),
    }
    for option, (part, wanted) in parts.items():
        if wanted and part in found.not_done:
            raise ConfigError(f"{option}: not done by {known.peer}: {found.not_done[part]}; leave it out")
        if wanted and known.script is not None:
            raise ConfigError(f"{option}: a script trains in plain fp32, without a resume; leave this or --script out")
    return found


if __name__ == "__main__":
    sys.exit(main())
