"""The Markdown page of a proof.

Owns its form. Imports only the standard library.
"""

from typing import Any

from benchmarks.proof.plan import MODELS, bench_name, compared, trace_name
from benchmarks.proof.steps import GOOD, Journal

GIB = 1 << 30


def page(journal: Journal) -> str:
    """Returns a Markdown page of the results so far."""
    machine = journal.figures("build") or {}
    lines = [
        f"# {journal.device or 'No GPU: toys on the CPU, and no figure means anything'}",
        "",
        ", ".join(f"{name}: {value}" for name, value in machine.items()),
        "",
    ]
    if rates := journal.figures("rates"):
        lines += [", ".join(f"{name}: {value:.3g}" for name, value in rates.items()), ""]
    if decoding := journal.figures("decoding"):
        lines += [f"| decoded to bf16 | {decoding['by']}, GB/s | torch's operators, GB/s |", "|---|---:|---:|"]
        for scheme, found in decoding["schemes"].items():
            gb = [found[name] / 1e9 for name in ("bytes_per_second", "by_torch_bytes_per_second")]
            lines.append(f"| {scheme} | {gb[0]:.3g} | {gb[1]:.3g} |")
        lines.append("")
    lines += ["| step | outcome | seconds | exit | status |", "|---|---|---:|---:|---|"]
    for name, result in journal.results.items():
        cells = [name, result["outcome"], result["seconds"], result["exit"], result["status"]]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    lines += ["", *_rows(journal), ""]
    for model in MODELS:
        if figures := journal.figures(trace_name(model)):
            lines += [f"## {figures['trace']}", "", *(f"- {line}" for line in figures["summary"]), ""]
    for name, result in journal.results.items():
        if result["tail"]:
            lines += [f"## {name}: {result['outcome']}", "", "```", result["tail"].strip(), "```", ""]
    return "\n".join(lines)


_HEAD = (
    "model", "layers", "parameters", "GiB limit", "micro-batches", "contender", "first loss", "tokens/s", "s/step",
    "expected s", "device GiB", "host GiB", "bound s", "limited by", "of the bound", "status",
)  # fmt: skip


def _rows(journal: Journal) -> list[str]:
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for accumulation in (1, 4):
        for model, (limit, peers) in MODELS.items():
            for contender in ("ours", *peers):
                result = journal.results.get(bench_name(model, contender, accumulation))
                if result is None:
                    continue
                row = compared(journal, model, contender, accumulation)
                what = [model, *([row["layers"], f"{row['parameters'] / 1e9:.3g} B"] if row else ["", ""])]
                what += [limit or "all", accumulation, contender]
                lines.append("| " + " | ".join(map(str, what + _figures(row, result))) + " |")
    return lines


def _figures(row: dict[str, Any] | None, result: dict[str, Any]) -> list[str]:
    if row is None:
        figures = result["figures"] or {}
        why = figures.get("left_out", "no rates" if result["outcome"] == GOOD else "see below")
        return [""] * 9 + [f"{result['outcome']}: {why}"]
    expected, peak = row["predicted_seconds"], row["device_peak_bytes"]
    return [
        f"{row['first_loss']:.3f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['seconds']:.3g}",
        "" if expected is None else f"{expected:.3g}",
        "" if peak is None else f"{peak / GIB:.1f}",
        f"{row['host_peak_bytes'] / GIB:.1f}",
        f"{row['bound_seconds']:.3g}",
        row["limited_by"],
        f"{row['of_bound']:.0%}",
        result["status"],
    ]
