"""The order in which one step asks for its chunks, before any step has run.

Owns `Use`, one run of a unit or one read outside of units in forward, and `Walk`, which turns the uses of a step into
what forward and backward ask of the rCache under any layout. Pure: `wrap` counts with it the blocks a step needs, the
search plays it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elixir_moe.chunks.layout import Layout
from elixir_moe.chunks.policy import Entry, Schedule, Verb


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One use of parameters in forward. Every beginning and every end of one gets the next number."""

    entered: int
    left: int
    params: tuple[int, ...]
    """Indices of the parameters that are used together: those of a unit, a module that unshards as one."""
    is_read: bool = False
    """A function reads the parameters outside their modules: they are gathered while the function runs, and in backward
    only for the moment in which they are rebuilt."""
    with_grad: bool = True
    """Autograd records it. What it does not record has a backward only if a checkpoint runs it again."""
    region: int | None = None
    """The activation-checkpoint region it is run again with in backward; None if its activations are kept."""


def by_first_use(uses: Sequence[Use], params: Iterable[int]) -> tuple[list[int], list[Use]]:
    """All `params` in the order in which `uses` first use them, those of no use last; and the uses, whose parameters
    are then indices into that order."""
    used = [p for use in sorted(uses, key=lambda use: use.entered) for p in use.params]
    moved = {old: new for new, old in enumerate(dict.fromkeys([*used, *params]))}
    return list(moved), [replace(use, params=tuple(moved[p] for p in use.params)) for use in uses]


_Request = tuple[Verb, tuple[int, ...]]
"""A verb and the parameters it is for."""


class Walk:
    """What a step asks for, use by use, to be read as what it asks of the rCache under many layouts.

    Backward visits uses in the reverse of the order forward left them. A unit holds its chunks until everything that
    forward entered after it is done, which is noticed at the next unit; a read holds its chunks for a moment. A
    parameter gets its gradient at the first of its uses, in a reentrant checkpoint at the first one inside, and a chunk
    is freed when the last of its parameters that forward used has its gradient. A recomputed region is acquired use by
    use and held until its backward is done, which is why the rCache must hold the largest region (v2, A.3).
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self._uses = [use for use in uses if not use.is_read or use.with_grad or use.region is not None]
        """Those that backward comes to."""
        self._landing: dict[int, tuple[int, ...]] = {}
        """By the number at which a use was entered: parameters that get their gradient there."""
        scopes: set[tuple[int, int | None]] = set()
        for use in sorted(self._uses, key=lambda use: use.entered):
            scope = None if use.with_grad else use.region
            self._landing[use.entered] = tuple(p for p in use.params if (p, scope) not in scopes)
            scopes.update((p, scope) for p in use.params)
        self._requests = [*self._forward(uses), *self._backward()]
        """In order; HOLD is where gradients come."""

    def _forward(self, uses: Sequence[Use]) -> Iterator[_Request]:
        numbered = [(use.entered, Verb.ACQUIRE, use.params) for use in uses]
        numbered += [(use.left, Verb.RELEASE, use.params) for use in uses]
        for _, verb, params in sorted(numbered, key=lambda item: item[0]):
            yield verb, params

    def _backward(self) -> Iterator[_Request]:
        regions: dict[int, list[Use]] = {}
        for use in sorted(self._uses, key=lambda use: use.entered):
            if use.region is not None:
                regions.setdefault(use.region, []).append(use)
        open_uses: list[Use] = []
        recomputed: set[int] = set()
        for use in sorted(self._uses, key=lambda use: -use.left):
            passed = [done for done in open_uses if done.entered > use.left]
            for done in passed:
                yield from self._gradients(done)
            if not use.is_read:
                for done in passed:
                    open_uses.remove(done)
                    yield Verb.RELEASE, done.params
            if use.region is not None and use.region not in recomputed:
                recomputed.add(use.region)
                for again in regions[use.region]:
                    yield Verb.ACQUIRE, again.params
                    open_uses.append(again)
            if not use.is_read:
                yield Verb.ACQUIRE, use.params
                open_uses.append(use)
                if use.left == use.entered + 1:  # nothing runs inside it: its gradients come at once
                    yield from self._gradients(use)
            elif use.region is not None:  # gathered since it was run again
                yield from self._gradients(use)
            else:
                for param in use.params:
                    yield Verb.ACQUIRE, (param,)
                    yield from self._gradients(use, param)
                    yield Verb.RELEASE, (param,)
        for done in open_uses:
            yield from self._gradients(done)
        for done in open_uses:
            yield Verb.RELEASE, done.params

    def _gradients(self, use: Use, param: int | None = None) -> Iterator[_Request]:
        landing = self._landing[use.entered]
        now = landing if param is None else tuple(p for p in landing if p == param)
        self._landing[use.entered] = tuple(p for p in landing if p not in now)
        if now:
            yield Verb.HOLD, now

    def schedule(self, layout: Layout) -> Schedule:
        """What forward and backward ask of the rCache, as the runtime would record it."""
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        awaited: dict[int, set[int]] = {chunk.index: set() for chunk in layout.cached if chunk.key.trainable}
        acquire: dict[tuple[int, ...], Entry] = {}
        for params in dict.fromkeys(params for _, params in self._requests):
            acquire[params] = Entry(Verb.ACQUIRE, tuple(sorted({chunk_of[p] for p in params if p in chunk_of})))
        for param in {p for use in self._uses for p in use.params}:
            if param in chunk_of and chunk_of[param] in awaited:
                awaited[chunk_of[param]].add(param)
        release = {params: Entry(Verb.RELEASE, entry.chunks) for params, entry in acquire.items()}
        held: set[int] = set()
        gone: set[int] = set()
        entries: list[Entry] = []
        for verb, params in self._requests:
            if verb is Verb.HOLD:
                for param in params:
                    chunk = chunk_of.get(param, -1)
                    if param not in awaited.get(chunk, ()):
                        continue
                    if chunk not in held:
                        held.add(chunk)
                        entries.append(Entry(Verb.HOLD, (chunk,)))
                    awaited[chunk].discard(param)
                    if not awaited[chunk]:
                        entries.append(Entry(Verb.FREE, (chunk,)))
                        gone.add(chunk)
                continue
            entry = (acquire if verb is Verb.ACQUIRE else release)[params]
            if verb is Verb.ACQUIRE:
                gone.difference_update(entry.chunks)
            elif not gone.isdisjoint(entry.chunks):  # what is freed is released
                entry = Entry(verb, tuple(chunk for chunk in entry.chunks if chunk not in gone))
            if entry.chunks:
                entries.append(entry)
        return Schedule(entries)
