"""The replacement policy of the rCache: one set of decisions for the runtime and the search.

Owns the logical state of the rCache (`CacheState`), the replacement policies and the recorded schedule. Never touches
memory: the runtime carries out the loads and evictions decided here, the search only counts them.

A block holds the weights of a chunk or its gradients; `gradients_of` numbers the latter. A schedule lists the requests
of one forward and backward, the same on every rank and in every step:

    acquire  the weights must be in blocks, or the gradients have a block, and stay until released
    release  one use is over; gradients leave their block, because nothing reads them there again

Without a schedule, the least recently used weights are evicted: this suits backward (the reverse of forward) well and
is safe for any order. With a schedule, the weights whose next use lies farthest ahead are evicted (Belady): no policy
has fewer misses.
Source: Elixir v1, VI-A; v2, A.2.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from elixir_moe.errors import PlanError

WARM_UP_STEPS = 3
"""Steps after which the kept chunks in the cache no longer change."""
LOOKAHEAD = 3
"""Number of chunks gathered ahead of use: one arriving, one on its way, one waiting for an update or a late rank."""
NEVER = 1 << 62
"""The position of the next use of a chunk that is not used again."""


class Verb(StrEnum):
    """The kind of a request."""

    ACQUIRE = "acquire"
    RELEASE = "release"


ACQUIRE, RELEASE = Verb
"""Module-level names for the verbs: looking a member up in its class takes as long as the bookkeeping of a request."""


def gradients_of(chunk: int) -> int:
    """The number that stands for the gradients of `chunk`, and back; weights are numbered from 0."""
    return ~chunk


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """One request to the cache."""

    verb: Verb
    chunks: tuple[int, ...]
    """Numbers of chunks (their weights), or the `gradients_of` one chunk."""


@dataclass(frozen=True, slots=True)
class Load:
    """Decision: put `chunk` (weights or gradients) into `block` and drop `evicted` without a write.

    `evicted` is None if the block was empty.
    """

    chunk: int
    block: int
    evicted: int | None
    ahead: bool
    """True for a prefetch: the load was decided before the chunk was asked for."""


class Holds(NamedTuple):
    """A schedule without acquires of chunks that are held already and releases of chunks that stay held."""

    entries: tuple[tuple[Verb, tuple[int, ...], tuple[int, ...]], ...]
    """(verb, chunks whose hold begins or ends, position in `entries` of the next acquire of each)."""
    first: dict[int, int]
    """{chunk: position in `entries` of its first acquire}."""


class Schedule:
    """A recorded sequence of entries with the positions at which each chunk is acquired."""

    def __init__(self, entries: Sequence[CacheRequest], *, kept: Collection[int] = ()) -> None:
        self.entries = tuple(entries)
        self.kept = frozenset(kept)
        """Chunks that no update makes stale (frozen ones): they stay gathered from one step to the next."""

    def of_chunks(self, chunks: Collection[int]) -> "Schedule":
        """The requests for these chunks and their gradients only."""
        shorter: dict[CacheRequest, CacheRequest] = {}
        for entry in set(self.entries):
            wanted = tuple(chunk for chunk in entry.chunks if max(chunk, ~chunk) in chunks)
            shorter[entry] = entry if wanted == entry.chunks else CacheRequest(entry.verb, wanted)
        return Schedule([found for entry in self.entries if (found := shorter[entry]).chunks], kept=self.kept)

    @cached_property
    def holds(self) -> "Holds":
        """The entries that begin or end the first and the last hold on a chunk."""
        found: list[tuple[Verb, tuple[int, ...]]] = []
        held: dict[int, int] = {}
        for entry in self.entries:
            before = set(held)
            _apply(held, entry.verb, entry.chunks)
            chunks = tuple(c for c in dict.fromkeys(entry.chunks) if (c in before) is not (c in held))
            if entry.verb is ACQUIRE and found and found[-1] == (RELEASE, chunks) and chunks[0] >= 0:
                found.pop()  # nothing can leave in between
            elif chunks:
                found.append((entry.verb, chunks))
        assert not held, "a step releases all that it acquires"
        first = {c: at for at, (verb, chunks) in reversed([*enumerate(found)]) for c in chunks if verb is ACQUIRE}
        later = {chunk: len(found) + first[chunk] if chunk in self.kept else NEVER for chunk in first}
        entries: list[tuple[Verb, tuple[int, ...], tuple[int, ...]]] = []
        for position in reversed(range(len(found))):
            verb, chunks = found[position]
            entries.append((verb, chunks, tuple(later[chunk] for chunk in chunks)))
            if verb is ACQUIRE:
                later.update(dict.fromkeys(chunks, position))
        return Holds(tuple(reversed(entries)), first)

    @cached_property
    def wanted(self) -> tuple[frozenset[int], ...]:
        """The chunks of each entry."""
        return tuple(frozenset(entry.chunks) for entry in self.entries)

    @cached_property
    def _uses(self) -> dict[int, list[int]]:
        """Positions at which each chunk is acquired."""
        uses: dict[int, list[int]] = {}
        for position, entry in enumerate(self.entries):
            if entry.verb is ACQUIRE:
                for chunk in entry.chunks:
                    uses.setdefault(chunk, []).append(position)
        return uses

    @cached_property
    def must_load(self) -> tuple[int, ...]:
        """The chunks that every step gathers at least once: those used, except the ones that stay gathered."""
        return tuple(chunk for chunk in self._uses if chunk >= 0 and chunk not in self.kept)

    @cached_property
    def _next_acquire(self) -> list[int | None]:
        """For each position: the position of the first acquire there or later."""
        following: list[int | None] = [None] * (len(self.entries) + 1)
        for position in reversed(range(len(self.entries))):
            acquires = self.entries[position].verb is ACQUIRE
            following[position] = position if acquires else following[position + 1]
        return following

    def next_use(self, chunk: int, position: int) -> int:
        """Position of the first acquire of `chunk` after `position`, or NEVER; kept chunks count the next step too."""
        uses = self._uses.get(chunk, [])
        index = bisect_right(uses, position)
        if index < len(uses):
            return uses[index]
        return len(self.entries) + uses[0] if uses and chunk in self.kept else NEVER

    def next_acquire(self, position: int) -> int | None:
        """Position of the first acquire after `position`; None if there is none."""
        return self._next_acquire[position + 1]

    def least_blocks(self) -> int:
        """The fewest blocks that can carry out the schedule: the most chunks ever held at once."""
        return self._least_blocks

    @cached_property
    def _least_blocks(self) -> int:
        return max(self._held_together(), default=0)

    def most_weights(self) -> int:
        """The most chunks whose weights are held at once."""
        return max(self._held_together(lambda item: item >= 0), default=0)

    def gradient_blocks(self, blocks: int) -> int:
        """The number of blocks, out of `blocks`, that gradients may use at once."""
        return max(self.open_gradients(), blocks - self.most_weights())

    def open_gradients(self) -> int:
        """The most chunks whose gradients have a block at once."""
        return max(self._held_together(lambda item: item < 0), default=0)

    def _held_together(self, counts: Callable[[int], bool] = lambda item: True) -> Iterator[int]:
        """After each entry: the number of held items that `counts` accepts."""
        held: dict[int, int] = {}
        for entry in self.entries:
            _apply(held, entry.verb, entry.chunks)
            yield sum(map(counts, held))


@dataclass(slots=True)
class CacheCounts:
    """Hits, misses and evictions of the cache."""

    hits: int = 0
    """Requests for a chunk that needed no gather."""
    misses: int = 0
    """Gathers, prefetches included."""
    evictions: int = 0
    """Chunks dropped to make room."""
    prefetched: int = 0
    """Misses that were gathered ahead of their use."""
    off_schedule: int = 0
    """Requests that differ from the schedule; they are served on demand."""


def advice(least: int) -> str:
    """The advice for users whose rCache has fewer than `least` blocks."""
    return f"set rcache_blocks to at least {least}, or a larger chunk_numel, so that more parameters share a block"


class CacheState:
    """The rCache without its memory: which chunk is in which block, which chunks are held, and which is evicted next.

    Requests are expected to follow the `schedule`, if there is one. From the first one that differs, requests are
    served by the safe policy (least recently used) and counted as `off_schedule`, until `rewind` restarts the schedule.
    """

    def __init__(self, blocks: int, schedule: Schedule | None = None, *, prefetch: int = LOOKAHEAD) -> None:
        self.blocks = blocks
        self.counts = CacheCounts()
        self._schedule = schedule
        self._prefetch = prefetch
        self._position = -1
        self._on_schedule = True
        self._where: dict[int, int] = {}
        self._empty = deque(range(blocks))
        self._held: dict[int, int] = {}
        self._clock = 0
        self._last_use: dict[int, int] = {}
        self._next_use: dict[int, int] = {}
        """On schedule: for each chunk in a block, `Schedule.next_use` from the present position."""
        self._ahead: set[int] = set()
        """Weights gathered ahead of use and not asked for yet."""
        self._reserved: set[int] = set()
        """Gradients that have a block and were not asked for yet."""
        self._present = -1
        """The last position up to which each `acquire` finds its chunks in blocks, or NEVER: all of them do."""
        self._sending = -1
        """The block that gradients left most recently; -1 if none."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks in blocks, in the order in which they entered."""
        return tuple(self._where)

    def holds(self, chunk: int) -> bool:
        """Whether `chunk` is acquired and not yet released."""
        return chunk in self._held

    def block_of(self, chunk: int) -> int:
        """The block that `chunk` is in."""
        return self._where[chunk]

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that the cache follows; None if there is none yet."""
        return self._schedule

    def follow(self, schedule: Schedule | None) -> None:
        """Follows `schedule` from now on, beginning at its start; None until a schedule is known."""
        self._schedule = schedule
        self.rewind()

    def rewind(self) -> bool:
        """Returns to the start of the schedule; returns whether the last round followed it to its end."""
        at_end = self._schedule is not None and self._position + 1 == len(self._schedule.entries)
        complete = at_end and self._on_schedule
        self.drop([item for item in self._where if item < 0 and item not in self._held])  # reserved, never acquired
        self._position, self._present, self._on_schedule = -1, -1, True
        for chunk in self._where:
            self._note_next_use(chunk)
        return complete

    def leave_schedule(self) -> None:
        """Stops following the schedule until `rewind`: requests now come in an order that may differ between ranks.

        Gathers are collective and must not depend on that order. With a block for every chunk and for all gradients at
        once, nothing is evicted then.
        """
        self.drop(list(self._reserved))
        self._on_schedule = False

    def acquire(self, chunks: tuple[int, ...], *, tracked: bool = True) -> list[Load]:
        """Holds `chunks`, weights or gradients that need blocks together; returns the loads to carry out, in order.

        Requests that are not `tracked`, as in evaluation, do not advance the schedule. Raises PlanError, with the state
        as it was, if others hold all blocks.
        """
        self._check_room(chunks)
        if tracked:
            self._advance(ACQUIRE, chunks)
        _apply(self._held, ACQUIRE, chunks)
        loads: list[Load] = []
        for chunk in chunks:
            self._clock += 1
            self._last_use[chunk] = self._clock
            self._reserved.discard(chunk)
            if chunk not in self._where:
                loads.append(self._load(chunk, self._victim(self._held), ahead=False))
            else:
                self._note_next_use(chunk)
                if chunk in self._ahead:
                    self._ahead.remove(chunk)
                elif chunk >= 0:
                    self.counts.hits += 1
        return loads + self._look_ahead() if tracked and self._present != NEVER else loads

    def release(self, chunks: tuple[int, ...], *, tracked: bool = True) -> list[Load]:
        """Ends one hold on each of `chunks`; returns prefetches to carry out.

        Gradients leave their block when their last hold ends.
        """
        if tracked:
            self._advance(RELEASE, chunks)
        _apply(self._held, RELEASE, chunks)
        for chunk in chunks:
            if chunk < 0 and chunk not in self._held and chunk in self._where:
                self._sending = self._where[chunk]
                self.drop((chunk,))
        return self._look_ahead() if tracked and self._present != NEVER else []

    def drop(self, chunks: Iterable[int]) -> None:
        """Empties the blocks of `chunks`, for example because an update made the weights stale."""
        for chunk in chunks:
            self._held.pop(chunk, None)
            self._ahead.discard(chunk)
            self._reserved.discard(chunk)
            if chunk in self._where:
                self._empty.append(self._where.pop(chunk))
                self._leaves(chunk)

    def restart(self) -> None:
        """Empties all blocks, ends all holds and returns to the start of the schedule."""
        self._where.clear()
        self._empty = deque(range(self.blocks))
        self._held.clear()
        self._ahead.clear()
        self._reserved.clear()
        self.rewind()

    def _leaves(self, chunk: int) -> None:
        if self._schedule is not None and (use := self._schedule.next_use(chunk, self._position)) != NEVER:
            self._present = min(self._present, use - 1, len(self._schedule.entries) - 1)

    def _advance(self, verb: Verb, chunks: tuple[int, ...]) -> None:
        if self._schedule is None:
            return
        if self._on_schedule:
            self._position += 1
            entries = self._schedule.entries
            if self._position < len(entries):
                expected = entries[self._position]
                self._on_schedule = expected.verb is verb and expected.chunks == chunks
            else:
                self._on_schedule = False
        self.counts.off_schedule += not self._on_schedule

    def _note_next_use(self, chunk: int) -> None:
        if self._schedule is not None:
            self._next_use[chunk] = self._schedule.next_use(chunk, self._position)

    def _check_room(self, chunks: tuple[int, ...]) -> None:
        missing = 0
        for chunk in chunks:
            if chunk not in self._where:
                missing += 1
        if not missing or missing <= len(self._empty):
            return
        kept = self._held.keys() | set(chunks)
        if missing > len(self._empty) + sum(chunk not in kept for chunk in self._where):
            weights = sorted(chunk for chunk in kept if chunk >= 0)
            gradients = sorted(gradients_of(chunk) for chunk in kept if chunk < 0)
            raise PlanError(
                f"all {self.blocks} blocks of the rCache are in use at once (weights of chunks {weights}, gradients of "
                f"{gradients}): {advice(len(kept))}"
            )

    def _victim(self, kept: Collection[int], position: int | None = None) -> int | None:
        """The chunk to evict, or None to take an empty block; of equal candidates, the one that entered first.

        Counts next uses from `position` on, which may lie ahead. If the only empty block is the one that gradients left
        last, their reduction may still read it: weights that the step does not use again are then evicted instead.
        """
        sending = len(self._empty) == 1 and self._empty[0] == self._sending
        if self._empty and not sending:
            return None
        candidates = [chunk for chunk in self._where if chunk not in kept]
        if self._schedule is None or not self._on_schedule:
            return None if sending else min(candidates, key=self._last_use.__getitem__, default=None)
        uses = self._next_use
        if position is not None:
            next_use = self._schedule.next_use
            uses = {c: use if (use := uses[c]) > position else next_use(c, position) for c in candidates}
            candidates.sort(key=self._next_use.__getitem__, reverse=True)
        farthest = max(candidates, key=uses.__getitem__, default=None)
        return None if sending and (farthest is None or uses[farthest] < NEVER) else farthest

    def _load(self, chunk: int, victim: int | None, *, ahead: bool) -> Load:
        if victim is None:
            block = self._empty.popleft()  # the one empty for longest: its last readers have most likely finished
        else:
            block = self._where.pop(victim)
            self._ahead.discard(victim)
            self._reserved.discard(victim)
            self._leaves(victim)
            self.counts.evictions += 1
        self._where[chunk] = block
        self._last_use.setdefault(chunk, self._clock)
        self._note_next_use(chunk)
        if chunk >= 0:
            self.counts.misses += 1
            self.counts.prefetched += ahead
            if ahead:
                self._ahead.add(chunk)
        elif ahead:
            self._reserved.add(chunk)
        return Load(chunk, block, victim, ahead)

    @property
    def upcoming(self) -> frozenset[int]:
        """The chunks of the next acquire; empty without a schedule or off schedule."""
        if self._schedule is None or not self._on_schedule:
            return frozenset()
        target = self._schedule.next_acquire(self._position)
        return frozenset() if target is None else self._schedule.wanted[target]

    def _look_ahead(self) -> list[Load]:
        """Returns the loads that can be made now without changing a later decision of Belady's policy."""
        loads: list[Load] = []
        if self._schedule is None or not self._on_schedule:
            return loads
        most = self._prefetch
        while max(len(self._ahead), len(self._reserved)) < most and (target := self._next_missing()) is not None:
            made = self._load_for(target)
            loads += made
            if not made:
                break
        return loads

    def _next_missing(self) -> int | None:
        """Position of the next acquire that needs a chunk that is not in a block; None if there is none.

        All acquires up to `_present` (NEVER: all of them) find their chunks in blocks. Only a chunk that leaves its
        block lowers `_present`.
        """
        assert self._schedule is not None
        target = self._schedule.next_acquire(max(self._position, self._present))
        while target is not None and self._where.keys() >= self._schedule.wanted[target]:
            self._present = target
            target = self._schedule.next_acquire(target)
        if target is None:
            self._present = NEVER
        return target

    def _load_for(self, target: int) -> list[Load]:
        """Returns the loads for the acquire at `target`, the first one that misses a chunk."""
        assert self._schedule is not None
        if not self._empty and all(c in self._held or self._next_use[c] < target for c in self._where):
            return []  # the common case: no chunk may leave its block
        held_then, freed = self._held.copy(), False
        for entry in self._schedule.entries[self._position + 1 : target + 1]:
            _apply(held_then, entry.verb, entry.chunks)
            freed |= entry.verb is RELEASE and entry.chunks[0] < 0
        loads: list[Load] = []
        for chunk in self._schedule.entries[target].chunks:
            if chunk in self._where:
                continue
            if len(self._ahead) >= self._prefetch:
                break
            if not self._empty and (freed or self._where.keys() <= held_then.keys()):
                break  # a block becomes empty before the use: evicting now would cost a miss
            victim = self._victim(held_then, target)
            if victim is not None and (victim in self._held or self._next_use[victim] < target):
                break  # the best victim is in use, or will be used before `target`
            loads.append(self._load(chunk, victim, ahead=True))
        return loads


