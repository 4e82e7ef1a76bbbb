"""Fine-tuning by TRL's trainers under a plan.

Owns the way from a model's name to a trainer: the model is built without memory, each rank reads its shards of the
weights, and the trainer of TRL gets it with a plan. Data sets, losses, schedules, evaluation and logging are TRL's.
"""

import gc
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from elixir_moe import expert_mesh, init_mesh, inspect, quantize, sharded_init, spread_experts
from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.ext.accelerator import total_bytes
from elixir_moe.ext.hf import run_adapters_unmerged, shipped_patterns
from elixir_moe.ext.measure import host_bytes_left, is_out_of_memory
from elixir_moe.ext.models import packed_parameters
from elixir_moe.ext.planner import Profile, tile_for, trace
from elixir_moe.ext.plans import AutoPlan, Plan, size_bytes
from elixir_moe.ext.trainer import ElixirMixin
from elixir_tools.finetune.arguments import Arguments
from elixir_tools.finetune.callbacks import Records, Requests, Supervise, stopped_by
from elixir_tools.finetune.smaller import Step, that_fits
from elixir_tools.models.adapters import (
    adapted_modules,
    default_targets,
    excluded_modules,
    fused_experts,
    peft_targets,
    refuse_routers,
)
from elixir_tools.models.lora import ALL_LINEAR, EXPERTS
from elixir_tools.models.presets import causal_loss, causal_loss_of, causal_loss_without_logits, reason_of
from elixir_tools.names import TRAINERS
from elixir_tools.report.records import process_bytes
from elixir_tools.watch.control import Signals

_LOG = logging.getLogger(__name__)
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""The parts of a model's repository for a training: its config, weights and tokenizer."""
_TRUST = "read that code, and give --trust_remote_code true with a local folder of the model to run it"
_DATA_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""The arguments that TRL's script gives to the maker of this reward."""
_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("conversations",), ("prompt", "completion"), ("input_ids",)),
    "dpo": (("chosen", "rejected"),),
    "kto": (("completion", "label"), ("chosen", "rejected")),
    "reward": (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
    "grpo": (("prompt",),),
}
"""{trainer: the columns that it can read, in one of these sets}; `sft` reads a column of text, too."""
_PAIRS = ("dpo", "reward")
"""Trainers whose batches hold two texts for each row."""


def callbacks_of(given: Arguments, signals: Signals, command: str = "") -> list[TrainerCallback]:
    """The callbacks of a command: records, supervision, and requests by `control.yaml` and signals."""
    data = given.script.dataset_name or ", ".join(str(each.path) for each in given.mixture.datasets)
    words = {
        "command": command,
        "model": given.model.model_name_or_path,
        "data": data,
        "trainer": f"TRL's {TRAINERS[given.kind]}Trainer",
        "adapters": f"rank {given.model.lora_r}" if given.model.use_peft else "",
        "frozen weights": given.scheme or "",
    }
    about = {name: str(text) for name, text in words.items() if text}
    supervised = [] if given.watch is None else [Supervise(given.watch)]
    return [Records(about=about, profile=given.profile_step), *supervised, Requests(signals=signals)]


