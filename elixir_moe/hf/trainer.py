"""Hugging Face's Trainer, and trainers built on it such as TRL's SFTTrainer.

Owns what differs for a wrapped model: how it is prepared (`hf.accelerate`), saved, loaded and resumed, and which
settings of the trainer contradict this library. The loop, the losses, schedulers, accumulation, evaluation and logging
stay the trainer's. Needs the packages `transformers` and `accelerate`.

A checkpoint folder of the trainer has weights for `from_pretrained`, and a checkpoint of `em.save`, from which training
resumes on any number of ranks.
"""

import glob
import json
import os
import re
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.distributed.all_ranks import raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from elixir_moe.hf.accelerate import CHECKPOINT_FOLDER, ElixirAccelerator, checkpoint_in, save_over
from elixir_moe.hf.fused_loss import FusedLoss
from elixir_moe.hf.one_pass import OnePass, why_not
from elixir_moe.hf.routers import Routers, busiest, has_routers
from elixir_moe.hf.save_pretrained import save_pretrained
from elixir_moe.hf.steps import GoBack, StepCallback, StepFacts, Steps
from elixir_moe.optim.division import divided
from elixir_moe.optim.joined import join
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.wrapped import Wrapped

_REFUSED = {
    "fsdp": "it shards the model as well",
    "deepspeed": "it shards the model as well",
    "torch_compile": "a wrapped model cannot be compiled as a whole",
    "fp16": "its loss scale is Accelerate's; train in bf16",
    "fp16_full_eval": "evaluations compute in the dtype of em.wrap",
    "auto_find_batch_size": "a batch that does not fit ends all ranks; em.Plan.auto and elixir-moe plan know what fits",
}


class _AfterStep(TrainerCallback):
    """Calls `Routers.step` after each update."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._routers.step()


class _CheckpointBetweenSteps(JITCheckpointCallback):
    """Saves after a signal, like Trainer's callback, but only between steps: checkpoints contain no gradients."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Does nothing: `on_step_end` follows."""


SET_ASIDE_FOLDER = "apart"
"""The folder, inside the trainer's, of checkpoints from which no run resumes automatically."""
_ONE_BACKWARD = ("transformers", "trl")
"""Packages whose `training_step` calls backward once and reads no gradients."""

_Trainer: Any = object
"""The trainer that the mixin is mixed into."""


