"""Hugging Face families as tiny models: each built from its config and nothing else, with a batch to train on.

Owns the table of families. Everything is as the library makes it; only sizes are small, and dropout is off, since two
ranks cannot draw the numbers one process draws.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

ROWS, LENGTH, VOCAB, D = 4, 12, 96, 32
Batch = dict[str, Tensor]


def forget_accelerate() -> None:
    """Forgets what Accelerate keeps for the whole process, as at its start."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def ids(step: int, length: int = LENGTH) -> Tensor:
    """(ROWS, length) token ids, the same on every rank."""
    return torch.randint(3, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(step))


def causal(step: int) -> Batch:
    """Next-token prediction."""
    return {"input_ids": ids(step), "labels": ids(step)}


def masked(step: int) -> Batch:
    """Every token is to be told from its neighbors; the last two of each row are padding."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[:, -2:] = 0
    return {"input_ids": ids(step), "attention_mask": mask, "labels": ids(step + 50)}


def to_sequence(step: int) -> Batch:
    """Source and target of different lengths."""
    return {"input_ids": ids(step), "labels": ids(step + 50, 7)}


def pixels(step: int) -> Tensor:
    """(ROWS, 3, 16, 16)."""
    return torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(step))


def pictures(step: int) -> Batch:
    """Classes of pictures."""
    return {"pixel_values": pixels(step), "labels": ids(step, 1)[:, 0] % 5}


def pairs(step: int) -> Batch:
    """Pictures and captions."""
    return {"input_ids": ids(step), "pixel_values": pixels(step)}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss the model computes from its labels."""
    loss: Tensor = model(**batch).loss
    return loss


def agreement(model: nn.Module, batch: Batch) -> Tensor:
    """CLIP's own loss compares all rows of a batch; this one is a mean over rows, so that ranks can share it."""
    return nn.functional.softplus(-model(**batch).logits_per_text.diagonal()).mean()


@dataclass(frozen=True)
class Family:
    """A model class with a tiny config, by name: they are imported when one is built."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int], Batch] = causal
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss
    generates: bool = True

    def build(self, **options: Any) -> nn.Module:
        """The model with random weights, the same on every rank."""
        torch.manual_seed(7)
        config = getattr(hf, self.config)(**self.options, **options)
        model: nn.Module = getattr(hf, self.model)(config).train()
        return model


LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": D, "num_experts_per_tok": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TOWER = {
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": D,
}
VISION = {"image_size": 16, "patch_size": 8, "num_channels": 3}

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": D, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": VOCAB, "hidden_size": D, "word_embed_proj_dim": D, "ffn_dim": 2 * D, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0, **SPECIAL},
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", LLAMA | EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "gpt-oss": Family("GptOssForCausalLM", "GptOssConfig", LLAMA | {"num_local_experts": 4, "head_dim": 8}),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": D, "d_kv": 8, "d_ff": 2 * D, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
        to_sequence,
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", BERT, masked, generates=False),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": D, "n_layer": 2, "n_head": 4, **SPECIAL},
    ),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", LLAMA | {"head_dim": 8, "sliding_window": 8}),
    "phi": Family("PhiForCausalLM", "PhiConfig", LLAMA | {"num_key_value_heads": 4}),
    "qwen2-moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        LLAMA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": D},
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LLAMA
        | EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "switch": Family(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {"vocab_size": VOCAB, "d_model": D, "d_kv": 8, "d_ff": 2 * D, "num_layers": 2, "num_decoder_layers": 2}
        | {"num_heads": 4, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "expert_capacity": 64}
        | {"eos_token_id": 2, "pad_token_id": 0},
        to_sequence,
    ),
    "vit": Family(
        "ViTForImageClassification", "ViTConfig", BERT | VISION | {"num_labels": 5}, pictures, generates=False
    ),
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TOWER | SPECIAL | {"vocab_size": VOCAB, "max_position_embeddings": 64}}
        | {"vision_config": TOWER | VISION, "projection_dim": D},
        pairs,
        agreement,
        generates=False,
    ),
}
"""By name; `Family.build` makes the model."""