def finetune(given: Arguments, callbacks: Sequence[TrainerCallback] = ()) -> Any:
    """Trains, saves into ``--output_dir`` unless the run was stopped, and returns the trainer. Collective.

    Raises:
        ConfigError: the model, the data or a setting cannot be used; before any weight is read.
        DivergedError: the supervisor has stopped the run.
        OutOfMemory: a step ran out of memory; on the rank where it did.
    """
    training = given.training
    name = given.model.model_name_or_path
    if name is None:
        raise ConfigError(f"{given.kind}: --model_name_or_path is missing: give a folder, or a name on the hub")
    out = Path(training.output_dir).absolute()
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "cannot be written" if there.is_dir() else "is a file"
        raise ConfigError(f"--output_dir {training.output_dir}: {there} {why}: name another folder")
    if not given.model.use_peft and Path(training.output_dir, "adapter_config.json").exists():
        raise ConfigError(
            f"--output_dir {training.output_dir} holds the adapters of another run, which from_pretrained would load "
            "instead of this run's model: name another folder"
        )
    data = _data(given)
    folder = _folder(name, given.model.model_revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=training.trust_remote_code)
    except Exception as error:  # transformers has several types for it
        raise ConfigError(f"--model_name_or_path {name}: no tokenizer: {reason_of(error, folder, _TRUST)}") from error
    if getattr(training, "assistant_only_loss", False) and not (tokenizer.chat_template or training.chat_template_path):
        raise ConfigError(
            f"--assistant_only_loss: the tokenizer of {name} has no chat template: give one with --chat_template_path"
        )
    mesh = init_mesh(device_type="cpu" if training.use_cpu else None)
    model = _model(given, folder)
    if given.ep > 1:
        spread_experts(model, expert_mesh(mesh, given.ep))
    more = {"reward_funcs": _rewards(given.script)} if given.kind == "grpo" else {}
    base = getattr(trl, f"{TRAINERS[given.kind]}Trainer")
    plan = _plan(given, model)
    try:
        trainer = type(f"Elixir{base.__name__}", (ElixirMixin, base), {})(
            model=model,
            args=training,
            train_dataset=data[given.script.dataset_train_split],
            eval_dataset=data[given.script.dataset_test_split] if training.eval_strategy != "no" else None,
            processing_class=tokenizer,
            plan=plan,
            wrap={} if _is_whole(given) else {"weights": folder},
            muon=given.muon,
            callbacks=list(callbacks),
            **more,
        )
    except ValueError as error:  # with which TRL refuses settings, and data that they do not suit
        raise ConfigError(f"{given.kind}: TRL's {base.__name__} refuses: {error}") from error
    if "ref" in getattr(trainer.model, "peft_config", {}):  # TRL's copy of adapters that have not been trained
        trainer.model.delete_adapter("ref")
    failed: Exception | None = None
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except Exception as error:
        if not is_out_of_memory(error) or not hasattr(trainer.model, "_elixir"):
            raise
        failed = error.with_traceback(None)  # which holds the tensors of the step
    if failed is not None:
        short = _out_of_memory(given, trainer, lambda: _model(given, folder), mesh, failed)
        for callback in callbacks:
            if isinstance(callback, Records):
                callback.event("out of memory", str(short))
                callback.end("failed", str(short))
        raise short from failed
    if stopped_by(callbacks) is not None:
        return trainer
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=given.script.dataset_name)
    return trainer


class OutOfMemory(ElixirError):  # noqa: N818 (as torch's and Python's say it)
    """A step ran out of memory; `changes` are the arguments of a smaller one that fits, None if none does."""

    def __init__(self, text: str, changes: dict[str, object] | None) -> None:
        super().__init__(text)
        self.changes = changes


