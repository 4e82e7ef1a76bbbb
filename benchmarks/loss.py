"""The loss of a head without its logits, against the cross-entropy of all logits.

Owns this measurement and its row: loss and gradients of 2048 tokens and a vocabulary of 152k, in fp32 on a CPU.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import elixir_moe as em
from benchmarks.measure import in_turn
from benchmarks.report import race_row
from benchmarks.workload import Workload

ROW = "loss without logits, 2k tokens"
LIMIT = 1.1
_FULL = (2048, 152_000, 256)
_QUICK = (128, 1000, 32)


def rows(quick: bool, _: Workload, rounds: int) -> list[dict[str, Any]]:
    """The row."""
    tokens, vocabulary, width = _QUICK if quick else _FULL
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, generator=generator)).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)

    def timed(loss: Callable[[], Tensor]) -> Callable[[int], float]:
        def seconds(_: int) -> float:
            hidden.grad = weight.grad = None
            start = time.perf_counter()
            loss().backward()  # type: ignore[no-untyped-call]
            return time.perf_counter() - start

        return seconds

    ours = timed(lambda: em.linear_cross_entropy(hidden, weight, labels))
    theirs = timed(lambda: F.cross_entropy(hidden @ weight.t(), labels))
    workload = f"{tokens} tokens, vocabulary {vocabulary}, width {width}, fp32"
    what = {"name": ROW, "peer": "cross_entropy of all logits", "workload": workload, "ranks": 1, "limit": LIMIT}
    return [race_row(what, in_turn(ours, theirs, rounds))]
