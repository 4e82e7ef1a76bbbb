"""ZeRO-Infinity's Figures 5b and 6c to 6e, and the planner's figures of their models: part of ``make paper-table``.

The figures are pictures; the text has one number of each. Models, batches and GPUs of Figure 6 are those of the
appendix, Tables 3 to 5; the machine is the DGX-2, and nodes gather at the 70 GB/s that section 7.6 measured. The paper
compares with systems that the planner has no plan for, one that moves a gradient over a single link and one without
overlap: both are sums of the planner's terms. The model of Figure 5b, dense and of a trillion parameters, is cut into
tiles, where the paper has tensor parallelism, and has one sequence a GPU. No constant is fitted here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from elixir_moe.chunks.plan import Plan
from elixir_moe.planner import cost
from elixir_moe.planner.cost import Seconds
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import PlanCandidate, Task, price
from elixir_moe.planner.trace import trace
from elixir_moe.wrapping.tiling import tile_for
from elixir_tools.fit import strategies
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.presets import Planned, named_model, of_config

MACHINE = "dgx-2-v100-32g-x16"
NODE_BANDWIDTH = 70.0
"""The rate of a node to the others, in 1e9 bytes per second: measured (7.6)."""
LINK = 12.0
"""Bandwidth of one GPU's link to the host, in 1e9 bytes per second (Figure 2b)."""
TILE_BYTES = 256 * 2**20
NODES = (1, 4, 8, 16, 32)
"""One DGX-2, and those of Figure 5b."""
SEQ = 1024
BACKWARD = 3 / 4
"""Part of a step's products in backward, with forward again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A factor that the text of section 7.5 or 7.6 prints, and the planner's."""

    says: str
    paper: str
    planner: float
    """The planner's. What only one of the two systems does is added to its time, hidden or not."""
    perfect: float
    """The planner's, if all that can overlap did so perfectly."""


def problem(*, layers: int, hidden: int, heads: int, gpus: int, batch: int) -> Task:
    """The planning problem of a GPT on so many GPUs of DGX-2 nodes."""
    config = GPTConfig(
        vocab_size=50257, seq_len=SEQ, n_layers=layers, d_model=hidden, n_heads=heads, checkpoint="non_reentrant"
    )
    given = of_config(f"{layers} layers of {hidden}", config, batch=batch, seq=SEQ)
    return _task(_traced(given, gpus, batch), gpus)


def _traced(given: Planned, gpus: int, batch: int) -> Profile:
    return trace(
        given.model,
        given.step,
        given.sample,
        world=gpus,
        compute_dtype=torch.float16,
        reduce_dtype=torch.float16,
        tokens=batch * SEQ,
    )


def _task(profile: Profile, gpus: int) -> Task:
    hardware = replace(Hardware.named(MACHINE), node_bandwidth=NODE_BANDWIDTH)
    return Task(
        profile=profile,
        hardware=hardware,
        gpus=gpus,
        capacity_bytes=hardware.gpu_bytes,
        host_bytes=hardware.host_bytes_per_rank(gpus),
        overlaps_updates=False,  # as it was measured
    )


def _priced(task: Task, strategy: str) -> PlanCandidate:
    return price(task, strategies.plans(task)[strategy][0])


def without_overlap(seconds: Seconds) -> float:
    """Seconds of a step in which transfers, collectives and compute follow each other."""
    busy = seconds.compute + seconds.units + max(seconds.fetch, seconds.disk) + seconds.offload + seconds.collectives
    return busy + seconds.memory_update + seconds.disk_update


def partitioning() -> Iterator[Figure]:
    """Figure 6c: backward of 8B if each GPU's link moves a part of a gradient, over one whose owner's link moves it."""
    for gpus in (4, 16, 32, 64):
        found = _priced(problem(layers=10, hidden=8192, heads=16, gpus=gpus, batch=2), "zero-2-offload")
        backward, ours = BACKWARD * found.seconds.compute, found.seconds.offload
        one_link = 2 * found.task.profile.parameters / (LINK * 1e9)
        yield Figure(
            says=f"6c: backward of 8B on {gpus} GPUs, gradients to the host over one link, over all links",
            paper="nearly 2" if gpus == 64 else "-",
            planner=(backward + one_link) / (backward + ours),
            perfect=max(backward, one_link) / max(backward, ours),
        )


