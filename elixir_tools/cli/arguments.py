"""The arguments of every verb, and what they offer to choose from.

Owns the words of the command line. Runs nothing, and imports nothing that needs torch, so that help is quick.
"""

import argparse
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from elixir_moe import __version__
from elixir_moe.errors import ConfigError, did_you_mean
from elixir_moe.ext.names import Master, Moments, SchemeName
from elixir_tools.finetune.defaults import SFT
from elixir_tools.fit import gpus
from elixir_tools.models import known as known_models
from elixir_tools.models.shapes import names as models
from elixir_tools.names import DTYPES, LARGEST, OPTIMIZERS, PLANS, TRAINERS, UNQUANTIZED, short_dtype

_ABOUT = "Trains mixture-of-experts models, and dense ones, that do not fit the GPUs at hand."


def _count(text: str) -> int:
    """A whole number from a string such as ``7000000000``, ``7e9``, ``7B`` or ``350M``."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        number = float(text if factor == 1 else text[:-1]) * factor
        if number < 0 or number != round(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"expected a number, as 7000000000, 7e9 or 7B, got {text!r}") from None
    return round(number)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError."""

    def options(self) -> list[str]:
        """The names of all options but help, which nobody misspells."""
        return [name for action in self._actions for name in action.option_strings if name not in ("-h", "--help")]

    def error(self, message: str) -> NoReturn:
        given, _, choices = message.partition("invalid choice: ")[2].partition(" (choose from ")
        hint = did_you_mean(given.strip("'"), re.findall(r"[\w.-]+", choices))
        raise ConfigError(f"{message}{hint and f'; {hint}'}; see {self.prog} --help")


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers in a list separated by commas, each once."""
    return tuple(sorted({int(number) for number in text.split(",")}))


_EXCLUDE: Any = {
    "type": _numbers,
    "metavar": "RANKS",
    "default": (),
    "help": "of these N ranks, leave out some with their GPUs, such as 1,3: those that events call slow",
}


def parser_of(settings_help: str | None) -> Parser:
    """The parser of all verbs. `settings_help` is about the settings of `train`."""
    parser = Parser(prog="elixir-moe", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"elixir-moe {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    add = partial(verbs.add_parser, allow_abbrev=False)
    train = add(
        "train",
        help="train a GPT or PR-MoE from random weights",
        description="Trains a GPT of dense and mixture-of-experts layers on a text file. To fine-tune a "
        "Hugging Face model, use sft, dpo, kto, reward or grpo.",
        epilog=settings_help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--config", metavar="FILE", help="settings, as YAML")
    train.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    train.add_argument("--exclude", **_EXCLUDE)
    train.add_argument(
        "--details", action="store_true", help="also show the plan: chunk groups, rCache, tiers, seconds, bytes held"
    )
    for kind, name in TRAINERS.items():
        finetune = add(kind, help=f"fine-tune with TRL's {name}Trainer", add_help=False)
        finetune.add_argument("--nproc", type=int, metavar="N", help="ranks on this machine; one for each GPU")
        finetune.add_argument("--exclude", **_EXCLUDE)
    add("env", help="show versions and devices")
    add_plan(add("plan", help="find the best plan for a model on a machine"))
    check = add(
        "check",
        help="check this machine in five minutes: exactness, speeds, and what it can train",
        description="Trains a small mixture of experts under three plans on all GPUs, or on the CPU, and compares "
        "it with plain PyTorch; measures the link, Adam and the disk. Exit code 1: something differs.",
    )
    check.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="where the disk is tried; by default the folder for temporary files"
    )
    add_estimate(add("estimate", help="memory of a model in plain PyTorch"))
    add_verify(add("verify", help="compare a model under a plan with plain PyTorch"))
    report = add("report", help="show what runs were, or are")
    report.add_argument("directory", type=Path, nargs="+", help="of a run; several are shown side by side")
    report.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses of a single run, as PNG")
    report.add_argument(
        "--activations", action="store_true", help="also how outputs of layers are distributed (run.activations)"
    )
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page about the runs, as one file")
    export = add(
        "export",
        help="write the adapters of a fine-tuning, or merge them into their base",
        description="Writes the adapters of a fine-tuning, or its base with the adapters merged, reads them back and "
        "compares logits with those of base and adapters.",
    )
    export.add_argument(
        "directory", type=Path, metavar="FOLDER", help="an --output_dir of sft and its like, or one of its checkpoints"
    )
    export.add_argument("--out", type=Path, help="a new folder; by default FOLDER/export/WHAT")
    export.add_argument(
        "--what",
        choices=("adapter", "merged"),
        default="adapter",
        help="adapter: as peft stores it, the default; merged: the base with the adapters in its weights",
    )
    clean = add("clean", help="remove what dead runs have left")
    clean.add_argument("directory", type=Path, help="this one and all below it")
    parsers: list[argparse.ArgumentParser] = [*verbs.choices.values()]
    parsers += _ckpt_actions(add("ckpt", help="list, verify, export or reshard checkpoints"))
    for verb in parsers:
        verb.set_defaults(parser=verb)
        add_common(verb)
    return parser


def add_common(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of every verb."""
    verb.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    verb.add_argument("-v", "--verbose", action="store_true", help="tell on stderr what the library decides")
    verb.add_argument("-q", "--quiet", action="store_true", help="print results and errors, and nothing on the way")
    verb.add_argument("--traceback", action="store_true", help="show where an error comes from (or ELIXIR_TRACEBACK=1)")


