"""Which modules unshard as one unit, and the order in which a step asks for its chunks, before any step has run.

Owns `Part` and `Use`, the description of a model and of one forward before packing; the choice of units; and
`StepOrder`, which turns parts and uses into the requests of forward and backward to the rCache under any layout. Pure:
`wrap` counts the blocks of a step with it, the search simulates it, and the runtime hooks the chosen units.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, Schedule, Verb, gradients_of
from elixir_moe.chunks.packing import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A callable module with parameters, its own or those of modules inside it."""

    params: tuple[int, ...]
    """Indices of its own parameters."""
    parent: int | None
    """Number of the innermost part around it, smaller than its own; None for an outermost part."""
    shared: bool = False
    """The part is inside several others."""
    chooses: bool = False
    """Ranks may use different parameters of the part: experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One run of a part in forward, or one function that reads parameters outside their parts.

    `entered` and `left` number all beginnings and ends in order of time.
    """

    entered: int
    left: int
    part: int | None
    """The part that runs; None for a read."""
    params: tuple[int, ...] = ()
    """Indices of the parameters of a read."""
    with_grad: bool = True
    """Autograd records the use. An unrecorded use has a backward only if a checkpoint recomputes it."""
    region: int | None = None
    """The activation-checkpoint region that recomputes the use in backward; None if its activations are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """A part that unshards as one, and the parameters it unshards."""

    part: int
    params: tuple[int, ...]
    whole: bool
    """The unit includes all modules inside the part."""
    chooses: bool = False
    """Ranks may have gradients for different parameters of the unit."""


def choose_units(parts: Sequence[Part], chunk_of: Mapping[int, int]) -> list[UnitSpec | None]:
    """The unit of each part; None if nothing is gathered for the part alone.

    A unit is the largest part whose parameters lie in a single moving chunk: any piece of it would gather all of it. A
    part with several such chunks is a unit for its own parameters only, and the parts inside it are considered in turn.
    A part inside several others is never part of a larger unit.

    Args:
        parts: all parts, outermost first.
        chunk_of: {parameter: chunk}, as from `moving_chunks`.
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
    """{parameter: chunk} for the chunks that use the rCache or are overwritten by their gradients."""
    return {
        slot.param: chunk.index
        for chunk in layout.chunks
        if chunk.takes_turns or not chunk.resident
        for slot in chunk.slots
    }


def by_first_use(
    parts: Sequence[Part], uses: Sequence[Use], count: int
) -> tuple[list[int], tuple[Part, ...], tuple[Use, ...]]:
    """(order, parts, uses): all `count` parameters in order of first use, unused ones last; and parts and uses with
    their parameters renumbered to positions in that order."""
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
        """Whether backward reaches the run."""
        return not self.is_read or self.with_grad or self.region is not None


