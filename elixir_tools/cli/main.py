"""The command line: `elixir-moe VERB ...`, also `python -m elixir_moe VERB ...`.

Owns the way from words to a verb, and the exit codes. `arguments` has the words; a verb is the file of its name next to
this one, whose `run` takes the arguments. It is imported when it is asked for, and torch with it, so that help and
mistakes are answered at once. Exit codes:

    0    done
    1    failed while running
    2    a setting, file, command-line value or plan is wrong: the same command would fail again
    3    stopped by the supervisor, with the state saved apart
    75   stopped by a signal, with the state saved; to be started again
    130  stopped by Ctrl-C: `train` saves its state first
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from elixir_moe.errors import ConfigError, DiskError, ElixirError, LayoutError, PlanError, TierError, did_you_mean
from elixir_tools.cli.arguments import first_sign, parser_of
from elixir_tools.cli.ending import leave, number_of_ranks, rank_here, tell
from elixir_tools.garbage import uncollected
from elixir_tools.models.known import find
from elixir_tools.names import TRAINERS
from elixir_tools.train import launch

_OF_SETTINGS = (ConfigError, LayoutError, PlanError, TierError)
"""Errors that recur until the user changes something."""
_TRAIN_EXTRA = {"matplotlib", "rich", "yaml"}
"""Modules that only the extra `train` installs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A rank of several that fails ends its process at once."""
    code = _main(arguments)
    if code and launch.under_torchrun() and number_of_ranks(None) > 1:
        leave(code)
    return code


def _main(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    traced = "--traceback" in arguments or os.environ.get("ELIXIR_TRACEBACK") == "1"
    try:
        return _run(arguments)
    except launch.RanksFailed as error:
        print(f"elixir-moe: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if not launch.has_launcher():
            print("elixir-moe: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in _TRAIN_EXTRA:
            raise
        tell(
            ConfigError(f"{error.name} is missing, which training needs: in a clone, pip install '.[train]'"), 2, traced
        )
        return 2
    except Exception as error:
        code = 2 if isinstance(error, _OF_SETTINGS) and not isinstance(error, DiskError) else 1
        tell(error, code, traced or not isinstance(error, ElixirError))
        return code


def _run(arguments: Sequence[str]) -> int:
    helped = "train" in arguments and not {"-h", "--help"}.isdisjoint(arguments)
    parser = parser_of(_settings_help() if helped else None)
    known, rest = parser.parse_known_args(arguments)
    if rest and arguments[0].startswith("-"):
        parser.error(f"{arguments[0]} stands before {known.verb}: write options after the verb")
    if rest and known.verb not in ("train", *TRAINERS):
        words = [word.partition("=")[0] for word in rest if word.startswith("-")]
        hint = did_you_mean(words[0], known.parser.options()) if words else ""
        known.parser.error(f"unknown arguments {' '.join(rest)}{hint and f'; {hint}'}")
    known.rest, known.arguments = rest, arguments
    with _telling_decisions(known.verbose):
        return _run_verb(known)


def _run_verb(known: argparse.Namespace) -> int:
    if known.verb == "check" and not known.quiet:  # before torch, which takes seconds to load
        print("elixir-moe check: some minutes at most; loads PyTorch first ...", file=sys.stderr, flush=True)
    if known.verb == "plan":  # before torch, which takes seconds to load
        if not known.quiet:
            print(first_sign(known), file=sys.stderr, flush=True)
        known.model = find(known.model)

    with uncollected():
        from elixir_moe.ext.ranks import prepare_process

        prepare_process()
        verb = import_module(f"{__package__}.{'finetune' if known.verb in TRAINERS else known.verb}")
    code: int = verb.run(known)
    return code


@contextmanager
def _telling_decisions(verbose: bool) -> Iterator[None]:
    """With --verbose, the log of the library and its programs is shown on stderr. No other place configures logging."""
    logs = {log: log.level for log in map(logging.getLogger, ("elixir_moe", "elixir_tools"))}
    handler = logging.StreamHandler()
    rank = f"[rank {rank_here()}] " if launch.under_torchrun() else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(name)s: %(message)s", "%H:%M:%S"))
    for log in logs if verbose else ():
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for log, level in logs.items():
            log.removeHandler(handler)
            log.setLevel(level)


def _settings_help() -> str:
    from elixir_tools import settings
    from elixir_tools.train.config import TrainConfig

    return settings.help_of(TrainConfig)
