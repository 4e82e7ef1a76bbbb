"""What matters on GPUs alone, shown where there is none, by stand-ins for torch.cuda that note what they are asked."""

import copy
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_moe as em
from elixir_moe import accelerator
from elixir_moe.chunks.packing import ChunkSpec, Layout
from elixir_moe.chunks.param_spec import ChunkGroupKey
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import Residence
from elixir_moe.distributed.all_ranks import Deferred
from elixir_moe.distributed.collectives import (
    Communicator,
    Work,
    backend_of,
    build_communicators,
    drop_groups,
    make_groups,
    timeout_of,
)
from elixir_moe.kernels import host_threads
from elixir_moe.memory.build import build_shards
from elixir_moe.memory.disk_values import ValuesFile
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.memory.slabs import Slab, host_zeros
from elixir_moe.parallel import mesh
from elixir_moe.parallel.mesh import start
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.wrapping.materialize import _Sources
from elixir_moe.wrapping.weight_transfer import WeightTransfer
from elixir_tools.models.gpt import _joined
from elixir_tools.train.trainer import Trainer
from tests.support.every import every
from tests.support.ranks import RankPool
from tests.support.train_cases import settings_of

saving = import_module("elixir_moe.state.checkpoint.save")
Log = list[tuple[str, int, int, frozenset[str]]]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


