"""Measures the speed of this machine and keeps the figures for the next run.

Owns the measurements and the cache file. Never chooses a plan. All ranks measure at the same time, as they will work at
the same time: bandwidths are those of all ranks together. Times the runtime's own collectives and Adam.
Source: Elixir v2, section 3 (hardware profiler).

docs/which_plan.md has the place of the cache, which has one file for each description of a machine (`describe`).
"""

import hashlib
import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

from elixir_moe import accelerator
from elixir_moe.accelerator import is_accelerator
from elixir_moe.chunks.cache_policy import CacheState
from elixir_moe.chunks.ledger import GRADIENT, spill_slice_numel
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Plan, Tier
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.distributed.all_ranks import gathered, raise_on_all_ranks
from elixir_moe.distributed.collectives import Communicator, build_communicators
from elixir_moe.errors import ConfigError, TierError
from elixir_moe.kernels import (
    CODE_BLOCK,
    AdamSettings,
    Rounding,
    adam_step,
    cpu_features,
    host_threads,
    narrow_step,
    work_on,
)
from elixir_moe.memory.blocks import Blocks
from elixir_moe.memory.build import build_shards
from elixir_moe.memory.disk import DiskStore, disk_bytes_left
from elixir_moe.memory.slabs import host_bytes_left, is_one_memory
from elixir_moe.moe.layer import MoE
from elixir_moe.planner.hardware import Fitted, Hardware, Links, Wire
from elixir_moe.planner.trace import trace
from elixir_moe.runtime.chunk import Chunk, Placeholder
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.units import build_units, find_parts

_FORMAT = 4
_COPY_BYTES = 1 << 26
_ADAM_NUMEL = 1 << 23
"""Both sizes exceed the caches of a processor. A GPU copies eight times as much, since it has larger caches."""
_HOST_ADAM_NUMEL = 1 << 26
"""Elements of an update on the host of a GPU: 1 GB of state, so that pages and caches behave as in a step."""
_ADAM_STATE_BYTES = 14
"""Bytes per element of that update: an fp32 master and moments, and a gradient in bf16."""
_WARM_SECONDS = 0.05
"""Updates run for this time before one is measured: an idle core starts at a lower clock."""
_WARM_GPU_SECONDS = 1.0
"""Products run for this time before the first measurement on a GPU, which takes longer to raise its clock."""
_MATRIX = 512
"""Side of the multiplied matrices on a CPU; eight times that on a GPU."""
_WIRE_BYTES = 1 << 22
"""Bytes of a timed gather and reduction on a CPU; sixteen times that on a GPU, whose links need larger transfers."""
_DISK_BYTES = 1 << 25
_CHECKED_DISK_BYTES = 1 << 29
"""Bytes on disk that `measured_again` writes and reads: more than a disk's own memory caches."""
_UNITS = 16
"""Units of the model on which the host time of one is measured."""
_REPEATS = 3
"""Timed spans; the fastest counts, since slower ones were disturbed."""
_SPAN_SECONDS, _SPAN_SECONDS_ON_GPU = 0.01, 0.1
"""The least duration of a span."""
_UNFITTED = Fitted(
    device_efficiency=1.0, exposed_collectives=1.0, host_update_slowdown=1.0, overhead_ns_per_parameter=1e-3
)
"""Initial values: measured speeds are already those of real kernels; real steps correct the rest."""
_VOCABULARY, _LENGTH, _WIDTH, _ROWS = 256, 128, 128, 8
"""Sizes of the model whose step is timed on a CPU, typical for training there."""
_ADAM: AdamSettings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
_MEASURED = (
    "gpu_bytes",
    "cpu_bytes",
    "peak_tflops",
    "memory_bandwidth",
    "b_c2g",
    "b_g2c",
    "v_g",
    "v_c",
    "narrow_update",
    "narrow_update_on_device",
    "b_g2g",
    "node_bandwidth",
    "disk_read",
    "disk_write",
    "unit_us",
)


