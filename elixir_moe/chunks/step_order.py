"""Which modules unshard as one, and the order in which a step asks for its chunks, before any step has run.

Owns `Part` and `Use`, what is known of a model and of one forward before it is packed; the choice of units; and
`StepOrder`, which turns both into what forward and backward ask of the rCache under any layout. Pure: `wrap` counts the
blocks a step needs with it, the search plays it, and the runtime hooks the units it chooses.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, Schedule, Verb, gradients_of
from elixir_moe.chunks.packing import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A module that can be called and has parameters, its own or beneath it."""

    params: tuple[int, ...]
    """Indices of its own parameters."""
    parent: int | None
    """The part right around it, which has a smaller number."""
    shared: bool = False
    """It is beneath several parts."""
    chooses: bool = False
    """Each rank may use others of its parameters: experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One run of a part in forward, or one function that reads parameters outside their parts.

    Every beginning and every end gets the next number.
    """

    entered: int
    left: int
    part: int | None
    """Which part runs; None for a read."""
    params: tuple[int, ...] = ()
    """Indices of the parameters that are read."""
    with_grad: bool = True
    """Autograd records it. What it does not record has a backward only if a checkpoint runs it again."""
    region: int | None = None
    """The activation-checkpoint region it is run again with in backward; None if its activations are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """A part that unshards as one, with the parameters it stands for."""

    part: int
    params: tuple[int, ...]
    whole: bool
    """With all that is beneath it."""
    chooses: bool = False
    """Which of its parameters get a gradient is not the same on all ranks."""


def choose_units(parts: Sequence[Part], chunk_of: Mapping[int, int]) -> list[UnitSpec | None]:
    """By part: the unit it belongs to; None where nothing is to be gathered for it alone.

    A unit is the largest part whose parameters lie in one chunk that moves: all of it would be gathered with
    any piece of it. A part of several such chunks is a unit for its own parameters, and what is beneath it is looked at
    in turn. A part that is beneath several others is never inside a unit.

    Args:
        parts: outermost first.
        chunk_of: by parameter, the chunk it is in if that is one of `moving_chunks`.
    """
    chunks: list[set[int]] = [{chunk_of[p] for p in part.params if p in chunk_of} for part in parts]
    params: list[list[int]] = [list(part.params) for part in parts]
    joins = [True] * len(parts)
    chooses = [part.chooses for part in parts]
    for number in reversed(range(len(parts))):
        parent = parts[number].parent
        if parent is not None:
            if len(chunks[parent]) < 2:
                chunks[parent] |= chunks[number]
            joins[parent] &= joins[number] and not parts[number].shared
            chooses[parent] |= chooses[number]
            params[parent] += params[number]
    units: list[UnitSpec | None] = []
    for number, part in enumerate(parts):
        around = None if part.parent is None else units[part.parent]
        if around is not None and around.whole:
            units.append(around)
        elif joins[number] and len(chunks[number]) < 2:
            mine = tuple(sorted(set(params[number])))
            units.append(UnitSpec(part=number, params=mine, whole=True, chooses=chooses[number]))
        elif part.params:
            units.append(UnitSpec(part=number, params=part.params, whole=False, chooses=part.chooses))
        else:
            units.append(None)
    return units


def moving_chunks(layout: Layout) -> dict[int, int]:
    """By parameter: the chunk it is in, where that comes and goes, or is overwritten by its gradient."""
    return {
        slot.param: chunk.index
        for chunk in layout.chunks
        if chunk.takes_turns or not chunk.resident
        for slot in chunk.slots
    }


def by_first_use(
    parts: Sequence[Part], uses: Sequence[Use], count: int
) -> tuple[list[int], tuple[Part, ...], tuple[Use, ...]]:
    """All `count` parameters in the order in which `uses` first use them, those of no use last; and parts and uses,
    whose parameters are then indices into that order."""
    in_order = sorted(uses, key=lambda use: use.entered)
    used = [p for use in in_order for p in (use.params if use.part is None else parts[use.part].params)]
    moved = {old: new for new, old in enumerate(dict.fromkeys([*used, *range(count)]))}

    def numbered(params: Iterable[int]) -> tuple[int, ...]:
        return tuple(moved[p] for p in params)

    return (
        list(moved),
        tuple(replace(part, params=numbered(part.params)) for part in parts),
        tuple(replace(use, params=numbered(use.params)) for use in uses),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One run of a unit, or one read outside of units."""

    entered: int
    left: int
    params: tuple[int, ...]
    is_read: bool
    with_grad: bool
    region: int | None
    chooses: bool = False

    @property
    def comes_back(self) -> bool:
        """Whether backward comes to it."""
        return not self.is_read or self.with_grad or self.region is not None


