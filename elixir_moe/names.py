"""Names that settings and arguments choose among.

Owns the names alone, without torch, so that help is quick. What a name stands for is said where it is used.
"""

from typing import Literal

Master = Literal["fp32", "bf16"]
"""How weights are kept for the update."""
Moments = Literal["fp32", "bf16", "int8"]
"""How Adam's moments are kept."""
SchemeName = Literal["nf4", "mxfp4", "fp8", "int8"]
"""Formats of frozen weights."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""{short name: torch's name}."""


def short_dtype(name: str) -> str:
    """The short name of a dtype, also from torch's; another text as it is."""
    return next((short for short, long in DTYPES.items() if name in (long, f"torch.{long}")), name)


PLANS = ("ddp", "zero2", "zero3", "offload", "disk", "auto")
"""Plans that `verify` has by name."""
PEERS = ("ddp", "fsdp2", "deepspeed", "deepspeed-2", "deepspeed-1", "hf-ep")
"""Ways of other libraries to train, which `verify` compares."""
TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
"""{command: prefix of the names of TRL's trainer and of its config}."""
