"""The command `plan --largest`: the deepest model, the largest batch or the longest sequence under each strategy.

Owns its output. Decides nothing: `fit.largest` searches.
"""

import argparse
import json
import time
from dataclasses import asdict

from elixir_moe.errors import ConfigError
from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.planner import Task
from elixir_tools.fit.largest import Found, Sizes, largest_each
from elixir_tools.fit.tasks import model_of, named, pretended_ranks, ranks_of, task_of
from elixir_tools.models import shapes
from elixir_tools.names import LARGEST

_START = {"model": 16, "batch": 16, "seq": 2048}
_ARGUMENT = {"model": "layers", "batch": "batch", "seq": "seq"}


def run_largest(known: argparse.Namespace, hardware: Hardware) -> int:
    """Prints the largest that fits under each strategy; returns 0, or 2 if nothing fits. Raises ConfigError."""
    unit, most = LARGEST[known.largest]
    asked = named(known)
    if known.largest == "model" and shapes.is_mixture(asked.name):
        raise ConfigError(f"--largest model: {asked.name} has layers of several kinds: name a dense model")
    started = time.perf_counter()
    with pretended_ranks(ranks_of(known)) as mesh:

        def task_at(size: int) -> Task:
            changed = {_ARGUMENT[known.largest]: size}
            given = model_of(known, mesh, **changed)
            sizes = {"batch": known.batch, "seq": known.seq} | changed
            return task_of(known, hardware, given, sizes["batch"], sizes["seq"])

        sizes = Sizes(task_at)
        found = list(largest_each(sizes, _START[known.largest], most, disk=bool(hardware.disk_bytes)))
    report = {
        "model": asked.name,
        "gpus": known.gpus,
        "batch_per_gpu": known.batch,
        "seq": known.seq,
        "largest": known.largest,
        "unit": unit,
        "rows": [asdict(row) for row in found],
        "sizes_traced": len(sizes.tasks),
        "search_seconds": time.perf_counter() - started,
    }
    title = f"{report['model']} on {known.gpus} x {hardware.name}, {_kept(known)}"
    if known.picture is not None:
        from elixir_tools.report.picture import draw_largest  # matplotlib takes a second to load

        draw_largest(known.picture, title, _AXIS[known.largest], [_bar(known.largest, row) for row in found])
    print(json.dumps(report) if known.json else _as_text(title, unit, found, report))
    return 0 if any(row.size for row in found) else 2


_AXIS = {"model": "parameters (billions)", "batch": "sequences of a GPU", "seq": "tokens of a sequence"}


def _kept(known: argparse.Namespace) -> str:
    """The sizes that do not change."""
    return {
        "model": f"layers added or removed at its width, batch {known.batch}, {known.seq} tokens",
        "batch": f"sequences of {known.seq} tokens",
        "seq": f"batch {known.batch}, with as many positions as tokens",
    }[known.largest]


def _bar(largest: str, row: Found) -> tuple[str, float | None, str]:
    length = row.parameters / 1e9 if largest == "model" and row.size else row.size
    shown = "no disk" if length is None else f"{length:,.3g}" if isinstance(length, float) else f"{length:,}"
    return row.strategy, length, shown + "+" * row.more


def _as_text(title: str, unit: str, found: list[Found], report: dict[str, object]) -> str:
    lines = [title, f"{'strategy':14} {unit:>9} {'parameters':>18}"]
    for row in found:
        size = "-" if row.size is None else f"{row.size:,}"
        note = "  no disk in the hardware file" if row.size is None else "  or more" if row.more else ""
        lines.append(f"{row.strategy:14} {size:>9} {row.parameters:18,}{note}")
    lines.append(f"searched in {report['search_seconds']:.2f} s, {report['sizes_traced']} sizes traced")
    return "\n".join(lines)
