"""The lanes of one device, and who waits for whom.

Owns the streams and their order; moves nothing. Where there is a GPU, compute is whatever stream is current, `fetch`
carries home-to-block copies and gathers, `reduce` reductions and block-to-home copies. On the CPU the host is the only
lane, and nothing here does anything.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from elixir_moe.chunks.collectives import Ticket

_HOST = nullcontext()


class Streams:
    """The streams of one wrapped model on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fetch = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reduce = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.fetch_after_compute()  # homes and blocks were written on the stream of now

    def fetching(self) -> AbstractContextManager[object]:
        """What is issued inside goes to `fetch`."""
        return _HOST if self._fetch is None else torch.cuda.stream(self._fetch)

    def reducing(self) -> AbstractContextManager[object]:
        """What is issued inside goes to `reduce`, after all compute issued so far."""
        if self._reduce is None:
            return _HOST
        self._reduce.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._reduce)

    def marked(self, ticket: Ticket) -> Ticket:
        """`ticket`, to which all belongs that was issued to the current stream so far."""
        if self._fetch is not None:
            ticket.mark(torch.cuda.current_stream(self._device))
        return ticket

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
        """Compute may write what earlier fetches read; so may the host, if it is told to wait too."""
        if self._fetch is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._fetch)
            if host:
                self._fetch.synchronize()


def _nothing() -> None:
    """The host is the only lane."""
