"""The pages: what they draw is what the files and the model say, and they ask nothing of the network."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.cli.main import main
from elixir_moe.page import charts, model
from elixir_moe.report import history

STEPS = 40
PLANNED = {"device": {"rcache": 3 << 20, "shards": 1 << 20}, "host": {"shards": 12 << 20}, "disk": {"shards": 0}}
CHUNKS = [
    {"chunk": 0, "tier": "device", "parameters": [["model.embed.weight", 400], ["model.layers.0.up.weight", 100]]},
    {"chunk": 1, "tier": "host", "parameters": [["model.layers.0.down.weight", 60], ["model.layers.1.up.weight", 160]]},
    {"chunk": 2, "tier": "host", "parameters": [["model.layers.2.up.weight", 160], ["head.weight", 70]]},
]
SPANS = [
    {"lane": "gather", "name": "chunk 1", "begin": 0.0, "end": 0.25},
    {"lane": "compute", "name": "", "begin": 0.25, "end": 1.0},
    {"lane": "gather", "name": "chunk 2", "begin": 0.5, "end": 0.75},
]


def record(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl with values that repeat nowhere."""
    return {
        "step": step,
        "loss": 5.5 - 0.05 * step + 0.3 * (step % 3),
        "val_loss": 5.0 - 0.04 * step if step % 10 == 0 else None,
        "grad_norm": 1.0 + step,
        "step_seconds": 0.1 * step,
        "tokens_per_second": 1000.0 + 37 * step,
        "held_bytes": {"device": 4 << 20, "host": (8 << 20) + (step << 16), "disk": 0},
        "process_bytes": {"host": (400 << 20) + (step << 20)},
        "tokens_per_expert": {"blocks.1.mlp": [10, 30, 20, 20 + step], "blocks.2.mlp": [1, 1]},
    }


