"""LoRA on models without data, as peft adds it; and frozen parameters.

Owns the words that name adapters and their way to peft, which builds them. Adds no adapter of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from elixir_moe.errors import ConfigError, did_you_mean
from elixir_moe.ext.hf import run_adapters_unmerged
from elixir_moe.ext.models import SCALES
from elixir_tools.models.lora import ALL_LINEAR, EXPERTS, Lora

_ROUTER_NAMES = {"router", "gate"}
"""Last or last but one part of the name of a router's weight."""
_MAMBAS = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Kinds of models in which peft refuses adapters of `_READ_BY_KERNELS`."""
_READ_BY_KERNELS = ["conv1d", "out_proj"]
"""Layers whose weights Mamba's kernels read by themselves, so that adapters on them would not run."""


def adapted(model: nn.Module, lora: Lora, *, init: bool = True) -> nn.Module:
    """Adds adapters as `with_adapters` does; those of fused experts are multiplied separately from their weights."""
    found = with_adapters(model, lora, init=init)
    run_adapters_unmerged(found)
    return found


def check_targets(model: nn.Module, lora: Lora) -> None:
    """Raises ConfigError if a target matches nothing in the model."""
    modules = [target for target in lora.targets if target not in (ALL_LINEAR, EXPERTS)]
    for targets, names in (
        (modules, [name for name, _ in model.named_modules()]),
        (lora.parameters, [name for name, _ in model.named_parameters()]),
    ):
        for target in targets:
            if not any(f".{name}".endswith(f".{target}") for name in names):
                hint = did_you_mean(target, {name.rpartition(".")[2] for name in names} | set(names))
                raise ConfigError(
                    f"targets of --lora: {target} matches nothing in {type(model).__name__}{hint and f'; {hint}'}"
                )
    if EXPERTS in lora.targets and not fused_experts(model):
        raise ConfigError(
            f"targets of --lora: {EXPERTS} matches nothing: {type(model).__name__} has no "
            f"parameter of three dims in a module called experts; name them with parameters= or targets="
        )


def with_adapters(model: nn.Module, lora: Lora, *, init: bool = True) -> nn.Module:
    """The model with peft's adapters, of which only these are trained.

    With `init` they are drawn as by peft, so that the model is the base at first. Otherwise no factor is zero, so that
    all get a gradient at once.

    Raises:
        ConfigError: peft is not installed, or refuses what `lora` names, or the model lacks it; or peft takes a router
            for a linear layer.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora adds the adapters of peft: pip install peft") from error
    check_targets(model, lora)
    targets = lora.targets or (() if lora.parameters else default_targets(model))
    modules, parameters = peft_targets(model, targets, lora.parameters)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=modules,
        target_parameters=parameters or None,
        exclude_modules=excluded_modules(model, targets),
        init_lora_weights=init,
    )
    try:
        found: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"--lora: peft refuses {lora}: {str(error).partition('. ')[0]}") from error
    refuse_routers(found)
    return found


def refuse_routers(model: nn.Module) -> None:
    """Raises ConfigError if peft has taken a router for a linear layer: it would add its product to a tuple."""
    for name, module in _with_factors(model):
        base = type(module.get_base_layer())
        if isinstance(module.get_base_layer(), nn.Linear) and base.__name__.endswith("Router"):
            raise ConfigError(
                f"peft adapts {name!r} as a linear layer, but a {base.__name__} returns more than a product: name "
                f"targets without routers, such as {_without_routers(model)}"
            )


def adapted_modules(model: nn.Module) -> Counter[str]:
    """The modules that have adapters, by the ends of their names, and how many there are of each."""
    paths = ([part for part in name.split(".") if not part.isdigit()] for name, _ in _with_factors(model))
    return Counter(".".join(path[-2:]) for path in paths)


def _with_factors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name in the base, module of peft) of all that has adapters; of a parameter, with its name."""
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
            parts = [part for part in path.removeprefix("base_model.model.").split(".") if part != "base_layer"]
            yield ".".join([*parts, *filter(None, [getattr(module, "parameter_name", None)])]), module


def _is_router(name: str) -> bool:
    """Whether a module, or a parameter, is that of a router, by the names that mixtures give them."""
    return not _ROUTER_NAMES.isdisjoint(name.split(".")[-2:])


def _without_routers(model: nn.Module) -> str:
    """Targets that have all adapted modules but the routers."""
    paths = [name.split(".") for name, _ in _with_factors(model) if not _is_router(name)]
    ends = [EXPERTS if "experts" in path[-2:-1] else path[-1] for path in paths]
    return ",".join(dict.fromkeys(ends))


def default_targets(model: nn.Module) -> tuple[str, ...]:
    """The targets of adapters by default: all linear layers, and fused experts if there are any."""
    return (ALL_LINEAR, EXPERTS) if fused_experts(model) else (ALL_LINEAR,)


def excluded_modules(model: nn.Module, targets: Iterable[str]) -> list[str] | None:
    """peft's `exclude_modules` for targets among which "all-linear" means all linear layers that peft can adapt."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return _READ_BY_KERNELS if ALL_LINEAR in targets and kind in _MAMBAS else None


def peft_targets(
    model: nn.Module, targets: Iterable[str], parameters: Iterable[str]
) -> tuple[str | list[str], list[str]]:
    """peft's `target_modules` and `target_parameters` for targets among which "experts" means all fused experts."""
    targets = list(targets)
    modules = [target for target in targets if target != EXPERTS]
    stacks = fused_experts(model) if EXPERTS in targets else []
    return ALL_LINEAR if modules == [ALL_LINEAR] else modules, [*parameters, *stacks]


def fused_experts(model: nn.Module) -> list[str]:
    """Ends of the names of parameters that hold a matrix for each of several experts."""
    paths = [name.split(".") for name, p in model.named_parameters() if p.dim() == 3 and not name.endswith(SCALES)]
    return sorted({".".join(path[-2:]) for path in paths if len(path) > 1 and "experts" in path[-2]})


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose names match one of the shell patterns.

    Raises ConfigError if a pattern matches none, or nothing is left to train.
    """
    for pattern in patterns:
        matched = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matched:
            some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise ConfigError(f"--freeze {pattern!r} matches no parameter; names are as {some}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("--freeze leaves no parameter to train")
