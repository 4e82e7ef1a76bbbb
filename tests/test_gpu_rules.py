"""What matters on GPUs alone, shown where there is none, by stand-ins for torch.cuda that note what they are asked."""

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe.chunks.collectives import backend_of, timeout_of

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
