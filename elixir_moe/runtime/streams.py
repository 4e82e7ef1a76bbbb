"""The streams of one device, and who waits for whom.

Owns the streams and their order; moves nothing. Where there is a GPU, compute is whatever stream is current; the others
come before it where the device has to choose. On the CPU nothing here does anything.

    stream    carries                                begins behind                      is waited for by
    fetch     home-to-block copies                   the block's last use (`Block`),    gather; compute; whoever writes
                                                     the home's last reduction          the home
    gather    all-gathers, in the block              all fetches so far                 compute
    reduce    reductions, and block-to-home copies   all compute so far                 fetch, of the block or the home;
                                                                                        the update

The next chunk is copied while the one before is gathered. Nothing else hands over to `gather`, nor takes from it: its
bytes are in blocks alone, and compute has waited for it before it vacates a block.
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
        self.fetch_after_compute()  # homes and blocks were written on the stream of now

    def fetching(self) -> AbstractContextManager[object]:
        """What is issued inside goes to `fetch`."""
        return _HOST if self._fetch is None else torch.cuda.stream(self._fetch)

    def gathering(self) -> AbstractContextManager[object]:
        """What is issued inside goes to `gather`, behind all fetches issued so far."""
        if self._gather is None or self._fetch is None:
            return _HOST
        self._gather.wait_stream(self._fetch)
        return torch.cuda.stream(self._gather)

    def reducing(self) -> AbstractContextManager[object]:
        """What is issued inside goes to `reduce`, after all compute issued so far."""
        if self._reduce is None:
            return _HOST
        self._reduce.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._reduce)

    def keep_for_reducing(self, memory: torch.Tensor) -> None:
        """`memory`, which was made for compute, goes to nobody else before `reduce` has done what it has begun."""
        if self._reduce is not None:
            memory.record_stream(self._reduce)

    def marked(self, work: Work) -> Work:
        """`work`, to which all belongs that was issued to the current stream so far."""
        if self._fetch is not None:
            work.mark(torch.cuda.current_stream(self._device))
        return work

    def fetch_after_compute(self) -> None:
        """Later fetches see what compute has written."""
        if self._fetch is not None:
            self._fetch.wait_stream(torch.cuda.current_stream(self._device))

    def fetch_behind(self) -> Callable[[], None]:
        """As `fetch_after_compute`, to be called inside `fetching`, where compute is no longer the current stream."""
        if self._fetch is None:
            return _nothing
        return partial(self._fetch.wait_stream, torch.cuda.current_stream(self._device))

    def compute_after_fetch(self, *, host: bool) -> None:
        """Compute may write what earlier fetches and gathers use; so may the host the homes, if it is told to wait."""
        if self._fetch is not None and self._gather is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_stream(self._fetch)
            compute.wait_stream(self._gather)
            if host:
                self._fetch.synchronize()


def _nothing() -> None:
    """There are no streams."""
