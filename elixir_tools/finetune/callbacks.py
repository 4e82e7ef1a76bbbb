"""Callbacks for trainers under a plan: supervision, requests by `control.yaml` and signals, and the records of a run.

Owns what each does with a step. `watch` decides, `report` has the files, `hf.steps` the facts. They go to any
Trainer with `ElixirMixin`; `Records` shows and keeps what the others tell. Needs the package `transformers`.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from elixir_moe import inspect
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.ext.checkpoints import is_marked
from elixir_moe.ext.models import require_wrapped
from elixir_moe.ext.ranks import gathered, raise_on_all_ranks
from elixir_moe.ext.trainer import SET_ASIDE_FOLDER, GoBack, StepCallback, why_incomplete
from elixir_tools.report.directory import CONTROL, FILES, LOCK, Claim, unused
from elixir_tools.report.records import RunFiles, StepRecord, Summary, planned_text, process_bytes
from elixir_tools.report.timeline import recorded
from elixir_tools.train.launch import place_here
from elixir_tools.watch import control as controls
from elixir_tools.watch.control import Control, Signals, changes
from elixir_tools.watch.supervisor import Action, Observation, Supervisor, Verdict, WatchConfig
from elixir_tools.watch.tensors import name_not_finite, scales

_LOG = logging.getLogger(__name__)


class DivergedError(ElixirError):
    """The supervisor has stopped the run; its state is saved apart."""


class _Told(StepCallback):
    """A callback whose events are kept by `Records`, if the trainer has it, and else logged."""

    @property
    def _records(self) -> "Records | None":
        found = (callback for callback in self.trainer.callback_handler.callbacks if isinstance(callback, Records))
        return next(found, None)

    def _event(self, kind: str, text: str) -> None:
        records = self._records
        if records is not None:
            records.event(kind, text)
        elif dist.get_rank() == 0:
            _LOG.warning("step %d: %s: %s", self.trainer.state.global_step, kind, text)


class Supervise(_Told):
    """Watches each step of a trainer as `elixir-moe train` does: losses and gradients that are not finite, divergence,
    gradients and parameters that have grown, slow ranks, experts without tokens.

    A step that is not applied is dropped before its update. Going back, the trainer continues from a checkpoint of this
    run, without the batches that caused it.
    """

    def __init__(self, config: WatchConfig | None = None) -> None:
        """`config`: what is a fault, and how to react."""
        self._config = WatchConfig() if config is None else config
        self._supervisor = Supervisor(self._config)
        self._rate = 1.0
        self._avoid: set[int] = set()
        self._saved: list[str] = []
        """Folders of this run's checkpoints, the oldest first."""
        self._places: list[str] = []
        """Where each rank runs."""

    @property
    def keeps_weights(self) -> bool:
        """Implements `StepCallback`."""
        avoids = self.trainer.state.global_step + 1 in self._avoid
        return self._supervisor.keeps_weights or not self._saved or self._looks_at_scales or avoids

    @property
    def _looks_at_scales(self) -> bool:
        every = self._config.scales_every
        return every is not None and self.trainer.state.global_step % every == 0

    def to_save(self) -> dict[str, Any]:
        """Implements `StepCallback`."""
        return {"supervisor": self._supervisor.state(), "rate": self._rate, "avoid": sorted(self._avoid)}

    def restore(self, saved: Mapping[str, Any], *, back: bool) -> None:
        """Implements `StepCallback`."""
        before = saved.get("rate", 1.0)
        if "supervisor" in saved:
            self._supervisor.restore(saved["supervisor"])
        self._avoid |= {*saved.get("avoid", ())}
        if back:
            _scale_rate(self.trainer, self._rate / before)
        else:
            self._rate = before

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when weights and optimizer are there. Collective."""
        control_group = require_wrapped(self.trainer.model, "Supervise").groups.control
        self._places = gathered(place_here(args.device.type), control_group)
        folder = _checkpoint_of(args, state)
        if state.global_step and folder not in self._saved:
            self._saved.append(folder)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called behind each save."""
        if not args.save_only_model:
            self._saved.append(_checkpoint_of(args, state))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called before each update. Collective."""
        trainer, step, facts = self.trainer, state.global_step + 1, self.trainer.step_facts()
        if step in self._avoid:
            trainer.drop_gradients()
            return
        wrapped = require_wrapped(trainer.model, "Supervise")
        seen = Observation(
            step=step,
            batch=step,
            losses=facts.losses,
            norm=facts.norm,
            busy_seconds=facts.busy_seconds,
            places=self._places,
            tokens_per_expert=facts.tokens_per_expert,
            scales=scales(wrapped) if self._looks_at_scales else {},
        )
        action = self._supervisor.observe(seen)
        for note in action.notes:
            self._event(note.kind, note.text)
        if action.verdict is not Verdict.GO:
            self._depart(action)

    def _depart(self, action: Action) -> None:
        trainer, reason = self.trainer, action.reason
        drop = None if trainer.may_have_updated else trainer.drop_gradients
        if action.not_finite:
            wrapped = require_wrapped(trainer.model, "Supervise")
            reason += name_not_finite(trainer.model, wrapped, trainer.forward_again, drop)
        if drop is not None:
            drop()
        if action.verdict is Verdict.SKIP:
            self._event("skipped", reason)
            return
        if action.verdict is Verdict.BACK:
            folder = self._good(action.before)
            if folder is not None:
                self._go_back(folder, action, reason)
            reason += "; there is no checkpoint to go back to"
        folder = trainer.save_apart()
        self._event("stopped", f"{reason}; the state is saved in {folder}")
        if self._records is not None:
            self._records.end("failed", reason)
        raise DivergedError(f"{reason}. The state is saved in {folder}, the weights are as before that step")

    def _good(self, before: int) -> str | None:
        """The latest checkpoint of this run from before a step, as rank 0 sees it. Collective."""

        def look() -> str | None:
            good = [folder for folder in self._saved if _step_of(folder) < before and not why_incomplete(folder)]
            return good[-1] if good else None

        return raise_on_all_ranks("looked for a checkpoint", look)[0]

    def _go_back(self, folder: str, action: Action, reason: str) -> None:
        later = [each for each in self._saved if _step_of(each) > _step_of(folder)]
        raise_on_all_ranks("moved checkpoints apart", lambda: self._move_apart(later))
        self._saved = [each for each in self._saved if each not in later]
        self._avoid |= {*action.avoid}
        self._rate *= action.rate
        without = f", without the batches {list(action.avoid)}" if action.avoid else ""
        self._event(
            "went back",
            f"{reason}; back to step {_step_of(folder)}, at {self._rate:g} of the learning rate{without}",
        )
        raise GoBack(folder)

    def _move_apart(self, folders: list[str]) -> None:
        """Rank 0 moves checkpoints of an abandoned course to where no run resumes by itself."""
        for folder in map(Path, folders if dist.get_rank() == 0 else ()):
            if folder.is_dir():
                (folder.parent / SET_ASIDE_FOLDER).mkdir(exist_ok=True)
                target = unused(folder.parent / SET_ASIDE_FOLDER / folder.name)
                shutil.move(folder, target)
                self._event("moved apart", f"{folder.name} is now {target}")


class Requests(_Told):
    """Does what is asked of a trainer while it runs, between two steps.

    ``control.yaml`` in the output directory asks for another learning rate or clipping, a save, or an end; a signal to
    any rank asks for an end with a checkpoint.
    """

    def __init__(self, *, signals: Signals | None = None) -> None:
        """`signals`: those of this process."""
        self._signals = signals
        self._file: controls.ControlFile | None = None
        self._factor = 1.0
        """On the optimizer's learning rate."""
        self.stopped: int | None = None
        """The number of the signal that has ended the run, the same on all ranks; 0 for the file; None: nothing has."""

    def to_save(self) -> dict[str, Any]:
        """Implements `StepCallback`."""
        return {"factor": self._factor}

    def restore(self, saved: Mapping[str, Any], *, back: bool) -> None:
        """Implements `StepCallback`."""
        before = saved.get("factor", 1.0)
        if back:
            _scale_rate(self.trainer, self._factor / before)
        else:
            self._factor = before

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when weights and optimizer are there. Collective."""
        if self._file is None:
            self._file = controls.ControlFile(Path(args.output_dir) / CONTROL)
            self._follow(control, first=True)  # what it says about save and stop was meant for an earlier start

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after each step. Collective."""
        self._follow(control)

    def _follow(self, control: Any, *, first: bool = False) -> None:
        asked = self._file.asked() if dist.get_rank() == 0 and self._file is not None else None
        received = 0 if self._signals is None or first else self._signals.received
        found = gathered((asked, received), require_wrapped(self.trainer.model, "Requests").groups.control)
        asked, signal = found[0][0], max(received for _, received in found)
        if isinstance(asked, ConfigError):
            self._event("control", f"{CONTROL} is not followed: {asked}")
        elif asked is not None:
            self._apply(asked)
            if not first:
                control.should_save = control.should_save or asked.save
                self.stopped = 0 if asked.stop else self.stopped
        self.stopped = signal or self.stopped
        if self.stopped is not None:
            control.should_save = control.should_training_stop = True

    def _apply(self, asked: Control) -> None:
        trainer = self.trainer
        peak, args = trainer.optimizer.defaults["lr"], trainer.args
        now = {"lr": peak * self._factor, "clip_norm": args.max_grad_norm or None}
        for name, value, text in changes(asked, now, trainer.state.global_step + 1):
            if name == "lr":
                before, self._factor = self._factor, value / peak
                _scale_rate(trainer, self._factor / before)
            else:
                args.max_grad_norm = value
            self._event("control", text)


