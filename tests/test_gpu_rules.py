"""What matters on GPUs alone, shown where there is none, by stand-ins for torch.cuda that note what they are asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.collectives import Ticket, backend_of, timeout_of
from elixir_moe.chunks.streams import Streams

wrapping = import_module("elixir_moe.wrap")  # the package shows the function of that name


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
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.choose)
        monkeypatch.setattr(dist, "is_initialized", lambda: self.started)
        monkeypatch.setattr(wrapping, "init_mesh", self.start)

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
    assert wrapping._start(asked) == torch.device(found)
    assert machine.current == current


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    with pytest.raises(em.ConfigError, match="4 GPUs"):
        wrapping._start("cuda:4")
    assert not machine.started


def test_a_process_group_that_serves_no_cpu_tensors() -> None:
    """What a world started with backend="nccl" is: asked for its timeout, and used with what it does not serve."""
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=77))
    assert timeout_of(group) == timedelta(seconds=77)
    assert backend_of(group, torch.device("cuda")) == "gloo"
    with pytest.raises(em.ConfigError, match=r"device='cpu': .* tensors on \['cuda'\] alone"):
        backend_of(group, torch.device("cpu"))
    dist.destroy_process_group(group)


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

    def record_event(self) -> frozenset[str]:
        return frozenset(self.behind)

    def wait_event(self, event: frozenset[str]) -> None:
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
    ticket, stream = Ticket(), Lane(torch.device("cuda", index))
    stream.note("reduction")
    ticket.mark(stream)  # type: ignore[arg-type]
    ticket.wait()
    assert [lane.behind for lane in lanes.compute.values()] == [{"reduction"} if i == index else set() for i in (0, 1)]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_block_is_filled_behind_whoever_has_read_it_late(keeps: bool, lanes: Lanes) -> None:
    """Also where the reader keeps it: compute may have read the memory that takes its place, too."""
    model = nn.Linear(4, 4)
    plan = em.Plan.offload(rcache_blocks=1, chunk_numel=64)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    scheduler = optimizer._scheduler
    streams = scheduler._streams = Streams(torch.device("cuda", 0))
    (chunk,), (block,) = scheduler.chunks, scheduler._rcache.blocks
    part: torch.Tensor | None = block._memory[:4]
    block.vacate(streams.marked(Ticket()))
    lanes.compute[0].note("late read")
    if not keeps:
        del part
    scheduler._begin_gather(chunk, block)
    assert streams._fetch is not None
    assert "late read" in streams._fetch.behind  # type: ignore[attr-defined]
    assert optimizer.statistics().blocks_replaced == keeps
    optimizer.close()
