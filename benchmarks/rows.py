"""The rows of the table: who is measured against whom, and which ratio we hold ourselves to.

Owns the workloads and the limits. Add a row here and it is measured, printed and written.
"""

from dataclasses import dataclass, replace
from functools import partial

import elixir_moe as em
from benchmarks import deepspeed_peers, megatron_peers
from benchmarks.contenders import (
    MICRO_BATCHES,
    Build,
    ddp,
    dense_of_same_size,
    fsdp,
    fsdp_accumulating,
    fsdp_zero2,
    ours,
    ours_in_one_pass,
    plain,
)
from benchmarks.workload import Workload
from elixir_tools.models.config import GPTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison of step times."""

    name: str
    """Our contender."""
    peer: str
    """The peer that it is measured against."""
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


_GPT_8 = GPTConfig(vocab_size=8192, seq_len=256, n_layers=8, d_model=512, n_heads=8)
_GPT = Workload(name="GPT-2 of 8 layers x 512, fp32, AdamW", model=_GPT_8, batch=2)
_TINY = Workload(
    name="GPT of 2 layers x 64, fp32, AdamW", model=GPTConfig(seq_len=64, n_layers=2, d_model=64, n_heads=4), batch=1
)
_PR_MOE = Workload(
    name="PR-MoE of 4 layers x 256, experts 4 and 8, EP 2, capacity 1.25, bf16, AdamW",
    model=replace(
        _GPT_8,
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
_GPT_12 = Workload(
    name="GPT of 12 layers x 768, fp32, AdamW",
    model=replace(_GPT_8, n_layers=12, d_model=768, n_heads=12, vocab_size=256, experts=(), ep=()),
    batch=2,
)
_MICRO = f"{MICRO_BATCHES} micro-batches of a sequence, a checkpoint for each block"
_GPT_MICRO = replace(
    _GPT, name=f"{_GPT.name}, {_MICRO}", model=replace(_GPT_8, checkpoint="non_reentrant"), batch=MICRO_BATCHES
)
_GPT_12_MICRO = replace(
    _GPT_12,
    name=f"{_GPT_12.name}, {_MICRO}",
    model=replace(_GPT_12.model, checkpoint="non_reentrant"),
    batch=MICRO_BATCHES,
)
FULL = {
    "gpt": _GPT,
    "gpt-micro": _GPT_MICRO,
    "gpt-12-micro": _GPT_12_MICRO,
    "gpt-12": _GPT_12,
    "megatron": replace(_GPT, name=f"Megatron-core's {_GPT.name}"),
    "pr-moe": _PR_MOE,
    "wide": _WIDE_MOE,
}
"""{key: the workload that is measured}."""


def _small(workload: Workload) -> Workload:
    model = replace(workload.model, vocab_size=256, seq_len=64, d_model=64, n_heads=4)
    batch = MICRO_BATCHES if workload.batch == MICRO_BATCHES else 1
    return replace(workload, name=f"a tiny model instead of {workload.name}", model=model, batch=batch)


QUICK = {key: _small(value) for key, value in FULL.items()} | {"gpt": _TINY}
"""The workloads with tiny models, to see that everything works."""

_PLAIN, _DDP = ("plain", plain), ("ddp", ddp)
_FSDP, _FSDP_ZERO2 = ("fsdp", fsdp), ("fsdp-zero2", fsdp_zero2)
_DEEPSPEED_2 = ("deepspeed-zero2", partial(deepspeed_peers.zero, stage=2))
_DEEPSPEED_3 = ("deepspeed-zero3", partial(deepspeed_peers.zero, stage=3))
_REPLICATED = ("ours-ddp", partial(ours, plan=em.Plan.ddp()))
_ZERO2 = ("ours-zero2", partial(ours, plan=em.Plan.zero2()))
_ZERO3 = ("ours-zero3", partial(ours, plan=em.Plan.zero3(rcache_blocks=3)))
_DEEPSPEED_OFFLOAD = ("deepspeed-offload", partial(deepspeed_peers.zero, stage=3, offload=True))
_DEEPSPEED_MOE = ("deepspeed-moe", deepspeed_peers.pr_moe)
_OFFLOAD = ("ours-offload", partial(ours, plan=em.Plan.offload(rcache_blocks=3)))
_MEGATRON = ("megatron-ddp", megatron_peers.ddp)
_ONE_PASS = ("ours-one-pass", partial(ours_in_one_pass, plan=em.Plan.zero3(rcache_blocks=3)))
_FSDP_MICRO = ("fsdp-micro", partial(fsdp_accumulating, kept_gathered=False))
_FSDP_GATHERED_MICRO = ("fsdp-gathered-micro", partial(fsdp_accumulating, kept_gathered=True))
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
        name="zero3, one pass",
        peer="FSDP2, 8 micro-batches",
        workload="gpt-micro",
        ranks=2,
        ours=_ONE_PASS,
        theirs=_FSDP_MICRO,
        limit=0.8,
    ),
    Row(
        name="zero3, one pass",
        peer="FSDP2, kept gathered over 8 micro-batches",
        workload="gpt-micro",
        ranks=2,
        ours=_ONE_PASS,
        theirs=_FSDP_GATHERED_MICRO,
        limit=1.0,
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
        theirs=_DEEPSPEED_MOE,
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

_COMPUTE = "pure compute: plain torch, no communication"
BEYOND_COMPUTE = [
    Row(name=name, peer=_COMPUTE, workload=workload, ranks=2, ours=contender, theirs=_PLAIN, needs=needs)
    for workload, name, contender, needs in (
        ("gpt", "zero2", _ZERO2, None),
        ("gpt", "zero3, 3 blocks", _ZERO3, None),
        ("gpt", "DDP's own step", _DDP, None),
        ("gpt", "FSDP2's own step, kept gathered", _FSDP_ZERO2, None),
        ("gpt", "FSDP2's own step", _FSDP, None),
        ("gpt", "DeepSpeed ZeRO-2's own step", _DEEPSPEED_2, "deepspeed"),
        ("gpt", "DeepSpeed ZeRO-3's own step", _DEEPSPEED_3, "deepspeed"),
        ("pr-moe", "PR-MoE, zero2", _ZERO2, None),
        ("pr-moe", "PR-MoE, zero3", _ZERO3, None),
        ("pr-moe", "DeepSpeed PR-MoE's own step, ZeRO-2", _DEEPSPEED_MOE, "deepspeed"),
    )
]
"""How much longer a step takes than its arithmetic by itself: the ratio less one is what holding it together costs."""

PEAKS = [
    Row(
        name=f"{name}: peak memory of a rank",
        peer=peer,
        workload=workload,
        ranks=2,
        ours=mine,
        theirs=theirs,
        needs=needs,
    )
    for workload, name, mine, peer, theirs, needs in (
        ("gpt-12", "zero2", _ZERO2, "DDP", _DDP, None),
        ("gpt-12", "zero2", _ZERO2, "FSDP2, kept gathered", _FSDP_ZERO2, None),
        ("gpt-12", "zero2", _ZERO2, "DeepSpeed ZeRO-2", _DEEPSPEED_2, "deepspeed"),
        ("gpt-12", "zero3, 3 blocks", _ZERO3, "FSDP2", _FSDP, None),
        ("gpt-12", "zero3, 3 blocks", _ZERO3, "DeepSpeed ZeRO-3", _DEEPSPEED_3, "deepspeed"),
        ("gpt-12", "offload, 3 blocks", _OFFLOAD, "DeepSpeed ZeRO-3, offloaded", _DEEPSPEED_OFFLOAD, "deepspeed"),
        ("gpt-12-micro", "zero3, one pass", _ONE_PASS, "FSDP2, 8 micro-batches", _FSDP_MICRO, None),
        (
            "gpt-12-micro",
            "zero3, one pass",
            _ONE_PASS,
            "FSDP2, kept gathered over 8 micro-batches",
            _FSDP_GATHERED_MICRO,
            None,
        ),
    )
]
"""Bytes instead of times."""
