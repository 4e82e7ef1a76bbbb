"""Which modules unshard as one unit, and what a step will ask for, before any step has run.

Owns `Part` and `StepEvent`, the description of a model and of one step before packing; the choice of units; and
`StepOrder`, which plays the events of a step to the step machine and so has its requests under any layout. Pure: `wrap`
counts the blocks of a step with it and gives them to the rCache as its first schedule, the search simulates it, and the
runtime hooks the chosen units.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, Schedule, Verb, gradients_of
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.residence import CACHED, IN_PLACE
from elixir_moe.chunks.step_machine import Answer, ParamId, StepMachine, Unit


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
    saves_none: bool = False
    """Autograd saves none of its own parameters: backward reads them anew."""
    recomputed: bool = False
    """Backward runs all that is inside the part again at once, and so needs all of it at once. A traced backward shows
    it; else the module says so."""


class Happening(Enum):
    """The kind of an event of a step."""

    ENTER = auto()
    """Forward enters a part."""
    LEAVE = auto()
    READ = auto()
    """A function reads parameters outside the parts they belong to."""
    REACH = auto()
    """Backward comes to the outputs of a part."""
    AGAIN = auto()
    """Backward enters a part: its checkpointed region is recomputed."""
    LEAVE_AGAIN = auto()
    """The recomputation leaves a part."""
    READ_AGAIN = auto()
    """Like `READ`, in backward."""
    UNPACK = auto()
    """An operator in backward wants a parameter that it has saved."""
    EXPECT = auto()
    """The gradients of parameters may come from now on, in any order. Only an assumed backward has it."""
    ACCUMULATE = auto()
    """A gradient is complete."""


ENTER, LEAVE, READ, REACH, AGAIN, LEAVE_AGAIN, READ_AGAIN, UNPACK, EXPECT, ACCUMULATE = Happening
_AGAIN = {ENTER: AGAIN, LEAVE: LEAVE_AGAIN, READ: READ_AGAIN}
"""What the events of forward are where backward runs it again."""
_IN_FORWARD = _AGAIN.keys()


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One event of a step, in order of time."""

    kind: Happening
    part: int = -1
    """The part that is entered, left or reached."""
    params: tuple[int, ...] = ()
    """Indices of the parameters that are read, unpacked or complete."""
    with_grad: bool = True
    """Autograd records what begins or ends."""
    run: int = 0
    """Of `REACH`: how many runs of the part forward had left before; -1 for a run that backward has recomputed."""
    same: bool = False
    """Of `UNPACK`: the operator is that of the event of this kind before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """A part that unshards as one, and the parameters it unshards."""

    part: int
    params: tuple[int, ...]
    whole: bool
    """The unit includes all modules inside the part."""
    chooses: bool = False
    """Ranks may have gradients for different parameters of the unit."""
    saves_none: bool = False
    """Autograd saves none of its parameters."""


def choose_units(
    parts: Sequence[Part], chunk_of: Mapping[int, int], *, whole_layers: bool = True
) -> list[UnitSpec | None]:
    """The unit of each part; None if nothing is gathered for the part alone.

    A unit is the largest part whose parameters lie in a single moving chunk: any piece of it would gather all of it. A
    part with several such chunks is a unit for its own parameters only, and the parts inside it are considered in turn.
    With whole layers, a part without tiles that backward recomputes is a unit in any case: its chunks are held together
    then. A part inside several others is never part of a larger unit.

    Args:
        parts: all parts, outermost first.
        chunk_of: {parameter: chunk}, as from `moving_chunks`.
        whole_layers: as in the plan.
    """
    chunks: list[set[int]] = [{chunk_of[p] for p in part.params if p in chunk_of} for part in parts]
    params: list[list[int]] = [list(part.params) for part in parts]
    joins = [True] * len(parts)
    chooses = [part.chooses for part in parts]
    saves_none = [part.saves_none or not part.params for part in parts]
    in_turn = _with_tiles(parts)
    for number in reversed(range(len(parts))):
        parent = parts[number].parent
        if parent is not None:
            if len(chunks[parent]) < 2:
                chunks[parent] |= chunks[number]
            joins[parent] &= joins[number] and not parts[number].shared
            chooses[parent] |= chooses[number]
            saves_none[parent] &= saves_none[number]
            params[parent] += params[number]
    units: list[UnitSpec | None] = []
    for number, part in enumerate(parts):
        around = None if part.parent is None else units[part.parent]
        if around is not None and around.whole:
            units.append(around)
        elif joins[number] and (len(chunks[number]) < 2 or (whole_layers and part.recomputed and not in_turn[number])):
            mine = tuple(sorted(set(params[number])))
            traits = {"chooses": chooses[number], "saves_none": saves_none[number]}
            units.append(UnitSpec(part=number, params=mine, whole=True, **traits))
        elif part.params:
            traits = {"chooses": part.chooses, "saves_none": part.saves_none}
            units.append(UnitSpec(part=number, params=part.params, whole=False, **traits))
        else:
            units.append(None)
    return units


def _with_tiles(parts: Sequence[Part]) -> list[bool]:
    """Whether each part has tiles inside, which are gathered one after the other also where they run again."""
    found = [part.saves_none and bool(part.params) for part in parts]
    for number in reversed(range(len(parts))):
        if (parent := parts[number].parent) is not None:
            found[parent] |= found[number]
    return found


def regions_of(parts: Sequence[Part]) -> dict[int, int]:
    """{parameter: the outermost part around it that is a unit in any chunks, since backward recomputes it at once}."""
    tiles = _with_tiles(parts)
    region: list[int | None] = []
    found: dict[int, int] = {}
    for number, part in enumerate(parts):
        around = None if part.parent is None else region[part.parent]
        region.append(number if around is None and part.recomputed and not tiles[number] else around)
        if (mine := region[number]) is not None:
            found.update(dict.fromkeys(part.params, mine))
    return found


def moving_chunks(layout: Layout) -> dict[int, int]:
    """{parameter: chunk} for the chunks that use the rCache or are overwritten by their gradients."""
    return {
        slot.param: chunk.index
        for chunk in layout.chunks
        if chunk.residence in (CACHED, IN_PLACE)
        for slot in chunk.slots
    }


def chosen_units(parts: Sequence[Part], layout: Layout) -> list[UnitSpec | None]:
    """The unit of each part of a packed model; see `choose_units`."""
    return choose_units(parts, moving_chunks(layout), whole_layers=layout.whole_layers)


def units_moved(parts: Sequence[Part], layout: Layout) -> int:
    """The number of units that gather anything."""
    moving = moving_chunks(layout)
    units = dict.fromkeys(unit for unit in chosen_units(parts, layout) if unit is not None)
    return sum(any(p in moving for p in unit.params) for unit in units)


def units_of(chosen: Sequence[UnitSpec | None], layout: Layout, label: Callable[[int], str]) -> dict[int, Unit]:
    """{part: its unit} for the parts that unshard as one; `label` names a part in messages."""
    slot_of = {slot.param: (chunk.index, i) for chunk in layout.chunks for i, slot in enumerate(chunk.slots)}
    specs = dict.fromkeys(spec for spec in chosen if spec is not None)
    return {
        s.part: Unit(label(s.part), tuple(slot_of[p] for p in s.params), s.chooses, saves_none=s.saves_none)
        for s in specs
    }


def by_first_use(
    parts: Sequence[Part], events: Sequence[StepEvent], count: int
) -> tuple[list[int], tuple[Part, ...], tuple[StepEvent, ...]]:
    """(order, parts, events): all `count` parameters in order of first use in forward, unused ones last; and parts and
    events with their parameters renumbered to positions in that order. If the events have a backward, it says which
    parts are recomputed."""
    entered = [event for event in events if event.kind in (ENTER, READ)]
    used = [p for event in entered for p in (event.params if event.kind is READ else parts[event.part].params)]
    moved = {old: new for new, old in enumerate(dict.fromkeys([*used, *range(count)]))}
    again = _recomputed(parts, events) if _has_backward(events) else {n for n, p in enumerate(parts) if p.recomputed}
    return (
        list(moved),
        tuple(
            replace(part, params=tuple(moved[i] for i in part.params), recomputed=number in again)
            for number, part in enumerate(parts)
        ),
        renumbered(events, moved),
    )


def _has_backward(events: Iterable[StepEvent]) -> bool:
    return not all(event.kind in _IN_FORWARD for event in events)


def _recomputed(parts: Sequence[Part], events: Iterable[StepEvent]) -> set[int]:
    """The parts that lie in one recomputed region, with all that is inside them.

    A region begins inside the hooks of a part or around them: in the former case, only the parts inside run again.
    """
    inside: dict[int, set[int]] = {}
    for number, part in enumerate(parts):
        if part.parent is not None:
            inside.setdefault(part.parent, set()).add(number)
    found, region = set[int](), set[int]()
    for event in events:
        if event.kind is AGAIN:
            region.add(event.part)
        elif region and event.kind not in (LEAVE_AGAIN, READ_AGAIN):
            around = {parts[number].parent for number in region}
            while around:
                outer = around.pop()
                if outer is not None and outer not in region and inside[outer] <= region:
                    region.add(outer)
                    around.add(parts[outer].parent)
            found |= region
            region = set()
    return found


def renumbered(events: Iterable[StepEvent], moved: Mapping[int, int] | Sequence[int]) -> tuple[StepEvent, ...]:
    """The events with each parameter's index `i` replaced by ``moved[i]``."""
    return tuple(
        replace(event, params=tuple(moved[p] for p in event.params)) if event.params else event for event in events
    )


