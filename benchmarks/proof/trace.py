"""A profiler trace of one step, and what it says in ten lines.

Owns the intervals: when the GPU computed, when it copied, when neither, and how long the host waited. Reads the file
that the profiler wrote, so that it can be read again elsewhere.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
STEP = "proof: step"
_WAITS = ("Synchronize", "EventQuery")


def record(step: Callable[[], Any], path: Path) -> None:
    """Runs `step` under the profiler and writes the trace to `path`, compressed if it ends in .gz."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
    with profile(activities=activities) as found, torch.profiler.record_function(STEP):
        step()
        if cuda:
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))


def summary(path: Path) -> list[str]:
    """At most ten lines: where the time of the step went."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    (begin, end) = next(
        _interval(event) for event in events if event["name"] == STEP and event["cat"] != "gpu_user_annotation"
    )
    kernels = joined(_interval(event) for event in events if event["cat"] == "kernel")
    copies = {
        way: joined(_interval(e) for e in events if e["cat"] == "gpu_memcpy" and way in e["name"])
        for way in ("HtoD", "DtoH")
    }
    busy = joined([*kernels, *copies["HtoD"], *copies["DtoH"]])
    idle = gaps(busy, (begin, end))
    waits = [e for e in events if e["cat"] == "cuda_runtime" and any(name in e["name"] for name in _WAITS)]
    lines = [
        f"the step takes {_ms(end - begin)}",
        f"kernels run for {_ms(length(kernels))}",
        *(
            f"{way} copies run for {_ms(length(found))}; no kernel hides {_ms(length(without(found, kernels)))} of it"
            for way, found in copies.items()
        ),
        f"the GPU does nothing for {_ms(length(idle))}",
    ]
    if idle:
        longest = max(idle, key=lambda gap: gap[1] - gap[0])
        lines.append(
            f"its longest pause is {_ms(longest[1] - longest[0])}, {_ms(longest[0] - begin)} after the begin, in "
            f"{_during(events, longest)}"
        )
    for name in sorted({e["name"] for e in waits}):
        those = [e for e in waits if e["name"] == name]
        lines.append(f"the host waits in {len(those)} {name} for {_ms(sum(e['dur'] for e in those))}")
    return lines[:10]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def gaps(covered: list[Interval], whole: Interval) -> list[Interval]:
    """The parts of `whole` that disjoint ordered intervals do not cover."""
    found, at = [], whole[0]
    for begin, end in covered:
        if begin > at:
            found.append((at, min(begin, whole[1])))
        at = max(at, end)
    if at < whole[1]:
        found.append((at, whole[1]))
    return [(begin, end) for begin, end in found if begin < end]


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The parts of disjoint `intervals` that lie in none of the disjoint `others`."""
    return [part for interval in intervals for part in gaps([o for o in others if o[1] > interval[0]], interval)]


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - begin for begin, end in intervals)


def _during(events: list[dict[str, Any]], gap: Interval) -> str:
    """The host's operator that covers most of a gap, the shortest of those that cover as much."""

    def cover(event: dict[str, Any]) -> tuple[float, float]:
        begin, end = _interval(event)
        return min(end, gap[1]) - max(begin, gap[0]), -event["dur"]

    host = [e for e in events if e["cat"] in ("cpu_op", "cuda_runtime") and e["name"] != STEP]
    return str(max(host, key=cover)["name"]) if host else "no operator"


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"
