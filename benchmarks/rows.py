"""The rows of the table: who is measured against whom, and which ratio we hold ourselves to.

Owns the workloads and the limits. Add a row here and it is measured, printed and written.
"""

from dataclasses import dataclass, replace
from functools import partial

import elixir_moe as em
from benchmarks import deepspeed_peers, megatron_peers
from benchmarks.contenders import Build, ddp, dense_of_same_size, fsdp, fsdp_zero2, ours, plain
from benchmarks.workload import Workload
from elixir_moe.models.config import gpt_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison of step times."""

    name: str
    """What of ours is measured."""
    peer: str
    """What it is measured against."""
    workload: str
    """A key of `FULL`: what both train on."""
    ranks: int
    """Processes, of one CPU thread each."""
    ours: tuple[str, Build]
    """A key that rows share if they share the contender, and how to build it."""
    theirs: tuple[str, Build]
    limit: float | None = None
    """The ratio ours / theirs to stay at or below; None where none is set."""
    needs: str | None = None
    """The package without which the peer cannot run."""


_GPT = Workload(name="GPT-2 of 8 layers x 512, fp32, AdamW", model=gpt_config("gpt2-8x512"), batch=2)
_TINY = Workload(name="GPT of 2 layers x 64, fp32, AdamW", model=gpt_config("gpt-tiny"), batch=1)
_PR_MOE = Workload(
    name="PR-MoE of 4 layers x 256, experts 4 and 8, EP 2, capacity 1.25, bf16, AdamW",
    model=replace(
        gpt_config("gpt2-8x512"),
        n_layers=4,
        d_model=256,
        n_heads=4,
        experts=(0, 4, 0, 8),
        ep=(1, 2, 1, 2),
        residual=True,
        capacity_factor=1.25,
    ),
    batch=2,
    bf16=True,
)
_WIDE_MOE = replace(
    _PR_MOE,
    name="PR-MoE of 4 layers x 256, experts 32 and 64, EP 2, capacity 1.25, bf16, AdamW",
    model=replace(_PR_MOE.model, vocab_size=256, experts=(0, 32, 0, 64)),
)
FULL = {
    "gpt": _GPT,
    "megatron": replace(_GPT, name=f"Megatron-core's {_GPT.name}"),
    "pr-moe": _PR_MOE,
    "wide": _WIDE_MOE,
}
"""What is measured."""


def _small(workload: Workload) -> Workload:
    model = replace(workload.model, vocab_size=256, seq_len=64, d_model=64, n_heads=4)
    return replace(workload, name=f"a tiny model instead of {workload.name}", model=model, batch=1)


QUICK = {key: replace(_small(value)) for key, value in FULL.items()} | {"gpt": _TINY}
"""The same rows on models that take no time: to see that all works."""

_PLAIN, _DDP = ("plain", plain), ("ddp", ddp)
_FSDP, _FSDP_ZERO2 = ("fsdp", fsdp), ("fsdp-zero2", fsdp_zero2)
_DEEPSPEED_2 = ("deepspeed-zero2", partial(deepspeed_peers.zero, stage=2))
_DEEPSPEED_3 = ("deepspeed-zero3", partial(deepspeed_peers.zero, stage=3))
_REPLICATED = ("ours-ddp", partial(ours, plan=em.Plan.ddp()))
_ZERO2 = ("ours-zero2", partial(ours, plan=em.Plan.zero2()))
_ZERO3 = ("ours-zero3", partial(ours, plan=em.Plan.zero3(rcache_blocks=3)))
_MEGATRON = ("megatron-ddp", megatron_peers.ddp)
_OURS_MEGATRON = ("ours-megatron", partial(megatron_peers.ours, plan=em.Plan.zero2()))

ROWS = [
    Row(name="one process", peer="plain torch", workload="gpt", ranks=1, ours=_REPLICATED, theirs=_PLAIN, limit=1.03),
    Row(name="zero2", peer="DDP", workload="gpt", ranks=2, ours=_ZERO2, theirs=_DDP, limit=1.0),
    Row(name="zero2", peer="FSDP2, kept gathered", workload="gpt", ranks=2, ours=_ZERO2, theirs=_FSDP_ZERO2),
    Row(
        name="zero2",
        peer="DeepSpeed ZeRO-2",
        workload="gpt",
        ranks=2,
        ours=_ZERO2,
        theirs=_DEEPSPEED_2,
        needs="deepspeed",
    ),
    Row(name="zero2", peer="plain torch, no communication", workload="gpt", ranks=2, ours=_ZERO2, theirs=_PLAIN),
    Row(name="zero3, 3 blocks", peer="FSDP2", workload="gpt", ranks=2, ours=_ZERO3, theirs=_FSDP, limit=0.8),
    Row(
        name="zero3, 3 blocks",
        peer="DeepSpeed ZeRO-3",
        workload="gpt",
        ranks=2,
        ours=_ZERO3,
        theirs=_DEEPSPEED_3,
        limit=0.72,
        needs="deepspeed",
    ),
    Row(
        name="Megatron-core, zero2",
        peer="Megatron-core's DDP",
        workload="megatron",
        ranks=2,
        ours=_OURS_MEGATRON,
        theirs=_MEGATRON,
        limit=1.0,
    ),
    Row(
        name="PR-MoE, zero3",
        peer="DeepSpeed PR-MoE, ZeRO-2",
        workload="pr-moe",
        ranks=2,
        ours=_ZERO3,
        theirs=("deepspeed-moe", deepspeed_peers.pr_moe),
        limit=0.8,
        needs="deepspeed",
    ),
    Row(
        name="PR-MoE, zero2",
        peer="dense GPT of as many parameters, ours",
        workload="wide",
        ranks=2,
        ours=_ZERO2,
        theirs=("ours-dense", dense_of_same_size),
        limit=round(1 / 5.3, 4),
    ),
]