class StepOrder:
    """The requests of a step to the rCache, for any layout."""

    def __init__(self, parts: Sequence[Part], events: Sequence[StepEvent], trainable: Mapping[int, int]) -> None:
        """`events` may lack a backward, which is then assumed. `trainable`: {trainable parameter: its elements}."""
        self._parts = parts
        self.observed = _has_backward(events)
        """The backward was traced; else it is assumed from the order of forward."""
        self._events = events if self.observed else (*events, *_assumed_backward(parts, events, trainable))

    def schedule(self, layout: Layout) -> Schedule:
        """The requests of forward and backward to the rCache, as the runtime will record them."""
        requests = _Requests(layout)
        _Replay(self._parts, layout, requests).play(self._events)
        return Schedule(requests.entries, kept={chunk.index for chunk in layout.chunks if not chunk.key.trainable})

    def counted(self, layout: Layout) -> Layout:
        """A copy of `layout` with `open_gradients` counted."""
        return replace(layout, open_gradients=self.schedule(layout).open_gradients())

    def widest(self, layout: Layout) -> tuple[int, int]:
        """(part, blocks) of the unit that needs the most blocks for its own parameters."""
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        units = dict.fromkeys(unit for unit in chosen_units(self._parts, layout) if unit is not None)
        return max(((u.part, len({chunk_of[p] for p in u.params if p in chunk_of})) for u in units), key=lambda u: u[1])


