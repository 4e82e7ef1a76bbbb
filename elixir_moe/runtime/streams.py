"""The streams of one device and the order between them.

Owns the streams and their order; moves nothing. On a GPU, compute is every stream on which the model has run since the
last step, most often one; the other streams have a higher priority. On a CPU everything here does nothing.

    stream    carries                                 waits for                         is waited for by
    fetch     shard-to-block copies                   the block's last use (`Block`),   gather, compute, the host
                                                      the shard's last reduction        before it writes shards
    gather    all-gathers, in the block               all earlier fetches               compute
    reduce    reductions, and block-to-shard copies   compute; fetch, when a step ends  fetch of the block or the shard,
                                                                                        compute, the thread of sums, the
                                                                                        host before norm and update
    keep      activation checkpoints to host memory   compute                           compute
              and back

The next chunk is copied while the previous one is gathered. `gather` needs no other order: it touches only blocks, and
compute waits for it before a block is vacated. Each compute stream waits for the weights it uses, and for the others
where it takes over what they have written.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from elixir_moe.accelerator import current_stream, is_accelerator, new_stream, on_stream, recorded_event
from elixir_moe.distributed.collectives import Work

_HOST = nullcontext()
_FIRST = -1
"""The priority of short work that compute will wait for."""


def _at_once() -> None:
    """Waits for nothing: on a CPU everything has ended when it was issued."""


class Streams:
    """The streams of one wrapped model on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute: list[torch.Stream] = []
        self._moving = False
        """Something was given to `fetch` or `reduce` since the last step ended."""
        self._fetch, self._gather, self._reduce, self._keep = (
            new_stream(device, priority=_FIRST) if is_accelerator(device) else None for _ in range(4)
        )
        self.enter_compute()

    @property
    def asynchronous(self) -> bool:
        """Whether the host runs ahead of the device."""
        return self._fetch is not None

    # ---------------------------------------------------------------------------------------------------------- compute

    def enter_compute(self) -> None:
        """Records that the model computes on the current stream."""
        if self._fetch is not None and (current := current_stream(self._device)) not in self._compute:
            self._compute.append(current)

    def join_compute(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Orders the current stream behind all other compute; each compute stream may then read and drop `tensors`."""
        if len(self._compute) > 1:
            current = current_stream(self._device)
            for stream in self._compute:
                current.wait_stream(stream)
            for tensor in tensors:
                for stream in self._compute:
                    tensor.record_stream(stream)

    def allocating(self) -> AbstractContextManager[object]:
        """A context whose new memory is compute's when its last reader drops it."""
        return on_stream(self._compute[0]) if self._compute else _HOST

    def all_compute(self) -> Work:
        """An operation that ends with all compute issued so far."""
        work = Work()
        for stream in self._compute:
            work.mark(stream)
        return work

    # ---------------------------------------------------------------------------------------------------- other streams

    def fetching(self) -> AbstractContextManager[object]:
        """A context whose work goes to `fetch`."""
        self._moving = True
        return _HOST if self._fetch is None else on_stream(self._fetch)

    def gathering(self) -> AbstractContextManager[object]:
        """A context whose work goes to `gather`, behind all fetches issued so far."""
        if self._gather is None or self._fetch is None:
            return _HOST
        self._gather.wait_stream(self._fetch)
        return on_stream(self._gather)

    def reducing(self) -> AbstractContextManager[object]:
        """A context whose work goes to `reduce`, behind all that was issued to the current stream so far."""
        self._moving = True
        if self._reduce is None:
            return _HOST
        self._reduce.wait_stream(current_stream(self._device))
        return on_stream(self._reduce)

    def keep_for_reducing(self, memory: torch.Tensor) -> None:
        """Keeps `memory`, allocated for compute, from being reused before `reduce` and compute are done with it."""
        if self._reduce is not None:
            for stream in (self._reduce, *self._compute):
                memory.record_stream(stream)

    def keeping(self) -> AbstractContextManager[object]:
        """A context whose work goes to `keep`, behind all that was issued to the current stream so far."""
        if self._keep is None:
            return _HOST
        self._keep.wait_stream(current_stream(self._device))
        return on_stream(self._keep)

    def finish_keeping(self, memory: torch.Tensor, copied: Work) -> None:
        """Orders the current stream behind the copy of `memory` on `keep`; compute may then read and drop it."""
        copied.wait()
        if len(self._compute) > 1:
            for stream in self._compute:
                memory.record_stream(stream)

    def end_keeping(self) -> None:
        """Blocks until all copies on `keep` have ended; host memory that they read may then be freed."""
        if self._keep is not None:
            self._keep.synchronize()

    def marked(self, work: Work) -> Work:
        """Returns `work`, which now ends with everything issued to the current stream so far."""
        if self._fetch is not None:
            work.mark(current_stream(self._device))
        return work

    def until_issued_ends(self) -> Callable[[], None]:
        """Returns a function that blocks a thread until everything issued to the current stream so far has ended."""
        if self._fetch is None:
            return _at_once
        return recorded_event(self._device, blocking=True).synchronize

    def fetch_after_compute(self) -> None:
        """Orders `fetch` and `reduce` behind all compute issued so far, which may use what is freed on them later."""
        if self._fetch is not None and self._reduce is not None:
            for stream in self._compute:
                self._fetch.wait_stream(stream)
                self._reduce.wait_stream(stream)  # a sum that was allocated there dies there

    def end_step(self, *, host: bool) -> None:
        """Orders the current stream, the only compute from now on, behind all other compute and all reductions.

        With `host`, the host waits for reductions and fetches, once: it may then read and write the shards.
        """
        if self._fetch is not None and self._reduce is not None:
            self.join_compute()
            self._compute = [current_stream(self._device)]
            self._compute[0].wait_stream(self._reduce)
            if host and self._moving:
                self._reduce.wait_stream(self._fetch)
                self._reduce.synchronize()
            self._moving = False
