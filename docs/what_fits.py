"""Which known models fit which machines: ``python docs/what_fits.py`` computes the answers and writes the table.

Owns the models, the machines and the form of the table in README.md and docs/fit.md. An answer is that of
`elixir-moe plan`: the model is traced without data, and either some plan fits or none does. Answers are kept in
docs/what_fits.json with their date, since all of them take many minutes; only missing ones are computed.
"""

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from elixir_moe.chunks.plan import size_bytes
from elixir_moe.cli.arguments import add_plan
from elixir_moe.cli.tasks import model_of, reserve_of, task_of
from elixir_moe.errors import ConfigError
from elixir_moe.search import gpus
from elixir_moe.search.profile import Profile
from elixir_moe.search.solve import Packings, Task, device_bytes_for
from elixir_moe.search.tile_size import tile_bytes
from elixir_moe.setup.tiling import tile

DOCS = Path(__file__).parent
ANSWERS = DOCS / "what_fits.json"
PAGES = DOCS.parent / "README.md", DOCS / "fit.md"
BEGIN, END = "<!-- what fits: python docs/what_fits.py -->", "<!-- end -->"
SEQ = 4096

_QWEN = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
_QWEN_MOE = _QWEN | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_experts_per_tok": 4}  # fmt: skip


def _shape(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return base | shape | {"num_attention_heads": heads, "max_position_embeddings": 32768} | more


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": _shape(_QWEN, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _shape(_QWEN, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Llama-3.1-8B": _shape(_LLAMA, 4096, 14336, 32, 32),
    "Qwen3-14B": _shape(_QWEN, 5120, 17408, 40, 40),
    "gpt-oss-20b": _shape(_GPT_OSS, 2880, 2880, 24, 64, num_local_experts=32),
    "Qwen3-30B-A3B": _shape(_QWEN_MOE, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3-32B": _shape(_QWEN, 5120, 25600, 64, 64),
    "Mixtral-8x7B": _shape(_LLAMA, 4096, 14336, 32, 32) | {"model_type": "mixtral", "vocab_size": 32000},
    "Llama-3.3-70B": _shape(_LLAMA, 8192, 28672, 80, 64),
    "gpt-oss-120b": _shape(_GPT_OSS, 2880, 2880, 36, 64, num_local_experts=128),
    "Qwen3-235B-A22B": _shape(_QWEN_MOE, 4096, 12288, 94, 64, moe_intermediate_size=1536),
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
}
"""The parts of each model's config.json that its family does not have by default."""

MACHINES: dict[str, list[str]] = {
    "RTX 3090, 64 GiB": ["--gpu", "rtx-3090", "--host-memory", "64 GiB"],
    "RTX 4090, 128 GiB": ["--gpu", "rtx-4090", "--host-memory", "128 GiB"],
    "2 × RTX 5090, 192 GiB": ["--gpu", "rtx-5090", "--gpus", "2", "--host-memory", "192 GiB"],
    "2 × A6000, 256 GiB": ["--gpu", "rtx-a6000", "--gpus", "2", "--host-memory", "256 GiB"],
    "H100, 512 GiB": ["--gpu", "h100", "--host-memory", "512 GiB"],
    "8 × H100, 2 TiB": ["--gpu", "h100", "--gpus", "8", "--host-memory", "2 TiB"],
}
"""The words of `elixir-moe plan` for each machine."""
DISK_BYTES = 4 * 10**12

WAYS = {"full": "F", "LoRA": "L", "QLoRA": "Q"}
"""Each way to train, and its letter in the short table."""


def asked(model: str, machine: str, way: str, folder: Path) -> argparse.Namespace:
    """The arguments of `elixir-moe plan` for one answer; a config.json is written into the folder."""
    path = folder / f"{model}.json"
    path.write_text(json.dumps(MODELS[model]))
    words = ["--hf", str(path), *MACHINES[machine], "--batch", "1", "--seq", str(SEQ), "--loss", "fused"]
    if way != "full":
        words += ["--lora", "r=16,targets=all-linear" + (",experts" if mixture(model) else "")]
        words += ["--quantize", "none" if way == "LoRA" else "mxfp4" if model.startswith("gpt-oss") else "nf4"]
    parser = argparse.ArgumentParser()
    add_plan(parser)
    return parser.parse_args(words)


def mixture(model: str) -> bool:
    """Whether the model has experts."""
    return MODELS[model]["model_type"] in ("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3")


class Answers:
    """The answers for one model and way, which is traced once for each number of GPUs and size of tiles."""

    def __init__(self, model: str, way: str, folder: Path) -> None:
        self._known = {machine: asked(model, machine, way, folder) for machine in MACHINES}
        self._traced: dict[tuple[int, int | None], Profile] = {}

    def on(self, machine: str) -> str | None:
        """The tier that holds what the device does not: "memory" or "disk"; None if nothing fits even with the disk."""
        return next((tier for tier in ("memory", "disk") if self._fits(machine, disk=tier == "disk")), None)

    def _fits(self, machine: str, *, disk: bool) -> bool:
        whole = self._task(machine, None, disk=disk)
        packings = Packings(whole)
        if _fits(whole, packings):
            return True
        size = tile_bytes(whole, None, packings)
        if size is None:
            return False
        try:
            tiled = self._task(machine, size, disk=disk)
        except ConfigError:  # something in the model cannot be cut, as `elixir-moe plan` would say
            return False
        return _fits(tiled, Packings(tiled))

    def _task(self, machine: str, tile_size: int | None, *, disk: bool) -> Task:
        known = self._known[machine]
        hardware = gpus.machine(known.gpu, known.gpus)
        hardware = gpus.with_host(hardware, size_bytes("--host-memory", known.host_memory) or 0)
        if disk:
            hardware = gpus.with_disk(hardware, DISK_BYTES, None)
        if (known.gpus, tile_size) in self._traced:
            profile = self._traced[known.gpus, tile_size]
            host = hardware.host_bytes_per_rank(known.gpus) - reserve_of(known, hardware) // known.gpus
            room = hardware.disk_bytes_per_rank(known.gpus)
            capacity = hardware.gpu_bytes
            return Task(profile=profile, hardware=hardware, gpus=known.gpus, capacity_bytes=capacity, host_bytes=host,
                        disk_bytes=room)  # fmt: skip
        given = model_of(known, None)
        if tile_size is not None:
            wider = max(p.itemsize for p in given.model.parameters()) // 2  # a tile's bytes are those of bf16
            tile(given.model, at_most=tile_size * wider)
        task = task_of(known, hardware, given, known.batch, known.seq)
        self._traced[known.gpus, tile_size] = task.profile
        return task


def _fits(task: Task, packings: Packings) -> bool:
    return device_bytes_for(task, packings) <= task.allowed_bytes


def compute() -> None:
    """Computes what the file does not have yet, and writes it after each model and way."""
    kept = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {"date": "", "answers": {}}
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            found = kept["answers"].setdefault(model, {})
            for way in WAYS:
                if way not in found:
                    answers = Answers(model, way, Path(folder))
                    found[way] = {machine: answers.on(machine) for machine in MACHINES}
                    kept["date"] = datetime.date.today().isoformat()
                    ANSWERS.write_text(json.dumps(kept, indent=1) + "\n")
                    print(model, way, found[way], file=sys.stderr, flush=True)


def table() -> str:
    """The letters of all answers."""
    kept = json.loads(ANSWERS.read_text())
    lines = [f"| {kept['date']} | {' | '.join(MACHINES)} |", "|---|" + "---|" * len(MACHINES)]
    for model in (model for model in MODELS if set(kept["answers"].get(model, ())) == set(WAYS)):
        ways = kept["answers"][model]
        cells = ["".join(_letter(way, ways[way][machine]) for way in WAYS) for machine in MACHINES]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _letter(way: str, tier: str | None) -> str:
    return {"memory": WAYS[way].upper(), "disk": WAYS[way].lower(), None: "–"}[tier]


def write() -> None:
    """Writes the table between its marks in README.md and docs/fit.md."""
    for page in PAGES:
        before, begin, rest = page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            sys.exit(f"{page} has no marks {BEGIN} and {END}")
        page.write_text(f"{before}{begin}\n{table()}{end}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="compute all answers, not only those that are missing")
    parser.add_argument("--write", action="store_true", help="compute nothing")
    options = parser.parse_args()
    if options.anew:
        ANSWERS.unlink(missing_ok=True)
    if not options.write:
        compute()
    write()
