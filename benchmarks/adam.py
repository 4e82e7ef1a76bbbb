"""The Adam step on its own: against DeepSpeed's, against the memory's speed, and with narrow state against itself.

Owns these three measurements. The step is the one of mixed precision: a bf16 gradient in, fp32 weight and moments
updated, a bf16 weight out; 28 bytes a parameter pass the memory bus if nothing is read or written twice.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import in_turn
from benchmarks.workload import SEED
from elixir_moe.kernels import CODE_BLOCK, Moment, Rounding, adam_step, encode, narrow_step

BYTES_READ_AND_WRITTEN = 14
"""A parameter: half of 28, since a stream that updates in place passes each byte twice."""
_HYPER = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


class Shard:
    """A shard's state and gradient, drawn at random on a device."""

    def __init__(self, numel: int, device: torch.device | str = "cpu") -> None:
        draw: Any = {"generator": torch.Generator(device).manual_seed(SEED), "device": device}
        self.master = torch.randn(numel, **draw)
        self.exp_avg = 1e-2 * torch.randn(numel, **draw)
        self.exp_avg_sq = 1e-4 * torch.rand(numel, **draw)
        self.gradient = (1e-2 * torch.randn(numel, **draw)).bfloat16()
        self.compute = self.master.bfloat16()


def ours(shard: Shard) -> Callable[[int], None]:
    """One pass over all of it."""

    def step(number: int) -> None:
        state = (shard.master, shard.exp_avg, shard.exp_avg_sq, shard.gradient, shard.compute)
        adam_step(*state, step=number, **_HYPER)

    return step


def narrow(shard: Shard, moments: str) -> Callable[[int], None]:
    """One pass over a bf16 weight and `moments` in bf16 or int8, made of the shard's: 8 or 6 bytes a parameter, with
    the gradient, instead of 16.
    """

    def codes(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        blocks = -(-values.numel() // CODE_BLOCK)
        made = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(blocks, dtype=torch.uint8)
        encode(values, *made, signed=signed)
        return made

    weight = shard.master.bfloat16()
    exp_avg: Moment = shard.exp_avg.bfloat16()
    exp_avg_sq: Moment = shard.exp_avg_sq.bfloat16()
    if moments == "int8":
        exp_avg, exp_avg_sq = codes(shard.exp_avg, signed=True), codes(shard.exp_avg_sq, signed=False)

    def step(number: int) -> None:
        rounding = Rounding.of(SEED, "weight", number, 0)
        narrow_step(weight, exp_avg, exp_avg_sq, shard.gradient, None, rounding, step=number, **_HYPER)

    return step


def deepspeed(shard: Shard) -> Callable[[int], None]:
    """DeepSpeedCPUAdam, and the casts on its way in and out that ZeRO-Offload makes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = nn.Parameter(shard.master)
    weight.grad = torch.empty_like(shard.master)
    optimizer = DeepSpeedCPUAdam([weight], lr=_HYPER["lr"], weight_decay=_HYPER["weight_decay"])
    optimizer.state[weight] = {"step": 0, "exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}

    def step(_: int) -> None:
        assert weight.grad is not None
        weight.grad.copy_(shard.gradient)
        optimizer.step()
        shard.compute.copy_(weight.detach())

    return step


def stream(numel: int) -> Callable[[int], None]:
    """Reads, changes and writes as many bytes as the step passes, in one array."""
    array = torch.rand(numel * BYTES_READ_AND_WRITTEN // 4)

    def step(_: int) -> None:
        array.mul_(1.0001)

    return step


def agree(numel: int, tolerance: float = 1e-6) -> None:
    """Raises AssertionError unless DeepSpeed's step and ours make the same weights of the same state."""
    results: list[Tensor] = []
    for build in (ours, deepspeed):
        shard = Shard(numel)
        build(shard)(1)
        results.append(shard.master)
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def race(mine: Callable[[int], None], other: Callable[[int], None], rounds: int) -> list[tuple[float, float]]:
    """Seconds (ours, theirs) of each round."""

    def seconds_of(step: Callable[[int], None]) -> Callable[[int], float]:
        def timed(turn: int) -> float:
            start = time.perf_counter()
            step(turn + 1)
            return time.perf_counter() - start

        return timed

    return in_turn(seconds_of(mine), seconds_of(other), rounds)