class Records(StepCallback):
    """Keeps the records of a trainer's run in its output directory, in the form that `elixir-moe report` reads.

    Rank 0 writes: losses, norm, rate, tokens a second, what was moved and held by tier, what the callbacks of this file
    tell, where the layers live, the plan and its prediction. One process at a time trains in the directory.
    """

    def __init__(self, *, about: Mapping[str, str] | None = None, profile: int | None = None) -> None:
        """Makes the callback.

        Args:
            about: what the run is, in words, such as its command.
            profile: number of a step whose gathers, reductions and updates are recorded for the page of the run.
        """
        self._about, self._profile = dict(about or {}), profile
        self._claim: Claim | None = None
        self._files: RunFiles | None = None
        self._open: StepRecord | None = None
        """The record of the last step, which waits for an evaluation."""
        self._last: StepRecord | None = None
        self._val_loss = math.nan
        self.checkpoint: str | None = None
        """The latest checkpoint of this run."""
        self._first = 0
        self._tokens = 0.0
        self._recording = ExitStack()

    # ------------------------------------------------------------------------------------------------- begin and end

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Takes the directory. Collective. Raises ConfigError if it is another run's or has other files."""
        self._take(args)

    def _take(self, args: Any) -> None:
        def claim() -> None:
            if (dist.get_rank() if dist.is_initialized() else args.process_index) == 0 and self._claim is None:
                self._claim = claimed(Path(args.output_dir))

        if dist.is_initialized():
            raise_on_all_ranks("took the output directory", claim)
        else:
            claim()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called when weights and optimizer are there."""
        self._take(args)
        if state.global_step:
            self.checkpoint = _checkpoint_of(args, state)
        self._begun, self._tokens = time.perf_counter(), 0.0
        if self._claim is None:
            return
        found = inspect(model)
        facts = found.facts(args.gradient_accumulation_steps)
        if self._files is not None:  # the run has gone back
            self._files.go_back(state.global_step)
            return
        self._first = state.global_step
        if not state.global_step:
            clear(self._claim.path)
        self._files = RunFiles(self._claim.path, _say, done=state.global_step)
        self._files.write("config.yaml", yaml.safe_dump({"run": {"out": args.output_dir}}))
        self._files.about(self._about)
        changed = self._files.plan(found.plan.to_json(), facts)
        _say(f"memory of a rank: {planned_text(facts['planned_bytes'])}")
        if state.global_step:
            under = "" if changed is None else f", under another plan: {changed}"
            self.event("resumed", f"from step {state.global_step}{under}")
        self.status("running")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called behind the last step."""
        self._write()
        if self._files is None:
            return
        stopped = stopped_by(self.trainer.callback_handler.callbacks)
        if stopped is not None:
            why = f"after step {state.global_step} by {controls.named(stopped) if stopped else CONTROL}"
            self.event("stopped", why)
            self.end("stopped", why)
            return
        found, seconds = inspect(model), time.perf_counter() - self._begun
        summary = Summary(
            steps=state.global_step,
            ranks=dist.get_world_size(),
            parameters=found.numel,
            train_loss=math.nan if self._last is None else self._last.loss,
            val_loss=self._val_loss,
            bigram_loss=None,
            train_seconds=seconds,
            tokens_per_second=self._tokens / max(seconds, 1e-9),
            out=args.output_dir,
            prediction=None if found.prediction is None else found.prediction.as_dict(),
        )
        self._files.write("summary.json", json.dumps(summary.as_dict(), indent=2) + "\n")
        self.end("done")

    # --------------------------------------------------------------------------------------------------------- a step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called before the first micro-batch of a step."""
        if self._files is None:
            return
        self._write()
        self._before, self._start = inspect(model).statistics, time.perf_counter()
        step = state.global_step + 1
        if step == self._profile:
            self._recording.enter_context(recorded(step, self._files.write))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called before each update. Collective."""
        self.trainer.step_facts()
        self._rate = max(group["lr"] for group in self.trainer.optimizer.param_groups)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called after each step."""
        self._recording.close()
        facts = self.trainer.step_facts()
        if self._files is None:
            return
        found, seconds = inspect(model), time.perf_counter() - self._start
        self._tokens += facts.tokens
        self._open = StepRecord(
            step=state.global_step,
            loss=sum(facts.losses) / len(facts.losses),
            grad_norm=facts.norm,
            lr=self._rate,
            step_seconds=seconds,
            tokens_per_second=facts.tokens / seconds if facts.tokens else None,
            statistics=(found.statistics - self._before).as_dict(),
            held_bytes=found.held_bytes,
            process_bytes=process_bytes(args.device),
            tokens_per_expert=dict(facts.tokens_per_expert),
            val_loss=None,
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Called behind each evaluation."""
        found = metrics or {}
        losses = [found[f"{name}_loss"] for name in _evaluated(found) if f"{name}_loss" in found]
        if losses and self._open is not None:
            self._val_loss = sum(losses) / len(losses)  # of several sets, their mean
            self._open = replace(self._open, val_loss=self._val_loss)
            self._write()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called behind each save."""
        if args.save_only_model:
            return
        self.checkpoint = _checkpoint_of(args, state)
        self.status("running")

    def _write(self) -> None:
        """Writes the record of the last step, if it is not written."""
        if self._files is not None and self._open is not None:
            self._files.step(self._open)
            self._last, self._open = self._open, None

    # ------------------------------------------------------------------------------------------- what callbacks tell

    def event(self, kind: str, text: str) -> None:
        """Keeps an event and shows it, on rank 0."""
        if self._files is not None:
            self._files.event(self.trainer.state.global_step, kind, text)

    def status(self, state: str, reason: str = "") -> None:
        """Writes the state of the run: running, stopped, failed or done; on rank 0."""
        if self._files is not None:
            self._write()
            self._files.status(state, self.trainer.state.global_step, self.checkpoint, reason)

    def end(self, state: str, reason: str = "") -> None:
        """Writes how the run ended, and releases the directory."""
        self.status(state, reason)
        if self._files is not None:
            self._files.close()
        if self._claim is not None:
            self._claim.release()
        self._files = self._claim = None


def _say(text: str) -> None:
    print(text, flush=True)


def stopped_by(callbacks: Iterable[Any]) -> int | None:
    """The number of the signal that has stopped a run, 0 for `control.yaml`; None if nothing has."""
    return next((callback.stopped for callback in callbacks if isinstance(callback, Requests)), None)


def claimed(directory: Path) -> Claim:
    """The output directory of a trainer, taken for this process.

    Raises ConfigError if another process trains in it, or a file of another program has the name of a record.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = [] if is_marked(directory / LOCK) else [name for name in FILES if (directory / name).exists()]
        if names:
            raise ConfigError(
                f"--output_dir {directory}: {names[0]} there was not written by elixir-moe, which would replace it: "
                f"move it, or choose another folder"
            )
        return Claim(directory, name="--output_dir")
    except OSError as error:
        raise ConfigError(f"--output_dir: cannot use '{directory}': {error.strerror or error}") from error


def clear(directory: Path) -> None:
    """Removes the records of the run before; checkpoints and models stay, as Trainer leaves them."""
    for name in FILES:
        (directory / name).unlink(missing_ok=True)


def _checkpoint_of(args: Any, state: Any) -> str:
    """The folder in which Trainer keeps the state after this step."""
    return str(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _step_of(folder: str) -> int:
    return int(folder.rpartition("-")[2])


def _scale_rate(trainer: Any, factor: float) -> None:
    """Multiplies the learning rate from here on: the present one, and what its schedule begins from."""
    for group in trainer.optimizer.param_groups:
        group["lr"] *= factor
        if "initial_lr" in group:
            group["initial_lr"] *= factor
    schedule = trainer.lr_scheduler
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]


def _evaluated(metrics: Mapping[str, float]) -> list[str]:
    """The prefixes of data sets among metrics; Trainer gives each its runtime, and TRL also a loss of the routers."""
    return [name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")]
