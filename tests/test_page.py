"""The pages: what they draw is what the files and the model say, and they ask nothing of the network."""

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import elixir_moe as em
from elixir_moe.page import model
from elixir_tools.cli.main import main
from elixir_tools.report import figures, history
from tests.support.every import every

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
        "lr": 1e-3 * step,
        "step_seconds": 0.1 * step,
        "tokens_per_second": 1000.0 + 37 * step,
        "held_bytes": {"device": 4 << 20, "host": (8 << 20) + (step << 16), "disk": 0},
        "process_bytes": {"host": (400 << 20) + (step << 20)},
        "tokens_per_expert": {"blocks.1.mlp": [10, 30, 20, 20 + step], "blocks.2.mlp": [1, 1]},
    }


def write_run(folder: Path, name: str = "run") -> Path:
    run = folder / name
    run.mkdir()
    (run / "config.yaml").write_text(f"run: {{out: {run}}}\nmodel: {{d_model: 64, hf: null}}\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in range(1, STEPS + 1)))
    chunks = [{**c, "chunk_group": "g", "residence": "cached", "shards": 1, "shard_bytes": 64} for c in CHUNKS]
    (run / "layout.json").write_text(json.dumps({"chunks": chunks, "planned_bytes": PLANNED}))
    (run / "timeline.json").write_text(json.dumps({"step": 7, "spans": SPANS}))
    (run / "summary.json").write_text(json.dumps({"prediction": {"predicted_step_seconds": 2.0}, "parameters": 1234}))
    event = {"step": 12, "time": 0.0, "kind": "resumed", "text": "from <checkpoint> & step 12"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    return run


def page_of(*runs: Path) -> str:
    path = runs[0].parent / "page.html"
    assert main(["report", *map(str, runs), "--html", str(path)]) == 0
    return path.read_text()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run and its page, for the tests that only look."""
    run = write_run(tmp_path_factory.mktemp("shared"))
    return run, page_of(run)


@pytest.fixture(scope="module")
def cards(shared: tuple[Path, str]) -> dict[str, ElementTree.Element]:
    return cards_of(shared[1])


def cards_of(page: str) -> dict[str, ElementTree.Element]:
    """{title: card}; each is well formed."""
    cards = [ElementTree.fromstring(card) for card in re.findall(r"<section.*?</section>", page)]
    return {card.findtext("h2"): card for card in cards}


def words(card: ElementTree.Element) -> list[str]:
    """The texts of a chart."""
    return [text.text for text in card.iter("text")]


def rows(card: ElementTree.Element) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in card.iter("tr")]


def number(said: str) -> float:
    return float(said.rstrip("kMG").replace(",", "")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(said[-1], 1)


def drawn(card: ElementTree.Element, label: str) -> np.ndarray:
    """The corners of a line, read as a person reads them: from their place between the numbers at the axes."""
    axes = []
    for kind in ("x", "y"):
        ticks = [g for g in card.iter("g") if g.get("class") == kind]
        values = [number(tick.find(".//text").text) for tick in ticks]
        if kind == "x":  # a number stands in the middle below its place, or its line runs there
            places = [float(tick.find(".//text").get("x")) for tick in ticks]
        else:
            places = [float(tick.find(".//path").get("d").split()[2]) for tick in ticks]
        axes.append(np.polyfit(places, values, 1))
    (line,) = (g for g in card.iter("g") if g.get("data-label") == label)
    points = np.array(re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", line.find("path").get("d")), float)
    return np.stack([np.polyval(axis, points[:, place]) for place, axis in enumerate(axes)], axis=1)


def assert_drawn(card: ElementTree.Element, label: str, expected: list[tuple[float, float]]) -> None:
    """Places are rounded to a hundredth of a point, and corners that nobody would see, below 1/9 of one, are left out:
    1e-3 of a chart some 150 points high, with reserve."""
    found, (steps, values) = drawn(card, label), np.array(expected).T
    assert found[[0, -1], 0] == pytest.approx(steps[[0, -1]], abs=2e-3 * steps.max())
    assert np.interp(steps, *found.T) == pytest.approx(values, abs=2e-3 * abs(values).max())


def test_the_page_of_a_run_draws_what_the_files_hold(
    shared: tuple[Path, str], cards: dict[str, ElementTree.Element]
) -> None:
    page, records = shared[1], [record(step) for step in range(1, STEPS + 1)]
    losses, loss = cards["Loss"], [(r["step"], r["loss"]) for r in records]
    assert_drawn(losses, "each step", loss)
    assert_drawn(losses, "validation", [(r["step"], r["val_loss"]) for r in records if r["val_loss"] is not None])
    smooth = history.smooth([value for _, value in loss])
    assert_drawn(losses, "training, mean of 15 steps", [(s, v) for (s, _), v in zip(loss, smooth, strict=True)])
    assert "resumed" in words(losses)
    for title, label, key in (
        ("Learning rate", "Learning rate", "lr"),
        ("Gradient norm", "Gradient norm", "grad_norm"),
        ("Tokens a second, over all ranks", "measured", "tokens_per_second"),
    ):
        assert_drawn(cards[title], label, [(r["step"], r[key]) for r in records])
    predicted = records[-1]["tokens_per_second"] * records[-1]["step_seconds"] / 2.0
    assert_drawn(cards["Tokens a second, over all ranks"], "predicted", [(1, predicted), (STEPS, predicted)])
    host = cards["RAM of rank 0 (MiB)"]
    assert_drawn(
        host, "held by the library in a backward", [(r["step"], r["held_bytes"]["host"] / 2**20) for r in records]
    )
    assert_drawn(host, "planned", [(r["step"], 12.0) for r in records])
    assert_drawn(host, "the whole process", [(r["step"], r["process_bytes"]["host"] / 2**20) for r in records])
    assert not [title for title in cards if title.startswith("Disk")], "nothing is on the disk"
    busy = [(r["step"], 4 * max(c) / sum(c)) for r in records for c in [r["tokens_per_expert"]["blocks.1.mlp"]]]
    assert_drawn(cards["Busiest expert of all layers, against its layer's mean"], "busiest ÷ mean", busy)
    assert rows(cards["Events"])[1:] == [["12", "resumed", "from <checkpoint> & step 12"]]
    tiles = dict(re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b>', page))
    assert (
        tiles["VRAM of rank 0"] == "4.00 MiB" and tiles["step"] == str(STEPS) and tiles["validation loss"] == "3.4000"
    )
    assert ["parameters", "1,234"] in rows(cards["This run"])
    assert ["model.d_model", "64"] in rows(cards["Settings"])


def test_records_of_any_trainer_have_a_page_and_each_step_its_own_plan(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"run: {{out: {tmp_path}}}\n")
    about = {
        "command": "elixir-moe sft ...",
        "model": "Qwen/Qwen3-8B",
        "data": "trl-lib/Capybara",
        "adapters": "rank 8",
    }
    (tmp_path / "about.json").write_text(json.dumps(about))
    lacking = {"grad_norm": None, "tokens_per_second": None, "tokens_per_expert": {}, "held_bytes": {"host": 9 << 20}}
    lines = [
        {"step": step, "loss": 2.0, "val_loss": loss, "planned_bytes": {"host": planned << 20}} | lacking
        for step, loss, planned in ((9, None, 20), (10, 3.0, 20), (11, None, 12))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cards = cards_of(page_of(tmp_path))
    assert [name for name, card in cards.items() if card.find("svg") is not None] == ["Loss", "RAM of rank 0 (MiB)"]
    planned = drawn(cards["RAM of rank 0 (MiB)"], "planned")
    assert planned == pytest.approx(np.array([(9, 20), (10, 20), (11, 12)]), abs=0.05)
    said = rows(cards["This run"])
    assert said[1:4] == [list(item) for item in [*about.items()][1:]] and said[-1] == ["command", about["command"]]


def test_the_page_of_a_run_has_the_table_of_the_terminal(
    shared: tuple[Path, str], cards: dict[str, ElementTree.Element], capsys: pytest.CaptureFixture[str]
) -> None:
    run, found = shared[0], dict(rows(cards["In figures"]))
    for label, (cell,) in history.rows_of([history.account(run)]):
        assert found[label] == cell
    assert found["seconds a step, median"] == "2.1" and found["steps taken"] == str(STEPS)
    assert main(["report", str(run)]) == 0
    assert "steps taken" in capsys.readouterr().out


def test_loads_of_experts_are_those_of_the_last_steps(cards: dict[str, ElementTree.Element]) -> None:
    card = cards[f"Tokens of each expert, last {STEPS} steps"]
    data = card.find(".//image").get("href").partition("base64,")[2]
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    counts = [10 * STEPS, 30 * STEPS, 20 * STEPS, sum(20 + step for step in range(1, STEPS + 1))]
    shown = picture[:, :, 3] / 255
    assert shown == pytest.approx(np.array([[c / max(counts) for c in counts], [1, 1, 0, 0]]), abs=1 / 255)
    assert rows(card)[1] == ["blocks.1.mlp", "3", f"{4 * max(counts) / sum(counts):.2f} ×"]


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    """Each text of a layout is hostile, as in a run that somebody else gave."""
    hostile = '"><script>alert(1)</script>$a^$'
    run = write_run(tmp_path)
    chunks = [{**c, **dict.fromkeys(("tier", "chunk_group", "residence"), hostile)} for c in CHUNKS]
    chunks = [{**c, "parameters": [[hostile, 10]], "shard_bytes": 64} for c in chunks]
    (run / "layout.json").write_text(json.dumps({"chunks": chunks, "planned_bytes": {hostile: PLANNED["host"]}}))
    (run / "metrics.jsonl").write_text(json.dumps(record(1) | {"tokens_per_expert": {hostile: [1, 2]}}) + "\n")
    (run / "timeline.json").write_text(json.dumps({"step": 7, "spans": [s | {"lane": hostile} for s in SPANS]}))
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "kind": hostile, "text": hostile}) + "\n")
    (run / "about.json").write_text(json.dumps({hostile: hostile}))
    page = page_of(run)
    cards_of(page)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and 'var(--">' not in page


def bars(card: ElementTree.Element) -> list[tuple[str, str, list[tuple[str, float, str]]]]:
    """(name, end, (color, percent of the width, what is said) of each part) of each bar."""
    found = []
    for bar in (div for div in card.iter("div") if div.get("class") == "bar"):
        name, end = (span.text for span in bar.iter("span"))
        styles = [re.fullmatch(r"width:([\d.]+)%;background:var\(--(\w+)\)", i.get("style")) for i in bar.iter("i")]
        said = [i.get("title") for i in bar.iter("i")]
        found.append((name, end, [(m[2], float(m[1]), title) for m, title in zip(styles, said, strict=True)]))
    return found


def test_layers_are_drawn_by_tier_and_chunk(cards: dict[str, ElementTree.Element]) -> None:
    found = bars(cards[model.TITLE])
    assert [(name, end) for name, end, _ in found] == [
        ("model.embed", "400"),
        ("model.layers.0", "160"),
        ("model.layers.1 … 2", "2 × 160"),
        ("head", "70"),
    ]
    parts = [part for *_, parts in found for part in parts]
    assert [tier for tier, *_ in parts] == ["device", "device", "host", "host", "host"]
    assert [percent * 4 for _, percent, _ in parts] == pytest.approx([400, 100, 60, 160, 70], abs=0.1)
    assert parts[2][2] == "chunk 1, host: 60 elements"
    assert bars(cards["Planned bytes of rank 0, by tier"])[1] == (
        "RAM",
        "12.00 MiB",
        [("host", 100.0, "shards, masters, moments: 12.00 MiB")],
    )


def test_the_timeline_is_to_scale(cards: dict[str, ElementTree.Element]) -> None:
    card = cards["Step 7 in time, measured on rank 0"]
    (line,) = (g for g in card.iter("g") if g.get("class") == "x" and g.find(".//text").text == "1 s")
    second, lanes = float(line.find(".//path").get("d").split()[1]), {}
    for lane in (g for g in card.iter("g") if g.get("data-label")):
        shapes = [np.array(re.findall(r"[ML] ([-\d.]+)", path.get("d")), float) for path in lane.iter("path")]
        lanes[lane.get("data-label")] = [(x.min(), x.max()) for x in shapes]
    begin = lanes["gather"][0][0]
    to_seconds = [
        (lane, *((np.array(reach) - begin) / (second - begin))) for lane, its in lanes.items() for reach in its
    ]
    expected = [("gather", 0, 0.25), ("gather", 0.5, 0.75), ("compute", 0.25, 1)]
    assert [lane for lane, *_ in to_seconds] == [lane for lane, *_ in expected]
    assert [reach for _, *reach in to_seconds] == [pytest.approx(reach, abs=1e-3) for _, *reach in expected]
    assert rows(card)[1:] == [["gather", "2", "500 ms", "250 ms"], ["compute", "1", "750 ms", "-"]]


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    one, two = write_run(tmp_path, "one"), write_run(tmp_path, "two")
    page = page_of(one, two)
    cards = cards_of(page)
    for run in (one, two):
        expected = [(s, 5.0 - 0.04 * s) for s in range(10, STEPS + 1, 10)]
        assert_drawn(cards["Loss"], f"{run}, validation", expected)
        assert bars(cards[f"{run}: {model.TITLE}"])
    assert rows(cards["In figures"])[0] == ["", str(one), str(two)]


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert "not begun" in page_of(tmp_path) and "<svg" not in page_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "val_loss": null}\n{"step": 2, "lo')
    (tmp_path / "layout.json").write_text('{"chunks": [')
    (card,) = (card for card in cards_of(page_of(tmp_path)).values() if card.find("svg") is not None)
    labels = [g.get("data-label") for g in card.iter("g") if g.find("g/use") is not None]
    assert labels == ["each step", "training, mean of 15 steps"], "a single point is a dot"


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
    assert every(f">{cell}<" in page for row in expected for cell in row) and ">norm<" not in page


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "none/page.html")]) == 2
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
        names = [name for name, *_ in bars(cards_of(text)[model.TITLE])]
        assert names == ["0 … 3"] or names == ["0", "1", "2", "3"]
        assert html.escape(str(found.plan)) in text
        assert f'<td>bytes fetched, host</td><td class="number">{found.statistics.bytes_fetched["host"]:,}</td>' in text
    assert shown.startswith('<div class="elixir">') and "<body" not in shown
    with pytest.raises(em.ConfigError, match="cannot write"):
        found.html(tmp_path / "none/model.html")
    optimizer.close()


def test_a_page_asks_nothing_of_the_network_and_runs_nothing(shared: tuple[Path, str]) -> None:
    page = shared[1]
    assert not re.search(r"<script|<img|<iframe|@import|https?:|url\((?!#)|\son\w+=", page)
    assert "default-src 'none'" in page and page.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme:dark" in page and "@media print" in page
    light, dark = (set(re.findall(r"--[\w-]+(?=:)", block)) for block in re.findall(r"\.elixir\{(--back[^}]+)\}", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= light == dark, "a color without a value"
    assert not re.search(r"#[0-9a-f]{6}", "".join(re.findall(r"<svg.*?</svg>", page))), "a color that is not the page's"


def test_long_lines_keep_their_extremes() -> None:
    points = [(float(i), float((i * 7919) % 10007)) for i in range(20_000)]
    kept = figures.thinned(points)
    assert len(kept) <= 602 and set(kept) <= set(points) and kept == sorted(kept)
    assert max(points, key=lambda p: p[1]) in kept and min(points, key=lambda p: p[1]) in kept
    assert kept[-1] == points[-1] and figures.thinned(points[:600]) == points[:600]


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
