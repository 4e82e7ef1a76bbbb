"""Collectives on chunks: the all-gather of weights and the reduction of gradients.

Owns the process groups of chunks and the implementation for each backend. Decides nothing: `gathers` and `reductions`
choose the chunks and the time.

On NCCL gathers and reductions run in place in the block, or a reduction in a staging buffer into which 16-bit gradients
are widened, so that they are summed in fp32. gloo's own versions are slow, so there a gather is one message to and from
every peer, in place, and a reduce-scatter is an all-to-all into a staging buffer and a local sum; of two ranks, into
the shard if that has a place for it. That sum is in rank order, and in fp32 whatever the dtype of the messages. A sum
in fp32 is rounded once, to the dtype of the gradients.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elixir_moe.accelerator import backends, current_stream, is_accelerator
from elixir_moe.distributed.waits import WAITS, Issued, Series, Turn, Wait, named, wait_for_event
from elixir_moe.errors import ConfigError
from elixir_moe.kernels import add_and_square
from elixir_moe.torch_private import abort_together, backend_on, devices_of, issued_on, process_groups, timeout_on

_TAG_OF_NONE = 1 << 30
"""The tag of a message that nobody sends; the tag of a chunk is its index."""
_GATHER, _REDUCE = 0, 1
"""Places of a communicator's process groups."""


class Work:
    """An operation in flight. `wait` orders the current stream of its device (on CPU, the host) after its end."""

    def __init__(
        self,
        works: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        *,
        what: str = "a collective",
        ranks: Sequence[int] | None = None,
        turn: Turn | None = None,
    ) -> None:
        """`what`, `ranks` and `turn`: as for `Wait`."""
        self._works = list(works)
        self._finish = finish
        self._what, self._ranks, self._turn = what, ranks, turn
        self.lost: Callable[[], None] | None = None
        """Called if the host's part fails or is interrupted in any waiter: part of the result may be lost."""
        self._events: list[torch.Event] = []
        self._device: torch.device | None = None
        self._behind: list[torch.Stream] = []
        """Streams that are already ordered after the operation."""

    def mark(self, stream: torch.Stream) -> None:
        """Makes everything issued to `stream` so far part of the operation."""
        self._events.append(stream.record_event())
        self._device = stream.device

    @property
    def pending(self) -> bool:
        """Whether the host still has to wait for the operation."""
        return bool(self._works) or self._finish is not None

    def wait(self) -> None:
        """Orders the caller after the operation; a second wait on the same stream costs nothing."""
        self._end()
        if self._events and (current := current_stream(self._device)) not in self._behind:
            for event in self._events:
                wait_for_event(event, current)
            self._behind.append(current)

    def synchronize(self) -> None:
        """Blocks the host, and no stream, until the operation is done. For any thread unless it is `pending`."""
        self._end()
        for event in self._events:
            event.synchronize()

    def _end(self) -> None:
        """Does what the host still has to do."""
        try:
            if self._works:
                with Wait(self._what, self._ranks, self._turn):
                    while self._works:
                        self._works[0].wait()
                        del self._works[0]  # only now: after an interrupt, it must be waited for again
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        except BaseException:
            if self.lost is not None:
                self.lost()
            raise


class Reduced(Protocol):
    """A callback for this rank's result of a reduction."""

    def __call__(self, reduced: torch.Tensor, squares: float | None = None) -> None:
        """`squares` is the sum of squares of `reduced`, if known."""


