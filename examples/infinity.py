"""Trains a model whose weights are three times the memory it may use: `python examples/infinity.py`.

The bare process trains one layer, so that all of Python and torch is there. Then it forbids itself more than `--limit`
MiB of further addresses and trains the model. Frozen weights are on disk, and so are the masters and moments of what is
trained: adapters of the frozen weights, and a head. With `--on host` all stays in memory, and the process fails.
"""

import argparse
import ctypes
import gc
import resource
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elixir_moe as em
from elixir_moe.chunks.ledger import HELD_HEAD, held_line
from elixir_moe.chunks.plan import size_text

MIB = 1 << 20
WIDTH = 2048
LAYER_BYTES = 4 * WIDTH * WIDTH


class Layer(nn.Module):
    """x + gelu(frozen(norm(x)) + adapter): 16 MiB of frozen weights, and a trained product of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., WIDTH) -> (..., WIDTH)."""
        y = self.norm(x)
        return x + F.gelu(self.frozen(y) + self.up(self.down(y)))


def wrapped(layers: int, plan: em.Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of bytes, ready to be trained. Its weights are drawn straight into their shards."""
    torch.manual_seed(0)
    with em.sharded_init():
        embedding, head = nn.Embedding(256, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 256)
        model = nn.Sequential(embedding, *[Layer() for _ in range(layers)], head)
    em.tile(model, at_most=tile_bytes)  # a whole layer would not fit in a block
    return em.wrap(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), plan=plan)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[float]:
    """Yields the loss of each step."""
    text = torch.tensor(list(b"large"))
    for _ in range(steps):
        loss = F.cross_entropy(model(text[:-1]), text[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def process_bytes(key: str) -> int:
    """A size of this process. Linux counts it; `getrusage` would give the parent's peak where that was higher."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--limit", type=int, default=192, metavar="MIB", help="memory above the bare process (192)")
parser.add_argument("--steps", type=int, default=3, help="(3)")
parser.add_argument("--on", default=tempfile.gettempdir(), metavar="FOLDER", help="of a disk, or 'host'")
options = parser.parse_args()
limit = options.limit * MIB
tile_bytes = limit // 32

# For glibc: no thread reserves addresses of its own (M_ARENA_MAX), and freed memory goes back (M_MMAP_THRESHOLD).
for setting, value in ((-8, 1), (-3, 1 << 15)):
    ctypes.CDLL(None).mallopt(setting, value)
threading.stack_size(MIB)  # of 8 MiB for each thread
torch.set_num_threads(1)

em.init_mesh(device_type="cpu")
plan = em.Plan.offload(chunk_numel=tile_bytes // 4)
if options.on != "host":
    plan = replace(plan, disk=options.on, disk_chunks=10**6)  # all of them
model, optimizer = wrapped(1, plan)
list(train(model, optimizer, steps=1))
optimizer.close()
del model, optimizer
gc.collect()
bare = process_bytes("VmRSS")
resource.setrlimit(resource.RLIMIT_AS, (process_bytes("VmSize") + limit,) * 2)

model, optimizer = wrapped(-(-3 * limit // LAYER_BYTES), plan)
for step, loss in enumerate(train(model, optimizer, options.steps)):
    print(f"step {step}: loss {loss:.3f}")

found = em.inspect(model)
print(HELD_HEAD, *map(held_line, found.rows), sep="\n")
print("held:", ", ".join(f"{tier} {size_text(nbytes)}" for tier, nbytes in found.held_bytes.items()))
frozen = sum(chunk.nbytes for chunk in found.layout.chunks if not chunk.key.trainable)
print(f"frozen weights: {size_text(frozen)}; limit: {size_text(limit)}")
peak, planned = process_bytes("VmHWM") - bare, found.footprint.host_bytes + found.footprint.device_bytes
print(f"peak above the bare process: {size_text(peak)}; planned: {size_text(planned)}, without activations")
print(f"frozen weights read: {size_text(found.statistics.bytes_fetched['disk'])}")
