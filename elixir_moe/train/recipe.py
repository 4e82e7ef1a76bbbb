"""What a training needs to know of a model: how it is built, and the loss of a batch. Here also our own GPT.

Owns the interface, which is all that `training` and `loop` know of a model, and its implementation for the GPT. Wraps
nothing, and knows no step. Batches have the form that `train.data.Data` says.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import ConfigError, LayoutError
from elixir_moe.models.adapters import adapted
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, Meshes, gpt_patterns, lm_loss, lm_loss_without_logits, tokens_per_expert
from elixir_moe.models.lora import Lora
from elixir_moe.moe.layer import LayerRanks, MoE
from elixir_moe.parallel.linear import CutLinear
from elixir_moe.parallel.rules import annotate
from elixir_moe.quantized.convert import quantize


class Recipe(Protocol):
    """A model to train. It is made of settings on every rank, before there is a process group."""

    @property
    def name(self) -> str:
        """For messages and the trace."""

    @property
    def length(self) -> int:
        """L, the tokens of a row of data."""

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens that the model knows; None if it does not say."""

    @property
    def weights(self) -> str | None:
        """The folder that `em.wrap` reads weights from; None if they are drawn."""

    @property
    def restarts(self) -> bool:
        """Whether a row may have several texts, whose positions begin at 0 each."""

    @property
    def tokenizer(self) -> str | None:
        """The folder of its tokenizer; None if it has none."""

    @property
    def samples(self) -> int:
        """Tokens of the text that it writes at the end, unless settings say another number."""

    @property
    def varies(self) -> bool:
        """Whether experts take another number of tokens in each step."""

    @property
    def leaves_weights(self) -> bool:
        """Whether a run ends with a file of the full weights; otherwise the last checkpoint has them."""

    def check(self, ranks: int, tp: int) -> None:
        """Raises LayoutError if the model cannot be trained on that many ranks, `tp` of which share samples, and
        ConfigError if it cannot be built as its settings say."""

    def build(self, mesh: DeviceMesh | None) -> nn.Module:
        """The model, with its patterns; under `sharded_init`, so that no weight has memory. None: for one process."""

    def plain(self, folder: str | None) -> nn.Module:
        """The model in fp32 as other libraries read it from an exported folder; None: the base of the adapters."""

    def loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """The loss to train by: summed over the tokens that have labels and divided by `items`.

        `items` is the mean number of such tokens in a micro-batch of a rank, so that the mean over micro-batches and
        ranks is that over all tokens of the step.
        """

    def validation_loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """The same, of validation rows; without the auxiliary losses of routers where the recipe knows them."""

    @property
    def compares(self) -> Literal["logits", "losses"]:
        """What `compared` returns."""

    def compared(self, model: nn.Module, batch: Tensor) -> Tensor:
        """By which an exported model is compared with the run's: logits (B, S, V) of (B, 3, S) rows; or their losses,
        (B,), where a loss of the user's is all that is known of a model's output."""

    def tokens_per_expert(self, model: nn.Module) -> dict[str, list[int]]:
        """By mixture layer, the choices that fell on each expert in the last step, all ranks together. Collective."""

    def disconnect(self, model: nn.Module) -> None:
        """Drops the model's references to meshes; no forward can run any more."""

    def facts(self) -> str:
        """The model in a few words."""

    def fixed(self) -> Mapping[str, object]:
        """What a run that goes on keeps, beside its settings."""


