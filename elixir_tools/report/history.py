"""`elixir-moe report`: reads the directories of runs, finished or not, and shows them side by side.

Changes nothing. Truncated or damaged records are left out, as a resumed run leaves them out.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elixir_moe.errors import ConfigError
from elixir_moe.ext.plans import Tier, size_text
from elixir_tools import settings
from elixir_tools.report.directory import is_claimed, is_run

_SHOWN = {
    "state": "state",
    "step": "steps taken",
    "train_loss": "training loss, last step",
    "val_loss": "validation loss, last",
    "best_val_loss": "validation loss, best",
    "bigram_loss": "bigram model's",
    "grad_norm": "gradient norm, median",
    "step_seconds": "seconds a step, median",
    "tokens_per_second": "tokens a second, median",
    "hit_rate": "rCache hits",
    "bytes_fetched": "bytes fetched from the host a step",
    "bytes_offloaded": "bytes offloaded to the host a step",
    "collective_bytes": "bytes in collectives a step",
    "events": "events",
    "checkpoint": "checkpoint",
}
"""The keys of an account that the table shows, with their labels."""
_WIDEST = 1000
"""Characters of the widest line that is printed whole."""
WINDOW = 15
"""Steps that the smoothed training loss averages over."""


def records_of(metrics: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, record) of each complete record in ``metrics.jsonl``; empty if there is no such file."""
    lines = _text(metrics).splitlines(keepends=True)
    found = [(line, _object(line)) for line in lines if line.endswith("\n")]
    return [(line, record) for line, record in found if _is_record(record)]


