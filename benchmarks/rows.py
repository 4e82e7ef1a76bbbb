"""The rows of the table: who is measured against whom, and which ratio we hold ourselves to.

Owns the workloads and the limits. Add a row here and it is measured, printed and written.
"""

from dataclasses import dataclass
from functools import partial

import elixir_moe as em
from benchmarks.contenders import Build, ddp, fsdp, fsdp_zero2, ours, plain
from elixir_moe.models.config import GPTConfig, gpt_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison of step times."""

    name: str
    """What of ours is measured."""
    peer: str
    """What it is measured against."""
    ranks: int
    """Processes, of one CPU thread each."""
    ours: tuple[str, Build]
    """A key that rows share if they share the contender, and how to build it."""
    theirs: tuple[str, Build]
    limit: float | None = None
    """The ratio ours / theirs to stay at or below; None where none is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What every contender trains on."""

    name: str
    model: GPTConfig
    batch: int
    """Sequences a rank and step."""


FULL = Workload(name="GPT-2 of 8 layers x 512, fp32, AdamW", model=gpt_config("gpt2-8x512"), batch=2)
QUICK = Workload(name="GPT of 2 layers x 64, fp32, AdamW", model=gpt_config("gpt-tiny"), batch=1)

_PLAIN, _DDP = ("plain", plain), ("ddp", ddp)
_FSDP, _FSDP_ZERO2 = ("fsdp", fsdp), ("fsdp-zero2", fsdp_zero2)
_REPLICATED = ("ours-ddp", partial(ours, plan=em.Plan.ddp()))
_ZERO2 = ("ours-zero2", partial(ours, plan=em.Plan.zero2()))
_ZERO3 = ("ours-zero3", partial(ours, plan=em.Plan.zero3(rcache_blocks=3)))

ROWS = [
    Row(name="one process", peer="plain torch", ranks=1, ours=_REPLICATED, theirs=_PLAIN, limit=1.03),
    Row(name="zero2", peer="DDP", ranks=2, ours=_ZERO2, theirs=_DDP, limit=1.0),
    Row(name="zero2", peer="FSDP2, kept gathered", ranks=2, ours=_ZERO2, theirs=_FSDP_ZERO2),
    Row(name="zero2", peer="plain torch, no communication", ranks=2, ours=_ZERO2, theirs=_PLAIN),
    Row(name="zero3, 3 blocks", peer="FSDP2", ranks=2, ours=_ZERO3, theirs=_FSDP, limit=0.8),
]
