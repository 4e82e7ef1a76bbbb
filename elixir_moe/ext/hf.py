"""Models of transformers and peft: their folders, adapters, losses and trainers."""

from elixir_moe.hf.accelerate import CHECKPOINT_FOLDER
from elixir_moe.hf.fused_experts import run_adapters_unmerged
from elixir_moe.hf.fused_loss import FusedLoss
from elixir_moe.hf.peft import base_of, has_own_adapters, is_peft_model
from elixir_moe.hf.save_pretrained import FolderWriter
from elixir_moe.hf.shipped import config_in, scheme_of, shipped_patterns
from elixir_moe.hf.steps import GoBack, StepCallback
from elixir_moe.hf.trainer import SET_ASIDE_FOLDER, ElixirMixin, why_incomplete

__all__ = [
    "SET_ASIDE_FOLDER",
    "CHECKPOINT_FOLDER",
    "ElixirMixin",
    "FolderWriter",
    "GoBack",
    "StepCallback",
    "FusedLoss",
    "run_adapters_unmerged",
    "base_of",
    "config_in",
    "has_own_adapters",
    "is_peft_model",
    "why_incomplete",
    "scheme_of",
    "shipped_patterns",
]
