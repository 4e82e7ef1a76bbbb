"""The printed figures of ZeRO-Infinity, and the results of its formulas: part of ``make paper-table``.

Without an argument: Table 4 and the figures that the text of sections 7.2 to 7.6 has. With the name of a table, that
table, and with ``--picture FILE.png`` the curves of its Figure 3.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import zero_infinity

_PANELS: dict[zero_infinity.States, str] = {
    "gradients": "parameters and gradients",
    "optimizer": "optimizer states",
    "checkpoints": "activation checkpoints",
}
_POINTS = 200
"""Points of a curve."""


def compared(table: str) -> Iterator[tuple[str, float, float]]:
    """(what, printed, ours) of each figure."""
    for row in zero_infinity.rows_of(table):
        for name, text in row["printed"].items():
            yield row.get("says", f"{row.get('model')} {name}"), float(text), row[name]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table, or the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_zero_infinity", description=__doc__)
    parser.add_argument("table", nargs="?", choices=tuple(zero_infinity.TABLES))
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw Figure 3 as PNG")
    known = parser.parse_args([] if arguments is None else arguments)
    if known.picture is not None:
        draw_efficiency(known.picture)
    elif known.table is not None:
        print("\n".join(table_lines(zero_infinity.rows_of(known.table))))
    else:
        _show_comparison()


def _show_comparison() -> None:
    for table, title in (("table-4", "Table 4"), ("text", "text of 7.2 to 7.6")):
        print(f"ZeRO-Infinity, {title}")
        for what, printed, ours in compared(table):
            print(f"{printed:8g} {ours:8.4g} {ours / printed - 1:+7.1%}  {what}")
    print("Figures 1, 5 and 6b to 6e are pictures, with single figures in the text")
    print("For Figure 6a see `elixir-moe plan --largest model` on a DGX-2 (docs)")


def table_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows under their column names, which are repeated where they change. Printed figures are in brackets, with a
    star if they are not what the formula gives; the reasons follow."""
    reasons = dict[str, str]()
    block: list[list[str]] = []
    for i, row in enumerate(rows):
        stars, printed = row.get("departs", {}), row.get("printed", {})
        shown = {name: value for name, value in row.items() if name not in ("departs", "printed")}
        reasons |= {f"{name} {printed[name]}": why for name, why in stars.items()}
        cells = [_cell(value, printed.get(name), starred=name in stars) for name, value in shown.items()]
        block = block or [[*shown]]
        block.append(cells)
        if i + 1 == len(rows) or rows[i + 1].keys() != row.keys():
            widths = [max(map(len, column)) for column in zip(*block, strict=True)]
            yield from ("  ".join(map(str.rjust, line, widths)).rstrip() for line in block)
            block = []
    yield from (f"* {what}: {why}" for what, why in reasons.items())


def _cell(value: Any, printed: str | None, *, starred: bool) -> str:
    """A value, with as many digits as the paper prints; halves are rounded up, as in the papers."""
    if not isinstance(value, float):
        return str(value)
    digits = 2 if printed is None else len(printed.partition(".")[2])
    text = f"{value + 1e-9:.{digits}f}"
    return text if printed is None else f"{text} ({printed}{'*' * starred})"


def draw_efficiency(path: Path) -> None:
    """Draws ZeRO-Infinity's Figure 3: efficiency against bandwidth, by batch or hidden size."""
    figure = Figure(figsize=(12, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for axes, (states, title) in zip(panels, _PANELS.items(), strict=True):
        low, high = zero_infinity.BANDWIDTHS[states][0], zero_infinity.BANDWIDTHS[states][-1]
        bandwidths = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
        for name, case in zero_infinity.cases_of(states).items():
            points = [100 * zero_infinity.curve(states, case, gb_s * 1e9) for gb_s in bandwidths]
            axes.plot(bandwidths, points, label=name.replace("_", " "))
        axes.set(xscale="log", xlabel="GB/s of a GPU" if states != "optimizer" else "GB/s of all GPUs", title=title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
    panels[0].set(ylabel=f"efficiency at {zero_infinity.PEAK / 1e12:.0f} TFLOPS (%)", ylim=(0, 100))
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main(sys.argv[1:])
