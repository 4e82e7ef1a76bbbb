"""The command `plan` by formulas: `--quick`, and the comparison of full training, LoRA and QLoRA.

Owns its output. Decides nothing: `fit.quick` has the formulas, `figures` recommends.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from elixir_moe.errors import ConfigError
from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.plans import Precision
from elixir_tools.fit.answer import assumed_lines, run_lines, sft_words, way_of, wrapped
from elixir_tools.fit.figures import USUAL_ERROR, Figures, memory_lines, recommended, speed_lines, table, words_of
from elixir_tools.fit.quick import quick, step_of
from elixir_tools.fit.tasks import DTYPES, choose_way, machine_task, may_pass_together, model_of, named
from elixir_tools.garbage import uncollected
from elixir_tools.models.presets import Planned
from elixir_tools.train.waiting import Waits

WAYS: Mapping[str, Mapping[str, object]] = {
    "full": {"full": True},
    "LoRA": {"lora": "", "quantize": "none"},
    "QLoRA": {"qlora": ""},
}
"""{way to train: the arguments that ask for it}."""
_OF_A_WAY = ("full", "lora", "qlora", "quantize", "freeze", "compare", "largest")
Exact = Callable[[argparse.Namespace, Hardware, Mapping[str, Figures]], int]


def compares_ways(known: argparse.Namespace) -> bool:
    """Whether nobody has said what is trained, of a model that can have adapters."""
    said = any(getattr(known, name) not in (None, False) for name in _OF_A_WAY) or known.optimizer != "adamw"
    return named(known).config is not None and known.checkpointing == "layers" and not said


def check_formulas(known: argparse.Namespace) -> None:
    """Raises ConfigError if `--quick` has no formulas for what is asked."""
    if named(known).config is None:
        raise ConfigError(
            f"--quick has formulas for Hugging Face's models, and {named(known).name} is not one: leave out --quick"
        )
    given = {
        "--checkpointing none": known.checkpointing == "none",
        f"--largest {known.largest}": known.largest is not None,
        "--compare": known.compare,
        "--optimizer muon": known.optimizer == "muon",
        "--reduce-dtype": known.reduce_dtype != "fp32",
        "--chunk-numel": known.chunk_numel is not None,
    }
    without = [option for option, is_given in given.items() if is_given]
    if without:
        raise ConfigError(
            f"--quick has formulas for a step of a model whose layers are recomputed: leave out --quick, or "
            f"{' and '.join(without)}"
        )


def asked_for(known: argparse.Namespace, words: Mapping[str, object]) -> argparse.Namespace:
    """Returns the question about one way to train: one of `WAYS`."""
    asked = argparse.Namespace(**{**vars(known), **words})
    choose_way(asked)
    return asked


def run_ways(known: argparse.Namespace, hardware: Hardware, exact: Exact) -> int:
    """Prints the answer by formulas; of a comparison, the recommended way is then asked `exact` unless it is quick.

    Raises ConfigError if the model cannot be built, or has no adapters.
    """
    started = time.perf_counter()
    asked = {way: asked_for(known, words) for way, words in WAYS.items()} if compares_ways(known) else {"": known}
    answers: dict[str, tuple[Planned, Figures]] = {}
    refused: dict[str, ConfigError] = {}
    with Waits(quiet=known.quiet)("counting bytes and operations by formulas"), uncollected():
        for way, each in asked.items():
            try:
                answers[way] = figures_of(each, hardware)
            except ConfigError as error:
                refused[way] = error
    if not answers:
        raise next(iter(refused.values()))
    for way, why in refused.items():
        print(f"elixir-moe: {way} is left out: {str(why).partition(chr(10))[0]}", file=sys.stderr)
    ways = {way: figures for way, (_, figures) in answers.items()}
    best = recommended(ways) if len(asked) > 1 else ""
    if not known.quick:
        return exact(asked[best], hardware, ways)
    (given, figures), chosen = answers[best], asked[best]
    command = sft_words(chosen, given, figures.task, tiles=None, disk=figures.disk_bytes > 0) if figures.fits else None
    lines = list(_lines(chosen, hardware, figures, ways if best else {}, best, command))
    if known.json:
        report = {"model": given.name, "gpus": known.gpus, "batch_per_gpu": known.batch, "seq": known.seq}
        report |= {"parameters": figures.task.profile.parameters, "feasible": figures.fits, "answer": lines}
        report |= {"predicted": figures.as_dict(), "usual_error": USUAL_ERROR, "ways": words_of(ways) if best else []}
        print(json.dumps(report | {"seconds": time.perf_counter() - started}))
    else:
        print("\n".join(lines))
    return 0 if figures.fits else 2


def figures_of(known: argparse.Namespace, hardware: Hardware) -> tuple[Planned, Figures]:
    """The model without data, and the answer by formulas. Raises ConfigError."""
    given = model_of(known, None)
    dtype, precision = DTYPES[known.dtype], Precision(master=known.master, moments=known.moments)
    loss = {"fused": given.loss == "fused", "recompute": may_pass_together(known)}
    step = step_of(given.model, known.batch, known.seq, dtype=dtype, **loss)
    task = machine_task(known, hardware, step.profile)
    return given, quick(step, task, precision=precision, itemsize=dtype.itemsize)


def ways_lines(known: argparse.Namespace, hardware: Hardware, ways: Mapping[str, Figures], best: str) -> Iterator[str]:
    """The comparison, and whose it is."""
    ram = f"{hardware.cpu_bytes / 2**30:,.0f} GiB of {'memory' if hardware.one_memory else 'RAM'}"
    yield f"{named(known).name} on {known.gpus} x {hardware.name}, {ram}"
    yield from table(ways, best)
    yield ""


def _lines(
    known: argparse.Namespace,
    hardware: Hardware,
    figures: Figures,
    ways: Mapping[str, Figures],
    best: str,
    command: list[str] | None,
) -> Iterator[str]:
    yield from assumed_lines(known, hardware)
    if ways:
        yield from ways_lines(known, hardware, ways, best)
    fits = "fits" if figures.fits else "does not fit"
    yield from wrapped(f"{named(known).name}, {way_of(known)}: {fits} on {known.gpus} x {hardware.name}.")
    if not figures.fits:
        yield f"  lacks   {figures.lacks}"
    else:
        yield from memory_lines(figures)
        yield from speed_lines(figures)
        yield from run_lines(command)
    yield f"By formulas, mostly within {USUAL_ERROR:.0%} of the exact answer: ask again without --quick."
