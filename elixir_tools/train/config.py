"""The settings of a training run: their meaning, their units, and which values fit together.

Owns the sections and their checks, also those against the number of ranks. Reads no file itself (`settings` does) and
starts nothing: mistakes are found here before there is a process group. What needs torch is imported where settings are
used, so that the help needs none.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml

from elixir_moe.errors import ConfigError, LayoutError, PlanError
from elixir_moe.ext.options import options
from elixir_moe.ext.records import ABOVE_0, Check, Respelled, at_least, check
from elixir_tools import settings
from elixir_tools.models.config import GPTConfig
from elixir_tools.names import COSINE, DTYPES, short_dtype
from elixir_tools.watch.control import Control
from elixir_tools.watch.supervisor import WatchConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from elixir_moe.ext.plans import AutoPlan, Plan
    from elixir_tools.train.data import Text

_SPELLED = {
    "reduce_dtype": Respelled(lambda name: DTYPES.get(name, name)),
    "master": Respelled(short_dtype),
    "moments": Respelled(short_dtype),
}
"""Options of a plan that are dtypes, under any of their names."""
_LEAST_BYTES = 1000
"""Bytes below which nobody means a size: the unit is missing."""
_FINAL_LR = 0.1
BYTES = 256
"""Distinct tokens of the text."""
_FREE = ("model.ep", "model.checkpoint")
"""Settings of the model that a resumed run may change."""
_FINITE = Check("a finite number, 0 or more", lambda value: 0 <= value < math.inf)


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
    """The running text that is trained on; each byte is a token."""

    paths: tuple[str, ...] = ()
    """Files or glob patterns, joined in order; if empty, the English text of Python's own help."""
    validation: Annotated[float, Check("a share between 0 and 1", lambda share: 0 < share < 1)] = 0.1
    """Fraction of the text, from the end, kept for validation."""

    def __post_init__(self) -> None:
        check(self, "data")
        at_home(self, "paths")


def _with_options(cls: type) -> type:
    """Adds a field to a class of settings for each option of a plan; None leaves it to the preset."""
    for option in options().values():
        kind, where = option.type, ", ".join(option.presets)
        spelled = _SPELLED.get(option.name)
        cls.__annotations__[option.name] = kind if spelled is None else Annotated[kind, spelled]
        setattr(cls, option.name, field(default=None, metadata={"help": f"{option.meaning} For {where}."}))
    return cls


@dataclass(frozen=True, kw_only=True, slots=True)
@_with_options
class PlanConfig:
    """Where weights and optimizer state are stored, and how much memory gathered weights may use.

    Sizes are per rank, in bytes or as texts such as "20 GiB". Each argument of a preset of `Plan` is a setting.
    """

    kind: Literal["ddp", "zero2", "zero3", "offload", "auto"] = "zero2"
    """ddp: every rank stores everything; zero2: weights and optimizer state sharded, weights gathered once a step;
    zero3: weights gathered when used; offload: like zero3, with state in host memory; auto: search for the fastest plan
    that fits."""

    if TYPE_CHECKING:

        def __getattr__(self, option: str) -> Any: ...

    def __post_init__(self) -> None:
        from elixir_moe.ext.plans import size_bytes

        for name, option in options().items():
            if getattr(self, name) is not None and self.kind not in option.presets:
                meant = f"plan.{name} has no effect for plan.kind={self.kind}"
                raise ConfigError(f"{meant}: remove it, or choose another kind")
        if self.disk_chunks and self.disk is None:
            raise ConfigError(f"plan.disk_chunks={self.disk_chunks} needs a folder: give plan.disk")
        try:
            for name, option in options().items():
                if option.is_size:
                    size_bytes(name, getattr(self, name), least=_LEAST_BYTES)
            self.plan(_no_step, (), 1)
        except (ConfigError, PlanError) as error:
            raise ConfigError(f"plan: {error}") from None

    def plan(self, step: "Callable[[nn.Module, Any], Any]", sample: Any, accumulation: int) -> "Plan | AutoPlan":
        """The plan; for kind "auto", the request to search one for `accumulation` runs of ``step(model, sample)``."""
        from elixir_moe.ext.plans import Plan

        given = {name: value for name in options() if (value := getattr(self, name)) is not None}
        if self.kind == "auto":
            return Plan.auto(step, sample, accumulation=accumulation, **{"batches_per_pass": None, **given})
        preset: Callable[..., Plan] = getattr(Plan, self.kind)
        return preset(**given)

    def may_pass_together(self, accumulation: int) -> bool:
        """Whether several of a step's micro-batches may pass each layer together under the plan."""
        return min(self.batches_per_pass or (accumulation if self.kind == "auto" else 1), accumulation) > 1


