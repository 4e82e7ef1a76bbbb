"""Searches for the fastest plan: chunk length, blocks of the rCache, and the tier of every chunk.

Owns the search. For each candidate chunk length and number of blocks, it simulates the step with the runtime's own
policy, fills the rest of the device with chunks, and keeps the fastest plan; at the end, stalls and hidden updates
count too. Pure: `trace` makes the step, `cost` has the formulas that `price` adds up, and `timeline` has the stalls.
Sources: Elixir v2, A.2 (chunk length by the bytes replaced), A.3 (least rCache), section 5 (device against rCache).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Literal

from elixir_moe.chunks.cache_policy import Schedule, gathers
from elixir_moe.chunks.ledger import Footprint, Ledger, footprint
from elixir_moe.chunks.packing import (
    FUSE_BELOW,
    Layout,
    alignment,
    best_chunk_numel,
    build_layout,
    bytes_together,
    elements_for_one,
)
from elixir_moe.chunks.param_spec import WIDE, ParamSpec, group_parameters
from elixir_moe.chunks.plan import Plan, Tier, size_text, size_text_up
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.chunks.residence import Residence
from elixir_moe.chunks.resolve import Placement
from elixir_moe.chunks.units import UnitSpec, chosen_units, units_moved, units_with
from elixir_moe.errors import PlanError
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.timeline import elapsed_seconds

_LENGTH_SPAN = 4
"""Longest chunk tried unless the user has a range, in multiples of the largest parameter: longer ones only make the
rCache coarser."""
_LENGTHS = 12
"""Number of chunk lengths tried for a large model, those with the least waste first."""
_PARAMETERS = 4000
"""A small model tries this many lengths divided by its number of parameters: the least waste is not always best."""
_STEADY_BACKWARD = 3
"""The backward of a step, counted from 1, from which on all backwards gather the same chunks."""
_ROUNDING = 1e-9
"""The part of a timeline below which a stall is only rounding."""
_LENGTHS_APART = 1.25
"""Ratio of two chunk lengths that are tried once stalls count."""
_DENSE = 48
"""If there are at most this many candidate numbers of blocks, all are tried; else a grid, refined near the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A planning problem: a step on a machine."""

    profile: Profile
    hardware: Hardware
    gpus: int
    capacity_bytes: int
    """Memory of one device, in bytes; with `Hardware.one_memory`, a rank's part of the shared memory."""
    host_bytes: int
    """Host memory of one rank, in bytes; 0 with `Hardware.one_memory`."""
    disk_bytes: int | None = 0
    """Disk space of one rank, in bytes; None if the optimizer cannot update chunks on disk."""
    moments: int = 2
    """fp32 values the optimizer keeps per element."""
    overlaps_updates: bool = True
    """Whether updates in host memory overlap with the next forward, as Adam's do where the host runs ahead."""
    updates_in_backward: bool = False
    """Whether such updates begin in the last backward of a step, as under `ShardedOptimizer.update_in_backward`."""
    over_gloo: bool = False
    """Whether reductions run over gloo."""
    imbalance: float = 1.0
    """Routed rows of the busiest rank, relative to an even share."""
    accumulation: int = 1
    """Micro-batches of a step."""
    batches_per_pass: int | None = 1
    """How many of them pass each layer together; None lets `solve` choose. See `passing`."""
    chunk_numel: tuple[int, int] | None = None
    """The shortest and the longest chunk to try; None tries from the largest parameter to `_LENGTH_SPAN` times that."""
    kept_regions: int = 0
    """Number of checkpointed regions, from the first on, whose inputs are in host memory; see `keeping`."""

    def __post_init__(self) -> None:
        assert not (self.hardware.one_memory and self.host_bytes), "a shared memory is counted once"

    def keeping(self, most: float) -> "Task":
        """Returns this problem with the inputs of up to `most` checkpointed regions in host memory.

        Activations then take less of the device, and less host memory is left.
        """
        return self._with_activations(int(min(most, len(self.profile.kept))), self.together)

    def passing(self, together: int | None) -> "Task":
        """Returns this problem with the activations of up to `together` micro-batches, which pass layers together.

        None lets `solve` choose.
        """
        if together is None:
            return replace(self, batches_per_pass=None)
        return self._with_activations(self.kept_regions, min(together, self.accumulation))

    def _with_activations(self, regions: int, together: int) -> "Task":
        """Returns this problem with the inputs of `regions` in host memory, for a pass of `together` micro-batches."""
        if (regions, together) == (self.kept_regions, self.batches_per_pass):
            return self
        profile = replace(self.profile, activation_bytes=self.profile.peak_bytes(regions, together))
        there = replace(self, profile=profile, kept_regions=regions, batches_per_pass=together)
        return replace(there, host_bytes=self.host_bytes + self.kept_bytes - there.kept_bytes)

    @property
    def together(self) -> int:
        """Micro-batches that pass each layer together; 1 if that is to be chosen."""
        return self.batches_per_pass or 1

    @property
    def dials(self) -> list[int]:
        """The numbers of micro-batches to try that may pass together, descending: all, and the powers of 2 below."""
        powers = [1 << power for power in range(self.accumulation.bit_length())]
        return sorted({self.accumulation, *powers}, reverse=True)

    @property
    def passes(self) -> int:
        """Backwards of a step; with more than one, gradients are summed in fp32."""
        return -(-self.accumulation // self.together)

    def seconds(self, moved: cost.Traffic) -> cost.Seconds:
        """The time of a step with the traffic `moved`."""
        return cost.seconds(
            self.profile, moved, self.hardware, self.gpus, self.imbalance, self.accumulation, self.together
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of the inputs that are in host memory."""
        return self.together * sum(self.profile.kept[: self.kept_regions])

    @property
    def allowed_bytes(self) -> int:
        """U_allowed: device memory the library may hold, in bytes."""
        surplus = cost.activations(self.profile, self.imbalance) - self.profile.activation_bytes
        return cost.allowed_bytes(self.profile, self.capacity_bytes) - int(cost.F_ALLOC * cost.F_FRAG * surplus)

    def held_bytes(self, size: Footprint) -> tuple[int, int]:
        """(device bytes, host bytes) that the library holds, accumulators included if a step needs them."""
        return size.memory_bytes(self.passes)

    def missing_bytes(self, device: int, host: int) -> dict[Tier, int]:
        """Returns {tier: bytes that are missing} for a plan that needs these bytes; 0 or less where there are enough.

        With `Hardware.one_memory`, the library's host bytes, such as buffers of the disk, count against the device.
        """
        if self.hardware.one_memory:
            both = device + host - self.allowed_bytes
            return {Tier.DEVICE: both, Tier.HOST: min(both, 0)}
        return {Tier.DEVICE: device - self.allowed_bytes, Tier.HOST: host - self.host_bytes}

    def footprint(self, plan: Plan, layout: Layout) -> Footprint:
        return footprint(plan, layout, moments=self.moments, over_gloo=self.over_gloo)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCandidate:
    """A plan and its cost."""

    task: Task
    """The problem, with the plan's number of regions whose inputs are in host memory."""
    plan: Plan
    layout: Layout
    size: Footprint
    moved: cost.Traffic
    seconds: cost.Seconds
    loads: tuple[int, ...]
    """Chunks gathered into the rCache in a step, once per gather."""

    def chunks_in(self, tier: Tier) -> int:
        return sum(self.plan.tier_of(self.layout, chunk) is tier for chunk in self.layout.chunks)


def solve(task: Task, packings: "Packings | None" = None) -> PlanCandidate:
    """Finds the fastest plan that fits; `packings` may come from a problem with the same step, on any machine.

    Plans without `Plan.whole_layers` are tried only at the chunk length of the fastest plan, and host checkpoints only
    where not all weights stay gathered: the memory might serve longer chunks, with less waste. The host time of units
    does not decide where chunks are placed: more chunks on the device are taken to be faster.

    Raises:
        PlanError: no plan fits; the message has the missing bytes, the tier and a remedy.
    """
    if task.batches_per_pass != 1:
        return _with_passes(task, packings)
    return _fastest(task, packings)


def _fastest(task: Task, packings: "Packings | None") -> PlanCandidate:
    """Finds the fastest plan for passes of `Task.together` micro-batches."""
    found: dict[int, PlanCandidate] = {}
    failed: list[_LengthSearch] = []
    packings = packings or Packings(task)
    packed = [packings.at(length) for length in packings.lengths]
    none, *others = _kept_counts(task)

    def search(regions: int) -> None:
        there = task.keeping(regions)
        searches = [search for packing in packed for search in _searches(there, packing)]
        best: PlanCandidate | None = None
        for search in searches:
            best = min(
                (candidate for candidate in (best, search.best(best)) if candidate is not None), key=_rank, default=None
            )
        if best is not None:
            found[regions] = best
        else:
            failed.extend(searches)

    search(none)
    if others and not (none in found and found[none].plan.rcache_blocks == "all" and not found[none].plan.offloaded):
        search(others[0])
        if not found or min(found, key=lambda regions: _rank(found[regions])) != none:
            for regions in others[1:]:
                search(regions)
    if not found:
        raise PlanError(_why_not(task, [short for search in failed for short in search.shortages()]))
    best = min(found.values(), key=_rank)
    assert best.plan.chunk_numel is not None, "a search gives it"
    filled = packings.filled(best.plan.chunk_numel)
    for other in _searches(best.task, filled):
        best = min((candidate for candidate in (best, other.best(best)) if candidate is not None), key=_rank)
    best = min(best, with_sharing(best), key=_rank)
    best = _least_with_stall(best, packings)
    precision = next((p.key.precision for p in task.profile.params if p.key.precision.is_narrow), WIDE)
    of_passes = task.together if task.accumulation > 1 else None
    plan = replace(best.plan, master=precision.master, moments=precision.moments, batches_per_pass=of_passes)
    return replace(best, plan=plan)


def _with_passes(task: Task, packings: "Packings | None") -> PlanCandidate:
    """Finds the fastest plan, and how many micro-batches pass together unless that is given.

    All are tried, then half as many, as long as that helps; and the plain loop, which a plan that keeps all weights
    gathered runs whatever the number is. `packings` are those of the plain loop.
    """
    given = task.batches_per_pass is not None
    best: PlanCandidate | None = None
    why: PlanError | None = None
    for together in [task.together] if given else task.dials[:-1]:
        try:
            found = _fastest(task.passing(together), None)
        except PlanError as error:
            why = error
            continue
        if best is not None and _rank(found) >= _rank(best):
            break
        best = found
    try:
        plain = _fastest(task.passing(1), packings)
    except PlanError as error:
        why = why if given else error
    else:
        if (not given or not plain.plan.gathers_again(plain.layout)) and (best is None or _rank(plain) <= _rank(best)):
            best = plain
    if best is None:
        assert why is not None, "nothing was tried"
        raise why
    return best


def _least_with_stall(best: PlanCandidate, packings: "Packings") -> PlanCandidate:
    """Returns the fastest plan once stalls and hidden updates count, without which `best` was found.

    A block may hide more than a chunk on the device saves: it lets fetches run further ahead of compute. Plans are
    tried in the order of what they take at least, without stalls and with all updates in host memory hidden; before
    them, of each packing the plan with the most blocks. A plan is not played further than the fastest one takes.
    """
    best = with_stall(best)
    if not best.seconds.stall and not best.seconds.hidden_update:
        return best
    task, plan = best.task, best.plan
    assert plan.chunk_numel is not None, "a search gives it"
    own = (packings.at if plan.whole_layers else packings.filled)(plan.chunk_numel)
    tried = dict.fromkeys((own, *map(packings.at, _apart(packings.lengths))))
    searches = [
        search
        for packing in tried
        for search in _searches(task, packing)
        if search.values_on_disk == plan.values_on_disk
    ]
    of_searches = [[min(other, with_sharing(other), key=_rank) for other in search.fullest()] for search in searches]
    others = sorted((other for found in of_searches for other in found), key=_least_seconds)
    timed = Timed(task.profile.step_order)
    for other in [*(found[-1] for found in of_searches if found), *others]:
        if _least_seconds(other) < best.seconds.step and other.plan != best.plan:
            best = min(best, with_stall(other, best.seconds.step, timed), key=_rank)
    return best


class Timed:
    """`StepOrder.timed`, which is not repeated while of a packing the same chunks are used in place."""

    def __init__(self, step_order: StepOrder) -> None:
        self._step_order = step_order
        self._last: dict[tuple[int, bool], tuple[tuple[Residence, ...], tuple[Schedule, list[int]]]] = {}

    def __call__(self, layout: Layout) -> tuple[Schedule, list[int]]:
        packing, residences = (layout.chunk_numel, layout.whole_layers), tuple(c.residence for c in layout.chunks)
        if packing not in self._last or self._last[packing][0] != residences:
            self._last[packing] = residences, self._step_order.timed(layout)
        return self._last[packing][1]


def _least_seconds(candidate: PlanCandidate) -> float:
    """Returns the least seconds of a step whose stall and hidden updates are not known."""
    hidden = candidate.seconds.host_update if candidate.task.overlaps_updates else 0.0
    return candidate.seconds.step - hidden


def _apart(lengths: Sequence[int]) -> Iterator[int]:
    """Yields lengths that differ by a quarter or more."""
    last = 0
    for length in sorted(lengths):
        if length >= _LENGTHS_APART * last:
            last = length
            yield length


def with_stall(candidate: PlanCandidate, most: float = math.inf, timed: "Timed | None" = None) -> PlanCandidate:
    """Returns the candidate with the stall of its step and the updates that the next forward hides.

    Unchanged if the compute between its requests is unknown. A step is not played further than `most` seconds; if it is
    found to take more, its stall is infinite.
    """
    task, layout, seconds = candidate.task, candidate.layout, candidate.seconds
    profile, plan, backwards = task.profile, candidate.plan, task.passes
    if not profile.work or not (seconds.fetch or seconds.disk):
        return candidate
    too_slow = replace(candidate, seconds=replace(seconds, stall=math.inf))
    schedule, positions = (timed or profile.step_order.timed)(layout)
    near = cost.near_chunks(plan, layout)
    played = min(backwards, _STEADY_BACKWARD)
    each = cost.compute_seconds(profile, positions, task.hardware, (seconds.compute + seconds.units) / backwards)
    fetches = cost.fetch_seconds(plan, layout, task.hardware, task.gpus)
    elapsed = partial(elapsed_seconds, schedule, each, fetches, plan.blocks(layout), near=near)
    overlaps = task.overlaps_updates and seconds.host_update > 0
    spare = most - _least_seconds(candidate)  # for stalls and updates that are not hidden
    share = 1.0 if near else played / backwards
    updated = elapsed(played, most=(seconds.overlapped + spare) * share)
    if updated == math.inf:
        return too_slow
    if near and backwards > played:  # only the first backward fetches what is near
        whole = updated + (backwards - played) * (updated - elapsed(played - 1))
    else:
        whole = updated * backwards / played
    stall, hidden = whole - seconds.overlapped, 0.0
    if overlaps:
        requested = (chunk for entry in schedule.entries for chunk in entry.chunks)
        updates = cost.update_seconds(plan, layout, requested, seconds.host_update)
        spare -= max(stall, 0.0)
        shown = updated + spare if spare < seconds.host_update else math.inf
        overlapped = elapsed(played, updates, in_backward=task.updates_in_backward, most=shown)
        if overlapped == math.inf:
            return too_slow
        hidden = seconds.host_update - (overlapped - updated)
    stall, hidden = (value if value > _ROUNDING * seconds.step else 0.0 for value in (stall, hidden))
    return replace(candidate, seconds=replace(seconds, stall=stall, hidden_update=hidden))


def with_sharing(candidate: PlanCandidate) -> PlanCandidate:
    """Returns the candidate with `Plan.shared_frozen`; unchanged if the ranks of a frozen chunk span several hosts."""
    plan, layout, hardware = candidate.plan, candidate.layout, candidate.task.hardware
    if not (plan.offloaded and plan.scatter):
        return candidate
    turned = replace(plan, shared_frozen=True)
    groups = {chunk.key.ranks for chunk in layout.chunks if turned.shares(chunk, plan.tier_of(layout, chunk))}
    if not groups or any(len({rank // hardware.gpus_per_node for rank in ranks}) > 1 for ranks in groups):
        return candidate
    return price(candidate.task, turned, layout, candidate.loads, candidate.size, candidate.moved.units)


def _kept_counts(task: Task) -> list[int]:
    """Returns the numbers of checkpointed regions to try: none, the most that host memory holds, and half of them."""
    held = [task.together * nbytes for nbytes in accumulate(task.profile.kept)]
    most = bisect_right(held, task.host_bytes)
    return list(dict.fromkeys([0, most, most // 2]))


def device_bytes_for(task: Task, packings: "Packings | None" = None) -> int:
    """Returns the device memory that a plan needs, given the task's host memory and disk; `packings` as for `solve`.

    The result is at most `Task.allowed_bytes` exactly if `solve` finds a plan. It is then the memory of a plan, and
    otherwise a lower bound for all plans.
    """
    least: list[int] = []
    packings = packings or Packings(task)
    bounds = [_Packing(task, length, bound=True) for length in packings.lengths]
    for regions in _kept_counts(task):
        there = task.keeping(regions)
        least.append(_device_bytes_for(there, bounds, packings) + task.allowed_bytes - there.allowed_bytes)
        if least[-1] <= task.allowed_bytes:
            break
    return min(least)


def _device_bytes_for(task: Task, bounds: "Sequence[_Packing]", packings: "Packings") -> int:
    """Computes `device_bytes_for` with the task's number of kept regions; `bounds` are the packings without a step."""
    known = sorted((_least_device_bytes(task, packing), packing.chunk_numel) for packing in bounds)
    needed = [nbytes for nbytes, _ in known if nbytes > task.allowed_bytes][:1]
    for bound, length in known:
        if bound <= task.allowed_bytes:
            needed.append(_least_device_bytes(task, packings.at(length)))
            if needed[-1] <= task.allowed_bytes:
                return needed[-1]
    return min(needed)


def price(
    task: Task,
    plan: Plan,
    layout: Layout | None = None,
    loads: Sequence[int] | None = None,
    size: Footprint | None = None,
    units: int | None = None,
) -> PlanCandidate:
    """Prices a plan, whether it fits or not; arguments after `plan` are computed unless given.

    Given `loads`, the price is without the stall. Raises PlanError if chunks are too short or the rCache is too small.
    """
    if layout is None:
        layout = task.profile.step_order.counted(plan.layout(task.profile.params))
    together = task.together if plan.batches_per_pass is None else plan.batches_per_pass
    task = task.passing(together if plan.gathers_again(layout) else 1).keeping(plan.most_host_checkpoints)
    stalls = loads is None
    if loads is None:
        schedule = task.profile.step_order.schedule(layout, task.together)
        layout = replace(layout, open_gradients=schedule.open_gradients())
        loads = gathered(schedule, plan.blocks(layout), task.passes)
    if units is None:
        units = units_moved(chosen_units(task.profile.parts, layout), layout)
    moved = cost.traffic(
        plan,
        layout,
        loads,
        task.moments,
        over_gloo=task.over_gloo,
        kept_bytes=task.accumulation * task.kept_bytes // task.together,
        units=units,
        passes=task.passes,
    )
    candidate = PlanCandidate(
        task=task,
        plan=plan,
        layout=layout,
        size=task.footprint(plan, layout) if size is None else size,
        moved=moved,
        seconds=task.seconds(moved),
        loads=tuple(loads),
    )
    return with_stall(candidate) if stalls else candidate


def gathered(schedule: Schedule, blocks: int, backwards: int = 1) -> list[int]:
    """Lists the chunks whose weights are gathered in a step, once per gather; prefetches only move gathers.

    All backwards after `_STEADY_BACKWARD` gather the same chunks as that one.
    """
    found = gathers(schedule, blocks, min(backwards, _STEADY_BACKWARD))
    return [chunk for each in (*found, *(backwards - len(found)) * found[-1:]) for chunk in each]


def shortage(task: Task, size: Footprint, more: int = 0) -> dict[Tier, int]:
    """Returns {tier: missing bytes} with `more` bytes needed on the device; empty if the plan fits."""
    device, host = task.held_bytes(size)
    missing = {**task.missing_bytes(device + more, host), Tier.DISK: size.disk_bytes - (task.disk_bytes or 0)}
    return {tier: nbytes for tier, nbytes in missing.items() if nbytes > 0}


def chunk_lengths(params: Sequence[ParamSpec], within: tuple[int, int] | None = None) -> list[int]:
    """Returns the chunk lengths to try: those that consecutive parameters fill, and the shortest that fuses a group.

    A length between two candidates packs like the shorter one and only makes every block longer. So the shortest length
    of `within`, the user's range, is a candidate, too.

    Raises:
        PlanError: the largest parameter is longer than the range allows.
    """
    movable = [p for p in params if not p.tied]
    together = bytes_together(params)
    numels = [-(-p.numel // elements_for_one(p.key, together)) for p in movable]
    largest = max(numels, default=1)
    shortest, longest = (largest, largest * _LENGTH_SPAN) if within is None else (max(largest, within[0]), within[1])
    if within is not None and longest < largest:
        given = longest if longest == within[0] else within
        raise PlanError(
            f"chunk_numel={given}: parameter {movable[numels.index(largest)].name!r} needs chunks of at least "
            f"{largest} elements: allow at least that, leave chunk_numel out, or cut the parameter with em.tile"
        )
    single = {len(key.ranks) == 1 for key in group_parameters(params)}
    defaults = {best_chunk_numel(params, stay=stay) for stay in ((False, True) if len(single) > 1 else (False,))}
    best = {length for length in defaults if within is None or shortest <= length <= longest}
    lengths = {shortest, *best}
    for key, indices in group_parameters(movable).items():
        align = alignment(key) // elements_for_one(key, together)
        sizes = [numels[i] for i in indices]
        fused = int(sum(sizes) / FUSE_BELOW) + 1
        if shortest < fused <= longest:
            lengths.add(fused)
        for first in range(len(sizes)):
            used = 0
            for size in sizes[first:]:
                used = -(-used // align) * align + size
                if used > longest:
                    break
                if used > shortest:
                    lengths.add(used)
    most = max(_LENGTHS, _PARAMETERS // max(len(movable), 1))
    if len(lengths) <= most:
        return sorted(lengths)
    return sorted({*sorted(lengths, key=lambda n: (_space(numels, n), n))[: most - 3], shortest, *best})


def _space(sizes: Sequence[int], length: int) -> int:
    """Returns the elements of all chunks in a rough packing of `sizes`."""
    chunks, used = 1, 0
    for size in sizes:
        if used + size > length:
            chunks, used = chunks + 1, 0
        used += size
    return chunks * length


@dataclass(frozen=True, slots=True)
class _Held:
    """The memory of one rank with a given number of chunks on the device, for any number of blocks."""

    device_bytes: int
    """Device memory without the blocks."""
    host_bytes: int
    disk_chunks: int
    """Number of chunks on disk: the fewest that make the rest fit in host memory; 0 if the disk is too small for them.
    """
    disk_short_bytes: int | None
    """Bytes by which the disk is too small for these chunks; None if no disk would be large enough."""
    cached: int
    """Blocks for the weights of all cached chunks, and for all gradients that have a block at once."""
    block_bytes: int

    def missing(self, task: Task, blocks: int) -> dict[Tier, int]:
        """Returns {tier: missing bytes}, 0 or less if there are enough; on disk, those that would relieve the host."""
        device = self.device_bytes + min(blocks, self.cached) * self.block_bytes
        short = task.missing_bytes(device, self.host_bytes)
        return short if self.disk_short_bytes is None else {**short, Tier.DISK: self.disk_short_bytes}

    def most_blocks(self, task: Task) -> float:
        """The most blocks that fit; -1 if memory is short even without blocks."""
        missing = self.missing(task, 0)
        if max(missing.values()) > 0:
            return -1
        left = -missing[Tier.DEVICE]
        return math.inf if self.cached * self.block_bytes <= left else left // self.block_bytes


@dataclass(frozen=True)
class _Stepped:
    """A simulated step."""

    one: Schedule
    """The requests of one micro-batch."""
    replay_two: Callable[[], Schedule]
    """Returns the requests of two that pass together; of one in the plain loop."""
    units: Sequence[UnitSpec | None]
    moved: int
    """Units whose chunks are gathered together."""

    @cached_property
    def two(self) -> Schedule:
        return self.replay_two()

    def runs_in(self, blocks: int) -> bool:
        """Whether so many blocks suffice. Two micro-batches hold at least what one does."""
        return self.one.least_blocks() <= blocks and self.two.least_blocks() <= blocks


class _Packing:
    """The parameters in chunks of one length, and the step with these chunks, in any amount of memory."""

    def __init__(self, task: Task, chunk_numel: int, *, bound: bool = False, whole_layers: bool = True) -> None:
        """With `bound`, the step needs one block and none for gradients: a lower bound of its memory."""
        self.chunk_numel, self._task = chunk_numel, task
        self.bound = bound
        """Whether the step is not simulated."""
        self.layout = build_layout(task.profile.params, chunk_numel, whole_layers=whole_layers)
        away = None if bound else self._stepped(self.layout)
        if away is not None:
            self.layout = replace(self.layout, open_gradients=away.two.open_gradients())
        self.in_memory = cache(self._by_device_chunks)
        """Returns the memory for each number of chunks on the device, from none to all, without chunks on disk; with
        values on the device or without."""
        self._in_place = list(accumulate((c.shards == 1 for c in reversed(self.layout.chunks)), initial=0))
        """Chunks used in place for each number of chunks on the device."""
        self._steps = {} if away is None else {0: away}
        """By number of chunks used in place."""
        self._gathered: dict[tuple[int, int, int, int], list[int]] = {}

    def placement(self, *, values_on_disk: bool = False, values_on_device: bool = False) -> Placement:
        """Returns a placement of all chunks in host memory; the arguments are fields of the plan."""
        task, tiers = self._task, [Tier.HOST] * len(self.layout.chunks)
        ledger = Ledger(
            self.layout,
            tiers,
            moments=task.moments,
            over_gloo=task.over_gloo,
            values_on_disk=values_on_disk,
            values_on_device=values_on_device,
        )
        return Placement(ledger, len(tiers), len(tiers))

    def _by_device_chunks(self, values_on_device: bool) -> list[_Held]:
        placement, found = self.placement(values_on_device=values_on_device), []
        for on_device in range(len(self.layout.chunks), -1, -1):
            placement.put(on_device, on_device)
            cached = placement.ledger.cached
            blocks = cached + (self.layout.open_gradients or 0) if cached else 0
            held = self._task.held_bytes(placement.ledger.footprint())
            found.append(_Held(*held, 0, None, blocks, placement.ledger.block_bytes))
        return found

    def _stepped(self, layout: Layout, of: "_Stepped | None" = None) -> "_Stepped":
        """The step of a layout.

        `of` is that of the layout without chunks in place. Its requests to the other chunks are those of this layout,
        unless a chunk that leaves the rCache changes the units of others. Turns of two micro-batches may end elsewhere.
        """
        profile, left = self._task.profile, {chunk.index for chunk in layout.cached}
        units = chosen_units(profile.parts, layout)
        params = {slot.param for chunk in layout.cached for slot in chunk.slots}
        alike = of is not None and units_with(units, params) == units_with(of.units, params)
        one = of.one.of_chunks(left) if of is not None and alike else profile.schedule(layout)
        two = partial(profile.step_order.schedule, layout, 2) if self._task.together > 1 else lambda: one
        return _Stepped(one, two, units, units_moved(units, layout))

    def step(self, device_chunks: int) -> "_Stepped":
        """A step with `device_chunks` chunks on the device."""
        assert not self.bound, "a bound does not simulate the step"
        in_place = self._in_place[device_chunks]
        if in_place not in self._steps:
            plan = Plan.offload(rcache_blocks="all", device_chunks=device_chunks)
            self._steps[in_place] = self._stepped(plan.place(self.layout), self._steps[0])
        return self._steps[in_place]

    def gathered(self, task: Task, device_chunks: int, blocks: int) -> list[int]:
        """The chunks gathered in a step with `device_chunks` chunks on the device.

        Each further micro-batch of a pass is taken to gather what the second one does: nothing, if all weights between
        two turns have blocks.
        """
        key = self._in_place[device_chunks], blocks, task.passes, task.together
        if key not in self._gathered:
            step = self.step(device_chunks)
            found = gathered(step.two, blocks, task.passes)
            if task.together > 2:
                again = Counter(found) - Counter(gathered(step.one, blocks, task.passes))
                found += (task.together - 2) * list(again.elements())
            self._gathered[key] = found
        return self._gathered[key]


class Packings:
    """The parameters in chunks of every length to try. All problems with the same step and number of ranks can share
    one, on any machine, if they all have one pass a step or all have several, and all or none the plain loop."""

    def __init__(self, task: Task) -> None:
        self.lengths = chunk_lengths(task.profile.params, task.chunk_numel)
        self.at = cache(partial(_Packing, task))
        """Returns the packing of a chunk length; made once."""
        self.filled = cache(partial(_Packing, task, whole_layers=False))
        """Returns the packing of a chunk length without `Plan.whole_layers`; made once."""


def _searches(task: Task, packing: _Packing) -> "Iterator[_LengthSearch]":
    """Yields the searches at one chunk length: without values on the device, with them, and with values on disk if
    chunks must go there."""
    first = _LengthSearch(task, packing)
    yield first
    if not task.hardware.one_memory and any(chunk.key.trainable for chunk in packing.layout.chunks):
        yield _LengthSearch(task, packing, values_on_device=True)
    if first.needs_disk:
        yield _LengthSearch(task, packing, values_on_disk=True)


def _least_device_bytes(task: Task, packing: _Packing) -> int:
    return min(search.least_device_bytes() for search in _searches(task, packing))


class _LengthSearch:
    """The search at one chunk length."""

    def __init__(
        self, task: Task, packing: _Packing, *, values_on_disk: bool = False, values_on_device: bool = False
    ) -> None:
        """The last arguments are fields of the plans to try."""
        self._task, self._packing = task, packing
        self.values_on_disk, self.values_on_device = values_on_disk, values_on_device
        self._layout, self._in_memory = packing.layout, packing.in_memory(values_on_device)
        self.needs_disk = task.disk_bytes is not None and self._in_memory[0].host_bytes > task.host_bytes
        """Whether host memory is too small and a disk is available."""
        self._fewest, self._full = (
            packing.placement(values_on_disk=values_on_disk, values_on_device=values_on_device) for _ in range(2)
        )
        self._held = cache(self._spilled)
        """Returns the memory for a number of chunks on the device."""
        chunks = len(self._layout.chunks)
        self._counts = [chunks] if task.hardware.one_memory and task.disk_bytes is None else list(range(chunks + 1))
        """Numbers of chunks on the device for which another tier can hold the others."""
        self._most_blocks: list[float] = [-1] * (chunks + 1)
        for count in self._counts:
            if self._in_memory[count].device_bytes <= task.allowed_bytes:
                self._most_blocks[count] = self._held(count).most_blocks(task)
        self._found: dict[int, PlanCandidate | None] = {}

    def _spilled(self, device_chunks: int) -> _Held:
        """Returns the memory with `device_chunks` chunks on the device, and as few on disk as host memory requires.

        In order of first use, chunks in host memory come first, then those on disk, then those on the device. If the
        disk is too small, no chunk is on disk, and host bytes are the least that the disk allows. With
        `Hardware.one_memory`, all chunks that are not on the device are on disk.
        """
        task, held = self._task, self._in_memory[device_chunks]
        on_device = len(self._layout.chunks) - device_chunks
        if task.hardware.one_memory and on_device:
            assert task.disk_bytes is not None, "without a disk, all chunks are on the device"
            self._fewest.put(0, on_device)
            spilled = self._fewest.ledger.footprint()
            _, host = task.held_bytes(spilled)
            lacking = max(0, spilled.disk_bytes - task.disk_bytes)
            return replace(held, host_bytes=host, disk_chunks=on_device, disk_short_bytes=lacking)
        if held.host_bytes <= task.host_bytes or task.disk_bytes is None:
            return held
        size = self._fewest.spill(on_device, task.host_bytes, task.passes)
        if size is not None and size.disk_bytes <= task.disk_bytes:
            _, host = task.held_bytes(size)
            return replace(held, host_bytes=host, disk_chunks=on_device - self._fewest.on_disk, disk_short_bytes=0)
        _, host = task.held_bytes(self._full.fill(on_device, task.disk_bytes))
        short = None if size is None else size.disk_bytes - task.disk_bytes
        return replace(held, host_bytes=min(held.host_bytes, host), disk_short_bytes=short)

    def best(self, known: PlanCandidate | None = None) -> PlanCandidate | None:
        """Finds the fastest plan with this chunk length that fits; None if there is none, or `known` is faster."""
        for blocks in self._grid():
            self._at(blocks, known)
        while True:
            tried = set(self._found)
            fits = {blocks: candidate for blocks, candidate in self._found.items() if candidate is not None}
            if not fits:
                return None
            winner = min(fits, key=lambda blocks: _rank(fits[blocks]))
            for blocks in self._near(winner):
                self._at(blocks, known)
            if set(self._found) == tried:
                return fits[winner]

    def _range(self) -> range:
        """The numbers of blocks that a step may need and that fit."""
        least = self._packing.step(len(self._layout.chunks)).two.least_blocks()
        return range(least, int(min(self._layout.most_blocks, max(self._most_blocks))) + 1)

    def _grid(self) -> Sequence[int]:
        blocks = self._range()
        if len(blocks) <= _DENSE:
            return blocks
        return sorted(
            {self._packing.step(0).two.least_blocks(), *(blocks[(len(blocks) - 1) * i // 16] for i in range(17))}
        )

    def fullest(self) -> Iterator[PlanCandidate]:
        """Yields plans with more and more blocks, each with as many chunks on the device as fit."""
        blocks = self._range()
        steps = sorted({0, 1, *(n << power for power in range(len(blocks).bit_length()) for n in (2, 3))})
        for count in (blocks[more] for more in steps if more < len(blocks)):
            self._at(count, None)
            if (found := self._found[count]) is not None:
                yield found

    def _near(self, blocks: int) -> Iterator[int]:
        """Yields the midpoints between the best number of blocks and its neighbors among those tried."""
        tried = sorted(self._found)
        for low, high in pairwise(tried):
            if high - low > 1 and low <= blocks <= high:
                yield (low + high) // 2

    def _at(self, blocks: int, known: PlanCandidate | None) -> None:
        """Tries this number of blocks, with as many chunks on the device as fit; skips it if it cannot beat `known`.

        A step that gathers each chunk once is a lower bound of its time, known without a simulation.
        """
        if blocks in self._found:
            return
        self._found[blocks] = None
        fits = [count for count, most in enumerate(self._most_blocks) if blocks <= most]
        count = next((count for count in reversed(fits) if self._packing.step(count).runs_in(blocks)), None)
        if count is None:
            return
        step, held = self._packing.step(count), self._held(count)
        cached: int | Literal["all"] = "all" if blocks >= held.cached else blocks
        if count == len(self._layout.chunks):
            plan = Plan(scatter=True, offloaded=False, rcache_blocks=cached, chunk_numel=self._packing.chunk_numel)
        else:
            plan = Plan.offload(
                rcache_blocks=cached,
                device_chunks=count,
                disk_chunks=held.disk_chunks,
                values_on_disk=self.values_on_disk and held.disk_chunks > 0,
                values_on_device=self.values_on_device,
                chunk_numel=self._packing.chunk_numel,
            )
        plan = replace(plan, host_checkpoints=self._task.kept_regions, whole_layers=self._layout.whole_layers)
        layout = replace(plan.place(self._layout), open_gradients=step.two.open_gradients())
        if self._task.together > 1 and not plan.gathers_again(layout):
            return  # em.accumulate then runs the plain loop
        priced = partial(price, self._task, plan, layout, size=self._task.footprint(plan, layout), units=step.moved)
        if known is None or _rank(priced(step.one.must_load)) < _rank(known):
            self._found[blocks] = priced(self._packing.gathered(self._task, count, plan.blocks(layout)))

    def shortages(self) -> Iterator[dict[Tier, int]]:
        """Yields the missing bytes with the fewest blocks, for each number of chunks on the device."""
        chunks, one_memory = len(self._layout.chunks), self._task.hardware.one_memory
        for count in self._counts:
            held = self._in_memory[count]
            if one_memory or self._task.disk_bytes or held.device_bytes <= self._task.allowed_bytes:
                held = self._held(count)
            if self._packing.bound:
                yield held.missing(self._task, 1)
                continue
            missing = held.missing(self._task, self._packing.step(chunks if count == chunks else 0).two.least_blocks())
            if missing[Tier.DEVICE] > 0 >= held.missing(self._task, 1)[Tier.DEVICE]:
                missing = held.missing(self._task, self._packing.step(count).two.least_blocks())  # if some are in place
            yield missing

    def least_device_bytes(self) -> int:
        """Returns the least device memory with which host memory and disk are large enough."""
        missing = [s[Tier.DEVICE] for s in self.shortages() if s[Tier.HOST] <= 0 and s.get(Tier.DISK, 0) <= 0]
        return self._task.allowed_bytes + min(missing)


def _why_not(task: Task, shortages: Sequence[dict[Tier, int]]) -> str:
    """Returns the error message: missing bytes, their tier, and the changes that make a plan fit, smallest first."""
    one_memory = task.hardware.one_memory
    there = [s for s in shortages if s[Tier.HOST] <= 0 and s.get(Tier.DISK, 0) <= 0]
    device = min((s[Tier.DEVICE] for s in there), default=None)
    host = None if one_memory else min((s[Tier.HOST] for s in shortages if s[Tier.DEVICE] <= 0), default=None)
    disk = min((s[Tier.DISK] for s in shortages if s[Tier.DEVICE] <= 0 and Tier.DISK in s), default=None)
    answers: list[tuple[int, str, str]] = []
    if host is not None:
        change = f"give each rank {size_text_up(host)} more host memory"
        if disk is not None:
            change += f", or {size_text_up(disk)} more on a disk for shards"
        answers.append((host, "host memory", change))
    if device is not None:
        change = f"give the device {size_text_up(int(device / cost.F_ALLOC) + 2)} more"
        if one_memory and disk is not None:
            change += f", or {size_text_up(disk)} more on a disk for shards"
        held, freed = cost.activations(task.profile, task.imbalance), int(device / (cost.F_ALLOC * cost.F_FRAG)) + 2
        if freed <= held:
            change += (
                f", or free {size_text_up(freed)} of the {size_text(held)} of activations by a smaller batch or "
                "shorter sequences"
            )
        answers.append((device, "memory of device and host" if one_memory else "device memory", change))
    start = f"no plan fits {task.gpus} x {task.hardware.name}:"
    if not answers:  # more memory of a single tier would not help
        both = min(shortages, key=lambda s: (s[Tier.DEVICE], s[Tier.HOST]))
        device, host = both[Tier.DEVICE], both[Tier.HOST]
        return (
            f"{start} {size_text_up(device)} too little device memory and {size_text_up(host)} too little host memory; "
            f"give the device {size_text_up(int(device / cost.F_ALLOC) + 2)} more and each rank "
            f"{size_text_up(host)} more host memory"
        )
    answers.sort()
    changes = ", or ".join(change for *_, change in answers)
    return f"{start} {size_text_up(answers[0][0])} too little {answers[0][1]}; {changes}"


def _rank(candidate: PlanCandidate) -> tuple[float, int]:
    return candidate.seconds.step, candidate.size.device_bytes
