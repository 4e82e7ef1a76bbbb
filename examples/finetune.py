"""Fine-tunes a Hugging Face model on the lines of a file: `torchrun --nproc-per-node 2 finetune.py MODEL TEXTS`."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import elixir_moe as em

name, texts = sys.argv[1], Path(sys.argv[2]).read_text().splitlines()
mesh = em.init_mesh()  # the ranks of torchrun, or only this process
rank, ranks = mesh.get_local_rank("dp"), mesh.size(0)
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
texts = [text for text in texts if len(tokenizer(text).input_ids) > 1]  # one token has no next one to learn
model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5), plan=em.Plan.offload())
for first in range(0, len(texts) - ranks + 1, ranks):  # each rank takes another line
    tokens = tokenizer(texts[first + rank], return_tensors="pt").input_ids.to(mesh.device_type)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} text {first + rank}: loss {loss.item():.3f}")
em.save_pretrained(model, "tuned")  # a folder for from_pretrained
if rank == 0:
    tokenizer.save_pretrained("tuned")
