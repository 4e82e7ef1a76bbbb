"""Trains LoRA adapters of a mixture of experts: `torchrun --nproc-per-node 2 examples/lora_moe.py`, or just python.

Adapters are on attention and on the fused experts. The frozen base is in host memory, or on disk with `--disk FOLDER`.
"""

import argparse
import tempfile

import peft
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import elixir_moe as em
from elixir_tools.train.data import batch_at, python_help_text, rows_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--disk", metavar="FOLDER", help="of a disk for the frozen base")
parser.add_argument("--steps", type=int, default=8, help="(8)")
options = parser.parse_args()

mesh = em.init_mesh()
rank, ranks, device = mesh.get_local_rank("dp"), mesh.size(0), mesh.device_type
config = Qwen3MoeConfig(  # one token a byte
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip


def base() -> torch.nn.Module:
    """Builds the model with equal weights each time; for a folder, AutoModelForCausalLM.from_pretrained(folder)."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


experts = ["experts.gate_up_proj", "experts.down_proj"]  # parameters, since fused experts are not linear layers
lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=experts)
model = peft.get_peft_model(base(), lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
plan = em.Plan.offload(disk=options.disk, disk_chunks=10**6) if options.disk else em.Plan.offload()
model, optimizer = em.wrap(model, optimizer, plan=plan)
if rank == 0:
    print(em.inspect(model))

text = torch.tensor(list(python_help_text()))
for step in range(options.steps):
    rows = rows_of(batch_at(text, seed=0, step=step, rows=8, seq_len=64), rank, ranks).to(device)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step}: loss {loss.item():.3f}")

with torch.no_grad():
    logits = model.eval()(rows[:1]).logits.cpu()  # on all ranks, since a forward gathers
with tempfile.TemporaryDirectory() as folder:
    em.save_pretrained(model, folder)  # only the adapters; no chunk of the base is read
    if rank == 0:
        plain = peft.PeftModel.from_pretrained(base(), folder).eval()
        with torch.no_grad():
            difference = (plain(rows[:1].cpu()).logits - logits).abs().max().item()
        print(f"plain peft: logits differ by {difference:.1e} at most")
