"""`elixir-moe train`: a GPT from its random weights, or a checkpoint, to the end of its run, faults included.

Owns the trained state and the order of a step: gradients, one small all-gather of the ranks' findings, the supervisor's
verdict, the update; then evaluation, save and end where due. All ranks call everything that communicates in the same
order, and every decision follows from what they agreed on. Only rank 0 prints and writes records.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe import (
    MoE,
    Saving,
    ShardedOptimizer,
    accumulate,
    annotate,
    full_state_dict,
    init_mesh,
    inspect,
    load,
    save,
    sharded_init,
    wrap,
)
from elixir_moe.errors import CheckpointError, ConfigError, ElixirError
from elixir_moe.ext.accelerator import expandable_by
from elixir_moe.ext.checkpoints import CHECKPOINTS, random_states, read_random_states, set_random_states
from elixir_moe.ext.models import CutLinear, LayerRanks, logical_numel, require_wrapped
from elixir_moe.ext.ranks import BusyTime, agree, default_store, gathered
from elixir_tools import settings
from elixir_tools.models.gpt import (
    GPT,
    Meshes,
    generate,
    gpt_patterns,
    lm_loss,
    lm_loss_without_logits,
    tokens_per_expert,
)
from elixir_tools.names import COSINE
from elixir_tools.report.directory import CONTROL, Claim
from elixir_tools.report.records import StepRecord, Summary, process_bytes
from elixir_tools.report.timeline import recorded
from elixir_tools.train import memory
from elixir_tools.train.activations import distributions
from elixir_tools.train.config import OptimizerConfig, TrainConfig, TrainControl, identity
from elixir_tools.train.data import Text, decode_bytes, rows_of
from elixir_tools.train.directory import extra_of, last_before, move_apart, path_apart
from elixir_tools.train.launch import place_here
from elixir_tools.train.report import Console, Report
from elixir_tools.train.schedule import cosine, factors
from elixir_tools.train.waiting import Waits
from elixir_tools.watch.control import INTERRUPTED, ControlFile, Signals, changes, exit_code_of, named
from elixir_tools.watch.supervisor import DIVERGED, Action, Observation, Supervisor, Verdict
from elixir_tools.watch.tensors import name_not_finite, scales

_LOG = logging.getLogger(__name__)
_CONTROLLED = ("lr", "clip_norm", "schedule", "schedule_begin", "global_batch", "accumulation")
"""Fields of `Progress` that `control.yaml` changes."""
T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 (no error: it was asked for, or decided)
    """The run ended before its last step, with its state saved; raised on all ranks."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def train(
    config: TrainConfig, data: Text, claim: Claim | None, console: Console, *, details: bool = False
) -> Summary | None:
    """Runs a training to its end; returns its summary on rank 0. Collective: all ranks have the same settings and data.

    A step that runs out of memory is redone by another `Trainer`, with less of it. The settings are already checked
    against the number of ranks; only rank 0 has the claim of the run directory. With `details` the plan is shown in
    full.

    Raises:
        Stopped: the run ended early, with its state saved.
        ElixirError: any error of the library.
    """
    torch.set_num_threads(config.run.threads)
    trainer: Trainer | None = None
    report: Report | None = None

    def interrupted() -> NoReturn:
        """Ends this process at the second Ctrl-C, on another thread: the main thread may wait for other ranks."""
        if trainer is not None:
            trainer.status("stopped", "at once, by a second Ctrl-C")
        os._exit(INTERRUPTED)

    with ExitStack() as stack:
        mesh = init_mesh(config.run.tp, timeout=timedelta(seconds=config.run.timeout_seconds))
        signals = stack.enter_context(Signals(interrupted, tells=claim is not None))
        store = default_store()
        if mesh.device_type != "cpu":
            stack.enter_context(memory.aborting(store))
        waits, scarcity = Waits(quiet=claim is None or console.quiet), memory.Scarcity(config)
        box = [None if claim is None else claim.source]
        dist.broadcast_object_list(box)
        source = box[0]
        while True:
            try:
                check_alike(config, data)
                with waits("making the model and its shards"):
                    trainer = Trainer(config, data, mesh, signals)
                if claim is not None and report is None:
                    baseline = data.baseline(trainer.validation)
                    done = 0 if source is None else extra_of(source)["progress"]["step"]
                    report = stack.enter_context(Report(console, claim.path, config.run, baseline, done, details))
                return trainer.train(source, report)
            except Stopped:
                raise
            except Exception as error:
                if trainer is None or not memory.can_be_redone(error, store, updating=trainer.updating):
                    if memory.is_broken_collective(error) and not isinstance(error, ElixirError):
                        raise ElixirError(f"{error}. Another rank has failed or stopped: see its error") from error
                    raise
            del mesh
            memory.release()  # the error no longer refers to the step's tensors
            config = trainer.rescue(scarcity, store)
            source, trainer = trainer.latest, None
            memory.release()
            mesh = init_mesh(config.run.tp)


