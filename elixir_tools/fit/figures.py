"""The figures of an answer of `plan`, exact or in formulas, and their lines of 80 columns.

Owns what is shown of a way to train: whether it fits, VRAM, RAM and disk of each GPU and in all, the seconds of a step
and what they wait for. Finds nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elixir_moe.ext.planner import PlanCandidate, Task, cost
from elixir_moe.ext.plans import Tier, seconds_text, size_text

USUAL_ERROR = 0.15
"""How far off the seconds and bytes of formulas mostly are; `docs/quick_error.py` prints it."""
_WORTH = 0.01
"""Part of a step below which a share of it is not worth naming."""
_FASTER = 1.5
"""How much faster QLoRA must be than LoRA to be recommended where both fit: it trains on rounded weights."""
PREDICTED = (
    "step_seconds",
    "tokens_per_second",
    "fetched_bytes",
    "offloaded_bytes",
    "gathered_bytes",
    "reduced_bytes",
    "device_peak_bytes",
    "host_bytes_per_rank",
    "disk_bytes",
)
"""The keys of `Figures.as_dict` that a plan predicts."""
_TIERS = {Tier.DEVICE: "VRAM on each GPU", Tier.HOST: "RAM for each GPU", Tier.DISK: "disk for each GPU"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The needs of a way to train on a machine."""

    task: Task
    """The problem; the inputs of checkpointed layers are in host memory where that is better."""
    exact: bool
    """From a trace and a search; otherwise from formulas."""
    missing: Mapping[Tier, int]
    """Bytes that are missing for a GPU, by tier; empty if it fits."""
    device_bytes: int
    """VRAM of each GPU, activations included."""
    host_bytes: int
    """RAM of a host, for each GPU."""
    disk_bytes: int
    seconds: cost.Seconds
    moved: cost.Traffic

    @classmethod
    def of_choice(cls, choice: PlanCandidate) -> "Figures":
        """Returns the figures of a plan that was searched."""
        task = choice.task
        device, host = task.held_bytes(choice.size)
        return cls(
            task=task,
            exact=True,
            missing={},
            device_bytes=cost.device_peak(task.profile, device, task.imbalance),
            host_bytes=host + task.kept_bytes,
            disk_bytes=choice.size.disk_bytes,
            seconds=choice.seconds,
            moved=choice.moved,
        )

    @property
    def fits(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs."""
        task = self.task
        return task.profile.tokens * task.gpus * task.accumulation / self.seconds.step

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of a step by cause; transfers run while the GPU computes. Hidden updates do not count."""
        seconds = self.seconds
        return {
            "compute": seconds.compute + seconds.units,
            "link to GPU": seconds.fetch,
            "link from GPU": seconds.offload,
            "disk": seconds.disk,
            "waiting for blocks": seconds.stall,
            "other GPUs": seconds.exposed,
            "updates": seconds.memory_update,
            "updates on disk": seconds.disk_update,
        }

    @property
    def waits_for(self) -> str:
        """The cause of most of a step."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])

    @property
    def lacks(self) -> str:
        """Returns what is missing, in words."""
        return " and ".join(f"{_gib(nbytes)} GiB of {_TIERS[tier]}" for tier, nbytes in self.missing.items())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "exact": self.exact,
            "feasible": self.fits,
            "short_bytes": {tier.value: nbytes for tier, nbytes in self.missing.items()},
            "step_seconds": self.seconds.step,
            "tokens_per_second": self.tokens_per_second,
            "waits_for": self.waits_for,
            **{f"{way}_bytes": nbytes for way, nbytes in self.moved.by_way.items()},
            "device_peak_bytes": self.device_bytes,
            "host_bytes_per_rank": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }


def memory_lines(figures: Figures) -> Iterator[str]:
    """VRAM, RAM and disk, of each GPU and in all, in GiB."""
    task = figures.task
    rows = [
        ("VRAM", figures.device_bytes, task.capacity_bytes),
        ("RAM", figures.host_bytes, task.host_bytes + task.kept_bytes),
    ]
    if task.hardware.one_memory:
        rows = [("memory", figures.device_bytes + figures.host_bytes, task.capacity_bytes)]
    if task.disk_bytes or figures.disk_bytes:
        rows.append(("disk", figures.disk_bytes, task.disk_bytes or 0))
    yield f"  {'GiB':8}{'for each GPU':>20}{'in all':>22}"
    for name, used, there in rows:
        each, whole = (f"{_gib(used * n)} of {_gib(there * n)}" for n in (1, task.gpus))
        yield f"  {name:8}{each:>20}{whole:>22}"


def speed_lines(figures: Figures) -> Iterator[str]:
    """The seconds of a step, tokens a second, and what they wait for."""
    step = figures.seconds.step
    speed = f"{seconds_text(step)}, {figures.tokens_per_second:,.0f} tokens/s in all"
    yield f"  step    {speed}; mostly waits for: {figures.waits_for}"
    shown = [f"{name} {seconds_text(value)}" for name, value in figures.parts.items() if value > _WORTH * step]
    yield from _by_twos("of it", shown)
    yield from _by_twos(
        "moved", [f"{way} {size_text(nbytes)}" for way, nbytes in figures.moved.by_way.items() if nbytes]
    )
    if figures.task.together > 1:
        yield f"  passes  {figures.task.passes}, of {figures.task.together} micro-batches by em.accumulate"


def _by_twos(title: str, shown: Sequence[str]) -> Iterator[str]:
    for first in range(0, len(shown), 2):
        yield f"  {'' if first else title:8}{', '.join(shown[first : first + 2])}"


def recommended(ways: Mapping[str, Figures]) -> str:
    """The way to take: adapters, on weights in 16 bits unless those do not fit or are much slower."""
    fitting = [way for way, figures in ways.items() if figures.fits]
    if {"LoRA", "QLoRA"} <= {*fitting}:
        return "QLoRA" if ways["QLoRA"].tokens_per_second > _FASTER * ways["LoRA"].tokens_per_second else "LoRA"
    for way in ("LoRA", "QLoRA", "full"):
        if way in fitting:
            return way
    return min(ways, key=lambda way: sum(ways[way].missing.values()))


def table(ways: Mapping[str, Figures], best: str) -> Iterator[str]:
    """A line for each way to train; `best` is marked."""
    yield f"  {'':8}{'VRAM a GPU':>12}{'RAM in all':>12}{'disk in all':>13}{'step':>11}{'tokens/s':>10}  waits for"
    for way, each in ways.items():
        mark = f"{'*' if way == best else ' '} {way:8}"
        if not each.fits:
            yield f"{mark}    does not fit: lacks {each.lacks}"
            continue
        ranks = each.task.gpus
        memory = f"{_gib(each.device_bytes):>12}{_gib(each.host_bytes * ranks):>12}{_gib(each.disk_bytes * ranks):>13}"
        yield f"{mark}{memory}{seconds_text(each.seconds.step):>11}{each.tokens_per_second:10,.0f}  {each.waits_for}"
    rough = [way for way, each in ways.items() if not each.exact]
    if rough:
        star = "recommended" if any(each.fits for each in ways.values()) else "lacks least"
        yield f"* {star}. Memory in GiB. By formulas, mostly within {USUAL_ERROR:.0%}: {', '.join(rough)}."


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f}"


def words_of(ways: Mapping[str, Figures]) -> Sequence[dict[str, Any]]:
    """Plain data for JSON, a row for each way."""
    return [{"way": way, **each.as_dict()} for way, each in ways.items()]
