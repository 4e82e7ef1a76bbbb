"""Draws the pictures of the documents: ``python docs/pictures.py``.

Owns docs/pictures/*.svg, which matplotlib draws as `report.figures` draws the page of a run: text stays text, and
colors follow the reader's light or dark scheme. Layers and bytes are read from wrapped models, the step in time from
ARCHITECTURE.md, and the mixture's numbers from docs/pictures/mixture.json, which ``--plan`` asks the planner for.
"""

import argparse
import datetime
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elixir_moe.chunks.plan import size_text
from elixir_moe.page import document, model
from elixir_moe.page.document import Bar
from elixir_tools.report import figures
from elixir_tools.report.figures import FONT, WIDTH, Span, light

DOCS = Path(__file__).parent
FOLDER = DOCS / "pictures"
MIXTURE = FOLDER / "mixture.json"
QUIET = {"fontsize": FONT - 1, "color": light("quiet")}


def layers() -> str:
    """A model's layers by tier and chunk, under three plans."""
    found = [(name, model.layers(facts["chunks"])) for name, facts, _ in _wrapped()]
    keys = [("device", "in device memory"), ("host", "in host memory"), ("disk", "on disk")]
    return _bars("Layers by tier, with the number of each chunk", found, keys)


def bytes_by_kind() -> str:
    """Bytes of a rank by kind, as the plan foresees them, and as they are held."""
    found: list[tuple[str, Sequence[Bar]]] = []
    keys: dict[str, str] = {}
    for name, facts, held in _wrapped():
        rows, meanings = model.planned(facts["planned_bytes"])
        keys |= dict(meanings)
        rows += [
            Bar(name=f"{model.TIERS[tier]}, held", end=size_text(nbytes), parts=[(nbytes, "gray", "", "")])
            for tier, nbytes in held.items()
            if nbytes
        ]
        found.append((name, rows))
    return _bars("Bytes of a rank: planned by kind, and held", found, [*keys.items(), ("gray", "held in a backward")])


def _wrapped() -> Iterable[tuple[str, dict[str, Any], dict[str, int]]]:
    """(name of the plan, facts, bytes held by tier) of one model under three plans, after a step."""
    import torch

    import elixir_moe as em
    from elixir_tools.models.gpt import GPT, GPTConfig, lm_loss

    with tempfile.TemporaryDirectory() as folder:
        for name, plan in (
            ("Plan.zero3()", em.Plan.zero3()),
            ("Plan.offload(device_chunks=2)", em.Plan.offload(device_chunks=2)),
            ("Plan.offload(disk=FOLDER, disk_chunks=3)", em.Plan.offload(disk=folder, disk_chunks=3)),
        ):
            torch.manual_seed(0)
            gpt = GPT(GPTConfig(n_layers=6, d_model=128, experts=(0, 4, 0, 4, 0, 4)), em.init_mesh())
            gpt, optimizer = em.wrap(gpt, torch.optim.AdamW(gpt.parameters()), plan=plan)
            lm_loss(gpt, torch.arange(65).view(1, 65)).backward()
            optimizer.step()
            seen = em.inspect(gpt)
            yield name, seen.facts(), seen.held_bytes
            optimizer.close()