class Machine:
    """The GPUs of a machine, as far as choosing one goes; torch.distributed has not been started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.started = False
        monkeypatch.setattr(accelerator, "kind", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.choose)
        monkeypatch.setattr(dist, "is_initialized", lambda: self.started)
        monkeypatch.setattr(mesh, "init_mesh", self.start)

    def choose(self, device: torch.device) -> None:
        self.current = device.index

    def start(self) -> None:
        self.started, self.current = True, 2  # what LOCAL_RANK says


@pytest.mark.parametrize(
    ("asked", "found", "current"),
    [(None, "cuda:2", 2), ("cuda", "cuda:2", 2), ("cuda:3", "cuda:3", 3), ("cpu", "cpu", 2)],
)
def test_each_rank_takes_its_own_gpu_or_the_one_that_is_named(
    asked: str | None, found: str, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    assert start(asked) == torch.device(found)
    assert machine.current == current


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    with pytest.raises(em.ConfigError, match="4 GPUs"):
        start("cuda:4")
    assert not machine.started


def test_a_device_without_streams_is_refused_by_name() -> None:
    with pytest.raises(em.ConfigError, match=r"device='mps': torch.mps has no Stream, current_stream"):
        start("mps")


def test_a_process_group_that_serves_no_cpu_tensors() -> None:
    """What a world started with backend="nccl" is: asked for its timeout, and used with what it does not serve."""
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=77))
    assert timeout_of(group) == timedelta(seconds=77)
    assert backend_of(group, torch.device("cuda")) == "gloo"
    with pytest.raises(em.ConfigError, match=r"device='cpu': .* tensors on \['cuda'\]"):
        backend_of(group, torch.device("cpu"))
    dist.destroy_process_group(group)


def on_a_shared_gpu() -> list[Any]:
    """What chunks on a GPU get over gloo, whose messages cannot read a GPU's memory; tensors are on the CPU."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    communicator = Communicator((0, 1), groups, torch.device("cuda", 0))
    found: list[Any] = [communicator.over_gloo, communicator.tagged]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("writev: Bad address")

    def keep(reduced: torch.Tensor, _: Any = None) -> None:
        found.append(reduced.tolist())

    def numbers(dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(4).to(dtype) + communicator.rank

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("isend", "irecv"):
            monkeypatch.setattr(dist, name, refuse)
        gathered = numbers(torch.bfloat16)
        communicator.all_gather(gathered, 0).wait()
        communicator.reduce_scatter(numbers(torch.float32), None, keep).wait()
        communicator.reduce_scatter(numbers(torch.bfloat16), torch.empty(4), keep).wait()
        communicator.all_reduce(numbers(torch.bfloat16), keep, torch.empty(4)).wait()
    found += [gathered.tolist(), communicator.issued]
    communicator.close()
    return found


def test_ranks_that_share_a_gpu_take_the_collectives_of_gloo(ranks: Callable[[int], RankPool]) -> None:
    """In one order, as on NCCL: these have no tags."""
    sums = [[1, 3], [5, 7]]
    for rank, found in enumerate(ranks(2).run(on_a_shared_gpu)):
        assert found[:2] == [False, False]
        assert found[2:] == [sums[rank], sums[rank], sums[0] + sums[1], [0, 1, 3, 4], [1, 3]]


class Event(frozenset[str]):
    """All that is done when it has come."""

    def synchronize(self) -> None:
        pass


class Lane:
    """A stream that does nothing, and knows behind what it would do it."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device = device
        self.behind: set[str] = set()

    def note(self, what: str) -> frozenset[str]:
        """Something is issued; returns what is done before it."""
        before = frozenset(self.behind)
        self.behind.add(what)
        return before

    def wait_stream(self, other: "Lane") -> None:
        self.behind |= other.behind

    def record_event(self) -> Event:
        return Event(self.behind)

    def wait_event(self, event: Event) -> None:
        self.behind |= event

    def synchronize(self) -> None:
        pass


class Lanes:
    """Streams of two GPUs in the place of torch.cuda's; the current one of each, of which the first is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute = {index: Lane(torch.device("cuda", index)) for index in (0, 1)}
        self._current = dict(self.compute)
        monkeypatch.setattr(torch.cuda, "Stream", Lane)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        assert lane.device is not None
        index = lane.device.index
        before, self._current[index] = self._current[index], lane
        yield
        self._current[index] = before

    def current(self, device: torch.device | None = None) -> Lane:
        return self._current[0 if device is None else device.index]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    return Lanes(monkeypatch)


@pytest.mark.parametrize("index", [0, 1])
def test_a_ticket_is_waited_for_on_its_own_device(index: int, lanes: Lanes) -> None:
    """Whichever device is the current one."""
    work, stream = Work(), Lane(torch.device("cuda", index))
    stream.note("reduction")
    work.mark(stream)  # type: ignore[arg-type]
    work.wait()
    assert [lane.behind for lane in lanes.compute.values()] == [{"reduction"} if i == index else set() for i in (0, 1)]


def test_a_gradient_that_comes_from_a_gpu_brings_its_squares() -> None:
    """A scalar there, for which nobody waits; of the sum of two nobody knows them."""
    key = ChunkGroupKey(ranks=(0,), dtype=torch.bfloat16, trainable=True, divisor=1)
    spec = ChunkSpec(index=0, key=key, slots=(), numel=64, shards=1, residence=Residence.CACHED)
    (shard,) = build_shards([(spec, Tier.DEVICE)], torch.device("meta"))
    shard.add_gradient(torch.ones(64, dtype=torch.bfloat16, device="meta"))
    assert isinstance(shard.squares, torch.Tensor)
    assert (shard.squares.device.type, shard.squares.dtype, shard.squares.dim()) == ("meta", torch.float64, 0)
    shard.add_gradient(torch.ones(64, dtype=torch.bfloat16, device="meta"))
    assert shard.squares is None


@pytest.mark.parametrize("backwards", [1, 2])
def test_squares_that_are_tensors_make_the_norm(backwards: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    plan = em.Plan.offload(rcache_blocks=2, chunk_numel=32)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    shards = [chunk.shard for chunk in optimizer._scheduler.chunks]
    for shard in shards:

        def add(reduced: torch.Tensor, _: Any = None, of: Callable[..., None] = shard.add_gradient) -> None:
            of(reduced, reduced.double().square().sum())

        shard.add_gradient = add  # type: ignore[method-assign]
    for _ in range(backwards):
        for one in (model, plain):
            one(torch.ones(2, 4)).square().mean().backward()
    assert every(isinstance(shard.squares, torch.Tensor) == (backwards == 1) for shard in shards)
    norm = optimizer.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0), rtol=1e-6, atol=0)
    optimizer.close()


