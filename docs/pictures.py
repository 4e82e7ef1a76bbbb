"""Draws the pictures of the documents: ``python docs/pictures.py``.

Owns docs/pictures/*.svg: their arrangement, and the two that are drawings of words. Layers and bytes are read from
wrapped models, and drawn by the charts of the library's own pages. The step in time is read from ARCHITECTURE.md.
Text stays text; colors follow the reader's light or dark scheme.
"""

import re
import tempfile
from collections.abc import Callable, Iterable
from html import escape, unescape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDER = DOCS / "pictures"
WIDTH = 480
_MARGIN = 20
_INNER = 440
"""Width of a chart of `page.charts`."""


def layers() -> str:
    """A model's layers by tier and chunk, under three plans."""
    from elixir_moe.page import model as drawn

    charts = [(name, drawn.layers(facts["chunks"])) for name, facts, _ in _wrapped()]
    return _page("A model of six layers under three plans", charts)


def bytes_by_kind() -> str:
    """Bytes of a rank by kind, as the plan foresees them, and as they are held."""
    from elixir_moe.chunks.plan import size_text
    from elixir_moe.page import charts
    from elixir_moe.page import model as drawn

    parts = []
    for name, facts, held in _wrapped():
        rows = [
            (tier, [charts.Part(label=f"{tier}: {nbytes:,} bytes", size=nbytes, color=tier)], size_text(nbytes))
            for tier, nbytes in held.items()
            if nbytes
        ]
        parts.append((name, drawn.planned(facts)))
        parts.append(("", charts.bars("Held in a backward, by tier", rows, [])))
    return _page("Bytes of a rank: planned by kind, and held", parts)


def _wrapped() -> Iterable[tuple[str, dict[str, Any], dict[str, int]]]:
    """(name of the plan, facts, bytes held by tier) of one model under three plans, after a step."""
    import torch

    import elixir_moe as em
    from elixir_moe.models import GPT, GPTConfig, lm_loss

    with tempfile.TemporaryDirectory() as folder:
        for name, plan in (
            ("Plan.zero3()", em.Plan.zero3()),
            ("Plan.offload(device_chunks=2)", em.Plan.offload(device_chunks=2)),
            ("Plan.offload(disk=FOLDER, disk_chunks=3)", em.Plan.offload(disk=folder, disk_chunks=3)),
        ):
            torch.manual_seed(0)
            model = GPT(GPTConfig(n_layers=6, d_model=128, experts=(0, 4, 0, 4, 0, 4)), em.init_mesh())
            model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
            lm_loss(model, torch.arange(65).view(1, 65)).backward()
            optimizer.step()
            seen = em.inspect(model)
            yield name, seen.facts(), seen.held_bytes
            optimizer.close()


def step() -> str:
    """A step in time, from the lanes that ARCHITECTURE.md explains."""
    block = (DOCS.parent / "ARCHITECTURE.md").read_text().partition("### A step in time")[2].split("```")[1]
    head, *lanes = [line for line in block.splitlines() if line.strip()]
    first = 10
    end = max(map(len, lanes)) + 4
    scale = (_INNER - 62) / (end - first)
    drawn = []
    for word in re.finditer(r"\S+(?: \S+)*", head):
        at = 62 + (word.start() - first) * scale
        drawn.append(_text(at, 12, word[0], "quiet"))
        drawn.append(f'<line class="mark" x1="{at - 3:.1f}" x2="{at - 3:.1f}" y1="2" y2="{26 * len(lanes) + 18}"/>')
    for i, lane in enumerate(lanes):
        down = 20 + 26 * i
        name = lane[:first].strip()
        drawn.append(_text(56, down + 15, name, "end"))
        words = list(re.finditer(r"\S+(?: \d)?", lane[first:]))
        for word, after in zip(words, [*words[1:], None], strict=True):
            is_block = name.startswith("block")
            stop = (after.start() if after else end - first) if is_block or name == "compute" else word.start() + 5.5
            if not is_block and name == "compute":
                stop = min(stop, word.start() + 5.5)
            left, width = 62 + word.start() * scale, (stop - word.start()) * scale - 1
            kind = "frame" if word[0] in ("wait", "loss") else f"lane c{_color(name, word[0])}"
            label = word[0].replace("weights", "w").replace("grads", "g") if width < 45 else word[0]
            drawn.append(f'<rect class="{kind}" x="{left:.1f}" y="{down}" width="{width:.1f}" height="21"/>')
            size = "tiny" if len(label) > 3 and width < 30 else "small"
            style = f"{'quiet' if kind == 'frame' else 'inside'} {size} middle"
            drawn.append(_text(left + width / 2, down + 14, label, style))
    said = [
        "Four layers, each a chunk in host memory; three blocks of the rCache.",
        "F4, B4: forward and backward of layer 4.",
        "f4, g4, r4, u4: fetch, gather, reduction and update of chunk 4.",
        "A block holds weights or gradients of a chunk until the next ones come.",
    ]
    foot = [_text(0, 26 * len(lanes) + 38 + 14 * i, line, "quiet small") for i, line in enumerate(said)]
    return _whole("A step in time", 26 * len(lanes) + 86, [*drawn, *foot])


