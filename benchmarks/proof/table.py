"""The Markdown page of a proof.

Owns its form. Imports only the standard library.
"""

from typing import Any

from benchmarks.proof.plan import ROWS, bench_name, compared
from benchmarks.proof.steps import Journal

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
    for name in journal.results:
        if "summary" in (figures := journal.figures(name) or {}):
            lines += [f"## {figures['trace']}", "", *(f"- {line}" for line in figures["summary"]), ""]
    for name, result in journal.results.items():
        if result["tail"]:
            lines += [f"## {name}: {result['outcome']}", "", "```", result["tail"].strip(), "```", ""]
    return "\n".join(lines)


_HEAD = (
    "model", "layers", "parameters", "GiB limit", "micro-batches", "contender", "losses", "loss gap", "tokens/s",
    "of ours", "s/step", "expected s", "build s", "device GiB", "host GiB", "bound s", "limited by", "of the bound",
    "status",
)  # fmt: skip


def _rows(journal: Journal) -> list[str]:
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for accumulation, models in ROWS.items():
        for model, (limit, peers) in models.items():
            for contender in ("ours", *peers):
                result = journal.results.get(bench_name(model, contender, accumulation))
                if result is None:
                    continue
                row = compared(journal, model, contender, accumulation)
                what = [model, *([row["layers"], f"{row['parameters'] / 1e9:.3g} B"] if row else ["", ""])]
                what += [limit, accumulation, contender]
                lines.append("| " + " | ".join(map(str, what + _figures(row, result))) + " |")
    return lines


def _figures(row: dict[str, Any] | None, result: dict[str, Any]) -> list[str]:
    if row is None:
        figures = result["figures"] or {}
        why = figures.get("left_out", "see below")
        return [""] * (len(_HEAD) - 7) + [f"{result['outcome']}: {why}"]

    def cell(name: str, form: str, unit: float = 1) -> str:
        return "" if row.get(name) is None else format(row[name] / unit, form)

    return [
        f"{row['losses'][0]:.3f} … {row['losses'][-1]:.3f}",
        cell("loss_gap", ".1e"),
        cell("tokens_per_second", ".0f"),
        cell("of_ours", ".2f"),
        cell("seconds", ".3g"),
        cell("predicted_seconds", ".3g"),
        cell("build_seconds", ".0f"),
        cell("device_peak_bytes", ".1f", GIB),
        cell("host_peak_bytes", ".1f", GIB),
        cell("bound_seconds", ".3g"),
        row.get("limited_by", ""),
        cell("of_bound", ".0%"),
        result["status"],
    ]
