"""Small mixtures of transformers with a quantized base and LoRA of peft, on any device, for the tests of both."""

import gc
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.quantized.modules import QuantizedExperts
from tests.support.cases import placed

ADAPTER_TOLERANCE = 3e-5
"""Of an element and a step, as `tests.support.parity` derives it."""
STEPS, ROWS, LENGTH, VOCAB = 3, 4, 6, 96
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
FAMILIES = {
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(),
    "offload": em.Plan.offload(),
    "disk": em.Plan.offload(disk_chunks=99, values_on_disk=True),
}


def base(family: str = "qwen3-moe", dtype: torch.dtype = torch.float32) -> nn.Module:
    """The base with random weights, the same on every rank."""
    name, options = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(hf, f"{name}Config")(**(SIZES | options))
    config._experts_implementation = "grouped_mm"
    return getattr(hf, f"{name}ForCausalLM")(config).to(dtype).requires_grad_(False)


def adapted(model: nn.Module) -> nn.Module:
    """The base with LoRA on attention and experts, no factor zero, whose products the oracle takes in our order."""
    torch.manual_seed(8)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    return em.group_experts(peft.get_peft_model(model, config))


def built(family: str, scheme: str, *, decoded: bool) -> nn.Module:
    """The adapted model, quantized, or with the decoded weights in the quantized ones' places."""
    model = em.quantize(base(family), scheme)
    assert any(isinstance(module, QuantizedExperts) for module in model.modules())
    return adapted(em.dequantize(model) if decoded else model)


def batch(step: int) -> Tensor:
    """This rank's rows of a step's tokens, (rows, LENGTH) int64; all of them without ranks."""
    rows = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return rows.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else rows


def steps(model: Any, optimizer: Any, number: int = STEPS) -> list[Tensor]:
    """The loss of each step."""
    losses = []
    for step in range(number):
        tokens = batch(step).to(next(model.parameters()).device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def run(family: str, scheme: str, plan: em.Plan, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """(rank) The mean losses of all ranks, and the adapters; `options` are those of `em.wrap`."""
    model = built(family, scheme, decoded=False)
    model, optimizer = em.wrap(model, optimizer_of(model), plan=placed(plan), **options)
    losses = torch.stack([loss.double().cpu() for loss in steps(model, optimizer)])
    dist.all_reduce(losses)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    trained = {name: value for name, value in state.items() if "lora" in name}
    del model, optimizer
    gc.collect()
    return (losses / dist.get_world_size()).tolist(), trained
