"""Models to plan for, without data: models by name, and Hugging Face models by their config file.

Owns the construction without data; `shapes` has the names. Trains nothing. OPT has GPT-2's GELU here instead of its
ReLU; parameters, products and memory are the same.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from elixir_moe import annotate
from elixir_moe.errors import ConfigError, unknown_name
from elixir_moe.ext.hf import FusedLoss
from elixir_tools.models.adapters import adapted
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss, lm_loss_without_logits
from elixir_tools.models.lora import Lora
from elixir_tools.models.shapes import GPT2, INFINITY, LARGE_MOE, OPT, PR_MOE, names

Loss = Literal["whole", "fused"]
_CONFIGS = ("config.json", "tokenizer_config.json")
"""The files of a model's folder whose ``auto_map`` names code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A model without data, ready to be traced."""

    name: str
    model: nn.Module
    step: Callable[[nn.Module, Any], Tensor]
    """The forward of a training step; returns the loss."""
    sample: Any
    """A batch on the meta device."""
    loss: Loss
    positions: int | None = None
    """Most tokens of a sequence; None if the model has no limit."""

    ahead: int = 0
    """Tokens of the sample beyond those of the sequence."""

    def resampled(self, batch: int, seq: int) -> "Planned":
        """Returns the model with a batch of other sizes."""
        return replace(self, sample=torch.empty(batch, seq + self.ahead, dtype=torch.int64, device="meta"))


def reason_of(error: Exception, path: str | Path, instead: str = "name a model that transformers knows") -> str:
    """Why transformers does not read a folder or a file of it: the first line of its error.

    Where it would need Python code of the folder, which no program here runs unless the user allows it, the reason
    names the files that point to code, and what to do `instead`.
    """
    said = str(error)
    if "trust_remote_code" not in said:
        return said.partition("\n")[0]
    files = [Path(path)] if Path(path).is_file() else [Path(path, name) for name in _CONFIGS]
    naming = [str(file) for file in files if file.is_file() and "auto_map" in json.loads(file.read_text())]
    where = " and ".join(naming) or f"a file in {str(path)!r}"
    return f"'auto_map' in {where} names Python code for it, and trust_remote_code is false: {instead}"


