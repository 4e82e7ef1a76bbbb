"""GPT: dense, mixture-of-experts, or pyramid-residual mixture-of-experts, by its configuration.

Owns the model, its loss, the patterns of its parameters and sampling from it. An ordinary `nn.Module`: it knows meshes,
since its experts are spread over ranks, and nothing of chunks, plans or optimizers.
Source: GPT-2 (pre-norm, learned positions, tanh GELU, projections into the residual stream scaled by 1/sqrt(2 layers)).

Shape letters: B batch, S sequence, d width, V vocabulary.
"""

import math
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from elixir_moe import MoE, Pattern, expert_mesh, linear_cross_entropy
from elixir_moe.errors import ConfigError, LayoutError
from elixir_moe.ext.models import MLP, CutLinear, GroupedExperts, TensorRanks, TopKRouter, linear
from elixir_tools.models.config import GPTConfig


class GPTOutput(NamedTuple):
    """The result of a forward."""

    logits: Tensor
    """(B, S, V), in the model's dtype; (B, 0, V) with labels."""
    aux_loss: Tensor
    """() fp32: auxiliary losses of all mixture layers, times their coefficients; 0 for a dense model."""
    loss: Tensor | None = None
    """() fp32: cross-entropy of the labels, if there are any."""


class Attention(nn.Module):
    """Causal multi-head self-attention; a tensor-parallel rank has some of the heads."""

    def __init__(self, config: GPTConfig, ranks: TensorRanks | None) -> None:
        super().__init__()
        self.n_heads = config.n_heads if ranks is None else config.n_heads // ranks.size
        self.qkv = linear(config.d_model, 3 * config.d_model, ranks, dim=0, pieces=3)
        self.out = linear(config.d_model, config.d_model, ranks, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, d) -> (B, S, d)."""
        q, k, v = rearrange(self.qkv(x), "b s (three h e) -> three b h s e", three=3, h=self.n_heads).unbind()
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(heads, "b h s e -> b s (h e)"))


class Block(nn.Module):
    """One pre-norm layer: attention, then an MLP or a mixture of experts."""

    def __init__(self, config: GPTConfig, layer: int, meshes: "Meshes") -> None:
        super().__init__()
        d_hidden = config.mlp_ratio * config.d_model
        self.norm_1 = nn.LayerNorm(config.d_model)
        self.attention = Attention(config, meshes.tensor_ranks)
        self.norm_2 = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.mlp: MLP | MoE
        if config.experts[layer]:
            self.mlp = MoE(
                d_model=config.d_model,
                d_hidden=d_hidden,
                num_experts=config.experts[layer],
                top_k=config.top_k,
                mesh=meshes.of_layer(layer),
                capacity_factor=config.capacity_factor,
                residual=config.residual,
                aux_coefficient=config.aux_coefficient,
                z_coefficient=config.z_coefficient,
            )
        else:
            self.mlp = MLP(d_model=config.d_model, d_hidden=d_hidden, ranks=meshes.tensor_ranks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, d) -> (B, S, d) and the layer's auxiliary loss, () fp32."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        h = self.norm_2(x)
        if isinstance(self.mlp, MoE):
            h, aux_loss = self.mlp(h)
        else:
            h, aux_loss = self.mlp(h), torch.zeros((), device=x.device)
        return x + self.dropout(h), aux_loss


class GPT(nn.Module):
    """The model.

    Args:
        config: its shape.
        mesh: ("dp", "tp") from `init_mesh`; experts are spread over ``dp`` in the degrees of ``config.ep``, and every
            rank must build the model, since process groups are made. Heads and dense MLPs are cut over ``tp``; all
            else is the same on its ranks, which must be given the same tokens. None builds the whole model in this
            process: the same function of the global batch, whatever ``config.ep`` says.

    Raises:
        LayoutError: a degree does not divide the mesh's ranks; ``tp`` does not divide the heads; dropout with ``tp``
            above 1.
    """

    def __init__(self, config: GPTConfig, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.config = config
        self.meshes = Meshes(config, mesh)
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, i, self.meshes) for i in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters from the global RNG; the values do not depend on the layout."""
        std, std_out = 0.02, 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, module in self.named_modules():
            into_stream = name.endswith(("attention.out", "w_out"))
            if isinstance(module, CutLinear):
                module.draw_weight(std=std_out if into_stream else std)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std_out if into_stream else std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm | TopKRouter):
                module.reset_parameters()
            if isinstance(module, GroupedExperts):
                module.reset_parameters(std_in=std, std_out=std_out)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, *, recompute: bool = False) -> GPTOutput:
        """(B, S) int64 tokens, S at most ``config.seq_len`` -> logits of each next token, and the auxiliary loss.

        With (B, S) `labels`, which are those of each next token, their mean loss is computed in the place of logits;
        `recompute` is that of `linear_cross_entropy`.
        """
        if tokens.shape[1] > self.config.seq_len:
            raise ConfigError(f"{tokens.shape[1]} tokens are longer than the model's seq_len={self.config.seq_len}")
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        aux_loss = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, block_loss = self._run(block, x)
            aux_loss = aux_loss + block_loss
        x = self.norm(x)
        if labels is None:
            return GPTOutput(self.head(x), aux_loss)
        none = x.new_empty(len(x), 0, self.config.vocab_size)
        return GPTOutput(none, aux_loss, linear_cross_entropy(x, self.head, labels, recompute=recompute))

    def _run(self, block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.checkpoint == "none" or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=self.config.checkpoint == "reentrant")


