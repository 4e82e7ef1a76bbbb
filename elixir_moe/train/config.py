"""The settings of a training run: what each means, in which unit, and which values make sense together.

Owns the sections and their checks, those against the number of ranks included. Reads no file itself (`settings` does)
and starts nothing: every mistake found here is found before there is a process group.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import nn

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.errors import ConfigError, LayoutError, PlanError
from elixir_moe.models.config import GPTConfig
from elixir_moe.train import settings
from elixir_moe.train.data import VOCABULARY, ByteText

_MEANINGFUL: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero2": ("chunk_numel",),
    "zero3": ("rcache", "rcache_blocks", "chunk_numel"),
    "offload": (
        *("device", "host", "disk", "verify", "rcache"),
        *("rcache_blocks", "device_chunks", "disk_chunks", "chunk_numel"),
    ),
    "auto": ("hardware", "budget", "disk", "verify"),
}
"""By kind of plan: the settings that go with it, which are arguments of the preset of that name in `Plan`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text to train on; its tokens are bytes."""

    paths: tuple[str, ...] = ()
    """Files or globs of files, joined in order; none means the English text of Python's own help."""
    validation: float = 0.1
    """Share of the bytes, from the end of the text, kept for validation."""

    def __post_init__(self) -> None:
        _check(0 < self.validation < 1, "data.validation", self.validation, "a share between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Where weights and optimizer state live, and how many gathered weights are kept.

    Sizes are of one rank, in bytes or as texts such as "20 GiB".
    """

    kind: Literal["ddp", "zero2", "zero3", "offload", "auto"] = "zero2"
    """ddp: all on each device; zero2: optimizer sharded; zero3: weights too; offload: both at home in host memory;
    auto: the fastest of these that fits."""
    rcache: int | str | None = None
    """Device memory for gathered chunks, for zero3 and offload; null takes the least that works, and a little more to
    gather ahead."""
    rcache_blocks: int | None = None
    """The same as a number of chunks."""
    device: int | str | None = None
    """Device memory for state that stays there all the same, for offload; null means none."""
    device_chunks: int | None = None
    """The same as a number of chunks."""
    host: int | str | None = None
    """Host memory for state, for offload; what does not fit goes to disk. Null takes what is free."""
    disk: str | None = None
    """The folder for what is on disk, for offload and auto; null uses no disk."""
    disk_chunks: int | None = None
    """Chunks whose master weights and moments are on disk, in the place of host."""
    verify: bool | None = None
    """Compare checksums of what is read from disk; null means no."""
    chunk_numel: int | None = None
    """Elements of a chunk, for all but ddp and auto; null takes the length that wastes least."""
    hardware: str | None = None
    """What auto plans for: a machine that ships with the package, or a file; null measures this one."""
    budget: int | str | None = None
    """Device memory of a rank auto plans for, activations included; null takes what is free."""

    def __post_init__(self) -> None:
        for name in {name for names in _MEANINGFUL.values() for name in names}:
            if getattr(self, name) is not None and name not in _MEANINGFUL[self.kind]:
                meant = f"plan.{name} means nothing for plan.kind={self.kind}"
                raise ConfigError(f"{meant}: remove it, or choose another kind")
        try:
            self.plan(_no_step, (), 1)
        except PlanError as error:
            raise ConfigError(f"plan: {error}") from None

    def plan(self, step: Callable[[nn.Module, Any], Any], sample: Any, accumulation: int) -> Plan | AutoPlan:
        """The plan, or how it is to be found: then for `accumulation` runs of ``step(model, sample)``."""
        given = {name: value for name in _MEANINGFUL[self.kind] if (value := getattr(self, name)) is not None}
        if self.kind == "auto":
            return Plan.auto(step, sample, accumulation=accumulation, **given)
        preset: Callable[..., Plan] = getattr(Plan, self.kind)
        return preset(**given)


def _no_step(model: nn.Module, sample: Any) -> None:
    raise AssertionError("a step that is never run")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, with the learning rate warmed up linearly and then lowered along half a cosine."""

    lr: float = 1e-3
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments, per step."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, for parameters of two and more dims; those of one dim are not decayed."""
    warmup_steps: int = 50
    """Steps until the learning rate is at its highest."""
    final_lr: float = 0.1
    """Learning rate of the last step, as a share of `lr`."""
    clip_norm: float | None = 1.0
    """Bound of the global gradient norm; null does not clip."""

    def __post_init__(self) -> None:
        _check(0 < self.lr < math.inf, "optimizer.lr", self.lr, "a finite number above 0")
        for i, beta in enumerate(self.betas):
            _check(0 <= beta < 1, f"optimizer.betas[{i}]", beta, "a number from 0 to below 1")
        _check(0 < self.eps < math.inf, "optimizer.eps", self.eps, "a finite number above 0")
        decay = self.weight_decay
        _check(0 <= decay < math.inf, "optimizer.weight_decay", decay, "a finite number, 0 or more")
        _check(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more steps")
        _check(0 <= self.final_lr <= 1, "optimizer.final_lr", self.final_lr, "a share of lr between 0 and 1")
        clip = self.clip_norm
        _check(clip is None or 0 < clip < math.inf, "optimizer.clip_norm", clip, "a finite number above 0, or null")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long, how much at a time, on how many ranks, and what is left behind."""

    out: str
    """Directory for everything the run writes; made if missing, refused if it holds something else than this run."""
    overwrite: bool = False
    """Whether a run in `out`, ended or not, is replaced; one that its launcher restarts goes on all the same."""
    resume: str = "auto"
    """auto: the run in `out`, if there is one, goes on from its latest checkpoint; fall_back: from the latest
    whose files are all sound; never: a used `out` is refused; or a checkpoint of another run to start from."""
    timeout_seconds: float = 600.0
    """How long a rank waits for the others before all end with an error."""
    steps: int = 100
    """Optimizer steps."""
    global_batch: int = 32
    """Samples of model.seq_len bytes in a step, over all ranks and micro-batches."""
    accumulation: int = 1
    """Micro-batches a rank runs forward and backward before each optimizer step."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in; masters and moments are fp32 always."""
    seed: int = 0
    """Of weights, samples, dropout and the text sample."""
    eval_every: int = 100
    """Steps between two evaluations; the last step is always followed by one."""
    eval_batches: int = 8
    """Batches of an evaluation, each as large as a micro-batch of all ranks; fewer where the text has no more."""
    log_every: int = 10
    """Steps between two lines where the output is no terminal."""
    sample_bytes: int = 300
    """Bytes of text the trained model writes at the end; 0 for none."""
    temperature: float = 0.8
    """How freely it chooses them: 0 always takes the likeliest."""
    threads: int = 1
    """CPU threads of each rank."""

    def __post_init__(self) -> None:
        _check(bool(self.out.strip()), "run.out", self.out, "a directory")
        for name in ("steps", "global_batch", "accumulation", "eval_every", "eval_batches", "log_every", "threads"):
            _check(getattr(self, name) >= 1, f"run.{name}", getattr(self, name), "at least 1")
        _check(self.sample_bytes >= 0, "run.sample_bytes", self.sample_bytes, "0 or more")
        _check(0 <= self.seed < 2**62, "run.seed", self.seed, "0 or more, below 2**62")
        patience = self.timeout_seconds
        _check(1 <= patience < math.inf, "run.timeout_seconds", patience, "at least 1 second")
        heat = self.temperature
        _check(0 <= heat < math.inf, "run.temperature", heat, "a finite number, 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """When the whole state of the training is saved, in OUT/checkpoints."""

    every: int | None = 100
    """Steps between two checkpoints; the last step is always followed by one. Null makes none at all."""
    keep: int = 2
    """How many of them are kept."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint could not be written, the disk being full; the last one is always an error."""

    def __post_init__(self) -> None:
        _check(self.every is None or self.every >= 1, "save.every", self.every, "at least 1 step, or null")
        _check(self.keep >= 1, "save.keep", self.keep, "at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """What is watched while the run goes on, and what is done about it."""

    on_nan: Literal["skip", "back", "stop"] = "stop"
    """A loss or gradient that is not finite: skip the batch, go back to the last good checkpoint, or stop with the
    state saved. Gradients of fp16 that overflow are skipped in any case."""
    on_divergence: Literal["skip", "back", "stop"] = "stop"
    """A loss far above those before it, in the same ways."""
    window: int = 64
    """Steps that are compared with."""
    deviations: float = 10.0
    """How many standard deviations above the last losses a loss is off."""
    patience: int = 3
    """Steps in a row, all of them off, that make a divergence; with skip, how many are skipped before the run stops."""
    back_rate: float = 0.5
    """What the learning rate is multiplied with when the run goes back."""
    avoid_batch: bool = True
    """Whether a run that went back leaves out the batches that led there."""
    tries: int = 3
    """How often a run goes back before it stops."""
    straggler_score: float = 1.5
    """A rank is reported when it is busy this many times as long as the median rank."""
    scales_every: int | None = 100
    """Steps between two looks at the root mean square of every parameter; null for none."""
    memory_tries: int = 6
    """How often less memory is used, a step being redone, before the run ends: first a smaller rCache, then half the
    micro-batch."""

    def __post_init__(self) -> None:
        for name in ("window", "patience"):
            _check(getattr(self, name) >= 1, f"watch.{name}", getattr(self, name), "at least 1")
        for name in ("tries", "memory_tries"):
            _check(getattr(self, name) >= 0, f"watch.{name}", getattr(self, name), "0 or more")
        _check(0 < self.deviations < math.inf, "watch.deviations", self.deviations, "a finite number above 0")
        _check(0 < self.back_rate <= 1, "watch.back_rate", self.back_rate, "a share above 0, at most 1")
        _check(self.straggler_score > 1, "watch.straggler_score", self.straggler_score, "a number above 1")
        every = self.scales_every
        _check(every is None or every >= 1, "watch.scales_every", every, "at least 1 step, or null")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything a training run is told."""

    model: GPTConfig
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        found = self.model.vocab_size
        _check(found == VOCABULARY, "model.vocab_size", found, f"{VOCABULARY}, since tokens are bytes")

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch of all ranks."""
        return self.run.global_batch // self.run.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in a step, over all ranks."""
        return self.run.global_batch * self.model.seq_len

    def check_ranks(self, ranks: int) -> None:
        """Raises LayoutError or ConfigError where these settings and that many ranks do not go together."""
        for layer, ep in enumerate(self.model.ep):
            if ranks % ep:
                raise LayoutError(
                    f"model.ep[{layer}]={ep} does not divide the {ranks} ranks of this run: choose one of "
                    f"{[n for n in range(1, ranks + 1) if ranks % n == 0]}, or start another number of ranks"
                )
        unit = ranks * self.run.accumulation
        if self.run.global_batch % unit:
            raise ConfigError(
                f"run.global_batch={self.run.global_batch} is no multiple of {ranks} ranks x run.accumulation="
                f"{self.run.accumulation}: choose a multiple of {unit}"
            )


def identity(config: TrainConfig, text: ByteText) -> dict[str, object]:
    """By dotted key, what a run keeps for life: what is trained, on which bytes (``data.text``, a hash), how fast."""
    free = ("model.ep", "model.checkpoint", "data.paths")
    plain = yaml.safe_load(settings.to_yaml(config))
    sections = {name: plain[name] for name in ("model", "data", "optimizer")}
    sections["run"] = {key: plain["run"][key] for key in ("seed", "global_batch")}
    fixed = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    digest = hashlib.sha256(text.train.numpy().tobytes()).hexdigest()
    return {key: value for key, value in fixed.items() if key not in free} | {"data.text": digest}


def load(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The settings in a YAML file, with (dotted key, text) pairs laid over them. Raises ConfigError."""
    values = settings.read_yaml(path) if path is not None else {}
    return settings.build(TrainConfig, values, overrides)


def _check(holds: bool, key: str, found: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key}: expected {expected}, got {found}")
