"""What one training step of a model asks of the machine: the data a plan is made from.

Owns `Profile` and the requests a step makes of the rCache under a layout. Pure: a profile is found by `trace`, priced
by `cost`, and can be kept or compared; it holds no module and no tensor.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elixir_moe.chunks.group import ParamSpec
from elixir_moe.chunks.layout import Layout
from elixir_moe.chunks.policy import Entry, Schedule, Verb


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One run of a unit in forward: a module that unshards as one. Every entry and exit gets the next number."""

    entered: int
    left: int
    unit: int
    """Which unit runs."""
    params: tuple[int, ...]
    """Indices of the unit's parameters."""
    region: int | None = None
    """The activation-checkpoint region it is run again with in backward; None if its activations are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """All-to-alls of one mixture layer in one step."""

    ep: int
    """Ranks that share the experts."""
    nbytes: int
    """Bytes a rank gives to each all-to-all under balanced routing, its own part included."""
    times: int
    """How often in a step: two in forward, two in backward, two more if recomputed."""
    expert_flops: int
    """Floating-point operations of this rank's experts in a step under balanced routing."""
    row_bytes: int
    """Bytes of activations that grow with the rows this rank receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Collectives that the model issues itself in one step over one process group: tensor parallelism, for one."""

    ranks: tuple[int, ...]
    """Global ranks."""
    nbytes: int
    """Bytes in the measure of all-gathers: those of what is gathered, or reduce-scattered, or exchanged; an all-reduce
    counts twice."""
    times: int
    """How many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One rank's training step: one forward and one backward."""

    params: tuple[ParamSpec, ...]
    """All parameters, in order of first use; shapes are this rank's slices."""
    uses: tuple[Use, ...]
    """Runs of units in forward."""
    parameters: int
    """Parameters of the whole model, on all ranks."""
    tokens: int
    """Elements of the batch a rank's loss is the mean of: D of 8·M·D, on one rank."""
    flops: int
    """Floating-point operations of matrix products and attention, recomputation included."""
    traffic_bytes: int
    """Bytes read and written in device memory by all other operators."""
    activation_bytes: int
    """Peak of all tensors of a step that are neither parameters nor buffers, a gradient before it lands included."""
    buffer_bytes: int
    """Buffers of the model."""
    exchanges: tuple[Exchange, ...] = ()
    sent: tuple[Sent, ...] = ()

    @property
    def key(self) -> str:
        """Tells one step from another: the same model, batch, ranks and patterns have the same key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def regions(self) -> dict[int, list[Use]]:
        """The uses of each checkpoint region, in order."""
        found: dict[int, list[Use]] = {}
        for use in self.uses:
            if use.region is not None:
                found.setdefault(use.region, []).append(use)
        return found

    def schedule(self, layout: Layout) -> Schedule:
        """What forward and backward ask of the rCache, as the runtime would record it."""
        return Requests(self).schedule(layout)


class Requests:
    """What a step asks for, unit by unit, to be read as what it asks of the rCache under many layouts.

    Backward visits uses in the reverse of the order forward left them. A recomputed region is acquired use by use
    and held until its backward is done, which is why the rCache must hold the largest region (v2, A.3).
    """

    def __init__(self, profile: Profile) -> None:
        self._params = {use.unit: use.params for use in profile.uses}
        self._first = {use.unit: use for use in sorted(profile.uses, key=lambda use: -use.entered)}
        self._landed: set[int] = set()
        self._walk = [*self._forward(profile), *self._backward(profile)]
        """(verb, unit) in order; HOLD is where the unit's gradients come."""

    def _forward(self, profile: Profile) -> Iterator[tuple[Verb, int]]:
        numbered = [(use.entered, Verb.ACQUIRE, use.unit) for use in profile.uses]
        numbered += [(use.left, Verb.RELEASE, use.unit) for use in profile.uses]
        for _, verb, unit in sorted(numbered, key=lambda item: item[0]):
            yield verb, unit

    def _backward(self, profile: Profile) -> Iterator[tuple[Verb, int]]:
        regions = profile.regions
        open_uses: list[Use] = []
        recomputed: set[int] = set()
        for use in sorted(profile.uses, key=lambda use: -use.left):
            open_uses, passed = _split(open_uses, use.left)
            for done in passed:
                yield from self._end(done)
            if use.region is not None and use.region not in recomputed:
                recomputed.add(use.region)
                for again in regions[use.region]:
                    yield Verb.ACQUIRE, again.unit
                    open_uses.append(again)
            yield Verb.ACQUIRE, use.unit
            open_uses.append(use)
            if use.left == use.entered + 1:  # nothing runs inside it: its gradients come at once
                yield from self._gradients(use)
        for done in open_uses:
            yield from self._end(done)

    def _end(self, use: Use) -> Iterator[tuple[Verb, int]]:
        yield from self._gradients(use)
        yield Verb.RELEASE, use.unit

    def _gradients(self, use: Use) -> Iterator[tuple[Verb, int]]:
        if self._first[use.unit] is use and use.unit not in self._landed:
            self._landed.add(use.unit)
            yield Verb.HOLD, use.unit

    def schedule(self, layout: Layout) -> Schedule:
        """What forward and backward ask of the rCache, as the runtime would record it."""
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        awaited: dict[int, set[int]] = {chunk.index: set() for chunk in layout.cached if chunk.key.trainable}
        acquire: dict[int, Entry] = {}
        users: dict[int, list[int]] = {}
        for unit, params in self._params.items():
            chunks = tuple(sorted({chunk_of[p] for p in params if p in chunk_of}))
            if chunks:
                acquire[unit] = Entry(Verb.ACQUIRE, chunks)
            for chunk in chunks:
                users.setdefault(chunk, []).append(unit)
            for param in params:
                if param in chunk_of and chunk_of[param] in awaited:
                    awaited[chunk_of[param]].add(param)
        release = {unit: Entry(Verb.RELEASE, entry.chunks) for unit, entry in acquire.items()}
        held: set[int] = set()
        entries: list[Entry] = []
        for verb, unit in self._walk:
            if verb is not Verb.HOLD:
                entry = (acquire if verb is Verb.ACQUIRE else release).get(unit)
                if entry is not None:
                    entries.append(entry)
                continue
            for param in self._params[unit]:
                chunk = chunk_of.get(param, -1)
                if param not in awaited.get(chunk, ()):
                    continue
                if chunk not in held:
                    held.add(chunk)
                    entries.append(Entry(Verb.HOLD, (chunk,)))
                awaited[chunk].discard(param)
                if not awaited[chunk]:
                    entries.append(Entry(Verb.FREE, (chunk,)))
                    for user in users[chunk]:
                        _leave_out(release, user, chunk)
        return Schedule(entries)


def _leave_out(release: dict[int, Entry], unit: int, chunk: int) -> None:
    """The unit's releases no longer name a chunk that is gone."""
    left = tuple(other for other in release.pop(unit).chunks if other != chunk)
    if left:
        release[unit] = Entry(Verb.RELEASE, left)


def _split(open_uses: Sequence[Use], left: int) -> tuple[list[Use], list[Use]]:
    """The uses still open, and those that forward entered behind number `left`: their backward is done."""
    return [u for u in open_uses if u.entered <= left], [u for u in open_uses if u.entered > left]
