"""The command `plan`: will it fit, how fast will it be, what should be set?

Owns its output. Decides nothing: `search` finds the plan, `models.presets` builds the model.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook

from elixir_moe.errors import ConfigError
from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.measure import measured_here
from elixir_moe.ext.planner import PlanCandidate, Task, cost, explain, price, shortage, tile_for
from elixir_moe.ext.plans import HELD_HEAD, Tier, held_line, held_rows, seconds_text, size_text
from elixir_moe.ext.torch_versions import IMPORTED_LATE
from elixir_tools.cli.largest import run_largest
from elixir_tools.finetune.defaults import SFT
from elixir_tools.fit import gpus, strategies
from elixir_tools.fit.answer import Answer, Asked, answered, assumed_lines
from elixir_tools.fit.figures import PREDICTED, Figures, recommended, words_of
from elixir_tools.fit.search import fastest
from elixir_tools.fit.tasks import (
    DTYPES,
    choose_way,
    machine_bytes,
    model_of,
    pretended_ranks,
    ranks_of,
    reserve_of,
    task_of,
)
from elixir_tools.fit.ways import check_formulas, compares_ways, run_ways, ways_lines
from elixir_tools.garbage import uncollected
from elixir_tools.models.presets import Planned
from elixir_tools.train.waiting import Tell, Waits

_MOST_TOKENS = 2**40
"""Most tokens in a batch: the sizes of larger tensors would overflow."""
_MOST_IMBALANCE = 10**6


def run(known: argparse.Namespace) -> int:
    """Prints the plan and returns 0, or prints why there is none and returns 2. Raises ConfigError."""
    choose_way(known)
    _check_sizes(known)
    if not 1 <= known.imbalance <= _MOST_IMBALANCE:
        raise ConfigError(
            f"--imbalance: expected a finite number of at least 1, at most {_MOST_IMBALANCE}, got {known.imbalance}"
        )
    if machine_bytes("--budget", known.budget) == 0:
        raise ConfigError("--budget=0: expected at least 1 byte")
    if known.quick:
        check_formulas(known)
    hardware = _machine(known)
    hardware.links(known.gpus)
    reserve_of(known, hardware)
    usual = {"batch": SFT["per_device_train_batch_size"], "seq": SFT["max_length"]}
    known.assumed = [name for name in usual if getattr(known, name) is None and name != known.largest]
    for name in known.assumed:
        setattr(known, name, usual[name])
    if known.largest is not None:
        _import_compiler()
        return run_largest(known, hardware)
    if known.quick or compares_ways(known):
        return run_ways(known, hardware, _exact)
    return _exact(known, hardware, {})


def _exact(known: argparse.Namespace, hardware: Hardware, ways: Mapping[str, Figures]) -> int:
    """The answer by a trace and a search, below the figures of `ways` to train, of which it is the recommended one."""
    started = time.perf_counter()
    _import_compiler()
    with pretended_ranks(ranks_of(known)) as mesh, Waits(quiet=known.quiet)("building the model without data") as tell:
        asked = _searched(known, hardware, mesh, tell)
        tell("searching what would help, and how far it reaches" if known.thorough else "searching what would help")
        answer = answered(asked)
    task, choice, searched = asked.found.task, asked.found.choice, asked.found.seconds
    report = _report(known, asked)
    report |= {"profile_seconds": time.perf_counter() - started - searched, "search_seconds": searched}
    report["answer"] = list(answer.sentences)
    if known.compare:
        report["compare"] = list(_compare(task, choice))
    best = recommended(ways) if ways else ""
    if ways:
        ways = {**ways, best: ways[best] if choice is None else Figures.of_choice(choice)}
        report["ways"] = words_of(ways)
    if known.json:
        print(json.dumps(report))
    else:
        above = [*assumed_lines(known, hardware), *(ways_lines(known, hardware, ways, best) if ways else ())]
        print("\n".join([*above, _as_text(known, report, answer, asked)]))
    return 0 if choice is not None else 2


def _searched(known: argparse.Namespace, hardware: Hardware, mesh: DeviceMesh | None, tell: Tell) -> Asked:
    """The question with its fastest plan."""
    models: dict[int | None, Planned] = {None: model_of(known, mesh)}
    narrow = DTYPES[known.dtype].itemsize  # a tile's bytes are those of the step's dtype, as most models are loaded

    def task(tiles: int | None) -> Task:
        given = models[None] if tiles is None else model_of(known, mesh)
        if tiles is not None:
            tile_for(given.model, tiles, narrow)
            models[tiles] = given
        cut = "" if tiles is None else f", in tiles of {size_text(tiles)}"
        with _layers_told(given.model, tell, f"tracing a step{cut}"):
            made = task_of(known, hardware, given, known.batch, known.seq)
        tell(f"searching for the fastest plan{cut}")
        return made

    found = fastest(task)
    if found.choice is not None and known.reduce_dtype != "fp32":
        plan = replace(found.choice.plan, reduce_dtype=DTYPES[known.reduce_dtype])
        found = replace(found, choice=replace(found.choice, plan=plan))
    return Asked(known=known, given=models[found.tiles], found=found)


@contextmanager
def _layers_told(model: nn.Module, tell: Tell, what: str) -> Iterator[None]:
    """While open, tells which layer of the model runs. The hook is torch's, so that equal layers stay equal."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=len, default=())
    numbers = {layer: number for number, layer in enumerate(layers, 1)}

    def before(module: nn.Module, _args: object) -> None:
        if module in numbers:
            tell(f"{what} (layer {numbers[module]} of {len(numbers)})")

    tell(what)
    handle = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def _machine(known: argparse.Namespace) -> Hardware:
    """The machine that the arguments describe."""
    host, disk = machine_bytes("--ram", known.ram), machine_bytes("--disk-size", known.disk_size)
    if known.gpu is not None:
        hardware = gpus.machine(known.gpu, known.gpus)
    elif known.hardware == "here":
        hardware = measured_here(known.gpus)
    else:
        hardware = Hardware.named(known.hardware)
    if host is not None:
        hardware = gpus.with_host(hardware, host)
    if disk is None and known.disk_speed is not None and hardware.disk_bytes is None:
        raise ConfigError(f"--disk-speed {known.disk_speed!r}: there is no disk, give --disk-size too")
    speed = None if known.disk_speed is None else _speed(known.disk_speed)
    if disk == 0:
        hardware = replace(hardware, disk_bytes=None)
    elif disk or speed:
        hardware = gpus.with_disk(hardware, disk or hardware.disk_bytes or 0, speed)
    return hardware