def _color(lane: str, word: str) -> int:
    if lane.startswith("block"):
        return 3 if word.startswith("grads") else 0
    if lane == "compute":
        return 1 if word.startswith("B") else 2
    return {"fetch": 5, "gather": 0, "reduce": 3, "update": 4}.get(lane, 7)


def parameter() -> str:
    """The way of a parameter through a step."""
    boxes = [  # (x, y, width, words, class)
        (0, 120, 150, ["shard in its tier:", "device, host or disk", "weights, master, moments"], "c7"),
        (190, 30, 120, ["block of the rCache:", "weights of a chunk"], "c0"),
        (350, 30, 90, ["forward", "and backward"], "c2"),
        (190, 230, 120, ["block of the rCache:", "gradients of a chunk"], "c3"),
        (350, 230, 90, ["gradients", "of a layer"], "c1"),
    ]
    drawn = []
    for x, y, width, words, color in boxes:
        height = 14 * len(words) + 14
        drawn.append(f'<rect class="box {color}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        drawn += [_text(x + width / 2, y + 19 + 14 * i, word, "middle small") for i, word in enumerate(words)]
    arrows = [  # (path, x and y of its words, words)
        ("M65 120 L65 51 L186 51", 72, 44, "1 fetch, gather"),
        ("M310 51 L346 51", 312, 44, "2 views"),
        ("M250 72 L250 98 L120 98 L120 116", 256, 92, "dropped without"),
        ("", 256, 104, "a write"),
        ("M395 72 L395 226", 389, 155, "3 backward"),
        ("M350 251 L314 251", 320, 244, "copy"),
        ("M190 251 L75 251 L75 180", 82, 244, "4 reduce"),
        (
            "M30 176 L30 290 L50 290 L50 180",
            60,
            294,
            "5 update in place: gradient in, new weights, master and moments out",
        ),
    ]
    for path, x, y, words in arrows:
        drawn += [f'<path class="way" d="{path}" marker-end="url(#head)"/>'] if path else []
        drawn.append(_text(x, y, words, "small" + (" end" if words == "3 backward" else "")))
    return _whole("The way of a parameter through a step", 315, drawn)


def _page(title: str, charts: Iterable[tuple[str, str]]) -> str:
    """Charts of the library below each other, with their captions and legends as text of the drawing."""
    drawn, down = [], 0.0
    for name, figure in charts:
        if name:
            drawn.append(_text(0, down + 14, name, "strong"))
            down += 20
        caption = unescape(re.search(r"<figcaption>(.*?)</figcaption>", figure)[1])
        box = re.search(r'<svg viewBox="0 0 \d+ ([\d.]+)"[^>]*>(.*?)</svg>', figure, re.DOTALL)
        drawn.append(_text(0, down + 12, caption, "quiet"))
        drawn.append(f'<g transform="translate(0 {down + 18:g})">{box[2]}</g>')
        down += 18 + float(box[1])
        across = 0.0
        keys = re.findall(r'<li><i class="([^"]+)"></i>(.*?)(?: <b>.*?</b>)?</li>', figure)
        for color, label in keys:
            width = 14 + 6.2 * len(unescape(label)) + 12
            if across + width > _INNER:
                across, down = 0.0, down + 16
            drawn.append(f'<rect class="{color}" x="{across:.1f}" y="{down + 3:g}" width="9" height="9"/>')
            drawn.append(_text(across + 14, down + 11, unescape(label), "small"))
            across += width
        down += 22 if keys else 10
    return _whole(title, down, drawn)


def _whole(title: str, height: float, drawn: Iterable[str]) -> str:
    from elixir_moe.page import document

    style = re.search(r"<style>(.*?)</style>", document.fragment([]), re.DOTALL)[1]
    style = style.replace(".elixir svg text", ".elixir text").replace(".elixir svg .", ".elixir .")
    style += """
.elixir text.small{font-size:10px}.elixir text.tiny{font-size:8.5px}.elixir text.strong{font-weight:600}
.elixir .back{fill:var(--back)}.elixir rect.box{fill:var(--card);stroke:currentColor;stroke-width:1.5}
.elixir .way{fill:none;stroke:var(--quiet);stroke-width:1.3}.elixir .tip{fill:var(--quiet)}"""
    whole = height + 2 * _MARGIN + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="elixir" viewBox="0 0 {WIDTH} {whole:g}" '
        f'width="{WIDTH * 1.5:g}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n<style>{style}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f'<rect class="back" width="{WIDTH}" height="{whole:g}"/>\n'
        f'<g transform="translate({_MARGIN} {_MARGIN})">{_text(0, 8, title, "strong")}</g>\n'
        f'<g transform="translate({_MARGIN} {_MARGIN + 20})">\n' + "\n".join(drawn) + "\n</g>\n</svg>\n"
    )


def _text(x: float, y: float, words: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


PICTURES: dict[str, Callable[[], str]] = {
    "layers": layers,
    "step": step,
    "parameter": parameter,
    "bytes": bytes_by_kind,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture, draw in PICTURES.items():
        (FOLDER / f"{picture}.svg").write_text(draw())
