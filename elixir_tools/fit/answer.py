"""The answer of `plan` in words: whether the model fits, how fast it trains, how far it reaches, what would help.

Owns the sentences and the further searches behind them. Decides nothing: `search` finds every plan.
"""

import argparse
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.planner import PlanCandidate, Task, cost
from elixir_moe.ext.plans import Plan, Tier, seconds_text, size_text
from elixir_tools.finetune.defaults import SFT
from elixir_tools.fit import gpus, strategies
from elixir_tools.fit.figures import Figures, memory_lines, speed_lines
from elixir_tools.fit.largest import Sizes, largest
from elixir_tools.fit.search import Search, searched, tile_bytes
from elixir_tools.fit.tasks import DTYPES, named, quantized_as, reserve_of, task_of
from elixir_tools.models.lora import Lora
from elixir_tools.models.presets import Planned
from elixir_tools.names import LARGEST, UNQUANTIZED

_ANY_DISK = 2**60
"""Bytes of a disk that is never too small."""
STICK = 32 * 2**30
"""Bytes of a stick of memory, as they are sold for desktops and servers alike."""
_TOKENS = 128
"""The longest sequence is searched in multiples of this."""
_SLOW_UPDATE = 0.2
"""Part of a step from which on an update is called slow."""
_AMORTISED = 0.1
"""Part of a step that updates may take once they are amortised."""
_WORTH = 0.01
"""Part of a step below which a saving is not worth naming."""
_WIDTH = 80
"""Columns of the answer."""
_ALWAYS = {"max_length", "per_device_train_batch_size"}
"""Arguments of `sft` that are shown even where they have their defaults, since they make memory and time."""
_IN_WORDS = {
    "b_c2g": "{:g} GB/s from host to GPU",
    "b_g2c": "{:g} GB/s from GPU to host",
    "v_g": "{:g} billion parameters a second of Adam on the GPU",
    "v_c": "{:g} billion a second of Adam on the host",
    "b_g2g": "{:g} GB/s between GPUs, the sum of all",
    "peak_tflops": "{:g} TFLOPS of matrix products",
    "cpu_bytes": "{} of host memory",
    "disk_read": "{:g} GB/s from disk",
    "disk_write": "{:g} GB/s to disk",
    "node_bandwidth": "{:g} GB/s of a node's network",
    "fitted": "kernels that reach {:.0%} of the data sheet, and the three other fitted constants",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A question to answer, and the plan that was found."""

    known: argparse.Namespace
    given: Planned
    found: Search
    """Its fastest plan, or why there is none."""

    @property
    def tiles(self) -> str | None:
        """The size of the tiles in which the model was cut; None if it was not."""
        return None if self.found.tiles is None else size_text(self.found.tiles).replace(".00", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer, short and in full."""

    summary: tuple[str, ...]
    """Whether it fits, its memory and seconds and what to run, or what would make it fit. Lines of 80 columns."""
    further: tuple[str, ...]
    """The parts of the answer that take further searches."""
    sentences: tuple[str, ...]
    """All, one line for each part of the answer."""


def answered(asked: Asked) -> Answer:
    """The answer to a question."""
    helps = [] if asked.found.choice is not None else [*_disk(asked)]
    further: list[str] = []
    if asked.known.thorough:
        further = [*_reach(asked, helped=bool(helps)), *_stick(asked), *_accumulation(asked)]
    if asked.found.untiled is not None and asked.found.choice is None and not helps:
        helps.append(f"Tiles would need less device memory, but {asked.found.untiled}.")
    lines = [_question(asked), *_memory(asked), *helps, *_speed(asked), *further]
    lines.append(_error(asked.found.task.hardware, asked.found.task.gpus))
    command = None
    if asked.found.choice is not None:
        on_disk = bool(asked.found.choice.plan.disk_chunks)
        command = sft_words(asked.known, asked.given, asked.found.choice.task, tiles=asked.tiles, disk=on_disk)
    if asked.found.choice is not None:
        lines.append(f"To paste: {_to_paste(asked, asked.found.choice)}")
        lines += [] if command is None else [f"By command: {' '.join(command)}"]
    return Answer(summary=tuple(_summary(asked, helps, command)), further=tuple(further), sentences=tuple(lines))


def _summary(asked: Asked, helps: Sequence[str], command: Sequence[str] | None) -> Iterator[str]:
    where = f"{asked.found.task.gpus} x {asked.found.task.hardware.name}"
    if asked.found.choice is None:
        yield from wrapped(f"{asked.given.name}, {way_of(asked.known)}: does not fit on {where}.")
        lacks, _, changes = asked.found.reason.partition(": ")[2].partition("; ")
        smallest, *others = changes.split(", or ")
        yield from wrapped(f"  lacks   {lacks.replace(' too little ', ' of ')}", "          ")
        yield from wrapped(f"Smallest change: {smallest}." + "".join(f" Or {other}." for other in others))
        for each in helps:
            yield from wrapped(each)
        return
    yield from wrapped(f"{asked.given.name}, {way_of(asked.known)}: fits on {where}.")
    figures = Figures.of_choice(asked.found.choice)
    yield from memory_lines(figures)
    yield from speed_lines(figures)
    yield from run_lines(command)
    if command is None:
        yield "In a script:"
        for line in _to_paste(asked, asked.found.choice).split("; then: "):
            yield from wrapped(line, "      ", first="  ")


def way_of(known: argparse.Namespace) -> str:
    """The way to train, in a few words."""
    if known.lora is None:
        return "all weights trained" if known.freeze is None else f"{known.freeze} frozen"
    scheme = quantized_as(known)
    return f"{Lora.parse(known.lora)}{f', frozen weights in {scheme}' if scheme else ''}"


def assumed_lines(known: argparse.Namespace, hardware: Hardware) -> Iterator[str]:
    """Yields the assumptions of the answer that nobody has given."""
    assumed = hardware.of_origin("assumed")
    said = [f"{hardware.cpu_bytes / 2**30:,.0f} GiB of RAM (--ram)"] if "cpu_bytes" in assumed else []
    said += ["no disk (--disk-size)"] if hardware.disk_bytes is None else []
    said += [f"{known.batch} rows of each GPU (--batch)"] if "batch" in known.assumed else []
    said += [f"{known.seq:,} tokens a row (--seq)"] if "seq" in known.assumed else []
    said += ["rates of links and of Adam (--details)"] if {*assumed} - {"cpu_bytes"} else []
    if said:
        yield from wrapped(f"Assumed: {', '.join(said)}.", "  ")


def run_lines(command: Sequence[str] | None) -> Iterator[str]:
    """The command that trains."""
    if command is not None:
        yield "Run:"
        yield from _continued(command)


def wrapped(text: str, indent: str = "", first: str = "") -> list[str]:
    """The text in lines of 80 columns; a longer word has a line of its own."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _continued(command: Sequence[str]) -> Iterator[str]:
    """A command of the shell in lines of 80 columns, between its parts."""
    line = " "
    for part in command:
        if len(line) + len(part) + 3 > _WIDTH and line.strip():
            yield f"{line} \\"
            line = "   "
        line += f" {part}"
    yield line


def _to_paste(asked: Asked, choice: PlanCandidate) -> str:
    """The calls that train with the plan."""
    tiles = "" if asked.tiles is None else f'em.tile(model, at_most="{asked.tiles}")  # before the optimizer; then: '
    scheme = asked.known.quantize
    packed = "" if scheme in (None, UNQUANTIZED) else f'em.quantize(model, "{scheme}")  # before the optimizer; then: '
    passes = "; then: losses = em.accumulate(model, loss_fn, batches)" * (choice.task.together > 1)
    return packed + tiles + wrap_line(choice.plan, asked.known.dtype, asked.known.optimizer) + passes


def sft_words(
    known: argparse.Namespace, given: Planned, task: Task, *, tiles: str | None, disk: bool
) -> list[str] | None:
    """The `elixir-moe sft` of what was asked, which searches again; None if it has no setting for a part of it."""
    unlike = (
        known.freeze is not None
        or known.optimizer not in ("adamw", "muon")
        or known.dtype == "fp16"
        or known.loss == "whole"
    )
    if named(known).config is None or unlike or task.gpus > task.hardware.gpus_per_node:
        return None
    if not hasattr(given.model.get_output_embeddings(), "weight"):  # type: ignore[operator]
        return None  # it is in tiles, and TRL's loss reads it whole
    said: dict[str, Any] = {"model_name_or_path": named(known).name, "dataset_name": "DATA"}
    if known.lora is not None:
        lora = Lora.parse(known.lora)
        said |= {"use_peft": True, "lora_r": lora.r, "lora_alpha": lora.alpha}
        said |= {"lora_target_modules": lora.targets or None, "lora_target_parameters": lora.parameters or None}
        said |= {"quantize": quantized_as(known)}
    said |= {"max_length": known.seq, "per_device_train_batch_size": known.batch}
    said |= {"gradient_accumulation_steps": known.accumulation, "bf16": known.dtype == "bf16"}
    recomputed = known.checkpointing == "layers" and given.model.supports_gradient_checkpointing
    said |= {"gradient_checkpointing": recomputed, "tile": tiles, "plan_budget": known.budget}
    said |= {
        "plan_disk": "DISK" if disk else None,
        "plan_batches_per_pass": task.together if task.together > 1 else None,
    }
    kept = {"plan_master": known.master, "plan_moments": known.moments, "plan_reduce_dtype": known.reduce_dtype}
    said |= {name: None if value == "fp32" else value for name, value in kept.items()}
    said |= {"optim": "muon" if known.optimizer == "muon" else SFT["optim"]}
    if known.chunk_numel is not None:
        said |= {"plan_chunk_numel": ",".join(map(str, known.chunk_numel))}
    words = ["elixir-moe sft"]
    for name, value in (said | {"output_dir": "OUT"}).items():
        if name in _ALWAYS or value != SFT.get(name):
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            texts = ["false" if each is False else str(each) for each in values]
            words.append(" ".join([f"--{name}", *map(shlex.quote, texts)]))
    return [*words, *[f"--nproc {task.gpus}"] * (task.gpus > 1)]


def _disk(asked: Asked) -> Iterator[str]:
    """The disk that makes it fit, if there is none yet."""
    task = asked.found.task
    if task.disk_bytes != 0:
        return
    ranks = min(task.gpus, task.hardware.gpus_per_node)
    hardware = gpus.with_disk(task.hardware, _ANY_DISK, None)
    found = searched(replace(task, hardware=hardware, disk_bytes=_ANY_DISK // ranks), asked.found.packings).choice
    if found is not None:
        needed = -(-found.size.disk_bytes * ranks // 10**9)
        yield (
            f'A disk makes it fit: --disk-size "{needed} GB" for each host, about {seconds_text(found.seconds.step)} a '
            f"step at {hardware.disk_read:g} GB/s from it and {hardware.disk_write:g} GB/s to it."
        )


def wrap_line(plan: Plan, dtype: str, optimizer: str) -> str:
    """The call of `wrap` with this plan."""
    given = "(muon, adamw)" if optimizer == "muon" else "optimizer"
    return f"em.wrap(model, {given}, plan={plan_line(plan)}, step=loss_fn, sample=batch, compute_dtype={DTYPES[dtype]})"


def plan_line(plan: Plan) -> str:
    """The plan as Python: every field that has another value than by default."""
    if plan.disk_chunks and plan.disk is None:
        plan = replace(plan, disk="FOLDER")
    shown = []
    for each in fields(plan):
        value = getattr(plan, each.name)
        if each.name != "explanation" and (each.default is MISSING or value != each.default):
            shown.append(f"{each.name}={value!r}")
    return f"em.Plan({', '.join(shown)})"


def _question(asked: Asked) -> str:
    known, params = asked.known, asked.found.task.profile.params
    scheme = quantized_as(known)
    whole = asked.found.task.profile.parameters if scheme else sum(p.numel for p in params) or 1
    trained = sum(p.numel for p in params if p.key.trainable)
    of_rank = "" if whole == asked.found.task.profile.parameters else " of a rank"
    what = "all parameters" if trained == whole else f"{trained:,} of {whole:,} parameters{of_rank}"
    how = (
        "" if known.lora is None else f" ({Lora.parse(known.lora)}{f', frozen weights in {scheme}' if scheme else ''})"
    )
    checkpoints = "of every layer recomputed" if known.checkpointing == "layers" else "kept"
    loss = ", without logits" if asked.given.loss == "fused" else ""
    step = "1 backward" if known.accumulation == 1 else f"{known.accumulation} micro-batches"
    return (
        f"Asked: {what} are trained{how} with {known.optimizer} in {known.dtype}; {known.batch} x {known.seq} tokens a "
        f"GPU and backward, {step} a step, activations {checkpoints} (--checkpointing {known.checkpointing}){loss}."
    )


def _memory(asked: Asked) -> Iterator[str]:
    task, choice = asked.found.task, asked.found.choice
    reserve = reserve_of(asked.known, task.hardware)
    kept = (
        f"{size_text(reserve)} of a host's {size_text(task.hardware.cpu_bytes)} are left for the system and the "
        "processes (--ram-reserve)"
    )
    if choice is None:
        yield f"It does not fit: {asked.found.reason}. {kept}."
        return
    device, host = choice.task.held_bytes(choice.size)
    peak = cost.device_peak(choice.task.profile, device, task.imbalance)
    disk = f", {size_text(choice.size.disk_bytes)} on disk" if choice.size.disk_bytes else ""
    activations = size_text(cost.activations(choice.task.profile, task.imbalance))
    if task.hardware.one_memory:
        yield (
            f"It fits: {size_text(peak + host)} of the {size_text(task.capacity_bytes)} that GPU and host have "
            f"together, of which {activations} are activations{disk}; {kept}. Nothing is offloaded to host memory, "
            "which is the same memory: what it cannot hold goes to disk."
        )
    else:
        yield (
            f"It fits: {size_text(peak)} of each GPU's {size_text(task.capacity_bytes)}, of which {activations} are "
            f"activations, and {size_text(host + choice.task.kept_bytes)} of a rank's {size_text(task.host_bytes)} of "
            f"host memory{disk}; {kept}."
        )
    homes = [
        f"{choice.chunks_in(tier)} {where}"
        for tier, where in ((Tier.DEVICE, "on the GPU"), (Tier.HOST, "in host memory"), (Tier.DISK, "on disk"))
        if choice.chunks_in(tier)
    ]
    apart = ", whose weights are on the GPU too, sharded" if choice.plan.values_on_device else ""
    kept_inputs = (
        f"; the inputs of {choice.task.kept_regions} checkpointed layers wait in host memory"
        if choice.task.kept_regions
        else ""
    )
    blocks = choice.plan.blocks(choice.layout)
    in_use = f"; {blocks} blocks of {size_text(choice.layout.block_bytes)} for weights in use" if blocks else ""
    if asked.tiles is not None:
        in_use += f", since large parameters are cut into tiles of at most {asked.tiles}"
    yield (
        f"The plan: of {len(choice.layout.chunks)} chunks of weights and optimizer state, {', '.join(homes)}"
        f"{apart}{in_use}{kept_inputs}."
    )


def _updates(choice: PlanCandidate) -> float:
    seconds = choice.seconds
    return seconds.memory_update + seconds.disk_update


def _speed(asked: Asked) -> Iterator[str]:
    if asked.found.choice is None:
        return
    seconds = asked.found.choice.seconds
    speed = Figures.of_choice(asked.found.choice).tokens_per_second
    longest = max(("compute", "fetch", "offload"), key=lambda name: getattr(seconds, name))
    bound = {"compute": "compute", "fetch": "transfers to the GPU", "offload": "transfers from the GPU"}[longest]
    yield (
        f"A step takes about {seconds_text(seconds.step)}, {speed:,.0f} tokens a second on "
        f"all GPUs: {bound} {seconds_text(getattr(seconds, longest))}, waiting for blocks "
        f"{seconds_text(seconds.stall)}, collectives {seconds_text(seconds.exposed)}, "
        f"updates {seconds_text(_updates(asked.found.choice))}."
    )


def _reach(asked: Asked, *, helped: bool) -> Iterator[str]:
    """`helped`: something else is known to make it fit."""
    known, task, given = asked.known, asked.found.task, asked.given
    strategy = strategies.OURS_DISK if task.disk_bytes else strategies.OURS_HOST
    limit = given.positions or LARGEST["seq"][1]
    unit = _TOKENS if limit >= 8 * _TOKENS else 1
    by_seq = Sizes(lambda n: task_of(known, task.hardware, given, known.batch, min(n * unit, limit)))
    by_batch = Sizes(lambda n: task_of(known, task.hardware, given, n, known.seq))
    by_batch.tasks[known.batch] = task
    if known.seq % unit == 0:
        by_seq.tasks[known.seq // unit] = task
    most = -(-limit // unit)
    found = largest(lambda n: by_seq.spare_bytes(strategy, n), min(max(1, known.seq // unit), most), most)
    longest = min(found * unit, limit)
    start = max(1, known.batch * longest // known.seq)
    batch = largest(lambda n: by_batch.spare_bytes(strategy, n), start, LARGEST["batch"][1])
    if not longest and not batch:
        if not helped:
            yield "No sequence length and no batch fits."
        return
    all_of = ", all that the model has positions for" if longest == given.positions else ""
    whole = asked.tiles is None and tile_bytes(by_batch.at(batch + 1), None) is not None
    yield (
        f"It reaches sequences of {longest:,} tokens at batch {known.batch}{all_of}, or a batch of {batch:,} at "
        f"{known.seq:,} tokens{'; in tiles it may reach further' if whole else ''}."
    )


def _stick(asked: Asked) -> Iterator[str]:
    task, choice = asked.found.task, asked.found.choice
    if task.hardware.one_memory:
        return
    if choice is not None and not choice.plan.offloaded and not choice.task.kept_regions:
        yield "More host memory would change nothing: all state is on the GPUs."
        return
    ranks = min(task.gpus, task.hardware.gpus_per_node)
    found = searched(replace(task, host_bytes=task.host_bytes + STICK // ranks), asked.found.packings).choice
    one_more = f"One more stick of {size_text(STICK)} of host memory"
    if found is None:
        yield f"{one_more} would not be enough."
    elif choice is None:
        yield f"{one_more} makes it fit: about {seconds_text(found.seconds.step)} a step."
    elif found.seconds.step > (1 - _WORTH) * choice.seconds.step:
        yield f"{one_more} would change nothing."
    else:
        faster, now = seconds_text(found.seconds.step), seconds_text(choice.seconds.step)
        yield f"{one_more} makes a step take {faster} instead of {now}."


def _accumulation(asked: Asked) -> Iterator[str]:
    choice, task = asked.found.choice, asked.found.task
    if choice is None or _updates(choice) < _SLOW_UPDATE * choice.seconds.step:
        return
    each = (choice.seconds.step - _updates(choice)) / task.accumulation  # about, where several pass together
    backwards = task.accumulation
    while _updates(choice) > _AMORTISED * (_updates(choice) + backwards * each) and backwards < 2**10:
        backwards *= 2
    slow = f"Updates take {_updates(choice) / choice.seconds.step:.0%} of a step, once however many backwards it has"
    found = searched(replace(task, accumulation=backwards)).choice
    if found is None:
        yield f"{slow}: --accumulation would amortise them, but its sums of gradients do not fit."
    else:
        faster, now = (Figures.of_choice(one).tokens_per_second for one in (found, choice))
        yield (
            f"{slow}: --accumulation {backwards} amortises them, with {faster:,.0f} tokens a second instead of "
            f"{now:,.0f}."
        )


def _error(hardware: Hardware, ranks: int) -> str:
    """How far the seconds can be trusted."""
    if hardware.mean_error is not None:
        return (
            f"Error: predicted steps are {hardware.mean_error:.1%} off in the mean on the steps of dense GPTs measured "
            "on this machine, to which four constants are fitted (make paper-table). Other models may be further off."
        )
    assumed = hardware.of_origin("assumed")
    reference = Hardware.named(gpus.REFERENCE)
    there = f"{reference.mean_error:.1%} off in the mean on {reference.name}, where they were measured"
    if not assumed:
        return f"Error: unknown, no step of this machine was compared; the formulas are {there}."
    links = hardware.links(min(ranks, hardware.gpus_per_node))
    shown = []
    for name in assumed:
        value = getattr(links, name, None) or getattr(hardware, name, None)
        value = hardware.fitted.device_efficiency if name == "fitted" else value
        if value is not None:
            in_words = _IN_WORDS.get(name, f"{{:g}} as {name}")
            shown.append(in_words.format(size_text(value) if name == "cpu_bytes" else value))
    return f"Error: unknown, seconds stand on assumed constants: {', '.join(shown)}. The formulas are {there}."