def _bars(title: str, found: Sequence[tuple[str, Sequence[Bar]]], keys: Sequence[tuple[str, str]]) -> str:
    """Stacked bars under the name of each plan, at one scale."""
    lines = sum(len(rows) + 1.6 for _, rows in found)
    figure, axes = figures.panel(16 * lines + 20 * ((len(keys) + 1) // 2) + 8)
    longest = max(sum(size for size, *_ in row.parts) for _, rows in found for row in rows)
    at, names = 0.0, []
    for name, rows in found:
        axes.text(0, at, name, fontsize=FONT, fontweight="bold", color=light("text"), va="center")
        for row in rows:
            at, left = at + 1, 0.0
            names.append((at, row.name))
            for size, color, inside, _ in row.parts:
                axes.barh(at, size, left=left, height=0.8, color=light(color), edgecolor=light("card"), linewidth=0.5)
                if size > longest / 25:
                    _text(axes, left + size / 2, at, inside, color="inside")
                left += size
            axes.text(left + longest / 80, at, row.end, va="center", **QUIET)
        at += 1.6
    axes.set(xlim=(0, longest * 1.25), ylim=(at - 0.8, -0.8), xticks=[])
    axes.set_yticks([place for place, _ in names], [name for _, name in names])
    marks = [axes.barh(0, 0, color=light(color), label=meaning) for color, meaning in keys]
    figure.legend(handles=marks, loc="outside lower left", ncols=2, frameon=False, fontsize=FONT - 1, handlelength=1,
                  handleheight=1, labelcolor=light("text"), borderpad=0.2)  # fmt: skip
    return _whole(title, figure)


def step() -> str:
    """A step in time, from the lanes that ARCHITECTURE.md explains."""
    block = (DOCS.parent / "ARCHITECTURE.md").read_text().partition("### A step in time")[2].split("```")[1]
    head, *lines = [line for line in block.splitlines() if line.strip()]
    first, end, spans = 10, max(map(len, lines)) + 4, []
    for line in lines:
        lane, found = line[:first].strip(), list(re.finditer(r"\S+(?: \d)?", line[first:]))
        for word, after in zip(found, [*found[1:], None], strict=True):
            stop = after.start() if after else end - first
            if not lane.startswith("block"):
                stop = min(stop, word.start() + 5.5)
            name = word[0] if stop - word.start() > 20 else word[0].replace("weights", "w").replace("grads", "g")
            spans.append(Span(lane=lane, name=name, begin=word.start(), end=stop - 0.4, color=_color(lane, word[0])))
    figure = figures.lanes(spans)
    axes = figure.axes[0]
    axes.set_xticks([])
    for word in re.finditer(r"\S+(?: \S+)*", head):
        axes.axvline(word.start() - first - 0.6, color=light("quiet"), linewidth=0.8, linestyle=(0, (2, 3)))
        axes.text(word.start() - first, -0.62, word[0], va="bottom", **QUIET)
    axes.set_xlim(-1, end - first)
    figure.supxlabel(
        "Four layers, each a chunk in RAM; three blocks of the rCache.\n"
        "F4, B4: forward and backward of layer 4; gray: wait, loss, norm.\n"
        "f4, g4, r4, u4: fetch, gather, reduction, update of chunk 4.\n"
        "w 4, g 4: a block holds weights or gradients of chunk 4.",
        x=0.01, ha="left", **QUIET)  # fmt: skip
    figure.set_figheight(figure.get_figheight() + 0.7)
    return _whole("A step in time", figure)


def _color(lane: str, word: str) -> str:
    if word in ("wait", "loss", "norm"):
        return "grid"
    if lane.startswith("block"):
        return "purple" if word.startswith("grads") else "device"
    if lane == "compute":
        return "host" if word.startswith("B") else "disk"
    return {"fetch": "teal", "gather": "device", "reduce": "purple", "update": "pink"}[lane]


def parameter() -> str:
    """The way of a parameter through a step."""
    figure, axes = figures.panel(250)
    boxes = {  # (x, y, words, color)
        "shard": (60, 125, "shard in its tier:\nVRAM, RAM or disk\nweights, master, moments", "gray"),
        "weights": (196, 215, "block of the rCache:\nweights of a chunk", "device"),
        "forward": (316, 215, "forward\nand backward", "disk"),
        "gradients": (196, 45, "block of the rCache:\ngradients of a chunk", "purple"),
        "layer": (316, 45, "gradients\nof a layer", "host"),
    }
    for x, y, words, color in boxes.values():
        axes.text(x, y, words, ha="center", va="center", fontsize=FONT - 1, color=light("text"), linespacing=1.35,
                  bbox={"boxstyle": "round,pad=0.5", "fc": light("back"), "ec": light(color), "lw": 1.5})  # fmt: skip
    arrows = [  # corners, position and label
        ([(50, 152), (50, 215), (140, 215)], (56, 224), "1 fetch, gather"),
        ([(252, 215), (278, 215)], (249, 238), "2 views"),
        ([(196, 196), (196, 170), (90, 170), (90, 152)], (98, 179), "dropped unwritten"),
        ([(316, 196), (316, 65)], (258, 125), "3 backward"),
        ([(288, 45), (255, 45)], (258, 60), "copy"),
        ([(138, 45), (90, 45), (90, 98)], (94, 54), "4 reduce"),
        (
            [(30, 98), (30, 8), (50, 8), (50, 98)],
            (58, 8),
            "5 update in place: gradient in; weights,\nmaster, moments out",
        ),
    ]
    look = {"color": light("quiet"), "linewidth": 1.2}
    for corners, place, words in arrows:
        axes.plot(*zip(*corners[:-1], strict=True), **look)
        arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0} | look
        axes.annotate("", corners[-1], corners[-2], arrowprops=arrow)
        axes.text(*place, words, va="center", **QUIET)
    axes.set(xlim=(0, 360), ylim=(-10, 248), xticks=[], yticks=[])
    return _whole("The way of a parameter through a step", figure)


def mixture() -> str:
    """The tiers and transfers while a mixture of 30 billion parameters is trained on one card of 24 GB."""
    found = json.loads(MIXTURE.read_text())
    planned, moved, seconds, step = found["planned"], found["moved"], found["seconds"], found["seconds"]["step"]
    device, host = planned["device"], planned["host"]
    working = step - sum(seconds[f"{tier}_update"] for tier in planned)
    tokens = found["batch"] * found["seq"] * found["accumulation"]
    figure, axes = figures.panel(348)
    down = 0.0

    def line(words: str, end: str = "", **style: Any) -> None:
        nonlocal down
        axes.text(0, down, words, va="center", **{"fontsize": FONT, "color": light("text")} | style)
        axes.text(WIDTH, down, end, va="center", ha="right", **{"fontsize": FONT, "color": light("text")} | style)
        down += 13

    def bar(spans: Iterable[tuple[float, float, str]], whole: float) -> None:
        nonlocal down
        axes.barh(down, WIDTH, left=0, height=12, color=light("grid"))
        for left, width, color in spans:
            axes.barh(down, WIDTH * width / whole, left=WIDTH * left / whole, height=12, color=light(color))
        down += 15

    def said(parts: Iterable[tuple[str, str]]) -> None:
        nonlocal down
        across = 0.0
        for words, color in parts:
            width = 14 + len(words) * 5.4
            if across + width > WIDTH + 20:
                across, down = 0.0, down + 12
            axes.plot(across + 3, down, marker="s", markersize=5, color=light(color))
            axes.text(across + 9, down, words, va="center", **QUIET)
            across += width
        down += 19

    places = [
        ("VRAM", "device", [("weights in use", device["rcache"], "device"),
                            ("gradients", device["reductions"] + device["sums"], "purple"),
                            ("activations", found["activations"], "teal"),
                            ("weights and optimizer state", device["resident"] + device["shards"], "host")]),
        ("RAM", "host", [("weights and optimizer state", host["shards"] + host["buffers"], "host"),
                         ("sums of gradients", host["sums"], "purple"),
                         ("inputs of layers", found["kept"], "teal")]),
        ("NVMe", "disk", [("optimizer state of the other weights", planned["disk"]["shards"], "host")]),
    ]  # fmt: skip
    line(f"Qwen3-30B-A3B in bf16, AdamW in fp32; planned on {found['date']}", **QUIET)
    down += 6
    for name, tier, parts in places:
        used, whole = sum(size for _, size, _ in parts), found["capacity"][tier]
        line(name, f"{_gib(used)} of {_gib(whole)} GiB", fontweight="bold")
        ends = accumulate((size for _, size, _ in parts), initial=0)
        bar([(left, size, color) for left, (_, size, color) in zip(ends, parts, strict=False)], whole)
        said((f"{words} {_gib(size)}", color) for words, size, color in parts)
    down += 5
    line(f"A step of {tokens:,} tokens: {step:.0f} s, {tokens / step:.0f} tokens/s", fontweight="bold")
    down += 4
    # A layer is recomputed: of the four parts of a turn, forward is one and backward three. Transfers overlap them.
    turns = found["accumulation"]
    part = working / turns / 4
    fetch, offload = seconds["fetch"] / turns / 4, seconds["offload"] / turns / 3
    line(f"GPU: forward and backward, {turns} times", f"{seconds['compute']:.0f} s")
    compute = [(turn * 4 * part, part, "disk") for turn in range(turns)]
    bar([*compute, *((begin + part, 3 * part, "gray") for begin, *_ in compute)], step)
    down += 3
    line("RAM → VRAM: weights for forward, and for backward", f"{_gib(moved['fetched_bytes'])} GiB")
    bar([(i * part, fetch, "device") for i in range(4 * turns)], step)
    down += 3
    line("VRAM → RAM: gradients", f"{_gib(moved['offloaded_bytes'])} GiB")
    bar([((i + 1) * part - offload, offload, "purple") for i in range(4 * turns) if i % 4], step)
    down += 3
    line("CPU: Adam, optimizer state from and to the disk", f"{step - working:.0f} s")
    bar([(working, step - working, "host")], step)
    axes.set(xlim=(0, WIDTH), ylim=(down, -8), xticks=[], yticks=[])
    return _whole(f"All {found['parameters'] / 1e9:.1f} billion weights, trained on one RTX 4090", figure)


def _gib(nbytes: float) -> str:
    gib = nbytes / 2**30
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}"


