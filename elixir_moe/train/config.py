"""The settings of a training run: their meaning, their units, and which values fit together.

Owns the sections and their checks, also those against the number of ranks. Reads no file itself (`settings` does) and
starts nothing: mistakes are found here before there is a process group. What needs torch is imported where settings are
used, so that the help needs none.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from elixir_moe import settings
from elixir_moe.errors import ConfigError, PlanError
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.lora import Lora
from elixir_moe.names import DTYPES, Master, Moments, SchemeName, short_dtype
from elixir_moe.records import ABOVE_0, Check, Respelled, at_least, called, check
from elixir_moe.train.writers import check_tensorboard
from elixir_moe.watch.supervisor import WatchConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from elixir_moe.chunks.plan import AutoPlan, Plan
    from elixir_moe.train.data import Data
    from elixir_moe.train.recipe import Recipe

_MEANINGFUL: dict[str, tuple[str, ...]] = {
    "ddp": ("reduce_dtype", "master", "moments"),
    "zero2": ("chunk_numel", "reduce_dtype", "host_checkpoints", "master", "moments"),
    "zero3": ("rcache", "rcache_blocks", "chunk_numel", "reduce_dtype", "host_checkpoints", "master", "moments"),
    "offload": (
        *("device", "host", "disk", "values_on_disk", "verify", "shared_frozen", "rcache"),
        *("rcache_blocks", "device_chunks", "disk_chunks", "chunk_numel", "reduce_dtype", "host_checkpoints"),
        *("master", "moments"),
    ),
    "auto": ("hardware", "budget", "disk", "verify", "reduce_dtype", "master", "moments"),
}
"""By kind of plan: the settings it takes, which are the arguments of the `Plan` preset of that name."""
_SIZES = ("rcache", "device", "host", "budget")
_LEAST_BYTES = 1000
"""Bytes below which nobody means a size: the unit is missing."""
_FINITE = Check("a finite number, 0 or more", lambda value: 0 <= value < math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A causal language model in a local folder, as Hugging Face keeps them."""

    hf: Annotated[
        str,
        Check("a folder", str.strip),
        called("base_model", "model_name", "model_name_or_path", but="a local folder"),
    ]
    """Local folder of a Hugging Face model: config.json, weights in safetensors, tokenizer."""
    weights: bool = True
    """Read the folder's weights; false: draw them, to train from the beginning."""
    attention: Annotated[str | None, called("attn_implementation")] = None
    """Implementation of attention by transformers' names: eager, sdpa, flash_attention_2 ...; null: its own choice."""
    checkpoint: Annotated[
        Literal["none", "non_reentrant"], called("gradient_checkpointing", but="non_reentrant, or none")
    ] = "none"
    """Activation checkpointing of each layer."""
    ep: Annotated[
        int, at_least(1), called("expert_model_parallel_size", "expert_parallel_degree", "expert_parallel_size")
    ] = 1
    """Ranks that share the fused experts of each mixture layer (expert parallelism)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleModel:
    """Any torch module."""

    module: Annotated[str, Check("package:function", str.strip)]
    """package:function, a function without arguments that returns a torch module, or (module, loss)."""


def at_home(section: object, *names: str) -> None:
    """Writes the home directory for a ``~`` at the beginning of these paths."""
    for name in names:
        given = getattr(section, name)
        paths = (
            tuple(map(os.path.expanduser, given)) if isinstance(given, tuple) else given and os.path.expanduser(given)
        )
        object.__setattr__(section, name, paths)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is trained on: rows of JSONL, or a running text."""

    file: Annotated[
        str | None,
        called("data_path", "dataset", "dataset_name", "dataset_path", "train_file", but="a local JSONL file"),
    ] = None
    """JSONL file, or glob pattern of several, with messages, prompt and completion, or text in each line; null: a
    running text, as paths say."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns of a running text, joined in order; if empty, the English text of Python's own help."""
    tokenizer: Annotated[str | None, called("tokenizer_name")] = None
    """Folder of a tokenizer; null: the model's own, or else one token a byte. A chat template that prints the date
    prints that of January 1, 2026, so that rows stay the same."""
    seq_len: Annotated[
        int | None,
        at_least(2),
        called("block_size", "cutoff_len", "max_length", "max_seq_len", "max_seq_length", "sequence_len"),
    ] = None
    """Tokens of a row; null: model.seq_len of our GPT and one more, 128 of a module, and of a Hugging Face model 1024,
    or the positions it has."""
    packing: bool | None = None
    """Put several texts of the file into a row, whose positions restart; null: where the model tells them apart."""
    completion_only: Annotated[bool, called("assistant_only_loss", "completion_only_loss")] = True
    """Loss on completions and the assistant's messages alone; false: on all tokens."""
    validation: Annotated[
        float,
        Check("a share between 0 and 1", lambda share: 0 < share < 1),
        called("test_size", "val_set_size", but="a share between 0 and 1"),
    ] = 0.1
    """Fraction of the text or of the lines, from the end, kept for validation."""

    def __post_init__(self) -> None:
        check(self, "data")
        at_home(self, "file", "paths", "tokenizer")
        if self.file is None:
            for name in ("packing", "completion_only"):
                if getattr(self, name) not in (None, True):
                    raise ConfigError(f"data.{name} is for the rows of data.file: leave it out, or give data.file")
        elif self.paths:
            raise ConfigError("data.file and data.paths are two kinds of data: give one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Where weights and optimizer state are stored, and how much memory gathered weights may use.

    Sizes are per rank, in bytes or as texts such as "20 GiB".
    """

    kind: Annotated[
        Literal["ddp", "zero2", "zero3", "offload", "auto"],
        called(
            *("cpu_offload", "deepspeed", "fsdp", "offload_optimizer", "offload_param", "zero_stage"),
            but="ddp, zero2, zero3, offload, or auto, which searches",
        ),
    ] = "zero2"
    """ddp: every rank stores everything; zero2: weights and optimizer state sharded, weights gathered once a step;
    zero3: weights gathered when used; offload: like zero3, with state in host memory; auto: search for the fastest plan
    that fits."""
    rcache: int | str | None = None
    """Device memory for gathered chunks (zero3, offload); null: the least a step needs, plus room to gather ahead."""
    rcache_blocks: int | Literal["all"] | None = None
    """Number of blocks for gathered chunks, or all; instead of rcache."""
    device: int | str | None = None
    """Device memory for state that stays on the device (offload); null: none stays."""
    device_chunks: int | None = None
    """Number of chunks whose state stays on the device, instead of device."""
    host: int | str | None = None
    """Host memory for state (offload); the rest goes to disk. Null: all state, or with disk as much as fits in free
    host memory."""
    disk: str | None = None
    """Folder for state on disk (offload, auto); null: use no disk."""
    disk_chunks: int | None = None
    """Number of chunks whose master weights and moments are on disk, instead of host."""
    values_on_disk: bool | None = None
    """Chunks on disk keep nothing in host memory: their 16-bit weights and sums of gradients are on disk too (offload);
    null: false."""
    verify: bool | None = None
    """Compare checksums of everything read from disk; null: false."""
    shared_frozen: bool | None = None
    """Keep frozen weights once for all ranks of a host, gathered without a collective (offload); null: false."""
    chunk_numel: int | None = None
    """Elements of a chunk (zero2, zero3, offload); null: the smallest length that wastes little memory."""
    hardware: str | None = None
    """Machine to plan for (auto): the name of one that ships with the package, or a file; null: measure this one."""
    budget: int | str | None = None
    """Device memory of a rank, activations included (auto); null: all free memory."""
    reduce_dtype: Annotated[str | None, Respelled(lambda name: DTYPES.get(name, name))] = None
    """Dtype in which gradients are summed over the ranks: float32, or the 16-bit dtype of the weights, which halves the
    bytes on the wire over NCCL and rounds with every rank that adds; null: float32."""

    host_checkpoints: int | Literal["all"] | None = None
    """Number of layers, the first ones, whose inputs go to host memory where model.checkpoint recomputes them (zero2,
    zero3, offload), or all; null: none."""
    master: Annotated[Master | None, Respelled(short_dtype)] = None
    """Master weights of the layers' matrices: fp32, or bf16, rounded stochastically; null: fp32."""
    moments: Annotated[Moments | None, Respelled(short_dtype)] = None
    """Moments of the layers' matrices: fp32, bf16 or int8 (codes of 8 bits); null: fp32."""

    def __post_init__(self) -> None:
        from elixir_moe.chunks.plan import size_bytes

        for name in {name for names in _MEANINGFUL.values() for name in names}:
            if getattr(self, name) is not None and name not in _MEANINGFUL[self.kind]:
                meant = f"plan.{name} means nothing for plan.kind={self.kind}"
                raise ConfigError(f"{meant}: remove it, or choose another kind")
        if self.disk_chunks and self.disk is None:
            raise ConfigError(f"plan.disk_chunks={self.disk_chunks} needs a folder: give plan.disk")
        try:
            for name in _SIZES:
                size_bytes(name, getattr(self, name), least=_LEAST_BYTES)
            self.plan(_no_step, (), 1)
        except (ConfigError, PlanError) as error:
            raise ConfigError(f"plan: {error}") from None

    def plan(self, step: "Callable[[nn.Module, Any], Any]", sample: Any, accumulation: int) -> "Plan | AutoPlan":
        """The plan; for kind "auto", the request to search one for `accumulation` runs of ``step(model, sample)``."""
        from elixir_moe.chunks.plan import Plan

        given = {name: value for name in _MEANINGFUL[self.kind] if (value := getattr(self, name)) is not None}
        if self.kind == "auto":
            return Plan.auto(step, sample, accumulation=accumulation, **given)
        preset: Callable[..., Plan] = getattr(Plan, self.kind)
        return preset(**given)

    @property
    def precision(self) -> dict[str, Any]:
        """The arguments of a `Plan` preset that say in which precision state is kept, where they are given."""
        return {name: value for name in ("master", "moments") if (value := getattr(self, name)) is not None}


def _no_step(model: "nn.Module", sample: Any) -> None:
    raise AssertionError("a step that is never run")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay of the learning rate."""

    lr: Annotated[float, ABOVE_0, called("learning_rate")] = 1e-3
    """Peak learning rate."""
    betas: Annotated[
        tuple[float, float],
        Check("a number from 0 to below 1", lambda beta: 0 <= beta < 1),
        called("adam_beta1", "adam_beta2", "beta1", "beta2", but="both, as 0.9,0.95"),
    ] = (0.9, 0.95)
    """Decay rates of the two moments, per step."""
    eps: Annotated[float, ABOVE_0, called("adam_eps", "adam_epsilon")] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, _FINITE] = 0.1
    """Decoupled weight decay, for parameters with two or more dims only."""
    warmup_steps: Annotated[int, at_least(0), called("warmup_ratio", but="a number of steps")] = 50
    """Steps of linear warm-up to the peak learning rate."""
    final_lr: Annotated[
        float,
        Check("a share of lr between 0 and 1", lambda share: 0 <= share <= 1),
        called("lr_scheduler", "lr_scheduler_type", "min_lr", but="the share of the rate at which a cosine ends"),
    ] = 0.1
    """Learning rate of the last step, as a fraction of lr."""
    clip_norm: Annotated[
        float | None,
        ABOVE_0,
        called("clip_grad", "grad_clip", "gradient_clip_val", "gradient_clipping", "max_grad_norm"),
    ] = 1.0
    """Bound on the global gradient norm; null: no clipping. Updates then begin in backward with watch.on_nan=back and
    watch.memory_tries=0, from the first checkpoint on."""

    def __post_init__(self) -> None:
        check(self, "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Length of the run, batch size, dtype, evaluation and output."""

    out: Annotated[str, Check("a directory", str.strip), called("checkpoint_dir", "out_dir", "output_dir", "save_dir")]
    """Directory for everything the run writes; created if missing, refused if it holds anything other than this run.
    With model.hf, by default runs/ and the folder's name."""
    overwrite: Annotated[bool, called("overwrite_output_dir")] = False
    """Replace a run in out, finished or not. A run restarted by its launcher continues all the same."""
    resume: Annotated[str, called("resume_from_checkpoint")] = "auto"
    """auto: continue the run in out, if any, from its latest checkpoint; fall_back: from the latest undamaged
    checkpoint; never: refuse a used out; otherwise: the path of a checkpoint to start from."""
    timeout_seconds: Annotated[float, at_least(1, "second"), _FINITE, called("ddp_timeout", "timeout")] = 600.0
    """Seconds a rank waits for the others before all ranks end with an error."""
    steps: Annotated[
        int,
        at_least(1),
        called("iterations", "max_steps", "num_steps", "total_steps", "train_iters", "train_steps"),
        called("epochs", "num_epochs", "num_train_epochs", but="an epoch is rows / run.global_batch steps"),
    ] = 100
    """Optimizer steps."""
    global_batch: Annotated[
        int,
        at_least(1),
        called("global_batch_size", "train_batch_size"),
        called(
            *("batch_size", "micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
            but="the samples of all ranks and micro-batches of a step together",
        ),
    ] = 32
    """Samples per step, over all ranks and micro-batches; a sample is a row of tokens."""
    accumulation: Annotated[
        int,
        at_least(1),
        called("gradient_accumulation_steps", but="micro-batches into which the run.global_batch of a step is split"),
    ] = 1
    """Micro-batches that each rank runs per optimizer step."""
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Respelled(short_dtype),
        called("bf16", "fp16", "mixed_precision", "precision", "torch_dtype", but="fp32, bf16 or fp16"),
    ] = "fp32"
    """Dtype of forward and backward; plan.master and plan.moments say in which master weights and moments are kept."""
    loss: Literal["whole", "fused"] = "whole"
    """whole: the cross-entropy of all logits; fused: the same without logits, by em.linear_cross_entropy."""
    seed: Annotated[int, Check("0 or more, below 2**62", lambda seed: 0 <= seed < 2**62), called("data_seed")] = 0
    """Seed of weights, samples, dropout and the text sample."""
    eval_every: Annotated[int, at_least(1), called("eval_interval", "eval_steps")] = 100
    """Steps between evaluations; the last step is always evaluated."""
    eval_batches: Annotated[int, at_least(1)] = 8
    """Batches per evaluation, each as large as a micro-batch of all ranks; fewer if the validation text is shorter."""
    log_every: Annotated[int, at_least(1), called("log_interval", "logging_steps")] = 10
    """Steps between log lines if the output is not a terminal."""
    sample_bytes: Annotated[int | None, at_least(0)] = None
    """Tokens (bytes, without a tokenizer) that the trained model writes at the end; null: 300 of our GPT, none of other
    models."""
    temperature: Annotated[float, _FINITE] = 0.8
    """Sampling temperature of this text; 0 always takes the most likely token."""
    tp: Annotated[
        int, at_least(1), called("tensor_model_parallel_size", "tensor_parallel_degree", "tensor_parallel_size")
    ] = 1
    """Tensor-parallel degree: neighboring ranks that share the samples of a micro-batch, and cut attention heads and
    dense MLPs among them. Divides the ranks and model.n_heads."""
    threads: Annotated[int, at_least(1)] = 1
    """CPU threads per rank."""
    profile: Annotated[int | None, at_least(1)] = None
    """Number of a step that torch.profiler records on rank 0, with all that follows it, such as an evaluation;
    `elixir-moe report --html` draws it. Updates on a thread that end behind the step are not in it. Null: none."""
    activations: bool = False
    """Record how the outputs of layers and their parts are distributed, at each evaluation, on rank 0;
    `elixir-moe report --activations` prints it."""

    tensorboard: Annotated[bool, called("report_to", but="true, or leave it out")] = False
    """Write the numbers of each step to OUT/tensorboard, for TensorBoard; needs the package tensorboard."""

    def __post_init__(self) -> None:
        check(self, "run")
        at_home(self, "out", "resume")

    @property
    def compute_dtype(self) -> "torch.dtype | None":
        """The dtype of forward and backward; None: that of the weights."""
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return None if self.dtype == "fp32" else found


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """Checkpoints of the whole training state, in OUT/checkpoints."""

    every: Annotated[int | None, at_least(1, "step"), called("save_interval", "save_steps")] = 100
    """Steps between checkpoints; the last step is always saved. Null: no regular checkpoints."""
    keep: Annotated[int, at_least(1), called("save_total_limit")] = 2
    """Number of checkpoints to keep."""
    asynchronous: bool = True
    """Continue training while a checkpoint is written."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction to a checkpoint that cannot be written, for example on a full disk; for the last one, always stop."""

    def __post_init__(self) -> None:
        check(self, "save")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainWatchConfig(WatchConfig):
    """Supervision of the run: faults to detect, and how to react."""

    memory_tries: Annotated[int, at_least(0)] = 6
    """Number of times a step that ran out of memory is redone with less before the run ends: first with a smaller
    rCache, then with smaller micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a training run."""

    model: GPTConfig | HuggingFaceModel | ModuleModel
    lora: Lora | None = None
    quantize: Annotated[
        SchemeName | None, called("bits", "load_in_4bit", "load_in_8bit", but="nf4, mxfp4, fp8 or int8")
    ] = None
    """Scheme in which frozen weights become bytes (with lora); null: they stay as they are."""
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    watch: TrainWatchConfig = field(default_factory=TrainWatchConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        if isinstance(self.model, GPTConfig):
            if self.lora is not None or self.quantize is not None:
                named = "lora" if self.lora is not None else "quantize"
                raise ConfigError(
                    f"{named} is for model.hf and model.module, and our own GPT is trained in full: leave it out"
                )
            if self.data.seq_len is not None:
                raise ConfigError(
                    "data.seq_len: our own GPT takes the length of its rows from model.seq_len: give that instead"
                )
            if self.data.packing:
                raise ConfigError("data.packing: our own GPT has one text in a row; leave it out")
        elif self.quantize is not None and self.lora is None:
            raise ConfigError(
                f"quantize={self.quantize} leaves nothing to train, since it freezes what it packs: add adapters "
                f"with lora.r, or leave it out"
            )
        if isinstance(self.model, ModuleModel) and self.run.loss != "whole":
            raise ConfigError(
                "run.loss is for model.hf and our own GPT: model.module brings its loss with it; leave run.loss out"
            )

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch of all ranks."""
        return self.run.global_batch // self.run.accumulation

    def recipe(self) -> "Recipe":
        """The model as the training knows it. Raises ConfigError if its folder or function cannot be used."""
        from elixir_moe.train.huggingface import HuggingFaceRecipe
        from elixir_moe.train.module import ModuleRecipe
        from elixir_moe.train.recipe import GPTRecipe

        model, data = self.model, self.data
        if isinstance(model, GPTConfig):
            return GPTRecipe(model, fused=self.run.loss == "fused")
        if isinstance(model, ModuleModel):
            made = ModuleRecipe(
                model.module, lora=self.lora, scheme=self.quantize, length=data.seq_len, packed=data.packing
            )
            if self.run.sample_bytes and made.compares == "losses":
                raise ConfigError(
                    f"run.sample_bytes: {model.module} has a loss of its own, so nothing is known of the tokens it "
                    f"predicts; leave it out"
                )
            return made
        return HuggingFaceRecipe(
            model.hf,
            read=model.weights,
            attention=model.attention,
            recompute=model.checkpoint != "none",
            ep=model.ep,
            lora=self.lora,
            scheme=self.quantize,
            length=data.seq_len,
            packed=data.packing,
            fused=self.run.loss == "fused",
        )

    def check_ranks(self, ranks: int) -> None:
        """Raises LayoutError or ConfigError if these settings do not fit that many ranks, or a package is missing."""
        from elixir_moe.train.recipe import check_degree

        tp = self.run.tp
        check_degree("run.tp", tp, ranks, f"the {ranks} ranks of this run")
        self.recipe().check(ranks, tp)
        if self.run.tensorboard:
            check_tensorboard()
        replicas = ranks // tp
        by_tp = f" / run.tp={tp}" * (tp > 1)
        unit = replicas * self.run.accumulation
        if self.run.global_batch % unit:
            raise ConfigError(
                f"run.global_batch={self.run.global_batch} is not a multiple of {ranks} ranks{by_tp} x "
                f"run.accumulation={self.run.accumulation}: choose a multiple of {unit}"
            )

    def load_data(self) -> "Data":
        """What is trained on. Raises ConfigError if it cannot be read, or does not fit the model."""
        from elixir_moe.train.data import load_text
        from elixir_moe.train.huggingface import encoded, tokenizer_of
        from elixir_moe.train.rows import load_rows

        recipe, data = self.recipe(), self.data
        folder = recipe.tokenizer if data.tokenizer is None else data.tokenizer
        if data.file is not None and folder is None:
            raise ConfigError(
                "data.file needs a tokenizer, and this model has none: name a folder with one by data.tokenizer"
            )
        tokenizer = None if folder is None else tokenizer_of(folder)
        if data.file is not None:
            found: Data = load_rows(
                data.file,
                tokenizer,
                recipe.length,
                data.validation,
                packed=recipe.restarts,
                completion_only=data.completion_only,
            )
        elif tokenizer is None:
            found = load_text(data.paths, data.validation, recipe.length - 1)
        else:
            encode = partial(encoded, tokenizer)
            found = load_text(data.paths, data.validation, recipe.length - 1, encode, tokenizer.decode)
        if recipe.vocabulary is not None and found.most >= recipe.vocabulary:
            of = "a byte" if folder is None else f"the tokenizer in {folder!r}"
            raise ConfigError(
                f"model.vocab_size: {recipe.name} has {recipe.vocabulary} tokens, but the data has token {found.most} "
                f"of {of}: give a larger vocabulary, or the model's own tokenizer"
            )
        return found


def identity(config: TrainConfig, data: "Data") -> dict[str, object]:
    """{dotted key: value} of the settings that a run cannot change when it resumes: those of model and optimizer, seed,
    batch size, and a hash of what is trained on (``data.text``)."""
    free = ("model.ep", "model.checkpoint", "model.hf", "model.attention")
    plain = yaml.safe_load(settings.to_yaml(config))
    sections = {name: plain[name] for name in ("model", "lora", "optimizer") if plain[name] is not None}
    sections["data"] = {"validation": plain["data"]["validation"]}
    sections["run"] = {key: plain["run"][key] for key in ("seed", "global_batch")}
    fixed = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    recipe = config.recipe()
    fixed |= {"lora": config.lora is not None, "quantize": config.quantize, **recipe.fixed()}
    if config.data.file is None and not isinstance(config.model, GPTConfig):  # rows and our GPT say it otherwise
        fixed["data.seq_len"] = recipe.length
    return {key: value for key, value in fixed.items() if key not in free} | {"data.text": data.digest()}


def load(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings in a YAML file, overridden by (dotted key, text) pairs. Raises ConfigError.

    A model of Hugging Face that is given no ``run.out`` is trained in ``runs/`` and its folder's name.
    """
    values = settings.read_yaml(path) if path is not None else {}
    given = dict(overrides)
    run, model = values.get("run") or {}, values.get("model") or {}
    if isinstance(run, dict) and isinstance(model, dict) and "run.out" not in given and "out" not in run:
        folder = given.get("model.hf", model.get("hf"))
        if isinstance(folder, str) and folder.strip():
            overrides = [*overrides, ("run.out", f"runs/{Path(folder).expanduser().resolve().name}")]
    return settings.build(TrainConfig, values, overrides)
