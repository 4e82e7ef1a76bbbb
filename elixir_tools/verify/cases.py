"""The model that is verified: a model with its loss and its batches, that any process can build again.

Owns the three ways a user names a model (a Hugging Face config, a name of `elixir-moe plan`, a function of their own),
the adapters put on it and its frozen weights in 4 or 8 bits. Everything here can be sent to another process; nothing
trains.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe import annotate, init_mesh, quantize
from elixir_moe.errors import ConfigError, did_you_mean
from elixir_moe.ext.models import Dropout, packed_parameters, scheme_named, tree_leaves, tree_map
from elixir_tools.models import presets
from elixir_tools.models.adapters import check_targets, with_adapters
from elixir_tools.models.gpt import GPT, GPTConfig, gpt_patterns, lm_loss
from elixir_tools.models.lora import Lora
from elixir_tools.models.named import named_function
from elixir_tools.verify.oracle import next_token_loss, plain_mixtures, quantized_values
from elixir_tools.verify.shrink import UNIT, changes, shrunk, without_noise

_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""Endings of the classes that compute a loss from ``input_ids`` and ``labels``."""
FIRST_WORD = 3
"""Smaller token ids may be special."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestCase:
    """A model that has been built."""

    model: nn.Module
    step: Callable[[nn.Module, Any], Tensor]
    """The loss of a batch."""
    sample: Callable[[], Any]
    """Draws a batch with all rows of a micro-batch from torch's generator."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]] | None = None
    """Makes the optimizer of both runs, or several as for `wrap`. None is AdamW; tolerances are derived for it."""


class Source(Protocol):
    """How a case is built; the same in every process that draws from the same seed."""

    def build(self, *, under_plan: bool = False) -> TestCase:
        """The case of the plain run, or that of the run under the plan.

        The plain one is PyTorch, transformers and peft as they are; `oracle` computes mixtures and the loss of this
        library's GPT, and the values of frozen weights in 4 or 8 bits. Under the plan, experts are spread over the
        ranks where they can be, adapters of experts are multiplied separately, and frozen weights are bytes.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """How the user wants a model trained that this library has not built."""

    rows: int
    """Rows of a micro-batch, where the user's function gives no batches."""
    length: int
    """Tokens of a row, likewise."""
    lora: Lora | None = None
    """Adapters on the model."""
    checkpointing: bool = False
    """Recompute activations of each layer of a transformers model."""
    quantized: str | None = None
    """The scheme in which frozen weights are kept."""
    changed: tuple[str, ...] = field(default=(), compare=False)
    """The settings that were shrunk, or made so that faults show."""

    def __post_init__(self) -> None:
        if self.lora is not None and self.lora.alpha == self.lora.r:  # a scale of 1 does not show where it is lost
            alpha = 3 * self.lora.r
            object.__setattr__(self, "changed", (*self.changed, f"lora alpha {self.lora.r} -> {alpha}"))
            object.__setattr__(self, "lora", replace(self.lora, alpha=alpha))

    def adapted(self, model: Any) -> Any:
        """The model with the adapters. Raises ConfigError if it cannot have them."""
        return model if self.lora is None else with_adapters(model, self.lora, init=False)

    def prepared(self, model: Any, *, under_plan: bool) -> Any:
        """The model with adapters, quantized weights and activation checkpointing. Raises ConfigError if it cannot."""
        model = self.adapted(model)
        if self.quantized is not None and under_plan:
            quantize(model, self.quantized)
        elif self.quantized is not None:
            for name, _, _, packed in packed_parameters(quantize(deepcopy(model), self.quantized)):
                weight = model.get_parameter(name).data
                weight = weight.transpose(-1, -2) if packed.transposed else weight
                weight.copy_(quantized_values(weight, self.quantized))
        if self.checkpointing:
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise ConfigError(
                    f"--checkpointing: {type(model).__name__} is not a transformers model: checkpoint its own way"
                )
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFace(_Asked):
    """A transformers model with random weights."""

    settings: dict[str, Any]
    """The config."""
    architecture: str
    """The class in transformers."""

    def config(self) -> Any:
        """A new config of transformers."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = CONFIG_MAPPING[self.settings["model_type"]].from_dict(self.settings)
        config.use_cache = False
        return config

    def base(self) -> Any:
        """The model without adapters."""
        import transformers

        return getattr(transformers, self.architecture)(self.config()).train()

    def build(self, *, under_plan: bool = False) -> TestCase:
        """See `Source.build`."""
        return TestCase(model=self.prepared(self.base(), under_plan=under_plan), step=own_loss, sample=self.sample)

    def sample(self) -> dict[str, Tensor]:
        """Random tokens."""
        return _tokens(self.config(), self.rows, self.length)

    def check(self) -> None:
        """Builds the model without data. Raises ConfigError if it cannot be, or an adapter matches nothing."""
        try:
            with torch.device("meta"):
                model = self.base()
        except Exception as error:  # transformers checks its settings with error types of its own
            hint = (
                "; shrinking it has failed: write a small config and give it with --no-shrink" if self.changed else ""
            )
            raise ConfigError(
                f"{self.architecture} cannot be built: {str(error).partition(chr(10))[0]}{hint}"
            ) from error
        if self.lora is not None:
            check_targets(model, self.lora)
        if self.quantized is not None:
            with torch.device("meta"):
                self.prepared(self.base(), under_plan=True)
        if self.checkpointing and not model.supports_gradient_checkpointing:
            raise ConfigError(f"--checkpointing: {self.architecture} has none, leave it out")


def _tokens(config: Any, rows: int, length: int) -> dict[str, Tensor]:
    """(rows, length) token ids, and as many to be told."""
    vocabulary = config.get_text_config().vocab_size
    drawn = torch.randint(min(FIRST_WORD, vocabulary - 1), vocabulary, (rows, length))
    return {"input_ids": drawn, "labels": drawn}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a transformers model computes from its labels."""
    loss: Tensor = model(**batch).loss
    return loss


