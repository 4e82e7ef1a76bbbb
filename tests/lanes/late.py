"""Streams that keep their operations until somebody waits for them, and the order of NCCL on a CPU.

Owns what `machine` gives its streams, which run it at once unless they are late.
"""

import threading
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from elixir_moe import kernels
from elixir_moe.distributed.collectives import Communicator


class _Running(threading.local):
    """What a thread runs of the streams' operations, one inside the other."""

    depth = 0


class LateStream:
    """Stands for `torch.cuda.Stream`; one that is not `late` runs what it is given at once. For any thread."""

    _running = _Running()
    """What operations do is done at once."""
    _lock = threading.RLock()
    """Held while operations of any stream run, since they may wait for those of another."""

    def __init__(self, device: Any = None, priority: int = 0, *, late: bool = True) -> None:
        self.device = torch.device("cuda", 0)
        self.late = late
        self._waiting: deque[Callable[[], object]] = deque()
        self._given = self._done = 0

    def give(self, operation: Callable[[], object]) -> None:
        """Takes an operation: compute runs it at once."""
        with self._lock:
            self._given += 1
            self._waiting.append(operation)
            if not self.late:
                self.run_until(self._given)

    def run_until(self, number: int) -> None:
        """Runs the operations up to this number, in order."""
        with self._lock, torch.no_grad():
            while self._done < number:
                self._done += 1
                self._running.depth += 1
                try:
                    self._waiting.popleft()()
                finally:
                    self._running.depth -= 1

    @property
    def takes(self) -> bool:
        """Whether what is issued now waits."""
        return self.late and not self._running.depth

    def record_event(self) -> "LateEvent":
        """All that was given so far."""
        return LateEvent(self, self._given)

    def wait_event(self, event: "LateEvent") -> None:
        """What is given next runs behind the event."""
        self.give(event.synchronize)

    def wait_stream(self, other: "LateStream") -> None:
        """What is given next runs behind all that the other stream was given so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Runs everything."""
        self.run_until(self._given)


class LateEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def synchronize(self) -> None:
        """Runs all that the event stands for."""
        self._stream.run_until(self._number)


def step_by_numbers(*arrays: Any, skip: torch.Tensor | None, grad_scale: Any, **settings: Any) -> None:
    """Takes Adam's step as a GPU does, whose clipping and skipping are numbers of its own."""
    if skip is None or not skip.item():
        kernels.adam_step(*arrays, grad_scale=float(grad_scale), **settings)
        return
    master, *_, compute = arrays
    if compute is not None:
        compute.copy_(master)


def issue_in_order(patch: pytest.MonkeyPatch) -> None:
    """From now on only the order of collectives matches them, as on NCCL."""
    made = Communicator.__init__

    def make(communicator: Communicator, ranks: Any, groups: Any = (), device: Any = None) -> None:
        made(communicator, ranks, groups, device)
        communicator.over_gloo, communicator.tagged = False, not groups

    patch.setattr(Communicator, "__init__", make)
    patch.setattr(import_module("elixir_moe.wrapping.resolve_plan"), "goes_over_gloo", lambda *_: False)
