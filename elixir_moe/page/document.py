"""One self-contained HTML page: its colors, its cards, its bars and its tables.

Owns the look of a page in light, dark and print, at any width. A page needs no network and runs no script: its own
security policy forbids both. Draws no charts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from elixir_moe.errors import ConfigError

COLORS = {
    "back": ("#f3f4f7", "#0e1217"),
    "card": ("#ffffff", "#181d25"),
    "grid": ("#e2e5ea", "#2d3541"),
    "text": ("#1a1f26", "#e8ecf1"),
    "quiet": ("#58626f", "#a3aebb"),
    "inside": ("#fefefe", "#0b0e13"),
    "device": ("#0b63c5", "#6cb0ff"),
    "host": ("#b34700", "#ff9d5c"),
    "disk": ("#15803d", "#5fd68a"),
    "purple": ("#8b2fc9", "#cf9bff"),
    "pink": ("#b0105f", "#ff85b8"),
    "teal": ("#0e7490", "#4fd0e6"),
    "gold": ("#7a5b00", "#e6c35c"),
    "gray": ("#5b6470", "#a9b4c0"),
    "device2": ("#3f86d6", "#4a8fe0"),
    "device3": ("#7aaee8", "#9cc8f7"),
    "host2": ("#d98545", "#ffc49b"),
}
"""{name: (for light and print, for dark)}; the light ones all differ, so that `themed` can tell them apart."""
SERIES = ("device", "host", "disk", "purple", "pink", "teal", "gold", "gray")
"""Colors of lines, in order of use."""

_STYLE = """
.elixir{color:var(--text);background:var(--back);font:.94rem/1.45 system-ui,sans-serif;padding:1rem;
color-scheme:light dark;overflow-wrap:anywhere}
.elixir h1{font-size:1.4rem;line-height:1.2;margin:.2rem 0 .2rem}.elixir h2{font-size:1rem;margin:0 0 .5rem}
.elixir h3{font-size:.88rem;margin:.7rem 0 .3rem}.elixir p{margin:.2rem 0 .5rem}
.elixir .quiet{color:var(--quiet)}
.elixir .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.8rem;margin:.8rem 0}
.elixir .tile,.elixir .card{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:.7rem .8rem}
.elixir .tile b{display:block;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums}
.elixir .tile span{display:block;font-size:.82rem;color:var(--quiet)}
.elixir .cards{columns:26rem;column-gap:.8rem}
.elixir .card{margin:0 0 .8rem;break-inside:avoid;box-decoration-break:clone;-webkit-box-decoration-break:clone}
.elixir h2{break-after:avoid}.elixir .card.long{break-inside:auto}.elixir .card.long tr,.elixir .bar{break-inside:avoid}
.elixir svg{width:100%;height:auto;display:block;stroke-linejoin:round}
.elixir svg text{font-family:system-ui,sans-serif}
.elixir .legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.4rem 0 0;padding:0;
font-size:.85rem}
.elixir .legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.elixir .bar{display:grid;grid-template-columns:1fr auto;gap:0 .8rem;font-size:.85rem;margin-bottom:.35rem}
.elixir .bar>div{grid-column:1/3;display:flex;height:1.15rem;gap:1px}
.elixir .bar i{color:var(--inside);font:.72rem/1.15rem system-ui,sans-serif;text-align:center;overflow:hidden;
border-radius:2px;min-width:1px;text-wrap:nowrap}
.elixir .table{overflow-x:auto}.elixir table{border-collapse:collapse;font-size:.86rem;width:100%}
.elixir th,.elixir td{padding:.2rem .6rem .2rem 0;text-align:left;vertical-align:top;overflow-wrap:normal;
border-bottom:1px solid var(--grid)}.elixir th{font-size:.8rem;color:var(--quiet)}
.elixir th:not(.number),.elixir td:not(.number){overflow-wrap:anywhere;min-width:6.2em}
.elixir td:last-child,.elixir th:last-child{padding-right:0}
.elixir td.number{white-space:nowrap}
.elixir td.number,.elixir th.number{text-align:right;font-variant-numeric:tabular-nums}
@media (max-width:30rem){.elixir table{font-size:.78rem}.elixir th{font-size:.74rem}
.elixir th,.elixir td{padding-right:.4rem}.elixir td.number{white-space:normal}}
.elixir pre{white-space:pre-wrap;font-size:.82rem;margin:0}
@media print{.elixir{background:none;padding:0;color-scheme:light;
print-color-adjust:exact;-webkit-print-color-adjust:exact}.elixir .cards{columns:2}}
"""
_LONG = 24
"""Most rows of a card that is not broken between columns."""
_WIDEST = 24
"""Most characters of a cell that is treated as a number, and never broken."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A row of stacked bars: its name, the label at its end, and its parts."""

    name: str
    end: str
    parts: Sequence[tuple[float, str, str, str]]
    """(size, name of the color, label inside, tooltip) of each part."""


def style(selector: str) -> str:
    """The CSS variables of the colors, for light, dark and print."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLORS.items()) for i in (0, 1))
    return f"{selector}{{{light}}}@media screen and (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def themed(svg: str) -> str:
    """Replaces the light colors of a drawing by the variables of the page."""
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    return svg


def fragment(parts: Iterable[str]) -> str:
    """HTML for a notebook: the parts with their style, which affects nothing else."""
    return f'<div class="elixir"><style>{style(".elixir")}{_STYLE}</style>{"".join(parts)}</div>'


def page(title: str, parts: Iterable[str]) -> str:
    """A whole HTML document."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style(':root')}body{{margin:0;background:var(--back)}}"
        "@media print{html{font-size:11px}body{background:none}}</style>"
        f"</head><body>{fragment(parts)}</body></html>\n"
    )


def write(path: Path, document: str) -> None:
    """Writes a page. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; choose another file") from error


def heading(title: str, below: str = "") -> str:
    """The title of a page, and a muted line below it."""
    return f"<h1>{escape(title)}</h1>" + (f'<p class="quiet">{escape(below)}</p>' if below else "")


def tiles(found: Iterable[tuple[str, str, str]]) -> str:
    """Tiles, side by side, for the figures that people look at first: (what, its value, a remark)."""
    drawn = "".join(
        f'<div class="tile"><span>{escape(what)}</span><b>{escape(value)}</b><span>{escape(remark)}</span></div>'
        for what, value, remark in found
    )
    return f'<div class="tiles">{drawn}</div>' if drawn else ""


def cards(found: Iterable[str]) -> str:
    """Cards in as many columns as the width allows."""
    return f'<div class="cards">{"".join(found)}</div>'


def card(title: str, parts: Iterable[str]) -> str:
    """Parts in a frame, which may break between columns and pages if it has many rows; empty without parts."""
    found = "".join(parts)
    long = " long" * (found.count("<tr>") + found.count('class="bar"') > _LONG)
    return f'<section class="card{long}"><h2>{escape(title)}</h2>{found}</section>' if found else ""


def bars(rows: Sequence[Bar], keys: Iterable[tuple[str, str]] = ()) -> str:
    """Stacked bars, one per row, all to the same scale; empty without rows. `keys`: (color, meaning)."""
    longest = max((sum(size for size, *_ in row.parts) for row in rows), default=0) or 1
    drawn = []
    for row in rows:
        inner = "".join(
            f'<i style="width:{100 * size / longest:.3f}%;background:{_var(color)}" '
            f'title="{escape(tooltip, quote=True)}">{escape(inside)}</i>'
            for size, color, inside, tooltip in row.parts
        )
        drawn.append(f'<div class="bar"><span>{escape(row.name)}</span><span>{escape(row.end)}</span>'
                     f"<div>{inner}</div></div>")  # fmt: skip
    return "".join(drawn) + (legend((color, meaning, "") for color, meaning in keys) if rows else "")


def legend(keys: Iterable[tuple[str, str, str]]) -> str:
    """The legend of a drawing: (color, meaning, value) of each mark."""
    drawn = "".join(
        f'<li><i style="background:{_var(color)}"></i>{escape(meaning)}'
        f"{f' <b>{escape(value)}</b>' if value else ''}</li>"
        for color, meaning, value in keys
    )
    return f'<ul class="legend">{drawn}</ul>' if drawn else ""


def _var(color: str) -> str:
    return f"var(--{color if color in COLORS else 'gray'})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A table; with `numbers`, short cells after the first column are right-aligned. Empty without rows."""
    if not rows:
        return ""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if numbers and i and len(cell) <= _WIDEST else "" for i, cell in enumerate(cells)]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    top, body = line(head, "th"), "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def text(words: str) -> str:
    """Preformatted lines."""
    return f"<pre>{escape(words)}</pre>"
