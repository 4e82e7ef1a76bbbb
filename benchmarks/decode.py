"""Decoding a quantized weight on one core, against the memory's speed.

Owns this measurement and its row. Packed bytes of NF4 are read, and bfloat16 is written. The stream is torch's copy
between two arrays, which reads and writes as many bytes together.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import in_turn
from benchmarks.report import race_row
from benchmarks.workload import SEED
from elixir_moe.quantized.decoders import NF4_BLOCK
from elixir_moe.quantized.formats import SCHEMES

ROW = "decode of NF4 to bf16"
PEER = "a copy of the same bytes"
LIMIT = round(1 / 0.7, 4)
"""The ratio of times to stay at or below: 0.7 of the stream's speed."""


def rows(quick: bool, _: Any, rounds: int) -> list[dict[str, Any]]:
    """The row."""
    numel = NF4_BLOCK * (1_000 if quick else 1_000_000)
    draw = torch.Generator().manual_seed(SEED)
    codes = torch.randint(256, (numel // 2,), dtype=torch.uint8, generator=draw)
    scales = torch.rand(numel // NF4_BLOCK, generator=draw)
    out = torch.zeros(numel, dtype=torch.bfloat16)
    nbytes = codes.nbytes + scales.nbytes + out.nbytes
    source, target = torch.rand(nbytes // 8, generator=draw), torch.zeros(nbytes // 8)
    every = torch.get_num_threads()
    ours, stream = (
        _timed(lambda: SCHEMES["nf4"].decode_into(codes, scales, out), 1),
        _timed(lambda: target.copy_(source), every),
    )
    times = in_turn(ours, stream, 3 * rounds)
    torch.set_num_threads(every)
    what = {"name": ROW, "peer": PEER, "workload": f"{numel} weights", "ranks": 1, "limit": LIMIT}
    return [race_row(what, times, "GB/s", nbytes=nbytes)]


def _timed(work: Callable[[], object], threads: int) -> Callable[[int], float]:
    def timed(_: int) -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return timed
