"""Megatron-core's GPTModel: under its own data parallelism, and under ours.

Owns how a Megatron model of the workload's shape is built on CPU ranks and how Megatron's data parallelism steps.
Without a GPU Megatron-core needs stand-ins for what is missing there; they are those of the tests, and stay in place as
long as the contender does.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from benchmarks.contenders import LEARNING_RATE, Contender, fused_adamw
from benchmarks.workload import BUCKET_NUMEL, SEED, Workload
from tests.support import megatron_cases


@dataclass(frozen=True, kw_only=True)
class Megatron(Contender):
    """A contender that runs on stand-ins."""

    shims: ExitStack


@dataclass(frozen=True, kw_only=True)
class MegatronDDP(Megatron):
    """Megatron's DistributedDataParallel: gradients are kept and reduced in its own buffer."""

    def step(self, batch: Tensor) -> Tensor:
        """One forward, backward and update on this rank's batch; returns the loss, ()."""
        loss = self.loss(self.model, batch)
        loss.backward()
        self.model.finish_grad_sync()
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()
        return loss.detach()


def ddp(workload: Workload) -> Contender:
    """Megatron-core's own data parallelism, with gradients reduced while backward runs."""
    model, config, shims = _model(workload)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=BUCKET_NUMEL)
    model = DistributedDataParallel(config, settings, model)
    model.zero_grad_buffer()
    return MegatronDDP(model=model, optimizer=fused_adamw(model.parameters()), loss=lm_loss, shims=shims)


def ours(workload: Workload, plan: em.Plan) -> Contender:
    """This library under `plan`."""
    model, _, shims = _model(workload)
    em.megatron.annotate(model)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), plan=plan)
    return Megatron(model=model, optimizer=optimizer, loss=lm_loss, shims=shims)


def lm_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """(B, S + 1) tokens -> mean cross-entropy, ()."""
    positions = torch.arange(batch.shape[1] - 1).expand(len(batch), -1)
    loss: Tensor = model(batch[:, :-1], positions, None, labels=batch[:, 1:]).mean()
    return loss


def _model(workload: Workload) -> tuple[nn.Module, Any, ExitStack]:
    shims = ExitStack()
    shims.enter_context(megatron_cases.shims())
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    shape = workload.model
    config = TransformerConfig(
        num_layers=shape.n_layers,
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        ffn_hidden_size=shape.mlp_ratio * shape.d_model,
        activation_func=F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = megatron_cases.Norm
    spec.submodules.self_attention.submodules.core_attention = megatron_cases.Attention
    torch.manual_seed(SEED)
    layers = TransformerBlockSubmodules(layer_specs=[spec] * shape.n_layers, layer_norm=megatron_cases.Norm)
    model = GPTModel(
        config,
        layers,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_len,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="learned_absolute",
    )
    return model, config, shims
