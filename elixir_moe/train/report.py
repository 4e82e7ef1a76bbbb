"""The output of a run: lines or a progress bar on the screen, and the files of its directory.

Owns the form of every record in the run directory. Only rank 0 has a `Report`. Computes nothing about training.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file

from elixir_moe.chunks.plan import seconds_text, size_text
from elixir_moe.train.directory import TENSORBOARD
from elixir_moe.train.history import finite, losses_of, records_of
from elixir_moe.train.writers import Writer, values_of

_COLUMNS = {
    "chunk_group": "chunk group",
    "resident": "stays gathered",
    "numel": "elements",
    "shard_bytes": "state bytes",
}
"""Heads of the columns that are not called as in `inspect`."""
_WHERE = {"device": "of device memory", "host": "of host memory", "disk": "on disk"}
__all__ = ["Console", "Report", "StepRecord", "Summary"]


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
    tokens_per_second: float
    """Tokens per second, over all ranks, without those that fill rows up."""
    statistics: dict[str, Any]
    """The step's part of the library's counters: rCache, and bytes moved by tier and by chunk group."""
    held_bytes: dict[str, int]
    """By tier: bytes that the library holds on rank 0 in a backward."""
    process_bytes: dict[str, int]
    """Of rank 0's process: ``host``, its memory at the end of the step; ``device``, the most that torch has allocated
    on a GPU so far."""
    tokens_per_expert: dict[str, list[int]]
    """By mixture layer: tokens of the last micro-batch that chose each expert, over all ranks."""
    val_loss: float | None
    """Validation loss after this step, in nats per token; null without evaluation."""
    activations: dict[str, dict[str, float]] = field(default_factory=dict)
    """By module: figures of its output for rank 0's first validation batch; empty without `run.activations`."""


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
    """Loss of the bigram model on the same validation bytes; null where tokens are no bytes."""
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