class Communicator:
    """The collectives of one tuple of ranks, on a process group for gathers and one for reductions."""

    def __init__(
        self, ranks: tuple[int, ...], groups: Sequence[dist.ProcessGroup] = (), device: torch.device | None = None
    ) -> None:
        self.ranks = ranks
        self.rank = dist.get_rank()
        self.size = len(ranks)
        self.index = ranks.index(self.rank) if self.size > 1 else 0
        self._issued = Issued(ranks, self._end) if self.size > 1 else None
        self._groups = list(groups)
        """That of gathers and that of reductions; none for a single rank, and once they are dropped."""
        self._device = device
        self.over_gloo = device is not None and bool(groups) and goes_over_gloo(groups[0], device)
        """Chunks are sent as gloo messages, and sums are computed here."""
        self.tagged = self.over_gloo or not groups
        """Messages are matched by tags. Otherwise, on NCCL, collectives are matched only by their order over all
        process groups together: then nothing that depends on time may decide when one is issued."""

    @property
    def issued(self) -> list[int]:
        """Numbers of gathers and reductions this rank has issued; empty if they are `tagged`.

        When backward begins, the numbers are equal on all ranks: the chunks that forward used have been updated and
        gathered, so no gather in the queue waits for an update.
        """
        if self.tagged or self._device is None:
            return []
        return [issued_on(group, self._device) for group in self._groups]

    def all_gather(self, buffer: torch.Tensor, tag: int, *, of: str = "a chunk") -> Work:
        """Gathers in place: of `buffer`'s `size` equal slices, slice `index` is this rank's; the others are received.

        `tag`, equal on all ranks for the same content, matches messages where the backend has tags. `of` describes the
        content in error messages.
        """
        if self._issued is None:
            return Work()
        what, turn = self._issued.gather(of)
        slices = buffer.view(self.size, -1)
        if not self.over_gloo:
            own = slices[self.index].view(torch.uint8)  # NCCL does not support all dtypes
            with Wait(what, self.ranks):  # in stream order; the host does not wait, except over gloo
                gather_into(buffer.view(torch.uint8), own, self._groups[_GATHER])
            return Work()
        slices = slices.view(torch.uint8)
        works = []
        with Wait(what, self.ranks, turn):  # issuing a message fails if another rank has closed the connections
            for step in range(1, self.size):  # every rank starts with a different peer
                to, source = (self.index + step) % self.size, (self.index - step) % self.size
                works.append(dist.irecv(slices[source], group=self._groups[_GATHER], tag=tag, group_src=source))
                works.append(dist.isend(slices[self.index], group=self._groups[_GATHER], tag=tag, group_dst=to))
        return Work(works, what=what, ranks=self.ranks, turn=turn)

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        staging: torch.Tensor | None,
        then: Reduced,
        place: torch.Tensor | None = None,
        *,
        tag: int = 0,
        of: str = "a chunk",
    ) -> Work:
        """Sums `buffer` over the ranks and gives `then` this rank's slice when it is complete.

        Args:
            buffer: one gradient of every parameter; must not change until the work is waited for.
            staging: if `over_gloo`, as large as `buffer`, or for two ranks as large as a slice; required if
                `needs_staging`. Otherwise None, or as many elements of a wider dtype, in which gradients are summed.
                In use until the work is waited for.
            then: called once: in `wait` if `over_gloo`, otherwise at once (in stream order). It gets the sum of squares
                too, if the reduction has computed it.
            place: memory for the sum, (numel / size,), so that `then` need not copy it; only if `over_gloo`.
            tag, of: as in `all_gather`.
        """
        slices = buffer.view(self.size, -1)
        if self._issued is None:
            then(slices[0])
            return Work()
        what, turn = self._issued.reduction(of)
        if not self.over_gloo:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            terms = slices if staging is None else staging.view(self.size, -1).copy_(slices)
            with Wait(what, self.ranks):
                scatter(terms[self.index], terms.view(-1), group=self._groups[_REDUCE])
            then(slices[self.index] if staging is None else slices[self.index].copy_(terms[self.index]))
            return Work()
        leaving = slices.view(torch.uint8)
        if self.size > 2:
            assert staging is not None
            received = staging.view(self.size, -1)
            arriving = received.view(torch.uint8)
            with Wait(what, self.ranks, turn):
                work = dist.all_to_all_single(arriving, leaving, group=self._groups[_REDUCE], async_op=True)
            return Work([work], lambda: then(torch.sum(received, 0, out=place)), what=what, ranks=self.ranks, turn=turn)
        # Each of two ranks receives one slice from the other directly into the sum's memory, and adds its own.
        if place is None:
            assert staging is not None
            place = staging
        theirs, own, peer = place, slices[self.index], 1 - self.index
        with Wait(what, self.ranks, turn):
            works = [
                dist.irecv(theirs.view(torch.uint8), group=self._groups[_REDUCE], tag=tag, group_src=peer),
                dist.isend(leaving[peer], group=self._groups[_REDUCE], tag=tag, group_dst=peer),
            ]
        return Work(works, lambda: then(theirs, add_and_square(theirs, own)), what=what, ranks=self.ranks, turn=turn)

    def needs_staging(self, place: torch.Tensor | None) -> bool:
        """Whether a reduction into `place` needs a staging buffer."""
        return self.over_gloo and (self.size > 2 or place is None)

    def all_reduce(
        self, buffer: torch.Tensor, then: Reduced, wide: torch.Tensor | None = None, *, of: str = "a chunk"
    ) -> Work:
        """Sums `buffer` over the ranks in place and gives it to `then`; `of` as in `all_gather`.

        The sum is computed in `wide`, as many elements of a wider dtype, if there is one. It is in use until the work
        is waited for.
        """
        if self._issued is None:
            then(buffer)
            return Work()
        what, turn = self._issued.reduction(of)
        terms = buffer if wide is None else wide.copy_(buffer)

        def finish() -> None:
            then(buffer if wide is None else buffer.copy_(wide))

        if not self.over_gloo:
            with Wait(what, self.ranks):
                dist.all_reduce(terms, group=self._groups[_REDUCE])
            finish()
            return Work()
        with Wait(what, self.ranks, turn):
            work = dist.all_reduce(terms, group=self._groups[_REDUCE], async_op=True)
        return Work([work], finish, what=what, ranks=self.ranks, turn=turn)

    def connect(self) -> None:
        """Makes NCCL create its communicators now instead of in the first backward. Collective.

        NCCL has buffers for each kind of collective, so a few bytes go through those that chunks use. Other backends
        need nothing.
        """
        if self._device is not None and is_accelerator(self._device) and not self.over_gloo:
            buffer = torch.zeros(self.size, device=self._device)
            self.all_gather(buffer, 0, of="no chunk, to connect")
            self.reduce_scatter(buffer, None, lambda *_: None, of="no chunk, to connect")
            self.all_reduce(buffer, lambda *_: None, of="no chunk, to connect")

    def close(self) -> None:
        """Destroys the process groups, on this rank only."""
        drop_groups(self._groups)
        self.drop()

    def _end(self) -> None:
        for group in self._groups:
            end_gloo(group)

    def drop(self) -> None:
        """Drops the process groups without destroying them."""
        self._groups = []

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Copies the first rank's `buffer` to every rank; blocks."""
        if self.size > 1:
            with Wait(f"the broadcast of a chunk's first weights over {named(self.ranks)}", self.ranks):
                dist.broadcast(buffer.view(torch.uint8), self.ranks[0], group=self._groups[_GATHER])


