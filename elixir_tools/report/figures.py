"""Charts as SVG, drawn by matplotlib: lines over steps, spans on lanes, loads of experts.

Owns how a chart looks, and the way from a figure of matplotlib to SVG whose text stays text and whose colors are those
of the page. Computes nothing about a training, and reads no file.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from elixir_moe.ext.page import document
from elixir_moe.ext.plans import seconds_text

WIDTH = 360
"""Points of a chart's width: on a screen 420 pixels wide a point is a pixel."""
FONT = 10.5
_MOST_POINTS = 600
"""Points of a line; of more, the least and the largest of each part are drawn."""
_LOG_FROM = 30
"""Values that reach this many times their median, all above 0, get a logarithmic axis."""
_LOADS = 20
"""Rows of loads that are all named; of more, each fourth is."""
_ROWS = 3
"""Rows of words at vertical lines."""
_CHARACTER = 0.62
"""Width of a character, in sizes of the font."""

Style = Literal["line", "faint", "dots", "dashed"]
_LINES: dict[Style, dict[str, Any]] = {
    "line": {"linewidth": 1.8},
    "faint": {"linewidth": 0.9, "alpha": 0.35},
    "dots": {"linewidth": 1.0, "marker": "o", "markersize": 4.5},
    "dashed": {"linewidth": 1.5, "linestyle": (0, (4, 2.5))},
}
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    points: Sequence[Point]
    """(step, value), in the order of the steps."""
    color: str = document.SERIES[0]
    style: Style = "line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that ran for a while, on a lane of a timeline."""

    lane: str
    name: str
    begin: float
    """Seconds."""
    end: float
    color: str = ""
    """Its own color; left out, its lane's."""


def light(color: str) -> str:
    """The color as a figure has it, before the page's takes its place."""
    return document.COLORS[color][0]


def number_text(value: float) -> str:
    """A number in at most six characters or so: 12k, 1.25M, 3.142, 2e-04."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (size if size > 1e4 else 1e3):.4g}{letter}"
    return f"{value:,.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def panel(height: float) -> tuple[Figure, Axes]:
    """An empty figure of so many points in height, and its axes without a frame."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, labelsize=FONT, colors=light("text"))
    return figure, axes