def check_alike(config: TrainConfig, data: Text) -> None:
    """Raises ConfigError if ranks train another model, or on other data: each has read its own files. Collective."""
    mine = identity(config, data) | {"run.steps": config.run.steps, "run.accumulation": config.run.accumulation}
    agree("what they train", mine, remedy="give all ranks the same settings, model and data", error=ConfigError)


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a run; the same on all ranks, and part of every checkpoint."""

    step: int = 0
    """Number of steps done."""
    batch: int = 0
    """Number of the last batch of samples drawn."""
    avoid: tuple[int, ...] = ()
    """Numbers of batches that are never drawn again."""
    lr: float
    """Peak learning rate of the schedule."""
    schedule: str = COSINE
    """Learning rate after the warm-up, as `OptimizerConfig.schedule`."""
    schedule_begin: int | None = None
    """Steps done when the schedule was changed; None: it begins with the end of the warm-up."""
    rate: float = 1.0
    """Factor on the learning rate; lowered when a run goes back."""
    clip_norm: float | None
    """Bound on the global gradient norm; None: no clipping."""
    global_batch: int
    """Samples per step, over all ranks and micro-batches."""
    accumulation: int
    """Micro-batches that each rank runs per step; raised when memory is short."""
    tokens: int = 0
    """Tokens predicted in the steps done."""

    def next_batch(self) -> int:
        """The number of the next batch."""
        number = self.batch + 1
        while number in self.avoid:
            number += 1
        return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """The facts that all ranks share after the gradients of a step."""

    losses: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    signal: int
    """A signal that some rank received; 0 for none."""
    saved: bool
    """The save in progress has ended on all ranks."""
    control: TrainControl
    """New settings; those that have not changed are left out."""


class Trainer:
    """A model, its optimizer and its data, and the run that trains them.

    `train` resumes and runs all steps; each `step` may evaluate, `save`, or end the run. Methods are collective unless
    stated otherwise.
    """

    def __init__(self, config: TrainConfig, data: Text, mesh: DeviceMesh, signals: Signals) -> None:
        self.config, self.data, self._signals = config, data, signals
        self.identity = identity(config, data)
        self.report: Report | None = None
        """Rank 0's reporter, while the run lasts."""
        self.mesh: DeviceMesh | None = mesh
        self.ranks = mesh.size()
        self.replica, self.replicas = mesh.get_local_rank("dp"), mesh.size(0)  # ranks of one tp group share their rows
        self.device = torch.device(mesh.device_type)
        self.validation = data.validation_batches(batches=config.run.eval_batches, rows=config.micro_batch)
        self.supervisor = Supervisor(config.watch)
        self.progress = Progress(
            lr=config.optimizer.lr,
            schedule=config.optimizer.schedule,
            clip_norm=config.optimizer.clip_norm,
            global_batch=config.run.global_batch,
            accumulation=config.run.accumulation,
        )
        self.directory = Path(config.run.out).absolute()
        self.latest: Path | None = None
        """The latest checkpoint."""
        self._saving: Saving | None = None
        """The save in progress."""
        self._control, self._busy = ControlFile(self.directory / CONTROL, TrainControl), BusyTime(self.device)
        self._first = self._tokens = 0
        """Steps done, and tokens predicted in them, when this run began or resumed."""
        self._last: StepRecord | None = None

        torch.manual_seed(config.run.seed)  # the same on all ranks, so that replicated weights start equal
        with sharded_init():  # no rank ever holds the model: `wrap` draws each weight straight into its shards
            model = GPT(config.model, mesh)
            annotate(model, gpt_patterns(model))
        self.parameters = sum(logical_numel(p) for p in model.parameters())  # with all slices, tied ones once
        self._loss: Callable[[nn.Module, Tensor], Tensor] = lm_loss
        if config.run.loss == "fused":
            recompute = config.plan.may_pass_together(config.run.accumulation)
            self._loss = partial(lm_loss_without_logits, recompute=recompute)
        self.model, self.optimizer = self._wrap(model)
        self.wrapped = require_wrapped(self.model, "train")
        self._places = gathered(place_here(mesh.device_type), self.wrapped.groups.control)
        torch.manual_seed(config.run.seed + 1 + self.replica)  # from here on for dropout, which differs between ranks
        self.mark()

    def _wrap(self, model: nn.Module) -> tuple[nn.Module, ShardedOptimizer]:
        run = self.config.run
        sample = self.data.batch(seed=run.seed, step=1, rows=self.config.micro_batch // self.replicas)
        plan = self.config.plan.plan(self._loss, sample, run.accumulation)
        return wrap(model, adamw(model, self.config.optimizer), plan=plan, compute_dtype=run.compute_dtype)

    # ------------------------------------------------------------------------------------------------- the run

    def train(self, source: Path | None, report: Report | None) -> Summary | None:
        """Resumes from `source`, or begins; runs all remaining steps, the last save and the conclusion."""
        self.report = report
        try:
            self._begin(source)
            begin = time.perf_counter()
            while (done := self.progress.step) < self.config.run.steps:
                write = report.write if report is not None and done + 1 == self.config.run.profile else None
                with recorded(done + 1, write):
                    self.step()
            seconds = time.perf_counter() - begin
            if self.config.save.every is not None:
                with self._busy_with("saving"):
                    self.save(must=True)
        except Stopped:
            self.optimizer.close()
            raise
        return self._conclude(seconds)

    def _begin(self, source: Path | None) -> None:
        if source is None:
            self._move_apart()
        else:
            with self._busy_with("reading the checkpoint"):
                self.resume(source)
            _LOG.debug("resumed from %s, step %d", source, self.progress.step)
        self._first, self._tokens = self.progress.step, self.progress.tokens
        if self.report is not None:
            self.report.write("config.yaml", settings.to_yaml(self.config))
            self.report.begin(self.description(), inspect(self.model), self.progress.accumulation, source, self._first)
        agreed = self._agree(0.0, 0.0)
        self._apply(agreed.control)  # what it says about save and stop was meant for an earlier start
        self.status("running")
        if agreed.signal:
            self._stop(f"before step {self._first + 1} by {named(agreed.signal)}", exit_code_of(agreed.signal))

    def _conclude(self, seconds: float) -> Summary | None:
        """Writes sample, weights and summary; all communication comes before only rank 0 writes."""
        last, steps = self._last, self.config.run.steps
        val_loss = self.evaluate() if last is None or last.val_loss is None else last.val_loss
        sample, weights = self.sample(), full_state_dict(self.model)
        self.optimizer.close()
        if self.report is None:
            return None
        expected = inspect(self.model).prediction
        summary = Summary(
            steps=steps,
            ranks=self.ranks,
            parameters=self.parameters,
            train_loss=math.nan if last is None else last.loss,
            val_loss=val_loss,
            bigram_loss=self.report.bigram_loss,
            train_seconds=seconds,
            tokens_per_second=(self.progress.tokens - self._tokens) / max(seconds, 1e-9),
            out=self.config.run.out,
            prediction=None if expected is None else expected.as_dict(),
        )
        self.report.finish(summary, sample, weights)
        self.status("done")
        self.report.end(summary)
        return summary

    # ------------------------------------------------------------------------------------------------- a step

    def step(self) -> None:
        """Runs one step, and the evaluation, save and end that are due after it."""
        before, start = inspect(self.model).statistics, time.perf_counter()
        self._busy.start()
        loss = self.forward_backward(early=self._updates_in_backward())
        busy = self._busy.stop()
        norm = self.norm()
        agreed, experts = self._agree(loss, busy), tokens_per_expert(self.model)
        seen = Observation(
            step=self.progress.step + 1,
            batch=self.progress.batch,
            losses=agreed.losses,
            norm=norm,
            scaled=self.optimizer.loss_scale is not None,
            busy_seconds=agreed.busy_seconds,
            places=self._places,
            tokens_per_expert=experts,
            scales=self.scales() if self._scales_are_due() else {},
        )
        action = self.supervisor.observe(seen)
        for note in action.notes:
            self.event(note.kind, note.text)
        lr = self.learning_rate()
        if action.verdict is Verdict.GO:
            self.update()
        elif not self._depart(action):
            return
        seconds, found = time.perf_counter() - start, inspect(self.model)
        record = StepRecord(
            step=self.progress.step,
            loss=seen.loss,
            grad_norm=norm,
            lr=lr,
            step_seconds=seconds,
            tokens_per_second=self.tokens_per_step / seconds,
            statistics=(found.statistics - before).as_dict(),
            held_bytes=found.held_bytes,
            process_bytes=process_bytes(self.device),
            tokens_per_expert=experts,
            val_loss=None,
        )
        self._last = self._with_evaluation(record)
        if self.report is not None:
            self.report.step(self._last)
            self.report.compare_time(found)
        self._follow(agreed)

    def forward_backward(self, *, early: bool = False) -> float:
        """Computes the gradients of the mean loss over the next batch of samples; returns this rank's mean loss.

        `early`: updates begin in the last backward.
        """
        progress = self.progress
        progress.batch = progress.next_batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.updating = early
        together = self.wrapped.plan.batches_per_pass or 1
        if together > 1 and progress.accumulation > 1:
            share = self.optimizer.scale(torch.tensor(1 / progress.accumulation))
            with self.optimizer.update_in_backward() if early else nullcontext():
                losses = accumulate(
                    self.model, self._loss, self._micro_batches(), weights=[share] * progress.accumulation
                )
        else:
            losses = list(self._one_by_one(early))
        return torch.stack(losses).mean().item()

    def _one_by_one(self, early: bool) -> Iterator[Tensor]:
        """Runs forward and backward of each micro-batch; yields their losses."""
        accumulation = self.progress.accumulation
        for number, micro_batch in enumerate(self._micro_batches()):
            loss = self._loss(self.model, micro_batch)
            last = number == accumulation - 1
            with self.optimizer.update_in_backward() if early and last else nullcontext():
                (self.optimizer.scale(loss) / accumulation).backward()
            yield loss.detach()

    def _micro_batches(self) -> Iterator[Tensor]:
        """This rank's micro-batches of the step."""
        batch = self.data.batch(seed=self.config.run.seed, step=self.progress.batch, rows=self.progress.global_batch)
        for micro_batch in batch.chunk(self.progress.accumulation):
            yield rows_of(micro_batch, self.replica, self.replicas).to(self.device)

    def learning_rate(self) -> float:
        """The learning rate of the next update. Not collective."""
        progress, steps, config = self.progress, self.config.run.steps, self.config.optimizer
        factor = lr_factor(progress.step, steps, config, progress.schedule, progress.schedule_begin)
        return progress.lr * progress.rate * factor

    def norm(self) -> float:
        """Clips the gradients; returns their global norm before clipping."""
        clip = self.progress.clip_norm
        return float(self.optimizer.clip_grad_norm_(math.inf if clip is None else clip))

    def update(self) -> None:
        """Applies the gradients."""
        self.updating = True
        self.optimizer.step()
        self.skip()

    def skip(self) -> None:
        """Drops the gradients and counts the step."""
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += self.tokens_per_step
        self.mark()

    def mark(self) -> None:
        """Marks the point between two steps to which `rescue` returns. Not collective."""
        self.updating = False
        """Whether weights are being written, or may be in this step's backward: the step cannot be undone."""
        self._mark = replace(self.progress), random_states()

    def _updates_in_backward(self) -> bool:
        """Whether updates may begin in this step's backward: nothing can ask for the weights from before it."""
        return (
            self.progress.clip_norm is None
            and self.optimizer.loss_scale is None
            and self.config.watch.memory_tries == 0
            and not self._scales_are_due()
            and self.latest is not None
            and not self.supervisor.keeps_weights
        )

    def _scales_are_due(self) -> bool:
        every = self.config.watch.scales_every
        return every is not None and self.progress.step % every == 0

    def scales(self) -> dict[str, float]:
        """Root mean square of every trainable parameter, from the masters."""
        return scales(self.wrapped)

    # ------------------------------------------------------------------------------------------------- requests

    def _agree(self, loss: float, seconds: float) -> Agreed:
        """One small all-gather of each rank's loss, time, signal and requests."""
        asked = None if self.report is None else self._control.asked()
        saved = self._saving is None or self._saving.done()
        mine = torch.tensor(
            [loss, seconds, self._signals.received, saved, asked is not None], dtype=torch.float64, device="cpu"
        )
        table = mine.new_empty(self.ranks, len(mine))
        dist.all_gather(list(table), mine, group=self.wrapped.groups.control)
        losses, busy, signals, are_saved, changed = table.t().tolist()
        if changed[0]:
            asked = self._from_rank_0(asked)
        if isinstance(asked, ConfigError):
            self.event("control", f"{CONTROL} is not followed: {asked}")
        return Agreed(
            losses=tuple(losses),
            busy_seconds=tuple(busy),
            signal=int(max(signals)),
            saved=all(are_saved),
            control=asked if isinstance(asked, TrainControl) else TrainControl(),
        )

    def _follow(self, agreed: Agreed) -> None:
        """Saves and ends the run if due."""
        step, every = self.progress.step, self.config.save.every
        if self._saving is not None and agreed.saved:
            self._settle()
        self._apply(agreed.control)
        if agreed.signal or agreed.control.stop:
            self.save(must=True)
            why = named(agreed.signal) if agreed.signal else CONTROL
            text = f"after step {step} by {why}; the state is saved in {self.latest}"
            self._stop(text, exit_code_of(agreed.signal) if agreed.signal else 0)
        if agreed.control.save or (every is not None and step % every == 0 and step < self.config.run.steps):
            self.save(asynchronous=self.config.save.asynchronous)

    def _apply(self, control: TrainControl) -> None:
        """Applies new settings from the next step on; one that does not fit is told, and the others hold."""
        progress, first = self.progress, self.progress.step + 1
        now = {name: getattr(progress, name) for name in ("lr", "clip_norm")}
        for name, value, text in changes(control, now, first):
            setattr(progress, name, value)
            self.event("control", text)
        for name, change in (("schedule", self._reschedule), ("global_batch", self._resize_batch)):
            value, before = getattr(control, name), getattr(progress, name)
            if value is None or value == before:
                continue
            try:
                change(value)
            except ConfigError as error:
                self.event("control", f"{CONTROL} is not followed: {error}")
            else:
                self.event("control", f"{name} is {value} from step {first} on, it was {before}")

    def _reschedule(self, schedule: str) -> None:
        """Changes the schedule. Raises ConfigError for one that does not last to the end of the run."""
        progress, config = self.progress, self.config
        if schedule != COSINE:
            factors(schedule, config.optimizer.lr, max(1, config.run.steps - progress.step))
        progress.schedule, progress.schedule_begin = schedule, progress.step

    def _resize_batch(self, samples: int) -> None:
        """Changes the samples of a step, in micro-batches of the same size. Raises ConfigError if they do not fit."""
        progress = self.progress
        together = progress.global_batch // progress.accumulation
        if samples % together:
            raise ConfigError(
                f"global_batch={samples} is not a multiple of {together}, the samples of a micro-batch of all ranks"
            )
        progress.global_batch, progress.accumulation = samples, samples // together

    def _stop(self, text: str, exit_code: int) -> NoReturn:
        self.event("stopped", text)
        self.status("stopped", text)
        raise Stopped(f"stopped {text}", exit_code)

    # ------------------------------------------------------------------------------------------------- save and resume

    def save(self, *, asynchronous: bool = False, must: bool = False) -> None:
        """Saves the present state, unless it is saved already. A failure ends the run if `must`, or by policy."""
        self._settle(must=must)
        path = self.directory / CHECKPOINTS / f"step-{self.progress.step:08d}"
        if self.latest == path:
            return
        try:
            self._saving = self._save_to(path, keep=self.config.save.keep, asynchronous=asynchronous)
        except CheckpointError as error:
            self._save_failed(error, must)
            return
        if not asynchronous:
            self._settle(must=must)

    def _save_to(self, path: Path, *, keep: int | None = None, asynchronous: bool = False) -> Saving:
        supervisor = self.supervisor.state()
        extra = {"progress": asdict(self.progress), "settings": self.identity, "supervisor": supervisor}
        return save(path, self.model, self.optimizer, extra=extra, keep=keep, asynchronous=asynchronous)

    def _settle(self, *, must: bool = False) -> None:
        """Blocks until the save in progress has ended. A failure ends the run if `must`, or by policy."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                self.latest = saving.result()
                self.status("running")
            except CheckpointError as error:
                self._save_failed(error, must)

    def _save_failed(self, error: CheckpointError, must: bool) -> None:
        self.event("save failed", f"{error}; the latest checkpoint is {self.latest}")
        if must or self.config.save.on_failure == "stop":
            raise error

    def resume(self, source: Path) -> None:
        """Continues from, or goes back to, a checkpoint; moves later checkpoints of this run apart."""
        source = source.absolute()
        self._settle()
        extra = load(source, self.model, self.optimizer)
        self.supervisor.restore(extra["supervisor"])
        self.progress = Progress(**{"global_batch": self.config.run.global_batch, **extra["progress"]})
        self._fit_micro_batches()
        if source.parent == self.directory / CHECKPOINTS:
            self.latest = source
        self.mark()
        self._move_apart()

    def _fit_micro_batches(self) -> None:
        """Divides the samples of a step among these ranks, in micro-batches of at most the size in the settings."""
        progress, samples = self.progress, self.progress.global_batch
        if samples % self.replicas:
            raise ConfigError(
                f"the run has global_batch={samples} by {CONTROL}, which {self.replicas} ranks cannot share equally: "
                "start a number of ranks that divides it"
            )
        rows, fewest = samples // self.replicas, -(-samples // self.config.micro_batch)
        if rows % progress.accumulation or progress.accumulation < fewest:
            progress.accumulation = next(count for count in range(fewest, rows + 1) if rows % count == 0)

    def _move_apart(self) -> None:
        """Rank 0 moves checkpoints of steps that are not done yet out of the regular ones."""
        if dist.get_rank() == 0:
            for text in move_apart(self.directory, self.progress.step):
                self.event("moved apart", text)

    # ------------------------------------------------------------------------------------------------- faults

    def _depart(self, action: Action) -> bool:
        """Carries out a verdict other than GO; returns whether the step counts as done."""
        reason = action.reason
        if action.not_finite:
            drop = None if self.updating else self.optimizer.zero_grad
            reason += name_not_finite(self.model, self.wrapped, self._forward_again, drop)
        if action.verdict is Verdict.SKIP:
            self.event("skipped", reason)
            self.skip()
            return True
        if action.verdict is Verdict.BACK:
            target = self._last_before(action.before)
            if target is not None:
                self._go_back(target, action, reason)
                return False
            reason += "; there is no checkpoint to go back to"
        self.skip()
        self._settle()
        path = self._from_rank_0(path_apart(self.directory, self.progress.step))
        self._save_to(path)
        self.event("stopped", f"{reason}; the state is saved in {path}")
        self.status("failed", reason)
        raise Stopped(f"{reason}. The state is saved in {path}, the weights are as before that step", DIVERGED)

    def _forward_again(self) -> None:
        for micro_batch in self._micro_batches():
            self._loss(self.model, micro_batch)

    def _go_back(self, target: Path, action: Action, reason: str) -> None:
        before = self.progress
        self.resume(target)
        progress = self.progress
        progress.avoid, progress.rate = before.avoid + action.avoid, before.rate * action.rate
        for name in _CONTROLLED:  # by control.yaml, which is not read again
            setattr(progress, name, getattr(before, name))
        self.mark()
        step = progress.step
        if self.report is not None:
            self.report.go_back(step)
        without = f", without the batches {list(action.avoid)}" if action.avoid else ""
        self.event("went back", f"{reason}; back to step {step}, at {progress.rate:g} of the learning rate{without}")

    def _last_before(self, step: int) -> Path | None:
        """The latest checkpoint with fewer than `step` steps, as rank 0 sees the directory."""
        self._settle()
        return self._from_rank_0(last_before(self.directory, step) if dist.get_rank() == 0 else None)

    def rescue(self, scarcity: memory.Scarcity, store: dist.Store) -> TrainConfig:
        """Saves the state before the step that ran out of memory; returns the settings to redo it with.

        Every rank calls it, when its process groups are broken. Afterwards no step can run any more.
        """
        if self._saving is not None:
            self._saving.join()
        self._saving, who = None, memory.who(store)
        self._disconnect()
        self.wrapped.kept.drop_process_groups(lambda: memory.regroup(store, scarcity.tries + 1))
        memory.forget(store, self.wrapped.groups.control)
        progress, states = self._mark
        self.progress = replace(progress)
        set_random_states(read_random_states(states, "the beginning of the step"))
        samples = self.config.run.global_batch  # the settings keep theirs, in micro-batches of the present size
        accumulation = samples * self.progress.accumulation // self.progress.global_batch
        config = scarcity.next(inspect(self.model), samples // self.replicas, accumulation)
        self.latest = self._last_before(self.progress.step + 1)
        self.save(must=True)
        blocks = config.plan.rcache_blocks
        micro_batches = self.progress.global_batch * config.run.accumulation // samples
        _LOG.debug("memory was short: plan %s, %d micro-batches from here on", config.plan, config.run.accumulation)
        self.event(
            "out of memory",
            f"{who[0] if who else 'a rank'} in step {self.progress.step + 1}; it is redone with micro-batches: "
            f"{micro_batches}, rCache blocks: {'as before' if blocks is None else blocks}",
        )
        return config

    def _disconnect(self) -> None:
        """Drops all references to meshes; the model can still be saved."""
        self.mesh = None
        for module in self.model.modules():
            if isinstance(module, GPT):
                module.meshes = Meshes(self.config.model, None)
            if isinstance(module, MoE):
                module.place = LayerRanks()
            if isinstance(module, CutLinear):
                module.ranks = replace(module.ranks, process_group=None)

    # ------------------------------------------------------------------------------------------------- evaluation

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks predict in a step."""
        return self.progress.global_batch * self.config.model.seq_len

    def _with_evaluation(self, record: StepRecord) -> StepRecord:
        """The record of a step with the evaluation that is due after it, if any."""
        run = self.config.run
        if record.step % run.eval_every and record.step != run.steps:
            return record
        with distributions(self.model if run.activations and self.report is not None else None) as found:
            return replace(record, val_loss=self.evaluate(), activations=found)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross-entropy over the validation batches in nats per token."""
        self.model.eval()
        losses = []
        for batch in self.validation:
            mine = rows_of(batch, self.replica, self.replicas).to(self.device)
            logits = self.model(mine[:, :-1]).logits.float()
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()))
        self.model.train()
        total = torch.stack(losses).mean()
        dist.all_reduce(total)
        return total.item() / self.ranks

    def sample(self) -> str:
        """Text that the model writes after the start of the validation part; the same on all ranks."""
        run = self.config.run
        if not run.sample_bytes:
            return ""
        start = self.data.validation[: min(64, self.config.model.seq_len)].long().unsqueeze(0).to(self.device)
        generator = torch.Generator(self.device).manual_seed(run.seed)
        written = generate(self.model, start, run.sample_bytes, temperature=run.temperature, generator=generator)
        return decode_bytes(written[0].tolist())

    # ------------------------------------------------------------------------------------------------- what is told

    def description(self) -> Iterator[str]:
        """Lines that describe model, data and step. Not collective."""
        run, model = self.config.run, self.config.model
        pairs = zip(model.experts, model.ep, strict=True)
        kinds = ", ".join(f"{n} experts (ep {ep})" if n else "dense" for n, ep in pairs)
        yield f"model       {self.parameters:,} parameters, layers of width {model.d_model}: {kinds}"
        yield self.data.description(self.validation)
        yield (
            f"step        {self.progress.global_batch} samples of {model.seq_len} bytes, ranks: {self.ranks}"
            f"{f' (tp {run.tp})' * (run.tp > 1)}, "
            f"micro-batches: {self.progress.accumulation}, {run.dtype}, plan: {self.config.plan.kind}"
        )
        setting = expandable_by(self.device) if any(model.experts) and model.capacity_factor is None else None
        if setting is not None:
            yield (
                f"memory      experts take another number of tokens in each step, which fragments GPU memory: set "
                f"{setting}"
            )

    def event(self, kind: str, text: str) -> None:
        """Records an event. Not collective, like all that follows."""
        if self.report is not None:
            self.report.event(self.progress.step, kind, text)

    def status(self, state: str, reason: str = "") -> None:
        """Records the state of the run."""
        if self.report is not None:
            self.report.status(state, self.progress.step, None if self.latest is None else str(self.latest), reason)

    def _busy_with(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.report is None else self.report.busy(what)

    def _from_rank_0(self, value: T) -> T:
        """Returns the value of rank 0. Collective."""
        box = [value]
        dist.broadcast_object_list(box, group=self.wrapped.groups.control)
        return box[0]


def lr_factor(
    step: int, steps: int, config: OptimizerConfig, schedule: str = COSINE, begin: int | None = None
) -> float:
    """Factor on the peak learning rate at a step counted from 0: linear warm-up, then `schedule`.

    A scheduler of torch begins at step `begin`, by default with the end of the warm-up; steps between the two, which a
    run does again after it has gone back, have its first factor.
    """
    warmup = config.warmup_steps
    if schedule == COSINE:
        rises, decay = step < warmup, cosine(step - warmup, steps - warmup, config.final_lr)
    else:
        begin = warmup if begin is None else begin
        table = factors(schedule, config.lr, max(1, steps - begin))
        rises, decay = step < min(begin, warmup), table[min(max(0, step - begin), len(table) - 1)]
    return (step + 1) / (warmup + 1) if rises else decay


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of what is trained; only matrices decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
