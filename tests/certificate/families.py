"""The twelve families of the certificate: small configs of transformers that are kinds of the published ones.

Owns their settings, the modules that get adapters, and weights and pictures that are alike on every machine. What a
setting does not say is transformers' default; sizes alone are small. Builds nothing until it is asked to.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elixir_tools.models.lora import Lora
from elixir_tools.verify.cases import HuggingFace

ROWS, LENGTH = 4, 12
"""Of a micro-batch, all ranks together; tokens of a row."""
_BITS, _SCALE = 8, 2.0**-11
"""A drawn weight is a whole number of so many bits, times the scale: a uniform one of less than 1/16."""
_D = 64
"""Widths are multiples of it, as blocks of nf4 have to be."""
_BASE: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": _D, "intermediate_size": 2 * _D, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_SHARED_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"moe_intermediate_size": _D, "num_experts_per_tok": 2}
_PIXELS = 16
_TOWER = {
    **{"model_type": "clip_vision_model", "hidden_size": _D, "intermediate_size": _D, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": _PIXELS, "patch_size": 8, "projection_dim": _D},
}
_PICTURE_TOKEN, _PATCHES = 127, 4
_QV = "q_proj,v_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A kind of model."""

    architecture: str
    """Its class in transformers."""
    settings: dict[str, Any]
    """Its config."""
    adapted: str
    """Modules that get adapters, as `Lora.parse` reads them."""
    pictures: bool = False
    """Whether a row begins with a picture."""

    def source(self, *, lora: bool, quantized: str | None, checkpointing: bool) -> "Drawn":
        """What is verified."""
        kind = WithPictures if self.pictures else Drawn
        return kind(
            settings=self.settings,
            architecture=self.architecture,
            rows=ROWS,
            length=LENGTH,
            lora=Lora.parse(f"r=4,targets={self.adapted}") if lora else None,
            quantized=quantized,
            checkpointing=checkpointing,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn(HuggingFace):
    """A model whose weights are small whole numbers times a power of two, which no processor rounds its own way."""

    def adapted(self, model: Any) -> Any:
        """See `_Asked.adapted`; all weights of it are drawn anew but those that were all alike, as norms' are."""
        model = HuggingFace.adapted(self, model)
        with torch.no_grad():
            for parameter in dict.fromkeys(model.parameters()):
                if parameter.is_meta or (parameter == parameter.flatten()[0]).all():
                    continue
                whole = torch.randint(-(2 ** (_BITS - 1)), 2 ** (_BITS - 1), parameter.shape)
                parameter.copy_(whole * _SCALE)
        return model


@dataclass(frozen=True, kw_only=True, slots=True)
class WithPictures(Drawn):
    """A model that reads a picture before the words of a row."""

    def sample(self) -> dict[str, Tensor]:
        """Random pictures and tokens; the places of a picture have no label."""
        words = torch.randint(3, _PICTURE_TOKEN, (self.rows, self.length))
        words[:, :_PATCHES] = _PICTURE_TOKEN
        labels = words.masked_fill(words == _PICTURE_TOKEN, -100)
        pixels = torch.randint(-256, 256, (self.rows, 3, _PIXELS, _PIXELS)) / 256
        return {"input_ids": words, "pixel_values": pixels, "labels": labels}


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        settings={"model_type": "llama", **_BASE, **_SHARED_HEADS, "tie_word_embeddings": False},
        adapted=_QV,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        settings={"model_type": "qwen3", **_BASE, **_SHARED_HEADS, "tie_word_embeddings": True},
        adapted=_QV,
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        settings={
            **{"model_type": "gemma3_text", **_BASE, **_SHARED_HEADS, "sliding_window": 4},
            **{"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        },
        adapted=_QV,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        settings={"model_type": "phi3", **_BASE, "num_key_value_heads": 2},
        adapted="qkv_proj,o_proj",
    ),
    "gpt-neox": Family(
        architecture="GPTNeoXForCausalLM",
        settings={"model_type": "gpt_neox", **_BASE, "use_parallel_residual": True},
        adapted="query_key_value,dense",
    ),
    "mamba": Family(
        architecture="MambaForCausalLM",
        settings={
            **{"model_type": "mamba", "vocab_size": 128, "hidden_size": _D, "num_hidden_layers": 2, "state_size": 8},
            **{"time_step_rank": _D, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        adapted="in_proj,x_proj",
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        settings={"model_type": "mixtral", **_BASE, **_SHARED_HEADS, "num_local_experts": 4},
        adapted=f"{_QV},experts",
    ),
    "qwen3-moe": Family(
        architecture="Qwen3MoeForCausalLM",
        settings={"model_type": "qwen3_moe", **_BASE, **_SHARED_HEADS, **_EXPERTS, "num_experts": 4},
        adapted=f"{_QV},experts",
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        settings={"model_type": "olmoe", **_BASE, "num_experts": 4, "num_experts_per_tok": 2},
        adapted=f"{_QV},experts",
    ),
    "deepseek-v3": Family(
        architecture="DeepseekV3ForCausalLM",
        settings={
            **{"model_type": "deepseek_v3", **_BASE, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
            **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
            **{"q_lora_rank": _D, "kv_lora_rank": _D, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
            **{"v_head_dim": 16},
        },
        adapted="q_a_proj,q_b_proj,kv_b_proj,experts",
    ),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        settings={
            **{"model_type": "gpt_oss", **_BASE, **_SHARED_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        },
        adapted=f"{_QV},experts",
    ),
    "llava": Family(
        architecture="LlavaForConditionalGeneration",
        settings={
            **{"model_type": "llava", "image_token_index": _PICTURE_TOKEN, "image_seq_length": _PATCHES},
            "text_config": {"model_type": "llama", **_BASE, **_SHARED_HEADS},
            "vision_config": _TOWER,
            "vision_feature_layer": -1,
        },
        adapted=_QV,
        pictures=True,
    ),
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """SHA-256 of what a row begins with; alike on every machine."""

    config: str
    """Of the settings."""
    batches: str
    """Of the first batch of each of three seeds."""
    weights: str = field(default="")
    """Of the weights before the first step, adapters included and nothing quantized."""


def hashes(source: Drawn, seed: int) -> Inputs:
    """The hashes of a row's inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = source.adapted(source.base())
        weights = hashlib.sha256()
        for name, parameter in model.named_parameters():
            weights.update(name.encode())
            weights.update(parameter.detach().float().contiguous().numpy().tobytes())
        batches = hashlib.sha256()
        for number in range(3):
            torch.manual_seed(number)
            for name, value in source.sample().items():
                batches.update(name.encode())
                batches.update(value.numpy().tobytes())
    settings = json.dumps(source.settings, sort_keys=True)
    return Inputs(hashlib.sha256(settings.encode()).hexdigest(), batches.hexdigest(), weights.hexdigest())