def plan() -> dict[str, Any]:
    """The planner's answer for a mixture of 30 billion parameters on one card of 24 GiB, as plain data."""
    from dataclasses import asdict

    import speed_of_light  # next to this file

    from elixir_moe.inspect import planned_bytes
    from elixir_moe.planner import cost
    from elixir_moe.planner.solve import solve
    from elixir_tools.fit.tasks import model_of, task_of

    machine = speed_of_light.Machine(name="", gpu="rtx-4090", ram="256 GiB")
    batch, seq, backwards = 4, speed_of_light.SEQ, 8
    with tempfile.TemporaryDirectory() as folder:
        known = speed_of_light.asked("Qwen3-30B-A3B", "full", batch, machine, Path(folder))
        known.accumulation = backwards
        task = task_of(known, machine.hardware, model_of(known, None), batch, seq)
    choice = solve(task)
    task = choice.task
    device, _ = task.held_bytes(choice.size)
    return {
        "date": datetime.date.today().isoformat(),
        "batch": batch,
        "seq": seq,
        "accumulation": backwards,
        "parameters": task.profile.parameters,
        "capacity": {"device": machine.hardware.gpu_bytes, "host": 256 * 2**30, "disk": speed_of_light.DISK_BYTES},
        "planned": planned_bytes(choice.size, backwards),
        "activations": cost.device_peak(task.profile, device, task.imbalance) - device,
        "kept": task.kept_bytes,
        "seconds": asdict(choice.seconds) | {"step": choice.seconds.step},
        "moved": asdict(choice.moved),
    }


