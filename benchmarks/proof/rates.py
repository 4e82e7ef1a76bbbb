"""`python -m benchmarks.proof.rates`: what this machine reaches, against which steps are held.

Owns the rates: a large bf16 product, copies up, copies in both directions at once, Adam in host memory, and on a GPU
Adam in its memory, with Triton and without. All on random data, and on a GPU whose clocks a second of products has
raised.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.adam import Shard, ours
from benchmarks.proof.steps import tell
from elixir_moe import kernels

REPEATS = 5
WARM_SECONDS = 1.0
"""An idle GPU starts at a lower clock."""


def main() -> int:
    """Measures and tells."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    side, nbytes, numel = (8192, 1 << 31, 1 << 27) if cuda else (512, 1 << 24, 1 << 22)
    product = _product(side, device)
    end = time.perf_counter() + WARM_SECONDS
    while cuda and time.perf_counter() < end:
        elapsed(product)
    rates = {
        "matmul_flops": 2 * side**3 / seconds_of(product),
        **_copy_rates(nbytes, device),
        "host_adam_parameters_per_second": numel / seconds_of(_adam(numel, device)),
    }
    if cuda:
        rates["device_adam_parameters_per_second"] = numel / seconds_of(_adam(numel, device, there=True))
        with mock.patch.object(kernels, "_adam_in_triton", lambda device: None):
            rates["torch_adam_parameters_per_second"] = numel / seconds_of(_adam(numel, device, there=True))
    tell(rates | {"cores": len(os.sched_getaffinity(0)), "adam_threads": kernels.host_threads(device)})
    return 0


def _product(side: int, device: torch.device) -> Callable[[], Any]:
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return lambda: torch.mm(a, b)


def _copy_rates(nbytes: int, device: torch.device) -> dict[str, float]:
    """Bytes a second of copies up only, and each way of copies up and down at the same time."""
    cuda = device.type == "cuda"
    on_host = [torch.randint(255, (nbytes,), dtype=torch.uint8).pin_memory() for _ in range(2)] if cuda else []
    on_host = on_host or [torch.randint(255, (nbytes,), dtype=torch.uint8) for _ in range(2)]
    on_device = [torch.randint(255, (nbytes,), dtype=torch.uint8, device=device) for _ in range(2)]
    ways = [(on_device[0], on_host[1]), (on_host[0], on_device[1])]
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else []

    def copy_both() -> None:
        for stream, (target, source) in zip(streams, ways, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def copy_both_here() -> None:
        for target, source in ways:
            target.copy_(source)

    return {
        "up_bytes_per_second": nbytes / seconds_of(lambda: on_device[1].copy_(on_host[0], non_blocking=True)),
        "copy_bytes_per_second": nbytes / seconds_of(copy_both if cuda else copy_both_here),
    }


def _adam(numel: int, device: torch.device, *, there: bool = False) -> Callable[[], Any]:
    """In host memory, or `there`: in the memory of the device."""
    torch.set_num_threads(kernels.host_threads(device))
    step = ours(Shard(numel, device if there else "cpu"))
    return lambda: step(1)


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after a warm-up."""
    return min([elapsed(work) for _ in range(1 + REPEATS)][1:])


def elapsed(work: Callable[[], Any]) -> float:
    """Seconds of `work`, on the GPU too."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