class StepOrder:
    """What a step asks of the rCache, to be read under many layouts.

    Backward visits runs in the reverse of the order forward left them. A unit holds its chunks until everything that
    forward entered after it is done, which is noticed at the next unit; a read holds its chunks for a moment. The
    gradients of a chunk have a block from the first that lands to the last of those that forward's uses bring, those of
    experts for as long as their unit is held, since ranks have gradients of others; a
    parameter gets its gradient at the first of its uses, in a reentrant checkpoint at the first one inside, and what is
    used last has its gradient first. A recomputed region is acquired run by run and held until its backward is done,
    which is why the rCache must hold the largest region (v2, A.3).
    """

    def __init__(self, parts: Sequence[Part], uses: Sequence[Use]) -> None:
        self._parts = parts
        self._uses = sorted(uses, key=lambda use: use.entered)

    def schedule(self, layout: Layout) -> Schedule:
        """What forward and backward ask of the rCache, as the runtime would record it."""
        runs = list(self._runs(choose_units(self._parts, moving_chunks(layout))))
        return Schedule(list(_Step(layout, runs).entries()))

    def counted(self, layout: Layout) -> Layout:
        """`layout` with the most gradients that have a block at once."""
        return replace(layout, open_gradients=self.schedule(layout).open_gradients())

    def widest(self, layout: Layout) -> tuple[int, int]:
        """The part whose unit needs the most blocks for itself, and how many."""
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        units = [unit for unit in choose_units(self._parts, moving_chunks(layout)) if unit is not None]
        return max(((u.part, len({chunk_of[p] for p in u.params if p in chunk_of})) for u in units), key=lambda u: u[1])

    def _runs(self, units: Sequence[UnitSpec | None]) -> Iterator[_Run]:
        """What runs as a unit, in order of entry, and what is read while its unit does not run."""
        unit_of = {p: unit.part for unit in units if unit is not None for p in unit.params}
        ends: dict[int, int] = {}
        for use in self._uses:
            params: Iterable[int]
            chooses = False
            unit = None if use.part is None else units[use.part]
            if use.part is not None and unit is None:
                continue
            if unit is not None and unit.part == use.part:
                ends[unit.part] = max(use.left, ends.get(unit.part, -1))
                params, chooses = unit.params, unit.chooses
            else:
                params = use.params if use.part is None else self._parts[use.part].params
                params = [p for p in params if use.left > ends.get(unit_of.get(p, -1), -1)]
            if params:
                is_read = use.part is None
                yield _Run(use.entered, use.left, tuple(params), is_read, use.with_grad, use.region, chooses)


