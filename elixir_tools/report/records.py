"""The records of a run: what its loop writes into its directory, and `report.history` reads.

Owns the form of every record, and the files. Only rank 0 writes. Computes nothing about training, and prints nothing.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from elixir_moe.ext import accelerator
from elixir_moe.ext.plans import size_text
from elixir_tools.report.history import finite, records_of

_WHERE = {"device": "of device memory", "host": "of host memory", "disk": "on disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of ``metrics.jsonl``. Counters are those of rank 0; numbers that are not finite become null."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Training loss with the routers' auxiliary losses, mean over micro-batches and ranks, in nats per token."""
    grad_norm: float | None
    """Global gradient norm before clipping; null if it is not finite."""
    lr: float
    """Learning rate of this step."""
    step_seconds: float
    """Wall time of the step, without evaluation."""
    tokens_per_second: float | None
    """Tokens per second, over all ranks, without those that fill rows up; null where a trainer's batches name none."""
    statistics: dict[str, Any]
    """The step's part of the library's counters: rCache, and bytes moved by tier and by chunk group."""
    held_bytes: dict[str, int]
    """By tier: bytes that the library holds on rank 0 in a backward."""
    process_bytes: dict[str, int]
    """Bytes of rank 0's process: ``host``, its memory at the end of the step; ``device``, the most that torch has
    allocated on a GPU so far."""
    tokens_per_expert: dict[str, list[int]]
    """By mixture layer: tokens that chose each expert, over all ranks; in `train`, those of the last micro-batch."""
    val_loss: float | None
    """Validation loss after this step, in nats per token; null without evaluation."""
    activations: dict[str, dict[str, float]] = field(default_factory=dict)
    """By module: figures of its output for rank 0's first validation batch; empty without `run.activations`."""
    planned_bytes: dict[str, int] = field(default_factory=dict)
    """By tier: bytes that this step's plan foresees on rank 0, which `RunFiles` adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The result of a run."""

    steps: int
    """Number of optimizer steps."""
    ranks: int
    """Number of processes."""
    parameters: int
    """Elements of the whole model, each counted once."""
    train_loss: float
    """Training loss of the last step, auxiliary losses included, in nats per token."""
    val_loss: float
    """Validation loss after the last step, in nats per token."""
    bigram_loss: float | None
    """Loss of the bigram model on the same validation bytes; null where tokens are not bytes."""
    train_seconds: float
    """Wall time of this process's steps, with evaluations and saves between them."""
    tokens_per_second: float
    """Tokens per second, over these steps."""
    out: str
    """The run's directory."""
    prediction: dict[str, Any] | None = None
    """With plan auto: predicted and measured cost of a step."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return dict(finite(asdict(self)))


def process_bytes(device: torch.device) -> dict[str, int]:
    """Bytes of this process: ``host``, its memory now; on a GPU ``device``, the most that torch has allocated."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    return found | (
        {"device": torch.accelerator.max_memory_allocated(device)} if accelerator.is_accelerator(device) else {}
    )


