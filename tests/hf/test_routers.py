"""Routers of Hugging Face's mixtures: loads counted over ranks and micro-batches, biases moved alike, fp32."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.errors import ConfigError
from elixir_moe.hf.routers import Routers, _sent, busiest, load_table
from tests.hf.test_trainer import data, launched, mixture
from tests.support.cases import with_further
from tests.support.every import every, same_tensors
from tests.support.hf_cases import FAMILIES
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, GAMMA = 3, 0.01


def deepseek() -> Any:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3,
        first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_group=2,
        num_experts_per_tok=2, topk_group=2, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_shared_experts=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def run(accumulation: int, reentrant: bool | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Loads of each step, and the biases at the end."""
    em.init_mesh(device_type="cpu")
    model = deepseek()
    routers = Routers(model, balance=GAMMA)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-2), plan=em.Plan.zero3())
    rank, world, loads = dist.get_rank(), dist.get_world_size(), []
    for step in range(STEPS):
        rows = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step))
        for micro in rows.chunk(accumulation):
            mine = micro.chunk(world)[rank]
            (model(input_ids=mine, labels=mine).loss / accumulation).backward()
        with torch.no_grad():  # neither an evaluation nor a reference's pass counts
            model(input_ids=rows)
            model.eval()(input_ids=rows)
            model.train()
        optimizer.step()
        optimizer.zero_grad()
        routers.step()
        loads.append(routers.loads())
    biases = {name: module.e_score_correction_bias.clone() for name, module in routers.modules.items()}
    optimizer.close()
    return loads, biases


@pytest.mark.parametrize(
    ("world", "accumulation", "reentrant"), with_further([(2, 2, True), (2, 1, None), (1, 2, False)], [(2, 2, True)])
)
def test_loads_and_biases_do_not_depend_on_ranks_and_micro_batches(
    ranks: Ranks, world: int, accumulation: int, reentrant: bool | None
) -> None:
    ((loads, biases),) = ranks(1).run(run, 1, None)
    assert set(loads[0]) == {"model.layers.1.mlp.gate", "model.layers.2.mlp.gate"}
    for counts in (counts for found in loads for counts in found.values()):
        assert counts.sum() == 8 * 16 * 2, "each token goes to two experts"
    for name, bias in biases.items():
        moved = sum(GAMMA * (found[name].float().mean() - found[name]).sign() for found in loads)
        assert torch.equal(bias, moved)
    for other, theirs in ranks(world).run(run, accumulation, reentrant):
        assert [{n: c.tolist() for n, c in found.items()} for found in other] == [
            {n: c.tolist() for n, c in found.items()} for found in loads
        ]
        assert same_tensors(theirs, biases)


def test_a_checkpoint_within_a_checkpoint_counts_each_token_once() -> None:
    model = deepseek()
    routers = Routers(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    rows = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=rows)
    model(input_ids=rows, labels=rows).loss.backward()
    routers.step()
    assert [int(counts.sum()) for counts in routers.loads().values()] == [rows.numel() * 2] * 2


def laguna() -> Any:
    from transformers import LagunaConfig, LagunaForCausalLM

    config = LagunaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    return LagunaForCausalLM(config)


def moved_far(build: Callable[[], Any]) -> bool:
    """Biases of a model in bf16 after steps that are none in bf16."""
    em.init_mesh(device_type="cpu")
    model = build().bfloat16()
    routers = Routers(model, balance=1e-3)
    biases = {name: module.e_score_correction_bias for name, module in routers.modules.items()}
    with torch.no_grad():
        for bias in biases.values():
            bias.fill_(1.0)
    model, optimizer = em.wrap(
        model, torch.optim.SGD(model.parameters(), lr=1e-2), plan=em.Plan.zero3(), compute_dtype=torch.bfloat16
    )
    rows = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        routers.step()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    moved = {name: (state[f"{name}.e_score_correction_bias"].float() - 1).abs().max() for name in biases}
    return all(1e-3 - 1e-6 < by < STEPS * 1e-3 + 1e-6 for by in moved.values()) and bool(moved)


@pytest.mark.parametrize("build", [deepseek, laguna])
def test_a_bias_of_a_model_in_bf16_moves(build: Callable[[], Any], ranks: Ranks) -> None:
    assert ranks(2).run(moved_far, build) == [True, True]


def widened() -> list[bool]:
    em.init_mesh(device_type="cpu")
    model, seen = mixture(), []
    routers = Routers(model, fp32=True)
    model, optimizer = em.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=em.Plan.zero3(), compute_dtype=torch.bfloat16
    )
    for module in routers.modules.values():
        module.register_forward_hook(
            lambda module, args, output: seen.append(
                [module.weight.dtype, args[0].dtype, output[0].dtype, output[1].dtype]
            )
        )
    rows = data()[0]["input_ids"][None]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.close()
    wide, narrow = torch.float32, torch.bfloat16
    return [found == [wide, wide, wide, narrow] for found in seen]


def test_routers_stay_in_fp32(ranks: Ranks) -> None:
    for found in ranks(2).run(widened):
        assert found == [True, True]


def llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=16, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        interleave_moe_layer_step=1,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