def _out_of_memory(
    given: Arguments, trainer: Any, build: Callable[[], nn.Module], mesh: DeviceMesh, error: Exception
) -> OutOfMemory:
    """The error of a step that ran out of memory, with the smaller step that fits. Not collective."""
    training, device, inspection = given.training, trainer.args.device, inspect(trainer.model)
    gc.collect()
    done, rank, first = trainer.state.global_step, dist.get_rank(), str(error).partition("\n")[0].rstrip(".")
    records = next((callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Records)), None)
    saved = None if records is None else records.checkpoint
    resumed: dict[str, object] = {} if saved is None else {"resume_from_checkpoint": saved}
    if not trainer.model.training:
        rows = training.per_device_eval_batch_size
        text = f"out of memory in the evaluation behind step {done} on rank {rank}: {first}"
        if rows == 1:
            return OutOfMemory(f"{text}. Give a smaller --max_length, or --eval_strategy no", None)
        return OutOfMemory(f"{text}. Try fewer rows", {"per_device_eval_batch_size": rows // 2, **resumed})
    step = Step(
        rows=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        length=_longest(given),
    )
    one_memory = device.type == "cpu"
    if one_memory:
        capacity = host_bytes_left() + process_bytes(device)["host"]
    else:
        capacity = total_bytes(device)
    budget = size_bytes("--plan_budget", given.plan.budget)

    model = build()
    if given.ep > 1:
        spread_experts(model, expert_mesh(mesh, given.ep))
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable(training.gradient_checkpointing_kwargs)  # type: ignore[operator]

    def profile(other: Step) -> Profile:
        return trace(
            model,
            _step_of(given, model),
            _sample(given, model, other),
            world=dist.get_world_size(),
            rank=dist.get_rank(),
            compute_dtype=torch.bfloat16 if training.bf16 else None,
            device=device,
        )

    def held(other: Step) -> int:
        planned = inspection.facts(other.accumulation)["planned_bytes"]
        return sum(sum(planned[tier].values()) for tier in ("device", *["host"] * one_memory))

    found = that_fits(step, profile, held, capacity if budget is None else min(budget, capacity))
    where = f"out of memory in step {done + 1} on rank {rank}"
    if found is None:
        return OutOfMemory(
            f"{where}: {first}. No smaller step fits with what the plan holds on the device: give --plan auto or "
            f"--plan offload, more GPUs, or adapters with --quantize nf4",
            None,
        )
    changes: dict[str, object] = {
        "per_device_train_batch_size": found.rows,
        "gradient_accumulation_steps": found.accumulation,
    }
    if found.length < step.length:
        changes["max_completion_length" if given.kind == "grpo" else "max_length"] = (
            found.length - (step.length - training.max_completion_length) if given.kind == "grpo" else found.length
        )
    words = "the same rows a step in smaller micro-batches" if found.length == step.length else "shorter rows"
    return OutOfMemory(f"{where}: {first}. {words.capitalize()} should fit", changes | resumed)


def _folder(name: str, revision: str) -> str:
    """The folder of a model: `name` itself, or where the hub's files are."""
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser().resolve())
    try:
        return str(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub's client has many types for what is missing or out of reach
        why = str(error).partition("\n")[0]
        raise ConfigError(f"--model_name_or_path {name}: there is no such folder, and the hub says: {why}") from error


def _data(given: Arguments) -> Any:
    """The splits by name. Raises ConfigError."""
    script, mixture = given.script, given.mixture
    if bool(mixture.datasets) == bool(script.dataset_name):
        raise ConfigError(
            f"{given.kind}: expected --dataset_name (a file, a folder or a name on the hub) or `datasets` in the file "
            f"of --config, got {'both' if mixture.datasets else 'neither'}"
        )
    kind = _DATA_FILES.get(Path(script.dataset_name or "").suffix)
    if kind and not Path(script.dataset_name).is_file():
        raise ConfigError(f"--dataset_name {script.dataset_name}: there is no such file")
    try:
        if mixture.datasets:
            found = trl.get_dataset(mixture)
        elif kind:
            found = datasets.load_dataset(kind, data_files=script.dataset_name, streaming=script.dataset_streaming)
        else:
            found = datasets.load_dataset(
                script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming
            )
    except Exception as error:  # `datasets` raises errors of many libraries
        why = str(error.__cause__ or error).partition("\n")[0] or f"empty, or no data set ({type(error).__name__})"
        raise ConfigError(f"--dataset_name {script.dataset_name}: {why}") from error
    wanted = [script.dataset_train_split, *[script.dataset_test_split] * (given.training.eval_strategy != "no")]
    for split in wanted:
        if split not in found:
            raise ConfigError(
                f"the data set has no split {split!r}, only {', '.join(found)}: choose with --dataset_train_split and "
                f"--dataset_test_split"
            )
        _refuse_columns(given, split, getattr(found[split], "column_names", None))
    return found


def _refuse_columns(given: Arguments, split: str, columns: Sequence[str] | None) -> None:
    """Raises ConfigError if the trainer can read none of a split's columns; a stream may not know its own."""
    readable = _COLUMNS[given.kind]
    if given.kind == "sft":
        readable = ((given.training.dataset_text_field,), *readable)
    if columns is None or any({*names} <= {*columns} for names in readable):
        return
    expected = " or ".join(" and ".join(names) for names in readable)
    change = "; --dataset_text_field names the column of text" if given.kind == "sft" else ""
    raise ConfigError(
        f"the data set's split {split!r} has the columns {', '.join(columns) or 'none'}, and {given.kind} reads "
        f"{expected}{change}"
    )


def _is_whole(given: Arguments) -> bool:
    """Whether each rank builds the model whole: a reward's head is drawn, and DoRA computes from the base."""
    return given.kind == "reward" or (given.model.use_peft and given.model.use_dora)


def _model(given: Arguments, folder: str) -> nn.Module:
    """The model of a folder, with its adapters and its frozen weights in few bytes; without memory where it can be."""
    words, training = given.model, given.training
    trust = {"trust_remote_code": training.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
    except Exception as error:  # transformers checks its settings with error types of its own
        why = reason_of(error, folder, _TRUST)
        raise ConfigError(f"--model_name_or_path {words.model_name_or_path}: {why}") from error
    dtype = config.dtype or torch.float32 if words.dtype == "auto" else getattr(torch, words.dtype or "float32")
    chosen: dict[str, Any] = {"dtype": dtype, **trust}
    if words.attn_implementation is not None:
        chosen["attn_implementation"] = words.attn_implementation
    transformers.set_seed(training.seed)
    with nullcontext() if _is_whole(given) else sharded_init():
        try:
            if given.kind == "reward":
                model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **chosen)
            elif _is_whole(given):
                model = AutoModelForCausalLM.from_pretrained(folder, **chosen)
            else:
                model = AutoModelForCausalLM.from_config(config, **chosen)
                transformers.set_seed(training.seed)  # adapters are drawn as by TRL, which draws no weight before them
        except ValueError as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"--model_name_or_path {words.model_name_or_path}: {why}") from error
        # Adapters name their base, by which others find it. TRL reads a reference model from there, in this revision.
        named = words.use_peft and not Path(words.model_name_or_path).is_dir()
        model.name_or_path = model.config._name_or_path = words.model_name_or_path if named else folder
        adapters: Any = trl.get_peft_config(words)
        if adapters is not None:
            model.requires_grad_(False)
            if given.scheme is not None:
                quantize(model, given.scheme, **shipped_patterns(Path(folder, "config.json"), given.scheme, model))
                _refuse_trained_bytes(model, words.lora_modules_to_save or ())
            if given.kind == "sft" and not (adapters.target_modules or adapters.target_parameters):
                targets = default_targets(model)
                adapters.target_modules = set(targets) if len(targets) > 1 else targets[0]
            model = _adapted(model, adapters)
        if given.tile is not None:
            tile_for(model, given.tile, 2 if training.bf16 or training.fp16 else dtype.itemsize)
            if given.kind != "reward" and not hasattr(model.get_output_embeddings(), "weight"):  # type: ignore[operator]
                raise ConfigError(
                    f"--tile {given.tile} bytes cuts the head of {words.model_name_or_path}, which TRL's loss reads "
                    "whole: give at least the bytes of its weight, or train with em.tile in a script"
                )
        return model


def _adapted(model: nn.Module, config: Any) -> nn.Module:
    """The model with peft's adapters. Raises ConfigError."""
    import peft

    targets = {config.target_modules} if isinstance(config.target_modules, str) else config.target_modules
    config.exclude_modules = excluded_modules(model, targets or ())
    if targets is not None and EXPERTS in targets:
        if not fused_experts(model):
            raise ConfigError(f"--lora_target_modules {EXPERTS}: {type(model).__name__} has no fused experts")
        modules, config.target_parameters = peft_targets(model, targets, config.target_parameters or ())
        config.target_modules = modules if isinstance(modules, str) else set(modules)
    elif targets is not None and len(targets) == 1 and targets != {ALL_LINEAR} and all(map(_is_name, targets)):
        config.target_modules = targets  # TRL makes a string of a single name, which would be a pattern for whole names
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"peft refuses these adapters: {error}") from error
    refuse_routers(adapted)
    _LOG.debug("adapters on %s", ", ".join(f"{n} {kind}" for kind, n in adapted_modules(adapted).items()))
    run_adapters_unmerged(adapted)
    return adapted