class Cores:
    """The cores of a machine, of a rank on it and of its launcher, and how many threads torch has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)

    def threads(
        self,
        machine: int,
        mine: int,
        *,
        launcher: int | None = None,
        ranks: int | None = 4,
        torchs: int = 1,
        gpus: int = 4,
    ) -> int:
        """`host_threads` beside a GPU; `launcher` are the cores of torchrun, where that has started the ranks."""
        self._patch.setattr(os, "cpu_count", lambda: machine)
        cores = {0: mine, os.getppid(): launcher or machine}
        self._patch.setattr(os, "sched_getaffinity", lambda process: set(range(cores[process])), raising=False)
        self._patch.setattr(torch, "get_num_threads", lambda: torchs)
        self._patch.setattr(accelerator, "kind", lambda: torch.device("cuda"))
        self._patch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name, value in (("LOCAL_WORLD_SIZE", ranks), ("TORCHELASTIC_RUN_ID", launcher)):
            if value is None:
                self._patch.delenv(name, raising=False)
            else:
                self._patch.setenv(name, str(value))
        assert host_threads(torch.device("cpu")) == torchs
        return host_threads(torch.device("cuda"))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Cores:
    return Cores(monkeypatch)


def test_host_updates_beside_a_gpu_take_the_cores_that_are_free(cores: Cores) -> None:
    """torchrun sets one thread a rank; on CPUs that is what the rank has. Kernels are launched on one or two more."""
    assert cores.threads(16, 16, launcher=16) == 4 - 1
    assert cores.threads(64, 64, launcher=64) == 16 - 2
    assert cores.threads(4, 4, launcher=4) == 1  # never none
    assert cores.threads(16, 16, ranks=None, gpus=2) == 8 - 2
    assert cores.threads(16, 16, launcher=16, torchs=8) == 8  # the user wants more than a share
    assert cores.threads(16, 16, ranks=1, torchs=16) == 16 - 2


def test_helper_threads_and_their_teams_are_no_more_than_there_are_threads(
    cores: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes on a team of its own in each thread that calls it."""
    assert cores.threads(64, 16, launcher=64, torchs=4) == 14
    assert HostSums(4, torch.device("cuda"))._adding == 14, "a kernel of its own adds, in so many threads"
    cleared: list[int] = []
    zero_ = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda part: (cleared.append(part.numel()), zero_(part))[1])
    assert torch.equal(Slab(12, torch.float32, Tier.HOST, torch.device("cuda")).allocate(12), torch.zeros(12))
    assert cleared == [4, 4, 4]


def test_moments_in_host_memory_are_touched_first_by_the_threads_of_their_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine of several nodes, memory lies where it is touched first."""
    asked: list[int] = []

    def zeros(numel: int, dtype: torch.dtype, threads: int, *, shown: bool) -> torch.Tensor:
        asked.append(threads)
        return torch.zeros(numel, dtype=dtype)

    monkeypatch.setattr("elixir_moe.optim.shard_update.host_threads", lambda device: 3)
    monkeypatch.setattr("elixir_moe.optim.shard_update.host_zeros", zeros)
    model = nn.Linear(4, 4)
    _, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload(rcache_blocks=2))
    optimizer.close()
    assert asked == [3, 3]


def is_forked(memory: torch.Tensor) -> bool:
    """Whether a process that is forked later has the memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = int(found[1], 16) <= memory.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "dc" not in line.split()
    raise AssertionError("no such memory")


def test_forked_processes_have_no_state_that_updates_would_copy() -> None:
    """Workers of a DataLoader; parameters on a CPU show its slabs, which such a worker may read."""
    optimizer: Any
    model = nn.Linear(4, 4)
    _, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload(rcache_blocks=2))
    (chunk,) = optimizer._chunks
    assert chunk.shard.master is not None and is_forked(chunk.shard.master)
    assert optimizer._updates.elementwise._arrays and not any(
        is_forked(array) for arrays in optimizer._updates.elementwise._arrays.values() for array in arrays
    )
    optimizer.close()
    slab = Slab(8, torch.float32, Tier.HOST, torch.device("cuda"))
    assert not is_forked(slab.allocate(8)) and is_forked(host_zeros(8, torch.float32, 1))


