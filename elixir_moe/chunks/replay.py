"""The requests of a step to the rCache, before any step has run.

Owns `StepOrder`, which plays the events of a step to the step machine and so has its requests under any layout. Pure:
`wrap` counts the blocks of a step with it and gives them to the rCache as its first schedule, and the search simulates
it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, Schedule, Verb, gradients_of
from elixir_moe.chunks.calls import CallStack
from elixir_moe.chunks.events import (
    ACCUMULATE,
    ENTER,
    EXPECT,
    LEAVE,
    REACH,
    READ,
    UNPACK,
    ModuleInfo,
    StepEvent,
    has_backward,
)
from elixir_moe.chunks.legs import Legs
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.step_machine import Answer, ParamId, StepMachine, Unit
from elixir_moe.chunks.units import chosen_units, units_of


class StepOrder:
    """The requests of a step to the rCache, for any layout."""

    def __init__(
        self, modules: Sequence[ModuleInfo], events: Sequence[StepEvent], trainable: Mapping[int, int]
    ) -> None:
        """`events` may lack a backward, which is then assumed. `trainable`: {trainable parameter: its elements}."""
        self._modules = modules
        self.observed = has_backward(events)
        """The backward was traced; else it is assumed from the order of forward."""
        self._events = events if self.observed else (*events, *_assumed_backward(modules, events, trainable))

    @cached_property
    def _legs(self) -> Legs:
        return Legs(self._modules, self._events)

    def schedule(self, layout: Layout, micro_batches: int = 1) -> Schedule:
        """The requests of forward and backward to the rCache, as the runtime will record them.

        `micro_batches`: how many pass each layer together.
        """
        return self.timed(layout, micro_batches)[0]

    def timed(self, layout: Layout, micro_batches: int = 1) -> tuple[Schedule, list[int]]:
        """The schedule, and for each of its entries the position of the event that asks for it."""
        requests = _Requests(layout)
        _Replay(self._modules, layout, requests).play(self._legs, micro_batches)
        kept = {chunk.index for chunk in layout.chunks if not chunk.key.trainable}
        return Schedule(requests.entries, kept=kept), requests.made_at

    def counted(self, layout: Layout) -> Layout:
        """A copy of `layout` with `open_gradients` counted."""
        return replace(layout, open_gradients=self.schedule(layout).open_gradients())

    def widest(self, layout: Layout) -> tuple[int, int]:
        """(module, blocks) of the unit that needs the most blocks for its own parameters."""
        chunk_of = {slot.param: chunk.index for chunk in layout.cached for slot in chunk.slots}
        units = dict.fromkeys(unit for unit in chosen_units(self._modules, layout) if unit is not None)
        return max(
            ((u.module, len({chunk_of[p] for p in u.params if p in chunk_of})) for u in units), key=lambda u: u[1]
        )


class _Requests:
    """The `StepActions` that only notes the requests to the rCache, on a rank whose peers run the same."""

    def __init__(self, layout: Layout) -> None:
        self.entries: list[CacheRequest] = []
        self.made_at: list[int] = []
        """For each entry: the `position` at which it was made."""
        self.position = 0
        """The event that is being played, counted from 0."""
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
        self.made_at.append(self.position)

    def _moving(self, unit: Unit) -> tuple[int, ...]:
        chunks = self._cached_of.get(unit)
        if chunks is None:
            chunks = self._cached_of[unit] = tuple(chunk for chunk in unit.chunks if chunk in self._cached)
        return chunks

    def acquire(self, unit: Unit, *, tracked: bool = True) -> None:
        self.held[unit] += 1
        if not tracked:
            return
        if chunks := self._moving(unit):
            self._ask(ACQUIRE, chunks)
            for chunk in chunks:
                self._chunks[chunk] += 1

    def release(self, unit: Unit, *, tracked: bool = True) -> None:
        self.held[unit] -= 1
        if not tracked:
            return
        if chunks := self._moving(unit):
            self._ask(RELEASE, chunks)
            for chunk in chunks:
                self._chunks[chunk] -= 1

    def acquire_chunk(self, chunk: int) -> bool:
        if chunk not in self._cached or self._chunks[chunk]:
            return False
        self._ask(ACQUIRE, (chunk,))
        self._chunks[chunk] += 1
        return True

    def release_chunk(self, chunk: int) -> None:
        self._ask(RELEASE, (chunk,))
        self._chunks[chunk] -= 1

    def accept_gradient(self, slot: ParamId) -> None:
        self.reserve(slot[0])

    def keep_writes(self, unit: Unit) -> None:
        """Nothing: a replay writes no weights."""

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
        self.made_at.clear()


class _Replay:
    """The events of a step, as hooks would tell them under one layout."""

    def __init__(self, modules: Sequence[ModuleInfo], layout: Layout, requests: _Requests) -> None:
        self._modules = modules
        self._units = units_of(chosen_units(modules, layout), layout, str)
        self._slot_of = {slot.param: (chunk.index, i) for chunk in layout.chunks for i, slot in enumerate(chunk.slots)}
        self._trainable = {chunk.index for chunk in layout.chunks if chunk.key.trainable}
        self._cached = {chunk.index for chunk in layout.cached}
        self._requests = requests
        self._machine = StepMachine(self._units.values(), self._trainable, requests)
        self._stack = CallStack(self._machine, requests)
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By micro-batch and module: the positions of entry and exit of its runs in forward; 0 for an evaluation."""
        self._number = 0
        """The micro-batch whose event is being played."""
        self._operator = 0
        self._tell = {
            ENTER: self._enter,
            LEAVE: self._leave,
            READ: self._read,
            REACH: self._reach,
            UNPACK: self._unpack,
            EXPECT: self._expect,
            ACCUMULATE: self._accumulate,
        }

    def play(self, legs: Legs, micro_batches: int) -> None:
        """Plays the forwards of some micro-batches, in turns, and one backward of all."""
        leg_of = self._play_forwards(legs, micro_batches)
        if not legs.backward:
            return
        self._machine.begin()
        for leg in legs.split(leg_of):
            for number in reversed(range(micro_batches)):
                self._machine.micro_batch = number
                for position, event in leg:
                    if not number or event.kind not in (EXPECT, ACCUMULATE) or legs.comes_apart(event):
                        self._play(event, number, len(legs.forward) + position)
        self._machine.end()

    def _play_forwards(self, legs: Legs, micro_batches: int) -> list[int]:
        """Plays forwards in turns; returns the leg of each event of the last one, as backward has them."""
        starts: list[int] = []
        stacks = [CallStack(self._machine, self._requests) for _ in range(micro_batches)]
        running = deque((number, self._forward(legs, number)) for number in range(micro_batches))
        while running:
            number, forward = running.popleft()
            self._stack = stacks[number]
            self._machine.turn_to(number)
            if (start := next(forward, None)) is not None:
                running.append((number, forward))
                starts += [start] * (number == micro_batches - 1)
        return legs.numbers(starts)

    def _forward(self, legs: Legs, number: int) -> Iterator[int]:
        """Plays the forward of a micro-batch; yields where it hands its turn on."""
        region: int | None = None
        for position, (event, inside) in enumerate(zip(legs.forward, legs.region_at, strict=True)):
            if (inside is None or inside != region) and self._gathers(event):
                region = inside
                if legs.is_apart[position]:
                    self._machine.arrive()
                yield position
            self._play(event, number, position)

    def _play(self, event: StepEvent, number: int, position: int) -> None:
        """Plays an event of a micro-batch; `position` counts the events of one."""
        self._number, self._requests.position = number, position
        self._tell[event.kind](event)

    def _gathers(self, event: StepEvent) -> bool:
        """Whether an event of forward asks for weights that have to be gathered."""
        if event.kind is LEAVE:
            return False
        unit = self._units.get(event.module)
        if event.kind is ENTER and (unit is not None or not event.module):
            return unit is not None and not self._cached.isdisjoint(unit.chunks)
        params = event.params if event.kind is READ else self._modules[event.module].params
        return not self._cached.isdisjoint(chunk for chunk, _ in self._free(params))

    def _enter(self, event: StepEvent) -> None:
        unit = self._units.get(event.module)
        if unit is None and event.module:  # the first module is the model, which has hooks in any case
            self._read(event, self._modules[event.module].params)  # if it runs outside of its unit
        else:
            self._stack.enter(event.module, unit, with_grad=event.with_grad, in_backward=event.in_backward)

    def _leave(self, event: StepEvent) -> None:
        call = self._stack.leave(event.module, with_grad=event.with_grad)
        if call is not None and not call.recomputes:
            self._runs.setdefault((self._number, event.module), []).append((call.entered, call.left))

    def _read(self, event: StepEvent, params: tuple[int, ...] | None = None) -> None:
        if free := self._free(event.params if params is None else params):
            modes = {"with_grad": event.with_grad, "in_backward": event.in_backward}
            self._stack.end_read(self._stack.begin_read(free, lambda: "a read", **modes))

    def _free(self, params: Iterable[int]) -> tuple[ParamId, ...]:
        """The parameters that no unit holds: the others are as usual, and no function asks for them."""
        held, owners_of = self._requests.held, self._machine.owners_of
        slots = (self._slot_of[p] for p in params)
        return tuple(slot for slot in slots if not any(held[unit] for unit in owners_of(slot)))

    def _reach(self, event: StepEvent) -> None:
        unit = self._units.get(event.module)
        if unit is not None:
            runs = self._runs.get((self._number, event.module), [])
            self._machine.reach(unit, *(self._machine.positions(unit) if event.run < 0 else runs[event.run]))

    def _unpack(self, event: StepEvent) -> None:
        self._operator += not event.same_operator
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
    """One run of a module, or one read outside of modules, in a forward."""

    entered: int
    """Position of its event."""
    module: int
    params: tuple[int, ...]
    completes: tuple[int, ...]
    """The parameters that get their gradient when backward comes to the run, in that order."""
    left: int
    run: int = 0
    """The number that `StepEvent.run` has."""


