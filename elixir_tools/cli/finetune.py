"""The commands `sft`, `dpo`, `kto`, `reward` and `grpo`: they start the ranks of a fine-tuning, or are one of them.

Owns the number of ranks and what is printed at the end. Decides nothing: TRL trains, under a plan.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from elixir_moe.errors import ConfigError
from elixir_moe.ext import accelerator
from elixir_tools.cli.ending import leave, number_of_ranks, rank_here, tell_end
from elixir_tools.names import TRAINERS
from elixir_tools.report.directory import CONTROL
from elixir_tools.train import launch
from elixir_tools.watch.control import INTERRUPTED, Signals, exit_code_of, named
from elixir_tools.watch.supervisor import DIVERGED

if TYPE_CHECKING:
    from elixir_tools.finetune.run import OutOfMemory


def run(known: argparse.Namespace) -> int:
    """Fine-tunes; returns the exit code."""
    try:
        from elixir_tools.finetune.arguments import parse, parser_of
        from elixir_tools.finetune.callbacks import DivergedError, stopped_by
        from elixir_tools.finetune.run import OutOfMemory, callbacks_of, finetune
    except ModuleNotFoundError as error:
        raise ConfigError(f"{known.verb} needs {error.name}: pip install trl peft") from error

    if not {"-h", "--help"}.isdisjoint(known.rest):
        print(known.parser.format_help())
        parser_of(known.verb).print_help()
        return 0
    given = parse(known.verb, known.rest)
    nproc = known.nproc or (None if launch.under_torchrun() else accelerator.count() or 1)
    ranks = number_of_ranks(nproc, known.exclude)
    if ranks > 1 and not launch.under_torchrun():
        launch.launch(ranks, known.arguments, threads=1)
        return 0
    folder, shown = given.training.output_dir, rank_here() == 0
    if shown and given.model.model_name_or_path and not known.json and not known.quiet:
        print(
            f"Fine-tunes {given.model.model_name_or_path} by TRL's {TRAINERS[given.kind]}Trainer, ranks: {ranks}. "
            f"Ctrl-C saves and ends it. Files go to {folder}",
            flush=True,
        )
    with Signals(partial(leave, INTERRUPTED), tells=shown) as signals:
        callbacks = callbacks_of(given, signals, f"elixir-moe {shlex.join(known.arguments)}")
        with redirect_stdout(sys.stderr) if known.json or known.quiet else nullcontext():  # Trainer prints its losses
            try:
                trainer = finetune(given, callbacks)
            except DivergedError as error:
                return tell_end(str(error), DIVERGED, shown=shown)
            except OutOfMemory as error:
                return tell_end(_with_command(error, known.arguments), 1, shown=True)
    trainer.model._elixir.optimizer.close()
    dist.destroy_process_group()
    stopped = stopped_by(callbacks)
    if stopped is not None:
        step = trainer.state.global_step
        resumes = "the same command with --resume_from_checkpoint true resumes it"
        if given.training.save_only_model:
            resumes = "it cannot be resumed, since --save_only_model keeps no state of the optimizer"
        by = named(stopped) if stopped else CONTROL
        text = f"stopped after step {step} by {by}; saved in {folder}/checkpoint-{step}; {resumes}"
        return tell_end(text, exit_code_of(stopped) if stopped else 0, shown=shown)
    if shown and known.json:
        print(json.dumps({"output_dir": folder, "log": trainer.state.log_history}))
    elif shown:
        what = "the adapters are" if given.model.use_peft else "the model is"
        print(
            f"Trained: {what} in {folder}, for {'PeftModel.' if given.model.use_peft else ''}from_pretrained.\n"
            f"  {launch.program()} report {shlex.quote(folder)}  # losses, speed and memory; --html FILE draws them"
        )
    return 0


def _with_command(error: "OutOfMemory", words: Sequence[str]) -> str:
    if error.changes is None:
        return str(error)
    from elixir_tools.finetune.smaller import command_with

    return f"{error}:\n  {launch.program()} {shlex.join(command_with(words, error.changes))}"