class GPTRecipe:
    """Our own GPT."""

    name = "GPT"
    weights: str | None = None
    restarts = False
    tokenizer: str | None = None
    samples = 300
    leaves_weights = True
    compares: Literal["logits", "losses"] = "logits"

    def __init__(self, config: GPTConfig, *, fused: bool) -> None:
        """`fused`: the loss is computed without logits."""
        self.config = config
        self.vocabulary = config.vocab_size
        self.length = config.seq_len + 1
        self.varies = any(config.experts) and config.capacity_factor is None
        self._loss = lm_loss_without_logits if fused else lm_loss

    def check(self, ranks: int, tp: int) -> None:
        """As `Recipe` says."""
        self.config.check_tp(tp)
        by_tp = f" / run.tp={tp}" * (tp > 1)
        for layer, ep in enumerate(self.config.ep):
            check_degree(f"model.ep[{layer}]", ep, ranks // tp, f"the {ranks} ranks of this run{by_tp}")

    def build(self, mesh: DeviceMesh | None) -> GPT:
        """As `Recipe` says."""
        model = GPT(self.config, mesh)
        annotate(model, gpt_patterns(model))
        return model

    def plain(self, folder: str | None) -> GPT:
        """As `Recipe` says."""
        model = GPT(self.config)
        load_whole(model, folder)
        return model

    def loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """As `Recipe` says, with the auxiliary losses of the routers."""
        tokens, labels, _ = batch.unbind(1)
        return self._loss(model, tokens, labels[:, 1:], items)

    def validation_loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """As `Recipe` says, without auxiliary losses."""
        tokens, labels, _ = batch.unbind(1)
        return summed(model(tokens[:, :-1]).logits, labels[:, 1:]) / items

    def compared(self, model: nn.Module, batch: Tensor) -> Tensor:
        """As `Recipe` says."""
        logits: Tensor = model(batch[:, 0, : self.config.seq_len]).logits
        return logits

    def tokens_per_expert(self, model: nn.Module) -> dict[str, list[int]]:
        """As `Recipe` says; of the last micro-batch."""
        return tokens_per_expert(model)

    def disconnect(self, model: nn.Module) -> None:
        """As `Recipe` says."""
        for module in model.modules():
            if isinstance(module, GPT):
                module.meshes = Meshes(self.config, None)
            if isinstance(module, MoE):
                module.place = LayerRanks()
            if isinstance(module, CutLinear):
                module.ranks = replace(module.ranks, process_group=None)

    def facts(self) -> str:
        """As `Recipe` says."""
        pairs = zip(self.config.experts, self.config.ep, strict=True)
        kinds = ", ".join(f"{n} experts (ep {ep})" if n else "dense" for n, ep in pairs)
        return f"layers of width {self.config.d_model}: {kinds}"

    def fixed(self) -> Mapping[str, object]:
        """As `Recipe` says: all is in the settings."""
        return {}


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of (B, S, V) logits and (B, S) labels, summed in fp32; -100 is left out."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def load_whole(model: nn.Module, folder: str | None) -> None:
    """Reads all weights of a plain model from the safetensors of a folder; None: leaves them as they are."""
    from safetensors.torch import load_model

    for file in sorted(Path(folder).glob("*.safetensors")) if folder is not None else ():
        load_model(model, file, strict=False)


def check_degree(key: str, degree: int, ranks: int, what: str) -> None:
    """Raises LayoutError if a degree of parallelism does not divide the ranks."""
    if ranks % degree:
        raise LayoutError(
            f"{key}={degree} does not divide {what}: choose one of "
            f"{[n for n in range(1, ranks + 1) if ranks % n == 0]}, or start another number of ranks"
        )


def check_uncut(tp: int, name: str) -> None:
    """Raises LayoutError if a model that is not our GPT is to be cut."""
    if tp > 1:
        raise LayoutError(f"run.tp={tp}: only our own GPT is cut over tp; leave it out for {name}")


def prepared(model: nn.Module, lora: Lora | None, scheme: str | None, name: str) -> nn.Module:
    """The model with its frozen weights in `scheme` and with adapters, which alone are trained then.

    Raises:
        ConfigError: a setting matches nothing in the model, or nothing of it is trained.
    """
    if lora is not None:
        model.requires_grad_(False)
    if scheme is not None:
        quantize(model, scheme)
    if lora is not None:
        model = adapted(model, lora)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{name} has no parameter to train: all are frozen; give lora.r, or unfreeze some")
    return model