def _assumed_backward(
    modules: Sequence[ModuleInfo], events: Sequence[StepEvent], trainable: Mapping[int, int]
) -> Iterator[StepEvent]:
    """The backward that the order of forward lets expect.

    Backward visits runs in the reverse of the order in which forward left them. A parameter gets its gradient when
    backward comes to its first use; the parameter used last gets its gradient first. The gradients of a module that
    runs others may come at any time until backward has passed these, and so do those of a norm or a module of more than
    two parameters. A bias has its gradient before the larger weight of its product. When backward comes to a module
    that is recomputed, all that is inside it first runs again.
    """
    around: list[_Run] = []
    region = len(events)
    """Where the recomputed region begins that backward came to last."""
    for run in sorted(_runs(modules, events, trainable), key=lambda run: -run.left):
        while around and around[-1].entered > run.left:
            yield from _accumulated(around.pop().completes)
        again = region < run.entered
        if run.module < 0:
            if not again:  # a recomputation holds what it reads
                yield from (StepEvent(UNPACK, params=(p,), same_operator=i > 0) for i, p in enumerate(run.params))
            yield from _accumulated(run.completes)
            continue
        yield StepEvent(REACH, run.module, run=-1 if again else run.run)
        if modules[run.module].recomputed and not again:
            region = run.entered
            yield from (replace(event, in_backward=True) for event in events[run.entered + 1 : run.left])
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


def _runs(modules: Sequence[ModuleInfo], events: Sequence[StepEvent], trainable: Mapping[int, int]) -> list[_Run]:
    """The runs and recorded reads of a forward, in order of entry."""
    runs: list[_Run] = []
    running: list[_Run] = []
    times: Counter[int] = Counter()
    seen: set[int] = set()
    for position, event in enumerate(events):
        if event.kind is LEAVE:
            ended = running.pop()
            ended.left, ended.run = position, times[ended.module]
            times[ended.module] += 1
            continue
        if event.kind is READ and not event.with_grad:
            continue
        params = event.params if event.kind is READ else modules[event.module].params
        new = [p for p in params if p in trainable and p not in seen]
        seen.update(new)
        runs.append(_Run(position, event.module, params, tuple(reversed(new)), left=position))
        if event.kind is ENTER:
            running.append(runs[-1])
    return runs
