"""The public names, each with the file that it comes from; everything else is internal and may move.

Owns the list. `elixir_moe` imports this file at the first use of a name.
"""

from elixir_moe.accumulate import accumulate
from elixir_moe.chunks.ledger import Footprint
from elixir_moe.chunks.plan import AutoPlan, Plan, Tier
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    ElixirError,
    LayoutError,
    OutOfStepError,
    PlanError,
    TierError,
    UsageError,
)
from elixir_moe.hf.fused_experts import group_experts
from elixir_moe.hf.save_pretrained import save_pretrained
from elixir_moe.inspect import Inspection, inspect
from elixir_moe.linear_cross_entropy import linear_cross_entropy
from elixir_moe.moe.layer import MoE
from elixir_moe.optim.muon import Muon
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel import megatron
from elixir_moe.parallel.mesh import expert_mesh, init_mesh
from elixir_moe.parallel.pattern import Pattern
from elixir_moe.parallel.rules import annotate
from elixir_moe.quantized.convert import dequantize, quantize
from elixir_moe.runtime.param_access import unsharded
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.save import Saving, save
from elixir_moe.state.checkpoint.storage import latest
from elixir_moe.state.full import full_state_dict
from elixir_moe.wrap import wrap
from elixir_moe.wrapping.deferred_init import sharded_init
from elixir_moe.wrapping.expert_parallel import spread_experts
from elixir_moe.wrapping.tiling import tile

__all__ = [
    "AutoPlan",
    "CheckpointError",
    "ConfigError",
    "DiskError",
    "ElixirError",
    "Footprint",
    "Inspection",
    "LayoutError",
    "MoE",
    "Muon",
    "OutOfStepError",
    "Pattern",
    "Plan",
    "PlanError",
    "Saving",
    "ShardedOptimizer",
    "Statistics",
    "Tier",
    "TierError",
    "UsageError",
    "accumulate",
    "annotate",
    "dequantize",
    "expert_mesh",
    "full_state_dict",
    "group_experts",
    "init_mesh",
    "inspect",
    "latest",
    "linear_cross_entropy",
    "load",
    "megatron",
    "quantize",
    "save",
    "save_pretrained",
    "sharded_init",
    "spread_experts",
    "tile",
    "unsharded",
    "wrap",
]