def lines(
    series: Sequence[Series],
    *,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Values over steps; every line has a point at least.

    `marks` are vertical lines; words of them that would meet are in three rows, and the rest is left out.
    """
    figure, axes = panel(185)
    for one in series:
        steps, values = zip(*thinned(one.points), strict=True)
        style = _LINES["dots" if len(steps) == 1 else one.style]
        axes.plot(steps, values, color=light(one.color), gid=f"={one.label}", solid_capstyle="round", **style)
    axes.margins(x=0.01, y=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    drawn = np.array([value for one in series for _, value in one.points])
    if not from_zero and drawn.min() > 0 and drawn.max() > _LOG_FROM * np.median(drawn):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if from_zero:
            axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axes.grid(axis="y", color=light("grid"), linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines.bottom.set(visible=True, color=light("grid"))
    axes.set_xlabel("step", loc="right", fontsize=FONT, color=light("quiet"), labelpad=0)
    left, right = axes.get_xlim()
    free = [left] * _ROWS
    for step, word in sorted(marks):
        axes.axvline(step, color=light("quiet"), linewidth=0.8, linestyle=(0, (2, 3)))
        width = (len(word) + 1) * _CHARACTER * FONT * (right - left) / (WIDTH - 50)
        at = min(step, right - width)
        row = next((row for row in range(_ROWS) if free[row] <= at), None)
        if row is not None:
            axes.annotate(word, (at, 1), xycoords=("data", "axes fraction"), xytext=(2, -2 - 11 * row), va="top",
                          textcoords="offset points", fontsize=FONT - 1, color=light("quiet"))  # fmt: skip
            free[row] = at + width
    return figure


def lanes(spans: Sequence[Span]) -> Figure:
    """Draws what ran when: a lane for each kind, in the order of their first span. Names need room."""
    names = list(dict.fromkeys(span.lane for span in spans))
    figure, axes = panel(24 * len(names) + 22)
    begin = min(span.begin for span in spans)
    whole = max(span.end for span in spans) - begin or 1e-9
    a_point = whole / (WIDTH - 70)
    for i, lane in enumerate(names):
        mine = [span for span in spans if span.lane == lane]
        colors = [span.color or document.SERIES[i % len(document.SERIES)] for span in mine]
        reach = [(span.begin - begin, max(span.end - span.begin, a_point / 2)) for span in mine]
        axes.broken_barh(reach, (i - 0.4, 0.8), facecolor=[*map(light, colors)], linewidth=0, gid=f"={lane}")
        for span, color, (left, width) in zip(mine, colors, reach, strict=True):
            if span.name and len(span.name) * _CHARACTER * (FONT - 1) * a_point < width:
                axes.text(left + width / 2, i + 0.03, span.name, ha="center", va="center", fontsize=FONT - 1,
                          color=light("quiet" if color == "grid" else "inside"))  # fmt: skip
    axes.set(xlim=(0, whole), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value) if value else "0"))
    axes.grid(axis="x", color=light("grid"), linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def loads(rows: Sequence[tuple[str, Sequence[float]]]) -> Figure:
    """Each row's values against its largest, from transparent to the color, a cell a value."""
    every = 1 if len(rows) <= _LOADS else 4
    figure, axes = panel(max((15 if every == 1 else 6) * len(rows) + 22, 60))
    most = max(len(values) for _, values in rows)
    cells = np.zeros((len(rows), most, 4))
    cells[..., :3] = to_rgb(light("device2"))
    for i, (_, values) in enumerate(rows):
        cells[i, : len(values), 3] = np.array(values) / (max(values) or 1)
    axes.imshow(cells, aspect="auto", interpolation="none", extent=(-0.5, most - 0.5, len(rows) - 0.5, -0.5))
    axes.set(yticks=range(0, len(rows), every), yticklabels=[name for name, _ in rows[::every]])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("expert", loc="right", fontsize=FONT, color=light("quiet"), labelpad=0)
    axes.spines[:].set(visible=True, color=light("grid"))
    return figure


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS`, or a few more: the least and the largest of equal parts, and the last."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    kept: list[Point] = []
    for part in np.array_split(np.array(points), _MOST_POINTS // 2):
        ends = sorted({int(part[:, 1].argmin()), int(part[:, 1].argmax())})
        kept += [(float(part[i, 0]), float(part[i, 1])) for i in ends]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def literal(figure: Figure) -> None:
    """Shows each text as it is: a name with "$" is not a formula."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)


def _rounded(attribute: re.Match[str]) -> str:
    """Places to a hundredth of a point."""
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), attribute[0])


def svg(figure: Figure, said: str) -> str:
    """The figure as SVG without a width of its own, in the page's colors; `said` is what it shows, for those who hear.

    The name that a `gid` gives behind a "=" becomes ``data-label``.
    """
    written = io.StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "elixir-moe"}  # so that ids are the same each time
    with rc_context(settings):
        literal(figure)
        figure.savefig(written, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
    text = written.getvalue()
    box = re.search(r'viewBox="([^"]+)"', text)
    body = text[text.index("</metadata>") + len("</metadata>") :]
    assert box is not None
    body = re.sub(r"<style[^>]*>.*?</style>|<defs/>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r' id="=([^"]*)"', r' data-label="\1"', body)
    body = re.sub(r' id="([xy])tick_\d+"', r' class="\1"', body)
    body = re.sub(r' id="[A-Za-z0-9]+(?:\.[a-z]+)?_\d+"', "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*; ?', "", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r' (?:d|x|y|width|height|transform)="[^"]*"', _rounded, body)
    body = document.themed(re.sub(r"\s*\n\s*", " ", body).replace("xlink:href", "href"))
    label = escape(said, quote=True)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{label}">{body}'
