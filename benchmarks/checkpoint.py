"""Saving: compared with the disk, and its cost for the training that continues meanwhile.

Owns these two measurements and the rows they make. Both are of a model and its AdamW scattered over all ranks, each of
which writes a file of its own; a time is that of the slowest rank. Files go where the system keeps temporary ones.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import elixir_moe as em
from benchmarks.contenders import Contender, ours
from benchmarks.measure import batches, in_turn, slowest
from benchmarks.report import race_row, without_limit
from benchmarks.workload import Workload
from elixir_moe.state.checkpoint.hashing import SEGMENT_BYTES, segment_digest

_SYNCHRONOUS = "synchronous save"
_ASYNCHRONOUS = "asynchronous save: what it blocks training for"
ROWS = {
    _SYNCHRONOUS: ("a plain write and fsync of as many bytes", 1.25),
    _ASYNCHRONOUS: ("its time from start to end", 0.05),
}
"""By name: what it is measured against, and the ratio to stay at or below."""
_MOST_WORK = 0.25
"""A limit is for machines on which the processor's part of a synchronous save takes no more of the peer's time."""
_MOST_COPYING = 0.04
"""The target for copying, which is what training waits for in an asynchronous save."""
_PLAIN_BYTES = 1 << 24
"""Handed to the system at a time."""


def rows(name: str, _: bool, workload: Workload, rounds: int) -> list[dict[str, Any]]:
    """The row called `name`. Collective."""
    contender = ours(workload, em.Plan.zero2())
    contender.step(next(batches(workload, stream=0)))
    with tempfile.TemporaryDirectory() as own:
        directory = Path(_of_rank_0(own))
        em.save(directory / "first", contender.model, contender.optimizer)
        nbytes = (directory / "first" / f"rank-{dist.get_rank():05d}.safetensors").stat().st_size
        if name == _SYNCHRONOUS:
            times = in_turn(_synchronous(directory, contender), _plain(directory, nbytes), rounds)
        else:
            times = [_asynchronous(directory, contender, workload, turn) for turn in range(rounds + 1)][1:]
        contender.close()
    peer, limit = ROWS[name]
    what = {"name": name, "peer": peer, "workload": "gpt", "ranks": dist.get_world_size(), "limit": limit}
    row = race_row(what, times)
    work, most = ("copies and hashes", _MOST_WORK) if name == _SYNCHRONOUS else ("copies", _MOST_COPYING)
    part = _work(nbytes, hashes=name == _SYNCHRONOUS) / median(theirs for _, theirs in times)
    if part <= most:
        return [row]
    kind = (
        f"machines whose processor {work} these bytes in {most:.0%} of the peer's time at most: here it is {part:.0%}"
    )
    return [without_limit(row, kind)]


def _work(nbytes: int, *, hashes: bool) -> float:
    """Seconds in which each rank copies so many bytes at the same time as the others, and hashes them: without a disk.

    The memory is a segment's, as in a save.
    """
    source = torch.randint(256, (SEGMENT_BYTES,), dtype=torch.uint8).numpy()
    segment = source.copy()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(-(-nbytes // SEGMENT_BYTES)):
        segment[:] = source
        if hashes:
            segment_digest(memoryview(segment))
    return slowest(time.perf_counter() - start)


def _synchronous(directory: Path, contender: Contender) -> Callable[[int], float]:
    def timed(turn: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        em.save(directory / f"save-{turn}", contender.model, contender.optimizer)
        seconds = slowest(time.perf_counter() - start)
        if dist.get_rank() == 0:
            shutil.rmtree(directory / f"save-{turn}")
        return seconds

    return timed


def _plain(directory: Path, nbytes: int) -> Callable[[int], float]:
    """Writes files as large as those of a save."""
    content = memoryview(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    path = directory / f"plain-{dist.get_rank()}"

    def timed(_: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        with open(path, "xb", buffering=0) as file:
            written = 0
            while written < nbytes:
                written += file.write(content[written : written + _PLAIN_BYTES])
            os.fsync(file.fileno())
        seconds = slowest(time.perf_counter() - start)
        path.unlink()
        return seconds

    return timed


def _asynchronous(directory: Path, contender: Contender, workload: Workload, turn: int) -> tuple[float, float]:
    """Seconds (that training waits for it, from its start to its end); training runs until all ranks have ended."""
    data, end = batches(workload, stream=1 + turn), list[float]()
    dist.barrier()
    start = time.perf_counter()
    saving = em.save(directory / f"async-{turn}", contender.model, contender.optimizer, keep=1, asynchronous=True)
    blocked = time.perf_counter() - start
    watch = threading.Thread(target=lambda: (saving.join(), end.append(time.perf_counter())))
    watch.start()
    while not saving.poll():
        contender.loss(contender.model, next(data)).backward()
        before = time.perf_counter()
        saving.wait_for_copy()
        blocked += time.perf_counter() - before
        contender.optimizer.step()
    watch.join()
    return slowest(blocked), slowest(end[0] - start)


def _of_rank_0(own: str) -> str:
    names = [own]
    dist.broadcast_object_list(names)
    return names[0]
