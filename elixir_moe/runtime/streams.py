"""The streams of one device and the order between them.

Owns the streams and their order; moves nothing. On a GPU, compute is the current stream, and the others have a higher
priority. On a CPU everything here does nothing.

    stream    carries                                 waits for                         is waited for by
    fetch     shard-to-block copies                   the block's last use (`Block`),   gather, compute, writers of
                                                      the shard's last reduction        the shard
    gather    all-gathers, in the block               all earlier fetches               compute
    reduce    reductions, and block-to-shard copies   all earlier compute               fetch of the block or the shard,
                                                                                        the update

The next chunk is copied while the previous one is gathered. `gather` needs no other order: it touches only blocks, and
compute waits for it before a block is vacated.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from elixir_moe.distributed.collectives import Work

_HOST = nullcontext()
_FIRST = -1
"""The priority of short work that compute will wait for."""


class Streams:
    """The streams of one wrapped model on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fetch, self._gather, self._reduce = (
            torch.cuda.Stream(device, priority=_FIRST) if device.type == "cuda" else None for _ in range(3)
        )
        self.fetch_after_compute()  # shards and blocks were written on the current stream

    def fetching(self) -> AbstractContextManager[object]:
        """A context whose work goes to `fetch`."""
        return _HOST if self._fetch is None else torch.cuda.stream(self._fetch)

    def gathering(self) -> AbstractContextManager[object]:
        """A context whose work goes to `gather`, behind all fetches issued so far."""
        if self._gather is None or self._fetch is None:
            return _HOST
        self._gather.wait_stream(self._fetch)
        return torch.cuda.stream(self._gather)

    def reducing(self) -> AbstractContextManager[object]:
        """A context whose work goes to `reduce`, behind all compute issued so far."""
        if self._reduce is None:
            return _HOST
        self._reduce.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._reduce)

    def keep_for_reducing(self, memory: torch.Tensor) -> None:
        """Keeps `memory`, allocated for compute, from being reused before the work issued to `reduce` has ended."""
        if self._reduce is not None:
            memory.record_stream(self._reduce)

    def marked(self, work: Work) -> Work:
        """Returns `work`, which now ends with everything issued to the current stream so far."""
        if self._fetch is not None:
            work.mark(torch.cuda.current_stream(self._device))
        return work

    def fetch_after_compute(self) -> None:
        """Orders later fetches behind all compute issued so far."""
        if self._fetch is not None:
            self._fetch.wait_stream(torch.cuda.current_stream(self._device))

    def fetch_behind(self) -> Callable[[], None]:
        """Returns `fetch_after_compute` for use inside `fetching`, where compute is no longer the current stream."""
        if self._fetch is None:
            return _nothing
        return partial(self._fetch.wait_stream, torch.cuda.current_stream(self._device))

    def compute_after_fetch(self, *, host: bool) -> None:
        """Orders compute behind earlier fetches and gathers, whose memory it may then write.

        With `host`, the host waits for the fetches too, and may then write the shards.
        """
        if self._fetch is not None and self._gather is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._fetch)
            compute.wait_stream(self._gather)
            if host:
                self._fetch.synchronize()


def _nothing() -> None:
    """Does nothing: there are no streams."""