class _Requests:
    """The `Carrier` that only notes the requests to the rCache, on a rank whose peers run the same."""

    def __init__(self, layout: Layout) -> None:
        self.entries: list[CacheRequest] = []
        self.held: Counter[Unit] = Counter()
        self._cached = {chunk.index for chunk in layout.cached}
        self._cached_of: dict[Unit, tuple[int, ...]] = {}
        self._chunks: Counter[int] = Counter()
        self._open: dict[int, None] = {}
        """Chunks whose gradients have a block."""
        self._made: dict[tuple[Verb, tuple[int, ...]], CacheRequest] = {}

    def _ask(self, verb: Verb, chunks: tuple[int, ...]) -> None:
        request = self._made.get((verb, chunks))
        if request is None:
            request = self._made[verb, chunks] = CacheRequest(verb, chunks)
        self.entries.append(request)

    def _moving(self, unit: Unit) -> tuple[int, ...]:
        chunks = self._cached_of.get(unit)
        if chunks is None:
            chunks = self._cached_of[unit] = tuple(chunk for chunk in unit.chunks if chunk in self._cached)
        return chunks

    def hold(self, unit: Unit) -> None:
        self.held[unit] += 1
        if chunks := self._moving(unit):
            self._ask(ACQUIRE, chunks)
            for chunk in chunks:
                self._chunks[chunk] += 1

    def let_go(self, unit: Unit) -> None:
        self.held[unit] -= 1
        if chunks := self._moving(unit):
            self._ask(RELEASE, chunks)
            for chunk in chunks:
                self._chunks[chunk] -= 1

    def hold_chunk(self, chunk: int) -> bool:
        if chunk not in self._cached or self._chunks[chunk]:
            return False
        self._ask(ACQUIRE, (chunk,))
        self._chunks[chunk] += 1
        return True

    def let_go_chunk(self, chunk: int) -> None:
        self._ask(RELEASE, (chunk,))
        self._chunks[chunk] -= 1

    def take(self, slot: ParamId) -> None:
        self.reserve(slot[0])

    def reserve(self, chunk: int) -> None:
        if chunk in self._cached and chunk not in self._open:
            self._open[chunk] = None
            self._ask(ACQUIRE, (gradients_of(chunk),))

    def agree(self, used: Sequence[int], awaited: Sequence[ParamId]) -> Callable[[], Answer]:
        return lambda: Answer(list(used))

    def reduce(self, chunk: int) -> None:
        self.reserve(chunk)
        if chunk in self._open:
            del self._open[chunk]
            self._ask(RELEASE, (gradients_of(chunk),))

    def finish(self) -> None:
        for chunk in sorted(self._open, reverse=True):
            self.reduce(chunk)

    def forget_round(self) -> None:
        self.entries.clear()