class Copied(TorchDispatchMode):
    """Notes what is copied to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::copy_":
            self.seen.append((args[1].device.type, args[1].dtype))
        return func(*args, **(kwargs or {}))


def test_weights_are_converted_where_they_go() -> None:
    """torch would convert bf16 weights to fp32 on the CPU, and send twice the bytes."""
    passage = WeightTransfer(Layout(chunk_numel=0, chunks=(), block_itemsize=1), torch.device("meta"))
    sources = _Sources(None, Deferred("filled the shards"), passage)
    members: Any = {range(0, 6): nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))}
    with Copied() as copied:
        sources.joined(members, 0, 6, torch.float32, passage.device)
    assert copied.seen == [("meta", torch.bfloat16)]


def test_cores_that_a_rank_has_been_bound_to_are_not_divided_again(cores: Cores) -> None:
    assert cores.threads(64, 16, launcher=64) == 16 - 2  # torchrun has bound it, or numactl
    assert cores.threads(64, 16) == 16 - 2  # Slurm or MPI has
    assert cores.threads(64, 16, launcher=16) == 4 - 1  # a job of 16 cores, which torchrun's ranks share


def test_both_passes_over_a_host_shard_run_on_the_threads_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload(rcache_blocks=2))
    asked: list[torch.device] = []

    def threads(device: torch.device) -> int:
        asked.append(device)
        return 3

    monkeypatch.setattr("elixir_moe.runtime.chunk.host_threads", threads)
    monkeypatch.setattr("elixir_moe.optim.shard_update.host_threads", threads)
    model(torch.ones(2, 4)).square().mean().backward()
    monkeypatch.setattr(Chunk, "device", torch.device("cuda", 1))
    optimizer.step()
    assert asked == [torch.device("cuda", 1)] * 2
    optimizer.close()


def train_where_tensors_are_made_elsewhere(folder: str) -> list[torch.Tensor]:
    """Norms and weights of a training under another default device, saved and loaded, as `train_as_ever` has them."""
    torch.set_default_device("meta")
    try:
        return train_as_ever(folder)
    finally:
        torch.set_default_device(None)


def train_as_ever(folder: str) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for plan in (
        em.Plan.zero3(rcache_blocks=2, chunk_numel=72),
        em.Plan.offload(rcache_blocks=2, chunk_numel=72, disk_chunks=1, disk=folder),
    ):
        model = nn.Sequential(*(nn.Linear(8, 8, device="cpu") for _ in range(3)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu"))
        model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan)
        path = os.path.join(folder, str(plan.disk_chunks))
        for step in range(3):
            model(torch.ones(2, 8, device="cpu")).square().mean().backward()
            seen.append(optimizer.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                em.save(path, model, optimizer)
        em.load(path, model, optimizer)
        seen += em.full_state_dict(model, all_ranks=True).values()
        optimizer.close()
    return seen


def test_a_default_device_of_the_user_changes_nothing(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Numbers for gloo are made on the CPU whatever torch.set_default_device says."""
    for name in ("ever", "elsewhere"):
        (tmp_path / name).mkdir()
    wanted = ranks(2).run(train_as_ever, str(tmp_path / "ever"))
    found = ranks(2).run(train_where_tensors_are_made_elsewhere, str(tmp_path / "elsewhere"))
    for one, other in zip(wanted, found, strict=True):
        assert every(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_never_leaves_the_host_is_not_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute shards travel, and the masters of fp32 chunks; those of 16-bit chunks are the host's own."""
    locked: list[int] = []
    monkeypatch.setattr("elixir_moe.memory.slabs.page_lock", lambda memory: locked.append(memory.nbytes))
    keys = [ChunkGroupKey(ranks=(0,), dtype=d, trainable=True, divisor=1) for d in (torch.bfloat16, torch.float32)]
    specs = [
        ChunkSpec(index=i, key=key, slots=(), numel=64, shards=1, residence=Residence.CACHED)
        for i, key in enumerate(keys)
    ]
    shards = build_shards([(spec, Tier.HOST) for spec in specs], torch.device("cuda"))
    assert sorted(locked) == [64 * 2, 64 * 4 + 64 * 4]
    assert every(shard.master is not None for shard in shards)


def test_a_thread_that_saves_works_on_the_gpu_of_its_rank(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's GPU is the first one, where a context of its own would take memory from another rank."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = torch.device("cuda", 1)
    with saving._on(Lane(device)):  # type: ignore[arg-type]
        assert chosen == [device]
        assert lanes.current(device) is not lanes.compute[1]


def test_threads_beside_training_work_on_the_gpu_of_their_rank(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that add gradients, use the disk and update."""
    chosen: list[tuple[str, torch.device]] = []

    def choose(device: torch.device) -> None:
        chosen.append((threading.current_thread().name.rpartition("_")[0], device))

    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr("elixir_moe.memory.slabs.page_lock", lambda memory: False)
    sums, file = HostSums(4, device), ValuesFile(str(tmp_path), [4096], device)
    for thread in (sums._thread, file.threads):
        thread.submit(int).result()
    monkeypatch.setattr("elixir_moe.optim.optimizer.work_on", choose)
    model = nn.Linear(4, 4)
    _, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload(rcache_blocks=2))
    optimizer._update_thread.submit(int).result()
    assert chosen == [("elixir-sum", device), ("elixir-disk", device), ("elixir-update", torch.device("cpu"))]
    for made in (sums, file, optimizer):
        made.close()


def gathered_bytes() -> bool:
    """Gathers what no backend knows the dtype of, as on NCCL."""
    communicator = build_communicators([(0, 1)], torch.device("cpu"))[0, 1]
    communicator.over_gloo = False
    buffer = torch.tensor([1, 2, 3, 4], dtype=torch.int16)
    buffer[2 * (1 - communicator.index) :][:2] = 0
    communicator.all_gather(buffer, 0).wait()
    communicator.close()
    return buffer.tolist() == [1, 2, 3, 4]


def test_a_gather_moves_bytes_of_any_dtype(ranks: Callable[[int], RankPool]) -> None:
    assert every(ranks(2).run(gathered_bytes))


def test_counts_of_a_layer_that_has_not_run_join_those_on_a_gpu() -> None:
    counts = [torch.zeros(4, dtype=torch.int64), torch.ones(2, dtype=torch.int64, device="meta")]
    joined = _joined(counts)
    assert (joined.device.type, joined.shape) == ("meta", (6,))
    assert _joined(counts[:1]).tolist() == [0] * 4


class Ahead(Communicator):
    """As if rank 1 had issued one collective more than rank 0, which an interrupt has kept from it."""

    @property
    def issued(self) -> list[int]:
        return [number + self.rank for number in super().issued]


def out_of_step() -> list[str]:
    """What a step in step has issued; then what backward, another forward and a step out of step say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = em.Plan.zero2(chunk_numel=72)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    communicator = optimizer._scheduler.chunks[0].communicator
    said = [str(communicator.issued)]  # where messages have tags nobody need count
    communicator.over_gloo = communicator.tagged = False
    before = communicator.issued
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    said.append(str([now - then for now, then in zip(communicator.issued, before, strict=True)]))
    communicator.__class__ = Ahead
    loss = model(torch.ones(2, 8)).square().mean()
    for run in (loss.backward, partial(model, torch.ones(2, 8)), optimizer.step):
        with pytest.raises(em.ElixirError) as raised:
            run()
        said.append(str(raised.value))
        optimizer.zero_grad()
    communicator.over_gloo = communicator.tagged = True
    optimizer.close()
    return said


def test_ranks_that_are_out_of_step_stop(ranks: Callable[[int], RankPool]) -> None:
    """On NCCL nothing but their order tells which collectives belong together; on gloo their tags do."""
    for tagged, in_step, *said in ranks(2).run(out_of_step):
        assert (tagged, in_step) == ("[]", "[2, 2]")
        assert len(said) == 3
        assert every("more gathers or reductions than others" in text for text in said)
        assert every(text.endswith("start all ranks again, from the latest checkpoint") for text in said)


class Started(Exception):  # noqa: N818 (no error: what a test waits for)
    """torch.distributed would be started now."""


def test_a_rank_takes_its_gpu_before_torch_distributed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL goes by the current device. No group is bound to it: torch would split the world's communicator for each."""
    chosen: list[int] = []
    asked: dict[str, Any] = {}

    def begin(*_: Any, **settings: Any) -> None:
        asked.update(settings, gpu=list(chosen))
        raise Started

    monkeypatch.setattr(accelerator, "kind", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", begin)
    for name, value in (("RANK", "6"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(Started):
        em.init_mesh()
    assert asked["gpu"] == [2] and "device_id" not in asked


def groups_in_a_bound_world() -> list[int]:
    """Ranks of a gloo group of two, where torch.distributed was started with a device_id."""
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    try:
        made = make_groups([(0, 1)] if dist.get_rank() < 2 else [], backend="gloo")
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    total = torch.ones(1)
    for group in made.values():
        dist.all_reduce(total, group=group)
    return [int(total), *(group.bound_device_id is not None for group in made.values())]


def test_a_world_bound_to_a_device_makes_groups_of_some_ranks(ranks: Callable[[int], RankPool]) -> None:
    """The ranks outside would join a split of the world's communicator, and the members of a gloo group would not."""
    assert ranks(3).run(groups_in_a_bound_world) == [[2, False], [2, False], [1]]


def groups_of_a_slow_rank() -> bool:
    """Whether the last rank had made its group when this one got hold of its own."""
    world: Any = dist.group.WORLD
    store, made = dist.distributed_c10d._get_default_store(), f"made after {len(dist.distributed_c10d._world.pg_map)}"
    new_group = dist.new_group

    def slow(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        for _ in range(20):
            torch.randn(400, 400).inverse()
        store.set(made, "yes")
        return group

    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == world.size() - 1:
            monkeypatch.setattr(dist, "new_group", slow)
        groups = make_groups([(0, 1)])
    known: bool = store.check([made])
    drop_groups(groups.values())
    return known


def test_no_rank_closes_a_group_that_another_still_connects(ranks: Callable[[int], RankPool]) -> None:
    """gloo ends the connection on both sides: a refused plan would reach the slower rank as a lost peer."""
    assert ranks(2).run(groups_of_a_slow_rank) == [True, True]


def connected() -> list[str]:
    """The collectives of a communicator as on NCCL when it is made; of one on gloo there are none."""
    build_communicators([(0, 1)], torch.device("cpu"))[0, 1].close()
    communicator = Communicator((0, 1), (dist.group.WORLD,) * 2, torch.device("cpu"))  # type: ignore[arg-type]
    assert communicator.over_gloo
    communicator.over_gloo, communicator._device = False, torch.device("cuda", 0)
    issued: list[str] = []

    def noting(name: str) -> Callable[..., Work]:
        return lambda buffer, *_, **__: (issued.append(f"{name} {buffer.numel()}"), Work())[1]

    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(communicator, name, noting(name))
    with pytest.MonkeyPatch.context() as monkeypatch:
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
        communicator.connect()
        communicator.over_gloo = True
        communicator.connect()
    return issued


def test_communicators_are_connected_when_they_are_made(ranks: Callable[[int], RankPool]) -> None:
    """With the collectives that chunks take: their memory is taken before a plan measures what is left."""
    for issued in ranks(2).run(connected):
        assert issued == ["all_gather 2", "reduce_scatter 2", "all_reduce 2"]


def connections_before_a_plan() -> list[str]:
    """The order in which `wrap` connects and plans, and how many process groups a refused plan leaves behind."""
    order: list[str] = []
    searching = import_module("elixir_moe.planner.auto")
    model = nn.Linear(4, 4)
    before = len(dist.distributed_c10d._world.pg_map)

    def plan(*_: Any) -> Any:
        order.append("plan")
        raise em.PlanError("nothing fits")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Communicator, "connect", lambda self: order.append(f"connect {self.ranks}"))
        monkeypatch.setattr(searching, "forecast", plan)
        with pytest.raises(em.PlanError, match="nothing fits"):
            em.wrap(
                model, torch.optim.AdamW(model.parameters()), plan=em.Plan.auto(lambda m, b: m(b), torch.ones(1, 4))
            )
    return [*order, str(len(dist.distributed_c10d._world.pg_map) - before)]


def test_a_plan_is_searched_for_when_communicators_have_their_memory(ranks: Callable[[int], RankPool]) -> None:
    for order in ranks(2).run(connections_before_a_plan):
        assert order == ["connect (0, 1)", "plan", "0"]


def test_a_cuda_graph_of_a_wrapped_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward and in a read, with nothing begun; on a CPU nobody asks."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(True) or True)
    model = nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload(rcache_blocks=2))
    model(torch.ones(2, 4)).square().mean().backward()
    assert not asked
    optimizer._hooks._device = torch.device("cuda")
    for run in (lambda: model(torch.ones(2, 4)), lambda: model.weight + 1):
        with pytest.raises(em.UsageError, match="a CUDA graph cannot capture a wrapped model"):
            run()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    optimizer.step()  # the gradients of before are still there
    assert model(torch.ones(2, 4)).isfinite().all()
    optimizer.close()


@pytest.mark.parametrize(
    ("device", "experts", "capacity_factor", "setting", "said"),
    [
        ("cuda", (0, 4), None, "", True),
        ("cuda", (0, 4), None, "max_split_size_mb:128", True),
        ("cuda", (0, 4), None, "expandable_segments:False", False),
        ("cuda", (0, 4), 1.25, "", False),
        ("cuda", (0, 0), None, "", False),
        ("cpu", (0, 4), None, "", False),
    ],
)
def test_a_mixture_that_drops_no_token_asks_for_expandable_segments(
    device: str,
    experts: tuple[int, ...],
    capacity_factor: float | None,
    setting: str,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    model = {"experts": list(experts), "ep": [1, 1], "residual": False, "capacity_factor": capacity_factor}
    config = settings_of(tmp_path, model=model)
    training: Any = SimpleNamespace(
        model=torch.nn.Module(),
        config=config,
        device=torch.device(device),
        data=SimpleNamespace(description=lambda validation: ""),
        validation=torch.zeros(1, 1, 2),
        parameters=1,
        ranks=1,
        progress=SimpleNamespace(accumulation=1, global_batch=config.run.global_batch),
    )
    lines = list(Trainer.description(training))
    assert any("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in line for line in lines) == said
