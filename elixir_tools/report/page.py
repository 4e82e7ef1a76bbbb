"""The page of `elixir-moe report --html`: one run, or several side by side.

Owns the choice of the charts and tables. What they show is read by `history` and drawn by `figures` and `page`. Values
that a run lacks are left out, so a run that has just begun has a page too.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from elixir_moe.ext.page import SERIES, document, model
from elixir_moe.ext.plans import seconds_text, size_text
from elixir_tools.report import figures, history, picture
from elixir_tools.report.figures import Series, Span, number_text
from elixir_tools.report.history import Story

_RECENT = 50
"""Steps over which the loads of experts are added up."""
_MOST_UNEVEN = 8
"""Layers whose loads stand in the table."""
_QUIET = ("saved",)
"""Kinds of events that get no line in the chart of losses."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
COMPUTE = "compute"
"""The lane of the model's own work in `timeline.json`."""
Card = tuple[str, str]
"""Title and content; no card without content."""


def page(stories: Sequence[Story]) -> str:
    """The page of runs, as an HTML document."""
    names = ", ".join(story.account["run"] for story in stories)
    compared = [losses(stories), _over_steps(stories, "Learning rate", "lr")]
    compared += [_over_steps(stories, "Gradient norm", "grad_norm"), speeds(stories)]
    table, outputs = ("In figures", _figures(stories)), "Distributions of outputs"
    if len(stories) == 1:
        (story,) = stories
        top = document.heading(names, _state(story)) + document.tiles(_tiles(story))
        drawn, wide = [_about(story), *compared, *_of_one(story), table], [(outputs, _outputs(story))]
    else:
        top, drawn, wide = document.heading(names) + _framed(table), compared, []
        for story in stories:
            run = story.account["run"]
            drawn += [(f"{run}: {title}", inside) for title, inside in (_about(story), *_of_one(story))]
            wide.append((f"{run}: {outputs}", _outputs(story)))
    return document.page(names, [top, document.cards(map(_framed, drawn)), *map(_framed, wide)])


def _of_one(story: Story) -> list[Card]:
    return [*memory(story), *_layers(story), *_timeline(story), *experts(story), *_tables(story)]


def _framed(found: Card) -> str:
    title, inside = found
    return document.card(title, [inside])


def losses(stories: Sequence[Story]) -> Card:
    """Training, validation and bigram losses against steps; of one run also the events."""
    several, lines = len(stories) > 1, list[Series]()
    for i, story in enumerate(stories):
        run, color = (story.account["run"], SERIES[i % len(SERIES)]) if several else ("", SERIES[0])
        losses = history.losses_of(story.records)
        lines += picture.loss_lines(*losses, story.account["bigram_loss"], run=run, color=color)
    told = [] if several else [e for e in stories[0].account["events"] if e["kind"] not in _QUIET]
    marks = [(event["step"], str(event["kind"])) for event in told if history.is_number(event["step"])]
    return _lines("Loss", lines, marks=marks)


def speeds(stories: Sequence[Story]) -> Card:
    """Tokens a second against steps, and what was predicted."""
    series = []
    for i, story in enumerate(stories):
        found, color = story.series("tokens_per_second"), SERIES[i % len(SERIES)]
        series.append(Series(label=story.account["run"] if len(stories) > 1 else "measured", points=found, color=color))
        expected = _predicted_tokens(story)
        if expected is not None and len(stories) == 1:
            points = [(step, expected) for step, _ in found]
            series.append(Series(label="predicted", points=points, color=SERIES[1], style="dashed"))
    return _lines("Tokens a second, over all ranks", series, from_zero=True)


def _predicted_tokens(story: Story) -> float | None:
    """Tokens a second, if a step took as long as predicted."""
    seconds = (story.account["prediction"] or {}).get("predicted_step_seconds")
    whole = [(r.get("tokens_per_second"), r.get("step_seconds")) for r in story.records]
    tokens = [speed * took for speed, took in whole if history.is_number(speed) and history.is_number(took)]
    return tokens[-1] / seconds if tokens and history.is_number(seconds) and seconds > 0 else None


def _over_steps(stories: Sequence[Story], title: str, key: str) -> Card:
    """One value of each step of each run."""
    several = len(stories) > 1
    found = [
        Series(label=story.account["run"] if several else title, points=story.series(key), color=SERIES[i % 8])
        for i, story in enumerate(stories)
    ]
    return _lines(title, found)