def write_run(folder: Path, name: str = "run") -> Path:
    run = folder / name
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in range(1, STEPS + 1)))
    chunks = [{**c, "chunk_group": "g", "residence": "cached", "shards": 1, "shard_bytes": 64} for c in CHUNKS]
    (run / "layout.json").write_text(json.dumps({"chunks": chunks, "planned_bytes": PLANNED}))
    (run / "timeline.json").write_text(json.dumps({"step": 7, "spans": SPANS}))
    event = {"step": 12, "time": 0.0, "kind": "resumed", "text": "from <checkpoint> & step 12"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    return run


def page_of(*runs: Path) -> str:
    path = runs[0].parent / "page.html"
    assert main(["report", *map(str, runs), "--html", str(path)]) == 0
    return path.read_text()


def figures_of(page: str) -> dict[str, ElementTree.Element]:
    """{caption: figure}; the SVG of each is well formed."""
    found = re.findall(r"<figure>.*?</figure>", page)
    figures = [ElementTree.fromstring(figure) for figure in found]
    return {figure.findtext("figcaption"): figure for figure in figures}


def texts(figure: ElementTree.Element, kind: str) -> Iterator[ElementTree.Element]:
    return (text for text in figure.iter("text") if kind in text.get("class", "").split())


def drawn(figure: ElementTree.Element, label: str) -> list[tuple[float, float]]:
    """The values of a line, read as a person reads them: from its place between the numbers at the axes."""
    axes = []
    for kind, place in (("x", "x"), ("y", "y")):
        marks = [(float(t.get(place)), float(t.get("data-value")), t.text) for t in texts(figure, kind)]
        (a, value_a, text_a), (b, value_b, _) = marks[0], marks[-1]
        assert float(text_a.replace(",", "")) == pytest.approx(value_a, rel=1e-3)
        # the middle of a number stands 4 units below its line
        axes.append((a - 4 * (kind == "y"), value_a, (value_b - value_a) / (b - a)))
    (line,) = (p for p in figure.iter("polyline") if p.get("data-label") == label)
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    return [tuple(v + (at - a) * slope for at, (a, v, slope) in zip(p, axes, strict=True)) for p in points]


def assert_drawn(figure: ElementTree.Element, label: str, expected: list[tuple[float, float]]) -> None:
    """Places are rounded to a hundredth of a unit of a chart some 160 units high: 1e-4 of its range, with reserve."""
    found = drawn(figure, label)
    reach = [max(abs(v) for v in column) for column in zip(*expected, strict=True)]
    assert len(found) == len(expected)
    for (x, y), (step, value) in zip(found, expected, strict=True):
        assert (x, y) == (pytest.approx(step, abs=3e-4 * reach[0]), pytest.approx(value, abs=3e-4 * reach[1]))


def test_the_page_of_a_run_draws_what_the_files_hold(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    figures, records = figures_of(page), [record(step) for step in range(1, STEPS + 1)]
    losses, loss = figures["Losses (nats per token)"], [(r["step"], r["loss"]) for r in records]
    assert_drawn(losses, "each step", loss)
    assert_drawn(losses, "validation", [(r["step"], r["val_loss"]) for r in records if r["val_loss"] is not None])
    smooth = history.smooth([value for _, value in loss])
    assert_drawn(losses, "training, mean of 15 steps", [(s, v) for (s, _), v in zip(loss, smooth, strict=True)])
    assert "resumed" in [text.text for text in texts(losses, "quiet")]
    speeds = figures["Tokens a second, over all ranks"]
    assert_drawn(speeds, str(tmp_path / "run"), [(r["step"], r["tokens_per_second"]) for r in records])
    host = figures["Host: bytes in a backward (MiB)"]
    assert_drawn(host, "held by the library", [(r["step"], r["held_bytes"]["host"] / 2**20) for r in records])
    assert_drawn(host, "planned", [(r["step"], 12.0) for r in records])
    process = figures["The whole process (MiB)"]
    assert_drawn(process, "host memory", [(r["step"], r["process_bytes"]["host"] / 2**20) for r in records])
    assert "Disk: bytes in a backward (bytes)" not in figures, "nothing is on the disk"
    uneven = figures["Busiest expert of all layers, against its layer's mean"]
    busy = [(r["step"], 4 * max(c) / sum(c)) for r in records for c in [r["tokens_per_expert"]["blocks.1.mlp"]]]
    assert_drawn(uneven, "busiest ÷ mean", busy)
    assert "from &lt;checkpoint&gt; &amp; step 12" in page and "step 12</td>" in page


def test_the_page_of_a_run_has_the_table_of_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    page = page_of(run)
    rows = dict(re.findall(r"<tr><td>([^<]*)</td><td class=\"number\">([^<]*)</td></tr>", page))
    for label, (cell,) in history.rows_of([history.account(run)]):
        assert rows[html.escape(label)] == html.escape(cell)
    assert rows["seconds a step, median"] == "2.1" and rows["steps taken"] == str(STEPS)
    assert "steps taken" in capsys.readouterr().out


def test_loads_of_experts_are_those_of_the_last_steps(tmp_path: Path) -> None:
    (heat,) = (f for name, f in figures_of(page_of(write_run(tmp_path))).items() if name.startswith("Tokens of each"))
    cells = [float(cell.get("fill-opacity")) for cell in heat.iter("rect") if cell.get("class") == "heat"]
    counts = [10 * STEPS, 30 * STEPS, 20 * STEPS, sum(20 + step for step in range(1, STEPS + 1))]
    assert cells == pytest.approx([*(c / max(counts) for c in counts), 1, 1], abs=6e-4)
    assert next(t.text for t in texts(heat, "quiet")) == f"{4 * max(counts) / sum(counts):.2f} × (3)"


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    """Each text of a layout is hostile, as in a run that somebody else gave."""
    hostile = '"><script>alert(1)</script>'
    run = write_run(tmp_path)
    chunks = [{**c, **dict.fromkeys(("tier", "chunk_group", "residence"), hostile)} for c in CHUNKS]
    chunks = [{**c, "parameters": [[hostile, 10]], "shard_bytes": 64} for c in chunks]
    (run / "layout.json").write_text(json.dumps({"chunks": chunks, "planned_bytes": {hostile: PLANNED["host"]}}))
    page = page_of(run)
    figures_of(page)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_layers_are_drawn_by_tier_and_chunk(tmp_path: Path) -> None:
    (layers,) = (f for name, f in figures_of(page_of(write_run(tmp_path))).items() if name.startswith("Layers"))
    assert [text.text for text in texts(layers, "end")] == [
        "model.embed",
        "model.layers.0",
        "model.layers.1 … 2",
        "head",
    ]
    parts = [(r.get("class"), float(r.get("width")), r.findtext("title")) for r in layers.iter("rect")]
    assert [tier for tier, *_ in parts] == ["device", "device", "host", "host", "host"]
    unit = (parts[0][1] + 0.6) / 400  # each part leaves a gap of 0.6 behind it
    assert [(width + 0.6) / unit for _, width, _ in parts] == pytest.approx([400, 100, 60, 160, 70], abs=0.1)
    assert parts[2][2] == "chunk 1, host: 60 elements"
    assert [text.text for text in texts(layers, "quiet")] == ["400", "160", "2 × 160", "70"]
    assert [text.text for text in texts(layers, "inside")][:2] == ["0", "0"]


def test_the_timeline_is_to_scale(tmp_path: Path) -> None:
    figure = figures_of(page_of(write_run(tmp_path)))["Step 7, measured on rank 0"]
    assert [text.text for text in texts(figure, "end")] == ["gather", "compute"]
    spans = [(float(r.get("x")), float(r.get("width")), float(r.get("y"))) for r in figure.iter("rect")]
    begin, second = spans[0][0], spans[0][1] * 4
    found = [((x - begin) / second, width / second) for x, width, _ in spans]
    assert found == [pytest.approx(pair, abs=1e-3) for pair in [(0, 0.25), (0.5, 0.25), (0.25, 0.75)]]
    assert spans[0][2] == spans[1][2] != spans[2][2], "one lane for each kind"
    legend = ["".join(key.itertext()) for key in figure.iter("li")]
    assert legend == ["gather, 2 times 500 ms", "compute, 1 times 750 ms"]


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    one, two = write_run(tmp_path, "one"), write_run(tmp_path, "two")
    page = page_of(one, two)
    losses = figures_of(page)["Losses (nats per token)"]
    for run in (one, two):
        assert_drawn(losses, f"{run}, validation", [(s, 5.0 - 0.04 * s) for s in range(10, STEPS + 1, 10)])
        assert f'<div class="card"><h3>{run}</h3>' in page
    assert page.count("<figcaption>Layers") == 2 and f'<th class="number">{two}</th>' in page


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert "not begun" in page_of(tmp_path) and not figures_of(page_of(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "val_loss": null}\n{"step": 2, "lo')
    (tmp_path / "layout.json").write_text('{"chunks": [')
    (figure,) = figures_of(page_of(tmp_path)).values()
    assert [c.get("class") for c in figure.iter("circle")] == ["series c0 faint", "series c0 line"]


def test_distributions_are_the_latest_and_what_is_damaged_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    assert main(["report", str(tmp_path), "--activations"]) == 2
    assert "train with --run.activations true" in capsys.readouterr().err
    seen: list[Any] = [
        {"blocks.0": {"bytes": 2048, "rms": 0.5}},
        "damaged",
        {"blocks.0": {"bytes": 4096, "rms": None}, "head": {"bytes": 8, "rms": 1.25}, "norm": 3},
    ]
    lines = [{"step": i + 1, "loss": 1.0, "val_loss": None, "activations": its} for i, its in enumerate(seen)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path), "--activations"]) == 0
    shown = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in capsys.readouterr().out.splitlines()]
    expected = [["outputs, step 3", "bytes", "rms", "rms, step 1"]]
    expected += [["blocks.0", "4.00 KiB", "-", "0.5"], ["head", "8 B", "1.25", "-"]]
    assert [row for row in shown if len(row) == 4] == expected
    page = page_of(tmp_path)
    assert all(f">{cell}<" in page for row in expected for cell in row) and "norm" not in page


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    assert main(["report", str(run), "--html", str(tmp_path / "none/page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_the_page_of_a_model_says_what_inspect_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    wrapped, optimizer = em.wrap(
        net, torch.optim.AdamW(net.parameters()), plan=em.Plan.offload(rcache_blocks=3, chunk_numel=80)
    )
    wrapped(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = em.inspect(wrapped)
    facts = found.facts()
    assert [chunk["parameters"] for chunk in facts["chunks"]] == [
        [[f"{i}.weight", 64], [f"{i}.bias", 8]] for i in range(4)
    ]
    assert sum(chunk["shard_bytes"] for chunk in facts["chunks"]) == sum(row["shard_bytes"] for row in found.rows)
    planned = {tier: sum(kinds.values()) for tier, kinds in facts["planned_bytes"].items()}
    footprint = found.footprint
    assert planned == {"device": footprint.device_bytes, "host": footprint.host_bytes, "disk": footprint.disk_bytes}
    again = found.facts(backwards=2)["planned_bytes"]
    assert tuple(sum(again[tier].values()) for tier in ("device", "host")) == footprint.memory_bytes(2)
    found.html(tmp_path / "model.html")
    page, shown = (tmp_path / "model.html").read_text(), found._repr_html_()
    for text in (page, shown):
        names = [t.text for t in texts(next(iter(figures_of(text).values())), "end")]
        assert names == ["0 … 3"] or names == ["0", "1", "2", "3"]
        assert html.escape(str(found.plan)) in text
        assert f'<td>bytes fetched, host</td><td class="number">{found.statistics.bytes_fetched["host"]:,}</td>' in text
    assert shown.startswith('<div class="elixir">') and "<body" not in shown
    with pytest.raises(em.ConfigError, match="cannot write"):
        found.html(tmp_path / "none/model.html")
    optimizer.close()


def test_a_page_asks_nothing_of_the_network_and_runs_nothing(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    assert not re.search(r"<script|<img|<iframe|@import|https?:|url\(|\son\w+=", page)
    assert "default-src 'none'" in page and page.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme:dark" in page and "@media print" in page
    light, dark = (set(re.findall(r"--[\w-]+(?=:)", block)) for block in re.findall(r"\.elixir\{(--back[^}]+)\}", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) == light == dark, "a color without a value"


def test_long_lines_keep_their_extremes() -> None:
    points = [(float(i), float((i * 7919) % 10007)) for i in range(20_000)]
    kept = charts.thinned(points)
    assert len(kept) <= 601 and set(kept) <= set(points) and kept == sorted(kept)
    assert max(points, key=lambda p: p[1]) in kept and min(points, key=lambda p: p[1]) in kept
    assert kept[-1] == points[-1] and charts.thinned(points[:600]) == points[:600]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1]), (0.91, 1.02, [0.9, 0.95, 1, 1.05]), (-3, 7, [-5, 0, 5, 10]), (5, 5, [5])],
)
def test_axes_have_round_numbers_on_both_sides_of_the_values(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high, 3) == pytest.approx(expected)


def test_layers_are_named_to_their_number() -> None:
    names = ["model.layers.3.mlp.experts.7.up", "model.embed.weight", "lm_head", "0.weight", "blocks.12"]
    assert list(map(model.layer_of, names)) == ["model.layers.3", "model.embed", "lm_head", "0", "blocks.12"]


GOOD = {"console": [], "figures": 2, "empty": 0, "width": 400, "beyond": [], "letters": 9.0}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"console": ["CONSOLE:1] error"]}, "the console has messages"),
        ({"figures": 1}, "of 2 figures are drawn"),
        ({"empty": 1}, "of 2 figures are drawn"),
        ({"width": 401}, "must be scrolled"),
        ({"beyond": ["a"]}, "texts end beyond the edge"),
        ({"letters": 8.9}, "letters are 8.9 pixels high"),
    ],
)
def test_the_check_in_a_browser_sees_each_flaw(wrong: dict[str, Any], said: str) -> None:
    """Of `make test-page`, which needs a browser itself."""
    from tests import browser

    browser.check(GOOD, 2, 400)
    with pytest.raises(AssertionError, match=said):
        browser.check(GOOD | wrong, 2, 400)
