"""The runs of `tests.support.order_cases` on the accelerator of threads: late streams change no bit.

Owns the second stream for compute. What a run leaves is compared with what it leaves while no stream is late.
"""

import gc
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import elixir_moe as em
from tests.accelerator.device import NAME, UNTIL_AWAITED, delayed, native
from tests.support.order_cases import Case, build, take_step

DELAYS = {
    1: {"compute": (UNTIL_AWAITED, 0), "others": (0, UNTIL_AWAITED)},
    2: {"compute": (1000, 0), "others": (0, 1500)},
}
"""By the number of ranks: how late the default stream is, and how late all others are."""


class _OnThreads:
    """The accelerator of threads; the host runs ahead of it."""

    device = mesh = NAME

    def __init__(self) -> None:
        self._main, self._side = torch.accelerator.current_stream(), torch.Stream(device=NAME)

    def delay_side(self, at_most: int) -> None:
        """Makes the second stream late, until the delays of all streams are set again."""
        native().delay_one(self._side.stream_id, at_most)

    def given(self, inputs: Tensor) -> Tensor:
        return inputs.pin_memory().to(NAME, non_blocking=True)

    @contextmanager
    def beside(self, given: Tensor, made: list[Tensor]) -> Iterator[None]:
        with self.aside(given):
            yield

    def join(self, made: Tensor) -> Tensor:
        self._main.wait_stream(self._side)
        made.record_stream(self._main)  # type: ignore[arg-type]
        return made

    @contextmanager
    def aside(self, given: Tensor) -> Iterator[None]:
        self._side.wait_stream(self._main)
        given.record_stream(self._side)  # type: ignore[arg-type]
        with self._side:
            yield


def leaves(case: Case, late: str = "", seed: int = 0) -> dict[str, Any]:
    """(rank) The weights at the end of a run, and the hashes of the files of its checkpoints."""
    platform = _OnThreads()
    delays = DELAYS[dist.get_world_size()][late] if late else (0, 0)
    with tempfile.TemporaryDirectory() as folder, delayed(*delays, seed):
        platform.delay_side(delays[0 if late == "compute" else 1])
        folders = [folder]
        dist.broadcast_object_list(folders)
        model, optimizer = build(case, platform)
        for step in range(case.steps):
            take_step(case, platform, model, optimizer, step, f"{folders[0]}/{step}")
        found: dict[str, Any] = dict(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
        for path in sorted(Path(folders[0]).rglob("*.safetensors")):
            found[str(path.relative_to(folders[0]))] = hashlib.sha256(path.read_bytes()).hexdigest()
        dist.barrier()
        del model, optimizer
        gc.collect()
    torch.accelerator.synchronize()
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what differs between two runs."""
    names = sorted(found.keys() ^ wanted.keys())
    for name in sorted(found.keys() & wanted.keys()):
        one, other = found[name], wanted[name]
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        names += [] if same else [name]
    return names