def memory(story: Story) -> list[Card]:
    """Bytes of each tier over time against the plan's and the process's, and what the plan's are made of."""
    drawn = []
    for tier, name in model.TIERS.items():
        held, process = story.series("held_bytes", tier), story.series("process_bytes", tier)
        planned = [(r["step"], float(p)) for r in story.records if (p := story.planned_at(r, tier)) is not None]
        if not any(value for _, value in [*held, *planned]):
            held = planned = []
        whole = "the most torch has allocated" if tier == "device" else "the whole process"
        series = [
            Series(label="held by the library in a backward", points=held),
            Series(label="planned", points=planned, color=SERIES[1], style="dashed"),
            Series(label=whole, points=process, color=SERIES[3]),
        ]
        drawn.append(_bytes(f"{name} of rank 0", series))
    rows, keys = model.planned(story.planned_bytes)
    return [*drawn, ("Planned bytes of rank 0, by tier", document.bars(rows, keys))]


def _bytes(title: str, series: Sequence[Series]) -> Card:
    """A chart of bytes from 0, in the largest unit that they fill."""
    largest = max((value for one in series for _, value in one.points), default=0)
    size, unit = next((size, unit) for size, unit in _UNITS if largest >= size or size == 1)
    scaled = [replace(one, points=[(step, value / size) for step, value in one.points]) for one in series]
    return _lines(f"{title} ({unit})", scaled, from_zero=True)


def experts(story: Story) -> list[Card]:
    """The loads of experts over the last steps, and how uneven they are over time."""
    loads = [
        (r["step"], {name: counts for name, counts in found.items() if _are_counts(counts)})
        for r in story.records
        if isinstance(found := r.get("tokens_per_expert"), dict)
    ]
    summed: dict[str, list[float]] = {}
    for _, layers in loads[-_RECENT:]:
        for name, counts in layers.items():
            before = summed.setdefault(name, [0.0] * len(counts))
            summed[name] = [a + b for a, b in zip(before, counts, strict=False)]
    worst = [(step, max(map(_uneven, layers.values()))) for step, layers in loads if layers]
    title = f"Tokens of each expert, last {min(_RECENT, len(loads))} steps"
    uneven = sorted(summed.items(), key=lambda item: -_uneven(item[1]))[:_MOST_UNEVEN]
    busiest = [[name, str(counts.index(max(counts))), f"{_uneven(counts):.2f} ×"] for name, counts in uneven]
    table = document.table(["most uneven layers", "busiest expert", "its tokens ÷ mean"], busiest)
    rows = [(model.layer_number(model.layer_of(name)), counts) for name, counts in summed.items()]
    drawn = figures.svg(figures.loads(rows), title) if rows else ""
    over_steps = [Series(label="busiest ÷ mean", points=worst)]
    return [
        (title, drawn and f"{drawn}{table}"),
        _lines("Busiest expert of all layers, against its layer's mean", over_steps, from_zero=True),
    ]


def _lines(
    title: str, series: Sequence[Series], *, from_zero: bool = False, marks: Sequence[tuple[float, str]] = ()
) -> Card:
    """A chart with a legend that has the last value of each line; no card without a point."""
    series = [one for one in series if one.points]
    if not series:
        return title, ""
    drawn = figures.svg(figures.lines(series, from_zero=from_zero, marks=marks), title)
    return title, drawn + document.legend((one.color, one.label, number_text(one.points[-1][1])) for one in series)


def _state(story: Story) -> str:
    return ": ".join(filter(None, (story.account["state"], story.account["reason"])))


def _tiles(story: Story) -> list[tuple[str, str, str]]:
    """The figures that people look at first."""
    found = story.account
    rate, expected = found["tokens_per_second"], _predicted_tokens(story)
    remark = f"predicted {number_text(expected)}" if expected is not None else ""
    tiles = [("step", f"{found['step']:,}", found["state"])]
    for key, what in (("train_loss", "training loss"), ("val_loss", "validation loss")):
        if found[key] is not None:
            best = found["best_val_loss"]
            said = f"best {best:.4f}, step {found['best_step']}" if key == "val_loss" else "last step"
            tiles.append((what, f"{found[key]:.4f}", said))
    if rate is not None:
        tiles.append(("tokens a second, median", number_text(rate), remark))
    if found["step_seconds"] is not None:
        tiles.append(("a step, median", seconds_text(found["step_seconds"]), ""))
    for tier, name in model.TIERS.items():
        held = story.series("held_bytes", tier)
        planned = story.planned_at(story.records[-1], tier) if story.records else None
        if held and held[-1][1]:
            said = "" if planned is None else f"planned {size_text(planned)}"
            tiles.append((f"{name} of rank 0", size_text(int(held[-1][1])), said))
    return tiles