def _text(axes: Axes, x: float, y: float, words: str, *, color: str) -> None:
    axes.text(x, y, words, ha="center", va="center", fontsize=FONT - 1, color=light(color))


def _whole(title: str, figure: Figure) -> str:
    """The picture with its title, its colors and a background, for a page that knows none of them."""
    figure.suptitle(title, x=0.006, ha="left", fontsize=FONT + 1, fontweight="bold", color=light("text"))
    drawn = figures.svg(figure, title)
    height = drawn.split('viewBox="')[1].split('"')[0].split()[3]
    margin, width = 12, figures.WIDTH
    box = f"{-margin} {-margin} {width + 2 * margin} {float(height) + 2 * margin:g}"
    style = document.style(":root") + "text{font-family:system-ui,sans-serif}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.8 * width:g}" stroke-linejoin="round" '
        f'viewBox="{box}" role="img"'
    )
    back = f'<style>{style}</style><rect x="{-margin}" y="{-margin}" width="100%" height="100%" fill="var(--card)"/>'
    body = drawn.partition(' role="img"')[2].replace(">", f">\n{back}", 1)
    return re.sub(r"> <", ">\n<", head + body).rstrip() + "\n"


PICTURES: dict[str, Callable[[], str]] = {
    "mixture": mixture,
    "layers": layers,
    "step": step,
    "parameter": parameter,
    "bytes": bytes_by_kind,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="ask the planner for the mixture's numbers first")
    FOLDER.mkdir(exist_ok=True)
    if parser.parse_args().plan:
        MIXTURE.write_text(json.dumps(plan(), indent=1) + "\n")
    for picture, draw in PICTURES.items():
        (FOLDER / f"{picture}.svg").write_text(draw())