def longcat() -> Any:
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    config = LongcatFlashConfig(
        vocab_size=96, hidden_size=32, ffn_hidden_size=32, expert_ffn_hidden_size=16, num_layers=2,
        num_attention_heads=2, n_routed_experts=4, zero_expert_num=4, moe_topk=3, q_lora_rank=16, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8,
    )  # fmt: skip
    return LongcatFlashForCausalLM(config)


def zaya() -> Any:
    from transformers import ZayaConfig, ZayaForCausalLM

    config = ZayaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=16, num_experts=4, router_hidden_size=16, eos_token_id=1,
    )  # fmt: skip
    return ZayaForCausalLM(config)


OTHERS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "llama4": (llama4, 1, 2),
    "longcat": (longcat, 0, 3),
    "switch": (FAMILIES["switch"].build, 2, 1),
    "zaya": (zaya, 0, 1),
}
"""Families whose routers return other things: model, place of the logits, experts of a token."""


def counted(name: str) -> dict[str, tuple[list[int], list[int]]]:
    """{router: loads, and the choices that its logits say}, in bf16 with routers in fp32."""
    build, place, top_k = OTHERS[name]
    torch.manual_seed(0)
    em.init_mesh(device_type="cpu")
    model = build().train()
    said: dict[str, torch.Tensor] = {}
    handed: list[torch.Tensor] = []
    """The states that ZAYA's routers hand to the next."""
    routers = Routers(model, fp32=True)
    for router, module in routers.modules.items():

        def look(module: Any, args: Any, output: Any, router: str = router) -> None:
            said[router] = output[place].detach()
            handed.extend(output[3:])

        module.register_forward_hook(look)
    model, optimizer = em.wrap(
        model, torch.optim.SGD(model.parameters(), lr=1e-2), plan=em.Plan.zero3(), compute_dtype=torch.bfloat16
    )
    family = FAMILIES["switch" if name == "switch" else "mixtral"]
    family.loss(model, family.batch(0)).backward()
    optimizer.step()
    routers.step()
    optimizer.close()
    assert every(logits.dtype is torch.float32 for logits in said.values())
    assert {state.dtype for state in handed} == ({torch.float32} if name == "zaya" else set())
    columns = slice(4 if name == "zaya" else None)  # a bias of -1 speaks against ZAYA's fifth, which takes no token
    chosen = {
        router: logits.flatten(0, -2)[:, columns].topk(top_k).indices.flatten() for router, logits in said.items()
    }
    return {
        router: (counts.tolist(), [int((chosen[router] == e).sum()) * dist.get_world_size() for e in range(4)])
        for router, counts in routers.loads().items()
    }


@pytest.mark.parametrize("name", OTHERS)
def test_routers_that_return_other_things(name: str, ranks: Ranks) -> None:
    for found in ranks(2).run(counted, name):
        assert len(found) >= 2
        for router, (loads, wanted) in found.items():
            assert loads == wanted, router


def test_tokens_that_no_expert_takes_are_not_counted() -> None:
    """ZAYA's router gives them to the first one, with a weight of 0."""
    weights, chosen = torch.tensor([[0.5], [0.0], [0.2], [0.0]]), torch.tensor([[0], [0], [2], [0]])
    assert _sent((torch.zeros(4, 4), weights, chosen, torch.zeros(1, 4, 8)), 3)[0].tolist() == [1, 0, 1]


def without_bias() -> Any:
    model = deepseek()
    model.model.layers[1].mlp.gate.e_score_correction_bias = None
    return model


@pytest.mark.parametrize("build", [longcat, without_bias])
def test_a_router_without_a_bias_for_each_expert_is_not_balanced(build: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="has no e_score_correction_bias of one number for each expert"):
        Routers(build(), balance=0.1)


def logged(folder: str) -> list[dict[str, float]]:
    from transformers import TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    with launched():
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", bf16=True,
        )  # fmt: skip
        trainer = ElixirTrainer(mixture(), arguments, train_dataset=data(), routers={"fp32": True})
        trainer.train()
        trainer.model._elixir.optimizer.close()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_logs_loads(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(logged, str(tmp_path)):
        assert len(found) == 2
        for entry in found:
            each = [entry[f"router_busiest/model.layers.{layer}.mlp.gate"] for layer in range(2)]
            assert entry["router_busiest"] == max(each) and min(each) >= 1


def test_loads_are_shown() -> None:
    loads = {"a.gate": torch.tensor([1, 3, 0, 0]), "b": torch.zeros(4, dtype=torch.int64)}
    assert busiest(loads) == {"a.gate": 3.0, "b": 0.0}
    assert load_table(loads).splitlines() == [
        "router  % of tokens by expert",
        "a.gate   25.0  75.0   0.0   0.0",
        "b         0.0   0.0   0.0   0.0",
    ]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [(lambda: nn.Linear(2, 2), {}, "has no router"), (mixture, {"balance": 0.1}, "has no e_score_correction_bias")],
    ids=["none", "bias"],
)
def test_what_has_no_router_is_told(model: Callable[[], nn.Module], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Routers(model(), **settings)


def test_a_pass_on_tensors_without_data_counts_nothing() -> None:
    """As the planner's, for which boolean indices have no length."""
    model = mixture()
    routers = Routers(model)
    router = next(iter(routers.modules.values())).to("meta").train()
    router(torch.zeros(4, model.config.hidden_size, device="meta"))
    assert not routers._counts
