"""Eight micro-batches as one pass against the plain loop, with the weights on a disk behind a slow link.

Owns these measurements and their rows: the time of forward and backward, the same without the time of compute, and the
bytes that a step of eight micro-batches moves, against a step of one. The link moves one request at a time, at a rate
at which forward and backward of one micro-batch take four times the seconds of their compute.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest import mock

import torch
from torch import nn

import elixir_moe as em
from benchmarks.contenders import MICRO_BATCHES
from benchmarks.measure import in_turn
from benchmarks.report import race_row
from benchmarks.workload import Workload, fresh_model
from elixir_moe.memory.direct_file import DirectFile
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import lm_loss

ROW = "one pass of 8 micro-batches, disk behind a slow link"
LIMIT, BEYOND_COMPUTE_LIMIT, BYTES_LIMIT = 0.35, 0.15, 1.0
_SLOWER = 4
"""Seconds of forward and backward of one micro-batch, in those of its compute."""
_FULL = GPTConfig(vocab_size=256, seq_len=64, n_layers=8, d_model=256, n_heads=4)
_QUICK = GPTConfig(vocab_size=256, seq_len=16, n_layers=8, d_model=32, n_heads=4)


class _Link:
    """A link that all requests to the disk pass, one after the other; it counts their bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.rate = float("inf")
        """Bytes a second."""
        self._turn = Lock()

    def passing(self, move: Callable[..., None]) -> Callable[..., None]:
        """`move` of `DirectFile` behind the link."""

        def moved(file: DirectFile, offset: int, data: memoryview) -> None:
            with self._turn:
                self.nbytes += data.nbytes
                time.sleep(data.nbytes / self.rate)
            move(file, offset, data)

        return moved

    @contextmanager
    def between(self) -> Iterator[None]:
        """Puts the link between the library and the disk."""
        with (
            mock.patch.object(DirectFile, "read", self.passing(DirectFile.read)),
            mock.patch.object(DirectFile, "write", self.passing(DirectFile.write)),
        ):
            yield


class _Step:
    """A step of a model whose weights are on disk; `one_pass` says how its micro-batches run."""

    def __init__(self, config: GPTConfig, folder: str, *, one_pass: bool) -> None:
        plan = em.Plan.offload(disk=folder, values_on_disk=True, disk_chunks=99, rcache_blocks=4)
        model = fresh_model(config)
        self._one_pass = one_pass
        self.model, self.optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=plan)

    def run(self, batches: list[torch.Tensor]) -> None:
        """Forward and backward of each micro-batch; the gradients are dropped."""
        if self._one_pass:
            em.accumulate(self.model, lm_loss, batches)
        else:
            _plain_loop(self.model, batches)
        self.optimizer.zero_grad()


def _plain_loop(model: nn.Module, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        (lm_loss(model, batch) / len(batches)).backward()


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rows(quick: bool, _: Workload, rounds: int) -> list[dict[str, Any]]:
    """The rows."""
    config = _QUICK if quick else _FULL
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(256, (1, config.seq_len + 1), generator=generator) for _ in range(MICRO_BATCHES)]
    plain, link = fresh_model(config), _Link()
    compute = [_seconds(lambda: _plain_loop(plain, batches)) for _ in range(rounds + 1)][1:]
    with tempfile.TemporaryDirectory() as folder, link.between():
        ours, theirs = (_Step(config, folder, one_pass=one_pass) for one_pass in (True, False))

        def moved(step: _Step, given: list[torch.Tensor]) -> int:
            before = link.nbytes
            step.run(given)
            return link.nbytes - before

        for step in (ours, theirs):  # warms up
            step.run(batches)
        passed = moved(theirs, batches[:1]), moved(ours, batches), moved(theirs, batches)
        link.rate = passed[0] / (_SLOWER * min(compute) / MICRO_BATCHES)
        times = in_turn(
            lambda _: _seconds(lambda: ours.run(batches)), lambda _: _seconds(lambda: theirs.run(batches)), rounds
        )
        ours.optimizer.close()
        theirs.optimizer.close()
    beyond = [(max(mine - own, 0.0), loop - own) for (mine, loop), own in zip(times, compute, strict=True)]
    what = {"peer": "the plain loop", "workload": f"GPT of {config.n_layers} layers x {config.d_model}", "ranks": 1}
    of_one = {"name": f"{ROW}: bytes", "peer": "a step of one micro-batch", "limit": BYTES_LIMIT}
    return [
        race_row(what | {"name": ROW, "limit": LIMIT}, times),
        race_row(what | {"name": f"{ROW}, beyond compute", "limit": BEYOND_COMPUTE_LIMIT}, beyond),
        race_row(what | of_one, [(passed[1], passed[0])], "bytes"),
        race_row(what | {"name": f"{ROW}: bytes", "limit": None}, [(passed[1], passed[2])], "bytes"),
    ]
