"""Models of transformers and peft: their folders, adapters and losses."""

from elixir_moe.hf.fused_experts import run_adapters_unmerged
from elixir_moe.hf.fused_loss import FusedLoss
from elixir_moe.hf.peft import base_of, has_own_adapters, is_peft_model
from elixir_moe.hf.save_pretrained import FolderWriter
from elixir_moe.hf.shipped import config_in, scheme_of, shipped_patterns