def huggingface(path: str, *, shrink: bool, **options: Any) -> HuggingFace:
    """The source for a ``config.json`` or its folder; `options` are fields of `HuggingFace`.

    Raises ConfigError if there is no such file, transformers does not know the model, or it needs code of its own.
    """
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError("--hf needs transformers: pip install transformers") from error
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hf {path!r}: cannot read {file}: {error}; expected a config.json or its folder"
        ) from error
    kind = str(given.get("model_type")) if isinstance(given, dict) else ""
    if kind not in CONFIG_MAPPING:
        if isinstance(given, dict) and "auto_map" in given:
            raise ConfigError(
                f"--hf {path!r} needs code from a hub (auto_map), which is not run; build the model in a function of "
                f"yours and give it with --module"
            )
        hint = did_you_mean(kind, CONFIG_MAPPING.keys()) or "update it"
        raise ConfigError(
            f"--hf {path!r}: transformers {transformers.__version__} knows no model_type {kind!r}; {hint}"
        )
    try:
        full = CONFIG_MAPPING[kind].from_dict(given).to_dict()
    except Exception as error:  # transformers checks its settings with error types of its own
        raise ConfigError(f"--hf {path!r}: not a config of {kind}: {str(error).partition(chr(10))[0]}") from error
    scheme = options.get("quantized")
    unit = UNIT if scheme is None else max(UNIT, scheme_named(scheme).inputs_in_multiples_of)
    wanted = without_noise(shrunk(full, unit) if shrink else full)
    architecture = _architecture(path, given, kind)
    source = HuggingFace(
        settings=wanted, architecture=architecture, changed=tuple(changes(full, wanted)) if shrink else (), **options
    )
    source.check()
    return source


def _architecture(path: str, given: dict[str, Any], kind: str) -> str:
    """The class of transformers that computes the model's loss. Raises ConfigError."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    named = (given.get("architectures") or [None])[0]
    if named is None:
        mappings = (known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
        named = next((mapping[kind] for mapping in mappings if kind in mapping), None)
    if named is None or not str(named).endswith(_HEADS):
        raise ConfigError(
            f"--hf {path!r}: {named or kind} computes no loss of tokens, expected a class that ends with one of "
            f"{', '.join(_HEADS)}; build it in a function of yours and give it with --module"
        )
    if not hasattr(transformers, named):
        raise ConfigError(f"--hf {path!r}: transformers {transformers.__version__} has no architecture {named!r}")
    return str(named)


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A GPT of this library."""

    config: GPTConfig
    """Its shape."""
    rows: int
    """Rows of a micro-batch."""
    changed: tuple[str, ...] = field(default=(), compare=False)
    """The settings that were shrunk."""
    device: str = "cpu"
    """Type of the ranks' device: "cpu" or the kind of accelerator."""

    def build(self, *, under_plan: bool = False) -> TestCase:
        """See `Source.build`."""
        mesh = init_mesh(device_type=self.device) if under_plan and dist.get_world_size() > 1 else None
        model = GPT(self.config, mesh)
        if not under_plan:
            return TestCase(model=plain_mixtures(model), step=next_token_loss, sample=self.sample)
        if mesh is not None:
            annotate(model, gpt_patterns(model))
        return TestCase(model=model, step=lm_loss, sample=self.sample)

    def sample(self) -> Tensor:
        """Random tokens."""
        return torch.randint(self.config.vocab_size, (self.rows, self.config.seq_len + 1))


