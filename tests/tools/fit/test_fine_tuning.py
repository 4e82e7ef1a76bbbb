"""What `elixir-moe plan` says of a fine-tuning, against what a run under the plan it names holds.

Small real models of Hugging Face, all of them trained or peft's adapters alone. The library's bytes agree exactly.
"""

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe.moe import experts
from elixir_moe.planner import cost
from elixir_moe.planner.events import Recorder, peak_of
from elixir_moe.planner.solve import PlanCandidate, Task, price, solve
from elixir_moe.runtime.units import find_parts
from elixir_tools.cli.arguments import add_plan
from elixir_tools.fit import gpus
from elixir_tools.fit.tasks import DTYPES, model_of, named, task_of
from elixir_tools.models.adapters import adapted
from elixir_tools.models.lora import Lora
from tests.support.cases import placed, with_further
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROWS, SEQ, VOCAB = 2, 64, 64
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixture": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **SHAPE, **EXPERTS},
    "dense": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE},
}
LORA = {"mixture": "r=4,targets=all-linear,experts", "dense": "r=4"}
LORA |= dict.fromkeys(("nf4", "mxfp4"), "r=4,targets=q_proj,v_proj,experts")
WIDE = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": CONFIGS["mixture"] | WIDE | {"moe_intermediate_size": 64},
    "mxfp4": {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **WIDE}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"}},
}
"""By scheme; gpt-oss's config names it."""


def asked(folder: Path, name: str, lora: bool, *further: str) -> argparse.Namespace:
    """The arguments of `elixir-moe plan` for one of the models."""
    path = folder / "config.json"
    path.write_text(json.dumps(QUANTIZED.get(name) or CONFIGS[name]))
    given = [str(path), "--gpu", "rtx-4090", "--batch", str(ROWS), "--seq", str(SEQ), "--loss", "whole", *further]
    parser = argparse.ArgumentParser()
    add_plan(parser)
    return parser.parse_args([*given, *(["--lora", LORA[name]] if lora else [])])


def task_asked(known: argparse.Namespace) -> Task:
    """The planning problem, on ranks that talk over gloo."""
    machine = gpus.with_disk(gpus.machine(known.gpu, known.gpus), 10**12, None)
    task = task_of(known, machine, model_of(known, None), known.batch, known.seq)
    return replace(task, over_gloo=True)