def totals(planned_bytes: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The bytes of a plan by tier, of all kinds."""
    return {tier: sum(kinds.values()) for tier, kinds in planned_bytes.items()}


def planned_text(planned_bytes: Mapping[str, Mapping[str, int]]) -> str:
    """The bytes of a plan by tier, in words."""
    held = totals(planned_bytes).items()
    there = ", ".join(f"{size_text(nbytes)} {_WHERE[tier]}" for tier, nbytes in held if nbytes)
    return f"{there} for weights, gradients and optimizer state"


def machine() -> str:
    """This machine in words."""
    if (device := accelerator.found()) is not None:
        return f"{accelerator.count()} × {accelerator.api(device).get_device_name()}"
    return f"{os.cpu_count()} CPU cores"


class RunFiles:
    """The files of a run's directory, as they grow."""

    def __init__(self, directory: Path, say: Callable[[str], None], *, done: int = 0) -> None:
        """`done`: steps already done by a resumed run; records of later steps are dropped. `say`: shows a line."""
        self._directory, self._say = directory, say
        self._unwritten: set[str] = set()
        """Files that could not be written, which was reported."""
        self._planned: dict[str, int] = {}
        """By tier: bytes that the plan foresees."""
        self._go_back(done)

    def step(self, record: StepRecord) -> dict[str, Any]:
        """Records a step; returns the record as plain data."""
        plain: dict[str, Any] = finite(asdict(record) | {"planned_bytes": self._planned})
        with self.goes_on_without("metrics.jsonl"):
            self._metrics.write(json.dumps(plain, allow_nan=False) + "\n")
            self._metrics.flush()
        return plain

    def go_back(self, step: int) -> None:
        """Drops the records of steps after `step`, which will be run again."""
        self.close()
        self._go_back(step)

    def close(self) -> None:
        """Closes the file of steps."""
        with self.goes_on_without("metrics.jsonl"):
            self._metrics.close()

    def _go_back(self, step: int) -> None:
        path = self._directory / "metrics.jsonl"
        kept = [line for line, record in records_of(path) if record["step"] <= step]
        self.write("metrics.jsonl", "".join(kept))
        self._metrics = path.open("a", encoding="utf-8")

    def event(self, step: int, kind: str, text: str) -> None:
        """Records an event, and shows it."""
        line = json.dumps({"step": step, "time": time.time(), "kind": kind, "text": text})
        with (
            self.goes_on_without("events.jsonl"),
            (self._directory / "events.jsonl").open("a", encoding="utf-8") as file,
        ):
            file.write(line + "\n")
        self._say(f"{kind}: {text}")

    def status(self, state: str, step: int, checkpoint: str | None, reason: str = "") -> None:
        """Writes the state of the run: running, stopped, failed or done."""
        facts = {"state": state, "step": step, "checkpoint": checkpoint, "reason": reason}
        self.write("status.json", json.dumps(facts) + "\n")

    def plan(self, plan_json: str, facts: Mapping[str, Any]) -> str | None:
        """Writes the plan and where the model lives: `facts` are those of `em.inspect`.

        Returns what differs from the plan of the run's previous start, as text; None if nothing does.
        """
        self._planned = totals(facts["planned_bytes"])
        path = self._directory / "plan.json"
        before = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else plan_json
        self.write("plan.json", plan_json + "\n")
        self.write("layout.json", json.dumps(facts) + "\n")
        return None if before == plan_json else _changed(before, plan_json)

    def about(self, words: Mapping[str, str]) -> None:
        """Writes what the run is, in words, with machine, versions and date."""
        more = {
            "machine": machine(),
            "versions": f"elixir_moe {version('elixir-moe')}, torch {torch.__version__}",
            "begun": f"{datetime.now():%Y-%m-%d %H:%M}",
        }
        self.write("about.json", json.dumps({**words, **more}) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes a text file in the run directory atomically."""
        with self.goes_on_without(name):
            temporary = self.part_of(name)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._directory / name)

    def part_of(self, name: str) -> Path:
        """The path under which a file is written, where nothing is: a link there would lead the write elsewhere."""
        path = self._directory / f"{name}.part"
        path.unlink(missing_ok=True)
        return path

    @contextmanager
    def goes_on_without(self, name: str) -> Iterator[None]:
        """Says, once for each file, that it cannot be written: the weights of a run are worth more than its records."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritten:
                self._unwritten.add(name)
                path = self._directory / name
                self._say(f"{path} cannot be written, and the run continues: {error.strerror or error}")


def _changed(before: str, now: str) -> str:
    """The fields of a plan in JSON whose values differ from those of the plan before, with both values."""
    try:
        old = json.loads(before)
    except ValueError:
        old = None
    if not isinstance(old, dict):
        return "the one before cannot be read, plan.json was damaged"
    fields = json.loads(now).items()
    return ", ".join(f"{name}={value!r} (was {old.get(name)!r})" for name, value in fields if old.get(name) != value)
