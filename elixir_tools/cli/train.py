"""The command `train`: starts the ranks of a run, or is one of them.

Owns its overrides and its exit codes. Decides nothing: `train/` trains.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from elixir_moe.errors import ConfigError
from elixir_moe.ext import accelerator
from elixir_tools.cli.ending import leave, number_of_ranks, rank_here, tell_end
from elixir_tools.train import launch
from elixir_tools.watch import control

if TYPE_CHECKING:
    from elixir_tools.train.config import TrainConfig

_OF_SFT = ("model_name_or_path", "dataset_name", "use_peft")
"""Arguments by which a command for `sft` is recognized."""


def run(known: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    with control.leaving(_requeue):  # until the run or the launcher sets its own handlers
        return _start(known, _overrides(known.rest))


def _requeue(number: int) -> NoReturn:
    """Ends this process on a signal before there is anything to save."""
    leave(tell_end(launch.ended_early(number), control.exit_code_of(number), shown=True))


def _start(known: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    # Imported here, where signals are answered already.
    from elixir_tools.train import config as configs
    from elixir_tools.train.directory import check_directory, claim_directory
    from elixir_tools.train.report import Console
    from elixir_tools.train.trainer import Stopped, train
    from elixir_tools.train.waiting import Waits
    from elixir_tools.watch.supervisor import DIVERGED

    config = configs.load(known.config, overrides)
    ranks = number_of_ranks(known.nproc, known.exclude)
    shown = rank_here() == 0 and not launch.has_launcher() and not known.quiet
    with Waits(quiet=not shown)("reading the text"):
        config.check_ranks(ranks)
        data = config.load_data()
    if ranks > 1 and not launch.under_torchrun():
        check_directory(config, data)
        launch.launch(ranks, known.arguments, config.run.threads)
        return 0
    console = Console(stderr=known.json, quiet=known.quiet, soft_wrap=True, highlight=False)
    claim = claim_directory(config, data) if rank_here() == 0 else None
    if claim is not None:
        console.print(_purpose(config, ranks), markup=False)
    try:
        summary = train(config, data, claim, console, details=known.details)
    except Stopped as stop:
        resumes = stop.exit_code != DIVERGED
        text = f"{stop}; to resume it:\n  {_command(known.arguments, config)}" if resumes else str(stop)
        return tell_end(text, stop.exit_code, shown=rank_here() == 0)
    if summary is not None:
        console.print(_next(known.arguments, config), markup=False)
        if known.json:
            print(json.dumps(summary.as_dict()))
    dist.destroy_process_group()
    return 0


def _purpose(config: "TrainConfig", ranks: int) -> str:
    """Returns what the command does, in one line."""
    device = "CPU rank" if accelerator.found() is None else "GPU"
    return (
        f"Trains a GPT from random weights: {config.run.steps} steps on {ranks} {device}{'s' * (ranks > 1)}. "
        f"Ctrl-C saves and ends it. Files go to {config.run.out}"
    )


def _next(arguments: Sequence[str], config: "TrainConfig") -> str:
    """Returns what a user may do with a finished run."""
    out, more = shlex.quote(config.run.out), ("--run.steps", str(2 * config.run.steps))
    return (
        f"\nNext:\n"
        f"  {launch.program()} report {out}  # its losses, speed and memory; --html FILE makes a page\n"
        f"  {_command(arguments, config, *more)}  # trains on"
    )


def _command(arguments: Sequence[str], config: "TrainConfig", *more: str) -> str:
    """The command that continues this run, with `more` settings."""
    if config.run.overwrite:  # it would begin again
        more = ("--run.overwrite", "false", *more)
    if launch.under_torchrun() and not launch.has_launcher():
        return f"the same command, with {shlex.join(more)}" if more else "the same command"
    kept = list(arguments)
    for name in more[::2]:
        while name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
        kept = [word for word in kept if not word.startswith(f"{name}=")]
    return f"{launch.program()} {shlex.join([*kept, *more])}"


def _overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """``--a.b value`` and ``--a.b=value`` as pairs."""
    pairs, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: settings are given as --section.key value")
        key, equals, value = word[2:].partition("=")
        if key in _OF_SFT:
            raise ConfigError(f"--{key} is an argument of `elixir-moe sft`, which fine-tunes a Hugging Face model")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{key} has no value: give one, as --{key} VALUE")
            value = words.pop(0)
        pairs.append((key, value))
    return pairs
