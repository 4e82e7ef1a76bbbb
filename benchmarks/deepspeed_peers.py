"""DeepSpeed's contenders: ZeRO-2, ZeRO-3, and its PR-MoE with ZeRO-2; it is imported when one is built.

Owns how DeepSpeed is set up on CPU ranks. Its settings are its defaults, but for buckets short enough that
communication overlaps; AdamW is torch's fused one, as for all peers. Its mixture-of-experts layer takes the place of
ours in the same GPT, with the same weights, and each expert's capacity in the place of ours.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import Contender, fused_adamw
from benchmarks.workload import BUCKET_NUMEL, Workload, fresh_model
from elixir_moe.moe.experts import MLP, GroupedExperts
from elixir_moe.moe.layer import MoE
from elixir_tools.models.gpt import Block


@dataclass(frozen=True, kw_only=True)
class Engine(Contender):
    """A contender whose backward and update are DeepSpeed's."""

    engine: Any

    def step(self, batch: Tensor) -> Tensor:
        """One forward, backward and update on this rank's batch; returns the loss, ()."""
        loss = self.loss(self.engine, batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def close(self) -> None:
        """Releases its hooks and buffers."""
        self.engine.destroy()


def zero(workload: Workload, stage: int, *, offload: bool = False) -> Contender:
    """ZeRO of a dense model; with `offload`, parameters and optimizer are in host memory."""
    model = fresh_model(workload.model)
    return _engine(model, model.parameters(), workload, stage, offload=offload)


def pr_moe(workload: Workload) -> Contender:
    """The workload's PR-MoE with DeepSpeed's layers; ZeRO-2, since ZeRO-3 refuses them."""
    _prepare()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = fresh_model(workload.model)
    for layer, block in enumerate(model.blocks):
        if isinstance(block.mlp, MoE):
            model.blocks[layer] = _Block(block, workload.model.ep[layer])
    group = {"params": list(model.parameters()), "name": "parameters"}
    return _engine(model, split_params_into_different_moe_groups_for_optimizer(group), workload, stage=2)


class _Block(nn.Module):
    """A block of ours with DeepSpeed's mixture-of-experts layer in it, and the weights of our own."""

    def __init__(self, block: Block, ep: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE as DeepSpeedMoE

        moe = block.mlp
        assert isinstance(moe, MoE) and moe.mlp is not None and moe.coefficient is not None
        self.norm_1, self.attention = block.norm_1, block.attention
        self.norm_2, self.dropout = block.norm_2, block.dropout
        self.aux_coefficient = moe.aux_coefficient
        self.moe = DeepSpeedMoE(
            hidden_size=moe.router.weight.shape[1],
            expert=moe.mlp,
            num_experts=moe.num_experts,
            ep_size=ep,
            capacity_factor=moe.capacity_factor,
            use_residual=True,
            use_rts=False,  # which tokens are dropped is then decided by their order, as ours does
        )
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(moe.router.weight)
            self.moe.coefficient.load_state_dict(moe.coefficient.state_dict())
            experts = self.moe.deepspeed_moe.experts.deepspeed_experts
            for i, expert in enumerate(experts):
                _copy_expert(expert, moe.experts, dist.get_rank() % ep * len(experts) + i)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, d) -> (B, S, d) and the auxiliary loss, ()."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        h, aux_loss, _ = self.moe(self.norm_2(x))
        return x + self.dropout(h), self.aux_coefficient * aux_loss


def _copy_expert(target: MLP, source: GroupedExperts, index: int) -> None:
    assert source.b_in is not None and source.b_out is not None
    target.w_in.weight.copy_(source.w_in[index].t())
    target.w_in.bias.copy_(source.b_in[index])
    target.w_out.weight.copy_(source.w_out[index].t())
    target.w_out.bias.copy_(source.b_out[index])


def _prepare() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)


def _engine(model: nn.Module, parameters: Any, workload: Workload, stage: int, *, offload: bool = False) -> Engine:
    _prepare()
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": BUCKET_NUMEL},
        "bf16": {"enabled": workload.bf16},
        "steps_per_print": 10**9,
    }
    if offload:
        host = {"device": "cpu"}
        config["zero_optimization"] |= {"offload_optimizer": host, "offload_param": host}
        config["zero_force_ds_cpu_optimizer"] = False
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=fused_adamw(parameters), config=config)
    return Engine(model=model, optimizer=optimizer, engine=engine)
