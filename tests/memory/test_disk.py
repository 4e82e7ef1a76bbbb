"""The disk tier: what its file holds, that it shows no name, that faults are told, and that no bit is lost by it."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.ledger import PAGE_BYTES
from elixir_moe.chunks.param_spec import Precision, StateArray
from elixir_moe.memory import direct_file
from elixir_moe.memory.disk import DiskStore
from tests.support.cases import with_further
from tests.support.every import every, same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
SLICE = PAGE_BYTES
NUMELS = [3 * SLICE + 17, 5, SLICE, SLICE // 2]
"""Of several slices, less than a page, one whole slice, whole pages."""
WIDE, NARROW = Precision().arrays(2), Precision(master="bf16", moments="int8").arrays(2)


def shards(
    numels: list[int] = NUMELS, arrays: tuple[StateArray, ...] = WIDE
) -> list[tuple[int, tuple[StateArray, ...]]]:
    return [(numel, arrays) for numel in numels]


@pytest.fixture
def short_slices() -> Iterator[None]:
    with mock.patch("elixir_moe.chunks.ledger._SPILL_SLICE_NUMEL", SLICE):
        yield


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, short_slices: None) -> Iterator[Callable[..., DiskStore]]:
    """Makes files, around the system's cache or not."""
    files: list[DiskStore] = []

    def make(numels: list[int] = NUMELS, **options: Any) -> DiskStore:
        with mock.patch.object(os, "O_DIRECT", os.O_DIRECT if request.param else 0):
            files.append(DiskStore(str(tmp_path), shards(numels), **options))
        return files[-1]

    yield make
    for file in files:
        file.close()


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_arrays_of_all_chunks_keep_apart(opened: Callable[..., DiskStore]) -> None:
    spill = opened(checked=True)
    places = [spill.allocate(numel, 0) for numel in NUMELS]
    assert sum(place.nbytes for place in places) == spill.nbytes
    wanted = {(p, a): noise(NUMELS[p], 10 * p + a) for p in range(len(places)) for a in range(3)}
    for (p, a), values in wanted.items():
        assert not places[p].read(a, 0, NUMELS[p]).any(), "zeros at first"
        places[p].write(a, 0, values)
    for (p, a), values in wanted.items():
        for start, stop in ((0, NUMELS[p]), (3, NUMELS[p] - 1), (SLICE - 2, SLICE + 2), (NUMELS[p], NUMELS[p])):
            start, stop = min(start, NUMELS[p]), min(stop, NUMELS[p])
            assert torch.equal(places[p].read(a, start, stop), values[start:stop])
    places[0].write(1, SLICE - 5, torch.arange(10.0))
    wanted[0, 1][SLICE - 5 : SLICE + 5] = torch.arange(10.0)
    assert torch.equal(places[0].read(1, 0, NUMELS[0]), wanted[0, 1])


def test_a_change_meets_every_element_once(opened: Callable[..., DiskStore]) -> None:
    spill = opened(checked=True)
    places = [spill.allocate(numel, 0) for numel in NUMELS]
    for place, numel in zip(places, NUMELS, strict=True):
        place.write(0, 0, noise(numel, numel))

    def work(start: int, arrays: list[Tensor]) -> None:
        arrays[1].copy_(arrays[0] * 2)
        arrays[2].copy_(torch.arange(start, start + len(arrays[0])))

    for change in [part for place in places for part in place.change(work)]:
        change.result()
    for place, numel in zip(places, NUMELS, strict=True):
        assert torch.equal(place.read(0, 0, numel), noise(numel, numel))
        assert torch.equal(place.read(1, 0, numel), noise(numel, numel) * 2)
        assert torch.equal(place.read(2, 0, numel), torch.arange(numel).float())


