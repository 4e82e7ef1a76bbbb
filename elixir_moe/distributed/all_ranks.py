"""Exchanges of small values between all ranks, comparisons of them, and errors that all ranks raise together.

Owns the rule that an error of one rank is raised on all, with the same type and message, the message about a value that
differs between ranks, and the gloo process groups on which the ranks of a wrapped model agree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elixir_moe.distributed.collectives import Communicator, drop_groups, end_gloo, make_groups, world_timeout
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import ElixirError, UsageError

T = TypeVar("T")
_NOTHING = "nothing"
"""Stands in a message for a key or an item that one rank has and another lacks."""
_MOST_TEXT = 300
"""Most characters of a value in a message."""


def gathered(
    value: T, process_group: dist.ProcessGroup | None = None, what: str = "an exchange between all ranks"
) -> list[T]:
    """Returns the small `value` of every rank of `process_group`, by default the world, in rank order. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    with Wait(what, dist.get_process_group_ranks(process_group)):
        dist.all_gather_object(everyone, value, group=process_group)
    return everyone


def agree(
    what: str,
    value: object,
    process_group: dist.ProcessGroup | None = None,
    *,
    remedy: str,
    error: type[ElixirError] = UsageError,
) -> None:
    """Raises an error on all ranks unless `value`, small plain data, is the same on each of them. Collective.

    The message is that of `disagreement` about `what`, followed by `remedy`, which says what to change.
    """
    everyone = gathered(value, process_group)
    found = disagreement(what, everyone, dist.get_process_group_ranks(process_group))
    if found is not None:
        raise error(f"{found}: {remedy}")


def disagreement(what: str, everyone: Sequence[object], ranks: Sequence[int] | None = None) -> str | None:
    """The first difference between the values of ranks, in words; None if there is none.

    Mappings are compared by key and sequences by item; other values by how they are written, so that NaN equals NaN.
    `ranks` has the number of each rank; by default they are counted from 0.
    """
    numbers = range(len(everyone)) if ranks is None else ranks
    for rank, other in zip(numbers, everyone, strict=True):
        if (found := _difference("", everyone[0], other)) is not None:
            where, first, second = found
            both = f"{first} on rank {numbers[0]}, {second} on rank {rank}"
            return f"ranks disagree about {what}: {where or 'it'} is {both}"
    return None


def _difference(where: str, one: object, other: object) -> tuple[str, str, str] | None:
    """(path, value, other value) of the first place where two values differ."""
    places: Iterable[tuple[str, object, object]]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = dict.fromkeys([*one, *other])
        name = (lambda key: f"{where}[{key!r}]") if where else str
        places = ((name(key), one.get(key, _NOTHING), other.get(key, _NOTHING)) for key in keys)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = enumerate(zip_longest(one, other, fillvalue=_NOTHING))
        places = ((f"{where}[{i}]" if where else f"item {i}", *pair) for i, pair in pairs)
    else:
        return None if repr(one) == repr(other) else (where, _shown(one), _shown(other))
    return next(filter(None, (_difference(*place) for place in places)), None)


def _shown(value: object) -> str:
    return (value if isinstance(value, str) and value else repr(value))[:_MOST_TEXT]


def raise_on_all_ranks(
    what: str,
    work: Callable[[], T],
    process_group: dist.ProcessGroup | None = None,
    *,
    error: type[ElixirError] | None = None,
) -> list[T]:
    """Runs `work`, which must not be collective, on every rank; returns its small results, by rank. Collective.

    Args:
        what: the work in the past tense, for the message if a rank is gone: "wrote their files".
        work: any `Exception` it raises becomes an error on all ranks.
        process_group: the ranks; by default the world.
        error: the type to raise; by default that of the first failed rank, or ElixirError for an error of Python, torch
            or the system.

    Raises:
        ElixirError: on all ranks, if `work` failed on any: names the first failed rank, its error, and how many failed.
    """
    raised: Exception | None = None
    outcome: tuple[type[ElixirError], str] | None = None
    result: Any = None
    try:
        result = work()
    except Exception as caught:
        raised = caught
        outcome = type(caught) if isinstance(caught, ElixirError) else ElixirError, _text(caught)
    everyone = gathered((outcome, result), process_group, f"the agreement of all ranks after they {what}")
    ranks = dist.get_process_group_ranks(process_group)
    failures = [(rank, *failed) for rank, (failed, _) in zip(ranks, everyone, strict=True) if failed is not None]
    if not failures:
        return [found for _, found in everyone]
    rank, kind, text = failures[0]
    if error is None and len({failure[1:] for failure in failures}) == 1 and len(failures) == len(ranks):
        raise kind(text) from raised  # each rank would have raised the same by itself
    others = f" ({len(failures)} ranks failed)" if len(failures) > 1 else ""
    raise (error or kind)(f"[rank {rank}]{others} {text}") from raised


