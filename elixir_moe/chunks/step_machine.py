"""The requests of a step, in their order: one machine for the runtime and for the planner.

Owns the positions in a forward, the holds of a backward, the gradients that are still awaited, and the order in which
chunks are reduced. Pure: it is told what happens, and calls `StepActions`. `runtime.hooks` tells it what a step does,
and `chunks.replay` what a step will do, both by way of `chunks.calls`, so that the requests of both are the same.

    event      meaning                                          the machine
    enter      forward enters a unit                            acquires the unit
    leave      forward leaves it                                releases it
    read       a function reads parameters outside their unit   acquires them for the call
    reach      backward comes to the outputs of a run           passes what forward entered later, acquires the unit
    recompute  a checkpointed region enters a unit again        acquires the unit until backward has passed it; one
                                                                that saves no weights until the region leaves it
    unpack     an operator wants weights that it has saved      acquires their chunk until the next operator
    accumulate a gradient is complete                           releases units that nothing reads, takes the gradient,
                                                                reduces chunks that are complete and next in order
    end        backward is over                                 releases everything, reduces the rest

Passing. Every entry and exit in forward gets the next number. Autograd runs nodes in the reverse order of their
creation. So when backward reaches a run that forward left at number e, it has passed everything entered after e:
gradients still missing there will not come, and count as zero.

Micro-batches. Several forwards may take turns, layer by layer, before one backward of all. `turn_to` tells which
micro-batch runs. All draw their numbers from one clock, so that passing means the same for all of them.
"""

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

ParamId = tuple[int, int]
"""(chunk, index in the chunk) of a parameter."""


class Answer(NamedTuple):
    """The agreement of all ranks on a backward."""

    order: list[int]
    """All chunks to reduce, in the order of all ranks."""
    alike: bool = True
    """Every rank used these chunks, in this order."""
    same_gradients: bool = True
    """Every rank awaits the gradients of the same parameters."""


_MOST_FORWARDS = 256
"""Most forwards that await a backward one by one; the first ones are merged."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Unit:
    """Parameters that are unsharded together: those of a module, or those that a function reads outside of modules."""

    label: str
    """The unit's name in messages."""
    slots: tuple[ParamId, ...]
    rank_dependent: bool = False
    """The set of its parameters that get a gradient may differ between ranks."""
    is_read: bool = False
    """The unit stands for reads of its parameters outside their modules."""
    saves_no_weights: bool = False
    """Autograd saves none of its weights: backward reads them again."""
    chunks: tuple[int, ...] = field(init=False)
    indices: dict[int, list[int]] = field(init=False)
    """By chunk: the indices of the unit's parameters."""

    def __post_init__(self) -> None:
        self.chunks = tuple(sorted({chunk for chunk, _ in self.slots}))
        self.indices = {chunk: [i for c, i in self.slots if c == chunk] for chunk in self.chunks}


