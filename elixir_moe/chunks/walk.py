"""The order in which one step asks for its chunks, before any step has run.

Owns `Use`, one run of a unit in forward, and `Walk`, which turns the uses of a step into what forward and backward ask
of the rCache under any layout. Pure: `wrap` counts with it the blocks a step needs, the search plays it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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


def by_first_use(uses: Sequence[Use], params: Iterable[int]) -> tuple[list[int], list[Use]]:
    """All `params` in the order in which `uses` first enter their units, those of no use last; and the uses, whose
    parameters are then indices into that order."""
    used = [p for use in sorted(uses, key=lambda use: use.entered) for p in use.params]
    moved = {old: new for new, old in enumerate(dict.fromkeys([*used, *params]))}
    return list(moved), [replace(use, params=tuple(moved[p] for p in use.params)) for use in uses]


class Walk:
    """What a step asks for, unit by unit, to be read as what it asks of the rCache under many layouts.

    Backward visits uses in the reverse of the order forward left them; a unit holds its chunks until everything that
    forward entered after it is done, and a chunk is freed when the last of its parameters that forward used has its
    gradient. A recomputed region is acquired use by use and held until its backward is done, which is why the rCache
    must hold the largest region (v2, A.3).
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self._params = {use.unit: use.params for use in uses}
        self._first = {use.unit: use for use in sorted(uses, key=lambda use: -use.entered)}
        self._landed: set[int] = set()
        self._walk = [*self._forward(uses), *self._backward(uses)]
        """(verb, unit) in order; HOLD is where the unit's gradients come."""

    def _forward(self, uses: Sequence[Use]) -> Iterator[tuple[Verb, int]]:
        numbered = [(use.entered, Verb.ACQUIRE, use.unit) for use in uses]
        numbered += [(use.left, Verb.RELEASE, use.unit) for use in uses]
        for _, verb, unit in sorted(numbered, key=lambda item: item[0]):
            yield verb, unit

    def _backward(self, uses: Sequence[Use]) -> Iterator[tuple[Verb, int]]:
        regions: dict[int, list[Use]] = {}
        for use in uses:
            if use.region is not None:
                regions.setdefault(use.region, []).append(use)
        open_uses: list[Use] = []
        recomputed: set[int] = set()
        for use in sorted(uses, key=lambda use: -use.left):
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
    """The uses still open, and those that forward entered after number `left`: their backward is done."""
    return [u for u in open_uses if u.entered <= left], [u for u in open_uses if u.entered > left]
