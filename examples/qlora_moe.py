"""Trains adapters on a tenth of Qwen3-30B-A3B in 4 bits, in memory that it limits: `python examples/qlora_moe.py`.

The layers are the model's own: 128 experts of 2048 x 768, of which a token takes eight. Their random weights are
drawn straight into NF4, one at a time; peft's adapters are on attention and on all experts. The process first trains
a tiny model of the same kind, so that all of Python, torch and transformers is there. Then it forbids itself more than
`--limit` GiB of further addresses. It needs torch, transformers and peft, and no GPU. With `--on FOLDER` frozen weights
are on that disk.
"""

import argparse
import ctypes
import gc
import resource
import threading
import time
import warnings
from pathlib import Path

import peft
import torch
import transformers
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.ledger import HELD_HEAD, held_line
from elixir_moe.chunks.plan import size_text

GIB = 1 << 30
LAYER = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
TINY = dict.fromkeys(LAYER, 64) | {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}


def trained(shape: dict[str, int], layers: int, plan: em.Plan, rank: int, steps: int, tokens: int) -> em.Inspection:
    """Trains adapters of a model of random weights; returns what it held."""
    config = transformers.Qwen3MoeConfig(**shape, num_hidden_layers=layers, vocab_size=4096, use_cache=False)
    torch.manual_seed(0)
    with em.sharded_init():  # no weight has memory yet
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
        em.quantize(base, "nf4")
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        experts = ["experts.gate_up_proj", "experts.down_proj"]
        model: nn.Module = peft.get_peft_model(
            base, peft.LoraConfig(r=rank, target_modules=attention, target_parameters=experts)
        )
    base.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    begun = time.perf_counter()
    model, optimizer = em.wrap(model, optimizer, plan=plan, compute_dtype=torch.bfloat16)
    print(f"{layers} layers made in {time.perf_counter() - begun:.0f} s")
    rows = torch.randint(4096, (1, tokens))
    for step in range(steps):
        begun = time.perf_counter()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        found = em.inspect(model)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - begun:.1f} s")
    optimizer.close()
    return found


def process_bytes(key: str) -> int:
    """A size of this process, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=5, help="of the model's 48 (5)")
parser.add_argument("--limit", type=float, default=6, metavar="GIB", help="memory above the bare process (6)")
parser.add_argument("--rank", type=int, default=4, help="of the adapters (4)")
parser.add_argument("--steps", type=int, default=3, help="(3)")
parser.add_argument("--tokens", type=int, default=256, help="of a step (256)")
parser.add_argument("--on", metavar="FOLDER", help="a disk for the frozen weights; without it they are in memory")
options = parser.parse_args()
limit = int(options.limit * GIB)

# For glibc: no thread reserves addresses of its own (M_ARENA_MAX), and freed memory goes back (M_MMAP_THRESHOLD).
for setting, value in ((-8, 1), (-3, 1 << 15)):
    ctypes.CDLL(None).mallopt(setting, value)
threading.stack_size(1 << 20)  # of 8 MiB for each thread
warnings.filterwarnings("ignore", module="transformers|peft")

em.init_mesh(device_type="cpu")
plan = em.Plan.offload() if options.on is None else em.Plan.offload(disk=options.on, disk_chunks=10**6)
trained(TINY, 1, plan, options.rank, 1, 32)
gc.collect()
bare = process_bytes("VmRSS")
resource.setrlimit(resource.RLIMIT_AS, (process_bytes("VmSize") + limit,) * 2)

found = trained(LAYER, options.layers, plan, options.rank, options.steps, options.tokens)
print(HELD_HEAD, *map(held_line, found.rows), sep="\n")
held, size = found.held_bytes, found.footprint
planned = {"device": size.device_bytes, "host": size.host_bytes, "disk": size.disk_bytes}
for tier, nbytes in planned.items():
    print(f"{tier}: {size_text(nbytes)} planned, {size_text(held[tier])} held")
weights = sum(chunk.nbytes for chunk in found.layout.chunks if not chunk.key.trainable)
print(f"frozen weights: {size_text(weights)}; limit: {size_text(limit)}")
print(f"peak above the bare process: {size_text(process_bytes('VmHWM') - bare)}, activations and the drawing included")
