"""Bounds, predictions and published figures of fine-tuning: ``python docs/speed_of_light.py`` computes and prints them.

Owns the models, the machines, the formulas of the bounds and the tables between `MARK` and `END` in pages. A prediction
is that of `elixir-moe plan` on its date. Predictions are kept in docs/speed_of_light.json: the command computes missing
ones, ``--again`` adds those of today, and none is ever replaced, so that a measured step can be held against them.
docs/peers.json has what others have published.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from elixir_moe.chunks.plan import size_bytes, size_text
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import Packings, PlanCandidate, Task
from elixir_moe.wrapping.tiling import tile
from elixir_tools.cli.arguments import add_plan
from elixir_tools.fit import gpus
from elixir_tools.fit.search import fastest
from elixir_tools.fit.tasks import model_of, reserve_of, task_of

DOCS = Path(__file__).parent
KEPT = DOCS / "speed_of_light.json"
PEERS = DOCS / "peers.json"
MARK, END = re.compile(r"<!-- speed of light: (.+) -->\n"), "<!-- end -->"
"""A mark names a table of `TABLES`."""
SEQ, BATCHES = 4096, (4, 1)
"""Tokens of a sequence, and sequences of a GPU in a step: the first number that fits."""
DISK_BYTES = 4 * 10**12
_GIGA, _GIBI = 10**9, 2**30
_STATE, _ADAM, _WEIGHT = 12, 28, 2
"""Bytes of a trained element: its fp32 master and moments; what Adam reads and writes; its value or gradient in bf16.
"""

_QWEN = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
_QWEN_MOE = _QWEN | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_experts_per_tok": 4}  # fmt: skip


def _shape(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return base | shape | {"num_attention_heads": heads, "max_position_embeddings": 32768} | more


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _shape(_QWEN, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _shape(_QWEN, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Llama-3.1-8B": _shape(_LLAMA, 4096, 14336, 32, 32),
    "Qwen3-8B": _shape(_QWEN, 4096, 12288, 36, 32),
    "Qwen3-14B": _shape(_QWEN, 5120, 17408, 40, 40),
    "gpt-oss-20b": _shape(_GPT_OSS, 2880, 2880, 24, 64, num_local_experts=32),
    "Qwen3-30B-A3B": _shape(_QWEN_MOE, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3-32B": _shape(_QWEN, 5120, 25600, 64, 64),
    "Mixtral-8x7B": _shape(_LLAMA, 4096, 14336, 32, 32) | {"model_type": "mixtral", "vocab_size": 32000},
    "Llama-3.3-70B": _shape(_LLAMA, 8192, 28672, 80, 64),
    "gpt-oss-120b": _shape(_GPT_OSS, 2880, 2880, 36, 64, num_local_experts=128),
    "Qwen3-235B-A22B": _shape(_QWEN_MOE, 4096, 12288, 94, 64, moe_intermediate_size=1536),
}
"""The parts of each model's config.json that its family does not have by default."""

