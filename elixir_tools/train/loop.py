"""The training loop: from the data to the trained model, faults included.

Owns the order of a step: gradients, one small all-gather of the ranks' findings, the supervisor's verdict, the update;
then evaluation, checkpoint and end where due. All ranks call everything that communicates in the same order, and every
decision follows from what they agreed on. Only rank 0 prints and writes.
"""

import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe import full_state_dict, init_mesh, inspect
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.ext.measure import is_out_of_memory
from elixir_moe.ext.plans import seconds_text
from elixir_moe.ext.ranks import BusyTime, agree, default_store
from elixir_tools import settings
from elixir_tools.report.directory import CONTROL, Claim
from elixir_tools.report.records import StepRecord, Summary, process_bytes, totals
from elixir_tools.report.timeline import recorded
from elixir_tools.train import memory
from elixir_tools.train.activations import distributions
from elixir_tools.train.checkpoints import CheckpointManager
from elixir_tools.train.config import TrainConfig, identity
from elixir_tools.train.data import Text
from elixir_tools.train.directory import extra_of
from elixir_tools.train.memory import Scarcity
from elixir_tools.train.report import Console, Report
from elixir_tools.train.training import Training
from elixir_tools.train.waiting import Waits
from elixir_tools.watch.control import INTERRUPTED, Control, ControlFile, Signals, changes, exit_code_of, named
from elixir_tools.watch.supervisor import DIVERGED, Action, Observation, Supervisor, Verdict

