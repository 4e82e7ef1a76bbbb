"""Fine-tunes a Hugging Face model: `torchrun --nproc-per-node 2 examples/hf_finetune.py`, or just python."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import elixir_moe as em
from elixir_tools.train.data import batch_at, python_help_text, rows_of

mesh = em.init_mesh()
rank, ranks, device = mesh.get_local_rank("dp"), mesh.size(0), mesh.device_type
torch.manual_seed(0)
config = Qwen3MoeConfig(  # one token a byte
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)  # with weights: AutoModelForCausalLM.from_pretrained(folder)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero3())

text = torch.tensor(list(python_help_text()))
for step in range(10):
    rows = rows_of(batch_at(text, seed=0, step=step, rows=8, seq_len=64), rank, ranks).to(device)
    loss = model(input_ids=rows, labels=rows).loss  # the model shifts the labels itself
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step}: loss {loss.item():.3f}")

prompt = torch.tensor([list(b"class ")], device=device)
tokens = model.eval().generate(prompt, max_new_tokens=20, pad_token_id=0)
print(f"rank {rank}: {bytes(tokens[0].tolist())!r}")
with tempfile.TemporaryDirectory() as folder:
    em.save_pretrained(model, folder)  # full weights, a chunk at a time
    if rank == 0:
        again = AutoModelForCausalLM.from_pretrained(folder)
        print(f"saved and read again: {sum(p.numel() for p in again.parameters())} parameters")