def first_sign(known: argparse.Namespace) -> str:
    """Prints what `plan` says before it loads anything."""
    asked = "looks for" if known.largest else "finds out whether"
    what = f"the largest {known.largest} of {known.model}" if known.largest else f"{known.model} fits"
    return f"elixir-moe plan {asked} {what} on {known.gpus} x {known.gpu or known.hardware}; loads PyTorch first ..."


def add_plan(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    verb.add_argument(
        "model",
        metavar="MODEL",
        help="a name on the Hugging Face hub, a config.json or its folder; without a network, one of "
        f"{', '.join(known_models.names())}, or of the papers' {', '.join(models())}",
    )
    machine = verb.add_mutually_exclusive_group(required=True)
    machine.add_argument("--hardware", metavar="NAME|FILE", help="a machine that ships, a JSON file, or here")
    machine.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(gpus.names())}")
    machine.add_argument(
        "--hardware-template",
        action=_Template,
        nargs="?",
        const="rtx-4090",
        metavar="GPU",
        help="print a hardware file to edit, with unit and meaning of each key, and do nothing else",
    )
    verb.add_argument("--gpus", type=int, metavar="N", default=1, help="number of GPUs; by default 1")
    verb.add_argument(
        "--ram",
        "--host-memory",
        metavar="SIZE",
        help="host memory of one host: 128 GiB; by default what --gpu is sold in",
    )
    verb.add_argument(
        "--ram-reserve",
        "--host-reserve",
        metavar="SIZE",
        help="host memory not to plan for; by default 6 GiB, and 3 a GPU",
    )
    verb.add_argument("--disk-size", metavar="SIZE", help="disk of one host for shards: 2 TB; by default none")
    verb.add_argument("--disk-speed", metavar="RATE", help="of reads and writes: 6 GB/s; by default 3 GB/s")
    verb.add_argument(
        "--batch", type=int, metavar="B", help=f"sequences of one GPU; by default {SFT['per_device_train_batch_size']}"
    )
    verb.add_argument("--seq", type=int, metavar="S", help=f"tokens of a sequence; by default {SFT['max_length']}")
    way = verb.add_mutually_exclusive_group()
    way.add_argument("--full", action="store_true", help="train all weights; by default three ways are compared")
    for option, what in (("--lora", "adapters of peft"), ("--qlora", "adapters, on weights in 4 bits")):
        way.add_argument(
            option, nargs="?", const="", metavar="WORDS", help=f"train {what}: r=16,targets=all-linear,experts"
        )
    verb.add_argument(
        "--quantize",
        choices=(*get_args(SchemeName), UNQUANTIZED),
        help="frozen weights under --lora, as em.quantize; by default as the config's quantization_config says",
    )
    verb.add_argument("--freeze", metavar="PATTERNS", help="names of parameters not to train, with *, by commas")
    verb.add_argument(
        "--checkpointing",
        choices=("layers", "none"),
        default="layers" if SFT["gradient_checkpointing"] else "none",
        help="recompute each layer in backward, or keep all",
    )
    verb.add_argument(
        "--loss",
        choices=("whole", "fused"),
        help="of all logits, or without them, by em.linear_cross_entropy; by default as sft and train do",
    )
    verb.add_argument(
        "--accumulation",
        type=int,
        default=SFT["gradient_accumulation_steps"],
        metavar="N",
        help="micro-batches of a step; by default 1",
    )
    verb.add_argument(
        "--batches-per-pass",
        type=_passes,
        metavar="N|auto",
        help="micro-batches that pass each layer together, by em.accumulate; auto, the default, searches as sft does",
    )
    verb.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="adamw",
        help="by default adamw; muon has the matrices of layers and experts, and adamw all else",
    )
    verb.add_argument(
        "--dtype",
        type=short_dtype,
        choices=tuple(DTYPES),
        default="bf16" if SFT["bf16"] else "fp32",
        help="of weights and products; by default bf16",
    )
    verb.add_argument(
        "--master",
        type=short_dtype,
        choices=get_args(Master),
        default="fp32",
        help="how weights are kept for the update",
    )
    verb.add_argument(
        "--moments", type=short_dtype, choices=get_args(Moments), default="fp32", help="how Adam's moments are kept"
    )
    verb.add_argument(
        "--reduce-dtype",
        type=short_dtype,
        choices=tuple(DTYPES),
        default="fp32",
        help="of gradients that are summed over ranks: by default fp32, or --dtype",
    )
    verb.add_argument(
        "--chunk-numel",
        type=_count,
        nargs="+",
        metavar="N",
        help="behind MODEL: elements of a chunk, as 64M; or the fewest and the most to try, as 16M 256M",
    )
    verb.add_argument("--quick", action="store_true", help="by formulas, in seconds: no trace and no search")
    verb.add_argument("--details", action="store_true", help="also show the plan's chunks, rCache, tiers and seconds")
    verb.add_argument(
        "--thorough",
        action="store_true",
        help="also search how far it reaches, and what more memory and accumulation would change",
    )
    verb.add_argument("--budget", metavar="SIZE", help="memory of a GPU to plan for: 40GiB; by default all of it")
    verb.add_argument("--imbalance", type=float, default=1.0, help="routed rows of the busiest rank, in even shares")
    verb.add_argument(
        "--update-in-backward",
        action="store_true",
        help="the training clips nothing, and updates in host memory begin in backward",
    )
    verb.add_argument("--compare", action="store_true", help="price DDP and ZeRO-1/2/3 next to the plan")
    verb.add_argument(
        "--largest", choices=LARGEST, help="instead of a plan: the deepest model, batch or sequence that fits"
    )
    verb.add_argument("--picture", type=Path, metavar="FILE", help="draw what --largest found as PNG")


