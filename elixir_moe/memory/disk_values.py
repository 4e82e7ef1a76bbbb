"""Values on disk: one file for each rank, read ahead of the gathers.

Owns the file, its checksums, and the buffers in host memory through which values reach the device. Frozen chunks have
nothing else; of trainable chunks in the file, `FullDiskShard` is the rest. `runtime.scheduler` says when.

    decided   `begin` takes a free buffer and starts to read, in requests on a few threads
    gathered  `Reading.values` waits for the last request; the gather copies the values to its block
    copied    `give_back` frees the buffer, which is filled again when the copy has ended

Source: ZeRO-Infinity, 5.2.2 (disk to host, host to device and gather at the same time) and 6.3 (page-locked buffers are
few and used again).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.ledger import VALUES_BUFFERS, VALUES_REQUEST_BYTES, paged_bytes, values_buffer_bytes
from elixir_moe.distributed.collectives import Work
from elixir_moe.kernels import host_threads, sum_of_squares
from elixir_moe.memory.direct_file import paged_memory
from elixir_moe.memory.disk import DiskFile, DiskShard, DiskStore
from elixir_moe.memory.slabs import locked_zeros


class ValuesFile(DiskFile):
    """The file of one rank, and its buffers."""

    def __init__(
        self, directory: str, sizes: Sequence[int], device: torch.device, *, rank: int = 0, checked: bool = False
    ) -> None:
        """Makes the file. `sizes` are the bytes of each chunk's shard; the rest is as for `DiskFile`."""
        super().__init__(directory, sum(map(paged_bytes, sizes)), rank=rank, checked=checked, device=device)
        self.buffer_bytes = values_buffer_bytes(sizes)
        self._memory = (
            locked_zeros(self.buffer_bytes, host_threads(device))
            if is_accelerator(device)
            else torch.frombuffer(paged_memory(self.buffer_bytes), dtype=torch.uint8)
        )
        buffers = paged_bytes(max(sizes)) * VALUES_BUFFERS
        self.own = self._memory[buffers:]
        """Memory for what is read or written apart from gathers."""
        self.lock = threading.Lock()
        """Held while `own` is in use."""
        self.buffers = [Buffer(memory, Work()) for memory in self._memory[:buffers].chunk(VALUES_BUFFERS)]
        """Buffers that were given back last come last."""
        self._taken = 0

    def allocate(self, nbytes: int, chunk: int, request_bytes: int | None = None) -> "ValuesPlace":
        """The place of the values of the next `chunk`; they are written in parts of `request_bytes`, if given."""
        start, self._taken = self._taken, self._taken + paged_bytes(nbytes)
        assert self._taken <= self.nbytes, "file handed out beyond its size"
        return ValuesPlace(self, start, nbytes, chunk, paged_bytes(request_bytes or VALUES_REQUEST_BYTES))


class Reading:
    """The values of one chunk on their way to a buffer. Requests exist before any is given to a thread."""

    def __init__(self, place: "ValuesPlace", values: torch.Tensor, copied: Work, requests: int) -> None:
        self.place, self.copied = place, copied
        self._values = values
        self.requests: list[Future[None]] = [Future() for _ in range(requests)]
        self.begun = False
        """All requests were given to a thread."""

    @property
    def done(self) -> bool:
        """Whether `values` returns at once."""
        return all(request.done() for request in self.requests)

    def values(self) -> torch.Tensor:
        """The values, as bytes. Blocks until they are there. Raises DiskError."""
        for request in self.requests:
            request.result()
        return self._values

    def end(self) -> None:
        """Blocks until nobody writes to the buffer, or will."""
        for request in self.requests:
            if not request.cancel():
                request.exception()


@dataclass(slots=True, eq=False)
class Buffer:
    """A buffer in host memory."""

    memory: torch.Tensor
    use: Reading | Work
    """The reading that fills it, or, where it is free, the copy that must end before it is filled again."""


