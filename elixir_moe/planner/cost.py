"""The cost of a plan on a machine: the traffic and the seconds of a step.

Owns the formulas. Pure: the bytes come from `chunks.ledger`, the gathers from the runtime's own cache policy, and
`timeline` has the waits of compute and fetches for each other. docs/cost_model.md has the terms and their derivations.
Sources: Elixir v2, 4.1, 5.1 and A.1; the six bytes per parameter are ours.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from elixir_moe.chunks.ledger import GRADIENT, arrays_on_disk, paged_bytes, spilled_bytes, values_bytes
from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.plan import Plan, Tier, keeps_values, reads_disk, tier_at
from elixir_moe.chunks.residence import CACHED
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile

F_ALLOC = 0.95
"""Usable fraction of device memory (v2, A.1)."""
F_FRAG = 1.25
"""Memory of activations, fragmentation included, relative to their bytes (v2, A.1)."""
SUM_TRAFFIC = 18
"""Bytes of device memory that are read and written for each element of a gradient of 16 bits, to widen it and to add it
to the sum of a pass."""
_GIGA = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """The time of a step on one rank, by cause."""

    compute: float
    """Matrix products, other operators, overheads, and the model's own collectives, such as tokens sent to experts."""
    fetch: float
    """Host to device."""
    offload: float
    """Device to host."""
    collectives: float
    """Gathers and reductions between devices, hidden or not."""
    exposed: float
    """The part of `collectives` that is not hidden: a fixed part, or what takes longer than all that could hide it."""
    device_update: float
    """Update of chunks on the device, and of whole matrices wherever they are."""
    host_update: float
    """Update of chunks in host memory, hidden or not."""
    disk_update: float
    """Update of chunks on disk: the longer of Adam on the host and the disk's reads and writes."""
    units: float = 0.0
    """Host time of units, in addition to `compute`."""
    disk: float = 0.0
    """Reads and writes of the disk in forwards and backwards: values, and sums of gradients."""
    stall: float = 0.0
    """Time for which compute and fetches wait for each other, beyond `overlapped`."""
    hidden_update: float = 0.0
    """The part of `host_update` that overlaps with the next forward."""

    @property
    def step(self) -> float:
        """The whole step."""
        return self.overlapped + self.stall + self.exposed + self.memory_update + self.disk_update

    @property
    def memory_update(self) -> float:
        """Updates of chunks on the device, and what is not hidden of those in host memory."""
        return self.device_update + self.host_update - self.hidden_update

    @property
    def overlapped(self) -> float:
        """Forwards and backwards if compute and transfers overlapped perfectly."""
        return max(self.compute + self.units, self.transfers)

    @property
    def transfers(self) -> float:
        """The longest of those that overlap with compute and with each other."""
        return max(self.fetch, self.offload, self.disk)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes moved and elements updated in a step on one rank, in all of its backwards."""

    fetched_bytes: int
    """Shards of chunks in host memory or on disk, copied to the device; once a step with `Plan.values_on_device`."""
    read_bytes: int
    """The part of `fetched_bytes` that is read from disk: values on disk."""
    offloaded_bytes: int
    """Gradient shards copied to the host."""
    summed_bytes: int
    """fp32 sums of gradients that each backward writes to disk; from the second backward on, they are read first."""
    kept_bytes: int
    """Inputs of checkpointed regions copied to the host, and back."""
    gathered_bytes: int
    """Chunks gathered from several ranks, as `Statistics` counts them."""
    reduced_bytes: int
    """Gradients reduced over several ranks, as `Statistics` counts them."""
    device_numel: int
    """Elements updated on the device."""
    host_numel: int
    """Elements updated in host memory."""
    narrow_numel: tuple[int, int]
    """(elements updated on the device, in host memory) whose master or moments have fewer bytes than fp32."""
    disk_numel: int
    """Elements updated on disk."""
    disk_read_bytes: int
    """Bytes that these updates read from the disk."""
    disk_written_bytes: int
    """Bytes that these updates write to the disk."""
    collectives: tuple[tuple[tuple[int, ...], int, int], ...]
    """(global ranks, bytes of chunks and gradients, number of gathers and reductions) of each process group."""
    update_collectives: tuple[tuple[tuple[int, ...], int, int], ...] = ()
    """(global ranks, bytes, number) of the gathers and reductions of whole matrices, which nothing hides."""
    update_crossing_bytes: int = 0
    """Bytes of updates of whole matrices that come from host memory to the device, and go back."""
    gathered_numel: int
    """Elements of all chunks."""
    units: int = 0
    """Modules whose chunks are gathered together, in a backward."""

    @property
    def by_way(self) -> dict[str, int]:
        """{``fetched``, ``offloaded``, ``gathered`` or ``reduced``: bytes}, as `Statistics` counts them."""
        return {
            "fetched": self.fetched_bytes,
            "offloaded": self.offloaded_bytes,
            "gathered": self.gathered_bytes,
            "reduced": self.reduced_bytes,
        }


def allowed_bytes(profile: Profile, capacity_bytes: int) -> int:
    """Returns U_allowed (v2, A.1): device memory left for the library, in bytes."""
    return int(F_ALLOC * (capacity_bytes - profile.buffer_bytes - F_FRAG * activations(profile, 1.0)))


def activations(profile: Profile, imbalance: float) -> int:
    """Returns the peak bytes of activations if the busiest rank gets `imbalance` times its even share of rows."""
    return profile.activation_bytes + int((imbalance - 1) * max((e.row_bytes for e in profile.exchanges), default=0))


def traffic(
    plan: Plan,
    layout: Layout,
    loads: Iterable[int],
    moments: int = 2,
    *,
    over_gloo: bool = False,
    kept_bytes: int = 0,
    units: int = 0,
    passes: int = 1,
) -> Traffic:
    """Counts the traffic of one step with so many backwards (`passes`), each of which reduces all gradients.

    `loads` are the cached chunks gathered in a step, once per gather; `kept_bytes` are the inputs of checkpointed
    regions that go to host memory; `moments` are fp32 values per element.
    """
    own = (chunk.index for chunk in layout.chunks if chunk.residence is not CACHED and chunk.key.trainable)
    gathers = Counter([*loads, *own])  # chunks with their own memory are gathered once, frozen ones among them never
    bounds = plan.bounds(layout)
    at: dict[Tier, list[ChunkSpec]] = {tier: [] for tier in Tier}
    for chunk in layout.chunks:
        at[tier_at(chunk.index, *bounds)].append(chunk)
    trained = {tier: [chunk for chunk in chunks if chunk.key.trainable] for tier, chunks in at.items()}

    def updated(tier: Tier, narrow: bool = False) -> int:
        return sum(c.shard_numel for c in trained[tier] if not narrow or c.key.precision.is_narrow)

    collective: dict[tuple[int, ...], list[int]] = {}
    updates: dict[tuple[int, ...], list[int]] = {}

    def count(chunk: ChunkSpec, nbytes: int, times: int, into: dict[tuple[int, ...], list[int]] = collective) -> int:
        if len(chunk.key.ranks) == 1:
            return 0
        of = into.setdefault(chunk.key.ranks, [0, 0])
        of[0], of[1] = of[0] + times * nbytes, of[1] + times
        return times * nbytes

    shared = {chunk.index for chunk in at[Tier.HOST] if plan.shares(chunk, Tier.HOST)}
    gathered_bytes = reduced_bytes = 0
    for index, times in gathers.items():
        gathered = layout.chunks[index]
        gathered_bytes += count(gathered, gathered.nbytes, times * (gathered.shards > 1 and index not in shared))
    for chunk in layout.chunks:
        if chunk.key.trainable:  # an all-reduce moves twice
            times = passes * (1 if chunk.shards > 1 else 2)
            reduced_bytes += count(chunk, chunk.reduced_bytes(over_gloo=over_gloo), times)
        if chunk.key.optimizer:
            gathered_bytes += count(chunk, chunk.numel * chunk.update_itemsize, int(chunk.shards > 1), updates)
            reduced_bytes += count(chunk, chunk.numel * chunk.update_itemsize, 1 if chunk.shards > 1 else 2, updates)

    near = near_chunks(plan, layout)
    comings = Counter({index: 1 if index in near else times for index, times in gathers.items()})

    def fetched(chunks: Iterable[ChunkSpec]) -> int:
        return sum(comings[chunk.index] * _fetched_bytes(chunk, shared=chunk.index in shared) for chunk in chunks)

    read = [chunk for chunk in at[Tier.DISK] if reads_disk(chunk, Tier.DISK, values_on_disk=plan.values_on_disk)]

    def by_updates(chunks: Iterable[ChunkSpec], nbytes: Callable[[ChunkSpec], int]) -> int:
        return sum((1 + bool(chunk.key.optimizer)) * nbytes(chunk) for chunk in chunks)  # whole matrices pass twice

    def record(chunk: ChunkSpec) -> int:
        return spilled_bytes(chunk.shard_numel, arrays_on_disk(chunk, moments, values_on_disk=False))

    def summed(chunk: ChunkSpec) -> int:
        return spilled_bytes(chunk.shard_numel, (GRADIENT,))

    updated_there, whole = by_updates(trained[Tier.DISK], record), trained[Tier.DISK] if plan.values_on_disk else []
    return Traffic(
        fetched_bytes=fetched(at[Tier.HOST]) + fetched(at[Tier.DISK]),
        read_bytes=fetched(read),
        offloaded_bytes=passes * sum(map(values_bytes, trained[Tier.HOST] + trained[Tier.DISK])),
        summed_bytes=sum(map(summed, whole)),
        kept_bytes=kept_bytes,
        gathered_bytes=gathered_bytes,
        reduced_bytes=reduced_bytes,
        device_numel=updated(Tier.DEVICE),
        host_numel=updated(Tier.HOST),
        narrow_numel=(updated(Tier.DEVICE, True), updated(Tier.HOST, True)),
        disk_numel=updated(Tier.DISK),
        disk_read_bytes=updated_there + by_updates(whole, summed),
        disk_written_bytes=updated_there + by_updates(whole, lambda chunk: paged_bytes(values_bytes(chunk))),
        collectives=tuple((ranks, nbytes, times) for ranks, (nbytes, times) in collective.items()),
        update_collectives=tuple((ranks, nbytes, times) for ranks, (nbytes, times) in updates.items()),
        update_crossing_bytes=sum(
            values_bytes(chunk) for chunk in trained[Tier.HOST] + trained[Tier.DISK] if chunk.key.optimizer
        ),
        gathered_numel=sum(slot.numel for chunk in layout.chunks for slot in chunk.slots),
        units=units,
    )


def near_chunks(plan: Plan, layout: Layout) -> frozenset[int]:
    """Returns the chunks outside the device whose values are on it, too: they come there once a step."""
    on = plan.values_on_device
    found = (c for c in layout.chunks if keeps_values(c, plan.tier_of(layout, c), values_on_device=on))
    return frozenset(chunk.index for chunk in found)


def _fetched_bytes(chunk: ChunkSpec, *, shared: bool) -> int:
    """Returns the bytes that come to the device in a gather of a chunk that is not there: all, or this rank's shard."""
    return chunk.nbytes if shared else values_bytes(chunk)


def fetch_seconds(plan: Plan, layout: Layout, hardware: Hardware, gpus: int) -> list[float]:
    """Returns the seconds in which each chunk comes to the device; 0 for chunks whose state is there."""
    bandwidth = hardware.links(gpus).b_c2g * _GIGA

    def crossing(chunk: ChunkSpec) -> float:
        tier = plan.tier_of(layout, chunk)
        if tier is Tier.DEVICE:
            return 0.0
        nbytes = _fetched_bytes(chunk, shared=plan.shares(chunk, tier))
        read = reads_disk(chunk, tier, values_on_disk=plan.values_on_disk)
        return max(nbytes * gpus / bandwidth, hardware.disk_seconds(nbytes, 0, gpus) if read else 0.0)

    return [crossing(chunk) for chunk in layout.chunks]


def update_seconds(plan: Plan, layout: Layout, requested: Iterable[int], whole: float) -> list[tuple[int, float]]:
    """Returns (chunk, seconds) of each update in host memory, in the order of the runtime; `whole` together.

    Chunks are `requested` in the order of the next forward; others are updated first.
    """
    first = {index: place for place, index in enumerate(dict.fromkeys(requested))}
    chunks = [c for c in layout.chunks if c.key.trainable and plan.tier_of(layout, c) is Tier.HOST]
    numel = sum(chunk.shard_numel for chunk in chunks)
    ordered = sorted(chunks, key=lambda chunk: (first.get(chunk.index, -1), chunk.index))
    return [(chunk.index, whole * chunk.shard_numel / numel) for chunk in ordered]