def overlap() -> Iterator[Figure]:
    """Figure 6d: the throughput of 8B on 64 GPUs with overlap and prefetching, over that without."""
    for batch in (2, 4, 8, 10, 14, 16):
        found = _priced(problem(layers=10, hidden=8192, heads=16, gpus=64, batch=batch), "zero-3")
        without = without_overlap(found.seconds)
        yield Figure(
            says=f"6d: 8B on 64 GPUs at batch {batch}, with overlap over without",
            paper="up to 1.3" if batch == 2 else "-",
            planner=without / found.seconds.step,
            perfect=without / (without - found.seconds.collectives),
        )


def checkpoint_offload() -> Iterator[Figure]:
    """Figure 6e: the throughput of 5 layers with activation checkpoints on the device, over that with them on the host.

    The paper's last model has its state on NVMe, and is left out.
    """
    for hidden in (2048, 8192, 16384, 32768):
        task = problem(layers=5, hidden=hidden, heads=16, gpus=32, batch=4)
        plan = strategies.plans(task)["zero-3-offload"][0]
        here, there = (price(task, replace(plan, host_checkpoints=kept)) for kept in (0, "all"))
        links = task.hardware.links(32)
        copies = there.moved.kept_bytes * 32 * (1 / links.b_c2g + 1 / links.b_g2c) / 1e9
        yield Figure(
            says=f"6e: 5 layers of {hidden} on 32 GPUs, checkpoints on the device over on the host",
            paper={2048: "up to 1.2", 32768: "minimal"}.get(hidden, "-"),
            planner=(here.seconds.step + copies) / here.seconds.step,
            perfect=there.seconds.step / here.seconds.step,
        )


def trillion(gpus: int) -> PlanCandidate:
    """A trillion dense parameters with one sequence a GPU, in tiles, and all of their state and values on disk."""
    profile = _trillion_on_one()
    spread = {"ranks": tuple(range(gpus)), "divisor": gpus}
    profile = replace(profile, params=tuple(replace(p, key=replace(p.key, **spread)) for p in profile.params))
    task = replace(_task(profile, gpus), disk_bytes=Hardware.named(MACHINE).disk_bytes_per_rank(gpus))
    plan = Plan.offload(rcache_blocks="all", chunk_numel=TILE_BYTES // 2)
    layout = plan.layout(profile.params)
    least = max(1, profile.schedule(layout).least_blocks())
    plan = replace(plan, rcache_blocks=least, disk_chunks=len(layout.chunks), values_on_disk=True)
    return price(task, plan)


@cache
def _trillion_on_one() -> Profile:
    given = named_model("infinity-1t", batch=1, seq=SEQ)
    tile_for(given.model, TILE_BYTES, torch.float16.itemsize)
    return _traced(given, 1, 1)


def fits(found: PlanCandidate) -> bool:
    """Whether a plan fits in device, host and disk."""
    task = found.task
    device, host = task.held_bytes(found.size)
    disk = task.disk_bytes or 0
    return device <= task.allowed_bytes and host <= task.host_bytes and found.size.disk_bytes <= disk


FIGURES: dict[str, Callable[[], Iterator[Figure]]] = {"6c": partitioning, "6d": overlap, "6e": checkpoint_offload}
"""By number in the paper."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures."""
    del arguments
    print("ZeRO-Infinity, Figures 6c to 6e: the text's factor, the planner's, and that with perfect overlap")
    for figures in FIGURES.values():
        for one in figures():
            print(f"{one.paper:>9} {one.planner:6.2f} {one.perfect:6.2f}  {one.says}")
    print("Figure 5b: 1T dense in tiles, all on NVMe; in the paper, TFLOPS of a GPU rise from 4 to 32 nodes")
    for nodes in NODES:
        found = trillion(16 * nodes)
        reached = cost.tflops_per_gpu(found.task.profile, found.seconds.step)
        disk = found.size.disk_bytes / 1e12 * 16
        print(
            f"{nodes:2} nodes: {reached:5.1f}, {disk:.1f} TB of a node's NVMe, {'fits' if fits(found) else 'too large'}"
        )


if __name__ == "__main__":
    main()
