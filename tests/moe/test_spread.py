"""Hugging Face's mixtures with their experts spread over ranks, beside one process that has them all.

Tolerances as in `tests.support.parity`: the order of sums over ranks differs.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import elixir_moe as em
from benchmarks.launches import accelerated
from elixir_moe.hf.fused_experts import FusedExperts
from tests.support.cases import with_further
from tests.support.every import same_tensors
from tests.support.hf_cases import FAMILIES, VOCAB, ids
from tests.support.parity import TOLERANCE, assert_alike, make_optimizer, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS = 3
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(chunk_numel=20_000),
    "offload": em.Plan.offload(chunk_numel=20_000),
    "disk": em.Plan.offload(chunk_numel=20_000, disk_chunks=4),
}
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def mine(rows: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def adapted(model: nn.Module) -> nn.Module:
    """With peft's adapters on attention and experts, whose rank is not their number; no factor is zero."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def built(name: str, way: str, ep: int | None) -> tuple[nn.Module, Any]:
    """The model and its optimizer; spread over `ep` ranks, or whole in one process."""
    model: Any = FAMILIES[name].build()
    if way == "bytes":
        em.quantize(model.requires_grad_(False), "int8")
        model.lm_head.requires_grad_(True)
    if way == "adapters":
        model = adapted(model)
    if ep is not None:
        em.spread_experts(model, em.expert_mesh(em.init_mesh(device_type="cpu"), ep))
        assert {m.num_experts * ep for m in model.modules() if isinstance(m, FusedExperts)} == {4}
    if way == "tiles" and ep is not None:
        em.tile(model, at_most=10_000)
        assert "tile_1" in str(model)
    if way == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, make_optimizer(model)


def run(name: str, way: str = "whole", plan: em.Plan | None = None, ep: int | None = None, **options: Any) -> Any:
    """Some steps of two micro-batches."""
    family = FAMILIES[name]

    def backward(model: Any, step: int) -> None:
        for micro in range(2):
            batch = family.batch(2 * step + micro)
            (family.loss(model, {k: v if plan is None else mine(v) for k, v in batch.items()}) / 2).backward()

    return trained(lambda: built(name, way, ep), backward, plan, STEPS, **options)


NAMES = ("qwen3-moe", "mixtral", "gpt-oss", "qwen2-moe", "deepseek-v3")
DEGREES = [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", with_further(NAMES, ("qwen3-moe", "gpt-oss")))
@pytest.mark.parametrize(("world", "ep"), DEGREES)
def test_training_is_that_of_one_process(name: str, world: int, ep: int, ranks: Ranks) -> None:
    wanted = run(name)
    for plan in PLANS if world == 2 and name == "qwen3-moe" else ("zero3",):
        for found in ranks(world).run(run, name, "whole", PLANS[plan], ep):
            assert_alike(found, wanted, f"{name} {plan}", TOLERANCE, rel=1e-4)


@pytest.mark.parametrize("way", ["adapters", "bytes", "tiles", "checkpointed"])
@pytest.mark.parametrize(("world", "ep"), DEGREES)
def test_ways_of_holding_experts(way: str, world: int, ep: int, ranks: Ranks) -> None:
    wanted = run("qwen3-moe", way)
    for plan in ("zero3", "offload"):
        for found in ranks(world).run(run, "qwen3-moe", way, PLANS[plan], ep):
            assert_alike(found, wanted, f"{way} {plan}", TOLERANCE, rel=1e-4)


def test_experts_are_multiplied_as_on_a_gpu(ranks: Ranks) -> None:
    """Fused products multiply the rows of a rank's experts, quantized ones after one decoding."""
    for way in ("bytes", "adapters"):
        wanted = run("qwen3-moe", way)
        for found in ranks(2).run(run_fused, way):
            assert_alike(found, wanted, way, TOLERANCE, rel=1e-4)


def run_fused(way: str) -> Any:
    """(rank) `run` with experts spread over two ranks."""
    with accelerated():
        return run("qwen3-moe", way, PLANS["offload"], 2)


def test_a_searched_plan_and_a_step_run_without_data(ranks: Ranks) -> None:
    wanted = run("qwen3-moe")
    for found in ranks(2).run(searched):
        assert_alike(found, wanted, "searched", TOLERANCE, rel=1e-4)


def searched() -> Any:
    """(rank) As `run`, under a plan that a traced step has chosen."""
    return run(
        "qwen3-moe", plan=em.Plan.auto(FAMILIES["qwen3-moe"].loss, {k: mine(v) for k, v in batch().items()}), ep=2
    )


def batch() -> dict[str, Tensor]:
    return FAMILIES["qwen3-moe"].batch(0)


def test_one_rank_without_a_token_of_its_own(ranks: Ranks) -> None:
    """Ranks whose tokens all go elsewhere, and ranks that get none, take part all the same."""
    for norm in ranks(2).run(lopsided):
        assert norm > 0


def lopsided() -> float:
    """(rank) The norm of a step in which the experts of the first rank get all tokens."""
    model, optimizer = built("mixtral", "whole", 2)
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.weight.data[:2] = 1
            module.weight.data[2:] = -1
    model.model.embed_tokens.weight.data.abs_()
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero3())
    FAMILIES["mixtral"].loss(model, {"input_ids": mine(ids(0)), "labels": mine(ids(0))}).backward()
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    optimizer.close()
    return norm


