"""One self-contained HTML page: its style, its sections and its tables.

Owns the look of a page in light, dark and print, at any width. A page asks nothing of the network and runs no script:
its own security policy forbids both. Draws nothing (`charts`).
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from elixir_moe.errors import ConfigError

_STYLE = """
.elixir{--back:#fff;--card:#f6f7f9;--line:#d5d9e0;--grid:#e3e6eb;--text:#1b1f24;--quiet:#59636e;--inside:#fff;
--c0:#0b63c5;--c1:#b34700;--c2:#15803d;--c3:#8b2fc9;--c4:#b0105f;--c5:#0e7490;--c6:#7a5b00;--c7:#5b6470;
--device:#0b63c5;--host:#b34700;--disk:#15803d;--k0:#0b63c5;--k1:#3f86d6;--k2:#7aaee8;--k3:#8b2fc9;--k4:#b34700;
--k5:#d98545;color:var(--text);background:var(--back);font:15px/1.45 system-ui,sans-serif;padding:1rem;
color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){.elixir{--back:#12161c;--card:#1a2029;--line:#333c49;
--grid:#2a323d;--text:#e8ecf1;
--quiet:#a2adba;--inside:#0b0e12;--c0:#6cb0ff;--c1:#ff9d5c;--c2:#5fd68a;--c3:#cf9bff;--c4:#ff85b8;--c5:#4fd0e6;
--c6:#e6c35c;--c7:#a9b4c0;--device:#6cb0ff;--host:#ff9d5c;--disk:#5fd68a;--k0:#6cb0ff;--k1:#4a8fe0;--k2:#9cc8f7;
--k3:#cf9bff;--k4:#ff9d5c;--k5:#ffc49b}}
.elixir h1{font-size:1.35rem;margin:.2rem 0 .6rem}.elixir h2{font-size:1.1rem;margin:1.6rem 0 .6rem}
.elixir h3{font-size:.95rem;margin:.2rem 0 .4rem;overflow-wrap:anywhere}
.elixir .cards{display:grid;gap:.8rem;align-items:start;
grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));margin-bottom:.8rem}
.elixir .card,.elixir figure{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.7rem;
margin:0 0 .8rem;max-width:36rem;min-width:0}
.elixir .card{max-width:44rem}
.elixir .card figure{border:0;padding:0}.elixir .cards>figure{margin:0}
.elixir figcaption{font-weight:600;margin-bottom:.3rem}.elixir svg{width:100%;height:auto;display:block}
.elixir svg text{font:11px system-ui,sans-serif;fill:var(--text)}.elixir svg .quiet{fill:var(--quiet)}
.elixir svg .end{text-anchor:end}.elixir svg .middle{text-anchor:middle}.elixir svg text.inside{fill:var(--inside)}
.elixir .grid{stroke:var(--grid)}.elixir .mark{stroke:var(--quiet);stroke-dasharray:2 3}
.elixir .series{fill:none;stroke:currentColor;stroke-width:1.8}.elixir circle.series{fill:currentColor;stroke:none}
.elixir .faint{opacity:.35}.elixir polyline.faint{stroke-width:1}.elixir polyline.dashed{stroke-dasharray:6 4}
.elixir polyline.dots{stroke-width:1}.elixir .frame{fill:none;stroke:var(--line)}.elixir .heat{fill:var(--c0)}
.elixir .lane{fill:currentColor}
.elixir .legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.4rem 0 0;
padding:0;font-size:.85rem}.elixir .legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;
margin-right:.35em;background:currentColor}.elixir .legend i.dashed{height:.2em;vertical-align:middle}
.elixir .table{overflow-x:auto}.elixir table{border-collapse:collapse;font-size:.88rem}
.elixir td{overflow-wrap:anywhere;min-width:3.6em}
.elixir th,.elixir td{padding:.2rem .7rem .2rem 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--grid)}
.elixir td.number,.elixir th.number{text-align:right;font-variant-numeric:tabular-nums}
.elixir pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.82rem;margin:0}.elixir p{max-width:60rem}
@media (max-width:30rem){.elixir svg text{font-size:11.7px}}
@media print{.elixir{--card:#fff;--text:#000;--quiet:#333;font-size:11px;padding:0;color-scheme:light;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.elixir figure,.elixir .card,.elixir tr{break-inside:avoid}.elixir h2{break-after:avoid}
.elixir .cards{grid-template-columns:1fr 1fr}}
"""
_COLOURS = "".join(
    f".elixir .{name}{{color:var(--{name})}}.elixir rect.{name}{{fill:var(--{name})}}"
    for name in [*(f"c{i}" for i in range(8)), *(f"k{i}" for i in range(6)), "device", "host", "disk"]
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def fragment(parts: Iterable[str]) -> str:
    """What a notebook shows: the parts with their style, which reaches nothing outside of them."""
    return f'<div class="elixir"><style>{_STYLE}{_COLOURS}</style>{"".join(parts)}</div>'


def page(title: str, parts: Iterable[str]) -> str:
    """A whole HTML document."""
    name = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        "<style>body{margin:0}@media screen and (prefers-color-scheme:dark){body{background:#12161c}}</style></head>"
        f"<body>{fragment([f'<h1>{name}</h1>', *parts])}</body></html>\n"
    )


def write(path: Path, document: str) -> None:
    """Writes a page. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; choose another file") from error


def section(title: str, parts: Iterable[str]) -> str:
    """A heading with what belongs to it, side by side where the width allows; empty if nothing does."""
    found = "".join(part for part in parts if part)
    return f'<section><h2>{escape(title)}</h2><div class="cards">{found}</div></section>' if found else ""


def card(title: str, parts: Iterable[str]) -> str:
    """Parts in a frame; empty if there are none."""
    found = "".join(part for part in parts if part)
    return f'<div class="card"><h3>{escape(title)}</h3>{found}</div>' if found else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A table; with `numbers`, all columns but the first are aligned to the right. Empty without a row."""
    if not rows:
        return ""
    classes = ["", *[' class="number"' * numbers] * max(len(row) for row in rows)]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, classes, strict=False))
    lines = [
        "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, classes, strict=False)) for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def text(words: str) -> str:
    """Lines as they are."""
    return f"<pre>{escape(words)}</pre>"