def named(name: str, *, shrink: bool, ranks: int, rows: int, length: int, checkpointing: bool) -> Named:
    """The source for a model that `elixir-moe plan` knows by name. Raises ConfigError."""
    config = presets.named_model(name, batch=1, seq=1).model.config
    assert isinstance(config, GPTConfig), "models by name are GPTs"
    small, changed = config, []
    if shrink:
        counts = dict.fromkeys(count for count in config.experts if count)
        dense = (0,) * (0 in config.experts)
        experts = sum(((*dense, min(count, 4 + 4 * i)) for i, count in enumerate(counts)), ())[:4] or (0, 0)
        sizes: dict[str, Any] = {"d_model": 32, "n_heads": 4, "vocab_size": 128, "seq_len": length}
        small = replace(config, n_layers=len(experts), experts=experts, ep=(1,) * len(experts), **sizes)
        shown = ("n_layers", *sizes, "experts")
        changed = [f"{n} {_short(getattr(config, n))} -> {_short(getattr(small, n))}" for n in shown]
    spread = tuple(gcd(count, ranks) if count else 1 for count in small.experts)
    small = replace(small, ep=spread, checkpoint="non_reentrant" if checkpointing else "none")
    return Named(config=small, rows=rows, changed=tuple(changed))


def _short(value: Any) -> str:
    return f"of {len(value)} layers, {max(value)} at most" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function(_Asked):
    """The model that a function of the user makes."""

    path: str
    """``package.module:function``."""

    def function(self) -> Callable[[], Any]:
        """The function. Raises ConfigError if there is none."""
        return named_function(self.path, "--module", "a function without arguments that returns a model")

    def build(self, *, under_plan: bool = False) -> TestCase:
        """See `Source.build`."""
        made = self.function()()
        several = isinstance(made, tuple)
        if several and (
            len(made) not in (3, 4) or not isinstance(made[0], nn.Module) or not all(map(callable, made[1:]))
        ):
            raise ConfigError(
                f"{self.path}() returned a tuple of {', '.join(type(part).__name__ for part in made)}: expected a "
                f"module, step(model, sample) that returns the loss, sample() that draws a batch, and perhaps "
                f"optimizer(parameters)"
            )
        model = made[0] if several else made
        if not several and not (isinstance(model, nn.Module) and hasattr(getattr(model, "config", None), "model_type")):
            raise ConfigError(
                f"{self.path}() returned a {type(model).__name__}: expected a transformers model, or (module, step, "
                f"sample) with step(model, sample) that returns the loss, and sample() that draws a batch"
            )
        model = self.prepared(model, under_plan=under_plan)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.p = 0.0
        if several:
            step, sample, optimizer = (*made[1:], None)[:3]
            return TestCase(model=model.train(), step=step, sample=sample, optimizer=optimizer)
        config = model.config
        return TestCase(model=model.train(), step=own_loss, sample=lambda: _tokens(config, self.rows, self.length))


def function(path: str, **options: Any) -> Function:
    """The source for ``package.module:function``; `options` are fields of `Function`. Raises ConfigError."""
    source = Function(path=path, **options)
    source.function()
    return source


def batch_of(case: TestCase, step: int, micro: int) -> Any:
    """The batch with all ranks' rows, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * step + micro)
        return case.sample()


def parts_of(batch: Any, ranks: int) -> Iterator[Any]:
    """Yields each rank's rows of a batch. Raises ConfigError if they cannot be shared out evenly."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = tensors[0].size(0) if tensors else 0
    if not rows or rows % ranks:
        raise ConfigError(
            f"a batch has {rows} rows for {ranks} ranks: expected a multiple of the ranks, as dim 0 of tensors"
        )
    for rank in range(ranks):

        def part(leaf: Any, at: slice = slice(rank * rows // ranks, (rank + 1) * rows // ranks)) -> Any:
            return leaf[at] if isinstance(leaf, Tensor) and leaf.dim() and leaf.size(0) == rows else leaf

        yield tree_map(part, batch)
