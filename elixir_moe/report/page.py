"""The page of `elixir-moe report --html`: one run, or several side by side.

Owns the choice of the charts and tables. What they show is read by `history` and drawn by `page`. Values that a run
lacks are left out, so a run that has just begun has a page too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elixir_moe.chunks.plan import seconds_text, size_text
from elixir_moe.page import charts, document, model
from elixir_moe.page.charts import Series
from elixir_moe.report import history
from elixir_moe.report.history import Story

_RECENT = 50
"""Steps over which the loads of experts are added up."""
_QUIET = ("saved",)
"""Kinds of events that get no line in the chart of losses."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def page(stories: Sequence[Story]) -> str:
    """The page of runs, as an HTML document."""
    names = [story.account["run"] for story in stories]
    several = len(stories) > 1
    return document.page(
        ", ".join(names),
        [
            document.section(
                "Training", [losses(stories), speeds(stories), document.card("In figures", [_figures(stories)])]
            ),
            document.section("Memory of rank 0, against the plan", _each(stories, memory)),
            document.section("Where the layers live", _each(stories, _layers)),
            document.section("A step in time", _each(stories, _timeline)),
            document.section("Loads of experts", _each(stories, experts)),
            document.section("Distributions of outputs", _each(stories, _distributions)),
            document.section("Predicted and measured", _each(stories, _prediction)),
            document.section("Faults, resumes and other events", _each(stories, _events)),
            document.section("Plans" if several else "Plan", _each(stories, _plan)),
        ],
    )


def losses(stories: Sequence[Story]) -> str:
    """Training, validation and bigram losses against steps; of one run also the events."""
    several, series = len(stories) > 1, []
    for i, story in enumerate(stories):
        train, validation = history.losses_of(story.records)
        run = f"{story.account['run']}, " if several else ""
        smooth = list(zip((s for s, _ in train), history.smooth([v for _, v in train]), strict=True))
        color = i if several else 0
        series += [
            *[Series(label=f"{run}each step", points=train, color=color, style="faint")] * (not several),
            Series(label=f"{run}training, mean of {history.WINDOW} steps", points=smooth, color=color),
            Series(label=f"{run}validation", points=validation, color=i if several else 1, style="dots"),
        ]
        bigram = story.account["bigram_loss"]
        if bigram is not None and train and not several:
            ends = [(train[0][0], bigram), (train[-1][0], bigram)]
            series.append(Series(label="bigram model", points=ends, color=7, style="dashed"))
    told = [] if several else [e for e in stories[0].account["events"] if e["kind"] not in _QUIET]
    marks = [(event["step"], event["kind"]) for event in told if history.is_number(event["step"])]
    return charts.lines("Losses", series, unit="nats per token", marks=marks)


def speeds(stories: Sequence[Story]) -> str:
    """Tokens a second against steps."""
    found = [
        Series(label=story.account["run"], points=story.series("tokens_per_second"), color=i)
        for i, story in enumerate(stories)
    ]
    return charts.lines("Tokens a second, over all ranks", found, from_zero=True)


def memory(story: Story) -> list[str]:
    """Bytes of each tier over time beside the plan's, bytes of the process, and what the plan's are made of."""
    drawn = []
    for tier, kinds in story.planned_bytes.items():
        held, planned = story.series("held_bytes", tier), float(sum(kinds.values()))
        if held and (planned or any(value for _, value in held)):
            series = [
                Series(label="held by the library", points=held),
                Series(label="planned", points=[(step, planned) for step, _ in held], color=1, style="dashed"),
            ]
            drawn.append(_bytes(f"{tier.capitalize()}: bytes in a backward", series))
    process = [
        Series(label=label, points=story.series("process_bytes", tier), color=color)
        for tier, label, color in (("host", "host memory", 1), ("device", "the most torch has allocated", 0))
    ]
    drawn.append(_bytes("The whole process", process))
    return [*drawn, *([model.planned({"planned_bytes": story.planned_bytes})] if story.planned_bytes else [])]