WAYS = ("full", "LoRA", "QLoRA")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine that people have."""

    name: str
    gpu: str
    """Its name in `elixir-moe plan`."""
    gpus: int = 1
    ram: str | None = None
    """Host memory; None where GPU and host share theirs."""

    @property
    def words(self) -> list[str]:
        """The arguments of `elixir-moe plan`."""
        memory = [] if self.ram is None else ["--ram", self.ram]
        return ["--gpu", self.gpu, "--gpus", str(self.gpus), *memory, "--disk-size", f"{DISK_BYTES // 10**12} TB"]

    @property
    def short(self) -> str:
        """Its name in one word, for tables."""
        return self.gpu if self.gpus == 1 else f"{self.gpus}×{self.gpu}"

    @property
    def hardware(self) -> Hardware:
        """The machine as `elixir-moe plan` describes it."""
        found = gpus.machine(self.gpu, self.gpus)
        if self.ram is not None:
            found = gpus.with_host(found, size_bytes("ram", self.ram) or 0)
        return gpus.with_disk(found, DISK_BYTES, None)


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(name="T4", gpu="t4", ram="64 GiB"),
        Machine(name="RTX 3060", gpu="rtx-3060", ram="64 GiB"),
        Machine(name="RTX 3090", gpu="rtx-3090", ram="128 GiB"),
        Machine(name="RTX 4090", gpu="rtx-4090", ram="128 GiB"),
        Machine(name="RTX 5090", gpu="rtx-5090", ram="192 GiB"),
        Machine(name="A6000", gpu="rtx-a6000", ram="256 GiB"),
        Machine(name="L4", gpu="l4", ram="128 GiB"),
        Machine(name="A100 40 GB", gpu="a100-40gb", ram="256 GiB"),
        Machine(name="A100 80 GB", gpu="a100-80gb", ram="512 GiB"),
        Machine(name="H100", gpu="h100", ram="512 GiB"),
        Machine(name="GB10", gpu="gb10"),
        Machine(name="2 × RTX 4090", gpu="rtx-4090", gpus=2, ram="256 GiB"),
        Machine(name="2 × RTX 5090", gpu="rtx-5090", gpus=2, ram="512 GiB"),
        Machine(name="8 × RTX 4090", gpu="rtx-4090", gpus=8, ram="1 TiB"),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The needs of a step on any machine: the part of a trace from which bounds are computed."""

    flops: int
    """Operations of matrix products and attention of one GPU: forward, recomputation and backward."""
    trained: int
    """Elements that Adam updates."""
    frozen_bytes: int
    passed: int
    """Elements of `trained` that a forward and a backward read as a whole: all but an embedding of its own."""
    passed_bytes: int
    """Bytes of all such weights, frozen ones included."""

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """The step of a trace."""
        trained = [p for p in profile.params if p.key.trainable]
        passed = [p for p in profile.params if p.tied or not p.name.endswith("embed_tokens.weight")]
        return cls(
            flops=profile.flops,
            trained=sum(p.numel for p in trained),
            frozen_bytes=sum(p.numel * p.key.dtype.itemsize for p in profile.params if not p.key.trainable),
            passed=sum(p.numel for p in passed if p.key.trainable),
            passed_bytes=sum(p.numel * p.key.dtype.itemsize for p in passed),
        )


