"""The spans of one step: torch.profiler records them, and the run's page draws it.

Owns ``timeline.json``, in which the library's ranges (``elixir::gather chunk 3``) and the model's own work are spans
on lanes. Only rank 0 records. The ranges themselves are where the work is issued.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from elixir_moe.ext.accelerator import found as found_accelerator
from elixir_moe.ext.ranks import on_all_threads

_OURS = "elixir::"
_COPIES = ("nccl", "Memcpy", "Memset")
"""Beginnings of the names of what a GPU does besides computing."""
COMPUTE = "compute"
"""The lane of the model's own operators, or of its kernels on a GPU."""


@contextmanager
def recorded(step: int, write: Callable[[str, str], None] | None) -> Iterator[None]:
    """Records what runs inside; `write` is given the file's name and text, or is None where nothing is recorded."""
    if write is None:
        yield
        return
    with profile(activities=supported_activities(), experimental_config=on_all_threads()) as found:
        yield
        if found_accelerator() is not None:
            torch.accelerator.synchronize()
    write("timeline.json", json.dumps({"step": step, "spans": spans_of(found.events() or ())}) + "\n")


def spans_of(events: Iterable[Any]) -> list[dict[str, Any]]:
    """The spans among a profiler's events, as plain data: lane, name, begin and end in seconds from the first on.

    On a GPU a range has a twin on the stream that carried it out, which is taken in its place.
    """
    events = list(events)
    ours = [event for event in events if event.name.startswith(_OURS)]
    on_device = {event.name for event in ours if event.device_type is not DeviceType.CPU}
    spans = []
    for event in ours:
        if event.device_type is DeviceType.CPU and event.name in on_device:
            continue
        lane, _, name = event.name.removeprefix(_OURS).partition(" ")
        spans.append({"lane": lane, "name": name, "begin": event.time_range.start, "end": event.time_range.end})
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type is not DeviceType.CPU and not event.name.startswith((_OURS, *_COPIES))
    ]
    outer = [
        event
        for event in events
        if event.device_type is DeviceType.CPU and event.cpu_parent is None and not event.name.startswith(_OURS)
    ]
    thread = Counter(event.thread for event in outer).most_common(1)  # the model's; others update and send
    host = [(e.time_range.start, e.time_range.end) for e in outer if e.thread == thread[0][0]]
    spans += [{"lane": COMPUTE, "name": "", "begin": a, "end": b} for a, b in joined(kernels or host)]
    spans.sort(key=lambda span: (span["lane"] != COMPUTE, span["begin"]))
    first = min((span["begin"] for span in spans), default=0.0)
    return [{**s, "begin": (s["begin"] - first) / 1e6, "end": (s["end"] - first) / 1e6} for s in spans]


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals; gaps below a thousandth of the whole are closed, since nobody could see them."""
    ordered = sorted(intervals)
    if not ordered:
        return []
    gap = (max(end for _, end in ordered) - ordered[0][0]) / 1000
    found = [ordered[0]]
    for begin, end in ordered[1:]:
        if begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
