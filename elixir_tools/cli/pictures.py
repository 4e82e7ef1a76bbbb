"""The picture of `plan --largest`: bars of what fits.

Owns its appearance. Computes nothing; draws off screen and uses no global state of matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from elixir_tools.report.picture import png_asked_for


def draw_largest(path: Path, title: str, unit: str, found: Sequence[tuple[str, float | None, str]]) -> None:
    """Draws bars of the largest that fits under each strategy, like ZeRO-Infinity's Figure 6a.

    Args:
        path: the file to write.
        title: title of the picture.
        unit: what the bars count.
        found: (strategy, the bar's length or None, its label) in the order of the bars.

    Raises:
        ConfigError: `path` is not a PNG file that can be written.
    """
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.bar([name for name, *_ in found], [size or 0 for _, size, _ in found], color="tab:blue")
    axes.bar_label(bars, [label for *_, label in found], padding=3)
    axes.set(ylabel=unit, yscale="symlog" if any(size for _, size, _ in found) else "linear")
    axes.set_title(title.encode(errors="replace").decode(), parse_math=False, fontsize=10, wrap=True)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    with png_asked_for(path):
        figure.savefig(path, format="png")