def test_ranks_with_other_numbers_of_tokens(ranks: Ranks) -> None:
    """Each rank's loss is the mean over its own tokens; the step is that of the mean over ranks, recomputed or not."""
    wanted = uneven(None)
    for found in ranks(2).run(uneven, PLANS["offload"], 2):
        assert_alike(found, wanted, "uneven", TOLERANCE, rel=1e-4)


def uneven(plan: em.Plan | None, ep: int | None = None) -> Any:
    """Some steps in which one rank has 3 rows of 7 tokens and the other 1 row of 11."""

    def backward(model: Any, step: int) -> None:
        shapes = {0: (3, 7), 1: (1, 11)}
        here = shapes if plan is None else [dist.get_rank()]
        for rank in here:
            rows = torch.randint(VOCAB, shapes[rank], generator=torch.Generator().manual_seed(2 * step + rank))
            (FAMILIES["qwen3-moe"].loss(model, {"input_ids": rows, "labels": rows}) / len(here)).backward()

    return trained(partial(built, "qwen3-moe", "checkpointed", ep), backward, plan, STEPS)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("first", ["quantize", "spread"])
def test_bytes_of_spread_experts_are_weights_again(name: str, first: str, ranks: Ranks) -> None:
    """`em.dequantize` leaves experts spread, whichever came first."""
    wanted = decoded(name, first, None)
    for found in ranks(2).run(decoded, name, first, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def decoded(name: str, first: str, ep: int | None) -> Tensor:
    """(rank) The logits of a model that has been quantized and dequantized; spread over `ep` ranks, or whole."""
    model: Any = FAMILIES[name].build().requires_grad_(False)
    steps = [lambda: em.quantize(model, "int8")]
    if ep is not None:
        mesh = em.expert_mesh(em.init_mesh(device_type="cpu"), ep)
        steps.insert(first == "quantize", lambda: em.spread_experts(model, mesh))
    for step in steps:
        step()
    em.dequantize(model)
    with torch.no_grad():
        return model(ids(0)).logits


def test_checkpoints_and_folders_have_all_experts(ranks: Ranks, tmp_path: Path) -> None:
    """What was saved under one degree is read under another, on meta too, and by plain transformers."""
    states = ranks(2).run(saved_and_read, str(tmp_path))
    wanted = states[0][0]
    for some in states:
        for state in some:
            assert state.keys() == wanted.keys()
            assert same_tensors(state, wanted)
    plain: Any = type(FAMILIES["qwen3-moe"].build()).from_pretrained(tmp_path / "weights")
    assert same_tensors(wanted, plain.state_dict())


def saved_and_read(folder: str) -> list[dict[str, Tensor]]:
    """(rank) The weights after a step, and those that were loaded and read."""
    model, optimizer = em.wrap(*built("qwen3-moe", "whole", 2), plan=PLANS["zero3"])
    FAMILIES["qwen3-moe"].loss(model, {k: mine(v) for k, v in batch().items()}).backward()
    optimizer.step()
    optimizer.zero_grad()
    em.save(f"{folder}/checkpoint", model, optimizer)
    em.save_pretrained(model, f"{folder}/weights")
    states = [em.full_state_dict(model, all_ranks=True)]
    optimizer.close()
    for ep in (1, None):
        model, optimizer = em.wrap(*built("qwen3-moe", "whole", ep), plan=PLANS["zero2"])
        em.load(f"{folder}/checkpoint", model, optimizer)
        states.append(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
    for quantized in (False, True):
        with torch.device("meta"):
            model = FAMILIES["qwen3-moe"].build()
        em.spread_experts(model, em.expert_mesh(em.init_mesh(device_type="cpu"), 2))
        if quantized:
            em.quantize(model.requires_grad_(False), "int8", targets="*.experts*")
            model.lm_head.requires_grad_(True)
        model, optimizer = em.wrap(model, make_optimizer(model), plan=PLANS["zero3"], weights=f"{folder}/weights")
        if not quantized:
            states.append(em.full_state_dict(model, all_ranks=True))
        else:
            loss = FAMILIES["qwen3-moe"].loss(model, {k: mine(v) for k, v in batch().items()})
            assert loss.isfinite()
        optimizer.close()
    return states


def test_adapters_of_spread_experts_are_those_of_peft(ranks: Ranks, tmp_path: Path) -> None:
    """Plain peft reads them, and computes with them what the spread model does."""
    logits, *_ = ranks(2).run(adapters_saved, str(tmp_path))
    model = peft.PeftModel.from_pretrained(FAMILIES["qwen3-moe"].build(), str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(model(ids(9)).logits, logits, rtol=1e-4, atol=1e-5)
    stored = load_file(str(tmp_path / "adapter_model.safetensors"))
    assert {tuple(v.shape) for k, v in stored.items() if "experts" in k and "lora_A" in k} == {(12, 32)}


def adapters_saved(folder: str) -> Tensor:
    """(rank) The logits of a trained model, whose adapters it has saved."""
    model, optimizer = em.wrap(*built("qwen3-moe", "adapters", 2), plan=PLANS["zero3"])
    for _ in range(2):
        FAMILIES["qwen3-moe"].loss(model, {k: mine(v) for k, v in batch().items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    em.save_pretrained(model, folder)
    with torch.no_grad():
        logits: Tensor = model(ids(9)).logits
    optimizer.close()
    return logits


REFUSED = (
    r"has 4 experts, which ep=3 ranks cannot share equally: choose ep among \[1, 2, 4\]",
    r"leave these experts out of em.annotate, and call em.spread_experts",
    r"is spread already",
    r"add the adapters before em.spread_experts",
    r"Linear has no fused experts of transformers",
    r"has patterns already: leave its experts out of em.annotate",
    r"before em.wrap",
    r"has 'gate_up_proj', which other modules share",
    r"has adapters on 'gate_up_proj_bias', which cannot be cut",
)


def test_what_cannot_be_spread_is_refused_by_name(ranks: Ranks) -> None:
    for number, expected in enumerate(REFUSED[1:], start=1):
        assert re.search(expected, ranks(2).run(refusal, number)[0]), expected
    assert re.search(REFUSED[0], ranks(3).run(refusal, 0)[0])


def refusal(number: int) -> str:
    """(rank) The message."""
    mesh = em.init_mesh(device_type="cpu")
    expert = em.expert_mesh(mesh, dist.get_world_size())
    model: Any = FAMILIES["mixtral" if number else "qwen3-moe"].build()
    rules = {
        "*.experts.*": em.Pattern(expert, replicate=("edp", "tp"), shard={"ep": 0}),
        "*": em.Pattern(mesh, replicate=("dp", "tp")),
    }
    with pytest.raises(em.ElixirError) as error:
        if number == 1:
            em.annotate(model, rules)
            em.wrap(model, make_optimizer(model), plan=em.Plan.zero3())
        elif number == 2:
            em.spread_experts(em.spread_experts(model, expert), expert)
        elif number == 3:
            model = adapted(em.spread_experts(model, expert))
            em.wrap(model, make_optimizer(model), plan=em.Plan.zero3())
        elif number == 4:
            model = nn.Linear(2, 2)
        elif number == 5:
            em.annotate(model, rules)
        elif number == 7:
            first, second = model.model.layers
            second.mlp.experts.gate_up_proj = first.mlp.experts.gate_up_proj
        elif number == 8:
            config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
            model = peft.get_peft_model(FAMILIES["gpt-oss"].build(), config)
        elif number == 6:
            model, optimizer = em.wrap(model, make_optimizer(model), plan=em.Plan.zero3())
        em.spread_experts(model, expert)
    if number == 6:
        optimizer.close()
    return str(error.value)


def test_spread_experts_are_drawn_alike(ranks: Ranks) -> None:
    """Under `sharded_init` each rank draws its own part of what one process draws."""
    torch.manual_seed(7)
    wanted = FAMILIES["qwen3-moe"].build().state_dict()
    for found in ranks(2).run(drawn):
        assert same_tensors(found, wanted)
    assert len(wanted["lm_head.weight"]) == VOCAB


def drawn() -> dict[str, Tensor]:
    """(rank) The weights after `wrap`."""
    expert = em.expert_mesh(em.init_mesh(device_type="cpu"), 2)
    with em.sharded_init():
        model = em.spread_experts(FAMILIES["qwen3-moe"].build(), expert)
    model, optimizer = em.wrap(model, make_optimizer(model), plan=em.Plan.zero3())
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state