def _speed(text: str) -> float:
    """1e9 bytes a second from a string such as ``6 GB/s``."""
    amount, slash, second = text.partition("/")
    nbytes = machine_bytes("--disk-speed", amount) if slash and second.strip() == "s" else None
    if not nbytes:
        raise ConfigError(f"--disk-speed {text!r}: expected a rate such as '6 GB/s'")
    return nbytes / 1e9


def _check_sizes(known: argparse.Namespace) -> None:
    """Checks the numbers of GPUs, sequences and tokens. The one that is searched for must not be given."""
    for name in ("gpus", "batch", "seq", "accumulation", "batches_per_pass"):
        value = getattr(known, name)
        if name == known.largest and value is not None:
            raise ConfigError(f"--{name} {value}: --largest {name} finds it, leave it out")
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if known.chunk_numel is not None and not (
        1 <= len(known.chunk_numel) <= 2 and 1 <= known.chunk_numel[0] <= known.chunk_numel[-1]
    ):
        given = " ".join(map(str, known.chunk_numel))
        raise ConfigError(f"--chunk-numel {given}: expected one length, or the shortest and the longest, of 1 or more")
    if known.reduce_dtype not in ("fp32", known.dtype):
        raise ConfigError(
            f"--reduce-dtype {known.reduce_dtype}: gradients are summed in fp32, or in the {known.dtype} of --dtype"
        )
    if (known.batch or 1) * (known.seq or 1) > _MOST_TOKENS:
        raise ConfigError(f"--batch, --seq: expected at most {_MOST_TOKENS} tokens, got {known.batch} x {known.seq}")
    if known.largest is not None and known.compare:
        raise ConfigError("--compare prices one plan, and --largest finds none: leave one of them out")
    if known.largest is None and known.picture is not None:
        raise ConfigError("--picture draws what --largest finds: add --largest model, batch or seq")


def _import_compiler() -> None:
    """Imports the module that fake tensors and checkpointing import at first use, which takes half of the command."""
    with uncollected():
        import_module(IMPORTED_LATE)


def _report(known: argparse.Namespace, asked: Asked) -> dict[str, Any]:
    task, choice = asked.found.task, asked.found.choice
    report: dict[str, Any] = {
        "model": asked.given.name,
        "parameters": task.profile.parameters,
        "gpus": known.gpus,
        "batch_per_gpu": known.batch,
        "seq": known.seq,
        "feasible": choice is not None,
        "reason": asked.found.reason,
        "tile": asked.tiles,
    }
    keys = ("chunk_numel", "waste_fraction", "rcache_blocks", "chunks", "device_chunks", "host_chunks", "disk_chunks")
    if choice is None:
        return report | dict.fromkeys(keys) | {"plan": None, "predicted": None, "groups": None}
    values = (
        choice.plan.chunk_numel,
        choice.layout.waste_fraction,
        choice.plan.blocks(choice.layout),
        len(choice.layout.chunks),
        *(choice.chunks_in(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)),
    )
    report |= dict(zip(keys, values, strict=True))
    report["reason"] = "the fastest of all plans that fit"
    report["plan"] = json.loads(choice.plan.to_json())
    report["predicted"] = _predicted(choice)
    report["groups"] = held_rows(choice.plan, choice.layout, task.moments)
    return report


def _predicted(choice: PlanCandidate) -> dict[str, Any]:
    figures, task = Figures.of_choice(choice).as_dict(), choice.task
    tflops = cost.tflops_per_gpu(task.profile, choice.seconds.step, task.accumulation)
    return {name: figures[name] for name in PREDICTED} | {"tflops_per_gpu": tflops}


def _compare(task: Task, choice: PlanCandidate | None) -> Iterator[dict[str, Any]]:
    """Other strategies on the same chunks."""
    numel = choice.plan.chunk_numel if choice is not None else None
    for name, (plan, more) in strategies.plans(task, numel).items():
        priced = price(task, plan)
        missing = shortage(task, priced.size, more)
        predicted = _predicted(priced)
        predicted["device_peak_bytes"] += more
        short = {tier.value: nbytes for tier, nbytes in missing.items()}
        yield {"strategy": name, "feasible": not missing, "short_bytes": short, **predicted}


def _as_text(known: argparse.Namespace, report: dict[str, Any], answer: Answer, asked: Asked) -> str:
    task, choice = asked.found.task, asked.found.choice
    lines = [*answer.summary, *answer.further]
    if known.details:
        lines = [f"{report['model']}: {report['parameters']:,} parameters on {task.gpus} x {task.hardware.name}"]
        lines += answer.sentences
        lines += [] if choice is None else [explain(choice), HELD_HEAD, *map(held_line, report["groups"])]
    for row in report.get("compare", ()):
        fits = "fits" if row["feasible"] else f"short of {_short(row['short_bytes'])}"
        step, tflops = seconds_text(row["step_seconds"]), row["tflops_per_gpu"]
        lines.append(f"{row['strategy']:15} {step:>11} {tflops:7.1f} TFLOPS  {fits}")
    if known.details:
        lines.append(f"profiled in {report['profile_seconds']:.2f} s, searched in {report['search_seconds']:.2f} s")
    return "\n".join(lines)


def _short(missing: dict[str, int]) -> str:
    return " and ".join(f"{size_text(nbytes)} of {tier} memory" for tier, nbytes in missing.items())
