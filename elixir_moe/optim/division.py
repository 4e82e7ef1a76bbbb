"""Muon and an elementwise optimizer for a model, where a user names only the optimizers.

Owns the rule that divides the parameters between the two, by which `plan` prices Muon and the trainers build it. Never
steps or wraps anything.
"""

import re
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from elixir_moe.chunks.param_spec import has_narrow_state
from elixir_moe.errors import ConfigError, did_you_mean
from elixir_moe.hf.peft import adapters
from elixir_moe.optim.joined import join
from elixir_moe.optim.muon import Muon
from elixir_moe.parallel.tiles import tile_of

_BIAS = re.compile(r"bias$|\bb_\w+$")
"""Biases of experts, which have two dims, in Hugging Face's mixtures and in this library."""
_NOT_LINEAR = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights Muon does not train, though they have two or more dims."""


def matrices_of_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of what Muon trains: the matrices of repeated layers, those of their experts too.

    Another optimizer trains the rest: embeddings and heads, norms, routers, biases, convolutions, adapters, vectors
    that are stored as matrices of one row or column, and tiles of matrices.
    """
    others = set(adapters(model))
    others.update(p for module in model.modules() if isinstance(module, _NOT_LINEAR) for p in module.parameters(False))
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad
        and p not in others
        and has_narrow_state(name, p.shape, None)
        and min(p.shape[-2:]) > 1
        and not _BIAS.search(name)
        and (tile_of(p) is None or p.dim() > 2)
    }


def divided(
    optimizer: torch.optim.Optimizer, model: nn.Module, lr: float, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Returns Muon for the `matrices_of_layers` of a model, and `optimizer`, which has all parameters, for the rest.

    Muon's groups are those of `optimizer`, with its weight decay in each.

    Args:
        optimizer: elementwise and not yet stepped; loses the matrices.
        model: the model.
        lr: Muon's learning rate. One rate serves both, since `adjust_lr_fn` is "match_rms_adamw" by default.
        options: further options of `Muon`, also instead of these.

    Raises:
        ConfigError: no matrix of a layer is trained, or an option is wrong.
    """
    mine = set(matrices_of_layers(model).values())
    if not mine:
        raise ConfigError(
            "Muon trains the matrices of layers and experts, and none of these is trainable (adapters are not among "
            "them): leave Muon out"
        )
    known = {*signature(torch.optim.Muon).parameters, *signature(Muon).parameters} - {"params", "options"}
    for name in options:
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise ConfigError(f"Muon has no option {name!r}{hint and f'; {hint}'}; its options are {sorted(known)}")
    decay = options.get("weight_decay")
    try:
        groups = list(_taken(optimizer, mine, decay))
        muon = Muon(groups, **{"lr": lr, "adjust_lr_fn": "match_rms_adamw", **options})
    except (TypeError, ValueError) as error:  # with which torch refuses values
        raise ConfigError(f"Muon with {dict(options)}: {error}") from error
    return join([muon, optimizer] if optimizer.param_groups else [muon])


def _taken(optimizer: torch.optim.Optimizer, mine: set[nn.Parameter], decay: float | None) -> Iterator[dict[str, Any]]:
    """Takes the parameters in `mine` from an optimizer; yields them in groups with its weight decay or `decay`."""
    before, optimizer.param_groups = optimizer.param_groups, []
    for group in before:
        taken = [p for p in group["params"] if p in mine]
        group["params"] = [p for p in group["params"] if p not in mine]
        for p in taken:
            optimizer.state.pop(p, None)  # Adagrad begins with one
        if taken:
            yield {"params": taken, "weight_decay": group.get("weight_decay", 0.0) if decay is None else decay}
        if group["params"]:
            optimizer.param_groups.append(group)