class StepActions(Protocol):
    """Carries out what the machine decides."""

    def acquire(self, unit: Unit, *, tracked: bool = True) -> None:
        """Unshards a unit until `release`; holds are counted. `tracked`: the request is part of a step."""

    def release(self, unit: Unit, *, tracked: bool = True) -> None:
        """Ends one hold on a unit."""

    def keep_writes(self, unit: Unit) -> None:
        """Keeps what user code has written to the parameters of a reader."""

    def acquire_chunk(self, chunk: int) -> bool:
        """Unshards a chunk that nobody holds, until `release_chunk`; returns False if there is no need."""
        ...

    def release_chunk(self, chunk: int) -> None:
        """Ends the hold of `acquire_chunk`."""

    def accept_gradient(self, slot: ParamId) -> None:
        """Stores a gradient that autograd has brought; of experts and recomputed units, others may follow."""

    def reserve(self, chunk: int) -> None:
        """Makes room for gradients of a chunk before the first one has come."""

    def agree(self, used: Sequence[int], awaited: Sequence[ParamId]) -> Callable[[], Answer]:
        """Starts the agreement of all ranks on the chunks of a backward; the result waits for the answer.

        `used` are the trainable chunks that forward used on this rank, in the reverse order of their first use;
        `awaited` as `begin` found them.
        """
        ...

    def reduce(self, chunk: int) -> None:
        """Reduces the gradients of a chunk: no more will come in this backward."""

    def finish(self) -> None:
        """Reduces the gradients of chunks that the agreement did not know of."""

    def forget_round(self) -> None:
        """Forgets the requests so far: they are not those of one forward and backward."""


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of the model that awaits its backward; pipeline schedules have several at once."""

    start: int
    """A number below all numbers of this forward."""
    micro_batch: int = 0
    """The micro-batch whose turn it was when the forward began."""
    entered: dict[Unit, int] = field(default_factory=dict)
    """The number at which forward first entered each unit."""
    left: dict[Unit, int] = field(default_factory=dict)
    """The number at which forward last left each unit."""
    repeated: set[Unit] = field(default_factory=set)
    """Units entered more than once."""
    unrecomputed: Counter[Unit] = field(default_factory=Counter)
    """Runs of each unit without gradients, in checkpoints that backward has not run again yet."""


@dataclass(slots=True, eq=False)
class Backward:
    """A running backward."""

    ahead: list[tuple[int, Unit]]
    """(number, unit) of the first entry of each unit that backward has not passed yet, ascending."""
    waiting: set[Unit]
    """The units in `ahead`."""
    reached: set[tuple[Unit, int]] = field(default_factory=set)
    holds: list[tuple[int, Unit]] = field(default_factory=list)
    """(number of entry, unit) of units held until backward has passed them."""
    missing: dict[Unit, set[ParamId]] = field(default_factory=dict)
    """The parameters whose gradients are incomplete, of each unit that has complete ones."""
    runs: dict[Unit, int] = field(default_factory=dict)
    """The number of entry of the run of each unit that backward came to last."""
    region: int = sys.maxsize
    """The number at which forward entered the first unit of the last recomputed region."""
    position: int = sys.maxsize
    """The lowest number at which forward left a run that backward has reached."""


class StepMachine:
    """The requests of the steps of one model, in their order."""

    def __init__(
        self, units: Iterable[Unit], trainable: Set[int], actions: StepActions, *, in_order: bool = False
    ) -> None:
        """`trainable` chunks have gradients. `in_order`: as in `ReductionOrder`."""
        self._actions = actions
        self._trainable = trainable
        self._owners: defaultdict[ParamId, list[Unit]] = defaultdict(list)
        self._readers: dict[tuple[ParamId, ...], Unit] = {}
        self._order = ReductionOrder(in_order=in_order)
        for unit in units:
            self._own(unit)
        self.forget()

    def _own(self, unit: Unit) -> None:
        for slot in unit.slots:
            self._owners[slot].append(unit)

    def owners_of(self, slot: ParamId) -> Sequence[Unit]:
        """The units that a parameter belongs to, readers included."""
        return self._owners[slot]

    def forget(self) -> None:
        """Forgets the forwards that await a backward, and a backward that is given up."""
        self.clock = 0
        """The number given last."""
        self.forwards: list[Forward] = []
        """The forwards that await a backward."""
        self.backward: Backward | None = None
        """The running backward."""
        self.past = Forward(0)
        """The forward of the last backward: all that began before the point where it started, merged."""
        self.round_is_open = False
        """The requests so far are not those of a whole forward and backward: the graph is kept, or a forward waits."""
        self.micro_batch = 0
        """The micro-batch that runs, of those whose forwards take turns; in backward, the one that is recomputed."""
        self._past_of: dict[int, list[Forward]] = {}
        """By micro-batch: the forwards that are merged in `past`."""
        self._current: Forward | None = None
        self._suspended: dict[int, Forward | None] = {}
        """The running forward of each micro-batch that has had a turn; empty while they take none."""
        self._called: set[int] = set()
        """Micro-batches that take turns and whose present call has entered no unit yet."""
        self._arrived: dict[int, int] = {}
        """By micro-batch: the number that its next entry has got already."""
        self._incomplete: defaultdict[int, dict[ParamId, None]] = defaultdict(dict)
        """By chunk: parameters of whose gradients some micro-batches have brought theirs; autograd adds the others."""
        self.unpacked: list[int] = []
        """Chunks that are held for the operator of autograd that has wanted them."""
        self._operator: object = None
        self._order.clear()

    # ------------------------------------------------------------------------------------------------------- forward

    def begin_turns(self) -> None:
        """Records that several micro-batches begin to take turns.

        Calls of a micro-batch are one forward, up to one that begins with a unit that has run.
        """
        self._current = None
        self._suspended.clear()
        self._called.clear()

    def end_turns(self) -> None:
        """Records that the forwards of all micro-batches have ended."""
        self.begin_turns()
        self.micro_batch = 0

    def turn_to(self, micro_batch: int) -> None:
        """Records that another micro-batch runs from now on."""
        self._suspended[self.micro_batch] = self._current
        self.micro_batch, self._current = micro_batch, self._suspended.get(micro_batch)

    def arrive(self) -> None:
        """Numbers the entry that follows when the turn of its micro-batch has come round again.

        A reentrant checkpoint has made its node of autograd before its region runs.
        """
        self.clock += 1
        self._arrived[self.micro_batch] = self.clock

    def begin_call(self) -> None:
        """Records that a forward begins that is inside no other."""
        if not self._suspended:
            self._current = None
        else:
            self._called.add(self.micro_batch)

    def drop_call(self) -> None:
        """Forgets the forward that has just ended: it has failed, and gets no backward."""
        if not self._suspended:
            self.forwards = [forward for forward in self.forwards if forward is not self._current]

    def enter(self, unit: Unit) -> int:
        """Acquires a unit that forward enters; returns the number of the entry."""
        number = self._note(unit)
        self._actions.acquire(unit)
        return number

    def leave(self, unit: Unit, *, with_grad: bool) -> int:
        """Releases a unit that forward leaves; returns the number of the exit. `with_grad`: autograd records it."""
        self.clock = number = self.clock + 1
        if self._current is not None:
            self._current.left[unit] = number
            if not with_grad:
                self._current.unrecomputed[unit] += 1
        self._actions.release(unit)
        return number

    def reader(self, slots: tuple[ParamId, ...], label: Callable[[], str]) -> Unit:
        """The unit that stands for all reads of these parameters outside their units."""
        unit = self._readers.get(slots)
        if unit is None:
            unit = Unit(label(), slots, is_read=True)
            self._own(unit)
            self._readers[slots] = unit  # last: an interrupt before it leaves a unit that nothing enters
        return unit

    def read(self, unit: Unit, *, inside: bool) -> None:
        """Acquires the parameters of a reader; the caller releases it.

        `inside` a forward, their gradients are awaited.
        """
        if inside:
            self._note(unit)
        self._actions.acquire(unit)

    def _note(self, unit: Unit) -> int:
        """Numbers and records the entry of forward into `unit`."""
        if (number := self._arrived.pop(self.micro_batch, 0)) == 0:
            self.clock = number = self.clock + 1
        if self.micro_batch in self._called:
            self._called.remove(self.micro_batch)
            if self._current is not None and unit in self._current.entered:
                self._current = None
        if self._current is None:
            self._current = Forward(number - 1, self.micro_batch)
            self.forwards.append(self._current)
            if len(self.forwards) > _MOST_FORWARDS:  # most likely, the first ones never get a backward
                self.forwards[:2] = [_merged(self.forwards[:2])]
                self._actions.forget_round()
        if unit in self._current.entered:
            self._current.repeated.add(unit)
        else:
            self._current.entered[unit] = number
        return number

    # ------------------------------------------------------------------------------------------------------ backward

    def begin(
        self,
        left: int | None = None,
        *,
        keep_graph: bool = False,
        find_awaited: Callable[[Sequence[tuple[int, Unit]]], Sequence[ParamId] | None] = lambda ahead: (),
    ) -> None:
        """Starts a backward from the point that forward left at number `left`; later forwards await another one.

        Args:
            left: a number; None takes all forwards.
            keep_graph: the forwards may have another backward.
            find_awaited: given `Backward.ahead`, the parameters on whose gradients ranks must agree, of those that this
                backward brings; None if it brings none of any parameter.
        """
        self.past = self._take(left, keep=keep_graph) or self.past
        self.round_is_open = keep_graph
        ahead = sorted(((number, unit) for unit, number in self.past.entered.items()), key=lambda item: item[0])
        self.backward = Backward(ahead, {unit for _, unit in ahead})
        first_use: dict[int, int] = {}
        awaited: dict[int, set[int]] = {}
        expected = find_awaited(ahead)
        for number, unit in ahead if expected is not None else ():
            for chunk, indices in unit.indices.items():
                if chunk in self._trainable:
                    first_use.setdefault(chunk, number)
                    awaited.setdefault(chunk, set()).update(indices)
        order = sorted(first_use, key=lambda chunk: (first_use[chunk], chunk), reverse=True)
        self._order.begin(self._actions.agree(order, expected or ()), {chunk: awaited[chunk] for chunk in order})

    def _take(self, left: int | None, *, keep: bool) -> Forward | None:
        """Merges all forwards that began before number `left`; forgets them unless `keep`."""
        mine = [forward for forward in self.forwards if left is None or forward.start < left]
        if not mine:
            return None
        if not keep:
            self.forwards = [forward for forward in self.forwards if forward not in mine]
        self._past_of = {n: [f for f in mine if f.micro_batch == n] for n in {f.micro_batch for f in mine}}
        return _merged(mine)

    def positions(self, unit: Unit) -> tuple[int, int]:
        """The numbers at which forward first entered and last left a unit that backward runs again."""
        past = self._run_again(unit)
        return past.entered.get(unit, 0), past.left.get(unit, sys.maxsize)

    def _run_again(self, unit: Unit) -> Forward:
        """The forward whose run of a unit backward runs again: the last one that it has not passed.

        Several forwards of a model, as of two views of a batch, may await one backward, which takes the last one first.
        """
        if unit not in self.past.entered or self.backward is None:
            return self.past
        mine = (
            self._past_of.get(self.micro_batch) if len(self._past_of) > 1 else next(iter(self._past_of.values()), None)
        )
        ran = [forward for forward in mine or () if unit in forward.entered]
        ahead = [forward for forward in ran if forward.entered[unit] < self.backward.position]
        return (ahead[-1:] or ran[:1] or [self.past])[0]

    def reach(self, unit: Unit, entered: int, left: int) -> None:
        """Records that backward comes to a run of `unit` that forward entered and left at these numbers."""
        assert self.backward is not None
        if (unit, left) in self.backward.reached:
            return
        self.backward.reached.add((unit, left))
        self.backward.runs[unit] = entered
        self.backward.position = min(self.backward.position, left)
        self.end_operator()
        self._pass(left, self.backward)
        self._actions.acquire(unit)
        self.backward.holds.append((entered, unit))
        if unit.rank_dependent:
            for chunk in unit.chunks:
                if self._order.awaits_any(chunk):
                    self._actions.reserve(chunk)

    def recompute(self, unit: Unit, *, with_grad: bool) -> None:
        """Acquires a unit that backward runs again, or a reader, until backward has passed it.

        The caller releases a unit that saves no weights. When a region starts to run again, everything that forward
        entered later is done, or runs again with it. For a unit that ran more than once in one forward, it is unknown
        which run this is. `with_grad`: autograd records the run.
        """
        backward, past = self.backward, self._run_again(unit)
        assert backward is not None
        entered = past.entered.get(unit, sys.maxsize if unit.is_read else 0)
        if with_grad and self.past.unrecomputed[unit]:
            self.past.unrecomputed[unit] -= 1
        self.end_operator()
        if entered < backward.region and unit not in past.repeated:
            self._release_after(entered, backward, reached=True)
            backward.region = entered
        backward.runs[unit] = entered
        self._actions.acquire(unit)
        if not unit.saves_no_weights:
            backward.holds.append((entered, unit))

    def unpack(self, chunk: int, operator: Callable[[], object]) -> None:
        """Acquires a chunk for the running `operator` of autograd, which wants weights it has saved."""
        if self.unpacked and operator() != self._operator:
            self.end_operator()
        if self._actions.acquire_chunk(chunk):
            self._operator = operator()
            self.unpacked.append(chunk)

    def end_operator(self) -> None:
        """Ends the holds on weights that were wanted by an operator that has run."""
        if self.unpacked:
            unpacked, self.unpacked = self.unpacked, []
            for chunk in unpacked:
                self._actions.release_chunk(chunk)

    def accumulate(self, slot: ParamId) -> None:
        """Records a gradient and takes it: autograd has summed it over all uses of the parameter.

        In a pass of several micro-batches, it stays where autograd adds to it until the last of them brings its part.
        If this is the last gradient that a unit misses, nothing reads the unit's weights any more.
        """
        if self.unpacked:
            self.end_operator()
        backward, more, owners = self.backward, self.past.unrecomputed, self._owners[slot]
        if len(self._past_of) > 1:
            if backward is not None and any(more[unit] or self._runs_again(unit, backward) for unit in owners):
                self._incomplete[slot[0]][slot] = None
                return
            self._incomplete[slot[0]].pop(slot, None)
        for unit in owners:
            if unit.rank_dependent or (more and more[unit]):
                self._actions.accept_gradient(slot)
                return
        if backward is not None:
            for unit in owners:
                missing = backward.missing.get(unit)
                if missing is None:
                    missing = backward.missing[unit] = set(unit.slots)
                if slot in missing:
                    missing.remove(slot)
                    if not missing:
                        self._release_early(unit, backward)
        self._actions.accept_gradient(slot)
        if self._order.expect_no_more(slot):
            self._reduce_ready()

    def _runs_again(self, unit: Unit, backward: Backward) -> bool:
        """Whether backward has yet to come to a run of `unit` before the one it is in.

        Autograd adds the gradients of a parameter before it brings them; those of reentrant checkpoints come one by
        one.
        """
        first = self.past.entered.get(unit)
        return first is not None and backward.runs.get(unit, first) > first

    def _release_early(self, unit: Unit, backward: Backward) -> None:
        ended = [hold for hold in backward.holds if hold[1] is unit]
        backward.holds = [hold for hold in backward.holds if hold[1] is not unit]
        for _ in ended:
            self._actions.release(unit)

    def _pass(self, left: int, backward: Backward) -> None:
        """Records that everything forward entered after number `left` has had its backward."""
        ahead, waiting = backward.ahead, backward.waiting
        while ahead and ahead[-1][0] > left:
            _, unit = ahead.pop()
            waiting.discard(unit)
            for chunk, indices in unit.indices.items():
                for index in self._order.awaited_among(chunk, indices):
                    slot = chunk, index
                    if waiting.isdisjoint(self._owners[slot]) and self._order.expect_no_more(slot):
                        self._reduce_ready()
        self._release_after(left, backward)

    def _release_after(self, left: int, backward: Backward, *, reached: bool = False) -> None:
        """Ends the holds on what forward entered after number `left`.

        With `reached`, units that save no weights stay: backward has reached them, and a recomputation holds none.
        """
        passed = [hold for hold in backward.holds if hold[0] > left and not (reached and hold[1].saves_no_weights)]
        if passed:
            backward.holds = [hold for hold in backward.holds if hold not in passed]
            for _, unit in passed:
                self._actions.release(unit)

    def _reduce_ready(self) -> None:
        for chunk in self._order.ready():
            self._accept_incomplete(chunk)
            self._actions.reduce(chunk)

    def _accept_incomplete(self, chunk: int) -> None:
        for slot in self._incomplete.pop(chunk, ()):
            self._actions.accept_gradient(slot)

    def end(self) -> None:
        """Ends a backward: no further gradient will come."""
        assert self.backward is not None
        self.end_operator()
        self._pass(-1, self.backward)
        self._order.expect_nothing()
        self._reduce_ready()
        for chunk in sorted(self._incomplete):
            self._accept_incomplete(chunk)
        self._actions.finish()
        self._order.clear()
        self.round_is_open |= bool(self.forwards)  # the graph is kept, or another forward awaits its backward
        self.backward = None


class ReductionOrder:
    """The order in which one backward reduces its chunks, and the gradients that each still waits for.

    With `in_order` (see `Communicator.tagged`), reductions of ranks that run different modules wait for the end of
    backward: these modules may have collectives too.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self._in_order = in_order
        self.clear()

    def clear(self) -> None:
        """Forgets a backward that is over or given up."""
        self._answer: Callable[[], Answer] | None = None
        self._order: deque[int] = deque()
        self._awaited: Mapping[int, set[int]] = {}
        self._news = False
        self._at_end = False
        """Reductions wait for the end of this backward."""
        self._over = False
        """No further gradient can come in this backward."""

    def begin(self, answer: Callable[[], Answer], awaited: Mapping[int, set[int]]) -> None:
        """Starts a backward; it asks for the `answer` when a first chunk is complete.

        `awaited` has, for each chunk, the indices of its parameters whose gradients are awaited.
        """
        self._answer, self._awaited = answer, awaited

    def awaited_among(self, chunk: int, indices: Sequence[int]) -> Sequence[int]:
        """The `indices` in `chunk` whose gradients are still expected."""
        awaited = self._awaited.get(chunk)
        return [index for index in indices if index in awaited] if awaited else ()

    def awaits_any(self, chunk: int) -> bool:
        """Whether gradients of `chunk` are still expected."""
        return bool(self._awaited.get(chunk))

    def expect_no_more(self, slot: ParamId) -> bool:
        """Records that a gradient has come, or will not come in this backward; returns whether it was the last."""
        awaited = self._awaited.get(slot[0])
        if awaited is None:
            return False
        awaited.discard(slot[1])
        self._news |= not awaited
        return not awaited

    def expect_nothing(self) -> None:
        """Records that no further gradient can come in this backward."""
        for indices in self._awaited.values():
            indices.clear()
        self._news = self._over = True

    def ready(self) -> Iterator[int]:
        """The next complete chunks, in order; chunks that only other ranks used are among them."""
        if not self._news:
            return
        self._news = False
        if self._answer is not None:
            answer, self._answer = self._answer, None
            agreed = answer()
            self._order, self._at_end = deque(agreed.order), self._in_order and not agreed.alike
        if self._at_end and not self._over:
            return
        while self._order and not self._awaited.get(self._order[0]):
            yield self._order.popleft()


def _merged(forwards: Sequence[Forward]) -> Forward:
    """One forward in the place of several, given in their order."""
    merged = Forward(forwards[0].start, forwards[0].micro_batch)
    for forward in forwards:
        merged.repeated |= forward.repeated | (forward.entered.keys() & merged.entered.keys())
        merged.entered = forward.entered | merged.entered
        merged.left |= forward.left
        merged.unrecomputed += forward.unrecomputed
    return merged