def _no_step(model: "nn.Module", sample: Any) -> None:
    raise AssertionError("a step that is never run")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up of the learning rate, then a schedule."""

    lr: Annotated[float, ABOVE_0] = 1e-3
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Check("a number from 0 to below 1", lambda beta: 0 <= beta < 1)] = (0.9, 0.95)
    """Decay rates of the two moments, per step."""
    eps: Annotated[float, ABOVE_0] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, _FINITE] = 0.1
    """Decoupled weight decay, for parameters with two or more dims only."""
    warmup_steps: Annotated[int, at_least(0)] = 50
    """Steps of linear warm-up to the peak learning rate."""
    final_lr: Annotated[float, Check("a share of lr between 0 and 1", lambda share: 0 <= share <= 1)] = _FINAL_LR
    """Learning rate of the last step, as a fraction of lr; with schedule=cosine."""
    schedule: str = COSINE
    """Learning rate after the warm-up. cosine: decay to final_lr at the last step; otherwise a scheduler of torch, or
    the path of a class, with named arguments, such as "StepLR(step_size=30, gamma=0.1)". It is stepped once a step, and
    lr is its initial rate."""
    clip_norm: Annotated[float | None, ABOVE_0] = 1.0
    """Bound on the global gradient norm; null: no clipping. Updates then begin in backward with watch.on_nan=back and
    watch.memory_tries=0, from the first checkpoint on."""

    def __post_init__(self) -> None:
        check(self, "optimizer")
        if self.schedule != COSINE and self.final_lr != _FINAL_LR:
            raise ConfigError(
                f"optimizer.final_lr={self.final_lr:g} has no effect with optimizer.schedule={self.schedule!r}: "
                "remove one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Length of the run, batch size, dtype, evaluation and output."""

    out: Annotated[str, Check("a directory", str.strip)]
    """Directory for everything the run writes; created if missing, refused if it holds anything other than this run."""
    overwrite: bool = False
    """Replace a run in out, finished or not. A run restarted by its launcher continues all the same."""
    resume: str = "auto"
    """auto: continue the run in out, if any, from its latest checkpoint; fall_back: from the latest undamaged
    checkpoint; never: refuse a used out; otherwise: the path of a checkpoint to start from."""
    timeout_seconds: Annotated[float, at_least(1, "second"), _FINITE] = 600.0
    """Seconds a rank waits for the others before all ranks end with an error."""
    steps: Annotated[int, at_least(1)] = 100
    """Optimizer steps."""
    global_batch: Annotated[int, at_least(1)] = 32
    """Samples per step, over all ranks and micro-batches; a sample is a row of tokens."""
    accumulation: Annotated[int, at_least(1)] = 1
    """Micro-batches that each rank runs per optimizer step."""
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], Respelled(short_dtype)] = "fp32"
    """Dtype of forward and backward; plan.master and plan.moments say in which master weights and moments are kept."""
    loss: Literal["whole", "fused"] = "whole"
    """whole: the cross-entropy of all logits; fused: the same without logits, by em.linear_cross_entropy."""
    seed: Annotated[int, Check("0 or more, below 2**62", lambda seed: 0 <= seed < 2**62)] = 0
    """Seed of weights, samples, dropout and the text sample."""
    eval_every: Annotated[int, at_least(1)] = 100
    """Steps between evaluations; the last step is always evaluated."""
    eval_batches: Annotated[int, at_least(1)] = 8
    """Batches per evaluation, each as large as a micro-batch of all ranks; fewer if the validation text is shorter."""
    log_every: Annotated[int, at_least(1)] = 10
    """Steps between log lines if the output is not a terminal."""
    sample_bytes: Annotated[int, at_least(0)] = 300
    """Bytes of text that the trained model writes at the end."""
    temperature: Annotated[float, _FINITE] = 0.8
    """Sampling temperature of this text; 0 always takes the most likely token."""
    tp: Annotated[int, at_least(1)] = 1
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

    every: Annotated[int | None, at_least(1, "step")] = 100
    """Steps between checkpoints; the last step is always saved. Null: no regular checkpoints."""
    keep: Annotated[int, at_least(1)] = 2
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
class TrainControl(Control):
    """The settings in `control.yaml` that a training run follows."""

    schedule: str | None = None
    """New schedule of the learning rate, as optimizer.schedule; a scheduler of torch begins with the next step."""
    global_batch: Annotated[int | None, at_least(1)] = None
    """New number of samples per step; micro-batches keep their size, so a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a training run."""

    model: GPTConfig
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    watch: TrainWatchConfig = field(default_factory=TrainWatchConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        if self.model.vocab_size < BYTES:
            raise ConfigError(f"model.vocab_size={self.model.vocab_size}: tokens are bytes; give at least {BYTES}")
        if self.optimizer.schedule != COSINE:
            from elixir_tools.train.schedule import factors

            try:
                factors(self.optimizer.schedule, self.optimizer.lr, self.scheduled_steps)
            except ConfigError as error:
                raise ConfigError(f"optimizer.{error}") from error

    @property
    def scheduled_steps(self) -> int:
        """Steps after the warm-up, at least 1."""
        return max(1, self.run.steps - self.optimizer.warmup_steps)

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch of all ranks."""
        return self.run.global_batch // self.run.accumulation

    def check_ranks(self, ranks: int) -> None:
        """Raises LayoutError or ConfigError if these settings do not fit that many ranks."""
        tp = self.run.tp
        _check_degree("run.tp", tp, ranks, f"the {ranks} ranks of this run")
        self.model.check_tp(tp)
        by_tp = f" / run.tp={tp}" * (tp > 1)
        for layer, ep in enumerate(self.model.ep):
            _check_degree(f"model.ep[{layer}]", ep, ranks // tp, f"the {ranks} ranks of this run{by_tp}")
        unit = ranks // tp * self.run.accumulation
        if self.run.global_batch % unit:
            raise ConfigError(
                f"run.global_batch={self.run.global_batch} is not a multiple of {ranks} ranks{by_tp} x "
                f"run.accumulation={self.run.accumulation}: choose a multiple of {unit}"
            )

    def load_data(self) -> "Text":
        """Returns the data that is trained on. Raises ConfigError if it cannot be read, or does not fit the model."""
        from elixir_tools.train.data import load_text

        return load_text(self.data.paths, self.data.validation, self.model.seq_len)


def _check_degree(key: str, degree: int, ranks: int, what: str) -> None:
    """Raises LayoutError if a degree of parallelism does not divide the ranks."""
    if ranks % degree:
        raise LayoutError(
            f"{key}={degree} does not divide {what}: choose one of "
            f"{[n for n in range(1, ranks + 1) if ranks % n == 0]}, or start another number of ranks"
        )


def identity(config: TrainConfig, data: "Text") -> dict[str, object]:
    """{dotted key: value} of the settings that a run cannot change when it resumes: those of model and optimizer, seed,
    batch size, and a hash of what is trained on (``data.text``)."""
    plain = yaml.safe_load(settings.to_yaml(config))
    sections = {name: plain[name] for name in ("model", "optimizer")}
    sections["data"] = {"validation": plain["data"]["validation"]}
    sections["run"] = {key: plain["run"][key] for key in ("seed", "global_batch")}
    fixed = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in fixed.items() if key not in _FREE} | {"data.text": data.digest()}


def load(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings in a YAML file, overridden by (dotted key, text) pairs. Raises ConfigError."""
    values = settings.read_yaml(path) if path is not None else {}
    run = values.get("run", {})
    if isinstance(run, dict) and "out" not in run and "run.out" not in dict(overrides):
        settings.build(TrainConfig, {**values, "run": {**run, "out": "x"}}, overrides)  # other mistakes come first
        raise ConfigError("run.out is missing: name the directory for everything that the run writes, as --run.out DIR")
    return settings.build(TrainConfig, values, overrides)
