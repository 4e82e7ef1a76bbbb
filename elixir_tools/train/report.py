"""The output of a run: lines or a progress bar on the screen, and the files of its directory.

Owns what is shown. `report.records` has the files. Only rank 0 has a `Report`. Computes nothing about training.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file

from elixir_moe import Inspection
from elixir_moe.ext.plans import seconds_text
from elixir_tools.report.history import losses_of, records_of
from elixir_tools.report.records import RunFiles, StepRecord, Summary, planned_text
from elixir_tools.train.config import RunConfig

__all__ = ["Console", "Report"]


class Report(RunFiles):
    """Rank 0's reporter, from the first line to the last file."""

    def __init__(
        self,
        console: Console,
        directory: Path,
        run: RunConfig,
        bigram_loss: float | None,
        done: int = 0,
        details: bool = False,
    ) -> None:
        """`done`: steps already done by a resumed run; records of later steps are dropped. `details`: the plan is shown
        in full."""
        self._console, self._run, self.bigram_loss, self._details = console, run, bigram_loss, details
        self._first, self._compared = done + 1, False
        super().__init__(directory, self.say, done=done)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=run.steps, completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self.close()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """While open, the bar on a terminal says `what` is being done in the place of a step."""
        self._progress.update(self._task, description=what)
        yield
        self._progress.update(self._task, description="")

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(
        self, description: Iterable[str], found: Inspection, accumulation: int, source: Path | None, step: int
    ) -> None:
        """Shows and records what is trained, where the model lives, and from which checkpoint, if any."""
        lines = list(description)
        for line in lines:
            self.say(line)
        self.about({line[:12].rstrip(): line[12:] for line in lines})
        facts = found.facts(accumulation)
        more = "" if self._details else "; --details shows the plan"
        self.say(f"memory      of a rank: {planned_text(facts['planned_bytes'])}{more}")
        if self._details:
            self.say(str(found))
            if found.plan.explanation:
                self.say(found.plan.explanation)
        changed = self.plan(found.plan.to_json(), facts)
        if found.prediction is not None:
            self.say(f"time        {seconds_text(found.prediction.step_seconds)} a step, predicted")
        if source is not None:
            other = "" if changed is None else f", under another plan: {changed}"
            self.event(step, "resumed", f"from {source}, step {step}{other}")

    def compare_time(self, found: Inspection) -> None:
        """Shows the measured time of a step next to the predicted one, once, as soon as it is known."""
        prediction = found.prediction
        if self._compared or prediction is None or prediction.measured_seconds is None:
            return
        self._compared = True
        learned = "; the next start plans with what was measured" * prediction.is_off
        expected = f"{seconds_text(prediction.step_seconds)} were predicted"
        self.say(f"time        {seconds_text(prediction.measured_seconds)} a step; {expected}{learned}")

    def step(self, record: StepRecord) -> dict[str, Any]:
        """Records a step, and shows it if due; returns the record as plain data."""
        plain = super().step(record)
        self._progress.update(self._task, completed=record.step, description=f"loss {record.loss:.3f}")
        due = not self._console.is_terminal and record.step % self._run.log_every == 0
        if due or record.val_loss is not None or record.step in (self._first, self._run.steps):
            self.say(self._line(record))
        return plain

    def end(self, summary: Summary) -> None:
        """Writes the summary, the last file of a run: with it, the same command has nothing left to do."""
        self.write("summary.json", json.dumps(summary.as_dict(), indent=2) + "\n")

    def finish(self, summary: Summary, sample: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes the results of a finished run, except for `end`."""
        from elixir_tools.report.picture import draw_losses  # matplotlib takes a second to load; only this rank draws

        self._progress.stop()
        self.write("sample.txt", sample)
        if weights:
            self._write_weights(weights)
        title = f"{summary.out}: {summary.parameters:,} parameters, ranks: {summary.ranks}"
        losses = losses_of(record for _, record in records_of(self._directory / "metrics.jsonl"))
        if losses[0]:  # none where a checkpoint from elsewhere has all steps
            draw_losses(self._directory / "loss.png", title, *losses, self.bigram_loss)
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
            self.say(_compared(summary.prediction, details=self._details))

    def _write_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        # Copies, since safetensors refuses tensors that share memory, such as tied weights under two names.
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}
        temporary = self.part_of("weights.safetensors")
        save_file(tensors, temporary)
        shutil.copymode(self._directory / "sample.txt", temporary)
        temporary.replace(self._directory / "weights.safetensors")

    def _line(self, record: StepRecord) -> str:
        norm = "" if record.grad_norm is None else f"  norm {record.grad_norm:.2f}"
        line = f"step {record.step:>5}  loss {record.loss:.4f}{norm}  lr {record.lr:.2e}"
        line += f"  {record.tokens_per_second or 0:,.0f} tokens/s"
        if record.val_loss is not None:
            line += f"  validation {record.val_loss:.4f}"
            line += "" if self.bigram_loss is None else f" (bigram {self.bigram_loss:.4f})"
        return line


def _compared(prediction: dict[str, Any], *, details: bool) -> str:
    """The predicted and the measured time of a step; with `details` also the bytes that the library holds."""
    expected, took = prediction["predicted_step_seconds"], prediction["measured_step_seconds"]
    if took is None:
        said = f"a step was predicted to take {seconds_text(expected)}; there were too few to compare"
    else:
        said = f"a step took {seconds_text(took)}, predicted {seconds_text(expected)}"
    tiers = [
        f"{tier} {prediction[f'held_{tier}_bytes']:,}, predicted {prediction[f'predicted_{tier}_bytes']:,}"
        for tier in ("device", "host", "disk")
    ]
    return f"{said}\nbytes held: {'; '.join(tiers)}" if details else said
