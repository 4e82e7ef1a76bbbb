"""The models of the proof: their shapes, how they are made in host memory, and how a batch gives a loss.

Owns the shapes and the toys that stand for them where there is no GPU. Weights repeat one random draw: drawing billions
of numbers takes minutes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import elixir_moe as em
from benchmarks.workload import SEED
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss

RANK_OF_ADAPTERS = 16
IN_LITTLE = "-24g"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train, without data, and what is needed to give it some."""

    module: nn.Module
    """On the meta device, in bf16."""
    blocks: list[nn.Module]
    """Its layers, each of which is recomputed in backward."""
    loss: Callable[[nn.Module, Tensor], Tensor]
    """The loss of a batch of tokens, (B, seq_len + 1) int64."""
    vocab_size: int
    seq_len: int
    batch: int
    """Sequences of a micro-batch."""
    chosen: float
    """The fraction of the experts that a token meets."""
    loss_without_logits: Callable[[nn.Module, Tensor], Tensor] | None = None
    """`loss` by `em.linear_cross_entropy`, for ours where a pass of many micro-batches would keep their logits."""
    ties: Callable[[nn.Module], None] = lambda module: None
    """Ties again what leaves the meta device untied."""

    def counts(self) -> dict[str, int]:
        """Parameters: all, those that are trained, those a token meets, and those of both kinds."""
        seen = dict(self.module.named_parameters())
        experts = {name for name in seen if ".experts." in name}
        met = {n: int(p.numel() * (self.chosen if n in experts else 1)) for n, p in seen.items()}
        return {
            "parameters": sum(p.numel() for p in seen.values()),
            "trained": sum(p.numel() for p in seen.values() if p.requires_grad),
            "active": sum(met.values()),
            "active_trained": sum(met[n] for n, p in seen.items() if p.requires_grad),
            "layers": len(self.blocks),
        }


def build(name: str, *, toy: bool, layers: int | None = None) -> Model:
    """The model called `name`, or its toy; of `layers` layers if that is less than it has.

    A name that ends in `IN_LITTLE` is that of a model to train in little memory, by many small micro-batches.
    """
    little, name = name.endswith(IN_LITTLE), name.removesuffix(IN_LITTLE)
    if name == "qwen3-30b-a3b-lora":
        return _qwen3(toy, layers)
    config = _TOYS[name] if toy else _SHAPES[name]
    if layers is not None and layers < config.n_layers:
        config = replace(config, n_layers=layers, experts=config.experts[:layers], ep=config.ep[:layers])
    with torch.device("meta"):
        module = GPT(config).bfloat16()

    def tie(gpt: nn.Module) -> None:
        gpt.head.weight = gpt.tokens.weight

    return Model(
        module=module,
        blocks=list(module.blocks),
        loss=lm_loss,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        batch=2 if toy or little else 8,
        chosen=config.top_k / max(1, sum(config.experts) / max(1, sum(map(bool, config.experts)))),
        ties=tie,
    )


def _gpt2(*, d_model: int, n_layers: int, n_heads: int) -> GPTConfig:
    shape = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads}
    return GPTConfig(vocab_size=50257, seq_len=1024, checkpoint="non_reentrant", **shape)


_PR_MOE = {"ep": (), "residual": True, "capacity_factor": 1.25}
_TOY = {"vocab_size": 512, "seq_len": 16, "d_model": 64, "n_heads": 4, "checkpoint": "non_reentrant"}
_SHAPES = {
    "gpt2-4b": _gpt2(d_model=3072, n_layers=32, n_heads=24),
    "gpt2-5.5b": _gpt2(d_model=4096, n_layers=26, n_heads=32),
    "pr-moe-6b": replace(
        _gpt2(d_model=2048, n_layers=24, n_heads=16),
        experts=tuple((8 if layer < 12 else 16) if layer % 2 else 0 for layer in range(24)),
        **_PR_MOE,
    ),
}
_TOYS = {
    "gpt2-4b": GPTConfig(n_layers=4, **_TOY),
    "gpt2-5.5b": GPTConfig(n_layers=5, **_TOY),
    "pr-moe-6b": GPTConfig(n_layers=4, experts=(0, 4, 0, 4), **_TOY, **_PR_MOE),
}


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.base(x) + self.up(self.down(x))


def _qwen3(toy: bool, layers: int | None) -> Model:
    """Qwen3-30B-A3B by its published configuration, frozen, with adapters on the projections of its attention."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
    }
    if toy:
        shape |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
        shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        shape |= {"num_experts": 8, "num_experts_per_tok": 2}
    shape["num_hidden_layers"] = min(shape["num_hidden_layers"], layers or shape["num_hidden_layers"])
    config = Qwen3MoeConfig(**shape, use_cache=False, tie_word_embeddings=False)
    with torch.device("meta"):
        module = Qwen3MoeForCausalLM(config).bfloat16().requires_grad_(False)
        for layer in module.model.layers:
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(attention, name, Adapted(getattr(attention, name), RANK_OF_ADAPTERS))
    rotary = type(module.model.rotary_emb)
    module.model.rotary_emb = rotary(config=config)  # its buffers are computed, not loaded
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    return Model(
        module=module,
        blocks=list(module.model.layers),
        loss=_causal_loss,
        vocab_size=config.vocab_size,
        seq_len=16 if toy else 1024,
        batch=2 if toy else 4,
        chosen=config.num_experts_per_tok / config.num_experts,
        loss_without_logits=_causal_loss_without_logits,
    )


def _causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _causal_loss_without_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state
    return em.linear_cross_entropy(hidden, model.lm_head, tokens[:, 1:])


def fill(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Gives what is on the meta device in `module` memory on the host, in `dtype`, and values, alike in all dtypes."""
    with torch.no_grad():
        draw = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(SEED)).bfloat16().to(dtype)
        for child in list(module.modules()):
            new = {name for name, p in child.named_parameters(recurse=False) if p.is_meta}
            child._apply(lambda t: torch.empty_like(t, device="cpu", dtype=dtype) if t.is_meta else t, recurse=False)
            for name in new:
                _draw(getattr(child, name), draw, ones="norm" in type(child).__name__.lower() and name == "weight")


def _draw(parameter: Tensor, draw: Tensor, *, ones: bool) -> None:
    if parameter.ndim == 1:
        parameter.fill_(float(ones))
        return
    for part in parameter.view(-1).split(len(draw)):
        part.copy_(draw[: len(part)])