def _apply(held: dict[int, int], verb: Verb, chunks: tuple[int, ...]) -> None:
    """Applies a request to the number of holds on each chunk."""
    for chunk in chunks:
        holds = held.get(chunk, 0)
        if verb is ACQUIRE:
            held[chunk] = holds + 1
        elif holds == 1:
            del held[chunk]
        elif holds:
            held[chunk] = holds - 1


def gathers(schedule: Schedule, blocks: int, backwards: int = 1) -> list[list[int]]:
    """Lists for each backward the weights that `CacheState` loads without prefetches, computed many times faster.

    The cache starts empty, except for the kept chunks that earlier steps leave in it. Weights stay from one backward to
    the next forward, until the update. Raises PlanError if the schedule holds more at once than there are blocks.
    """
    least = schedule.least_blocks()
    if blocks < least:
        raise PlanError(
            f"all {blocks} blocks of the rCache are in use at once, and a step needs {least}: {advice(least)}"
        )
    where: dict[int, int] = {}
    empty, sending = deque(range(blocks)), -1

    def play() -> list[int]:
        nonlocal sending
        loads, held = list[int](), set[int]()
        next_use = {chunk: schedule.holds.first[chunk] for chunk in where}
        for verb, chunks, following in schedule.holds.entries:
            if verb is RELEASE:
                held.difference_update(chunks)
                if chunks[0] < 0:
                    sending = where.pop(chunks[0])
                    empty.append(sending)
                continue
            held.update(chunks)
            for chunk, use in zip(chunks, following, strict=True):
                next_use[chunk] = use
                if chunk in where:
                    continue
                victim = None
                if not empty or (len(empty) == 1 and empty[0] == sending):
                    victim = max((c for c in where if c not in held), key=next_use.__getitem__, default=None)
                    if empty and (victim is None or next_use[victim] < NEVER):
                        victim = None
                where[chunk] = empty.popleft() if victim is None else where.pop(victim)
                if chunk >= 0:
                    loads.append(chunk)
        return loads

    for _ in range(WARM_UP_STEPS if schedule.kept else 0):
        play()
        for chunk in [chunk for chunk in where if chunk not in schedule.kept]:
            empty.append(where.pop(chunk))
    return [play() for _ in range(backwards)]
