"""A quantized base under every plan: LoRA of small mixtures, beside plain PyTorch with the decoded weights.

The losses of one world are equal to the bit among plans that reduce alike. Beside the oracle, which is one process:
to the bit on one rank, and on several within `tests.support.parity`'s tolerance, for the order of sums over ranks.
"""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.config import KasaConfig
from torch import Tensor

import elixir_moe as em
from benchmarks.launches import accelerated
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.packed import packed_parameters
from tests.support.cases import placed, with_further
from tests.support.every import every, same_tensors
from tests.support.parity import LOSS_TOLERANCE
from tests.support.quantized_cases import (
    ADAPTER_TOLERANCE,
    PLANS,
    STEPS,
    adapted,
    base,
    batch,
    built,
    optimizer_of,
    run,
    steps,
)
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


@cache
def plain(family: str, scheme: str) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle; the same for all worlds and tests."""
    model = built(family, scheme, decoded=True)
    losses = steps(model, optimizer_of(model))
    return [loss.item() for loss in losses], {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def test_the_oracle_is_met_on_one_rank(ranks: Ranks) -> None:
    """Fused experts are decoded one at a time, in transformers' order of operations: the first loss is equal to the
    bit. Later ones follow updates, whose square roots may differ by an ulp (`kernels.adam_step`)."""
    for family, scheme in (("qwen3-moe", "nf4"), ("gpt-oss", "mxfp4")):
        wanted, trained = plain(family, scheme)
        ((found, state),) = ranks(1).run(run, family, scheme, PLANS["offload"])
        assert found[0] == wanted[0]
        assert found == pytest.approx(wanted, abs=LOSS_TOLERANCE)
        assert every(torch.allclose(state[name], value, atol=3 * ADAPTER_TOLERANCE) for name, value in trained.items())


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", with_further(SCHEMES, ("nf4", "fp8")))
def test_plans_agree_to_the_bit(scheme: str, world: int, ranks: Ranks) -> None:
    family = "gpt-oss" if scheme == "mxfp4" else "qwen3-moe"
    wanted, trained = plain(family, scheme)
    found: dict[bool, tuple[list[float], dict[str, Tensor]]] = {}
    for name, plan in PLANS.items():
        for losses, state in ranks(world).run(run, family, scheme, plan):
            # gloo's all-reduce under ddp sums more than two ranks in another order than a scattered reduction
            first = found.setdefault(plan.scatter or world < 3, (losses, state))
            assert losses == first[0], name
            assert same_tensors(first[1], state), name
    for losses, state in found.values():
        assert losses == pytest.approx(wanted, abs=LOSS_TOLERANCE)
        assert every(torch.allclose(state[name], value, atol=3 * ADAPTER_TOLERANCE) for name, value in trained.items())


@pytest.mark.parametrize("plan", ["zero3", "offload"])
def test_plans_meet_the_oracle_with_fused_products(plan: str, ranks: Ranks) -> None:
    """Adapters and quantized experts are multiplied as on a GPU with a fused kernel."""
    wanted, trained = plain("qwen3-moe", "nf4")
    for losses, state in ranks(2).run(run_fused, plan):
        assert losses == pytest.approx(wanted, abs=LOSS_TOLERANCE)
        assert every(torch.allclose(state[name], value, atol=3 * ADAPTER_TOLERANCE) for name, value in trained.items())


def run_fused(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """(rank) `run` as on a GPU with a fused kernel."""
    with accelerated():
        return run("qwen3-moe", "nf4", PLANS[plan])


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16])
def test_a_compute_dtype_leaves_bytes_and_scales_alone(compute_dtype: torch.dtype, ranks: Ranks) -> None:
    (found,) = ranks(1).run(held, compute_dtype)
    for name, (dtype, value) in found["state"].items():
        assert dtype == found["before"][name].dtype, name
        assert dtype != torch.uint8 or torch.equal(value, found["before"][name])
    assert found["bytes"] <= 0.57 * found["weights"]


def held(compute_dtype: torch.dtype | None) -> dict[str, Any]:
    """(rank) The state of a wrapped model beside that before, and the bytes of its packed weights at home."""
    model = built("qwen3-moe", "nf4", decoded=False)
    weights = sum(math.prod(packed.shape) for _, _, _, packed in packed_parameters(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    patterns = {"*": em.Pattern(em.init_mesh(device_type="cpu"), replicate=("dp",), dtype=compute_dtype)}
    em.annotate(model, patterns)
    model, optimizer = em.wrap(model, optimizer_of(model), plan=em.Plan.offload(), compute_dtype=compute_dtype)
    size, now = em.inspect(model).footprint, em.inspect(model).held_bytes
    assert now["host"] == size.host_bytes
    assert now["device"] == size.device_bytes
    steps(model, optimizer, 1)
    state = em.full_state_dict(model, all_ranks=True)
    chunks = [c for c in em.inspect(model).layout.chunks if c.key.dtype == torch.uint8]
    found = {"before": before, "weights": weights, "bytes": sum(c.nbytes for c in chunks) * chunks[0].shards}
    found["state"] = {name: (value.dtype, value) for name, value in state.items() if "lora" not in name}
    optimizer.close()
    return found


def test_a_checkpoint_of_one_plan_goes_on_under_another(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in ranks(2).run(resumed, str(tmp_path)):
        assert first == second


def resumed(folder: str) -> tuple[list[float], list[float]]:
    """(rank) The losses after a save, of the model that was saved and of another that has loaded it."""
    found = []
    for plan in (PLANS["zero3"], PLANS["disk"]):
        model = built("qwen3-moe", "nf4", decoded=False)
        model, optimizer = em.wrap(model, optimizer_of(model), plan=placed(plan))
        if not found:
            steps(model, optimizer)
            em.save(folder + "/one", model, optimizer)
        else:
            em.load(folder + "/one", model, optimizer)
        found.append([loss.item() for loss in steps(model, optimizer)])
        optimizer.close()
    return found[0], found[1]


def test_a_model_without_memory_is_quantized_when_it_is_drawn(ranks: Ranks) -> None:
    (plain, drawn), *_ = ranks(1).run(drawn_beside_plain)
    assert plain.keys() == drawn.keys()
    for name, value in plain.items():
        assert torch.equal(drawn[name], value), name


def drawn_beside_plain() -> tuple[dict[str, Tensor], ...]:
    """(rank) The state of a quantized model that had its weights before `wrap`, and of one that had none."""
    states = []
    for around in (contextlib.nullcontext, em.sharded_init):
        with around():
            model = adapted(em.quantize(base(), "nf4"))
        model, optimizer = em.wrap(model, optimizer_of(model), plan=em.Plan.zero3())
        states.append(em.full_state_dict(model))
        optimizer.close()
    return tuple(states)


def test_checkpointed_layers_without_memory_get_the_blocks_that_their_recomputation_needs(ranks: Ranks) -> None:
    """No step can be traced, and the layers say that they run again: the default is enough, with nothing to spare."""
    plain, (losses, off_schedule) = ranks(1).run(checkpointed_without_memory)[0]
    assert losses == pytest.approx(plain, abs=LOSS_TOLERANCE)
    assert off_schedule == 0


def checkpointed_without_memory() -> tuple[list[float], tuple[list[float], int]]:
    """(rank) Losses of a model with memory, and of one without, whose layers run again; requests that were not
    foreseen there."""
    model = built("qwen3-moe", "nf4", decoded=False)
    plain = [loss.item() for loss in steps(model, optimizer_of(model))]
    with em.sharded_init():
        model = built("qwen3-moe", "nf4", decoded=False)
    model.gradient_checkpointing_enable()
    plan = replace(em.Plan.offload(), prefetch=0)
    model, optimizer = em.wrap(model, optimizer_of(model), plan=plan)
    losses = [loss.item() for loss in steps(model, optimizer)]
    found = em.inspect(model)
    assert found.plan.blocks(found.layout) < len(found.layout.cached), "blocks for all chunks would prove nothing"
    optimizer.close()
    return plain, (losses, found.statistics.cache.off_schedule)


def test_what_cannot_be_kept_or_adapted_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for says, expected in zip(ranks(1).run(refused, str(tmp_path))[0], REFUSED, strict=True):
        assert re.search(expected, says), says


REFUSED = (
    r"'model\.layers\.0\.self_attn\.q_proj\.weight' is packed as nf4.*em\.save keeps",
    r"adapters \(target_parameters\) on 'weight', which is packed as nf4",
    r"q_proj' has adapters with use_dora=True, which read the base's weight, and it is packed as int8",
    r"q_proj' has adapters of HRA, which read the base's weight, and it is packed as fp8",
    r"q_proj' has adapters of LOHA, which read the base's weight, and it is packed as nf4",
    r"merges them into their base in full precision",
)


def refused(folder: str) -> list[str]:
    """(rank) The messages."""
    said = []
    em.init_mesh(device_type="cpu")
    model = em.quantize(base(), "nf4")
    model.lm_head.requires_grad_(True)
    model, optimizer = em.wrap(model, optimizer_of(model), plan=em.Plan.zero3())
    with pytest.raises(em.UsageError) as error:
        em.save_pretrained(model, folder)
    said.append(str(error.value))
    optimizer.close()
    for scheme, config in (
        ("nf4", peft.LoraConfig(r=4, target_modules=["k_proj"], target_parameters=["q_proj.weight"])),
        ("int8", peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)),
        ("fp8", peft.HRAConfig(r=4, target_modules=["q_proj"])),
        ("nf4", peft.LoHaConfig(r=4, target_modules=["q_proj"])),
    ):
        model = em.quantize(peft.get_peft_model(base(), config), scheme)
        with pytest.raises(em.ConfigError) as refusal:
            em.wrap(model, optimizer_of(model), plan=em.Plan.zero3())
        said.append(str(refusal.value))
    model = built("qwen3-moe", "nf4", decoded=False)
    model, optimizer = em.wrap(model, optimizer_of(model), plan=em.Plan.zero3())
    with pytest.raises(em.UsageError) as error:
        model.merge_and_unload()
    optimizer.close()
    return [*said, str(error.value)]


def test_adapters_that_read_their_own_weight_may_lie_beside_bytes(ranks: Ranks) -> None:
    """DoRA on layers that are left as they are."""
    plain, wrapped = ranks(1).run(dora_beside_bytes)[0]
    assert wrapped == pytest.approx(plain, abs=LOSS_TOLERANCE)


def dora_beside_bytes() -> tuple[list[float], list[float]]:
    """(rank) As `adapted_then_quantized`, of DoRA on a layer that is not quantized."""
    return adapted_then_quantized(peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), skip="*q_proj*")


def adapted_then_quantized(config: Any, **quantized: Any) -> tuple[list[float], list[float]]:
    """(rank) Losses of plain PyTorch with the decoded weights, and of the wrapped model."""
    em.init_mesh(device_type="cpu")
    losses = []
    for decoded in (True, False):
        torch.manual_seed(4)
        model: Any = em.quantize(peft.get_peft_model(base(), config), "int8", **quantized)
        model, optimizer = em.dequantize(model) if decoded else model, optimizer_of(model)
        if not decoded:
            model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero3())
        losses.append([loss.item() for loss in steps(model, optimizer)])
        if not decoded:
            optimizer.close()
    return losses[0], losses[1]


BEGIN_WITH_WEIGHTS: dict[str, Any] = {
    "KaSA": peft.LoraConfig(r=4, target_modules=["q_proj"], kasa_config=KasaConfig()),
    "DEFT": peft.DeftConfig(r=4, target_modules=["q_proj"]),
    "TinyLoRA": peft.TinyLoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], weight_tying=1.0),
    "UniLoRA": peft.UniLoraConfig(r=4, target_modules=["q_proj"], theta_d_length=64),
}


@pytest.mark.parametrize("kind", BEGIN_WITH_WEIGHTS)
def test_adapters_that_begin_with_the_weight_are_added_before_it_becomes_bytes(kind: str, ranks: Ranks) -> None:
    """The oracle has the decoded weights."""
    plain, wrapped, says = ranks(1).run(begun_before_and_after, kind)[0]
    assert wrapped == pytest.approx(plain, abs=LOSS_TOLERANCE) and len(set(wrapped)) == STEPS
    assert re.search(rf"is of {kind}, .*q_proj\.base_layer\.weight' was packed as int8 before", says), says


def begun_before_and_after(kind: str) -> tuple[list[float], list[float], str]:
    """(rank) Losses of plain PyTorch, and of the wrapped model, adapted before; what is said of later ones."""
    plain, wrapped = adapted_then_quantized(BEGIN_WITH_WEIGHTS[kind])
    model = peft.get_peft_model(em.quantize(base(), "int8"), BEGIN_WITH_WEIGHTS[kind])
    with pytest.raises(em.ConfigError) as refusal:
        em.wrap(model, optimizer_of(model), plan=em.Plan.zero3())
    return plain, wrapped, str(refusal.value)


def test_adapters_are_merged_into_decoded_weights() -> None:
    """`em.dequantize` first: the merged model computes what the adapted one did, but for the order of a sum."""
    model = built("qwen3-moe", "nf4", decoded=False)
    before = model(input_ids=batch(0)).logits
    merged = em.dequantize(model).merge_and_unload()
    assert not any(p.dtype == torch.uint8 for p in merged.parameters())
    torch.testing.assert_close(merged(input_ids=batch(0)).logits, before, rtol=1e-4, atol=1e-5)


def test_tiles_are_quantized_one_by_one(ranks: Ranks) -> None:
    """Names and bytes are those of whole weights, and so are losses, but for the order of sums in gradients."""
    whole, *others = ranks(1).run(tiled_beside_whole)[0]
    for losses, state, _ in others:
        assert whole[1].keys() == state.keys()
        assert same_tensors(state, whole[1])
        assert losses == pytest.approx(whole[0], abs=LOSS_TOLERANCE)
    (_, _, blocks), (_, _, in_regions) = others
    assert in_regions <= blocks + 1, "backward reads tiles anew: a region that runs again need not hold all of them"


def tiled_beside_whole() -> list[tuple[list[float], dict[str, Tensor], int]]:
    """(rank) Losses, frozen state and blocks of a quantized model: whole, in tiles, and with these in regions."""
    found = []
    for tiles, regions in ((False, False), (True, False), (True, True)):
        model: Any = adapted(base())
        model = em.quantize(em.tile(model, at_most=140_000) if tiles else model, "nf4")
        if regions:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        plan = em.Plan.zero3(chunk_numel=40_000)
        model, optimizer = em.wrap(model, optimizer_of(model), plan=plan, step=own_loss, sample=batch(0))
        losses = [loss.item() for loss in steps(model, optimizer)]
        state = em.full_state_dict(model)
        seen = em.inspect(model)
        assert seen.statistics.cache.off_schedule == seen.statistics.blocks_replaced == 0
        frozen = {name: value for name, value in state.items() if "lora" not in name}
        found.append((losses, frozen, seen.plan.blocks(seen.layout)))
        optimizer.close()
    return found


def test_under_a_searched_plan_and_activation_checkpoints(ranks: Ranks) -> None:
    """The step is traced without data, and regions run again decode again."""
    plain, *others = ranks(1).run(checkpointed)[0]
    for other in others:
        assert other == pytest.approx(plain, abs=LOSS_TOLERANCE)


def checkpointed() -> list[list[float]]:
    """(rank) Losses under a preset, with checkpoints, and under `Plan.auto`."""
    found = []
    for number, plan in enumerate((em.Plan.zero3(), em.Plan.offload(), em.Plan.auto(own_loss, batch(0)))):
        model = built("qwen3-moe", "nf4", decoded=False)
        if number:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        model, optimizer = em.wrap(model, optimizer_of(model), plan=plan)
        found.append([loss.item() for loss in steps(model, optimizer)])
        optimizer.close()
    return found


def own_loss(model: Any, rows: Tensor) -> Tensor:
    """The loss of a batch."""
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss
