"""Which plan is best: chunk length, blocks of the rCache, and the tier of every chunk.

Owns the search. For each chunk length worth trying it lets the runtime's own policy play the step on every number of
blocks, fills what is left of the device with chunks, and keeps what is fastest. Pure; `cost` prices, `explain` tells.
Sources: Elixir v2, A.2 (chunk length by the bytes replaced), A.3 (least rCache), section 5 (device against rCache).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from elixir_moe.chunks.group import ParamSpec, group_parameters
from elixir_moe.chunks.layout import ALIGN_BYTES, Layout, best_chunk_numel, build_layout
from elixir_moe.chunks.plan import Footprint, Plan, Tier, footprint
from elixir_moe.errors import PlanError
from elixir_moe.search import cost
from elixir_moe.search.hardware import Hardware
from elixir_moe.search.profile import Profile
from elixir_moe.search.simulator import Simulator

_LENGTH_SPAN = 4
"""Chunks are tried up to this many times the largest parameter: longer ones only coarsen the rCache."""
_LENGTHS = 12
"""Chunk lengths that are tried, those that waste least first."""
_DENSE = 48
"""Up to so many numbers of blocks each is tried; of more, some, and then all near the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is to be planned: a step, on a machine."""

    profile: Profile
    hardware: Hardware
    gpus: int
    capacity_bytes: int
    """Of one device."""
    host_bytes: int
    """Host memory of one rank."""
    moments: int = 2
    """fp32 values the optimizer keeps for each element."""
    staged: bool = False
    """Reductions go through a staging buffer (gloo)."""
    imbalance: float = 1.0
    """Routed rows of the busiest rank, in even shares."""
    accumulation: int = 1
    """Backwards in a step; more than one keep fp32 sums."""

    @property
    def allowed_bytes(self) -> int:
        """U_allowed: device memory the library may hold."""
        surplus = cost.activations(self.profile, self.imbalance) - self.profile.activation_bytes
        return cost.allowed_bytes(self.profile, self.capacity_bytes) - int(cost.F_ALLOC * cost.F_FRAG * surplus)

    def held_bytes(self, size: Footprint) -> tuple[int, int]:
        """What the library holds on the device and on the host, accumulators included where there are any."""
        sums = size.accumulator_bytes if self.accumulation > 1 else dict.fromkeys(Tier, 0)
        return size.device_bytes + sums[Tier.DEVICE], size.host_bytes + sums[Tier.HOST]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan with what it costs."""

    plan: Plan
    layout: Layout
    size: Footprint
    moved: cost.Traffic
    seconds: cost.Seconds
    loads: tuple[int, ...]
    """Chunks gathered into the rCache in a step, each as often as it is."""

    @property
    def device_chunks(self) -> int:
        """Chunks at home on the device."""
        return sum(self.plan.home(self.layout, chunk) is Tier.DEVICE for chunk in self.layout.chunks)


def solve(task: Task) -> Choice:
    """The fastest plan that fits.

    Raises:
        PlanError: none does; it says by how many bytes, in which tier, and what would help.
    """
    searches = [_Length(task, length) for length in chunk_lengths(task.profile.params)]
    found = [choice for choice in (search.best() for search in searches) if choice is not None]
    if not found:
        raise PlanError(_why_not(task, [search.shortage() for search in searches]))
    return min(found, key=_rank)


def price(task: Task, plan: Plan, layout: Layout | None = None, loads: Sequence[int] | None = None) -> Choice:
    """What `plan` costs, whether it fits or not.

    Raises:
        PlanError: it cannot be carried out: a chunk too short, an rCache too small.
    """
    if layout is None:
        layout = plan.place(build_layout(task.profile.params, plan.chunk_numel, scatter=plan.scatter))
    if loads is None:
        loads = [load.chunk for load in Simulator(task.profile.schedule(layout)).loads(plan.blocks(layout))]
    moved = cost.traffic(plan, layout, loads)
    return Choice(
        plan=plan,
        layout=layout,
        size=footprint(plan, layout, moments=task.moments, staged=task.staged),
        moved=moved,
        seconds=cost.seconds(task.profile, moved, task.hardware, task.gpus, task.imbalance, task.accumulation),
        loads=tuple(loads),
    )


def shortage(task: Task, size: Footprint) -> dict[Tier, int]:
    """By tier: bytes that are missing."""
    device, host = task.held_bytes(size)
    missing = {Tier.DEVICE: device - task.allowed_bytes, Tier.HOST: host - task.host_bytes}
    return {tier: nbytes for tier, nbytes in missing.items() if nbytes > 0}


def chunk_lengths(params: Sequence[ParamSpec]) -> list[int]:
    """Chunk lengths worth trying: only those that some run of consecutive parameters fills exactly can be best.

    A length between two of them packs as the shorter one does and makes every block longer.
    """
    movable = [p for p in params if not p.resident]
    largest = max((p.numel for p in movable), default=1)
    default = best_chunk_numel(params)
    lengths = {largest, default}
    for key, indices in group_parameters(movable).items():
        align = ALIGN_BYTES // key.dtype.itemsize
        sizes = [movable[i].numel for i in indices]
        for first in range(len(sizes)):
            used = 0
            for size in sizes[first:]:
                used = -(-used // align) * align + size
                if used > largest * _LENGTH_SPAN:
                    break
                if used > largest:
                    lengths.add(used)
    if len(lengths) <= _LENGTHS:
        return sorted(lengths)
    sizes = [p.numel for p in movable]
    return sorted({*sorted(lengths, key=lambda n: (_space(sizes, n), n))[: _LENGTHS - 2], largest, default})


def _space(sizes: Sequence[int], length: int) -> int:
    """Elements of all blocks a rough packing of `sizes` needs."""
    chunks, used = 1, 0
    for size in sizes:
        if used + size > length:
            chunks, used = chunks + 1, 0
        used += size
    return chunks * length


class _Length:
    """The search at one chunk length."""

    def __init__(self, task: Task, chunk_numel: int) -> None:
        self._task = task
        self._layout = build_layout(task.profile.params, chunk_numel)
        self._numel = chunk_numel
        schedule = task.profile.schedule(self._layout)
        self._simulator = Simulator(schedule)
        self.least = schedule.least_blocks()
        self.most = len(self._layout.cached)
        everything = Plan.offload(rcache_blocks=None, device_chunks=len(self._layout.chunks), chunk_numel=chunk_numel)
        whole = footprint(everything, self._layout, moments=task.moments, staged=task.staged)
        self._fixed = whole.resident_bytes + whole.staging_bytes
        self._tail = self._tails()
        self._found: dict[int, Choice | None] = {}

    def _tails(self) -> list[int]:
        """Bytes at home of the last d chunks, for every d."""
        sizes = []
        for chunk in reversed(self._layout.chunks):
            per_element = chunk.key.dtype.itemsize + 4 * (1 + self._task.moments) * chunk.key.trainable
            if self._task.accumulation > 1 and chunk.key.trainable and chunk.key.dtype != torch.float32:
                per_element += 4
            sizes.append(per_element * chunk.shard_numel)
        return list(accumulate(sizes, initial=0))

    def best(self) -> Choice | None:
        """The fastest plan of this length that fits; None if none does."""
        for blocks in self._grid():
            self._at(blocks)
        while True:
            tried = set(self._found)
            fits = [choice for choice in self._found.values() if choice is not None]
            if not fits:
                return None
            winner = min(fits, key=_rank)
            near = self._near(winner.plan.blocks(self._layout))
            for blocks in near:
                self._at(blocks)
            if set(self._found) == tried:
                return winner

    def _grid(self) -> list[int]:
        if self.most - self.least < _DENSE:
            return list(range(self.least, self.most + 1))
        return sorted({self.least + (self.most - self.least) * i // 16 for i in range(17)})

    def _near(self, blocks: int) -> Iterator[int]:
        """Numbers between the neighbours of the best one that were not tried."""
        tried = sorted(self._found)
        for low, high in pairwise(tried):
            if high - low > 1 and low <= blocks <= high:
                yield (low + high) // 2

    def _at(self, blocks: int) -> None:
        """The best plan with this many blocks: as many chunks on the device as fit."""
        if blocks in self._found:
            return
        room = self._task.allowed_bytes - self._fixed - blocks * self._layout.block_bytes
        count = sum(nbytes <= room for nbytes in self._tail) - 1
        if count < 0 or self._tail[-1] - self._tail[count] > self._task.host_bytes:
            self._found[blocks] = None
            return
        cached = None if blocks == self.most else max(blocks, 1)
        if count == len(self._layout.chunks):
            plan = Plan(scatter=True, offloaded=False, rcache_blocks=cached, chunk_numel=self._numel)
        else:
            plan = Plan.offload(rcache_blocks=cached, device_chunks=count, chunk_numel=self._numel)
        layout = plan.place(self._layout)
        loads = [load.chunk for load in self._simulator.loads(blocks)] if layout == self._layout else None
        self._found[blocks] = price(self._task, plan, layout, loads)

    def shortage(self) -> dict[Tier, int]:
        """What is missing with the fewest blocks."""
        room = self._task.allowed_bytes - self._fixed - self.least * self._layout.block_bytes
        if room < 0:
            return {Tier.DEVICE: -room}
        count = sum(nbytes <= room for nbytes in self._tail) - 1
        return {Tier.HOST: self._tail[-1] - self._tail[count] - self._task.host_bytes}


def _why_not(task: Task, shortages: Sequence[dict[Tier, int]]) -> str:
    """By how many bytes no plan fits, in which tier, and the smallest change that would make one fit."""
    tier, missing = min((item for s in shortages for item in s.items()), key=lambda item: (item[0], item[1]))
    host = [s[Tier.HOST] for s in shortages if Tier.HOST in s]
    if host:
        tier, missing = Tier.HOST, min(host)
        more = f"give each rank {missing} bytes more host memory, or use more GPUs or nodes"
    else:
        more = f"give the device {int(missing / cost.F_ALLOC) + 1} bytes more"
        freed = missing / (cost.F_ALLOC * cost.F_FRAG * max(cost.activations(task.profile, task.imbalance), 1))
        if freed < 1:
            more += f", or make the batch {100 * freed:.0f} % smaller, which frees as much of the activations"
    return f"no plan fits {task.gpus} x {task.hardware.name}: {missing} bytes too few in {tier.value} memory; {more}"


def _rank(choice: Choice) -> tuple[float, int]:
    return choice.seconds.step, choice.size.device_bytes