def compute_seconds(profile: Profile, positions: Iterable[int], hardware: Hardware, whole: float) -> list[float]:
    """Returns the seconds before each of these positions in `Profile.events`, and after the last; `whole` together."""
    spent = [
        flops / (hardware.peak_tflops * 1e12) + nbytes / (hardware.memory_bandwidth * _GIGA)
        for flops, nbytes in profile.work
    ]
    until = list(accumulate(spent))
    scale = whole / until[-1] if until[-1] else 0.0
    return [scale * (end - begin) for begin, end in pairwise([0.0, *(until[at] for at in positions), until[-1]])]


def seconds(
    profile: Profile,
    moved: Traffic,
    hardware: Hardware,
    gpus: int,
    imbalance: float = 1.0,
    accumulation: int = 1,
    together: int = 1,
) -> Seconds:
    """Returns the time of a step of `accumulation` micro-batches and the traffic `moved` on `gpus` GPUs.

    `together`: how many of them pass each layer together.
    """
    links, fitted = hardware.links(gpus), hardware.fitted
    passes = -(-accumulation // together)
    summed = (accumulation - passes) * SUM_TRAFFIC * profile.trained_numel
    flops = profile.flops + (imbalance - 1) * sum(e.expert_flops for e in profile.exchanges)
    exchange = sum(hardware.exchange_seconds(range(e.ep), e.times * e.nbytes) for e in profile.exchanges) * imbalance
    exchange += sum(hardware.gather_seconds(sent.ranks, sent.nbytes, sent.times) for sent in profile.sent)
    sent = [nbytes * (len(ranks) - 1) // len(ranks) for ranks, nbytes, _ in moved.collectives]
    both_ways = moved.kept_bytes + (0 if hardware.peer_to_peer else sum(sent))
    collectives = sum(hardware.gather_seconds(*group) for group in moved.collectives)
    v_c = links.v_c * _GIGA / gpus / fitted.host_update_slowdown
    whole_seconds = profile.orthogonalized_flops / (fitted.device_efficiency * hardware.peak_tflops * 1e12)
    whole_seconds += sum(hardware.gather_seconds(*group) for group in (*moved.update_collectives, *profile.joins))
    whole_seconds += moved.update_crossing_bytes * gpus * (1 / links.b_c2g + 1 / links.b_g2c) / _GIGA
    factors = hardware.narrow_update_on_device, hardware.narrow_update
    on_device, on_host = ((factor - 1) * numel for factor, numel in zip(factors, moved.narrow_numel, strict=True))
    update = moved.disk_read_bytes, moved.disk_written_bytes
    sums_read = (passes - 1) * moved.summed_bytes
    in_backward = moved.read_bytes + sums_read, passes * moved.summed_bytes
    on_disk, disk = (hardware.disk_seconds(*moves, gpus) if any(moves) else 0.0 for moves in (update, in_backward))
    compute = accumulation * (
        flops / (fitted.device_efficiency * hardware.peak_tflops * 1e12)
        + profile.traffic_bytes / (fitted.device_efficiency * hardware.memory_bandwidth * _GIGA)
        + moved.gathered_numel * fitted.overhead_ns_per_parameter / _GIGA
        + exchange
    ) + summed / (fitted.device_efficiency * hardware.memory_bandwidth * _GIGA)
    found = Seconds(
        compute=compute,
        fetch=(moved.fetched_bytes + both_ways) * gpus / (links.b_c2g * _GIGA),
        offload=(moved.offloaded_bytes + both_ways) * gpus / (links.b_g2c * _GIGA),
        collectives=collectives,
        exposed=fitted.exposed_collectives * collectives,
        device_update=(moved.device_numel + on_device) * gpus / (links.v_g * _GIGA) + whole_seconds,
        host_update=(moved.host_numel + on_host) / v_c,
        disk_update=max(moved.disk_numel / v_c, on_disk),
        units=accumulation * moved.units * hardware.unit_us / 1e6,
        disk=disk,
    )
    # not behind units, which are time of the host, as the sending of collectives is
    hiding = max(found.compute, found.transfers)
    return replace(found, exposed=max(found.exposed, collectives - hiding))


def tflops_per_gpu(profile: Profile, step_seconds: float, accumulation: int = 1) -> float:
    """Returns the paper's throughput of one GPU in 1e12 operations a second: 8·M·D per backward (v2, 6.1)."""
    return 8 * profile.parameters * profile.tokens * accumulation / step_seconds / 1e12


def device_peak(profile: Profile, library_bytes: int, imbalance: float) -> int:
    """Returns the peak bytes of a device: the library's memory, buffers and activations."""
    return library_bytes + profile.buffer_bytes + activations(profile, imbalance)
