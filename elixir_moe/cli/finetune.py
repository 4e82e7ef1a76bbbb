"""The commands `sft`, `dpo`, `kto`, `reward` and `grpo`: they start the ranks of a fine-tuning, or are one of them.

Owns the number of ranks and what is printed at the end. Decides nothing: TRL trains, under a plan.
"""

import argparse
import json

import torch
import torch.distributed as dist

from elixir_moe.cli.ending import number_of_ranks, rank_here
from elixir_moe.errors import ConfigError
from elixir_moe.train import launch


def run(known: argparse.Namespace) -> int:
    """Fine-tunes; returns 0."""
    try:
        from elixir_moe.finetune.arguments import parse, parser_of
        from elixir_moe.finetune.run import finetune
    except ModuleNotFoundError as error:
        raise ConfigError(f"{known.verb} needs {error.name}: pip install trl peft") from error

    if not {"-h", "--help"}.isdisjoint(known.rest):
        print(known.parser.format_help())
        parser_of(known.verb).print_help()
        return 0
    given = parse(known.verb, known.rest)
    ranks = number_of_ranks(known.nproc or (None if launch.under_torchrun() else torch.cuda.device_count() or 1))
    if ranks > 1 and not launch.under_torchrun():
        launch.launch(ranks, known.arguments, threads=1)
        return 0
    trainer = finetune(given)
    folder = given.training.output_dir
    if rank_here() == 0 and known.json:
        print(json.dumps({"output_dir": folder, "log": trainer.state.log_history}))
    elif rank_here() == 0:
        what = "the adapters are" if given.model.use_peft else "the model is"
        print(f"Trained: {what} in {folder}, for {'PeftModel.' if given.model.use_peft else ''}from_pretrained.")
        print("To continue a run that was stopped: the same command with --resume_from_checkpoint true.")
    trainer.model._elixir.optimizer.close()
    dist.destroy_process_group()
    return 0