def _passes(text: str) -> int | None:
    """The number that `--batches-per-pass` gives; None for auto."""
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of micro-batches or auto, got {text!r}") from None


class _Template(argparse.Action):
    """Prints a hardware file and ends the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: str | None = None
    ) -> None:
        print(gpus.template(values))
        parser.exit()


def add_estimate(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of `estimate`."""
    verb.add_argument("--parameters", type=_count, required=True, metavar="N", help="those of the model, as 7e9 or 7B")
    verb.add_argument("--adapters", type=_count, metavar="N", help="parameters of adapters; the model is frozen then")
    verb.add_argument(
        "--quantize", choices=get_args(SchemeName), help="of frozen parameters; by default they are in bf16"
    )
    verb.add_argument("--adamw", action="store_true", help="AdamW instead of stateless SGD")
    verb.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view")


def add_verify(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify`."""
    model = verb.add_mutually_exclusive_group(required=True)
    model.add_argument("--hf", metavar="PATH", help="a Hugging Face config.json, or its directory; weights are random")
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(models())}")
    model.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function without arguments that returns a transformers model, or (module, step, sample)",
    )
    verb.add_argument(
        "--plan", default="zero3", metavar="PLAN", help=f"{', '.join(PLANS)}, or a plan in JSON or its file"
    )
    verb.add_argument("--ranks", type=int, default=2, metavar="N", help="processes on this machine's CPU")
    verb.add_argument(
        "--resume-ranks", type=int, metavar="N", help="processes that load and continue; by default as many"
    )
    verb.add_argument("--steps", type=int, default=3, metavar="N", help="before the save, and again after the load")
    verb.add_argument("--rows", type=int, default=4, metavar="N", help="rows of a micro-batch, all ranks together")
    verb.add_argument("--seq", type=int, default=16, metavar="N", help="tokens of a row")
    verb.add_argument("--accumulation", type=int, default=2, metavar="N", help="micro-batches of a step")
    verb.add_argument(
        "--batches-per-pass",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches that pass each layer together, by em.accumulate; 1 is the plain loop",
    )
    verb.add_argument("--checkpointing", action="store_true", help="with activation checkpointing of every layer")
    verb.add_argument(
        "--compute-dtype",
        type=short_dtype,
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of forward and backward",
    )
    verb.add_argument(
        "--lora", metavar="WORDS", help="adapters of peft: r=16,alpha=32,targets=q_proj,v_proj,experts,parameters=NAME"
    )
    verb.add_argument("--quantize", metavar="SCHEME", help="keep frozen weights in nf4, mxfp4, fp8 or int8")
    verb.add_argument("--no-shrink", action="store_true", help="take the model in its full size")


def _ckpt_actions(parser: argparse.ArgumentParser) -> Collection[argparse.ArgumentParser]:
    """Adds the actions of `ckpt`; returns their parsers."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)
    add = partial(actions.add_parser, allow_abbrev=False)
    ls = add("ls", help="the checkpoints in a directory, the latest last")
    ls.add_argument("directory", type=Path, help="a run's, or one that holds checkpoints")
    check = add("verify", help="hash every file of a checkpoint")
    export = add("export", help="write full weights for other programs")
    again = add("reshard", help="write a checkpoint again, as other files")
    for verb in (check, export, again):
        verb.add_argument("checkpoint", type=Path, help="or a directory as `ls` takes it: the latest in it")
    export.add_argument("out", type=Path, help="a new folder (hf) or file (torch)")
    export.add_argument(
        "--format", choices=("hf", "torch"), default="hf", help="Hugging Face's safetensors, or one torch state dict"
    )
    export.add_argument(
        "--dtype", type=short_dtype, choices=tuple(DTYPES), help="of floating parameters; by default each one's own"
    )
    export.add_argument("--shard-gb", type=float, default=5.0, help="largest file of a folder, in GB (default 5)")
    again.add_argument("out", type=Path, help="the new checkpoint")
    again.add_argument("--files", type=int, default=1, metavar="N", help="number of files (default 1)")
    return actions.choices.values()