class _Replay:
    """The events of a step, played to a step machine as `runtime.hooks` would tell them under one layout."""

    def __init__(self, parts: Sequence[Part], layout: Layout, requests: _Requests) -> None:
        self._parts = parts
        self._units = units_of(chosen_units(parts, layout), layout, str)
        self._slot_of = {slot.param: (chunk.index, i) for chunk in layout.chunks for i, slot in enumerate(chunk.slots)}
        self._trainable = {chunk.index for chunk in layout.chunks if chunk.key.trainable}
        self._requests = requests
        self._machine = StepMachine(self._units.values(), self._trainable, requests)
        self._calls: list[tuple[int, int | None]] = []
        """(part, position of entry) of the running calls; None for one without gradients."""
        self._runs: dict[int, list[tuple[int, int]]] = {}
        """By part: the positions of entry and exit of its runs."""
        self._operator = 0

    def play(self, events: Iterable[StepEvent]) -> None:
        """Plays a forward and a backward."""
        tell = {
            ENTER: self._enter,
            LEAVE: self._leave,
            READ: self._read,
            REACH: self._reach,
            AGAIN: self._again,
            LEAVE_AGAIN: self._leave_again,
            READ_AGAIN: self._read_again,
            UNPACK: self._unpack,
            EXPECT: self._expect,
            ACCUMULATE: self._accumulate,
        }
        for event in events:
            if event.kind not in _IN_FORWARD and self._machine.backward is None:
                self._machine.begin()
            tell[event.kind](event)
        if self._machine.backward is not None:
            self._machine.end()

    def _enter(self, event: StepEvent) -> None:
        unit = self._units.get(event.part)
        if unit is None and event.part:  # the first part is the model, which has hooks in any case
            self._read(replace(event, params=self._parts[event.part].params))  # if it runs outside of its unit
            return
        if not self._calls:
            self._machine.begin_call()
        training = event.with_grad or any(entered is not None for _, entered in self._calls[-1:])
        entered = None if not training else 0 if unit is None else self._machine.enter(unit)
        self._calls.append((event.part, entered))

    def _leave(self, event: StepEvent) -> None:
        if not self._calls or self._calls[-1][0] != event.part:
            return
        _, entered = self._calls.pop()
        unit = self._units.get(event.part)
        if unit is not None and entered is not None:
            left = self._machine.leave(unit, with_grad=event.with_grad)
            self._runs.setdefault(event.part, []).append((entered, left))

    def _reader(self, event: StepEvent) -> Unit | None:
        """The reader of the parameters that no unit holds."""
        held, owners_of = self._requests.held, self._machine.owners_of
        slots = (self._slot_of[p] for p in event.params)
        free = tuple(slot for slot in slots if not any(held[unit] for unit in owners_of(slot)))
        return self._machine.reader(free, lambda: "a read") if free else None

    def _read(self, event: StepEvent) -> None:
        training = event.with_grad or any(entered is not None for _, entered in self._calls[-1:])
        if training and (reader := self._reader(event)) is not None:
            self._machine.read(reader, inside=bool(self._calls))
            self._requests.let_go(reader)

    def _reach(self, event: StepEvent) -> None:
        unit = self._units.get(event.part)
        if unit is not None:
            runs = self._runs.get(event.part, [])
            self._machine.reach(unit, *(self._machine.positions(unit) if event.run < 0 else runs[event.run]))

    def _again(self, event: StepEvent) -> None:
        unit = self._units.get(event.part)
        if unit is None:
            self._read_again(replace(event, params=self._parts[event.part].params))
        else:
            self._machine.recompute(unit, with_grad=event.with_grad)

    def _leave_again(self, event: StepEvent) -> None:
        unit = self._units.get(event.part)
        if unit is not None and unit.saves_none:
            self._machine.leave_again(unit)

    def _read_again(self, event: StepEvent) -> None:
        reader = self._reader(event)
        if reader is None:
            return
        if event.with_grad:
            self._machine.recompute(reader, with_grad=True)
        else:
            self._machine.read(reader, inside=False)
            self._requests.let_go(reader)

    def _unpack(self, event: StepEvent) -> None:
        self._operator += not event.same
        for p in event.params:
            self._machine.unpack(self._slot_of[p][0], lambda: self._operator)

    def _expect(self, event: StepEvent) -> None:
        for p in event.params:
            self._machine.end_operator()
            self._requests.reserve(self._slot_of[p][0])

    def _accumulate(self, event: StepEvent) -> None:
        for p in event.params:
            slot = self._slot_of[p]
            if slot[0] in self._trainable:
                self._machine.accumulate(slot)


