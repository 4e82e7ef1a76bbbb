"""Models of transformers and peft: their folders, adapters, losses and trainers."""

from elixir_moe.hf.accelerate import CHECKPOINT
from elixir_moe.hf.fused_experts import adapt_beside
from elixir_moe.hf.fused_loss import WithoutLogits
from elixir_moe.hf.peft import base_of, has_own_adapters, is_peft_model
from elixir_moe.hf.save_pretrained import FolderWriter
from elixir_moe.hf.shipped import config_in, scheme_of, shipped_patterns
from elixir_moe.hf.steps import GoBack, StepCallback
from elixir_moe.hf.trainer import APART, ElixirMixin, lacking

__all__ = [
    "APART",
    "CHECKPOINT",
    "ElixirMixin",
    "FolderWriter",
    "GoBack",
    "StepCallback",
    "WithoutLogits",
    "adapt_beside",
    "base_of",
    "config_in",
    "has_own_adapters",
    "is_peft_model",
    "lacking",
    "scheme_of",
    "shipped_patterns",
]
