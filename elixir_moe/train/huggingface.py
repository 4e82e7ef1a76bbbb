"""A causal language model of Hugging Face as a recipe: its folder, adapters, quantized weights and tokenizer.

Owns the construction of such models and their loss, which is the model's own. Reads no weight for a training: `em.wrap`
reads them from the folder, each rank its shards. Needs `transformers`, and `peft` for adapters, which are imported when
they are used.
"""

import hashlib
import inspect
import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import ConfigError
from elixir_moe.integrations.routers import Routers, has_routers
from elixir_moe.models.lora import Lora
from elixir_moe.models.presets import reason_of
from elixir_moe.models.without_logits import WithoutLogits
from elixir_moe.moe.fused import is_spread
from elixir_moe.moe.layer import LayerRanks
from elixir_moe.parallel.mesh import expert_mesh
from elixir_moe.setup.spreading import check_spreadable, spread_experts
from elixir_moe.state.safetensors_format import INDEX, SINGLE
from elixir_moe.train.recipe import check_degree, check_uncut, prepared

_LOG = logging.getLogger(__name__)
LONGEST = 1024
"""Tokens of a row where nobody says how many."""


_SEES_TEXTS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, by transformers' names, whose masks tell the texts of a row apart."""


class HuggingFaceRecipe:
    """A model in a folder."""

    samples = 0
    leaves_weights = False
    compares: Literal["logits", "losses"] = "logits"

    def __init__(
        self,
        folder: str,
        *,
        read: bool = True,
        attention: str | None = None,
        recompute: bool = False,
        ep: int = 1,
        lora: Lora | None = None,
        scheme: str | None = None,
        length: int | None = None,
        packed: bool | None = None,
        fused: bool = False,
    ) -> None:
        """Reads the folder's config.

        Args:
            folder: has ``config.json``; weights in safetensors if `read`.
            read: read the weights; otherwise they are drawn.
            attention: its implementation, by the names of transformers.
            recompute: the activations of every layer in backward.
            ep: ranks that share the experts of each layer.
            lora: the adapters that are trained instead of the model's own parameters.
            scheme: in which frozen weights become bytes.
            length: tokens of a row.
            packed: whether rows have several texts; None: where the model can tell them apart.
            fused: compute the loss without logits.

        Raises:
            ConfigError: transformers or peft is not installed, or the folder is not that of such a model, or the model
                cannot do what the settings ask.
        """
        self.folder = Path(folder).expanduser()
        self.name = self.folder.resolve().name
        self.tokenizer: str | None = str(self.folder)
        self._attention, self._recompute, self._lora, self._scheme = attention, recompute, lora, scheme
        self._ep, self._fused = ep, fused
        self.config = self._config()
        forward = self._class().forward
        self.weights: str | None = str(self.folder) if read else None
        if read and not any((self.folder / name).is_file() for name in (SINGLE, INDEX)):
            raise ConfigError(
                f"model.hf: {folder!r} has no weights ({SINGLE} or {INDEX}): name a folder that has, or give "
                f"model.weights=false to draw them"
            )
        text = self.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        positions = getattr(text, "max_position_embeddings", None)
        positions = positions if isinstance(positions, int) else None
        self.length = length if length is not None else min(LONGEST, positions or LONGEST)
        if positions is not None and self.length > positions:
            raise ConfigError(
                f"data.seq_len={self.length}: {self.name} has {positions} positions, give at most that many"
            )
        takes = inspect.signature(forward).parameters
        own = "loss_function" not in inspect.unwrap(forward).__code__.co_names  # decoders of other models, mostly
        if own or not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise ConfigError(
                f"model.hf: the forward of {self._class().__name__} has a loss that takes no num_items_in_batch, by "
                f"which it is averaged over all ranks, and may not predict the next token: train it with model.module "
                f"and a loss of your own"
            )
        cannot = None if packed is False else self._cannot_pack(takes, text)
        if packed and cannot is not None:
            raise ConfigError(
                f"data.packing: {self._class().__name__} cannot tell the texts of a row apart, since it {cannot}: give "
                f"data.packing=false"
            )
        self.restarts = packed is not False and cannot is None
        self._routers: Routers | None = None

    @property
    def varies(self) -> bool:
        """As `Recipe` says."""
        return self._routers is not None

    def _cannot_pack(self, takes: Mapping[str, Any], text: Any) -> str | None:
        """Why texts that share a row would see each other; None if they do not."""
        if "position_ids" not in takes:
            return "takes no positions"
        others = set(getattr(text, "layer_types", None) or ()) - _SEES_TEXTS
        if others or getattr(self._class(), "_is_stateful", False):
            return "carries a state along a row"
        if not _masks_by_position(self._class(), self.config.to_json_string()):
            return "does not mask by positions"
        return None

    def _class(self) -> Any:
        """The class of the model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        try:
            found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        except KeyError as error:
            raise ConfigError(
                f"model.hf: {self.name} ({self.config.model_type}) is not a causal language model"
            ) from error
        return found[0] if isinstance(found, tuple) else found

    def _config(self) -> Any:
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ConfigError("model.hf needs transformers: pip install transformers") from error
        if not (self.folder / "config.json").is_file():
            raise ConfigError(
                f"model.hf: no config.json in {str(self.folder)!r}: name a local folder of a Hugging Face model, as "
                f"`hf download MODEL --local-dir FOLDER` makes it"
            )
        try:
            return AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers checks its settings with error types of its own
            why = reason_of(error, self.folder, "build it in a function of yours, and train that with model.module")
            raise ConfigError(f"model.hf: {str(self.folder)!r} is not the folder of a known model: {why}") from error

    def check(self, ranks: int, tp: int) -> None:
        """As `Recipe` says."""
        check_uncut(tp, self.name)
        with torch.device("meta"):
            model = self.build(None)
        if self._ep > 1:
            check_degree("model.ep", self._ep, ranks, f"the {ranks} ranks of this run")
            check_spreadable(model, self._ep)
        if self._fused:
            WithoutLogits(model)
        self._routers = None

    def build(self, mesh: DeviceMesh | None) -> nn.Module:
        """As `Recipe` says; in fp32, so that masters are what the folder has."""
        from transformers import AutoModelForCausalLM

        chosen = {} if self._attention is None else {"attn_implementation": self._attention}
        try:
            model: Any = AutoModelForCausalLM.from_config(
                self.config, dtype=torch.float32, trust_remote_code=False, **chosen
            )
        except Exception as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(
                f"model.hf: {self.name} is not a causal language model that can be built: {why}"
            ) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old names and unused defaults within the two libraries
            model = prepared(model.train(), self._lora, self._scheme, self.name)
            if self._recompute:
                if not model.supports_gradient_checkpointing:
                    raise ConfigError(f"model.checkpoint: {self.name} cannot recompute its layers; leave it out")
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found: nn.Module = model
        if mesh is not None and self._ep > 1:
            spread_experts(found, expert_mesh(mesh, self._ep))
        self._routers = Routers(found) if has_routers(found) else None
        return found

    def plain(self, folder: str | None) -> nn.Module:
        """As `Recipe` says, by transformers alone."""
        from transformers import AutoModelForCausalLM

        source = str(self.folder) if folder is None else folder
        found: nn.Module = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        return found

    def loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """As `Recipe` says, by the model's own loss; with auxiliary losses where its config says so."""
        return self._loss(model, batch, items)

    def _loss(self, model: nn.Module, batch: Tensor, items: float, **options: bool) -> Tensor:
        tokens, labels, positions = batch.unbind(1)
        given = {"input_ids": tokens, "labels": labels}
        if self.restarts:
            given["position_ids"] = positions
            attention = str(getattr(self.config.get_text_config(), "_attn_implementation", ""))
            if "flash" in attention:  # its kernels, or a hub's, want texts of several lengths in one row
                given = {name: value.reshape(1, -1) for name, value in given.items()}
        with WithoutLogits(model)() if self._fused else nullcontext():
            loss: Tensor = model(**given, **options, use_cache=False, num_items_in_batch=items).loss
        return loss

    def validation_loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """As `Recipe` says, without auxiliary losses."""
        options = {"output_router_logits": False} if getattr(self.config, "output_router_logits", False) else {}
        return self._loss(model, batch, items, **options)

    def compared(self, model: nn.Module, batch: Tensor) -> Tensor:
        """As `Recipe` says."""
        logits: Tensor = model(input_ids=batch[:, 0], use_cache=False).logits
        return logits

    def tokens_per_expert(self, model: nn.Module) -> dict[str, list[int]]:
        """As `Recipe` says."""
        if self._routers is None:
            return {}
        self._routers.step()
        return {name: counts.tolist() for name, counts in self._routers.loads().items()}

    def disconnect(self, model: nn.Module) -> None:
        """As `Recipe` says."""
        for module in model.modules():
            if is_spread(module):
                module.ranks = LayerRanks()

    def facts(self) -> str:
        """As `Recipe` says."""
        frozen = "" if self._lora is None else f", {self._lora}"
        spread = f", experts over {self._ep} ranks" * (self._ep > 1)
        return f"{type(self.config).__name__.removesuffix('Config')} {self.name}{frozen}{spread}" + (
            f", frozen weights in {self._scheme}" if self._scheme is not None else ""
        )

    def fixed(self) -> Mapping[str, object]:
        """As `Recipe` says: the model's config."""
        return {"model.config": hashlib.sha256((self.folder / "config.json").read_bytes()).hexdigest()}