def make_on_all_ranks(what: str, make: Callable[[], T]) -> T:
    """Returns what `make` makes on this rank; it must not be collective. Raises as `raise_on_all_ranks`. Collective."""
    made: list[T] = []
    raise_on_all_ranks(what, lambda: made.append(make()))
    return made[0]


class ControlGroups:
    """The gloo process groups of one wrapped model, for small exchanges. The constructor is collective."""

    def __init__(self, peers: tuple[int, ...], wanted: Iterable[tuple[int, ...]]) -> None:
        """`peers`: the ranks that hold the model. `wanted`: the sets of ranks over which full weights are gathered."""
        self.peers = peers
        self.has_stages = len(peers) < dist.get_world_size()
        """Whether other ranks hold other pipeline stages."""
        self._of_all = {"control": dist.new_group(backend="gloo", timeout=world_timeout())}
        self.by_ranks = make_groups([peers, *wanted], backend="gloo")

    @property
    def control(self) -> dist.ProcessGroup:
        """The process group of all ranks of the world."""
        return self._of_all["control"]

    @property
    def peers_group(self) -> dist.ProcessGroup:
        return self.by_ranks.get(self.peers, self.control)

    def background(self) -> dist.ProcessGroup:
        """A second process group of all ranks, for a background thread; the first call makes it. Collective."""
        if "background" not in self._of_all:
            self._of_all["background"] = dist.new_group(backend="gloo", timeout=world_timeout())
        return self._of_all["background"]

    def sum_over_peers(self, values: torch.Tensor) -> None:
        """Sums over the ranks that hold the model, in place. Collective."""
        if len(self.peers) > 1:
            dist.all_reduce(values, group=self.by_ranks[self.peers])

    def sum_over_stages(self, values: torch.Tensor) -> None:
        """Sums values that are equal on all peers over the pipeline stages, in place. Collective."""
        if self.has_stages:
            values /= len(self.peers)
            dist.all_reduce(values, group=self.control)

    def close(self) -> None:
        """Destroys all process groups. Collective."""
        try:
            with Wait("the barrier of all ranks before they close"):
                dist.barrier(group=self.control)  # a group destroyed while a peer still joins it fails there
        finally:
            self.close_local()

    def end(self) -> None:
        """Makes all small exchanges in progress fail; from any thread."""
        for group in (*self.by_ranks.values(), self.control):
            end_gloo(group)

    def close_local(self) -> None:
        """Destroys all process groups, on this rank only; a second call does nothing."""
        drop_groups((*self.by_ranks.values(), *self._of_all.values()))
        self._drop()

    def replace(self, control: Callable[[], dist.ProcessGroup]) -> None:
        """Drops all process groups in the middle of a step; `control` then makes a new one of all ranks."""
        self._drop()
        self._of_all["control"] = control()

    def _drop(self) -> None:
        """Drops the references to all process groups.

        gloo's connections and threads end only when nothing references their process group; peers that wait for this
        rank then fail.
        """
        self.by_ranks.clear()
        self._of_all.clear()


def drop_all(groups: ControlGroups, communicators: Iterable[Communicator]) -> None:
    """Destroys the process groups of a model that was garbage-collected, on this rank only."""
    groups.close_local()
    for communicator in communicators:
        communicator.close()


class Deferred:
    """Work between collectives; `finish` raises its failure, since the other ranks are already in the next one."""

    def __init__(self, what: str, *, error: type[ElixirError] | None = None) -> None:
        """`what` and `error` as in `raise_on_all_ranks`."""
        self._what = what
        self._error = error
        self._failure: Exception | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Runs the work, unless earlier work has failed."""
        if self._failure is None:
            try:
                work()
            except Exception as error:
                self._failure = error

    def finish(self) -> None:
        """Raises on all ranks of the world, as `raise_on_all_ranks`, if work failed on any of them. Collective."""
        raise_on_all_ranks(self._what, self._check, error=self._error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}"
    return str(error) if isinstance(error, ElixirError) else f"{type(error).__name__}: {error}"