class Report:
    """Rank 0's reporter, from the first line to the last file."""

    def __init__(
        self,
        console: Console,
        directory: Path,
        *,
        steps: int,
        log_every: int,
        bigram_loss: float | None,
        done: int = 0,
        writers: Sequence[Writer] = (),
        details: bool = False,
    ) -> None:
        """`done`: steps already done by a resumed run; records of later steps are dropped. `writers` get the numbers of
        each step, too. `details`: the plan is shown in full."""
        self._details = details
        self._writers = writers
        self._console, self._directory = console, directory
        self._steps, self._log_every, self.bigram_loss = steps, log_every, bigram_loss
        self._first = done + 1
        self._unwritten: set[str] = set()
        """Files that could not be written, of which the console was told."""
        self._go_back(done)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._close_metrics()
        with self._goes_on_without(TENSORBOARD):
            for writer in self._writers:
                writer.close()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """While open, the bar on a terminal says `what` is being done in the place of a step."""
        self._progress.update(self._task, description=what)
        yield
        self._progress.update(self._task, description="")

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def plan(
        self, rows: Sequence[Mapping[str, Any]], plan_json: str, facts: Mapping[str, Any], explanation: str
    ) -> str | None:
        """Shows where the model lives, and with `details` the plan; writes both to files.

        Returns what differs from the plan of the run's previous start, as text; None if nothing does.
        """
        held = {tier: sum(kinds.values()) for tier, kinds in facts["planned_bytes"].items()}
        there = ", ".join(f"{size_text(nbytes)} {_WHERE[tier]}" for tier, nbytes in held.items() if nbytes)
        self.say(
            f"memory      of a rank: {there} for weights, gradients and optimizer state"
            + "; --details shows the plan" * (not self._details)
        )
        if self._details:
            self._show(rows)
            if explanation:
                self.say(explanation)
        path = self._directory / "plan.json"
        before = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else plan_json
        self.write("plan.json", plan_json + "\n")
        self.write("layout.json", json.dumps(facts) + "\n")
        return None if before == plan_json else _changed(before, plan_json)

    def _show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The state as a table, one row per chunk group."""
        table = Table(title="state on rank 0, by chunk group", title_justify="left", box=None, padding=(0, 1, 0, 0))
        for name, value in rows[0].items() if rows else ():
            table.add_column(_COLUMNS.get(name, name), justify="right" if type(value) is int else "left")
        for row in rows:
            table.add_row(*(size_text(v) if name == "shard_bytes" else _cell(v) for name, v in row.items()))
        self._console.print(table)

    def step(self, record: StepRecord, prediction: Mapping[str, Any] | None = None) -> None:
        """Records a step, and shows it if due. `prediction`: of its cost, for the writers."""
        plain = finite(asdict(record))
        with self._goes_on_without("metrics.jsonl"):
            self._metrics.write(json.dumps(plain, allow_nan=False) + "\n")
            self._metrics.flush()
        with self._goes_on_without(TENSORBOARD):
            for writer in self._writers:
                writer.write(record.step, values_of(plain, prediction))
        self._train_losses.append((record.step, record.loss))
        if record.val_loss is not None:
            self._val_losses.append((record.step, record.val_loss))
        self._progress.update(self._task, completed=record.step, description=f"loss {record.loss:.3f}")
        due = not self._console.is_terminal and record.step % self._log_every == 0
        if due or record.val_loss is not None or record.step in (self._first, self._steps):
            self.say(self._line(record))

    def go_back(self, step: int) -> None:
        """Drops the records of steps after `step`, which will be run again."""
        self._close_metrics()
        self._go_back(step)

    def _close_metrics(self) -> None:
        with self._goes_on_without("metrics.jsonl"):
            self._metrics.close()

    def _go_back(self, step: int) -> None:
        path = self._directory / "metrics.jsonl"
        kept = [(line, record) for line, record in records_of(path) if record["step"] <= step]
        self.write("metrics.jsonl", "".join(line for line, _ in kept))
        self._train_losses, self._val_losses = losses_of(record for _, record in kept)
        self._metrics = path.open("a", encoding="utf-8")

    def event(self, step: int, kind: str, text: str) -> None:
        """Records an event, and shows it."""
        line = json.dumps({"step": step, "time": time.time(), "kind": kind, "text": text})
        with (
            self._goes_on_without("events.jsonl"),
            (self._directory / "events.jsonl").open("a", encoding="utf-8") as file,
        ):
            file.write(line + "\n")
        self.say(f"{kind}: {text}")

    def status(self, state: str, step: int, checkpoint: str | None, reason: str = "") -> None:
        """Writes the state of the run: running, stopped, failed or done."""
        facts = {"state": state, "step": step, "checkpoint": checkpoint, "reason": reason}
        self.write("status.json", json.dumps(facts) + "\n")

    def finish(self, summary: Summary, sample: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes the results of a finished run."""
        from elixir_moe.train.picture import draw_losses  # matplotlib takes a second to load; only this rank draws

        self._progress.stop()
        self.write("sample.txt", sample)
        if weights:
            self._write_weights(weights)
        self.write("summary.json", json.dumps(summary.as_dict(), indent=2) + "\n")
        title = f"{summary.out}: {summary.parameters:,} parameters, ranks: {summary.ranks}"
        if self._train_losses:  # none where a checkpoint from elsewhere has all steps
            draw_losses(self._directory / "loss.png", title, self._train_losses, self._val_losses, self.bigram_loss)
        verdict = ""
        if summary.bigram_loss is not None:
            below = "below" if summary.val_loss < summary.bigram_loss else "not below"
            verdict = f", {below} the bigram model's {summary.bigram_loss:.4f}"
        if sample:
            self.say(f"\n--- a sample of the model's text\n{sample}\n---\n")
        done = f" ({summary.steps - self._first + 1} of them in this start)" * (self._first > 1)
        self.say(
            f"validation loss {summary.val_loss:.4f}{verdict} (nats/token)\n"
            f"{summary.steps} steps{done}, {summary.train_seconds:.0f} s, ranks: {summary.ranks}; "
            f"files in {summary.out}"
        )
        if summary.prediction is not None:
            self.say(_beside(summary.prediction) if self._details else _step_beside(summary.prediction))

    def _write_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        # Copies, since safetensors refuses tensors that share memory, such as tied weights under two names.
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}
        temporary = self._part_of("weights.safetensors")
        save_file(tensors, temporary)
        shutil.copymode(self._directory / "sample.txt", temporary)
        temporary.replace(self._directory / "weights.safetensors")

    def write(self, name: str, text: str) -> None:
        """Writes a text file in the run directory atomically."""
        with self._goes_on_without(name):
            temporary = self._part_of(name)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._directory / name)

    def _part_of(self, name: str) -> Path:
        """The path under which a file is written, where nothing is: a link there would lead the write elsewhere."""
        path = self._directory / f"{name}.part"
        path.unlink(missing_ok=True)
        return path

    @contextmanager
    def _goes_on_without(self, name: str) -> Iterator[None]:
        """Says, once for each file, that it cannot be written: the weights of a run are worth more than its records."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritten:
                self._unwritten.add(name)
                self.say(f"{self._directory / name} cannot be written, and the run goes on: {error.strerror or error}")

    def _line(self, record: StepRecord) -> str:
        norm = "" if record.grad_norm is None else f"  norm {record.grad_norm:.2f}"
        line = f"step {record.step:>5}  loss {record.loss:.4f}{norm}  lr {record.lr:.2e}"
        line += f"  {record.tokens_per_second:,.0f} tokens/s"
        if record.val_loss is not None:
            line += f"  validation {record.val_loss:.4f}"
            line += "" if self.bigram_loss is None else f" (bigram {self.bigram_loss:.4f})"
        return line


def _step_beside(prediction: dict[str, Any]) -> str:
    """The predicted and the measured time of a step."""
    expected, took = prediction["predicted_step_seconds"], prediction["measured_step_seconds"]
    if took is None:
        return f"a step was predicted to take {seconds_text(expected)}; there were too few to compare"
    return f"a step took {seconds_text(took)}, predicted {seconds_text(expected)}"


def _beside(prediction: dict[str, Any]) -> str:
    """A table of predicted and measured values."""
    lines = [f"{'':24} {'predicted':>14} {'measured':>14}"]
    took = prediction["measured_step_seconds"]
    shown = "too few steps" if took is None else seconds_text(took)
    lines.append(f"{'a step':24} {seconds_text(prediction['predicted_step_seconds']):>14} {shown:>14}")
    for tier in ("device", "host", "disk"):
        expected, held = prediction[f"predicted_{tier}_bytes"], prediction[f"held_{tier}_bytes"]
        lines.append(f"{f'bytes held, {tier}':24} {expected:>14,} {held:>14,}")
    return "\n".join(lines)


def _cell(value: object) -> str:
    """A value of the plan's table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