class ElixirMixin(_Trainer):
    """Makes a Trainer train a model under a plan: ``class MyTrainer(ElixirMixin, SFTTrainer): pass``."""

    def __init__(
        self,
        *args: Any,
        plan: Plan | AutoPlan | None = None,
        wrap: dict[str, Any] | None = None,
        routers: dict[str, Any] | None = None,
        loss: Literal["whole", "fused"] = "whole",
        update_in_backward: bool | None = None,
        muon: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the trainer's arguments and those of a plan.

        Args:
            args, kwargs: the trainer's. `optimizers` may have two in the place of one: ``((muon, adamw), None)``.
            plan: as in `em.wrap`, by default `Plan.zero3()`. With `Plan.batches_per_pass`, so many micro-batches of a
                step pass each layer together. `Plan.auto` without `accumulation` takes that of the trainer's settings
                and chooses `batches_per_pass`.
            wrap: further arguments of `em.wrap`. With ``bf16=True`` among the trainer's settings, `compute_dtype` is
                bf16.
            routers: arguments of `hf.routers.Routers`, or {}, to log the load of a mixture's experts:
                ``router_busiest`` is the busiest expert's tokens as a multiple of an even share, for each router and
                for the worst of them.
            loss: "fused" computes the loss of a causal language model without its logits, by `linear_cross_entropy`,
                label smoothing included. Evaluations that want logits (`compute_metrics`, `predict`) have them.
            update_in_backward: whether the last backward of a step runs in `ShardedOptimizer.update_in_backward`. By
                default it does where `max_grad_norm` is 0, `save_strategy` writes checkpoints from which a run can
                continue if such a backward fails, and no code of yours may need whole gradients: a `training_step`, a
                callback's `on_pre_optimizer_step`, a pre-hook of the optimizer's step.
            muon: options of `em.Muon`, or {}, to train the matrices of layers and experts by Muon, and the rest by the
                optimizer of the trainer's settings. Learning rate and weight decay are those of the settings unless
                given here; `adjust_lr_fn` is "match_rms_adamw", with which one rate serves both.

        Raises:
            ConfigError: a setting of the trainer contradicts this library.
        """
        self._plan, self._wrap, self._muon = plan, wrap, muon
        super().__init__(*args, **kwargs)
        if muon is not None and self.optimizer is not None:
            raise ConfigError("muon= with optimizers=: the trainer has its optimizers already; leave one of them out")
        if routers is not None and self.model_init is not None:
            raise ConfigError("routers= with model_init=: train() makes a new model, whose routers nobody counts")
        for callback in self.callback_handler.callbacks:
            if type(callback) is JITCheckpointCallback:
                callback.__class__ = _CheckpointBetweenSteps
        self.routers = None if routers is None else Routers(self.model, **routers)
        if self.routers is not None:
            self.add_callback(_AfterStep(self.routers))
        if update_in_backward and self._clips:
            raise ConfigError(
                f"update_in_backward=True with TrainingArguments(max_grad_norm={self.args.max_grad_norm}): clipping "
                f"needs all gradients before the first update; set max_grad_norm=0, or leave update_in_backward out"
            )
        self._update_in_backward = update_in_backward
        self._join_callbacks()
        counted = self._step_callbacks and self.model_init is None and has_routers(self.model)
        self._steps = Steps(Routers(self.model) if counted else None, self.args.device)
        self._one_pass = OnePass(self)
        self._passes_together: bool | None = None
        """Whether micro-batches pass each layer together; None until a training has begun."""
        self._going_back, self._apart = False, ""
        self._fuses, self._wants_logits, self._recomputes = loss == "fused", False, False
        self._fused_loss: FusedLoss | None = None
        if self._fuses:
            self._refuse_other_losses()
            smoother: Any = self.label_smoother
            if smoother is not None:
                self.label_smoother: Any = partial(self._smoothed, smoother)
            if self.model is not None:
                self._fused(self.model)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; several that are assigned, as in ``(muon, adamw)``, become one. Raises ConfigError."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> None:
        self._optimizer = None if given is None else join(given)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Creates the optimizer of the trainer's settings, and in addition Muon if that is asked for."""
        given = self.optimizer
        super().create_optimizer(model)
        assert self.optimizer is not None
        if given is None and self._muon is not None:
            trained = self.model if model is None else model
            self.optimizer = divided(self.optimizer, trained, self.args.learning_rate, self._muon)
        return self.optimizer

    @property
    def _step_callbacks(self) -> list[StepCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, StepCallback)]

    def add_callback(self, callback: Any) -> None:
        """Adds a callback; a `StepCallback` gets this trainer."""
        super().add_callback(callback)
        self._join_callbacks()

    def _join_callbacks(self) -> None:
        for callback in self._step_callbacks:
            callback.trainer = self

    def _refuse_other_losses(self) -> None:
        """Raises ConfigError if anything but Trainer computes the loss."""
        kinds = type(self).__mro__
        behind = kinds[kinds.index(ElixirMixin) + 1 :]
        whose = next((kind for kind in behind if "compute_loss" in vars(kind)), None)
        if whose is not Trainer:
            name = type(self).__name__ if whose is None else whose.__name__
            raise ConfigError(f"loss='fused' of a {name}, which computes a loss of its own: leave loss= out")
        if self.compute_loss_func is not None:
            raise ConfigError("loss='fused' with compute_loss_func=: that function expects logits; leave one out")

    def _fused(self, model: torch.nn.Module) -> FusedLoss:
        found, self._fused_loss = self._fused_loss, None
        if found is None or found.model is not model:  # model_init= makes several
            found = FusedLoss(model)
        self._fused_loss = found
        return found

    @property
    def _clips(self) -> bool:
        return (self.args.max_grad_norm or 0) > 0

    def _updates_in_backward(self) -> bool:
        """Whether updates may begin in the last backward of this step."""
        if self._clips or self._update_in_backward is not None:
            return bool(self._update_in_backward) and not self._clips
        steps = (kind for kind in type(self).__mro__ if "training_step" in vars(kind) and kind is not ElixirMixin)
        watching = self._step_callbacks
        others = (callback for callback in self.callback_handler.callbacks if callback not in watching)
        own = {type(callback).on_pre_optimizer_step for callback in others}
        return (
            self.args.save_strategy != SaveStrategy.NO
            and not self.args.save_only_model
            and all(kind.__module__.partition(".")[0] in _ONE_BACKWARD for kind in steps)
            and own <= {TrainerCallback.on_pre_optimizer_step, _CheckpointBetweenSteps.on_pre_optimizer_step}
            and not self._sharded._optimizer_step_pre_hooks
            and not any(callback.keeps_weights for callback in watching)
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; instead of a checkpoint that a kill left incomplete, resumes from the newest complete one before it.

        Raises CheckpointError if there is none.
        """
        if str(resume_from_checkpoint).lower() == "true":  # a string, from a command line
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = _whole(resume_from_checkpoint)
        try:
            while True:
                self._one_pass.forget()
                self._passes_together = None
                if isinstance(self._plan, AutoPlan):
                    self.accelerator.plan = self._request(self._plan)
                self._recomputes = self._may_pass_together()
                try:
                    return super().train(resume_from_checkpoint, *args, **kwargs)
                except GoBack as back:
                    resume_from_checkpoint, self._going_back = back.folder, True
                if self.neftune_noise_alpha is not None:  # `train` attaches it again
                    self.neftune_hook_handle.remove()
        finally:
            self._going_back = False

    def _request(self, plan: AutoPlan) -> AutoPlan:
        """The search for a plan, which knows how many micro-batches a step has, and whether they can pass together."""
        if plan.accumulation == 1:
            plan = replace(plan, accumulation=self.args.gradient_accumulation_steps, batches_per_pass=None)
        return replace(plan, batches_per_pass=1) if why_not(self, ElixirMixin) else plan

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the trainer's step, and collects its facts for callbacks."""
        self.accelerator.update_in_backward = self._updates_in_backward()
        watched = bool(self._step_callbacks)
        if watched:
            self._steps.begin(self.state.global_step)
        if self._passes_together is None:
            self._passes_together = self._can_pass_together()
        together = self._passes_together
        self.accelerator.after_last_backward = self._one_pass.run if together else None
        with self._one_pass.waiting() if together else nullcontext():
            found: torch.Tensor = super().training_step(*args, **kwargs)
        found = found + self._one_pass.losses()
        if watched:
            self._steps.end(found)
        return found

    def _may_pass_together(self) -> bool:
        """Whether several micro-batches may await their backward; known before a plan is found."""
        plan = self.accelerator.plan
        together = plan.batches_per_pass or (self.args.gradient_accumulation_steps if isinstance(plan, AutoPlan) else 1)
        return min(together, self.args.gradient_accumulation_steps) > 1 and not why_not(self, ElixirMixin)

    def _can_pass_together(self) -> bool:
        """Whether the plan wants micro-batches to pass each layer together, and the trainer lets them."""
        assert self._elixir is not None
        together = self._elixir.plan.batches_per_pass or 1
        if together == 1 or self.args.gradient_accumulation_steps == 1:
            return False
        why = why_not(self, ElixirMixin)
        if why:
            warnings.warn(
                f"Plan(batches_per_pass={together}): micro-batches run one after the other: {why}", stacklevel=3
            )
        return not why

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._steps.norm = super()._get_grad_norm(*args, **kwargs)
        return self._steps.norm

    # ------------------------------------------------------------------------------------------- for callbacks of steps

    def step_facts(self) -> StepFacts:
        """Returns the facts of this step; for a callback's `on_pre_optimizer_step`. Collective."""
        assert self._elixir is not None
        return self._steps.facts(self.model, self._elixir)

    @property
    def may_have_updated(self) -> bool:
        """Whether updates of this step may have begun in its backward, so that it cannot be dropped."""
        return bool(self.accelerator.update_in_backward)

    def drop_gradients(self) -> None:
        """Drops the gradients of this step: its update then changes neither weights nor moments."""
        self._sharded.zero_grad()

    @torch.no_grad()
    def forward_again(self) -> None:
        """Repeats the forward passes of the step. Collective."""
        inputs, self._steps.inputs = self._steps.inputs, []
        for each in inputs:
            self.compute_loss(self.model, each)

    def save_apart(self) -> str:
        """Saves a checkpoint in ``OUT/apart``, where no run resumes automatically; returns its folder. Collective."""
        self._apart = os.path.join(self.args.output_dir, SET_ASIDE_FOLDER)
        try:
            self._save_checkpoint(self.model, None)
            return os.path.join(self._apart, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        finally:
            self._apart = ""

    def _get_output_dir(self, trial: Any) -> str:
        return self._apart or str(super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._apart:
            super()._push_from_checkpoint(checkpoint_folder)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Computes the trainer's loss; without logits if `loss` is "fused" and nothing needs them."""
        if model.training and torch.is_grad_enabled() and self._step_callbacks:
            self._steps.record_inputs(inputs)
        if not self._fuses or self._wants_logits or "labels" not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self._fused(model)(recompute=self._recomputes):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _smoothed(self, smoother: Any, outputs: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """Computes the loss with label smoothing, without logits where the forward has computed none."""
        fused_loss = self._fused_loss
        if fused_loss is not None and fused_loss.awaits_loss:
            smoother = fused_loss.smoothed(smoother.epsilon)
        found: torch.Tensor = smoother(outputs, labels, **options)
        return found

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kw: Any
    ) -> Any:
        """Runs the trainer's evaluation step, with logits if it asks for them."""
        self._wants_logits = not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kw)
        finally:
            self._wants_logits = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, and adds the load of routers to each loss."""
        if self.routers is not None and "loss" in logs:
            found = busiest(self.routers.loads())
            logs["router_busiest"] = max(found.values(), default=0.0)
            logs |= {f"router_busiest/{name}": load for name, load in found.items()}
        super().log(logs, *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Creates an `ElixirAccelerator`. Raises ConfigError for settings that contradict this library."""
        for name, why in _REFUSED.items():
            if getattr(self.args, name, None):
                raise ConfigError(f"TrainingArguments({name}={getattr(self.args, name)!r}): {why}; leave it out")
        if self.args.save_only_model and self.args.load_best_model_at_end:
            raise ConfigError(
                "TrainingArguments(save_only_model=True, load_best_model_at_end=True): the best model is loaded from a "
                "checkpoint with its optimizer; leave one out"
            )
        if self.args.bf16_full_eval and not self._computes_in_bf16:
            raise ConfigError(
                "TrainingArguments(bf16_full_eval=True): evaluations compute in the dtype of em.wrap; leave it out, or "
                "write bf16=True, which trains and evaluates in bf16 and updates fp32 masters"
            )
        if self.args.enable_jit_checkpoint and self.args.world_size > 1:
            raise ConfigError(
                f"TrainingArguments(enable_jit_checkpoint=True) on {self.args.world_size} ranks: a signal reaches them "
                f"at different steps, and all of them save one checkpoint; leave it out, and save often (save_steps)"
            )
        configs = getattr(self.model, "peft_config", {})
        learned = any(getattr(config, "is_prompt_learning", False) for config in configs.values())
        if learned and self.args.world_size > 1 and self.args.save_strategy != SaveStrategy.NO:
            raise ConfigError(
                f"TrainingArguments(save_strategy={self.args.save_strategy.value!r}) for prompts that peft learns, on "
                f"{self.args.world_size} ranks: peft saves values that it computes from the model on one rank, which "
                f"cannot gather weights. Train on one rank, or write save_strategy='no' and take the weights with "
                f"em.full_state_dict(trainer.model)"
            )
        if self.args.n_gpu > 1:
            raise ConfigError(f"one process sees {self.args.n_gpu} GPUs: start one for each with torchrun")
        super().create_accelerator_and_postprocess()
        ElixirAccelerator.adopt(self.accelerator, self._plan, self._wrap)

    @property
    def _computes_in_bf16(self) -> bool:
        if self.args.bf16 or (self._wrap or {}).get("compute_dtype") is torch.bfloat16:
            return True
        return all(p.dtype is torch.bfloat16 for p in self.model.parameters() if p.is_floating_point())

    def call_model_init(self, trial: Any = None) -> torch.nn.Module:
        """Makes a new model, after closing the previous one; `train` clears the accelerator. Collective."""
        if getattr(self, "model", None) is not None and self._elixir is not None:
            self._sharded.close()
        found: torch.nn.Module = super().call_model_init(trial)
        return found

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Does nothing: `em.wrap` moves weights to the device as the plan says."""

    def _has_mixed_mesh_grads(self, model: torch.nn.Module) -> bool:
        return False  # one norm covers all meshes; parameters show no gradients

    # --------------------------------------------------------------------------------------------------------- saving

    @property
    def _elixir(self) -> Wrapped | None:
        return getattr(self.model, "_elixir", None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model by `em.save_pretrained`: for a peft model, the adapters only. Collective.

        Before `train` the model is not wrapped, and Trainer saves it.

        Raises:
            UsageError: before `train`, if the weights are on meta.
        """
        if self._elixir is None:
            if any(tensor.is_meta for tensor in self.model.parameters()):
                raise UsageError(
                    "save_model before train(): the model's weights are on the meta device until train() has read or "
                    "initialized them. Call train() first; until then, use the folder of wrap={'weights': folder}"
                )
            super().save_model(output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        save_pretrained(self.model, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {type(callback).__name__: callback.to_save() for callback in self._step_callbacks}
        save_over(output_dir, self.model, self._sharded, frozen=self._frozen_in(output_dir), extra=extra)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _frozen_in(self, folder: str) -> set[str]:
        """The frozen parameters that peft has written with its adapters, as for an enlarged vocabulary."""

        def keys() -> set[str]:
            found: set[str] = set()
            for path in Path(folder).rglob("adapter_model.safetensors") if self.args.should_save else ():
                with safe_open(path, "pt") as file:
                    found.update(file.keys())
            return found

        written = raise_on_all_ranks("read the names in the adapters' files", keys, error=CheckpointError)[0]
        wrapped = self._elixir
        assert wrapped is not None
        chunks = [chunk for chunk in wrapped.scheduler.chunks if not chunk.spec.key.trainable]
        frozen = {wrapped.spec.names[parameter][0] for chunk in chunks for parameter in chunk.parameters}
        prefix = "base_model.model."  # in peft's files, also for a transformers model with adapters of its own
        names = {wrapped.spec.keys.get(key) or wrapped.spec.keys.get(key.removeprefix(prefix)) for key in written}
        return {name for name in names if name in frozen}

    # -------------------------------------------------------------------------------------------------------- loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Loads nothing: weights come with the optimizer, into shards."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        extra = load(checkpoint_in(checkpoint), self.model, self._sharded) or {}
        state = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(state)
        for callback in self._step_callbacks:
            callback.restore(extra.get(type(callback).__name__, {}), back=self._going_back)

    def _load_best_model(self) -> None:
        load(checkpoint_in(self.state.best_model_checkpoint), self.model, self._sharded)

    @property
    def _sharded(self) -> Any:
        assert self._elixir is not None
        return self._elixir.optimizer


def _whole(folder: str) -> str:
    """The checkpoint to resume from: `folder`, or with a warning the newest complete one before it. Collective.

    Only rank 0 reads the folders.
    """

    def look() -> tuple[str, str]:
        lacks = why_incomplete(folder) if not dist.is_initialized() or dist.get_rank() == 0 else ""
        if not lacks:
            return folder, ""
        before = [path for path in _checkpoints_before(folder) if not why_incomplete(path)]
        if not before:
            raise CheckpointError(
                f"Can't find a valid checkpoint at {folder}: {lacks}, and no whole checkpoint comes before it. A run "
                f"without a plan or with save_only_model=True cannot be resumed: read its weights with from_pretrained "
                f"and start a new run"
            )
        return before[0], f"{folder} is passed over: {lacks}; the training continues from {before[0]}"

    world = dist.is_initialized()
    found, said = raise_on_all_ranks("looked for a whole checkpoint", look)[0] if world else look()
    if said:
        warnings.warn(said, stacklevel=3)
    return found


def _checkpoints_before(folder: str) -> list[str]:
    """The Trainer's checkpoints next to `folder` with fewer steps, the newest first."""
    name = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    here, own = os.path.split(os.path.abspath(folder))
    last = name.fullmatch(own)
    if last is None:
        return []
    steps = sorted((int(found[1]) for found in map(name.fullmatch, os.listdir(here)) if found), reverse=True)
    return [os.path.join(here, f"{PREFIX_CHECKPOINT_DIR}-{step}") for step in steps if step < int(last[1])]


def why_incomplete(folder: str) -> str:
    """Says why training cannot resume from the Trainer's checkpoint `folder`; empty if it is complete.

    The folder `CHECKPOINT_FOLDER` appears in one rename. Trainer writes its own files after it, one after the other.
    """
    there = os.path.join(folder, CHECKPOINT_FOLDER)
    if not os.path.isdir(there) and not os.path.isdir(f"{there}.new"):
        return f"expected a folder {CHECKPOINT_FOLDER!r}, found none"
    states = [SCHEDULER_NAME, *sorted(glob.glob("rng_state*.pth", root_dir=folder))]
    for name in states:
        if not zipfile.is_zipfile(os.path.join(folder, name)):  # its table of contents is at its end
            return f"{name} is missing or cut short"
    try:
        with open(os.path.join(folder, TRAINER_STATE_NAME), encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError) as error:
        return f"{TRAINER_STATE_NAME} is missing or cut short: {error}"
    return ""


class ElixirTrainer(ElixirMixin, Trainer):
    """Hugging Face's `Trainer` for models under a plan."""
