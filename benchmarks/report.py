"""The results of a run: a table for people, JSON for programs, and the machine it was measured on.

Owns the formats. `build/bench.json`::

    {"machine": {...}, "rounds", "steps", "workloads": {key: {...}},
     "rows": [{"name", "peer", "workload", "ranks", "limit", "ratio", "spread": [low, high], "unit", "ours", "theirs",
               "note"}]}

`ratio` is the median over rounds of the times ours / peer, `spread` its quartiles; `ours` and `theirs` are medians in
`unit`, of a step or a call, or as a rate. A row without a peer has neither `theirs` nor a ratio: its `spread` and
`limit` are those of `ours`. One that could not be measured says why in `note` and has none of them. One whose limit
cannot hold on this kind of machine has no `limit`, and names it in `note`.
"""

import json
import os
import platform
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.workload import Workload, fresh_model
from elixir_moe.kernels import cpu_features
from elixir_moe.moe.experts import emulates

_EMULATED = ": this library's experts multiply in fp32 then, a peer's and all dense layers as torch does"


def machine(threads: int) -> dict[str, Any]:
    """The machine and versions that the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "threads_per_rank": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "adam_kernel": cpu_features(),
        "bf16_products": "emulated" if emulates(torch.bfloat16) else "native",
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def race_row(
    what: dict[str, Any], times: list[tuple[float, float]], unit: str = "ms", *, nbytes: int = 0
) -> dict[str, Any]:
    """The row of a race, told in `unit`; `times` are seconds (ours, theirs) of each round, in which `nbytes` move.

    Of "calls" and "bytes", they are numbers of those.
    """
    ratios = [ours / theirs for ours, theirs in times]
    tell = {
        "ms": lambda s: s * 1e3,
        "us": lambda s: s * 1e6,
        "GB/s": lambda s: nbytes / s / 1e9,
        "calls": float,
        "bytes": float,
    }[unit]
    return what | {
        "ratio": round(median(ratios), 4),
        "spread": spread(ratios),
        "unit": unit,
        "ours": round(tell(median(ours for ours, _ in times)), 2),
        "theirs": round(tell(median(theirs for _, theirs in times)), 2),
        "note": None,
    }


def host_row(name: str, limit: float | None, microseconds: list[float]) -> dict[str, Any]:
    """The row of a time that has no peer."""
    what = {"name": name, "peer": None, "workload": "gpt", "ranks": 1, "limit": limit, "ratio": None}
    ours = round(median(microseconds), 2)
    return what | {"spread": spread(microseconds), "unit": "us", "ours": ours, "theirs": None, "note": None}


def unmeasured_row(what: dict[str, Any], reason: str) -> dict[str, Any]:
    """A row that could not be measured here, and why."""
    return what | {"ratio": None, "spread": None, "unit": "ms", "ours": None, "theirs": None, "note": reason}


def without_limit(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A measured row whose limit is for another kind of machine, which `kind` names."""
    return row | {"limit": None, "note": f"the limit of {row['limit']} is for {kind}"}


def spread(values: list[float]) -> list[float]:
    """Lower and upper quartile."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(low, 4), round(high, 4)]


def markdown(result: dict[str, Any]) -> str:
    """The table, and the lines that say what was measured where."""
    m = result["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, gloo, {m['threads_per_rank']} thread a rank, torch {m['torch']}, Adam "
        f"kernel: {m['adam_kernel']}. Products in bf16 are {m['bf16_products']}"
        f"{_EMULATED * (m['bf16_products'] == 'emulated')}. Median and quartiles over {result['rounds']} rounds of "
        f"{result['steps']} steps each, ours and the peer in turn; three times as many of Adam, six times of the "
        f"host's work. Ratios are those of times, also where a rate is told.",
        "",
        "| ours | peer | workload | ranks | ours / peer | quartiles | limit | ours | peer's | unit |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        between = f"{row['spread'][0]:.3g} – {row['spread'][1]:.3g}" if row["spread"] else row["note"]
        cells = [row["name"], row["peer"], row["workload"], row["ranks"], row["ratio"], between, row["limit"]]
        lines.append("| " + " | ".join(_cell(c) for c in [*cells, row["ours"], row["theirs"], row["unit"]]) + " |")
    notes = [f"- {row['name']}: {row['note']}" for row in result["rows"] if row["note"] and row["spread"]]
    lines += [*[""] * bool(notes), *notes, *[""] * bool(result["workloads"])]
    for key, w in result["workloads"].items():
        size = f"sequence {w['seq_len']}, batch {w['batch']} a rank, {w['parameters'] / 1e6:.1f} M parameters"
        lines.append(f"- {key}: {w['name']}, {size}")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def describe(workload: Workload) -> dict[str, Any]:
    """The workload as it goes into the JSON."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in fresh_model(workload.model).parameters())
    return {
        "name": workload.name,
        "seq_len": workload.model.seq_len,
        "batch": workload.batch,
        "parameters": parameters,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Writes JSON to `path`, and the same as Markdown next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