class ValuesPlace:
    """The values of one chunk on disk, as bytes."""

    def __init__(self, file: ValuesFile, offset: int, nbytes: int, chunk: int, request_bytes: int) -> None:
        self._file, self._offset, self._chunk = file, offset, chunk
        self._nbytes, self._request_bytes = nbytes, request_bytes
        self.nbytes = paged_bytes(nbytes)
        """Bytes of the file."""

    @property
    def reading(self) -> Reading | None:
        """The reading that `begin` has begun, until `give_back`."""
        buffer = self._buffer()
        return buffer.use if buffer is not None and isinstance(buffer.use, Reading) and buffer.use.begun else None

    def begin(self) -> Reading | None:
        """Starts to read into a free buffer, unless that is done; None if there is none."""
        buffer = self._buffer() or next((one for one in self._file.buffers if isinstance(one.use, Work)), None)
        if buffer is None or self.reading is not None:
            return self.reading
        copied = buffer.use
        if isinstance(copied, Reading):  # an interrupt came before all requests were given to a thread
            copied.end()
            copied = copied.copied
        requests = list(self._requests())
        reading = buffer.use = Reading(self, buffer.memory[: self._nbytes], copied, len(requests))
        for request, (start, stop) in zip(reading.requests, requests, strict=True):
            self._file.threads.submit(self._fill, request, copied, start, buffer.memory[start:stop])
        reading.begun = True
        return reading

    def give_back(self, copied: Work) -> None:
        """Frees the buffer, if there is one; it is filled again when `copied` has ended."""
        buffer = self._buffer()
        if buffer is not None:
            assert isinstance(buffer.use, Reading)
            buffer.use.end()
            buffer.use = copied
            self._file.buffers = [*(one for one in self._file.buffers if one is not buffer), buffer]

    def _buffer(self) -> Buffer | None:
        """The buffer that these values are read into."""
        return next((b for b in self._file.buffers if isinstance(b.use, Reading) and b.use.place is self), None)

    def _fill(self, request: "Future[None]", copied: Work, start: int, place: torch.Tensor) -> None:
        if request.set_running_or_notify_cancel():
            try:
                copied.synchronize()
                self._load(start, place)
            except BaseException as error:  # for whoever waits
                request.set_exception(error)
            else:
                request.set_result(None)

    def read(self, start: int, into: torch.Tensor) -> None:
        """Copies bytes from `start` on to `into`, flat uint8. Raises DiskError."""
        for first, place, here, there in self._parts(start, start + into.numel()):
            with self._file.lock:
                self._load(first, place)
                into[here] = place[there]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrites bytes from `start` on with `values`, flat uint8. Raises DiskError."""
        for first, place, here, there in self._parts(start, start + values.numel()):
            with self._file.lock:
                if there.stop - there.start < min(place.numel(), self._nbytes - first):
                    self._load(first, place)
                place[there] = values[here]
                self.overwrite(first, place)

    def overwrite(self, start: int, request: torch.Tensor) -> None:
        """Writes the whole request that begins at byte `start`, in whole pages. Raises DiskError. For any thread."""
        self._file.store(self._offset + start, request)

    def _requests(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of the requests, in whole pages."""
        for start in range(0, self.nbytes, self._request_bytes):
            yield start, min(start + self._request_bytes, self.nbytes)

    def _parts(self, low: int, high: int) -> Iterator[tuple[int, torch.Tensor, slice, slice]]:
        """(start, memory, bytes of the caller, bytes of the memory) of the requests with bytes `low` to `high`."""
        for start, stop in self._requests():
            first, last = max(low, start), min(high, stop)
            if first < last:
                place = self._file.own[: stop - start]
                yield start, place, slice(first - low, last - low), slice(first - start, last - start)

    def _load(self, start: int, place: torch.Tensor) -> None:
        what = f"values of chunk {self._chunk}, bytes {start} to {start + place.numel()}"
        self._file.load(self._offset + start, place, what)


@dataclass(frozen=True, slots=True)
class ValuesElements:
    """Elements of values on disk, as `elements.Elements`."""

    place: ValuesPlace
    dtype: torch.dtype
    start: int
    stop: int

    def read(self) -> torch.Tensor:
        """Implements `Elements.read`."""
        found = torch.empty(self.stop - self.start, dtype=self.dtype, device="cpu")
        self.place.read(self.start * self.dtype.itemsize, found.view(torch.uint8))
        return found

    def write(self, values: torch.Tensor) -> None:
        """Implements `Elements.write`."""
        self.place.write(self.start * self.dtype.itemsize, values.to(self.dtype).cpu().view(torch.uint8))

    def __getitem__(self, part: slice) -> "ValuesElements":
        start, stop, _ = part.indices(self.stop - self.start)
        return replace(self, start=self.start + start, stop=self.start + max(start, stop))


class FullDiskShard(DiskShard):
    """The arrays of a chunk of which nothing stays in host memory: master, moments, and the gradient's sum as the last.

    An update reads them all, writes master and moments, and writes the values to their place. In its record the memory
    of the gradient, which is used up then, takes the values.
    """

    def __init__(self, store: DiskStore, numel: int, chunk: int, values: ValuesElements) -> None:
        super().__init__(store, *store.reserve(numel), numel, chunk)
        self._values = values
        self.gradient = len(self.arrays) - 1
        """The number of the array that is the gradient's sum."""

    def _leave(self, index: int, record: torch.Tensor, contents: list[torch.Tensor]) -> None:
        *lasting, spare = contents
        super()._leave(index, record, lasting)
        (start, stop), itemsize = self._bounds(index), self._values.dtype.itemsize
        memory = spare[: paged_bytes((stop - start) * itemsize)]
        memory[: (stop - start) * itemsize].view(self._values.dtype).copy_(self._elements(index, 0, lasting[0]))
        self._values.place.overwrite(start * itemsize, memory)

    def add_gradient(self, term: torch.Tensor, *, first: bool) -> float:
        """Adds a gradient in host memory to the sum, or, `first`, makes it the sum; returns the sum of its squares.

        Blocks until that is written. Raises DiskError.
        """

        def add(start: int, total: torch.Tensor) -> None:
            part = term[start : start + total.numel()]
            total.copy_(part) if first else total.add_(part)

        return self._change_gradient(add, replace=first)

    def change_gradient(self, ranges: Sequence[tuple[int, int]], change: Callable[[torch.Tensor], object]) -> float:
        """Calls `change` on parts of the sum, which it changes in place; the rest as for `add_gradient`."""

        def inside(first: int, total: torch.Tensor) -> None:
            for start, stop in ranges:
                if start < first + total.numel() and first < stop:
                    change(total[max(start - first, 0) : stop - first])

        return self._change_gradient(inside, replace=False)

    def _change_gradient(self, change: Callable[[int, torch.Tensor], object], *, replace: bool) -> float:
        def one(index: int) -> float:
            own = self._file.record()
            with own.lock, torch.no_grad():
                size = self._paged(index, self.gradient)
                content = own.memory[:size] if replace else self._load(self.gradient, index, own)
                total = self._elements(index, self.gradient, content)
                change(self._bounds(index)[0], total)
                self._file.store(self._place(index, self.gradient), content)
                return float(sum_of_squares(total, threads=1))

        parts = [self._file.threads.submit(one, index) for index in self._slices]
        for part in parts:
            part.exception()  # until nobody reads the gradient any more
        return sum(part.result() for part in parts)