def hardware_here(machine: dict[str, Any], device: torch.device, wanted: Iterable[tuple[int, ...]]) -> Hardware:
    """Returns the figures of this machine for the ranks of the world; measures what earlier runs did not. Collective.

    `machine` is from `describe`, and `wanted` has the ranks of each process group of this rank's parameters.
    """
    box = [_read(machine).get("hardware") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        known = _measured(machine, device)
    else:
        known = Hardware.parse(json.dumps(box[0]), _name(machine))
    found = _with_wires(known, device, wanted)
    if dist.get_rank() == 0 and (box[0] is None or found != known):
        keep(machine, found)
    return found


def measured_here(ranks: int) -> Hardware:
    """Returns the figures of this machine for `ranks` ranks, which it starts; reuses the figures of an earlier run.

    Raises:
        ConfigError: torch.distributed is already initialized, or there are fewer GPUs than ranks.
    """
    if dist.is_initialized():
        raise ConfigError("ranks are already running: --hardware here starts its own; call it without torchrun")
    if 0 < accelerator.count() < ranks:
        raise ConfigError(f"--hardware here: {ranks} ranks, but this machine has {accelerator.count()} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _measure_rank, args=(ranks, folder), nprocs=ranks, start_method="spawn"
        )
        return Hardware.parse((Path(folder) / "figures.json").read_text(encoding="utf-8"), f"{ranks} ranks here")


def measured_again(directory: str) -> tuple[Hardware, bool]:
    """Measures this machine with the disk of a folder; returns (figures, whether requests bypassed the page cache).

    Stores the figures for later runs. Collective over the world, whose ranks are all on this host.

    Raises:
        TierError: rank 0 cannot write to the folder; on all ranks.
    """
    device = _set_up_rank(dist.get_rank(), dist.get_world_size())

    def disk() -> tuple[float, float, bool] | None:
        if dist.get_rank():
            return None
        return _disk_rates(directory, min(_CHECKED_DISK_BYTES, disk_bytes_left(directory) // 4))

    read, written, direct = raise_on_all_ranks("measured the disk", disk, error=TierError)[0] or (0.0, 0.0, False)
    machine = describe(device, _compute_dtype(device))
    found = _with_wires(_measured(machine, device), device, [tuple(range(dist.get_world_size()))])
    if dist.get_rank() == 0:
        keep(machine, found)
    return replace(found, disk_read=read, disk_write=written), direct


def _set_up_rank(rank: int, ranks: int) -> torch.device:
    """Selects and returns the device of this rank, and sets the number of threads for `ranks` ranks on this host."""
    kind = accelerator.found()
    device = torch.device("cpu") if kind is None else torch.device(kind.type, rank)
    work_on(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    return device


def _compute_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16, or fp16 on a GPU without native bf16, such as a T4."""
    return torch.bfloat16 if accelerator.has_bf16(device) else torch.float16


def _measure_rank(rank: int, ranks: int, folder: str) -> None:
    device = _set_up_rank(rank, ranks)
    dist.init_process_group(
        accelerator.backends(device.type), init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks
    )
    found = hardware_here(describe(device, _compute_dtype(device)), device, [tuple(range(ranks))])
    if rank == 0:
        (Path(folder) / "figures.json").write_text(found.to_json(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the properties on which a machine's figures depend."""
    on_gpu = is_accelerator(device)
    return {
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernels": cpu_features(),
        "gpu": accelerator.api(device).get_device_name(device) if on_gpu else None,
        "gpus": accelerator.count() if on_gpu else 0,
        "ranks": dist.get_world_size(),
        "threads": host_threads(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def cache_path(machine: dict[str, Any]) -> Path:
    """Returns the cache file of a machine's figures."""
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"hardware-{key}.json"


def cache_folder() -> Path:
    """Returns the folder of all cache files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elixir-moe"


def keep(machine: dict[str, Any], hardware: Hardware) -> None:
    """Writes the figures to the cache. If that fails, warns, and the next run measures again."""
    _write(machine, {**_read(machine), "hardware": json.loads(hardware.to_json())})


def remember_fit(machine: dict[str, Any], model: str, fitted: Fitted) -> None:
    """Stores the constants fitted to the real steps of a model; `model` is a `Profile.key`."""
    data = _read(machine)
    _write(machine, {**data, "fitted": {**data.get("fitted", {}), model: asdict(fitted)}})


def remembered_fit(machine: dict[str, Any], model: str) -> Fitted | None:
    """Returns the constants that an earlier run of the same step fitted on this machine; None if there are none."""
    found = _read(machine).get("fitted", {}).get(model)
    return None if found is None else Fitted(**found)


def _write(machine: dict[str, Any], data: dict[str, Any]) -> None:
    """Writes the cache file atomically."""
    path = cache_path(machine)
    text = json.dumps({**data, "format": _FORMAT, "machine": machine}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        warnings.warn(f"the measured figures could not be written to {str(path)!r}: {error}", stacklevel=3)


def _read(machine: dict[str, Any]) -> dict[str, Any]:
    """Returns the cached data of exactly this machine; empty if there is none, or it cannot be used."""
    path = cache_path(machine)
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT or data["machine"] != machine:
            raise ValueError("it was written for another machine or by another version")
        Hardware.parse(json.dumps(data["hardware"]), str(path))
        for fitted in data.get("fitted", {}).values():
            Hardware.parse(json.dumps({**data["hardware"], "fitted": fitted}), str(path))
        return data
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        warnings.warn(f"{str(path)!r} is ignored, and the machine is measured again: {error}", stacklevel=3)
        return {}


def _measured(machine: dict[str, Any], device: torch.device) -> Hardware:
    on_gpu = is_accelerator(device)
    hosts = gathered(socket.gethostname())
    neighbors = tuple(rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()])
    nodes = len(set(hosts))
    v_c, narrow_v_c = _host_adam_rates(device)
    if on_gpu:
        a = _matrix(device, _compute_dtype(device))
        _warm_up(lambda: a @ a, _WARM_GPU_SECONDS, device)
    v_g, narrow_v_g = (_adam_rate(device), _narrow_rate(device)) if on_gpu else (v_c, narrow_v_c)
    mine = (
        _product_rate(device, getattr(torch, machine["dtype"])),
        _memory_rate(device),
        *_copy_rates(device),
        v_g,
        v_c,
        *(_temporary_rates() if dist.get_rank() == neighbors[0] else (0.0, 0.0)),
        _unit_seconds(device),
    )
    reached = 1.0 if on_gpu else _efficiency(device, getattr(torch, machine["dtype"]), *mine[:2])
    sent = (*mine, v_c / narrow_v_c, v_g / narrow_v_g, reached)
    *columns, on_host, on_device, efficiency = zip(*gathered(sent), strict=True)
    up, down, v_g, v_c, read, written = (sum(column) / nodes for column in columns[2:-1])
    within = _wire_of(neighbors, device)  # on all hosts at once
    across = within if nodes == 1 else _wire_of(tuple(range(len(hosts))), device)
    if (memory_bytes := host_bytes_left()) == sys.maxsize:  # the free memory is unknown
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not on_gpu:  # a CPU is device and host: half of the memory counts as each
        memory_bytes //= 2
    one_memory = is_one_memory(device)
    each = memory_bytes // len(neighbors)
    whole = Links(b_c2g=up, b_g2c=down, v_g=v_g, v_c=v_c)
    by_gpus = {1: Links(**{n: v / len(neighbors) for n, v in asdict(whole).items() if v is not None})}
    if within is not None:
        by_gpus[len(neighbors)] = replace(whole, b_g2g=within.bandwidth * (len(neighbors) - 1))
    measured = Hardware(
        name=_name(machine),
        gpu_bytes=accelerator.total_bytes(device) if on_gpu and not one_memory else each,
        cpu_bytes=each * len(neighbors),
        one_memory=one_memory,
        grouped_kernel=accelerator.has_grouped_kernel(device),
        gpus_per_node=len(neighbors),
        peak_tflops=min(columns[0]),
        memory_bandwidth=min(columns[1]),
        fitted=replace(_UNFITTED, device_efficiency=min(efficiency)),
        by_gpus=by_gpus,
        node_bandwidth=across.bandwidth * (nodes - 1) / nodes if nodes > 1 and across is not None else None,
        disk_read=read or None,
        disk_write=written or None,
        unit_us=max(columns[-1]) * 1e6,
        narrow_update=max(on_host),
        narrow_update_on_device=max(on_device),
        origins=dict.fromkeys(_MEASURED, "measured") | {"fitted": "assumed" if on_gpu else "measured"},
    )
    box = [measured.to_json()]
    dist.broadcast_object_list(box, src=0)
    return Hardware.parse(box[0], measured.name)


def with_disk(hardware: Hardware, directory: str) -> tuple[Hardware, int]:
    """Returns (hardware with the disk of a folder, this rank's share of its free bytes). Collective over the world.

    One rank of each host measures the disk; the result is used unless `hardware` has all figures of the disk. Raises
    TierError on all ranks if one cannot write there.
    """
    rank, host = dist.get_rank(), socket.gethostname()

    def look() -> tuple[tuple[str, int], int]:
        try:
            return (host, os.stat(directory).st_dev), disk_bytes_left(directory)
        except OSError as error:
            raise TierError(f"disk={directory!r} on {host}: {error.strerror}; name another folder") from error

    found = raise_on_all_ranks("looked at the disk", look, error=TierError)
    places = [place for place, _ in found]
    place, room = found[rank]

    def measure() -> tuple[float, float] | None:
        return _disk_rates(directory)[:2] if places.index(place) == rank else None

    rates = [
        theirs for theirs in raise_on_all_ranks("measured the disk", measure, error=TierError) if theirs is not None
    ]
    hosts = len({host for host, _ in places})
    read, written = (sum(column) / hosts for column in zip(*rates, strict=True))
    if hardware.disk_read is None or hardware.disk_write is None or hardware.disk_bytes is None:
        hardware = replace(hardware, disk_read=read, disk_write=written)
    return hardware, room // places.count(place)


def _with_wires(hardware: Hardware, device: torch.device, wanted: Iterable[tuple[int, ...]]) -> Hardware:
    """Returns `hardware` with figures for the process groups that no earlier run measured."""
    known = {wire.ranks for wire in hardware.wires}
    everyone = gathered({ranks for ranks in wanted if len(ranks) > 1} - known)
    missing = sorted(set().union(*everyone))
    found = gathered([_wire_of(ranks, device) for ranks in missing])
    slowest = (
        max((wire for wire in wires if wire is not None), key=lambda wire: 1 / wire.bandwidth)
        for wires in zip(*found, strict=True)
    )
    return replace(hardware, wires=(*hardware.wires, *slowest))


def _wire_of(ranks: tuple[int, ...], device: torch.device) -> Wire | None:
    """Measures the speed of gathers and reductions over `ranks`. Collective over the world.

    Returns None on other ranks, and for a single rank.
    """
    inside = dist.get_rank() in ranks and len(ranks) > 1
    communicator = build_communicators([ranks] if inside else [], device).get(ranks)
    if communicator is None:
        return None
    small = _round_seconds(communicator, len(ranks) * 64, device) / 2
    nbytes = _WIRE_BYTES * (16 if is_accelerator(device) else 1)
    large = _round_seconds(communicator, nbytes, device) / 2
    communicator.close()
    return Wire(ranks=ranks, latency_us=small * 1e6, bandwidth=nbytes / max(large - small, large / 10) / 1e9)


def _round_seconds(communicator: Communicator, nbytes: int, device: torch.device) -> float:
    """Times one gather and one reduction of a chunk of `nbytes` bytes."""
    numel = nbytes // 4 // communicator.size * communicator.size
    buffer = torch.rand(numel, device=device)
    staging = torch.empty_like(buffer if communicator.size > 2 else buffer[: numel // 2])

    def both() -> None:
        communicator.all_gather(buffer, 0).wait()
        communicator.reduce_scatter(buffer, staging if communicator.over_gloo else None, lambda *_: None).wait()
        _synchronize(device)  # the latency is part of the measurement

    def mean(seconds: float) -> float:
        total = torch.full((communicator.size,), seconds, device=device)
        communicator.all_reduce(total, lambda *_: None).wait()
        return total[0].item() / communicator.size

    return _fastest(both, device, mean)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Speed of square matrix products, in 1e12 operations per second."""
    a = _matrix(device, dtype)
    return 2 * len(a) ** 3 / _at_once(lambda: a @ a, device) / 1e12


def _matrix(device: torch.device, dtype: torch.dtype) -> Tensor:
    side = _MATRIX * (8 if is_accelerator(device) else 1)
    return torch.rand(side, side, device=device).to(dtype)


class _SmallMixture(nn.Module):
    """Two transformer layers, and a mixture of experts before the head."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, **options) for _ in range(2))
        self.experts = MoE(d_model=_WIDTH, d_hidden=4 * _WIDTH, num_experts=4, top_k=1)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) tokens -> (B, S, vocabulary) logits."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.experts(x)[0])


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of each next token."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def _efficiency(device: torch.device, dtype: torch.dtype, tflops: float, bandwidth: float) -> float:
    """Returns the fraction of these two speeds that a small mixture reaches in forward and backward on all ranks.

    A model's products are smaller than the one that is timed, and other operators compute more than a copy does.
    """
    with torch.random.fork_rng(devices=[]):
        model = _SmallMixture().to(device, dtype)
    batch = torch.randint(_VOCABULARY, (_ROWS, _LENGTH + 1), device=device)
    needed = trace(model, _loss, batch)

    def step() -> None:
        model.zero_grad()
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]

    expected = needed.flops / (tflops * 1e12) + needed.traffic_bytes / (bandwidth * 1e9)
    return min(1.0, expected / median(_at_once(step, device) for _ in range(_REPEATS)))


def _memory_rate(device: torch.device) -> float:
    """Bandwidth of device memory, reads plus writes, in 1e9 bytes per second."""
    a = _copied(device, device)
    b = torch.zeros_like(a)
    return 2 * a.nbytes / _at_once(lambda: b.copy_(a), device) / 1e9


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Bandwidth from host memory to the device, and back, in 1e9 bytes per second."""
    host = _copied(torch.device("cpu"), device)
    host = host.pin_memory() if is_accelerator(device) else host
    there = torch.empty_like(host, device=device)
    up = _at_once(lambda: there.copy_(host, non_blocking=True), device)
    down = _at_once(lambda: host.copy_(there, non_blocking=True), device)
    return host.nbytes / up / 1e9, host.nbytes / down / 1e9


def _copied(memory: torch.device, device: torch.device) -> Tensor:
    """Random bytes in `memory`, as many as are copied to measure `device`."""
    return _random_bytes(_COPY_BYTES, memory).repeat(8 if is_accelerator(device) else 1)


def _host_adam_rates(device: torch.device) -> tuple[float, float]:
    """Returns `_adam_rate` and `_narrow_rate` on the host; with a GPU, while copies run in both directions."""
    host, threads = torch.device("cpu"), host_threads(device)
    if device.type == "cpu":
        return _adam_rate(host, threads=threads), _narrow_rate(host, threads=threads)
    free = host_bytes_left() // dist.get_world_size() // 4
    numel = max(_ADAM_NUMEL, min(_HOST_ADAM_NUMEL, free // _ADAM_STATE_BYTES))
    with _busy_bus(device):
        return _adam_rate(host, numel, threads=threads), _narrow_rate(host, numel, threads=threads)


@contextmanager
def _busy_bus(device: torch.device) -> Iterator[None]:
    """Keeps copying from host memory to a GPU and back while open, as gathers and gradients do in a step."""
    ended = threading.Event()

    def copy() -> None:
        work_on(device)
        up, down = (_random_bytes(_COPY_BYTES, torch.device("cpu")).pin_memory() for _ in range(2))
        there, other = torch.empty_like(up, device=device), torch.empty_like(down, device=device)
        streams = accelerator.new_stream(device), accelerator.new_stream(device)
        while not ended.is_set():
            for stream, (to, of) in zip(streams, ((there, up), (down, other)), strict=True):
                with accelerator.on_stream(stream):
                    to.copy_(of, non_blocking=True)
            for stream in streams:
                stream.synchronize()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _adam_rate(device: torch.device, numel: int = _ADAM_NUMEL, *, threads: int | None = None) -> float:
    """Speed of Adam in 1e9 elements per second: bf16 gradients in; master, moments and compute shard out."""
    master, exp_avg, exp_avg_sq = (torch.rand(numel, device=device) for _ in range(3))
    gradient = torch.rand(numel, device=device, dtype=torch.bfloat16)

    def update() -> None:
        adam_step(master, exp_avg, exp_avg_sq, gradient, gradient, **_ADAM, threads=threads)

    return _updates_a_second(update, numel, device)


def _unit_seconds(device: torch.device) -> float:
    """Measures the host time that a unit adds to a forward and backward while its chunk is in its block.

    That is the time of the runtime's hooks. The layers are frozen, because the number of gradients does not depend on
    the units.
    """
    plain = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(_UNITS))).requires_grad_(False)
    plain.to(device)
    model = deepcopy(plain)
    batch = torch.zeros(1, 8, device=device, requires_grad=True)
    key = ChunkGroupKey(ranks=(dist.get_rank(),), dtype=torch.float32, trainable=False, divisor=1)
    plan = Plan.offload(rcache_blocks="all", chunk_numel=64)
    layout = plan.layout([ParamSpec(name=name, shape=(8, 8), key=key) for name, _ in model.named_parameters()])
    cache, streams, placeholder = CacheState(_UNITS, prefetch=plan.prefetch), Streams(device), Placeholder(device)
    statistics = Statistics(cache=cache.counts)
    shards = build_shards([(chunk, Tier.HOST) for chunk in layout.chunks], device)
    blocks = Blocks(layout, _UNITS, 0, shards, device, statistics, streams.allocating)
    chunks = [
        Chunk.of(chunk, [parameter], [name], shard, Communicator(key.ranks), placeholder)
        for chunk, shard, (name, parameter) in zip(layout.chunks, shards, model.named_parameters(), strict=True)
    ]
    scheduler = Scheduler(chunks, cache, blocks, None, streams, statistics)
    hooks = Hooks(model, build_units(find_parts(model), layout), scheduler, placeholder)

    def span(contender: torch.nn.Module) -> float:
        """CPU seconds of the process, which do not depend on other processes of the machine."""
        start = time.process_time()
        for _ in range(_UNITS):
            contender(batch).sum().backward()
            scheduler.rewind()
        return (time.process_time() - start) / _UNITS

    try:
        spans = [(span(model), span(plain)) for _ in range(1 + _REPEATS)][1:]
    finally:
        hooks.remove()
    with_units, without = map(min, zip(*spans, strict=True))
    return max(with_units - without, with_units / 10) / _UNITS


def _narrow_rate(device: torch.device, numel: int = _ADAM_NUMEL, *, threads: int | None = None) -> float:
    """Speed of Adam with the fewest bytes of state, a bf16 master and 8-bit moments, in 1e9 elements per second."""
    weight, gradient = (torch.rand(numel, device=device, dtype=torch.bfloat16) for _ in range(2))
    exp_avg, exp_avg_sq = (
        (_random_bytes(numel, device), torch.full((-(-numel // CODE_BLOCK),), 127, dtype=torch.uint8, device=device))
        for _ in range(2)
    )
    rounding = Rounding.of(0, "weight", 1, 0)

    def update() -> None:
        narrow_step(weight, exp_avg, exp_avg_sq, gradient, None, rounding, **_ADAM, threads=threads)

    return _updates_a_second(update, numel, device)


def _random_bytes(numel: int, device: torch.device) -> Tensor:
    return torch.randint(256, (numel,), dtype=torch.uint8, device=device)


def _updates_a_second(update: Callable[[], None], numel: int, device: torch.device) -> float:
    """Times an update on a warm processor, in 1e9 elements per second."""
    _warm_up(update, _WARM_SECONDS, device)
    return numel / _at_once(update, device) / 1e9


def _temporary_rates() -> tuple[float, float]:
    """Returns `_disk_rates` of the folder for temporary files; zeros, with a warning, if that fails."""
    try:
        return _disk_rates(tempfile.gettempdir())[:2]
    except (TierError, OSError) as error:
        warnings.warn(f"the disk could not be measured: {error}", stacklevel=3)
        return 0.0, 0.0


def _disk_rates(directory: str, nbytes: int = _DISK_BYTES) -> tuple[float, float, bool]:
    """Returns (speed of reads, speed of writes, whether they bypassed the page cache), in 1e9 bytes per second.

    Writes and reads random bytes as for chunks on disk. Pages in the cache are written to disk and dropped before the
    reads.
    """
    step = spill_slice_numel() * 4
    nbytes = max(1, nbytes // step) * step
    spill = DiskStore(directory, [(nbytes // 4, (GRADIENT,))], rank=dist.get_rank())

    def move(offset: int, write: bool) -> None:
        own = spill.record()
        with own.lock:
            spill.move(offset, own.memory, write=write)

    for record in spill.records:
        record.memory.copy_(_random_bytes(len(record.memory), record.memory.device))
    try:
        seconds = []
        for write in (True, False):
            start = time.perf_counter()
            list(spill.threads.map(partial(move, write=write), range(0, nbytes, step)))
            if write:
                direct = spill.drop_cached()
            seconds.append(time.perf_counter() - start)
    finally:
        spill.close()
    written, read = seconds
    return nbytes / read / 1e9, nbytes / written / 1e9, direct


def _at_once(run: Callable[[], object], device: torch.device) -> float:
    """Times `run` while all ranks run it."""
    dist.barrier()
    return _fastest(run, device)


def _warm_up(run: Callable[[], object], seconds: float, device: torch.device) -> None:
    """Runs for this time, so that the clock of the device is that of training."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        _span(run, 1, device)


def _fastest(run: Callable[[], object], device: torch.device, agreed: Callable[[float], float] = float) -> float:
    """Returns the seconds of `run` in the fastest of `_REPEATS` spans, after a warm-up.

    A span has as many runs as take `_SPAN_SECONDS` together. `agreed` makes the time of a span equal on all ranks that
    must run equally often.
    """
    runs = 1
    _span(run, runs, device)
    least = _SPAN_SECONDS_ON_GPU if is_accelerator(device) else _SPAN_SECONDS
    while agreed(_span(run, runs, device)) < least:
        runs *= 2
    return min(_span(run, runs, device) for _ in range(_REPEATS)) / runs


def _span(run: Callable[[], object], runs: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        accelerator.api(device).synchronize(device)


def processor() -> str:
    """Returns the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _name(machine: dict[str, Any]) -> str:
    return f"{machine['ranks']} ranks on {machine['gpu'] or machine['processor']}"
