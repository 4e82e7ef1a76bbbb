"""The pictures of `estimate` and `plan`: curves of efficiency, and bars of what fits.

Owns their appearance. Computes nothing; draws off screen and uses no global state of matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from elixir_tools.fit import zero_infinity
from elixir_tools.report.picture import png_asked_for

_PANELS: dict[zero_infinity.States, str] = {
    "gradients": "parameters and gradients",
    "optimizer": "optimizer states",
    "checkpoints": "activation checkpoints",
}
_POINTS = 200
"""Points of a curve."""


def draw_efficiency(path: Path) -> None:
    """Draws ZeRO-Infinity's Figure 3: efficiency against bandwidth, by batch or hidden size.

    Raises:
        ConfigError: `path` is not a PNG file that can be written.
    """
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
    with png_asked_for(path):
        figure.savefig(path, format="png")


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
