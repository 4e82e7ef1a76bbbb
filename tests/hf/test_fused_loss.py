"""Hugging Face models, its Trainer, `train` and `plan` without logits: losses and gradients are those of all logits.

Tolerance: both losses sum the same fp32 products in another order, as in `tests.test_linear_cross_entropy`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.errors import ConfigError
from elixir_moe.hf.fused_loss import FusedLoss
from elixir_moe.planner.trace import trace
from elixir_tools.models.presets import named_model
from tests.hf.test_trainer import check_alike, trained
from tests.support.cases import with_further
from tests.support.hf_cases import FAMILIES, LLAMA, Family
from tests.support.ranks import RankPool
from tests.support.train_cases import run as train_run
from tests.support.train_cases import settings_of
from tests.tools.fit.test_will_it_fit import said

Ranks = Callable[[int], RankPool]
CAUSAL = {
    name: FAMILIES[name] for name in ("gpt2", "opt", "llama", "mixtral", "gpt-oss", "bloom", "phi", "deepseek-v3")
} | {
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", FAMILIES["qwen3-moe"].options | {"output_router_logits": True}
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "Gemma2Config", FAMILIES["gemma2"].options | {"final_logit_softcapping": 0.5}
    ),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", LLAMA | {"logits_scaling": 4.0}),
    "cohere": Family("CohereForCausalLM", "CohereConfig", LLAMA | {"logit_scale": 3.0}),
}


@pytest.mark.parametrize("name", with_further(CAUSAL, ("qwen3-moe", "gemma2", "granite", "cohere")))
def test_a_familys_loss_and_gradients_are_those_of_its_logits(name: str) -> None:
    model: Any = CAUSAL[name].build()
    batch = CAUSAL[name].batch(0)
    batch["labels"][:, :5] = -100
    for options in ({}, {"num_items_in_batch": torch.tensor(31)}):
        wanted = model(**batch, **options)
        wanted.loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with FusedLoss(model)():
            found = model(**batch, **options)
        found.loss.backward()
        assert found.logits.numel() == wanted.logits.shape[-1] and found.loss.dtype is torch.float32
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=1e-6)
        mine = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(mine, gradients, rtol=1e-5, atol=1e-6)
        model.zero_grad()
    assert not any("loss_function" in key for key in vars(model)), "as it was"
    assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


def scaled_elsewhere() -> nn.Module:
    model: Any = CAUSAL["granite"].build()
    model.config = type(model.config)(**model.config.to_dict() | {"logits_scaling": 1.0})
    model.model.config = model.config
    forward = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        head = model.lm_head.register_forward_hook(lambda module, given, output: output * 2)
        try:
            return forward(*args, **kwargs)
        finally:
            head.remove()

    model.forward = doubled
    return model


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(CAUSAL["llama"].build(), LoraConfig(r=2, target_modules=["lm_head"]))  # type: ignore[arg-type]


def scaled_by_a_hook() -> nn.Module:
    model: Any = CAUSAL["llama"].build()
    model.lm_head.register_forward_hook(lambda module, given, output: output * 2)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no causal model": (FAMILIES["bert"].build, "BertForMaskedLM: expected a causal language model"),
    "a sequence to a sequence": (FAMILIES["t5"].build, "T5ForConditionalGeneration: expected"),
    "a head with adapters": (with_adapters, "of a head of class Linear: expected a Linear or an Embedding"),
    "logits that are changed": (scaled_elsewhere, "final_logit_softcapping, logit_scale"),
    "logits that a hook changes": (scaled_by_a_hook, "final_logit_softcapping, logit_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_a_head_is_refused_by_name(name: str) -> None:
    build, says = REFUSED[name]
    model: Any = build()
    with pytest.raises(ConfigError, match=says), FusedLoss(model)():
        model(**CAUSAL["llama"].batch(0))


def test_a_forward_without_labels_is_refused() -> None:
    model: Any = CAUSAL["llama"].build()
    with pytest.raises(ConfigError, match="had no labels"), FusedLoss(model)():
        model(input_ids=CAUSAL["llama"].batch(0)["input_ids"])


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize(
    ("world", "plan", "smoothing"),
    with_further([(2, "zero3", 0.1), (1, "offload", 0.1), (1, "zero3", 0.0)], [(2, "zero3", 0.1)]),
)
def test_the_trainers_losses_are_those_of_logits(
    ranks: Ranks, tmp_path: Path, world: int, plan: str, smoothing: float
) -> None:
    """Also with a router's auxiliary loss, which the plain Trainer leaves out where it smooths labels."""
    plans = {"zero3": em.Plan.zero3(), "offload": em.Plan.offload()}
    settings: dict[str, Any] = EVALUATED | {"label_smoothing_factor": smoothing, "model_options": AUXILIARY}
    (plain,) = ranks(1).run(trained, str(tmp_path / "plain"), 4, None, **settings)
    for ours in ranks(world).run(trained, str(tmp_path / "ours"), 4, plans[plan], loss="fused", **settings):
        check_alike(ours, plain)


def test_a_trainer_with_a_loss_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    from elixir_moe.hf.trainer import ElixirMixin

    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    class Mine(ElixirMixin, Own):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match="loss='fused' of a Own, which computes a loss of its own"):
        Mine(CAUSAL["llama"].build(), loss="fused")


def test_training_without_logits_has_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    found = {
        loss: ranks(2).run(train_run, settings_of(tmp_path / loss, run={"loss": loss, "steps": 4}))[0]["metrics"]
        for loss in ("whole", "fused")
    }
    for key in ("loss", "grad_norm", "val_loss"):
        whole, fused = ([line[key] for line in found[loss] if line[key] is not None] for loss in ("whole", "fused"))
        assert fused == pytest.approx(whole, rel=1e-5), key
        assert fused, key


def test_the_planner_prices_a_loss_without_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three tensors of fp32 logits are gone; two chunks of them and the head's gradient in fp32 are there."""
    vocabulary, tokens = 50_000, 8192
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}))
    asked = (str(tmp_path), "--gpu", "rtx-4090", "--ram", "64 GiB", "--seq", str(tokens))
    whole, fused = (
        said(capsys, *asked, "--loss", loss)["predicted"]["device_peak_bytes"] for loss in ("whole", "fused")
    )
    logits = tokens * vocabulary * 4
    assert whole > 2 * logits
    assert fused < whole - 3 * logits + 2.2 * 512 * 2**20
    traced = []
    for loss in ("whole", "fused"):
        gpt = named_model("gpt2-4b", batch=16, seq=1024, layers=2, loss=loss)
        traced.append(trace(gpt.model, gpt.step, gpt.sample).activation_bytes)
    assert traced[1] < traced[0] - 16 * 1024 * 50257 * 4