def test_arrays_have_dtypes_and_lengths_of_their_own(tmp_path: Path, short_slices: None) -> None:
    """Chunks with wide and narrow state lie in one file; a change gets the blocks of its slice."""
    given = [(NUMELS[0], NARROW), (NUMELS[0], WIDE)]
    spill = DiskStore(str(tmp_path), given, checked=True)
    narrow, wide = (spill.allocate(NUMELS[0], chunk) for chunk in range(2))
    assert spill.nbytes == narrow.nbytes + wide.nbytes
    pages = [2 + 1 + 1 + 1 + 1, 3 * 4]  # of a whole slice; the last slice has a page for each array
    assert [narrow.nbytes, wide.nbytes] == [PAGE_BYTES * (3 * pages[0] + 5), PAGE_BYTES * (3 * pages[1] + 3)]
    blocks = -(-NUMELS[0] // 256)
    wide.write(2, 0, noise(NUMELS[0], 3))
    narrow.write(0, 0, noise(NUMELS[0], 1))
    narrow.write(2, 0, torch.arange(blocks))

    def work(start: int, arrays: list[Tensor]) -> None:
        numel = min(SLICE, NUMELS[0] - start)
        first, last = start // 256, -(-(start + numel) // 256)
        assert [array.dtype for array in arrays] == [torch.bfloat16] + 4 * [torch.uint8]
        assert [len(array) for array in arrays] == [numel, numel, last - first, numel, last - first]
        assert torch.equal(arrays[2], torch.arange(first, last).to(torch.uint8))
        arrays[4].copy_(arrays[2] + 1)

    for change in narrow.change(work):
        change.result()
    assert torch.equal(narrow.read(4, 15, 20), torch.arange(16, 21).to(torch.uint8))
    assert torch.equal(narrow.read(0, 0, NUMELS[0]), noise(NUMELS[0], 1).bfloat16())
    assert torch.equal(wide.read(2, 0, NUMELS[0]), noise(NUMELS[0], 3))
    spill.close()


def test_slices_are_changed_side_by_side(opened: Callable[..., DiskStore]) -> None:
    """While one is computed, others are read and written: here each waits until three are under way."""
    place = opened([4 * SLICE]).allocate(4 * SLICE, 0)
    together = threading.Barrier(3, timeout=60)
    for change in place.change(lambda start, _: start < 3 * SLICE and together.wait() and None):
        change.result()


@pytest.mark.fault(34, 35)
def test_the_file_has_no_name(opened: Callable[..., DiskStore], tmp_path: Path) -> None:
    opened().allocate(NUMELS[0], 7).write(0, 0, noise(NUMELS[0], 1))
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(9)
def test_a_flipped_bit_is_seen_where_checksums_are_kept(opened: Callable[..., DiskStore]) -> None:
    for checked in (True, False):
        spill = opened(checked=checked, rank=3)
        place = spill.allocate(NUMELS[0], 7)
        place.write(0, 0, noise(NUMELS[0], 1))
        with open(f"/proc/self/fd/{spill._file.fileno()}", "r+b") as behind:
            behind.seek(4 * (3 * SLICE + 11))  # behind a slice of three arrays: in the second slice of the first array
            byte = behind.read(1)[0]
            behind.seek(-1, os.SEEK_CUR)
            behind.write(bytes([byte ^ 1]))
        assert torch.equal(place.read(0, 0, SLICE), noise(NUMELS[0], 1)[:SLICE])
        if checked:
            told = rf"rank 3 .*chunk 7, master, elements {SLICE} to {2 * SLICE} of.*continue from a checkpoint"
            with pytest.raises(em.DiskError, match=told):
                place.read(0, SLICE, SLICE + 1)
        else:
            assert place.read(0, SLICE + 11, SLICE + 12) != noise(NUMELS[0], 1)[SLICE + 11]


@pytest.mark.usefixtures("short_slices")
def test_a_full_disk_shows_before_training(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(em.TierError, match=r"^disk of .*: [\d.]+ [KM]iB .* GiB are left: No space left .*fewer chunks"),
    ):
        DiskStore(str(tmp_path), shards())
    with pytest.raises(em.TierError, match=r"'/nowhere/at/all': No such file"):
        DiskStore("/nowhere/at/all", shards())
    with pytest.raises(em.TierError, match=r"No space left|File too large"):
        DiskStore(str(tmp_path), shards([1 << 50]))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_is_told(opened: Callable[..., DiskStore]) -> None:
    place = opened().allocate(NUMELS[0], 7)
    broken = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    reading = mock.patch.object(direct_file.os, "preadv", broken)
    writing = mock.patch.object(direct_file.os, "pwritev", broken)
    with reading, pytest.raises(em.DiskError, match="could not be read from"):
        place.read(0, 0, 3)
    with writing, pytest.raises(em.DiskError, match="not be written to"):
        place.write(0, 0, torch.zeros(3))
    with writing, pytest.raises(em.DiskError, match="Input/output error"):
        [part.result() for part in place.change(lambda *_: None)]


# ------------------------------------------------------------------------------------------------------------- training

D = 48


class Net(nn.Module):
    """Some layers, one of them used in every other step only, one frozen, and weights of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(4))
        self.sometimes = nn.Linear(D, D)
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.frozen(self.sometimes(x) if self.used else x)


def train(plan: em.Plan, dtype: torch.dtype, accumulation: int, **options: Any) -> dict[str, Any]:
    """Five steps, with a read of all weights, a write to one, and a backward that is thrown away."""
    model = Net()
    groups = [{"params": list(model.layers.parameters())}, {"params": model.sometimes.parameters(), "lr": 3e-3}]
    inner = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    model, optimizer = em.wrap(model, inner, plan=plan, compute_dtype=dtype, **options)
    norms = []
    for step in range(5):
        model.used = step % 2 == 0
        for micro in range(accumulation):
            x = noise(4 * D, 10 * step + micro).view(4, D).to(dtype)
            model(x).float().square().mean().backward()
        if step == 3:
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
        norms.append(optimizer.clip_grad_norm_(0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model.layers[2][1].weight.mul_(0.5)
                with torch.no_grad():
                    model.layers[0][1].weight[3] = 1.0
    result = {"norms": norms, "state": em.full_state_dict(model, all_ranks=True), "held": em.inspect(model).held_bytes}
    result |= {"tiers": sorted(row["tier"] for row in em.inspect(model).rows), "size": em.inspect(model).footprint}
    optimizer.close()
    return result


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "accumulation", "world"),
    with_further(product([FP32, BF16], [1, 2], [1, 2]), [(FP32, 1, 2), (FP32, 2, 1), (BF16, 2, 2)]),
)
def test_not_a_bit_differs_from_host_memory(
    dtype: torch.dtype, accumulation: int, world: int, ranks: Ranks, tmp_path: Path
) -> None:
    length = 2 * D * D
    in_memory = em.Plan.offload(rcache_blocks=3, device_chunks=1, chunk_numel=length)
    on_disk = replace(in_memory, disk_chunks=2, disk=str(tmp_path), verify=accumulation == 2)
    wanted = ranks(world).run(train, in_memory, dtype, accumulation)
    found = ranks(world).run(train, on_disk, dtype, accumulation)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["norms"] == theirs["norms"]
        assert same_tensors(ours["state"], theirs["state"])
        assert "disk" in ours["tiers"] and "disk" not in theirs["tiers"]
        size = ours["size"]
        sums = size.accumulator_bytes if accumulation > 1 else dict.fromkeys(size.accumulator_bytes, 0)
        assert ours["held"]["disk"] == size.disk_bytes > 0
        assert ours["held"]["host"] == size.host_bytes + sums["host"]
    assert not list(tmp_path.iterdir())


def refused(folder: str) -> str:
    """The disk of the last rank is full."""
    import torch.distributed as dist

    plan = em.Plan.offload(rcache_blocks=3, disk_chunks=2, chunk_numel=2 * D * D, disk=folder)
    fallocate = os.posix_fallocate

    def full(*args: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(*args)

    model = Net()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with mock.patch.object(os, "posix_fallocate", full), pytest.raises(em.TierError) as told:
        em.wrap(model, optimizer, plan=plan)
    return str(told.value)


@pytest.mark.fault(6)
def test_a_full_disk_of_one_rank_is_told_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(refused, str(tmp_path)):
        assert message.startswith(f"[rank 1] disk of {socket.gethostname()}: ")
        assert "No space left on device" in message


PLAN = em.Plan.offload(rcache_blocks=3, disk_chunks=2, chunk_numel=2 * D * D)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk": 3}, r"disk=3: expected a folder"),
        ({"disk": ""}, r"disk='': expected a folder"),
        ({"disk": "a\0b"}, r"expected a folder"),
        ({"disk": "/tmp", "disk_chunks": 0}, r"disk=.*disk_chunks=0"),
        ({"disk": "/tmp", "verify": 1}, r"verify=1: expected True or False"),
        ({"verify": True}, r"verify=True.*disk="),
        ({"host": "1 GiB"}, r"disk="),
        ({"disk": "/tmp", "host": "1 GiB", "disk_chunks": 2}, r"host=1.00 GiB and disk_chunks=2: give one"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(em.PlanError, match=message):
        em.Plan.offload(**options)


def test_a_plan_with_chunks_on_disk_and_no_folder_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with pytest.raises(em.ConfigError, match=r"disk_chunks=2: say in which folder"):
        em.wrap(model, optimizer, plan=PLAN)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True)], ids=["sgd", "amsgrad"]
)
def test_other_optimizers_are_refused(make: Any) -> None:
    model = Net()
    optimizer = make((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with pytest.raises(em.ConfigError, match=f"chunks on disk are updated by Adam.*{type(optimizer).__name__}"):
        em.wrap(model, optimizer, plan=replace(PLAN, disk="/tmp"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_nothing_to_masters_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    model, optimizer = em.wrap(model, optimizer, plan=replace(PLAN, disk=str(tmp_path)))
    torch.set_default_dtype(dtype)
    try:
        found = em.full_state_dict(model, all_ranks=True)
        em.save(tmp_path / "saved", model, optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer.close()
    assert every(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in before.items())