class _Asked(Exception):  # noqa: N818 (no error: it ends a forward early)
    """transformers looks for the texts of a row."""


@cache
def _masks_by_position(kind: Any, config: str) -> bool:
    """Whether a model of that class and config, in JSON, hands its positions to transformers' masks, which look there
    for the texts of a row: a forward without data that ends at the first look."""
    from transformers import masking_utils

    def ask(position_ids: Tensor) -> None:
        raise _Asked

    described = kind.config_class.from_dict(json.loads(config))
    with torch.device("meta"), patch.object(masking_utils, "find_packed_sequence_indices", ask):
        tokens = torch.zeros(1, 4, dtype=torch.long)
        try:
            kind(described)(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False)
        except _Asked:
            return True
        except Exception as error:  # what a forward without data raises is up to the model
            _LOG.debug("%s does not run without data, so its rows have one text each: %s", kind.__name__, error)
    return False


def encoded(tokenizer: Any, text: str) -> Tensor:
    """int32 tokens of a running text, 1-D."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)


def tokenizer_of(folder: str) -> Any:
    """The tokenizer in a folder. Raises ConfigError if transformers, or the tokenizer, is missing."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("a tokenizer needs transformers: pip install transformers") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers has several types for it
        instead = "name the folder of a tokenizer that transformers knows"
        raise ConfigError(
            f"data.tokenizer: there is none in {folder!r} ({reason_of(error, folder, instead)[:400]}): copy "
            f"tokenizer.json and tokenizer_config.json there, or name the folder of another"
        ) from error