def _bytes(title: str, series: Sequence[Series]) -> str:
    """A chart of bytes from 0, in the largest unit that they fill."""
    largest = max((value for one in series for _, value in one.points), default=0)
    size, unit = next((size, unit) for size, unit in _UNITS if largest >= size or size == 1)
    scaled = [replace(one, points=[(step, value / size) for step, value in one.points]) for one in series]
    return charts.lines(title, scaled, unit=unit, from_zero=True)


def experts(story: Story) -> list[str]:
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
    rows = [(name, counts, f"{_uneven(counts):.2f} × ({_busiest(counts)})") for name, counts in summed.items()]
    worst = [(step, max(map(_uneven, layers.values()))) for step, layers in loads if layers]
    steps = min(_RECENT, len(loads))
    return [
        charts.heat(f"Tokens of each expert, last {steps} steps; the busiest against the mean (which one)", rows),
        charts.lines(
            "Busiest expert of all layers, against its layer's mean",
            [Series(label="busiest ÷ mean", points=worst)],
            from_zero=True,
        ),
    ]


def _each(stories: Sequence[Story], draw: Callable[[Story], list[str]]) -> Iterable[str]:
    """What `draw` gives for each run: in a card with the run's name if there are several."""
    if len(stories) == 1:
        return draw(stories[0])
    return [document.card(story.account["run"], draw(story)) for story in stories]


def _figures(stories: Sequence[Story]) -> str:
    accounts = [story.account for story in stories]
    rows = [[label, *cells] for label, cells in history.rows_of(accounts)]
    return document.table(["", *(account["run"] for account in accounts)], rows)


def _layers(story: Story) -> list[str]:
    if not story.chunks:
        return []
    return [model.layers(story.chunks), document.card("Chunks", [model.chunk_table(story.chunks)])]


def _timeline(story: Story) -> list[str]:
    spans = [charts.Span(**span) for span in story.spans]
    return [charts.timeline(f"Step {story.profiled_step}, measured on rank 0", spans)]


def _distributions(story: Story) -> list[str]:
    found = history.distributions_of(story.records)
    table = document.table(*history.distribution_rows(found)) if found else ""
    return [document.card("Of layers and their parts", [table])]


def _prediction(story: Story) -> list[str]:
    found = story.account["prediction"] or {}
    rows = []
    for name, text in (("step_seconds", seconds_text), *((f"{t}_bytes", size_text) for t in story.tiers)):
        expected = found.get(f"predicted_{name}")
        measured = found.get(f"measured_{name}", found.get(f"held_{name}"))
        if history.is_number(expected):
            rows.append(
                [name.replace("_", " "), text(expected), text(measured) if history.is_number(measured) else "-"]
            )
    return [document.card("A step", [table])] if (table := document.table(["", "predicted", "measured"], rows)) else []


def _events(story: Story) -> list[str]:
    events = [[str(e["step"]), str(e["kind"]), str(e["text"])] for e in story.account["events"]]
    state = story.account["state"], story.account["reason"]
    words = document.text(": ".join(filter(None, state)))
    return [document.card("Events", [words, document.table(["step", "event", "what"], events, numbers=False)])]


def _plan(story: Story) -> list[str]:
    rows = [[key, str(value)] for key, value in (story.account["plan"] or {}).items() if not isinstance(value, dict)]
    return [document.card("As settled", [table])] if (table := document.table(["setting", "value"], rows)) else []


def _are_counts(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(map(history.is_number, found))


def _uneven(counts: Sequence[float]) -> float:
    """The busiest expert's tokens against the mean; 0 without a token."""
    return max(counts) * len(counts) / total if (total := sum(counts)) else 0.0


def _busiest(counts: Sequence[float]) -> int:
    return max(range(len(counts)), key=counts.__getitem__)


def write(path: Path, stories: Sequence[Story]) -> None:
    """Writes the page. Raises ConfigError if `path` cannot be written."""
    document.write(path, page(stories))
