"""The words of ``--lora``, which say which adapters a model gets.

Owns their meaning and their checks. Knows no model, and needs no torch: `adapters` gives a model to peft.
"""

from dataclasses import dataclass
from typing import Annotated, Self

from elixir_moe.errors import ConfigError
from elixir_moe.ext.records import at_least, check

ALL_LINEAR, EXPERTS = "all-linear", "experts"
_EXPECTED = f"expected words such as r=16,alpha=32,targets={ALL_LINEAR},{EXPERTS},parameters=NAME"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Adapters of one rank on some modules and parameters; everything else is frozen."""

    r: Annotated[int, at_least(1)] = 16
    """Rank of the adapters."""
    alpha: Annotated[int, at_least(1)] = 32
    """Numerator of their scale, which is alpha / r."""
    targets: tuple[str, ...] = ()
    """Ends of names of modules; "all-linear", as in peft; and "experts" for fused experts. Empty: all-linear, and
    experts where the model has fused ones, unless parameters are named."""
    parameters: tuple[str, ...] = ()
    """Ends of names of parameters."""

    def __post_init__(self) -> None:
        check(self, "lora")
        if ALL_LINEAR in self.targets and set(self.targets) - {ALL_LINEAR, EXPERTS}:
            raise ConfigError(f"lora.targets: {ALL_LINEAR} has all modules already, got {', '.join(self.targets)}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Adapters from a string such as ``r=16,targets=all-linear,experts``; an empty one means the defaults.

        Raises:
            ConfigError: the text says something else; the message says what was expected.
        """
        found: dict[str, list[str]] = {"r": [], "alpha": [], "targets": [], "parameters": []}
        key = "targets"
        for word in text.split(",") if text else ():
            name, equals, value = word.strip().partition("=")
            if not equals:
                name, value = key, name
            if name not in found or not value:
                raise ConfigError(f"--lora {text!r}: {word!r} is not known; {_EXPECTED}")
            found[name].append(value)
            key = "parameters" if name == "parameters" else "targets"
        numbers: dict[str, int] = {}
        for name in ("r", "alpha"):
            if found[name]:
                if len(found[name]) > 1 or not found[name][0].isdecimal() or int(found[name][0]) < 1:
                    raise ConfigError(f"--lora {text!r}: {name} must be one number of at least 1; {_EXPECTED}")
                numbers[name] = int(found[name][0])
        try:
            return cls(**numbers, targets=tuple(found["targets"]), parameters=tuple(found["parameters"]))
        except ConfigError as error:
            raise ConfigError(f"--lora {text!r}: {error}; {_EXPECTED}") from None

    def __str__(self) -> str:
        on = ", ".join(self.targets + self.parameters) or "all linear layers and experts"
        return f"LoRA r={self.r} on {on}"
