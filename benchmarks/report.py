"""What a run leaves behind: a table for people, JSON for programs, and the machine it was measured on.

Owns the formats. `build/bench.json`::

    {"machine": {...}, "workload": {...},
     "rows": [{"name", "peer", "ranks", "ratio", "spread": [low, high], "limit", "unit", "ours", "theirs"}]}

`ratio` is the median over rounds of ours / peer, `spread` its quartiles; `ours` and `theirs` are medians in `unit`. A
row without a peer has neither `theirs` nor a ratio: its `spread` and `limit` are those of `ours`.
"""

import json
import os
import platform
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.rows import Workload
from elixir_moe.kernels import cpu_features


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "threads_per_rank": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "adam_kernel": cpu_features(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def step_row(name: str, peer: str, ranks: int, limit: float | None, times: list[tuple[float, float]]) -> dict[str, Any]:
    """The row of a race; `times` are seconds a step (ours, theirs) of each round."""
    ratios = [ours / theirs for ours, theirs in times]
    return {
        "name": name,
        "peer": peer,
        "ranks": ranks,
        "ratio": round(median(ratios), 4),
        "spread": spread(ratios),
        "limit": limit,
        "unit": "ms/step",
        "ours": round(median(ours for ours, _ in times) * 1e3, 2),
        "theirs": round(median(theirs for _, theirs in times) * 1e3, 2),
    }


def host_row(name: str, limit: float | None, microseconds: list[float]) -> dict[str, Any]:
    """The row of a time that has no peer."""
    ours = round(median(microseconds), 2)
    row = {"name": name, "peer": None, "ranks": 1, "ratio": None, "spread": spread(microseconds), "limit": limit}
    return row | {"unit": "us", "ours": ours, "theirs": None}


def spread(values: list[float]) -> list[float]:
    """Lower and upper quartile."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(low, 4), round(high, 4)]


def markdown(result: dict[str, Any]) -> str:
    """The table, and the line that says what was measured where."""
    m, w = result["machine"], result["workload"]
    lines = [
        f"{w['name']}, sequence {w['seq_len']}, batch {w['batch']} a rank, {w['parameters'] / 1e6:.1f} M parameters; "
        f"{m['cpu']}, {m['cores']} cores, gloo, {m['threads_per_rank']} thread a rank, torch {m['torch']}, "
        f"Adam kernel: {m['adam_kernel']}.",
        f"Median and quartiles over {w['rounds']} rounds of {w['steps']} steps each, ours and the peer in turn.",
        "",
        "| ours | peer | ranks | ours / peer | quartiles | limit | ours | peer's | unit |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        low, high = row["spread"]
        cells = [row["name"], row["peer"], row["ranks"], row["ratio"], f"{low:.3g} – {high:.3g}", row["limit"]]
        lines.append("| " + " | ".join(_cell(c) for c in [*cells, row["ours"], row["theirs"], row["unit"]]) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def describe(workload: Workload, parameters: int, rounds: int, steps: int) -> dict[str, Any]:
    """The workload as it goes into the JSON."""
    return {
        "name": workload.name,
        "seq_len": workload.model.seq_len,
        "batch": workload.batch,
        "parameters": parameters,
        "rounds": rounds,
        "steps": steps,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """`path` and, beside it, the same as Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