def real(path: str, lora: str | None, dtype: torch.dtype, checkpointing: bool, scheme: str | None = None) -> Any:
    """The model as a user builds it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path)
    config.use_cache = False
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype).train()
    if scheme is not None:
        em.quantize(model.requires_grad_(False), scheme, targets=["*.experts"] if scheme == "mxfp4" else None)
    if lora is not None:
        model = adapted(model, Lora.parse(lora))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def tokens(step: int = 0, rank: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(10 * step + rank))


def test_a_loss_without_logits_knows_a_head_in_tiles(tmp_path: Path) -> None:
    known = asked(tmp_path, "dense", False, "--loss", "fused")
    given = model_of(known, None)
    em.tile(given.model, at_most=VOCAB * SHAPE["hidden_size"])  # half of the head's fp32 bytes, and less
    assert type(given.model.lm_head).__name__ == "TiledLinear"
    assert task_of(known, gpus.machine(known.gpu, known.gpus), given, known.batch, known.seq).profile.flops > 0


# -------------------------------------------------------------------------------------------------------- activations


ACTIVATIONS = [
    (n, a, d, c) for n in CONFIGS for a in (False, True) for d in ("fp32", "bf16") for c in ("layers", "none")
]


@pytest.mark.parametrize(
    ("name", "lora", "dtype", "checkpointing"),
    with_further(ACTIVATIONS, (("mixture", True, "bf16", "layers"), ("dense", False, "fp32", "none"))),
)
def test_activations_are_those_of_a_real_step(
    name: str, lora: bool, dtype: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "emulates", lambda _: False)  # a CPU without products in bf16 makes copies in fp32
    known = asked(tmp_path, name, lora, "--dtype", dtype, "--checkpointing", checkpointing)
    predicted = task_asked(known).profile.activation_bytes
    model = real(named(known).config, known.lora, DTYPES[dtype], checkpointing == "layers")
    if dtype == "bf16":
        model.to(torch.bfloat16)  # adapters too, as under compute_dtype
    with Recorder(model, find_parts(model), []) as recorder:
        loss_of(model, tokens()).backward()
    assert predicted == pytest.approx(peak_of(recorder.events), rel=0.01)


# ------------------------------------------------------------------------------------------------------- bytes by tier


PLANS = {
    "device": em.Plan.zero3(rcache_blocks=12, chunk_numel=8192),
    "host": em.Plan.offload(rcache_blocks=12, device_chunks=1, chunk_numel=8192, host_checkpoints="all"),
    "disk": em.Plan.offload(rcache_blocks=12, disk_chunks=10**6, chunk_numel=8192),
}
"""By the tier that must have something; the search itself chooses in the last test."""


def held(
    plan: em.Plan, path: str, lora: str | None, dtype: str, accumulation: int, scheme: str | None = None
) -> dict[str, int]:
    """(rank) The bytes held by tier in the last backward of two steps under the plan."""
    model, kind = real(path, lora, DTYPES[dtype], True, scheme), DTYPES[dtype]
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    plan = placed(plan)
    model, optimizer = em.wrap(model, optimizer, plan=plan, step=loss_of, sample=tokens(), compute_dtype=kind)
    found: dict[str, int] = {}
    for step in range(2):
        for backward in range(accumulation):
            loss_of(model, tokens(2 * step + backward, dist.get_rank())).backward()
        found = em.inspect(model).held_bytes
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    gc.collect()
    return found


def predicted_of(choice: PlanCandidate) -> dict[str, int]:
    device, host = choice.task.held_bytes(choice.size)
    return {"device": device, "host": host + choice.task.kept_bytes, "disk": choice.size.disk_bytes}


CASES = [
    (name, lora, dtype, home, world, accumulation)
    for name in CONFIGS
    for lora in (True, False)
    for dtype in ("bf16", "fp32")
    for home in PLANS
    for world, accumulation in ((1, 2), (2, 1), (2, 2))
]
QUICK = (("mixture", True, "bf16", "disk", 2, 1), ("dense", True, "fp32", "host", 1, 2))


@pytest.mark.parametrize(("name", "lora", "dtype", "home", "world", "accumulation"), with_further(CASES, QUICK))
def test_bytes_are_those_that_a_run_holds(
    name: str, lora: bool, dtype: str, home: str, world: int, accumulation: int, tmp_path: Path, ranks: Ranks
) -> None:
    further = ("--dtype", dtype, "--gpus", str(world), "--accumulation", str(accumulation))
    known = asked(tmp_path, name, lora, *further)
    plan = PLANS[home]
    wanted = predicted_of(price(task_asked(known), plan))
    assert wanted[home] > 0
    for found in ranks(world).run(held, plan, named(known).config, known.lora, dtype, accumulation):
        assert found == wanted


PACKED = [(scheme, home, world) for scheme in QUANTIZED for home in PLANS for world in (1, 2)]


@pytest.mark.parametrize(("scheme", "home", "world"), with_further(PACKED, (("nf4", "disk", 1), ("mxfp4", "host", 2))))
def test_bytes_of_a_quantized_base_are_those_that_a_run_holds(
    scheme: str, home: str, world: int, tmp_path: Path, ranks: Ranks
) -> None:
    further = ("--gpus", str(world), *(("--quantize", scheme) if scheme == "nf4" else ()))
    known = asked(tmp_path, scheme, True, *further)
    task = task_asked(known)
    plan = replace(PLANS[home], chunk_numel=1 << 16)
    wanted = predicted_of(price(task, plan))
    assert wanted[home] > 0
    for found in ranks(world).run(held, plan, named(known).config, known.lora, "bf16", 1, scheme):
        assert found == wanted
    full = task_asked(asked(tmp_path, scheme, True, *further[:2], "--quantize", "none"))
    assert task.profile.parameters == full.profile.parameters, "weights are counted, not bytes"
    assert sum(wanted.values()) < sum(predicted_of(price(full, plan)).values())


@pytest.mark.parametrize(
    ("name", "further", "message"),
    [
        ("nf4", ("--quantize", "nf4"), "--quantize nf4: quantized weights are frozen, so nothing is left to train"),
        ("mxfp4", (), "has weights in mxfp4: quantized weights are frozen"),
    ],
)
def test_what_is_quantized_is_frozen(name: str, further: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(em.ConfigError, match=message):
        task_asked(asked(tmp_path, name, False, *further))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_the_plan_that_is_named(name: str, lora: bool, tmp_path: Path, ranks: Ranks) -> None:
    known = asked(tmp_path, name, lora, "--gpus", "2")
    task = task_asked(known)
    library = price(task, em.Plan.zero2()).size.device_bytes / 2
    room = library / cost.F_ALLOC + task.profile.buffer_bytes + cost.F_FRAG * cost.activations(task.profile, 1.0)
    choice = solve(replace(task, capacity_bytes=int(room) + 1))
    wanted = predicted_of(choice)
    assert wanted["host"] > 0
    plan = em.Plan.from_json(choice.plan.to_json())
    for found in ranks(2).run(held, plan, named(known).config, known.lora, "bf16", 1):
        assert found == wanted