class _Step:
    """The requests of one step under one layout."""

    def __init__(self, layout: Layout, runs: Sequence[_Run]) -> None:
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        self._runs = runs
        self._chunk_of = chunk_of
        self._chunks = {
            params: tuple(sorted({chunk_of[p] for p in params if p in chunk_of}))
            for params in dict.fromkeys(run.params for run in runs)
        }
        self._landing: dict[int, list[int]] = {}
        """By the number at which a run was entered: parameters that get a gradient there, in the order they do."""
        self._awaited: Counter[int] = Counter()
        """By parameter: how many gradients are to come."""
        self._params_of: dict[int, set[int]] = {}
        """By chunk: its parameters whose gradients are to come."""
        trainable = {slot.param for chunk in layout.chunks if chunk.key.trainable for slot in chunk.slots}
        chunk_with = {slot.param: chunk.index for chunk in layout.chunks for slot in chunk.slots}
        first_use: dict[int, int] = {}
        seen: set[tuple[int, int | None]] = set()
        for run in runs:
            scope = None if run.with_grad else run.region
            new = [p for p in run.params if (p, scope) not in seen and p in trainable] if run.comes_back else []
            seen.update((p, scope) for p in new)
            self._landing[run.entered] = new[::-1]
            self._awaited.update(new)
            for p in new:
                self._params_of.setdefault(chunk_with[p], set()).add(p)
                first_use.setdefault(chunk_with[p], run.entered)
        self._chunk_with = chunk_with
        self._to_send = sorted(first_use, key=lambda chunk: (first_use[chunk], chunk))
        """Chunks with gradients, the last one first."""
        choosing = {run.params for run in runs if run.chooses}
        self._ends_early = {params for params in self._chunks if trainable.issuperset(params)} - choosing
        """Parameters of a run, or a read, that nobody reads any more when all their gradients have come."""
        self._open: set[int] = set()
        self._held: list[_Run] = []
        self._rebuilt: list[int] = []
        """Chunks that are held for an operator which reads weights of them."""
        inner = [following.entered < run.left for run, following in pairwise(runs)]
        ends = zip(runs, [*inner, False], strict=False)
        self._leaf = {run.entered for run, has_inner in ends if not (has_inner or run.chooses)}
        """Runs, by their entry, in which nothing else asks for anything, and that have their gradients on all ranks."""

    def entries(self) -> Iterator[CacheRequest]:
        """All of them, in order."""
        numbered = [(run.entered, ACQUIRE, run) for run in self._runs] + [(r.left, RELEASE, r) for r in self._runs]
        for _, verb, run in sorted(numbered, key=lambda item: item[0]):
            yield from self._ask(verb, run)
        yield from self._backward()

    def _ask(self, verb: Verb, run: _Run) -> Iterator[CacheRequest]:
        if chunks := self._chunks[run.params]:
            yield CacheRequest(verb, chunks)

    def _backward(self) -> Iterator[CacheRequest]:
        regions: dict[int, list[_Run]] = {}
        for run in self._runs:
            if run.region is not None:
                regions.setdefault(run.region, []).append(run)
        times = Counter(run.params for run in self._runs)
        held = self._held
        for run in sorted((run for run in self._runs if run.comes_back), key=lambda run: -run.left):
            for other in [other for other in held if other.entered > run.left]:
                yield from self._land(other)
            again = [] if run.region is None else regions.pop(run.region, [])
            anew = bool(again) and times[again[0].params] == 1
            if anew or not run.is_read:
                yield from self._let_go([other for other in held if other.entered > run.left])
            if run.with_grad and not run.is_read:  # else its outputs are known when it has run again
                yield from self._hold([run])
                if anew:
                    yield from self._let_go([run])
            yield from self._hold(again)
            if not run.with_grad and not run.is_read:
                yield from self._hold([run])
            if run.region is None and run.is_read:
                yield from self._rebuild(run)
            single = len(self._landing[run.entered]) == 1 and not run.chooses
            if run.is_read or run.entered in self._leaf or single:
                yield from self._land(run)  # of a single one either the weight or the gradient is there
            else:  # they may come at any time until it is passed
                yield from self._open_for(self._landing[run.entered])
        for other in list(held):
            yield from self._land(other)
        yield from self._end_rebuild()
        yield from self._let_go(list(held))

    def _hold(self, runs: Iterable[_Run]) -> Iterator[CacheRequest]:
        for run in runs:
            yield from self._end_rebuild()
            yield from self._ask(ACQUIRE, run)
            self._held.append(run)

    def _let_go(self, runs: Iterable[_Run]) -> Iterator[CacheRequest]:
        for run in runs:
            self._held.remove(run)
            yield from self._end_rebuild()
            yield from self._ask(RELEASE, run)

    def _rebuild(self, run: _Run) -> Iterator[CacheRequest]:
        """Weights are rebuilt for the operator that has read them, unless they are there."""
        yield from self._end_rebuild()
        there = {chunk for other in self._held for chunk in self._chunks[other.params]}
        for chunk in self._chunks[run.params]:
            if chunk not in there:
                self._rebuilt.append(chunk)
                yield CacheRequest(ACQUIRE, (chunk,))

    def _end_rebuild(self) -> Iterator[CacheRequest]:
        for chunk in self._rebuilt:
            yield CacheRequest(RELEASE, (chunk,))
        self._rebuilt.clear()

    def _land(self, run: _Run) -> Iterator[CacheRequest]:
        """The gradients of a run come; weights that nobody reads any more leave, and chunks that are complete."""
        landing, self._landing[run.entered] = self._landing[run.entered], []
        if len(landing) > 2:  # that of a bias comes before that of its weight; of others the order is not known
            yield from self._open_for(landing)
        for p in landing:
            self._awaited[p] -= 1
            if not self._awaited[p]:
                yield from self._let_go([run for run in self._held if p in run.params and self._is_done(run)])
            yield from self._open_for([p])
            if not self._awaited[p]:
                self._params_of[self._chunk_with[p]].remove(p)
                yield from self._send()

    def _is_done(self, run: _Run) -> bool:
        return run.params in self._ends_early and not any(self._awaited[p] for p in run.params)

    def _open_for(self, landing: Iterable[int]) -> Iterator[CacheRequest]:
        """The gradients of these parameters come now, or from now on."""
        for p in landing:
            yield from self._end_rebuild()
            chunk = self._chunk_of.get(p)
            if chunk is not None and chunk not in self._open:
                self._open.add(chunk)
                yield CacheRequest(ACQUIRE, (gradients_of(chunk),))

    def _send(self) -> Iterator[CacheRequest]:
        """Chunks that await nothing more are sent off in order, the last used first."""
        while self._to_send and not self._params_of[self._to_send[-1]]:
            chunk = self._to_send.pop()
            if chunk in self._open:
                self._open.remove(chunk)
                yield CacheRequest(RELEASE, (gradients_of(chunk),))
