"""Sums of gradients in host memory, computed while backward runs.

Owns a few page-locked buffers and the thread that adds. A gradient leaves the device without a wait: it is copied to
the next buffer, and the thread adds it to its sum, in memory or on disk, once it has arrived. Gradients are added in
the order in which they were given, so that sums have the bits they would have if backward waited. Never decides what is
summed: `shard_state` does.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from elixir_moe.accelerator import is_accelerator, recorded_event
from elixir_moe.chunks.ledger import SUMS_IN_FLIGHT
from elixir_moe.chunks.plan import Tier
from elixir_moe.kernels import add_to, host_threads, work_on
from elixir_moe.memory.slabs import Slab, copy_on_host


def adds_async(device: torch.device) -> bool:
    """Whether sums in host memory run during backward on `device`; on a CPU they would take its cores."""
    return is_accelerator(device)


class HostSums:
    """Adds gradients of the device to sums in host memory, on a thread of its own."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`nbytes`: the largest gradient. Memory and thread are made for the first one."""
        self._nbytes, self._device = nbytes, device
        self._buffers: list[torch.Tensor] = []
        self._given = 0
        self._running: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, "elixir-sum", work_on, (device,))
        self._adding = host_threads(device)

    def add(
        self, total: torch.Tensor, reduced: torch.Tensor, *, first: bool, after: "Future[None] | None"
    ) -> "Future[None]":
        """Adds `reduced` to `total`, or if it is the `first`, replaces what `total` holds; by `submit`.

        Nobody may use `total` before the result is there.
        """
        add = copy_on_host if first else add_to
        return self.submit(reduced, lambda gradient: add(total, gradient, threads=self._adding), after=after)

    def submit(
        self, reduced: torch.Tensor, use: Callable[[torch.Tensor], None], *, after: "Future[None] | None"
    ) -> "Future[None]":
        """Copies `reduced` to host memory and has the thread call `use` with the copy.

        Waits only if all buffers are in use. The result raises the error of `after`, the last result of the same sum,
        too.
        """
        if not self._buffers:
            travels = is_accelerator(self._device)
            slabs = [
                Slab(self._nbytes, torch.uint8, Tier.HOST, self._device, travels=travels) for _ in range(SUMS_IN_FLIGHT)
            ]
            self._buffers = [slab.allocate(self._nbytes) for slab in slabs]
        while len(self._running) >= SUMS_IN_FLIGHT:
            self._finish_oldest()
        buffer = self._buffers[self._given % SUMS_IN_FLIGHT][: reduced.nbytes].view(reduced.dtype)
        buffer.copy_(reduced, non_blocking=True)
        arrived = recorded_event(self._device, blocking=True)
        adding = self._thread.submit(self._use, buffer, arrived, use, after)
        self._running.append(adding)
        self._given += 1
        return adding

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; 0 before the first gradient."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def finish(self) -> None:
        """Blocks until all that was given is added; raises the first error of an addition, and forgets the others."""
        if self._buffers:
            self._thread.submit(int).result()  # after additions, too, that an interrupt has kept from being noted
        ended, self._running = self._running, deque()
        for adding in ended:
            adding.result()

    def close(self) -> None:
        """Ends the thread, when all that was given is added."""
        self._thread.shutdown()

    def _finish_oldest(self) -> None:
        oldest = self._running[0]
        oldest.exception()  # after an interrupt it is waited for again
        self._running.popleft().result()

    def _use(
        self,
        buffer: torch.Tensor,
        arrived: torch.Event,
        use: Callable[[torch.Tensor], None],
        after: "Future[None] | None",
    ) -> None:
        arrived.synchronize()
        if after is not None:
            after.result()  # it has ended: one thread adds
        use(buffer)
