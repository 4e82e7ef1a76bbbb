"""Any torch module as a recipe: a function of the user makes it, perhaps with its loss.

Owns the default loss. Knows nothing else of the module.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import ConfigError
from elixir_moe.models.lora import Lora
from elixir_moe.models.named import named_function
from elixir_moe.train.data import items_of
from elixir_moe.train.recipe import check_uncut, load_whole, prepared, summed

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
_LENGTH = 128
_RETURNS = "a function without arguments that returns a torch module, or (module, loss)"


class ModuleRecipe:
    """A module made by ``package:function``.

    Without a loss of its own the module is called with (B, L) tokens and returns (B, L, V) logits, or an object or a
    dict that has `logits`. A loss is called as ``loss(model, batch)`` with a dict of ``input_ids``, ``labels``,
    ``position_ids`` (all (B, L) int64) and ``items`` (a float: the mean number of labels in a batch of a rank).
    """

    vocabulary: int | None = None
    weights: str | None = None
    tokenizer: str | None = None
    samples = 0
    leaves_weights = False
    varies = False

    def __init__(
        self,
        path: str,
        *,
        lora: Lora | None = None,
        scheme: str | None = None,
        length: int | None = None,
        packed: bool | None = None,
    ) -> None:
        """Imports the function and calls it once without data. Raises ConfigError."""
        self.name, self._lora, self._scheme = path, lora, scheme
        self.length = length or _LENGTH
        self._make = named_function(path, "model.module", _RETURNS)
        with torch.device("meta"):
            self._own: Loss | None = self._made()[1]
        if packed and self._own is None:
            raise ConfigError(
                f"data.packing: {path} returns no loss, and the default one gives the module no positions: return "
                f"(module, loss), or give data.packing=false"
            )
        self.restarts = bool(packed)
        self.compares: Literal["logits", "losses"] = "logits" if self._own is None else "losses"

    def _made(self) -> tuple[nn.Module, Loss | None]:
        found = self._make()
        module, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
            raise ConfigError(f"model.module: {self.name} returned {type(found).__name__}; expected {_RETURNS}")
        return module, loss

    def check(self, ranks: int, tp: int) -> None:
        """As `Recipe` says."""
        check_uncut(tp, self.name)
        with torch.device("meta"):
            self.build(None)

    def build(self, mesh: DeviceMesh | None) -> nn.Module:
        """As `Recipe` says; patterns are those that the function has annotated."""
        return prepared(self._made()[0].train(), self._lora, self._scheme, self.name)

    def plain(self, folder: str | None) -> nn.Module:
        """As `Recipe` says; the base is as the function draws it with the run's seed."""
        model = self._made()[0]
        load_whole(model, folder)
        return model

    def loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """As `Recipe` says, or as the module's own loss says."""
        tokens, labels, positions = batch.unbind(1)
        if self._own is None:
            return summed(self._logits(model, tokens)[:, :-1], labels[:, 1:]) / items
        given: Any = {"input_ids": tokens, "labels": labels, "position_ids": positions, "items": items}
        found: Any = self._own(model, given)
        if not isinstance(found, Tensor) or found.dim():
            raise ConfigError(
                f"model.module: the loss of {self.name} must be a scalar tensor, got {_described(found)}: sum "
                f"over the labels and divide by batch['items']"
            )
        return found

    def validation_loss(self, model: nn.Module, batch: Tensor, items: float) -> Tensor:
        """As `Recipe` says; the same as `loss`."""
        return self.loss(model, batch, items)

    def compared(self, model: nn.Module, batch: Tensor) -> Tensor:
        """As `Recipe` says."""
        if self._own is None:
            return self._logits(model, batch[:, 0])
        return torch.stack([self.loss(model, row[None], max(1, items_of(row))) for row in batch])

    def _logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        output: Any = model(tokens)
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
            raise ConfigError(
                f"model.module: {self.name} returned {_described(output)} for {_described(tokens)} of tokens; expected "
                f"logits of {(*tokens.shape, 'V')}, or an object or dict with them as logits: return (module, loss) "
                f"to compute the loss of another output"
            )
        return logits

    def tokens_per_expert(self, model: nn.Module) -> dict[str, list[int]]:
        """As `Recipe` says: nothing is known of experts."""
        return {}

    def disconnect(self, model: nn.Module) -> None:
        """As `Recipe` says: no mesh is known."""

    def facts(self) -> str:
        """As `Recipe` says."""
        return self.name if self._lora is None else f"{self.name}, {self._lora}"

    def fixed(self) -> Mapping[str, object]:
        """As `Recipe` says: the settings name the function."""
        return {}


def _described(found: Any) -> str:
    """What a function of the user returned."""
    if isinstance(found, Tensor):
        return f"a tensor {tuple(found.shape)}"
    return f"a dict of {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