def bound(step: Step, machine: Machine) -> dict[str, float]:
    """The least seconds of a step by each cause; docs/speed_of_light.md has the formulas.

    Rates are peaks of data sheets. A card is taken to have so many GiB as its sheet says GB.
    """
    n, hardware = machine.gpus, machine.hardware
    link, memory = gpus.peaks(machine.gpu, n)
    vram = hardware.gpu_bytes * _GIBI // _GIGA
    ram = 0 if hardware.one_memory else hardware.cpu_bytes
    assert hardware.disk_read is not None and hardware.disk_write is not None, "every machine here has a disk"
    on_gpus = min(step.trained, n * vram // _STATE)
    on_disk = max(0, _STATE * step.trained + step.frozen_bytes - n * vram - ram)
    frozen_on_disk = max(0, step.frozen_bytes - n * vram - ram)
    adam = _ADAM * on_gpus / n / (hardware.memory_bandwidth * _GIGA)
    found = {"compute": step.flops / (hardware.peak_tflops * 1e12)}
    if link is not None:
        # without a link between GPUs, all that one holds for another crosses its own link
        reach, parts = (n * vram, n) if hardware.peer_to_peer else (vram, 1)
        theirs = max(0, step.passed - min(step.passed // (n // parts), reach // _STATE))
        away = max(0, step.passed_bytes - reach)
        up, down = (max(_WEIGHT * theirs, away) + away) / parts, _WEIGHT * theirs / parts
        found["link"] = max(max(up, down) / link, n * (up + down) / memory) / _GIGA
        adam = max(adam, _ADAM * (step.trained - on_gpus) / (memory * _GIGA))
    read, written = max(on_disk, 2 * frozen_on_disk), on_disk - frozen_on_disk
    disk = max(read / hardware.disk_read, written / hardware.disk_write) / _GIGA
    return found | {"Adam": adam, "disk": disk}


def asked(model: str, way: str, batch: int, machine: Machine, folder: Path) -> argparse.Namespace:
    """The arguments of `elixir-moe plan` for one prediction; a config.json is written into the folder."""
    path = folder / f"{model}.json"
    path.write_text(json.dumps(MODELS[model]))
    words = [str(path), *machine.words, "--batch", str(batch), "--seq", str(SEQ), "--loss", "fused"]
    if way != "full":
        words += ["--lora", "r=16,targets=all-linear" + (",experts" if is_mixture(model) else "")]
        words += ["--quantize", "none" if way == "LoRA" else "mxfp4" if model.startswith("gpt-oss") else "nf4"]
    parser = argparse.ArgumentParser()
    add_plan(parser)
    return parser.parse_args(words)


def is_mixture(model: str) -> bool:
    """Whether the model has experts."""
    return MODELS[model]["model_type"] in ("gpt_oss", "qwen3_moe", "mixtral")


class Predictions:
    """The predictions for one model and way, each batch of which is traced once, and once for each size of tiles."""

    def __init__(self, model: str, way: str, folder: Path) -> None:
        self._asked: Callable[[int, Machine], argparse.Namespace] = lambda batch, machine: asked(
            model, way, batch, machine, folder
        )
        self._traced: dict[tuple[int, int | None, bool], Profile] = {}
        self._packed: dict[tuple[int, int | None, bool, int], Packings] = {}
        self.steps: dict[int, Step] = {}
        """By sequences of a GPU."""

    def on(self, machine: Machine) -> dict[str, Any]:
        """The prediction on a machine."""
        reason = ""
        for batch in BATCHES:
            found = fastest(partial(self._task, machine, batch), partial(self._packings, batch))
            if found.choice is not None:
                return self._entry(machine, batch, found.choice, found.tiles)
            reason = found.reason
        return {"fits": False, "reason": reason}

    def _task(self, machine: Machine, batch: int, tile_size: int | None) -> Task:
        known, hardware = self._asked(batch, machine), machine.hardware
        key = batch, tile_size, hardware.grouped_kernel
        if key not in self._traced:
            given = model_of(known, None)
            if tile_size is not None:
                wider = max(p.itemsize for p in given.model.parameters()) // 2  # a tile's bytes are those of bf16
                tile(given.model, at_most=tile_size * wider)
            single = argparse.Namespace(**vars(known) | {"gpus": 1})
            one = replace(machine, gpus=1).hardware
            self._traced[key] = task_of(single, one, given, batch, SEQ).profile
            self.steps.setdefault(batch, Step.of(self._traced[key]))
        profile = self._traced[key].over(machine.gpus)
        host = hardware.host_bytes_per_rank(machine.gpus) - reserve_of(known, hardware) // machine.gpus
        capacity = hardware.gpu_bytes
        if hardware.one_memory:
            capacity, host = min(capacity, host), 0
        return Task(profile=profile, hardware=hardware, gpus=machine.gpus, capacity_bytes=capacity, host_bytes=host,
                    disk_bytes=hardware.disk_bytes_per_rank(machine.gpus))  # fmt: skip

    def _packings(self, batch: int, task: Task, tile_size: int | None) -> Packings:
        key = batch, tile_size, task.hardware.grouped_kernel, task.gpus
        if key not in self._packed:
            self._packed[key] = Packings(task)
        return self._packed[key]

    def _entry(self, machine: Machine, batch: int, choice: PlanCandidate, tiles: int | None) -> dict[str, Any]:
        task, seconds = choice.task, choice.seconds
        device, host = task.held_bytes(choice.size)
        tokens = batch * SEQ * machine.gpus
        least = bound(self.steps[batch], machine)
        return {
            "fits": True,
            "sequences_per_gpu": batch,
            "tokens_per_step": tokens,
            "bound_seconds": {cause: _short(value) for cause, value in least.items()},
            "bound_tokens_per_second": _short(tokens / max(least.values())),
            "binds": max(least, key=least.__getitem__),
            "seconds": _short(seconds.step),
            "tokens_per_second": _short(tokens / seconds.step),
            "parts": {cause: _short(value) for cause, value in asdict(seconds).items() if value},
            "vram_gib_per_gpu": _gib(cost.device_peak(task.profile, device, task.imbalance)),
            "ram_gib": _gib((host + task.kept_bytes) * machine.gpus),
            "disk_gib": _gib(choice.size.disk_bytes * machine.gpus),
            "tile": None if tiles is None else size_text(tiles),
        }


def _gib(nbytes: float) -> float:
    return round(nbytes / _GIBI, 1)


def _short(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def kept() -> dict[str, Any]:
    """The computed results: steps by model, way and sequences; predictions by model, way and machine, by date."""
    if not KEPT.exists():
        return {"steps": {}, "predictions": {}}
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


def compute(models: list[str], ways: list[str], machines: list[str], *, again: bool) -> None:
    """Computes what is missing and writes it after each prediction; `again`: also adds those of today."""
    today = datetime.date.today().isoformat()
    with tempfile.TemporaryDirectory() as folder:
        for model, way in ((model, way) for model in models for way in ways):
            predictions = Predictions(model, way, Path(folder))
            for machine in machines:
                known = kept()["predictions"].get(model, {}).get(way, {}).get(machine, [])
                if known and (not again or known[-1]["date"] == today):
                    continue
                entry = {"date": today} | predictions.on(MACHINES[machine])
                everything = kept()
                steps = everything["steps"].setdefault(model, {}).setdefault(way, {})
                steps |= {str(batch): asdict(step) for batch, step in predictions.steps.items()}
                found = everything["predictions"].setdefault(model, {}).setdefault(way, {})
                found[machine] = [*found.get(machine, []), entry]
                KEPT.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
                print(model, way, machine, entry.get("tokens_per_second", "–"), file=sys.stderr, flush=True)


def entries(everything: dict[str, Any], *models: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(model, way, machine, latest prediction) of all that fit; of all models if none is given."""
    for model, machine, way in ((a, b, c) for a in models or MODELS for b in MACHINES for c in WAYS):
        entry = latest(everything, model, way, machine)
        if entry and entry["fits"]:
            yield model, way, machine, entry


def latest(everything: dict[str, Any], model: str, way: str, machine: str) -> dict[str, Any] | None:
    """The latest prediction; None if there is none yet."""
    found = everything["predictions"].get(model, {}).get(way, {}).get(machine, [])
    return found[-1] if found else None


def first_screen(everything: dict[str, Any]) -> list[str]:
    """Six models on four machines: tokens a second, GiB of VRAM and RAM."""
    found = {
        (model, way, name): latest(everything, model, way, name)
        for model in FIRST_MODELS
        for way in WAYS
        for name in FIRST_MACHINES
    }
    dates = sorted({entry["date"] for entry in found.values() if entry})
    heads = [f"{name}, {MACHINES[name].ram}" for name in FIRST_MACHINES]
    between = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    lines = [f"| predicted {between} | | {' | '.join(heads)} |", "|---|---|" + "--:|" * len(heads)]
    for model in FIRST_MODELS:
        for way in WAYS:
            cells = [_cell(found[model, way, name]) for name in FIRST_MACHINES]
            if not any(cells):
                continue
            lines.append(f"| {model} | {way} | {' | '.join(cells)} |")
    return lines


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    if not entry["fits"]:
        return "–"
    disk = f" + {entry['disk_gib']:,.0f} disk" if entry["disk_gib"] else ""
    return f"**{entry['tokens_per_second']:,.0f}** · {entry['vram_gib_per_gpu']:.0f} + {entry['ram_gib']:,.0f}{disk}"


def rows_of(model: str) -> Callable[[dict[str, Any]], list[str]]:
    """A table of all predictions of a model."""

    def lines(everything: dict[str, Any]) -> list[str]:
        heads = (
            "machine",
            "way",
            "tokens",
            "bound",
            "binds",
            "predicted",
            "of it",
            "longest",
            "step s",
            "VRAM",
            "RAM",
            "disk",
        )
        found = [f"|{'|'.join(heads)}|", "|---|---|--:|--:|---|--:|--:|---|" + "--:|" * 4]
        for _, way, name, entry in entries(everything, model):
            part = entry["tokens_per_second"] / entry["bound_tokens_per_second"]
            cells = (
                MACHINES[name].short,
                way,
                f"{entry['tokens_per_step']:,}",
                f"{entry['bound_tokens_per_second']:,.0f}",
            )
            cells += entry["binds"], f"{entry['tokens_per_second']:,.0f}", f"{part:.0%}"
            parts = entry["parts"]
            shown = parts | {"host_update": parts.get("host_update", 0.0) - parts.get("hidden_update", 0.0)}
            longest = max((part for part in _CAUSES if part in shown), key=shown.__getitem__)
            cells += _CAUSES[longest], f"{entry['seconds']:.3g}"
            cells += tuple(f"{entry[key]:,.0f}" for key in ("vram_gib_per_gpu", "ram_gib", "disk_gib"))
            found.append(f"|{'|'.join(cells)}|")
        return found

    return lines


def machines(_everything: dict[str, Any]) -> list[str]:
    """The figures of each machine that bounds are made of."""
    lines = ["|machine|GPU|VRAM|RAM|TFLOPS|VRAM GB/s|link GB/s|RAM GB/s|", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for name, machine in MACHINES.items():
        hardware, (link, memory) = machine.hardware, gpus.peaks(machine.gpu, machine.gpus)
        cells = (
            machine.short,
            name,
            f"{hardware.gpu_bytes / _GIGA:g}",
            (machine.ram or "shared").replace(" ", "\u00a0"),
            f"{hardware.peak_tflops:g}",
        )
        cells += f"{hardware.memory_bandwidth:g}", "–" if link is None else f"{link:g}", f"{memory:g}"
        lines.append(f"|{'|'.join(cells)}|")
    return lines


def published(everything: dict[str, Any]) -> list[str]:
    """Published results of others, next to the bound and the prediction for the same card."""
    heads = "system", "model, way", "card", "tokens/s", "VRAM", "note", "predicted", "bound", "source"
    lines = [f"|{'|'.join(heads)}|", "|---|---|---|--:|--:|---|--:|--:|---|"]
    for peer in json.loads(PEERS.read_text()):
        machine = peer.get("machine")
        entry = latest(everything, peer["model"], peer["way"], machine) if machine else None
        theirs = [f"{peer[key]:,.{digits}f}" if key in peer else "" for key, digits in _THEIRS]
        ours = [f"{entry[key]:,.0f}" if entry and entry["fits"] else "" for key in _RATES]
        source = f"[{peer['date']}]({peer['source']})" if peer["source"] else "reported; source not found by us"
        card = MACHINES[machine].short if machine else peer["card"]
        cells = peer["system"], f"{peer['model']}, {peer['way']}", card, *theirs, peer.get("note", ""), *ours, source
        lines.append(f"|{'|'.join(cells)}|")
    return lines


_CAUSES = {
    "compute": "compute",
    "fetch": "link",
    "offload": "link",
    "exposed": "GPUs",
    "device_update": "Adam",
    "host_update": "Adam",
    "disk": "disk",
    "disk_update": "disk",
}
"""{part of a predicted step: its cause in a word}."""
_THEIRS = ("tokens_per_second", 0), ("vram_gib", 1)
_RATES = "tokens_per_second", "bound_tokens_per_second"
FIRST_MODELS = "Llama-3.1-8B", "gpt-oss-20b", "Qwen3-30B-A3B", "Qwen3-32B", "Llama-3.3-70B", "gpt-oss-120b"
FIRST_MACHINES = "RTX 3060", "RTX 4090", "RTX 5090", "H100"
TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "six models": first_screen,
    "machines": machines,
    "published": published,
    **{model: rows_of(model) for model in MODELS},
}
"""{its name in a mark: a table's lines}."""


def write(*, check: bool = False) -> list[str]:
    """Writes all tables between their marks; returns the pages that were not so before. `check`: writes nothing."""
    everything, stale = kept(), []
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text()
        first, *rest = MARK.split(text)
        for name, after in zip(rest[::2], rest[1::2], strict=True):
            if name not in TABLES or END not in after:
                sys.exit(f"{page}: <!-- speed of light: {name} -->: expected one of {list(TABLES)}, and later {END}")
            lines = "".join(f"{line}\n" for line in TABLES[name](everything))
            first += f"<!-- speed of light: {name} -->\n{lines}{END}{after.partition(END)[2]}"
        if first != text:
            stale.append(page.name)
            if not check:
                page.write_text(first)
    return stale


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="also predict again what has been predicted before today")
    parser.add_argument("--write", action="store_true", help="write the tables and compute nothing")
    parser.add_argument("--model", nargs="*", choices=tuple(MODELS), default=list(MODELS), help="by default all")
    parser.add_argument("--way", nargs="*", choices=WAYS, default=list(WAYS), help="by default all")
    parser.add_argument("--machine", nargs="*", choices=tuple(MACHINES), default=list(MACHINES), help="by default all")
    options = parser.parse_args()
    if not options.write:
        compute(options.model, options.way, options.machine, again=options.again)
    write()