def losses_of(records: Iterable[Mapping[str, Any]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, loss) of each step, and of each evaluation."""
    records = list(records)
    train, validation = ([(r["step"], r[k]) for r in records if r[k] is not None] for k in ("loss", "val_loss"))
    return train, validation


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of the neighbors up to half a window away, equally many on both sides, so that the curve is not delayed."""
    found = []
    for i in range(len(values)):
        reach = min(WINDOW // 2, i, len(values) - 1 - i)
        near = values[i - reach : i + reach + 1]
        found.append(sum(near) / len(near))
    return found


def finite(value: Any) -> Any:
    """Nested plain data with non-finite floats replaced by None, since JSON has none."""
    if isinstance(value, dict):
        return {key: finite(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return list(map(finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_record(found: Mapping[str, Any]) -> bool:
    losses = [found.get(key, "") for key in ("loss", "val_loss")]
    return is_number(found.get("step")) and all(loss is None or is_number(loss) for loss in losses)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number that can be shown and drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def account(directory: Path) -> dict[str, Any]:
    """A summary of a run so far, ready for JSON; values missing from its files are None.

    Losses are in nats per token. Times are medians over all steps but the first, which also allocates. Bytes and hits
    are those of rank 0, as in `StepRecord`; fetched and offloaded bytes are those between device and host. Raises
    ConfigError if `directory` does not belong to a run.
    """
    if not is_run(directory):
        raise ConfigError(
            f"{str(directory)!r} is not the directory of a run (it has no config.yaml): name one that `train` or `sft` "
            f"has written"
        )
    names = ("status.json", "summary.json", "plan.json")
    status, summary, plan = (_object(_text(directory / name)) for name in names)
    records = [record for _, record in records_of(directory / "metrics.jsonl")]
    later = records[1:] or records
    validations = [(r["val_loss"], r["step"]) for r in records if r["val_loss"] is not None]
    counted = [r["statistics"] for r in later if isinstance(r.get("statistics"), dict)]
    hits, misses = (sum(_total(s.get(name)) for s in counted) for name in ("hits", "misses"))
    events = [_object(line) for line in _text(directory / "events.jsonl").splitlines()]
    return {
        "run": str(directory),
        "state": _state(directory, status),
        "reason": _words(status.get("reason")),
        "step": records[-1]["step"] if records else 0,
        "train_loss": records[-1]["loss"] if records else None,
        "val_loss": validations[-1][0] if validations else None,
        "best_val_loss": min(validations)[0] if validations else None,
        "best_step": min(validations)[1] if validations else None,
        "bigram_loss": bigram if is_number(bigram := summary.get("bigram_loss")) else None,
        **{name: _median(r.get(name) for r in later) for name in ("grad_norm", "step_seconds", "tokens_per_second")},
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        **{
            name: _median(_total(_beyond_device(s.get(name))) for s in counted)
            for name in ("bytes_fetched", "bytes_offloaded")
        },
        "collective_bytes": _median(_total(s.get("collective_bytes")) for s in counted),
        "checkpoint": _words(status.get("checkpoint")),
        "plan": finite(plan) or None,
        "prediction": finite(summary.get("prediction")),
        "events": [finite(event) for event in events if {"step", "kind", "text"} <= event.keys()],
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A run's files, as far as they are whole."""

    account: dict[str, Any]
    """The result of `account`."""
    records: list[dict[str, Any]]
    """The steps."""
    planned_bytes: dict[str, dict[str, int]]
    """{tier: {kind: bytes}} that the plan foresees on rank 0."""
    chunks: list[dict[str, Any]]
    """The result of `Inspection.facts`."""
    spans: list[dict[str, Any]]
    """The spans of one step: lane, name, begin and end in seconds."""
    profiled_step: int
    """The number of that step; 0 without one."""
    about: dict[str, str]
    """Describes the run: model, data, adapters, command, machine, as far as its files say."""
    settings: dict[str, Any]
    """Its settings, flat: {"model.d_model": 64}."""

    @property
    def tiers(self) -> list[str]:
        """All tiers."""
        return [tier.value for tier in Tier]

    def planned_at(self, record: Mapping[str, Any], tier: str) -> int | None:
        """The bytes of a tier that the plan of this step foresees; None if nothing says."""
        kinds = record.get("planned_bytes") or self.planned_bytes
        return _total(kinds[tier]) if isinstance(kinds, dict) and tier in kinds else None

    def series(self, key: str, inside: str | None = None) -> list[tuple[float, float]]:
        """(step, value) of the steps that have `key`, or `inside` of it, as a number."""
        found = ((r["step"], r.get(key)) for r in self.records)
        if inside is not None:
            found = ((step, value.get(inside)) for step, value in found if isinstance(value, dict))
        return [(step, value) for step, value in found if is_number(value)]


def story(directory: Path) -> Story:
    """The files of a run. Raises ConfigError if `directory` does not belong to one."""
    found = account(directory)
    layout, timeline = (_object(_text(directory / name)) for name in ("layout.json", "timeline.json"))
    return Story(
        account=found,
        records=[record for _, record in records_of(directory / "metrics.jsonl")],
        planned_bytes=layout.get("planned_bytes", {}),
        chunks=layout.get("chunks", []),
        spans=timeline.get("spans", []),
        profiled_step=timeline.get("step", 0),
        about=_about(directory),
        settings={k: v for k, v in _flat(settings.read_yaml(directory / "config.yaml")) if k != "run.out"},
    )


def _about(directory: Path) -> dict[str, str]:
    """Yields what ``about.json`` says, then sizes and times that other files have."""
    summary = _object(_text(directory / "summary.json"))
    found = {str(key): str(value) for key, value in _object(_text(directory / "about.json")).items()}
    found |= {key: f"{summary[key]:,}" for key in ("parameters", "ranks") if is_number(summary.get(key))}
    for key, name in (("begun", "config.yaml"), ("last record", "metrics.jsonl")):
        if key not in found and (directory / name).is_file():
            found[key] = f"{datetime.fromtimestamp((directory / name).stat().st_mtime):%Y-%m-%d %H:%M}"
    return dict(sorted(found.items(), key=lambda item: item[0] == "command"))  # the longest comes last


def _flat(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by their whole names, without those that are not set."""
    for key, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", value


def distributions(directory: Path) -> list[dict[str, Any]]:
    """Returns `distributions_of` a run. Raises ConfigError if the run has recorded none."""
    found = distributions_of(record for _, record in records_of(directory / "metrics.jsonl"))
    if not found:
        raise ConfigError(
            f"--activations: {str(directory)!r} has recorded none: train with --run.activations true, and ask again "
            f"when the model was evaluated"
        )
    return found


def distributions_of(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By evaluation, if the run recorded them: its ``step``, and the figures of outputs as ``modules``."""
    found = ((r["step"], r.get("activations")) for r in records)
    whole = [(step, {n: row for n, row in its.items() if isinstance(row, dict)}) for step, its in found if _has(its)]
    return [{"step": step, "modules": modules} for step, modules in whole if modules]


def distribution_rows(found: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: the latest figures of each module, and its root mean square of the earliest."""
    first, last = found[0], found[-1]
    columns = list(dict.fromkeys(name for row in last["modules"].values() for name in row))
    rows = [
        [
            module,
            *(_figure(name, row.get(name)) for name in columns),
            _figure("", first["modules"].get(module, {}).get("rms")),
        ]
        for module, row in last["modules"].items()
    ]
    return [f"outputs, step {last['step']}", *columns, f"rms, step {first['step']}"], rows


def rows_of(accounts: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(label, a cell for each run) of every figure that some run has."""
    shown = [key for key in _SHOWN if any(one[key] is not None for one in accounts)]
    return [(_SHOWN[key], [_cell(key, one[key]) for one in accounts]) for key in shown]


def show(console: Console, accounts: Sequence[Mapping[str, Any]]) -> None:
    """Prints runs side by side, and below them the events of each, and its distributions if the account has them."""
    table = Table(title_justify="left")
    table.add_column("")
    for one in accounts:
        table.add_column(Text(one["run"]), justify="right", overflow="fold")
    for label, cells in rows_of(accounts):
        table.add_row(label, *map(Text, cells))
    console.print(table)
    for one in accounts:
        lines = [f"step {event['step']}: {event['kind']}: {event['text']}" for event in one["events"]]
        told = any(event["text"] == one["reason"] for event in one["events"])
        lines += [f"{one['state']}: {one['reason']}"] if one["reason"] and not told else []
        if lines:
            console.print("\n".join([one["run"], *(f"  {line}" for line in lines)]), highlight=False, markup=False)
        if "activations" in one:
            table = _distribution_table(one)
            table.width = console.measure(table, options=console.options.update_width(_WIDEST)).maximum
            console.print(table, crop=False)  # neither names nor figures are broken, however narrow the terminal is


def _distribution_table(one: Mapping[str, Any]) -> Table:
    head, rows = distribution_rows(one["activations"])
    table = Table(title=Text(one["run"]), title_justify="left")
    for name in head:
        table.add_column(Text(name), justify="left" if name == head[0] else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _has(found: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(found, dict) and bool(found)


def _figure(name: str, value: Any) -> str:
    """A figure of a distribution; "-" if it is not finite."""
    if not is_number(value):
        return "-"
    return size_text(int(value)) if name == "bytes" else f"{value:.3g}"


def _words(value: Any) -> str | None:
    return value if value and isinstance(value, str) else None


def _state(directory: Path, status: Mapping[str, Any]) -> str:
    """The last recorded state of the run; if that is "running" and no process holds the directory, adds that."""
    state = str(status.get("state", "not begun"))
    try:
        if state != "running" or is_claimed(directory):
            return state
    except ConfigError:
        return "running, or ended without a word: its file system has no locks, which would tell"
    return "ended without a word; the same command continues it"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "events":
        return str(len(value))
    if key == "hit_rate":
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _median(values: Any) -> float | None:
    numbers = [value for value in values if is_number(value)]
    return median(numbers) if numbers else None


def _beyond_device(by_tier: Any) -> Any:
    """Bytes by tier without the device's own: a shard on the device does not cross the link."""
    return {t: n for t, n in by_tier.items() if t != Tier.DEVICE} if isinstance(by_tier, dict) else None


def _total(counts: Any) -> int:
    """The sum of the numbers in nested objects."""
    if isinstance(counts, dict):
        return sum(map(_total, counts.values()))
    return int(counts) if is_number(counts) else 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str) -> dict[str, Any]:
    """The JSON object in `text`; empty if `text` is truncated, damaged or anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