class Meshes:
    """The model's mesh, its tensor-parallel ranks and an expert mesh for each degree; copies of a model share them."""

    def __init__(self, config: GPTConfig, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.degrees = config.ep
        self.experts: dict[int, DeviceMesh] = {}
        self.tensor_ranks: TensorRanks | None = None
        if mesh is None:
            return
        if mesh.mesh_dim_names != ("dp", "tp"):
            raise LayoutError(f"GPT runs on a mesh ('dp', 'tp'), got {mesh.mesh_dim_names}: use em.init_mesh()")
        config.check_tp(mesh.size(1))
        self.tensor_ranks = TensorRanks.on(mesh)
        layers = zip(config.experts, config.ep, strict=True)
        self.experts = {ep: expert_mesh(mesh, ep) for ep in sorted({ep for experts, ep in layers if experts})}

    def of_layer(self, layer: int) -> DeviceMesh | None:
        """The expert mesh of a layer; None if it is dense or there is no mesh."""
        return self.experts.get(self.degrees[layer])

    def __deepcopy__(self, memo: dict[int, object]) -> "Meshes":
        return self


def lm_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of each next token, in fp32, plus the model's auxiliary loss; batch is (B, S + 1) int64."""
    logits, aux_loss = model(batch[:, :-1])[:2]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) + aux_loss


def lm_loss_without_logits(model: nn.Module, batch: Tensor, *, recompute: bool = False) -> Tensor:
    """Computes `lm_loss` by `linear_cross_entropy`, without logits; `recompute` is its argument."""
    output = model(batch[:, :-1], labels=batch[:, 1:], recompute=recompute)
    loss: Tensor = output.loss + output.aux_loss
    return loss


def gpt_patterns(model: GPT) -> dict[str, Pattern]:
    """The rules for `annotate`: for each layer cut over ``tp``, for the experts of each mixture layer, and one for the
    rest; none without a mesh."""
    dense = model.meshes.mesh
    if dense is None:
        return {}
    rules = {
        f"{path}.{name}": pattern
        for path, module in model.named_modules()
        if isinstance(module, CutLinear)
        for name, pattern in module.patterns(dense).items()
    }
    for i, block in enumerate(model.blocks):
        mesh = model.meshes.of_layer(i)
        if isinstance(block.mlp, MoE) and mesh is not None:
            rules[f"blocks.{i}.mlp.experts.*"] = Pattern(mesh, replicate=("edp", "tp"), shard={"ep": 0})
    return rules | {"*": Pattern(dense, replicate=("dp", "tp"))}


def tokens_per_expert(model: nn.Module) -> dict[str, list[int]]:
    """By name of mixture layer, the choices that fell on each expert in the last forward, all ranks together."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        return {}
    counts = iter(_joined([layer.tokens_per_expert for layer in layers.values()]).tolist())  # one wait for the device
    return {name: list(islice(counts, layer.num_experts)) for name, layer in layers.items()}


def _joined(counts: list[Tensor]) -> Tensor:
    """All counts in one tensor, on the GPU if any is there; a layer that has not run yet has zeros on the CPU."""
    device = next((count.device for count in counts if count.device.type != "cpu"), torch.device("cpu"))
    return torch.cat([count.to(device) for count in counts])


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    n: int,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Appends `n` sampled tokens to each sequence of `prompt`, (B, S) int64 with S at least 1.

    A temperature of 0 takes the most probable token. The samples come from the device's RNG unless there is a
    `generator`. Every rank must call it with prompts of the same shape and the same `n`: mixture layers communicate.
    The model is in evaluation mode meanwhile.
    """
    was_training = model.training
    model.eval()
    try:
        seen: int = model.config.seq_len  # type: ignore[union-attr, assignment]
        for _ in range(n):
            logits: Tensor = model(prompt[:, -seen:]).logits
            prompt = torch.cat([prompt, _sample(logits[:, -1].float(), temperature, generator)], dim=1)
    finally:
        model.train(was_training)
    return prompt


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """(B, V) -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
