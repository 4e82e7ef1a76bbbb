"""Peak memory of a rank in training, of every contender.

Owns the gauge: the most memory the process has had resident in its steps, over what it had before there was a model.
Each contender has processes of its own, for what one has freed another would not have to ask for again. On CPUs device
and host are one memory, so an offloading contender shows what it holds in both.
"""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Build
from benchmarks.measure import batches
from benchmarks.workload import Workload

STEPS = 3


def peak_mib(build: Build, workload: Workload) -> list[float]:
    """MiB of the rank that has the most. Collective."""
    data = batches(workload, stream=0)
    drawn = [next(data) for _ in range(STEPS)]
    dist.barrier()
    bare = status_mib("VmRSS")
    contender = build(workload)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for batch in drawn:
        contender.step(batch)
    most = torch.tensor(status_mib("VmHWM") - bare, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    contender.close()
    return [most.item()]


def peak_row(what: dict[str, Any], ours: float, theirs: float) -> dict[str, Any]:
    """The row of two peaks."""
    ratio = round(ours / theirs, 4)
    sizes = {"ours": round(ours), "theirs": round(theirs)}
    return what | {"ratio": ratio, "spread": [ratio, ratio], "unit": "MiB", **sizes, "note": None}


def status_mib(field: str) -> float:
    """MiB of a line of the process's status: VmRSS is what it has resident, VmHWM the most it ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024