def gather_into(table: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Gathers `mine` of each rank of `group` into `table`, one after the other. Collective."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(table, mine, group=group)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves tensors on `device`, "gloo" or "nccl". Raises ConfigError if none does."""
    served = sorted({served.type for served in devices_of(group)})
    if device.type not in served:
        raise ConfigError(
            f"device={str(device)!r}: torch.distributed was started only for tensors on {served}: start it by "
            f"em.init_mesh(), or with backend={backends(device.type)!r}"
        )
    name: str = backend_on(group, device).name()
    return name


def goes_over_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether chunks on `device` are sent as gloo messages: gloo can only read CPU memory."""
    return backend_of(group, device) == "gloo" and device.type == "cpu"


def build_communicators(wanted: Iterable[tuple[int, ...]], device: torch.device) -> dict[tuple[int, ...], Communicator]:
    """One communicator for each distinct tuple of ranks this rank is in, connected. Collective over the world."""
    wanted = set(wanted)
    pairs = zip(make_groups(wanted).items(), make_groups(wanted).values(), strict=True)
    several = {ranks: Communicator(ranks, (gather, reduce), device) for (ranks, gather), reduce in pairs}
    for communicator in several.values():  # in one order on all ranks
        communicator.connect()
    return {ranks: several.get(ranks) or Communicator(ranks) for ranks in wanted}


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connects a mesh's process group like `Communicator.connect`, by an all-reduce and an all-to-all. Collective."""
    if is_accelerator(device) and backend_of(group, device) != "gloo":
        token = torch.zeros(group.size(), device=device)
        dist.all_reduce(token, group=group)
        dist.all_to_all_single(torch.empty_like(token), token, group=group)


def world_timeout() -> timedelta:
    """The timeout of the default process group's collectives, also used by the library's own groups."""
    return timeout_of(dist.group.WORLD)  # type: ignore[arg-type]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of `group`'s collectives; of those on CPU tensors if it serves any."""
    served = min(devices_of(group), key=lambda device: device.type != "cpu")  # plain "nccl" serves no CPU tensors
    return timeout_on(group, served)


def abort_nccl() -> None:
    """Ends the running NCCL collectives of this process, and makes later ones fail; from any thread.

    A kernel that waits for a missing rank ends too, so that a host waiting for its GPU continues. The results of the
    collectives that were running are undefined.
    """
    groups = list(process_groups())
    found = {backend_on(group, device): None for group in groups for device in devices_of(group)}
    if backends := [backend for backend in found if backend.name() == "nccl"]:
        abort_together(backends)


def end_gloo(group: dist.ProcessGroup) -> None:
    """Ends the running collectives of a gloo group, on all its ranks; from any thread.

    gloo closes the connections of a group as soon as one wait in it times out.
    """
    message = torch.empty(1, device="cpu")
    with suppress(RuntimeError):
        work = dist.irecv(message, group=group, tag=_TAG_OF_NONE, group_src=(group.rank() + 1) % group.size())
        assert work is not None
        work.wait(timedelta(milliseconds=1))


def next_exchange(group: dist.ProcessGroup) -> Turn:
    """Counts an exchange of tokens over `group`, which is about to be issued."""
    series = WAITS.exchanges.get(group)
    if series is None:
        known = weakref.ref(group)

        def end() -> None:
            if (alive := known()) is not None:
                end_gloo(alive)

        series = WAITS.exchanges[group] = Series("exchanges of tokens", dist.get_process_group_ranks(group), end)
    return series.next()


def drop_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroys those process groups that still exist, on this rank only."""
    for group in groups:
        if group in process_groups():
            dist.destroy_process_group(group)


def make_groups(
    wanted: Iterable[tuple[int, ...]], backend: str | None = None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Makes a process group for each wanted tuple of several ranks, in one order on all ranks. Collective over all.

    Each rank names only the groups it is in; all ranks make the union of them, as `dist.new_group` requires.
    """
    mine = {ranks for ranks in wanted if len(ranks) > 1}
    everyone: list[Any] = [None] * dist.get_world_size()
    with Wait("the creation of process groups by all ranks"), _unbound(backend):
        dist.all_gather_object(everyone, sorted(mine))
        union = sorted({tuple(ranks) for theirs in everyone for ranks in theirs})
        made = {ranks: dist.new_group(list(ranks), backend=backend, timeout=world_timeout()) for ranks in union}
        # A group closed by a rank that is ready would cut off one that still connects.
        dist.all_gather_object(everyone, None)
    return {ranks: group for ranks, group in made.items() if ranks in mine}


@contextmanager
def _unbound(backend: str | None) -> Iterator[None]:
    """A context to make groups of `backend` even if torch.distributed was started with a `device_id`.

    For each new group torch then makes the ranks outside of it join a split of the world's NCCL communicator, whatever
    the backend. The members of a gloo group do not join, so the others would hang.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    if backend == "gloo":
        world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
