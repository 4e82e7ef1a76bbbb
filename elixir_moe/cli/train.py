"""The command `train`: starts the ranks of a run, or is one of them.

Owns its overrides and its exit codes. Decides nothing: `train/` trains.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from elixir_moe.cli.ending import leave, number_of_ranks, rank_here, tell
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.train import control, launch


def run(known: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    with control.leaving(_requeue):  # until the run or the launcher sets its own handlers
        return _start(known, _overrides(known.rest))


def _requeue(number: int) -> NoReturn:
    """Ends this process on a signal before there is anything to save."""
    text, code = launch.ended_early(number), control.exit_code_of(number)
    if not launch.leave_error(text, code):
        print(f"elixir-moe: {text}", file=sys.stderr)
    leave(code)


def _start(known: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    # Imported here, where signals are answered already.
    from elixir_moe.train import config as configs
    from elixir_moe.train.directory import check_directory, claim_directory
    from elixir_moe.train.loop import DIVERGED, Stopped, train
    from elixir_moe.train.report import Console
    from elixir_moe.train.waiting import Waits

    config = configs.load(known.config, overrides)
    ranks = number_of_ranks(known.nproc)
    shown = rank_here() == 0 and not launch.has_launcher() and not known.quiet
    with Waits(quiet=not shown)("reading the data and the model's config"):
        config.check_ranks(ranks)
        data = config.load_data()
    if ranks > 1 and not launch.under_torchrun():
        check_directory(config, data)
        launch.launch(ranks, known.arguments, config.run.threads)
        return 0
    claim = claim_directory(config, data) if rank_here() == 0 else None
    try:
        summary = train(config, data, claim, Console(stderr=known.json, quiet=known.quiet), _end)
    except Stopped as stop:
        resumes = stop.exit_code != DIVERGED
        text = f"{stop}; {_resume(known.arguments, config.run.overwrite)}" if resumes else str(stop)
        if not (stop.exit_code and launch.leave_error(text, stop.exit_code)) and rank_here() == 0:
            print(f"elixir-moe: {text}", file=sys.stderr)
        return stop.exit_code
    if summary is not None and known.json:
        print(json.dumps(summary.as_dict()))
    dist.destroy_process_group()
    return 0


def _resume(arguments: Sequence[str], overwrite: bool) -> str:
    """How a run goes on that was stopped. `overwrite`: its command would begin again."""
    if launch.under_torchrun() and not launch.has_launcher():
        return "the same command " + "with --run.overwrite false " * overwrite + "resumes it"
    words = shlex.join(arguments)
    if overwrite:
        words = words.replace(" --run.overwrite true", "").replace(" --run.overwrite=true", "")
        words += " --run.overwrite false"
    return f"to resume it:\n  {launch.program()} {words}"


def _overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """``--a.b value`` and ``--a.b=value`` as pairs."""
    pairs, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: settings are given as --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{key} has no value: give one, as --{key} VALUE")
            value = words.pop(0)
        pairs.append((key, value))
    return pairs


def _end(reason: str) -> None:
    """Ends this rank although its main thread hangs."""
    tell(ElixirError(reason), 1, traced=False)
    leave(1)