@dataclass(slots=True)
class _Run:
    """One run of a part, or one read outside of parts, in a forward."""

    entered: int
    """Position of its event."""
    part: int
    params: tuple[int, ...]
    completes: tuple[int, ...]
    """The parameters that get their gradient when backward comes to the run, in that order."""
    left: int
    run: int = 0
    """As `StepEvent.run`."""


def _assumed_backward(
    parts: Sequence[Part], events: Sequence[StepEvent], trainable: Mapping[int, int]
) -> Iterator[StepEvent]:
    """The backward that the order of forward lets expect.

    Backward visits runs in the reverse of the order in which forward left them. A parameter gets its gradient when
    backward comes to its first use; the parameter used last gets its gradient first. The gradients of a part that runs
    others may come at any time until backward has passed these, and so do those of a norm or a part of more than two
    parameters. A bias has its gradient before the larger weight of its product. When backward comes to a part that is
    recomputed, all that is inside it first runs again.
    """
    around: list[_Run] = []
    region = len(events)
    """Where the recomputed region begins that backward came to last."""
    for run in sorted(_runs(parts, events, trainable), key=lambda run: -run.left):
        while around and around[-1].entered > run.left:
            yield from _accumulated(around.pop().completes)
        again = region < run.entered
        if run.part < 0:
            if not again:  # a recomputation holds what it reads
                yield from (StepEvent(UNPACK, params=(p,), same=i > 0) for i, p in enumerate(run.params))
            yield from _accumulated(run.completes)
            continue
        yield StepEvent(REACH, run.part, run=-1 if again else run.run)
        if parts[run.part].recomputed and not again:
            region = run.entered
            yield from (replace(event, kind=_AGAIN[event.kind]) for event in events[run.entered + 1 : run.left])
        sizes = [trainable[p] for p in run.completes]
        runs_others, in_turn = run.left > run.entered + 1, len(sizes) == 2 and sizes[0] < sizes[1]
        if len(sizes) > 1 and (runs_others or not in_turn):
            yield StepEvent(EXPECT, params=run.completes)
        if len(sizes) > 1 and runs_others:
            around.append(run)
        else:
            yield from _accumulated(run.completes)
    while around:
        yield from _accumulated(around.pop().completes)


def _accumulated(params: Iterable[int]) -> Iterator[StepEvent]:
    yield from (StepEvent(ACCUMULATE, params=(p,)) for p in params)


def _runs(parts: Sequence[Part], events: Sequence[StepEvent], trainable: Mapping[int, int]) -> list[_Run]:
    """The runs and recorded reads of a forward, in order of entry."""
    runs: list[_Run] = []
    running: list[_Run] = []
    times: Counter[int] = Counter()
    seen: set[int] = set()
    for position, event in enumerate(events):
        if event.kind is LEAVE:
            ended = running.pop()
            ended.left, ended.run = position, times[ended.part]
            times[ended.part] += 1
            continue
        if event.kind is READ and not event.with_grad:
            continue
        params = event.params if event.kind is READ else parts[event.part].params
        new = [p for p in params if p in trainable and p not in seen]
        seen.update(new)
        runs.append(_Run(position, event.part, params, tuple(reversed(new)), left=position))
        if event.kind is ENTER:
            running.append(runs[-1])
    return runs
