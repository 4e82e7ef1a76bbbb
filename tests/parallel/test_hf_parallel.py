"""Hugging Face's own tensor parallelism, as its loader leaves a model: every plan against the model in one process."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import elixir_moe as em
from tests.support.checkpoint_cases import everything
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, SEQ, VOCAB = 4, 4, 8, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
PLANS = {"zero2": em.Plan.zero2(), "offload": em.Plan.offload(rcache_blocks=6)}


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def train(model: Any, optimizer: Any, clip: Callable[[], Tensor]) -> list[float]:
    model.train()
    norms = []
    for step in range(STEPS):
        rows = batch(step)
        model(input_ids=rows, labels=rows).loss.backward()
        norms.append(clip().item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def parallel(folder: Path, ep: int) -> dict[str, Any]:
    results = {}
    for name, plan in PLANS.items():
        config = DistributedConfig(tp_size=2, tp_plan="auto", ep_size=ep)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        model, optimizer = em.wrap(model, adamw(model), plan=plan)
        norms = train(model, optimizer, lambda optimizer=optimizer: optimizer.clip_grad_norm_(0.5))
        results[name] = {"norms": norms, "state": em.full_state_dict(model, all_ranks=True)}
        em.save(folder / name, model, optimizer)
        optimizer.close()
        del model, optimizer
    gc.collect()
    return results


@pytest.mark.parametrize(("family", "ep"), [("llama", 1), ("qwen3", 1), ("mixtral", 1), ("mixtral", 2)])
def test_parallel_by_the_loader(family: str, ep: int, ranks: Ranks, tmp_path: Path) -> None:
    """Its tensor-parallel plan; for experts also its expert-parallel one, where ranks split a batch they share.

    A checkpoint has the same weights, to the bit, as `full_state_dict`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))
    model.save_pretrained(tmp_path)
    optimizer = adamw(model)
    wanted = train(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    for found in ranks(2).run(parallel, tmp_path, ep):
        for case, result in found.items():
            assert result["norms"] == pytest.approx(wanted, rel=1e-5), case
            saved = everything(tmp_path / case)
            for key, value in model.state_dict().items():
                assert torch.equal(saved[f"{key} weight"], result["state"][key]), f"{case} {key}"
                torch.testing.assert_close(
                    result["state"][key], value, rtol=0, atol=2e-5, msg=lambda m, c=case, k=key: f"{c} {k}: {m}"
                )
