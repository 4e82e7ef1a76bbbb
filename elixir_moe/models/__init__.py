"""Models to train: a GPT of dense and mixture-of-experts layers, its patterns and its loss."""

from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, generate, gpt_patterns, lm_loss

__all__ = ["GPT", "GPTConfig", "generate", "gpt_patterns", "lm_loss"]
