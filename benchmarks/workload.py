"""The workload: a model's shape, a batch, a dtype.

Owns `Workload` and the weights all contenders start from.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT

SEED = 20240607
BUCKET_NUMEL = 4_000_000
"""Elements of a peer's gradient buckets: their defaults are longer than the model, and no reduction would overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The workload of all contenders of a row."""

    name: str
    model: GPTConfig
    batch: int
    """Sequences a rank and step."""
    bf16: bool = False
    """Forward and backward in bf16, with fp32 masters; else fp32."""


def fresh_model(config: GPTConfig, mesh: DeviceMesh | None = None) -> GPT:
    """The model all contenders start from; `mesh` spreads its experts."""
    torch.manual_seed(SEED)
    return GPT(config, mesh)