def named_model(
    name: str,
    *,
    batch: int,
    seq: int,
    mesh: DeviceMesh | None = None,
    layers: int | None = None,
    stretch: bool = False,
    checkpointing: bool = True,
    loss: Loss | None = None,
    recompute: bool = False,
) -> Planned:
    """The model called `name`, one of `shapes.names`.

    `layers` replaces the number of a dense model; `stretch` gives it the positions that `seq` needs. `mesh`, the ranks
    over which experts are spread, is needed by mixtures only. A `loss` of None is of all logits, as `train` does;
    one without logits may `recompute` them (`linear_cross_entropy`).

    Raises ConfigError if no model has that name; the nearest is suggested. Or if `seq` is longer than it allows.
    """
    ranks = 1 if mesh is None else mesh.size()
    if name in GPT2 or name in INFINITY:
        own, width, heads = (GPT2 | INFINITY)[name]
        config = _gpt(vocab_size=50257, seq_len=1024, n_layers=own, d_model=width, n_heads=heads)
    elif name in OPT:
        own, width, heads = OPT[name]
        config = _gpt(vocab_size=50272, seq_len=2050, n_layers=own, d_model=width, n_heads=heads)
    elif name in PR_MOE:
        few, many = PR_MOE[name]
        experts = tuple((few if i < 20 else many) if i % 2 else 0 for i in range(24))
        config = _gpt(
            vocab_size=50257,
            seq_len=2048,
            n_layers=24,
            d_model=2048,
            n_heads=16,
            experts=experts,
            ep=tuple(gcd(e, ranks) if e else 1 for e in experts),
            residual=True,
            capacity_factor=1.25,
        )
    elif name in LARGE_MOE:
        own, width, heads, count = LARGE_MOE[name]
        config = _gpt(
            vocab_size=50257,
            seq_len=2048,
            n_layers=own,
            d_model=width,
            n_heads=heads,
            experts=(0, count) * (own // 2),
            ep=(1, gcd(count, ranks)) * (own // 2),
            top_k=2,
            capacity_factor=1.25,
        )
    else:
        raise unknown_name("model", name, names())
    if not checkpointing:
        config = replace(config, checkpoint="none")
    if layers is not None:
        config = replace(config, n_layers=layers, experts=(), ep=())
    if stretch:
        config = replace(config, seq_len=max(seq, config.seq_len))
    if seq > config.seq_len:
        raise ConfigError(
            f"seq={seq}: {name} has {config.seq_len} positions, give at most that many (--seq {config.seq_len})"
        )
    return of_config(name, config, batch=batch, seq=seq, mesh=mesh, loss=loss, recompute=recompute)


def of_config(
    name: str,
    config: GPTConfig,
    *,
    batch: int,
    seq: int,
    mesh: DeviceMesh | None = None,
    loss: Loss | None = None,
    recompute: bool = False,
) -> Planned:
    """Builds what `named_model` does, for a GPT of any configuration."""
    with torch.device("meta"), _Undrawn():
        model = GPT(config, mesh)
        sample = torch.empty(batch, seq + 1, dtype=torch.int64)
    if mesh is not None:
        annotate(model, gpt_patterns(model))
    loss = loss or "whole"
    step = partial(lm_loss_without_logits, recompute=recompute) if loss == "fused" else lm_loss
    return Planned(name=name, model=model, step=step, sample=sample, loss=loss, positions=config.seq_len, ahead=1)


def huggingface_model(
    path: str,
    *,
    batch: int,
    seq: int,
    layers: int | None = None,
    stretch: bool = False,
    checkpointing: bool = True,
    lora: Lora | None = None,
    quantize: Callable[[nn.Module], object] | None = None,
    loss: Loss | None = None,
    recompute: bool = False,
) -> Planned:
    """The causal language model that a Hugging Face ``config.json``, or its directory, describes.

    Batch, sequence, layers, `stretch` and `recompute` are as in `named_model`; `quantize` is done to the model before
    it gets its adapters. A `loss` of None is `linear_cross_entropy` wherever the model allows it, as `sft` does.

    Raises:
        ConfigError: transformers is not installed, or the file is not the config of such a model, or `seq` is longer
            than it allows, or another number of `layers` is wanted of a config that has a setting for each.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("--config needs transformers: pip install transformers") from error
    if not Path(path).exists():
        raise ConfigError(f"cannot read {path!r}: no such file; expected a Hugging Face config.json or its directory")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        _resized(path, config, seq, layers, stretch=stretch)
        with torch.device("meta"), _Undrawn():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # transformers checks its settings with error types of its own
        raise ConfigError(f"{path!r} is not the config of a causal language model: {reason_of(error, path)}") from error
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) else None
    if positions is not None and seq > positions:
        raise ConfigError(f"seq={seq}: {path} has {positions} positions, give at most that many (--seq {positions})")
    model.train()
    with torch.device("meta"), _Undrawn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old names and unused defaults within the two libraries
        if quantize is not None:
            quantize(model)
        if lora is not None:
            model = adapted(model, lora, init=False)
        if checkpointing and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sample = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    loss = loss or causal_loss_of(model)
    step = partial(causal_loss_without_logits, recompute=recompute) if loss == "fused" else causal_loss
    return Planned(name=str(path), model=model, step=step, sample=sample, loss=loss, positions=positions)


def _resized(path: str, config: Any, seq: int, layers: int | None, *, stretch: bool) -> None:
    """Changes the number of layers and of positions of a Hugging Face config."""
    if layers is not None:
        had = getattr(config, "num_hidden_layers", None)
        listed = [name for name, value in config.to_dict().items() if isinstance(value, list) and len(value) == had]
        if had is None or listed:
            why = f"{listed[0]} has one entry a layer" if listed else "it has no num_hidden_layers"
            raise ConfigError(f"the number of layers of {path!r} cannot be changed: {why}; name another model")
        config.num_hidden_layers = layers
    positions = getattr(config, "max_position_embeddings", None)
    if stretch and isinstance(positions, int) and positions < seq:
        config.max_position_embeddings = seq


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a causal language model on rows of one text each."""
    with _one_text_a_row():
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def causal_loss_without_logits(model: nn.Module, tokens: Tensor, *, recompute: bool = False) -> Tensor:
    """Computes `causal_loss` by `linear_cross_entropy`, without logits; `recompute` is its argument."""
    with FusedLoss(model)(recompute=recompute):
        return causal_loss(model, tokens)


def causal_loss_of(model: nn.Module) -> Loss:
    """Which loss `sft` computes: without logits wherever the model allows it."""
    try:
        FusedLoss(model)
    except ConfigError:
        return "whole"
    return "fused"


@contextmanager
def _one_text_a_row() -> Iterator[None]:
    """While open, `transformers` knows that no row packs several texts, as it sees where positions have data.

    Otherwise it would make a mask of each row, which grows with the square of its tokens, and which no step has.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    find = getattr(masking_utils, name, None)
    if find is None:
        yield
        return
    setattr(masking_utils, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, find)


def _gpt(**shape: Any) -> GPTConfig:
    return GPTConfig(checkpoint="non_reentrant", **shape)


class _Undrawn(TorchFunctionMode):
    """Skips `torch.nn.init`, which costs time even for tensors without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
