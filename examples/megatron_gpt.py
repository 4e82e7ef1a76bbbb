"""A Megatron-core GPT with tensor parallelism under em.wrap: `torchrun --nproc-per-node 2 examples/megatron_gpt.py`.

Runs on CPUs too, where Megatron's own attention and its GPU initialization do not: hence `Attention` and
`use_cpu_initialization`. On GPUs, use Megatron's TransformerEngine layers as usual.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import elixir_moe as em
from elixir_tools.train.data import VOCABULARY, batch_at, python_help_text, rows_of

SEED, STEPS, ROWS, SEQ = 0, 10, 8, 64


class Attention(torch.nn.Module):
    """Causal attention of (sequence, batch, heads, width) tensors."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """-> (sequence, batch, heads * width)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def build(config: TransformerConfig, spec: Any) -> GPTModel:
    """This rank's part of the model, its weights drawn with the same seed on all ranks."""
    spec.submodules.self_attention.submodules.core_attention = Attention
    torch.manual_seed(SEED)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQ)


def train(model: GPTModel) -> None:
    """Ten steps on the English text that comes with Python."""
    em.megatron.annotate(model)  # Megatron knows what each parameter is
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.offload(rcache_blocks=8))

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    text = torch.tensor(list(python_help_text()))
    for step in range(STEPS):
        batch = rows_of(batch_at(text, seed=0, step=step, rows=ROWS, seq_len=SEQ), rank, ranks).to(device)
        positions = torch.arange(SEQ, device=device).expand(len(batch), SEQ)
        loss = model(batch[:, :-1], positions, None, labels=batch[:, 1:]).mean()
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}")


def main() -> None:
    """Tensor parallelism over all ranks."""
    em.init_mesh()  # starts torch.distributed as torchrun says
    degree = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=degree)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=degree,
        use_cpu_initialization=True,
    )
    train(build(config, get_gpt_layer_local_spec()))


if __name__ == "__main__":
    main()
