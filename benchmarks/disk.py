"""Reading frozen weights from disk: against a plain O_DIRECT loop, and against DeepSpeed's asynchronous I/O.

Owns these two measurements and their rows. Every side reads as many random bytes, from a file of its own in the folder
for temporary files, into memory that it uses again. Files are open with O_DIRECT where the file system has it, so
nothing comes from the page cache and the size of the files matters little.
"""

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import in_turn
from benchmarks.report import race_row, unmeasured_row
from elixir_moe.chunks.ledger import DISK_THREADS, VALUES_REQUEST_BYTES
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.direct_file import DirectFile, paged_memory
from elixir_moe.memory.disk_values import ValuesFile, ValuesPlace

ROW = "frozen weights on disk"
_PLAIN = "a plain O_DIRECT loop"
_DEEPSPEED = "DeepSpeed's asynchronous I/O"
LIMITS = {_PLAIN: round(1 / 0.9, 4), _DEEPSPEED: 1.0}
"""By peer: the ratio of times to stay at or below."""
_SHARDS, _SHARD_BYTES = 16, 1 << 24


def rows(quick: bool, _: Any, rounds: int) -> list[dict[str, Any]]:
    """A row for each peer."""
    shards, nbytes = (2, 1 << 22) if quick else (_SHARDS, _SHARD_BYTES)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file, places = _written(folder, shards, nbytes)
        for peer, limit in LIMITS.items():
            workload = f"{shards} shards of {nbytes / (1 << 20):g} MiB"
            what = {"name": ROW, "peer": peer, "workload": workload, "ranks": 1, "limit": limit}
            try:
                theirs = (_plain if peer == _PLAIN else _deepspeed)(folder, shards, nbytes)
            except ModuleNotFoundError:
                why = "deepspeed is not installed with its asynchronous I/O: pip install '.[bench]', and libaio-dev"
                found.append(unmeasured_row(what, why))
                continue
            times = in_turn(_timed(lambda: _ours(places)), _timed(theirs), rounds)
            found.append(race_row(what, times, "GB/s", nbytes=shards * nbytes))
        file.close()
    return found


def _timed(read: Callable[[], None]) -> Callable[[int], float]:
    def timed(_: int) -> float:
        start = time.perf_counter()
        read()
        return time.perf_counter() - start

    return timed


def _random(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _written(folder: str, shards: int, nbytes: int) -> tuple[ValuesFile, list[ValuesPlace]]:
    """A file of this library with the weights of as many chunks."""
    file = ValuesFile(folder, [nbytes] * shards, torch.device("cpu"))
    places = [file.allocate(nbytes, index) for index in range(shards)]
    for index, place in enumerate(places):
        place.write(0, _random(nbytes, index))
    return file, places


def _ours(places: list[ValuesPlace]) -> None:
    """Reads all, with every buffer in flight."""
    waiting, readings = deque(places), deque[Any]()
    while waiting or readings:
        while waiting and (reading := waiting[0].begin()) is not None:
            readings.append((waiting.popleft(), reading))
        place, reading = readings.popleft()
        reading.values()
        place.give_back(Work())


def _plain(folder: str, shards: int, nbytes: int) -> Callable[[], None]:
    """Reads a file from start to end in one thread, in requests as long as the library's."""
    path, length = Path(folder) / "plain", min(VALUES_REQUEST_BYTES, nbytes)
    memory = memoryview(paged_memory(length))

    def read() -> None:
        with open(path, "rb", buffering=0) as opened:
            direct = DirectFile(opened)
            for start in range(0, shards * nbytes, length):
                direct.read(start, memory)

    with open(path, "xb") as made:
        for index in range(shards):
            made.write(_random(nbytes, index).numpy().data)
        made.flush()
        os.fsync(made.fileno())
    return read


def _deepspeed(folder: str, shards: int, nbytes: int) -> Callable[[], None]:
    """Reads a file for each shard, with all of them in flight. Raises ModuleNotFoundError."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise ModuleNotFoundError("DeepSpeed cannot build its asynchronous I/O here")
    handle = builder.load(verbose=False).aio_handle(1 << 20, 32, False, True, DISK_THREADS)
    paths = [f"{folder}/deepspeed-{index}" for index in range(shards)]
    for index, path in enumerate(paths):
        Path(path).write_bytes(_random(nbytes, index).numpy().tobytes())
    buffers = [handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)) for _ in paths]

    def read() -> None:
        for buffer, path in zip(buffers, paths, strict=True):
            handle.async_pread(buffer, path)
        handle.wait()

    return read