def _refuse_trained_bytes(model: nn.Module, trained: Sequence[str]) -> None:
    """Raises ConfigError if modules that are trained whole have weights in few bytes."""
    for name, *_ in packed_parameters(model):
        for module in trained:
            if f".{module}." in f".{name}":
                raise ConfigError(
                    f"--lora_modules_to_save {module} with --quantize: {name!r} is bytes, which have no gradient; give "
                    f"it adapters (--lora_target_modules), or leave one of them out"
                )


def _is_name(target: str) -> bool:
    return re.fullmatch(r"[\w.]*\w", target) is not None


def _plan(given: Arguments, model: nn.Module) -> Plan | AutoPlan:
    """The plan; one that is searched traces a batch of the longest rows."""
    training = given.training
    accumulation = training.gradient_accumulation_steps
    step = Step(rows=training.per_device_train_batch_size, accumulation=accumulation, length=_longest(given))
    return given.plan.plan(_step_of(given, model), _sample(given, model, step), accumulation)


def _longest(given: Arguments) -> int:
    """Tokens of the longest row that a command may train on."""
    training = given.training
    if given.kind == "grpo":
        return int(training.max_completion_length + (getattr(training, "max_prompt_length", None) or 512))
    return getattr(training, "max_length", None) or 1024


def _sample(given: Arguments, model: nn.Module, step: Step) -> torch.Tensor:
    """A batch of the longest rows."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    most = getattr(config, "max_position_embeddings", None) or step.length
    rows = step.rows * (2 if given.kind in _PAIRS else 1)
    return torch.zeros(rows, min(step.length, most), dtype=torch.long)


def _step_of(given: Arguments, model: nn.Module) -> Callable[[nn.Module, Any], Any]:
    """The forward of a training step, as far as memory and order go."""
    if given.kind == "reward":
        return lambda module, tokens: module(input_ids=tokens).logits.float().mean()
    if given.kind != "sft" or causal_loss_of(model) != "fused":
        return causal_loss
    recompute = given.plan.may_pass_together(given.training.gradient_accumulation_steps)
    return partial(causal_loss_without_logits, recompute=recompute)


def _rewards(script: Any) -> list[Any]:
    """The reward functions of `grpo`: models by name, functions by their import path."""
    from trl import rewards

    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or ():
        module, _, function = name.rpartition(".")
        if not module:
            where: Any = rewards
        else:
            sys.path.insert(0, str(Path.cwd()))
            try:
                where = importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(f"--reward_funcs {name}: {error}") from error
        if not hasattr(where, function):
            raise ConfigError(f"--reward_funcs {name}: {where.__name__} has no {function}")
        reward = getattr(where, function)
        found.append(reward(**_OVERLONG) if name == "get_soft_overlong_punishment" else reward)
    if not found:
        raise ConfigError("grpo needs --reward_funcs or --reward_model_name_or_path")
    return found