_LOG = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818 (no error: it was asked for, or decided)
    """The run ended before its last step, with its state saved; raised on all ranks."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """The facts that all ranks share after the gradients of a step."""

    losses: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    signal: int
    """A signal that some rank received; 0 for none."""
    saved: bool
    """The save in progress has ended on all ranks."""
    control: Control | None
    """New settings; None if there are none."""


def train(
    config: TrainConfig,
    data: Text,
    claim: Claim | None,
    console: Console,
    *,
    details: bool = False,
) -> Summary | None:
    """Runs a training to its end. Collective: every rank calls it with the same settings and data.

    Args:
        config: the settings, already checked against the number of ranks.
        data: what is trained on.
        claim: the run directory on rank 0; None on the others.
        console: the output of rank 0.
        details: whether the plan is shown in full.

    Returns:
        The summary on rank 0; None on the others.

    Raises:
        Stopped: the run ended early, with its state saved.
        ElixirError: any error of the library.
    """
    torch.set_num_threads(config.run.threads)
    loops: list[Loop] = []
    with ExitStack() as stack:
        mesh = init_mesh(config.run.tp, timeout=timedelta(seconds=config.run.timeout_seconds))
        signals = stack.enter_context(Signals(partial(_interrupt, loops), tells=claim is not None))
        store = default_store()
        if mesh.device_type != "cpu":
            stack.enter_context(memory.aborting(store))
        scarcity = Scarcity(config)
        while True:
            try:
                return _train(config, data, claim, console, mesh, signals, loops, details)
            except Stopped:
                raise
            except Exception as error:
                if not loops or not _is_short(error, store, loops[0]):
                    if memory.is_broken_collective(error) and not isinstance(error, ElixirError):
                        raise ElixirError(f"{error}. Another rank has failed or stopped: see its error") from error
                    raise
            del mesh
            memory.release()  # the error no longer refers to the step's tensors
            config = loops[0].rescue(scarcity, store)
            if claim is not None:
                claim.source = loops[0].keeper.latest
            loops.clear()
            memory.release()
            mesh = init_mesh(config.run.tp)


def _train(
    config: TrainConfig,
    data: Text,
    claim: Claim | None,
    console: Console,
    mesh: DeviceMesh,
    signals: Signals,
    loops: list["Loop"],
    details: bool,
) -> Summary | None:
    """Runs a training to its end; appends its `Loop` to `loops`, so that the caller has it after a failure."""
    with ExitStack() as stack:
        waits = Waits(quiet=claim is None or console.quiet)
        source = [str(claim.source) if claim is not None and claim.source is not None else None]
        dist.broadcast_object_list(source)
        _check_alike(config, data)
        with waits("making the model and its shards"):
            training = Training(config, data, mesh)
        report = None
        if claim is not None:
            run, loss = config.run, data.baseline(training.validation)
            done = extra_of(claim.source)["progress"]["step"] if claim.source is not None else 0
            report = stack.enter_context(
                Report(
                    console,
                    claim.path,
                    steps=run.steps,
                    log_every=run.log_every,
                    bigram_loss=loss,
                    done=done,
                    details=details,
                )
            )
            report.write("config.yaml", settings.to_yaml(config))
        loop = Loop(training, report, signals, Path(config.run.out))
        loops.append(loop)
        try:
            return loop.run(Path(source[0]) if source[0] is not None else None)
        except Stopped:
            training.optimizer.close()
            raise


def _check_alike(config: TrainConfig, data: Text) -> None:
    """Raises ConfigError if ranks train another model, or on other data: each has read its own files. Collective."""
    mine = identity(config, data) | {"run.steps": config.run.steps, "run.accumulation": config.run.accumulation}
    agree("what they train", mine, remedy="give all ranks the same settings, model and data", error=ConfigError)


def _is_short(error: Exception, store: dist.Store, loop: "Loop") -> bool:
    """Whether some rank is out of memory, and the step can be redone."""
    short = is_out_of_memory(error)
    if not short and not memory.is_broken_collective(error):
        return False

    def exchange() -> tuple[str, bool] | None:
        if short:
            memory.say_so(store, dist.get_rank(), redoable=not loop.training.updating)
        return memory.who(store)

    found = memory.ask(exchange)
    return found is not None and found[1]


def _interrupt(loops: Sequence["Loop"]) -> NoReturn:
    """Ends this process at the second Ctrl-C, on another thread: the main thread may wait for other ranks."""
    for loop in loops:
        loop.interrupted()
    os._exit(INTERRUPTED)


class Loop:
    """One training, from its present step to its end."""

    def __init__(self, training: Training, report: Report | None, signals: Signals, directory: Path) -> None:
        self.training, self.report = training, report
        self.config = training.config
        self.supervisor = Supervisor(self.config.watch)
        self._signals = signals
        self._control = ControlFile(directory / CONTROL)
        tell = partial(self._status, "running")
        self.keeper = CheckpointManager(training, self.supervisor, self.config.save, directory, self._event, tell)
        self._busy = BusyTime(training.device)
        self._last: StepRecord | None = None
        self._timed = False
        """The measured time of a step has been told."""
        self._seconds = 0.0
        self._first = 0
        self._planned: dict[str, int] = {}
        """Bytes that the plan foresees on rank 0, by tier."""

    # -------------------------------------------------------------------------------------------------- start and end

    def run(self, source: Path | None) -> Summary | None:
        """Runs all remaining steps, the last save and the conclusion."""
        self._begin(source)
        begin = time.perf_counter()
        while (done := self.training.progress.step) < self.config.run.steps:
            write = self.report.write if self.report is not None and done + 1 == self.config.run.profile else None
            with recorded(done + 1, write):
                self.step()
        self._seconds = time.perf_counter() - begin
        if self.config.save.every is not None:
            with self._busy_with("saving"):
                self.keeper.save(asynchronous=False, must=True)
        return self._conclude()

    def _begin(self, source: Path | None) -> None:
        if source is not None:
            with self._busy_with("reading the checkpoint"):
                self.keeper.take(source)
            _LOG.debug("resumed from %s, step %d", source, self.training.progress.step)
        else:
            self.keeper.move_apart(0)
        self._first = self.training.progress.step
        if self.report is not None:
            lines = list(self.training.description())
            for line in lines:
                self.report.say(line)
            self.report.about({line[:12].rstrip(): line[12:] for line in lines})
            found = inspect(self.training.model)
            facts = found.facts(self.training.progress.accumulation)
            self._planned = totals(facts["planned_bytes"])
            self.report.show_plan(found.rows, facts, found.plan.explanation)
            changed = self.report.plan(found.plan.to_json(), facts)
            if found.prediction is not None:
                self.report.say(f"time        {seconds_text(found.prediction.step_seconds)} a step, predicted")
            if source is not None:
                other = "" if changed is None else f", under another plan: {changed}"
                self.report.event(self._first, "resumed", f"from {source}, step {self._first}{other}")
        agreed = self._agree(0.0, 0.0)
        self._apply(agreed.control, first=True)
        self._status("running")
        if agreed.signal:
            self._stop(f"before step {self._first + 1} by {named(agreed.signal)}", exit_code_of(agreed.signal))

    def _conclude(self) -> Summary | None:
        """Writes sample, weights and summary; all communication comes before only rank 0 writes."""
        training, last = self.training, self._last
        val_loss = training.evaluate() if last is None or last.val_loss is None else last.val_loss
        sample = training.sample()
        weights = full_state_dict(training.model)
        training.optimizer.close()
        if self.report is None:
            return None
        steps = self.config.run.steps
        summary = Summary(
            steps=steps,
            ranks=training.ranks,
            parameters=training.parameters,
            train_loss=math.nan if last is None else last.loss,
            val_loss=val_loss,
            bigram_loss=self.report.bigram_loss,
            train_seconds=self._seconds,
            tokens_per_second=(steps - self._first) * training.tokens_per_step / max(self._seconds, 1e-9),
            out=self.config.run.out,
            prediction=None if (expected := inspect(training.model).prediction) is None else expected.as_dict(),
        )
        self.report.finish(summary, sample, weights)
        self._status("done")
        self.report.end(summary)
        return summary

    def rescue(self, scarcity: Scarcity, store: Any) -> TrainConfig:
        """After out of memory: saves the state before the step; returns the settings to continue with. Called on every
        rank."""
        training = self.training
        self.keeper.abandon()
        who = memory.who(store)
        training.disconnect()
        training.wrapped.kept.drop_process_groups(lambda: memory.regroup(store, scarcity.tries + 1))
        memory.forget(store, training.wrapped.groups.control)
        training.rewind()
        config = scarcity.next(training)
        self.keeper.latest = self.keeper.last_good(training.progress.step + 1)
        self.keeper.save(asynchronous=False, must=True)
        blocks = config.plan.rcache_blocks
        _LOG.debug("memory was short: plan %s, %d micro-batches from here on", config.plan, config.run.accumulation)
        self._event(
            "out of memory",
            f"{who[0] if who else 'a rank'} in step {training.progress.step + 1}; it is redone with micro-batches: "
            f"{config.run.accumulation}, rCache blocks: {'as before' if blocks is None else blocks}",
        )
        return config

    # ---------------------------------------------------------------------------------------------------------- a step

    def step(self) -> None:
        """Runs one step, and the evaluation, save and end that are due after it."""
        training, run = self.training, self.config.run
        before, start = inspect(training.model).statistics, time.perf_counter()
        self._busy.start()
        loss = training.forward_backward(early=self._updates_in_backward())
        busy = self._busy.stop()
        norm = training.norm()
        agreed = self._agree(loss, busy)
        experts = training.tokens_per_expert()
        action = self.supervisor.observe(self._observation(agreed, norm, experts))
        for note in action.notes:
            self._event(note.kind, note.text)
        lr = training.learning_rate()
        if action.verdict is Verdict.GO:
            training.update()
        elif not self._depart(action):
            return
        step, seconds = training.progress.step, time.perf_counter() - start
        due = step % run.eval_every == 0 or step == run.steps
        looked_at = training.model if due and run.activations and self.report is not None else None
        with distributions(looked_at) as activations:
            self._last = StepRecord(
                step=step,
                loss=sum(agreed.losses) / len(agreed.losses),
                grad_norm=norm,
                lr=lr,
                step_seconds=seconds,
                tokens_per_second=training.tokens_per_step / seconds,
                statistics=(inspect(training.model).statistics - before).as_dict(),
                held_bytes=inspect(training.model).held_bytes,
                process_bytes=process_bytes(training.device),
                tokens_per_expert=experts,
                val_loss=training.evaluate() if due else None,
                activations=activations,
                planned_bytes=self._planned,
            )
        if self.report is not None:
            found = inspect(training.model).prediction
            self.report.step(self._last)
            if found is not None and found.measured_seconds is not None and not self._timed:
                self._timed = True
                learned = "; the next start plans with what was measured" * found.is_off
                expected = f"{seconds_text(found.step_seconds)} were predicted"
                self.report.say(f"time        {seconds_text(found.measured_seconds)} a step; {expected}{learned}")
        self._follow(agreed)

    def _updates_in_backward(self) -> bool:
        """Whether updates may begin in this step's backward: nothing can ask for the weights from before it."""
        training, config = self.training, self.config
        return (
            training.progress.clip_norm is None
            and training.optimizer.loss_scale is None
            and config.watch.memory_tries == 0
            and not self._scales_are_due()
            and self.keeper.latest is not None
            and not self.supervisor.keeps_weights
        )

    def _scales_are_due(self) -> bool:
        every = self.config.watch.scales_every
        return every is not None and self.training.progress.step % every == 0

    def _agree(self, loss: float, seconds: float) -> Agreed:
        """One small all-gather of each rank's loss, time, signal and requests. Collective."""
        asked: Control | ConfigError | None = None
        if self.report is not None:
            try:
                asked = self._control.changed()
            except ConfigError as error:
                asked = error
        group = self.training.wrapped.groups.control
        mine = torch.tensor(
            [loss, seconds, self._signals.received, self.keeper.done, asked is not None],
            dtype=torch.float64,
            device="cpu",
        )
        table = mine.new_empty(self.training.ranks, len(mine))
        dist.all_gather(list(table), mine, group=group)
        losses, busy, signals, saved, changed = table.t().tolist()
        box: list[Any] = [asked]
        if changed[0]:
            dist.broadcast_object_list(box, group=group)
        if isinstance(box[0], ConfigError):
            self._event("control", f"{CONTROL} is not followed: {box[0]}")
        return Agreed(
            losses=tuple(losses),
            busy_seconds=tuple(busy),
            signal=int(max(signals)),
            saved=all(saved),
            control=box[0] if isinstance(box[0], Control) else None,
        )

    def _observation(self, agreed: Agreed, norm: float, experts: dict[str, list[int]]) -> Observation:
        progress = self.training.progress
        return Observation(
            step=progress.step + 1,
            batch=progress.batch,
            losses=agreed.losses,
            norm=norm,
            scaled=self.training.optimizer.loss_scale is not None,
            busy_seconds=agreed.busy_seconds,
            tokens_per_expert=experts,
            scales=self.training.scales() if self._scales_are_due() else {},
        )

    def _depart(self, action: Action) -> bool:
        """Carries out a verdict other than GO; returns whether the step counts as done."""
        training = self.training
        reason = action.reason + (training.name_not_finite() if action.not_finite else "")
        if action.verdict is Verdict.SKIP:
            self._event("skipped", reason)
            training.skip()
            return True
        if action.verdict is Verdict.BACK:
            target = self.keeper.last_good(action.before)
            if target is not None:
                self._go_back(target, action, reason)
                return False
            reason += "; there is no checkpoint to go back to"
        training.skip()
        path = self.keeper.save_apart()
        self._event("stopped", f"{reason}; the state is saved in {path}")
        self._status("failed", reason)
        raise Stopped(f"{reason}. The state is saved in {path}, the weights are as before that step", DIVERGED)

    def _go_back(self, target: Path, action: Action, reason: str) -> None:
        training, before = self.training, self.training.progress
        self.keeper.take(target)
        progress = training.progress
        progress.avoid, progress.rate = before.avoid + action.avoid, before.rate * action.rate
        progress.lr, progress.clip_norm = before.lr, before.clip_norm  # of control.yaml, which is not read again
        training.mark()
        step = progress.step
        if self.report is not None:
            self.report.go_back(step)
        without = f", without the batches {list(action.avoid)}" if action.avoid else ""
        self._event("went back", f"{reason}; back to step {step}, at {progress.rate:g} of the learning rate{without}")

    # ------------------------------------------------------------------------------------------------- after the step

    def _follow(self, agreed: Agreed) -> None:
        """Saves and ends the run if due."""
        step, every = self.training.progress.step, self.config.save.every
        if self.keeper.under_way and agreed.saved:
            self.keeper.settle()
        control = self._apply(agreed.control)
        if agreed.signal or control.stop:
            self.keeper.save(asynchronous=False, must=True)
            why = named(agreed.signal) if agreed.signal else CONTROL
            text = f"after step {step} by {why}; the state is saved in {self.keeper.latest}"
            self._stop(text, exit_code_of(agreed.signal) if agreed.signal else 0)
        if control.save or (every is not None and step % every == 0 and step < self.config.run.steps):
            self.keeper.save(asynchronous=self.config.save.asynchronous)

    def _stop(self, text: str, exit_code: int) -> NoReturn:
        self._event("stopped", text)
        self._status("stopped", text)
        raise Stopped(f"stopped {text}", exit_code)

    def interrupted(self) -> None:
        """Writes that the run ended without a save; on another thread."""
        self._status("stopped", "at once, by a second Ctrl-C")

    def _apply(self, control: Control | None, *, first: bool = False) -> Control:
        """Applies new settings. On the `first` call, ignores save and stop, which were meant for an earlier start."""
        if control is None:
            return Control()
        progress = self.training.progress
        now = {name: getattr(progress, name) for name in ("lr", "clip_norm")}
        for name, value, text in changes(control, now, progress.step + 1):
            setattr(progress, name, value)
            self._event("control", text)
        return Control() if first else control

    def _busy_with(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.report is None else self.report.busy(what)

    def _event(self, kind: str, text: str) -> None:
        if self.report is not None:
            self.report.event(self.training.progress.step, kind, text)

    def _status(self, state: str, reason: str = "") -> None:
        if self.report is not None:
            saved = None if self.keeper.latest is None else str(self.keeper.latest)
            self.report.status(state, self.training.progress.step, saved, reason)
