"""Models to train: a GPT of dense and mixture-of-experts layers, its patterns and its loss.

The GPT is imported at its first use, and torch with it: shapes and settings need neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elixir_moe.models.config import GPTConfig

__all__ = ["GPT", "GPTConfig", "generate", "gpt_patterns", "lm_loss"]

if TYPE_CHECKING:
    from elixir_moe.models.gpt import GPT, generate, gpt_patterns, lm_loss
else:

    def __getattr__(name: str) -> Any:
        """Called for names that are not here yet."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("elixir_moe.models.gpt"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
