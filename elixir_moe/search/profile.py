"""What one training step of a model asks of the machine: the data a plan is made from.

Owns `Profile` and the requests a step makes of the rCache under a layout. Pure: a profile is found by `trace`, priced
by `cost`, and can be kept or compared; it holds no module and no tensor.
"""

import hashlib
import itertools
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
        """What forward and backward ask of the rCache, as the runtime would record it.

        Backward visits uses in the reverse of the order forward left them. A recomputed region is acquired use by use
        and held until its backward is done, which is why the rCache must hold the largest region (v2, A.3).
        """
        return Schedule(list(_Walk(self, layout).entries()))


class _Walk:
    """One pass over forward and backward, with the gradients that are still awaited."""

    def __init__(self, profile: Profile, layout: Layout) -> None:
        place = {slot.param: (c.index, i) for c in layout.chunks for i, slot in enumerate(c.slots) if not c.resident}
        self._uses = profile.uses
        self._regions = profile.regions
        self._slots = {use.unit: [place[p] for p in use.params if p in place] for use in profile.uses}
        self._chunks = {unit: tuple(sorted({c for c, _ in slots})) for unit, slots in self._slots.items()}
        self._awaited: dict[int, set[int]] = {c.index: set() for c in layout.cached if c.key.trainable}
        for chunk, index in itertools.chain.from_iterable(self._slots.values()):
            if chunk in self._awaited:
                self._awaited[chunk].add(index)
        self._held: set[int] = set()
        self._gone: set[int] = set()
        self._made: dict[tuple[Verb, tuple[int, ...]], Entry] = {}  # thousands of entries, of which few are different

    def entries(self) -> Iterator[Entry]:
        """Every request in order."""
        numbered = [(use.entered, Verb.ACQUIRE, use) for use in self._uses]
        numbered += [(use.left, Verb.RELEASE, use) for use in self._uses]
        for _, verb, use in sorted(numbered, key=lambda item: item[0]):
            yield from self._entry(verb, use)
        first = {use.unit: use for use in sorted(self._uses, key=lambda use: -use.entered)}
        open_uses: list[Use] = []
        recomputed: set[int] = set()
        for use in sorted(self._uses, key=lambda use: -use.left):
            open_uses, passed = _split(open_uses, use.left)
            for done in passed:
                yield from self._end(done, first)
            if use.region is not None and use.region not in recomputed:
                recomputed.add(use.region)
                for again in self._regions[use.region]:
                    yield from self._entry(Verb.ACQUIRE, again)
                    open_uses.append(again)
            yield from self._entry(Verb.ACQUIRE, use)
            open_uses.append(use)
            if use.left == use.entered + 1:  # nothing runs inside it: its gradients come at once
                yield from self._gradients(use, first)
        for done in open_uses:
            yield from self._end(done, first)

    def _end(self, use: Use, first: dict[int, Use]) -> Iterator[Entry]:
        yield from self._gradients(use, first)
        yield from self._entry(Verb.RELEASE, use)

    def _entry(self, verb: Verb, use: Use) -> Iterator[Entry]:
        chunks = self._chunks[use.unit]
        if verb is Verb.RELEASE and not self._gone.isdisjoint(chunks):
            chunks = tuple(c for c in chunks if c not in self._gone)
        if chunks:
            entry = self._made.get((verb, chunks))
            yield entry or self._made.setdefault((verb, chunks), Entry(verb, chunks))

    def _gradients(self, use: Use, first: dict[int, Use]) -> Iterator[Entry]:
        if first[use.unit] is not use:
            return
        for chunk, index in self._slots[use.unit]:
            if index not in self._awaited.get(chunk, ()):
                continue
            if chunk not in self._held:
                self._held.add(chunk)
                yield Entry(Verb.HOLD, (chunk,))
            self._awaited[chunk].discard(index)
            if not self._awaited[chunk]:
                self._gone.add(chunk)
                yield Entry(Verb.FREE, (chunk,))


def _split(open_uses: Sequence[Use], left: int) -> tuple[list[Use], list[Use]]:
    """The uses still open, and those that forward entered behind number `left`: their backward is done."""
    return [u for u in open_uses if u.entered <= left], [u for u in open_uses if u.entered > left]
