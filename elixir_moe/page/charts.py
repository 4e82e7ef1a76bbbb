"""Charts as inline SVG: lines over steps, stacked bars, a heat map, a timeline.

Owns the geometry of every chart and its figures in words. Colors are classes, which `document` fills in for light,
dark and print. A chart says its values in text beside the marks, since nobody can point at paper. Computes nothing
about a training, and reads no file.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from elixir_moe.chunks.plan import seconds_text

_WIDTH = 440
"""Units of every drawing's width: those of text of 11 units stay readable on 400 pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 8, 34
_HEIGHT = 210
_MOST_POINTS = 600
"""Points of a line; of more, the least and the largest of each part are drawn."""
_CHARACTER = 6.2
"""Width of a character of 11 units, roughly."""

Style = Literal["line", "faint", "dots", "dashed"]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    points: Sequence[Point]
    """(step, value), in the order of the steps."""
    color: int = 0
    """Number of a color of the palette."""
    style: Style = "line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a stacked bar."""

    label: str
    size: float
    color: str
    """Name of a class of the palette, such as ``host``."""
    text: str = ""
    """What is written inside, if it has room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that ran for a while, on a lane of a timeline."""

    lane: str
    name: str
    begin: float
    """Seconds."""
    end: float


def number_text(value: float) -> str:
    """A number in at most six characters or so: 12,345, 3.142, 0.00021."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def lines(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    text: Callable[[float], str] = number_text,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A chart of values over steps; empty without a point.

    Args:
        title: what is drawn.
        series: the lines.
        unit: of the values.
        text: writes a value, on the axis and in the legend.
        from_zero: whether the axis of values begins at 0.
        marks: (step, word) of vertical lines.
    """
    series = [one for one in series if one.points]
    if not series:
        return ""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_ticks = ticks(min(xs), max(xs), 5, whole=True)
    y_ticks = ticks(0 if from_zero else min(ys), max(ys), 4)
    low, high = min(*ys, *y_ticks, *([0] if from_zero else [])), max(*ys, *y_ticks)
    first, last = min(*xs, *x_ticks), max(*xs, *x_ticks)

    def at(x: float, y: float) -> str:
        across = _LEFT + (x - first) / ((last - first) or 1) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - low) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.2f},{down:.2f}"

    drawn = []
    for y in y_ticks:
        left, down = at(first, y).split(",")
        drawn.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{down}" y2="{down}"/>')
        drawn.append(_text(_LEFT - 5, float(down) + 4, text(y), "y end", value=y))
    for x in x_ticks:
        across = float(at(x, low).split(",")[0])
        drawn.append(_text(across, _HEIGHT - _BOTTOM + 14, f"{x:,.0f}", "x middle", value=x))
    drawn.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, "optimizer step", "middle quiet"))
    for x, word in marks:
        across = float(at(x, low).split(",")[0])
        drawn.append(f'<line class="mark" x1="{across}" x2="{across}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        drawn.append(_text(across + 3, _TOP + 9, word, "quiet"))
    for one in series:
        points = [at(x, y) for x, y in thinned(one.points)]
        classes = f"series c{one.color % 8} {one.style}"
        if one.style == "dots" or len(points) == 1:
            drawn += [f'<circle class="{classes}" cx="{a}" cy="{b}" r="3"/>' for a, b in (p.split(",") for p in points)]
        if one.style != "dots" or len(points) > 1:
            label = escape(one.label, quote=True)
            drawn.append(f'<polyline class="{classes}" data-label="{label}" points="{" ".join(points)}"/>')
    legend = "".join(_key(f"c{one.color % 8} {one.style}", one.label, text(one.points[-1][1])) for one in series)
    said = f"{title}{f' ({unit})' if unit else ''}"
    return _figure(said, _svg(_HEIGHT, drawn, said), f'<ul class="legend">{legend}</ul>')


def bars(title: str, rows: Sequence[tuple[str, Sequence[Part], str]], keys: Sequence[tuple[str, str]]) -> str:
    """Stacked bars, one a row, all at the same scale; empty without a row.

    Args:
        title: what is drawn.
        rows: (name, parts, what is written at the end) of each bar.
        keys: (class of the color, meaning).
    """
    if not rows:
        return ""
    longest = max(sum(part.size for part in parts) for _, parts, _ in rows) or 1
    label = min(max(len(name) for name, *_ in rows), 20) * _CHARACTER + 6
    end = max(len(words) for *_, words in rows) * _CHARACTER + 6
    room, height, drawn = _WIDTH - label - end, 20, []
    for i, (name, parts, words) in enumerate(rows):
        across, down = label, i * height
        drawn.append(_text(label - 5, down + 14, _shortened(name, 20), "end"))
        for part in parts:
            width = part.size / longest * room
            drawn.append(
                f'<rect class="{escape(part.color, quote=True)}" x="{across:.2f}" y="{down + 2}" '
                f'width="{max(width - 0.6, 0.4):.2f}" height="{height - 4}"><title>{escape(part.label)}</title></rect>'
            )
            if part.text and len(part.text) * _CHARACTER + 4 < width:
                drawn.append(_text(across + width / 2, down + 14, part.text, "inside middle"))
            across += width
        drawn.append(_text(across + 4, down + 14, words, "quiet"))
    legend = "".join(_key(name, meaning) for name, meaning in keys)
    return _figure(title, _svg(len(rows) * height + 4, drawn, title), f'<ul class="legend">{legend}</ul>')


def heat(title: str, rows: Sequence[tuple[str, Sequence[float], str]]) -> str:
    """Shares of a row's sum, one row a line, dark where much; empty without a row.

    Args:
        title: what is drawn.
        rows: (name, values, what is written at the end).
    """
    if not rows:
        return ""
    label = min(max(len(name) for name, *_ in rows), 18) * _CHARACTER + 6
    end = max(len(words) for *_, words in rows) * _CHARACTER + 6
    room, height, drawn = _WIDTH - label - end, 20, []
    for i, (name, values, words) in enumerate(rows):
        most, width = max([*values, 1e-12]), room / max(len(values), 1)
        drawn.append(_text(label - 5, i * height + 14, _shortened(name, 18), "end"))
        for j, value in enumerate(values):
            drawn.append(
                f'<rect class="heat" x="{label + j * width:.2f}" y="{i * height + 2}" width="{width:.2f}" '
                f'height="{height - 4}" fill-opacity="{max(value / most, 0):.3f}"/>'
            )
        drawn.append(
            f'<rect class="frame" x="{label:.2f}" y="{i * height + 2}" width="{room:.2f}" height="{height - 4}"/>'
        )
        drawn.append(_text(_WIDTH - end + 5, i * height + 14, words, "quiet"))
    return _figure(title, _svg(len(rows) * height + 4, drawn, title))


def timeline(title: str, spans: Sequence[Span]) -> str:
    """What ran when: a lane for each kind, in the order of their first span; empty without a span."""
    if not spans:
        return ""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    begin = min(span.begin for span in spans)
    whole = max(span.end for span in spans) - begin or 1e-9
    label, height, drawn = max(len(lane) for lane in lanes) * _CHARACTER + 14, 26, []
    scale = (_WIDTH - label - _RIGHT) / whole
    bottom = len(lanes) * height
    for at in ticks(0, whole, 4):
        across = label + at * scale
        if across <= _WIDTH - _RIGHT:
            drawn.append(f'<line class="grid" x1="{across:.2f}" x2="{across:.2f}" y1="0" y2="{bottom}"/>')
            drawn.append(_text(across, bottom + 14, seconds_text(at) if at else "0", "x middle", value=at))
    for i, lane in enumerate(lanes):
        drawn.append(_text(label - 6, i * height + 17, lane, "end"))
        for span in spans:
            if span.lane == lane:
                across, width = label + (span.begin - begin) * scale, max((span.end - span.begin) * scale, 0.4)
                took = f"{span.name}: {seconds_text(span.end - span.begin)}"
                drawn.append(
                    f'<rect class="lane c{i % 8}" x="{across:.2f}" y="{i * height + 3}" width="{width:.2f}" '
                    f'height="{height - 6}"><title>{escape(took)}</title></rect>'
                )
                word = span.name.rsplit("chunk ", 1)[-1].split(" ")[0] if "chunk " in span.name else span.name
                if len(word) * _CHARACTER + 3 < width:
                    drawn.append(_text(across + width / 2, i * height + 17, word, "inside middle"))
    busy = {lane: sum(span.end - span.begin for span in spans if span.lane == lane) for lane in lanes}
    count = {lane: sum(span.lane == lane for span in spans) for lane in lanes}
    legend = "".join(
        _key(f"c{i % 8} lane", f"{lane}, {count[lane]} times", seconds_text(busy[lane])) for i, lane in enumerate(lanes)
    )
    return _figure(title, _svg(bottom + 20, drawn, title), f'<ul class="legend">{legend}</ul>')


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Round numbers from the last one not above `low` to the first one not below `high`, about so many steps apart."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(round(step), 1) if whole else step
    first = math.floor(low / step + 1e-9)
    return [round(i * step, 12) for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS`, or a few more: the least and the largest of equal parts, and the last."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    parts, kept = _MOST_POINTS // 2, []
    for i in range(parts):
        part = points[len(points) * i // parts : len(points) * (i + 1) // parts]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _figure(title: str, drawing: str, below: str = "") -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}{below}</figure>"


def _svg(height: float, drawn: Iterable[str], label: str) -> str:
    said = escape(label, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{said}">{"".join(drawn)}</svg>'


def _text(x: float, y: float, words: str, classes: str, *, value: float | None = None) -> str:
    data = "" if value is None else f' data-value="{value!r}"'
    return f'<text class="{classes}" x="{x:.2f}" y="{y:.2f}"{data}>{escape(words)}</text>'


def _key(classes: str, label: str, value: str = "") -> str:
    last = f" <b>{escape(value)}</b>" if value else ""
    return f'<li><i class="{classes}"></i>{escape(label)}{last}</li>'


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"