def _about(story: Story) -> Card:
    return "This run", document.table(["", ""], [[k, v] for k, v in story.about.items()], numbers=False)


def _figures(stories: Sequence[Story]) -> str:
    accounts = [story.account for story in stories]
    rows = [[label, *cells] for label, cells in history.rows_of(accounts)]
    return document.table(["", *(account["run"] for account in accounts)], rows)


def _layers(story: Story) -> list[Card]:
    return [(model.TITLE, model.layer_bars(story.chunks)), ("Chunks", model.chunk_table(story.chunks))]


def _timeline(story: Story) -> list[Card]:
    """Shows what ran when in one step, how long each kind ran, and what ran while compute waited."""
    spans = [Span(**span) for span in story.spans]
    if not spans:
        return []
    title = f"Step {story.profiled_step} in time, measured on rank 0"
    names = list(dict.fromkeys(span.lane for span in spans))
    short = [replace(span, name=span.name.removeprefix("chunk ").split(" ")[0]) for span in spans]
    waits = _waits(spans)
    rows = []
    for lane in names:
        mine = [span for span in spans if span.lane == lane]
        ran = seconds_text(sum(span.end - span.begin for span in mine))
        rows.append([lane, f"{len(mine):,}", ran, seconds_text(waits[lane]) if waits[lane] else "-"])
    drawn = figures.svg(figures.lanes(short), title)
    return [(title, drawn + document.table(["", "times", "ran", "while compute waited"], rows))]


def _waits(spans: Sequence[Span]) -> dict[str, float]:
    """By lane: the seconds in which it ran and compute did not."""
    edges = sorted((at, way, span.lane) for span in spans for at, way in ((span.begin, 1), (span.end, -1)))
    found, running = dict.fromkeys((span.lane for span in spans), 0.0), Counter[str]()
    for (begin, way, lane), (end, *_) in pairwise(edges):
        running[lane] += way
        for one in running if not running[COMPUTE] else ():
            found[one] += (end - begin) * (running[one] > 0)
    return found


def _tables(story: Story) -> list[Card]:
    """Predicted and measured values, events, distributions, the plan and the settings."""
    found, rows = story.account["prediction"] or {}, []
    for name, text in (("step_seconds", seconds_text), *((f"{t}_bytes", size_text) for t in story.tiers)):
        expected, measured = found.get(f"predicted_{name}"), found.get(f"measured_{name}", found.get(f"held_{name}"))
        if history.is_number(expected):
            cell = text(measured) if history.is_number(measured) else "-"
            rows.append([name.replace("_", " "), text(expected), cell])
    events = [[str(e["step"]), str(e["kind"]), str(e["text"])] for e in story.account["events"]]
    plan = {key: value for key, value in (story.account["plan"] or {}).items() if value is not None}
    return [
        ("Predicted and measured", document.table(["", "predicted", "measured"], rows)),
        ("Events", document.table(["step", "event", "what"], events, numbers=False)),
        ("Plan, as settled", document.table(["setting", "value"], [[k, str(v)] for k, v in plan.items()])),
        ("Settings", document.table(["setting", "value"], [[k, str(v)] for k, v in story.settings.items()])),
    ]


def _outputs(story: Story) -> str:
    found = history.distributions_of(story.records)
    return document.table(*history.distribution_rows(found)) if found else ""


def _are_counts(found: object) -> bool:
    return isinstance(found, list) and bool(found) and all(map(history.is_number, found))


def _uneven(counts: Sequence[float]) -> float:
    """The busiest expert's tokens against the mean; 0 without a token."""
    return max(counts) * len(counts) / total if (total := sum(counts)) else 0.0


def write(path: Path, stories: Sequence[Story]) -> None:
    """Writes the page. Raises ConfigError if `path` cannot be written."""
    document.write(path, page(stories))