class StepOrder:
    """The requests of a step to the rCache, for any layout.

    - Backward visits runs in the reverse of the order in which forward left them.
    - A unit holds its chunks until everything that forward entered after it is done, noticed at the next unit. A read
      holds its chunks for a moment.
    - The gradients of a chunk have a block from the first to the last gradient that lands. Gradients of experts have
      one for as long as their unit is held, because ranks have gradients of different experts.
    - A parameter gets its gradient when backward reaches its first use, within a reentrant checkpoint the first use
      inside. The parameter used last gets its gradient first.
    - A recomputed region is acquired run by run and held until its backward is done, so the rCache must hold the
      largest region (v2, A.3).
    """

    def __init__(self, parts: Sequence[Part], uses: Sequence[Use]) -> None:
        self._parts = parts
        self._uses = sorted(uses, key=lambda use: use.entered)

    def schedule(self, layout: Layout) -> Schedule:
        """The requests of forward and backward to the rCache, as the runtime would record them."""
        runs = list(self._runs(choose_units(self._parts, moving_chunks(layout))))
        return Schedule(list(_Step(layout, runs).entries()))

    def counted(self, layout: Layout) -> Layout:
        """A copy of `layout` with `open_gradients` counted."""
        return replace(layout, open_gradients=self.schedule(layout).open_gradients())

    def widest(self, layout: Layout) -> tuple[int, int]:
        """(part, blocks) of the unit that needs the most blocks for its own parameters."""
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        units = [unit for unit in choose_units(self._parts, moving_chunks(layout)) if unit is not None]
        return max(((u.part, len({chunk_of[p] for p in u.params if p in chunk_of})) for u in units), key=lambda u: u[1])

    def _runs(self, units: Sequence[UnitSpec | None]) -> Iterator[_Run]:
        """Runs of units, and reads outside a run of their unit, in order of entry."""
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
        """By `entered` of a run: the parameters that get a gradient in its backward, in that order."""
        self._awaited: Counter[int] = Counter()
        """By parameter: number of gradients still to come."""
        self._params_of: dict[int, set[int]] = {}
        """By chunk: its parameters with gradients still to come."""
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
        self._numel = {slot.param: slot.numel for chunk in layout.chunks for slot in chunk.slots}
        self._to_send = sorted(first_use, key=lambda chunk: (first_use[chunk], chunk))
        """Chunks with gradients in order of first use; `_send` takes them from the end."""
        choosing = {run.params for run in runs if run.chooses}
        self._ends_early = {params for params in self._chunks if trainable.issuperset(params)} - choosing
        """Parameters of runs and reads that nothing reads any more once all their gradients have come."""
        self._open: set[int] = set()
        self._held: list[_Run] = []
        self._rebuilt: list[int] = []
        """Chunks held for the operator that reads their weights."""
        inner = [following.entered < run.left for run, following in pairwise(runs)]
        ends = zip(runs, [*inner, False], strict=False)
        self._leaf = {run.entered for run, has_inner in ends if not (has_inner or run.chooses)}
        """`entered` of runs that contain no other run and have their gradients on all ranks."""

    def entries(self) -> Iterator[CacheRequest]:
        """All requests, in order."""
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
            if run.with_grad and not run.is_read:  # otherwise its outputs exist only once it is recomputed
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
                yield from self._land(run)  # a single parameter needs either its weight or its gradient, never both
            else:  # the gradients may come at any time until backward has passed the run
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
        """Acquires the weights for the backward of the operator that read them, unless they are held."""
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
        """Lands the gradients of a run; releases weights that nothing reads any more, and complete gradient chunks."""
        landing, self._landing[run.entered] = self._landing[run.entered], []
        if not self._in_known_order(landing):
            yield from self._open_for(landing)
        for p in landing:
            self._awaited[p] -= 1
            if not self._awaited[p]:
                yield from self._let_go([run for run in self._held if p in run.params and self._is_done(run)])
            yield from self._open_for([p])
            if not self._awaited[p]:
                self._params_of[self._chunk_with[p]].remove(p)
                yield from self._send()

    def _in_known_order(self, landing: Sequence[int]) -> bool:
        """Whether gradients come in that order: one alone, or a bias before the larger weight of its product.

        A norm has a weight and a bias of one length, whose gradients come together.
        """
        return len(landing) < 2 or (len(landing) == 2 and self._numel[landing[0]] < self._numel[landing[1]])

    def _is_done(self, run: _Run) -> bool:
        return run.params in self._ends_early and not any(self._awaited[p] for p in run.params)

    def _open_for(self, landing: Iterable[int]) -> Iterator[CacheRequest]:
        """Gives the gradients of these parameters' chunks a block, if they have none."""
        for p in landing:
            yield from self._end_rebuild()
            chunk = self._chunk_of.get(p)
            if chunk is not None and chunk not in self._open:
                self._open.add(chunk)
                yield CacheRequest(ACQUIRE, (gradients_of(chunk),))

    def _send(self) -> Iterator[CacheRequest]:
        """Releases the gradients of complete chunks in order, the last used first."""
        while self._to_send and not self._params_of[self._to_send[-1]]:
            chunk = self._to_send.pop()
            if chunk in self._open:
                self._open.remove(chunk)
                yield CacheRequest(RELEASE, (gradients_of(chunk),))
