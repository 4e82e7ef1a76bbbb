"""LoRA on models without data, as peft adds it; and frozen parameters.

Owns the words that name adapters and their way to peft, which builds them. Adds no adapter of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from torch import nn

from elixir_moe.errors import ConfigError

ALL_LINEAR, EXPERTS = "all-linear", "experts"
_EXPECTED = f"expected r=16,targets={ALL_LINEAR},{EXPERTS} or names of modules in the place of {ALL_LINEAR}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Adapters of one rank on some modules; everything else is frozen."""

    r: int
    """Rank of the adapters."""
    targets: tuple[str, ...]
    """Names of modules, as ``target_modules`` of peft; "all-linear"; and "experts" for fused experts."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Adapters from a text such as ``r=16,targets=all-linear,experts``.

        Raises:
            ConfigError: the text says something else; the message says what was expected.
        """
        found: dict[str, list[str]] = {"r": [], "targets": []}
        key = ""
        for word in text.split(","):
            name, equals, value = word.strip().partition("=")
            key, value = (name, value) if equals else (key, name)
            if key not in found or not value:
                raise ConfigError(f"--lora {text!r}: {word!r} means nothing; {_EXPECTED}")
            found[key].append(value)
        (rank,) = found["r"] if len(found["r"]) == 1 else ("",)
        if not rank.isdecimal() or int(rank) < 1:
            raise ConfigError(f"--lora {text!r}: no rank of at least 1; {_EXPECTED}")
        targets = tuple(found["targets"]) or (ALL_LINEAR,)
        if ALL_LINEAR in targets and set(targets) - {ALL_LINEAR, EXPERTS}:
            raise ConfigError(f"--lora {text!r}: {ALL_LINEAR} has all modules already; {_EXPECTED}")
        return cls(r=int(rank), targets=targets)

    def __str__(self) -> str:
        return f"LoRA r={self.r} on {', '.join(self.targets)}"


def adapted(model: nn.Module, lora: Lora) -> nn.Module:
    """The model with peft's adapters, which alone are trained.

    Raises:
        ConfigError: peft is not installed, or the model lacks what `lora` names.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("--lora counts the adapters that peft adds: pip install peft") from error
    modules = [target for target in lora.targets if target != EXPERTS]
    fused = _fused_experts(model) if EXPERTS in lora.targets else []
    if EXPERTS in lora.targets and not fused:
        raise ConfigError(f"--lora: the model has no fused experts, leave {EXPERTS} out")
    config = peft.LoraConfig(
        r=lora.r,
        target_modules=ALL_LINEAR if modules == [ALL_LINEAR] else modules,
        target_parameters=fused or None,
        init_lora_weights=False,
    )
    try:
        found: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"--lora: peft refuses {', '.join(lora.targets)}: {str(error).partition('. ')[0]}") from error
    return found


def _fused_experts(model: nn.Module) -> list[str]:
    """Ends of the names of parameters that hold a matrix for each of several experts."""
    names = (name for name, p in model.named_parameters() if p.dim() == 3 and ".experts." in name)
    return sorted({".".join(name.rsplit(".", 2)[-2:]) for name in names})


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose names match one of the shell patterns.

    Raises:
        ConfigError: a pattern matches none, or nothing is left to train.
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
