"""The second net: what is given to fetch, gather and reduce runs as late as its events allow, on real data.

Owns streams that keep their operations until somebody waits for them. It tests what `machine` takes for granted: if a
wait were missing that the checker believes to be there, a run would give other bits.

Compute runs at once. A view is made at once. An operator that returns new memory runs twice, once for the shape.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from elixir_moe import accelerator, kernels
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.memory import blocks
from elixir_moe.memory.gradient_sum import SumOnDisk
from elixir_moe.runtime.streams import Streams

_ISSUED_LATE = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")


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


class _Late(TorchDispatchMode):
    """Gives operators to the current stream, if it is a late one."""

    def __init__(self, current: Callable[[], LateStream]) -> None:
        super().__init__()
        self._current = current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch asks for it."""
        stream, kwargs = self._current(), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not stream.takes or func.is_view or func.namespace != "aten":
                return func(*args, **kwargs)
            schema = func._schema
            written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
            if written:
                stream.give(lambda: func(*args, **kwargs))
                at = written[0]
                return args[at] if at < len(args) else kwargs[schema.arguments[at].name]
            made = func(*args, **kwargs)
            assert isinstance(made, torch.Tensor), f"{schema.name} makes the host wait for a late stream"
            if made.numel() and not schema.name.startswith("aten::empty"):
                stream.give(lambda: made.copy_(func(*args, **kwargs)))
            return made


@contextmanager
def late(fault: Callable[[Callable[..., None]], None] | None = None) -> Iterator[None]:
    """A context in which the library takes the CPU for a GPU that is as slow as it may be."""
    compute = LateStream(late=False)
    stack = [compute]

    @contextmanager
    def on(stream: LateStream) -> Iterator[None]:
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def issued_late(run: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            if not stack[-1].takes:
                return run(*args, **kwargs)
            stack[-1].give(lambda: run(*args, **kwargs))
            return None

        return issue

    with pytest.MonkeyPatch.context() as patch, _Late(lambda: stack[-1]):
        issue_in_order(patch)
        if fault is not None:
            fault(patch.setattr)
        patch.setattr(accelerator, "api", lambda device: torch.cuda)
        patch.setattr(torch.cuda, "Stream", LateStream)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stack[-1])
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(
            import_module("elixir_moe.wrapping.allocate"), "Streams", lambda device: Streams(torch.device("cuda", 0))
        )
        patch.setattr(import_module("elixir_moe.optim.shard_update"), "adam_step", step_by_numbers)
        patch.setattr(blocks, "storage_uses", lambda tensor: 0)  # operations that wait hold their tensors
        patch.setattr(SumOnDisk, "_write", issued_late(SumOnDisk._write))  # without a GPU no other thread writes it
        for name in _ISSUED_LATE:
            if hasattr(dist, name):
                patch.setattr(dist, name, issued_late(getattr(dist, name)))
        yield


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
