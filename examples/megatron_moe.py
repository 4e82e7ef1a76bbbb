"""A Megatron-core mixture of experts under em.wrap: `torchrun --nproc-per-node 2 examples/megatron_moe.py`.

Runs on CPUs too, with a router, `draw_experts` and a line in `main` that stand in for what Megatron asks of CUDA; see
megatron_gpt.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron_gpt import SEED, build, train

import elixir_moe as em


class Router(TopKRouter):
    """Megatron's router with torch's product: its own asks for CUDA and for TransformerEngine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """(sequence, batch, width) -> (sequence, batch, experts)."""
        return F.linear(input, self.weight, self.bias)


def draw_experts(model: torch.nn.Module, config: TransformerConfig) -> None:
    """With a seed of each expert-parallel rank's own, as `model_parallel_cuda_manual_seed` has it.

    Megatron draws experts so only on GPUs: under `use_cpu_initialization` they come from the seed of all ranks, and
    every rank has the same ones.
    """
    torch.manual_seed(SEED + 1024 + 100 * parallel_state.get_expert_model_parallel_rank())
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):  # Megatron's mark of experts
            init = config.output_layer_init_method if "linear_fc2" in name else config.init_method
            init(parameter)


def main() -> None:
    """Experts shared out over all ranks, each of which has tokens of its own."""
    em.init_mesh()
    if not torch.cuda.is_available():  # where Megatron's dispatcher puts the tokens it receives
        torch.cuda.current_device = lambda: torch.device("cpu")
    degree = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=degree)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=2 * degree,
        moe_ffn_hidden_size=128,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        expert_model_parallel_size=degree,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    mixture = spec.submodules.mlp  # a ModuleSpec in Megatron-core 0.16, a functools.partial in 0.19
    getattr(mixture, "keywords", vars(mixture))["submodules"].router = Router
    model = build(config, spec)
    draw_experts(model, config)
    train(model)


if __name__ == "__main__":
    main()
