"""The step that `sft` runs and `plan` prices where nothing else is given.

Owns one table, by TRL's names and ours. The values are TRL's own, so that a command for TRL means the same here, except
adapters: they are on all linear layers and on fused experts, have no dropout, and a learning rate of their own. Needs
neither torch nor TRL; a test compares the table with the parser of `sft`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elixir_tools.models.lora import Lora

_LORA = Lora()
SFT: Mapping[str, Any] = MappingProxyType(
    {
        "max_length": 1024,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "bf16": True,
        "gradient_checkpointing": True,
        "optim": "adamw_torch_fused",
        "loss_type": "nll",
        "lora_r": _LORA.r,
        "lora_alpha": _LORA.alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": None,
        "lora_target_parameters": None,
        "plan": "auto",
        "plan_master": None,
        "plan_moments": None,
        "plan_budget": None,
        "plan_batches_per_pass": None,
        "quantize": None,
        "tile": None,
    }
)
"""{argument of `sft`: its default}. The loss is computed without logits wherever the model allows that, and adapters
are on `adapters.default_targets`."""
LEARNING_RATE: Mapping[str, float] = MappingProxyType({"full": 2e-5, "adapters": 2e-4})
"""TRL's is that for all weights, ten times too low for adapters."""
FROZEN_IN = "nf4"
"""The format of frozen weights under QLoRA, unless the model is shipped in 4 or 8 bits."""
