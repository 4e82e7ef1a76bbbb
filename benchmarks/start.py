"""Memory of a rank while a model starts, sharded or plain: ``torchrun --nproc-per-node 2 -m benchmarks.start``.

Owns the measurement: the most memory a rank has resident between the construction of a GPT and the end of `em.wrap`,
over what it had before, and for comparison what it has afterwards and the largest parameter. Weights are bf16 in
host memory, masters and moments on disk, so that large models fit a small machine. Rank 0 prints one JSON object.
"""

import argparse
import gc
import json
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import elixir_moe as em
from benchmarks.memory import status_mib
from elixir_tools.models.gpt import GPT, GPTConfig

_MIB = 1 << 20
_ALL = 1 << 20
"""More chunks than there are."""


def measure(config: GPTConfig, disk: str, *, sharded: bool) -> dict[str, float]:
    """MiB of the rank that has the most of each, and the seconds of the start. Collective."""
    mesh = em.init_mesh(device_type="cpu")
    gc.collect()
    dist.barrier()
    bare, start = status_mib("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    torch.manual_seed(0)
    with em.sharded_init() if sharded else nullcontext():
        model = GPT(config, mesh)
    numels = [math.prod(parameter.shape) for parameter in model.parameters()]
    model, optimizer = em.wrap(
        model,
        torch.optim.AdamW(model.parameters()),
        plan=em.Plan.offload(disk=disk, disk_chunks=_ALL),
        compute_dtype=torch.bfloat16,
    )
    seconds, peak = time.perf_counter() - start, status_mib("VmHWM") - bare
    shards = 2 * sum(chunk.shard_numel for chunk in em.inspect(model).layout.chunks) / _MIB
    most = torch.tensor([peak, status_mib("VmRSS") - bare, shards, seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    optimizer.close()
    peak, after, shards, seconds = most.tolist()
    largest = 4 * max(numels) / _MIB
    return {
        "parameters": sum(numels),
        "peak_mib": round(peak),
        "afterwards_mib": round(after),
        "of_them_shards_mib": round(shards),
        "largest_parameter_mib": round(largest),
        "peak_over_afterwards_and_largest": round(peak / (after + largest), 3),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measures the start of the model that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--plain", action="store_true", help="without em.sharded_init")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for masters and moments")
    given = parser.parse_args()
    config = GPTConfig(
        vocab_size=50257, seq_len=1024, n_layers=given.layers, d_model=given.width, n_heads=given.width // 64
    )
    found = measure(config, given.disk, sharded=not given.plain)
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": dist.get_world_size(), "sharded": not given.plain} | found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
