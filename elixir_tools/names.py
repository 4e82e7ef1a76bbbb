"""Names that settings and arguments of the programs choose among.

Owns only the names, without torch, so that help is quick. The meaning of a name is where it is used.
"""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""{short name: torch's name}."""
COSINE = "cosine"
"""The schedule of `train` that is not a scheduler of torch."""


def short_dtype(name: str) -> str:
    """The short name of a dtype, also from torch's; another text as it is."""
    return next((short for short, long in DTYPES.items() if name in (long, f"torch.{long}")), name)


PLANS = ("ddp", "zero2", "zero3", "offload", "disk", "auto")
"""Plans that `verify` has by name."""
TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
"""{command: prefix of the names of TRL's trainer and of its config}."""
OPTIMIZERS = {
    "adamw": 2,
    "adam": 2,
    "adamw-amsgrad": 3,
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "muon": 2,  # of AdamW, which has all that Muon does not take
}
"""{optimizer: fp32 values that it keeps per element}, as `optim.accepted.moments_of` counts them."""
UNQUANTIZED = "none"
"""The value of `--quantize` for weights in full, however the checkpoint is shipped."""
LARGEST = {"model": ("layers", 512), "batch": ("sequences", 2**16), "seq": ("tokens", 2**20)}
"""{what is searched: (unit, largest size tried)}."""
