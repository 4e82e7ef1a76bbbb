"""Frozen weights on disk: the file against a tensor in memory, and training beside frozen weights in host memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.ledger import PAGE_BYTES, VALUES_BUFFERS
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.disk_values import ValuesElements, ValuesFile
from tests.memory.test_gate import Ended
from tests.support.adapter_cases import WIDTH, build
from tests.support.cases import with_further
from tests.support.every import same_tensors
from tests.support.parity import trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
REQUEST = 3 * PAGE_BYTES
SIZES = [2 * REQUEST + 6, 10, REQUEST]


@pytest.fixture
def short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("chunks.ledger", "memory.disk_values"):
        monkeypatch.setattr(f"elixir_moe.{room}.VALUES_REQUEST_BYTES", REQUEST)


@pytest.fixture
def opened(tmp_path: Path, short_requests: None) -> Iterator[Callable[..., ValuesFile]]:
    files: list[ValuesFile] = []

    def make(**options: Any) -> ValuesFile:
        files.append(ValuesFile(str(tmp_path), SIZES, torch.device("cpu"), **options))
        return files[-1]

    yield make
    for file in files:
        file.close()


def noise(nbytes: int, seed: int) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("checked", [True, False])
def test_what_is_read_is_what_was_written_last(checked: bool, opened: Callable[..., ValuesFile]) -> None:
    file = opened(checked=checked)
    places = [file.allocate(nbytes, index) for index, nbytes in enumerate(SIZES)]
    assert sum(place.nbytes for place in places) == file.nbytes
    wanted = [noise(nbytes, index) for index, nbytes in enumerate(SIZES)]
    for place, values in zip(places, wanted, strict=True):
        place.write(0, values)
    places[0].write(REQUEST - 4, noise(8, 9))  # in two requests
    wanted[0][REQUEST - 4 : REQUEST + 4] = noise(8, 9)
    elements = ValuesElements(places[0], torch.bfloat16, 0, SIZES[0] // 2)[2:-1]
    elements[1:3].write(torch.tensor([1.0, 2.0]))
    wanted[0].view(torch.bfloat16)[3:5] = torch.tensor([1.0, 2.0])
    assert torch.equal(elements.read().view(torch.int16), wanted[0].view(torch.int16)[2:-1])
    for place, values in zip(places, wanted, strict=True):
        reading = place.begin()
        assert reading is not None
        assert torch.equal(reading.values(), values)
        place.give_back(Work())


def test_a_buffer_is_free_again_when_it_is_given_back(opened: Callable[..., ValuesFile]) -> None:
    file = opened()
    *places, last = (file.allocate(1, index) for index in range(VALUES_BUFFERS + 1))
    readings = [place.begin() for place in places]
    assert None not in readings and places[0].begin() is readings[0]
    assert last.begin() is None
    copied: list[str] = []
    places[0].give_back(Work(finish=lambda: copied.append("copied")))
    again = last.begin()
    assert again is not None
    again.values()
    assert copied, "the copy has ended before the buffer is filled"


def test_a_buffer_that_is_given_back_early_is_filled_no_more(opened: Callable[..., ValuesFile]) -> None:
    place = opened().allocate(1, 0)
    reading = place.begin()
    assert reading is not None
    reading.values()
    running = Ended()
    reading.requests.append(running)
    place.give_back(Work())
    assert running.waits == 1


def test_a_flipped_bit_is_noticed_if_the_plan_verifies(opened: Callable[..., ValuesFile]) -> None:
    for checked in (True, False):
        file = opened(checked=checked)
        place = file.allocate(SIZES[0], 7)
        place.write(0, noise(SIZES[0], 0))
        page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
        file.move(REQUEST, page, write=True)
        reading = place.begin()
        assert reading is not None
        if checked:
            with pytest.raises(em.DiskError, match="values of chunk 7, bytes 12288 to"):
                reading.values()
        else:
            assert not torch.equal(reading.values(), noise(SIZES[0], 0))


def test_a_disk_that_cannot_have_it_is_named(tmp_path: Path) -> None:
    for folder, sizes in ((tmp_path, [1 << 50]), (tmp_path / "nowhere", [10])):
        with pytest.raises(em.TierError, match="for shards cannot be had"):
            ValuesFile(str(folder), sizes, torch.device("cpu"))


def run(on_disk: bool, dtype: torch.dtype, folder: str, devices: int = 0) -> dict[str, Any]:
    """(rank) Training, evaluation, a write and a checkpoint; the frozen weights are on disk or in host memory."""
    plan = em.Plan.offload(
        rcache_blocks=4,
        chunk_numel=WIDTH * WIDTH + WIDTH,
        device_chunks=devices,
        disk_chunks=99 if on_disk else 0,
        disk=folder if on_disk else None,
        verify=on_disk,
    )
    rank, world = dist.get_rank(), dist.get_world_size()

    def backward(model: Any, step: int) -> None:
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(world)[rank].to(dtype)
        with torch.no_grad():
            model(rows)
            if step == 1:
                model[2].base.weight.mul_(2)
        for _ in range(2):
            model(rows).float().pow(2).mean().backward()

    def after(model: nn.Module) -> nn.Module:
        held, size = em.inspect(model).held_bytes, em.inspect(model).footprint
        assert held["host"] == size.host_bytes
        assert held["disk"] == size.disk_bytes
        frozen = sum(c.nbytes for c in em.inspect(model).layout.chunks if not c.key.trainable)
        assert on_disk == (size.disk_bytes >= frozen // world)
        return model

    return trained(build, backward, plan, 3, after=after, compute_dtype=dtype)


def copied(folder: str) -> list[int]:
    """(rank) Elements of frozen shards that the first step copies out of the file, apart from gathers."""
    model, optimizer = build()
    plan = em.Plan.offload(chunk_numel=WIDTH * WIDTH + WIDTH, disk=folder, disk_chunks=99)
    model, optimizer = em.wrap(model, optimizer, plan=plan)
    found: list[int] = []
    read = ValuesElements.read

    def spied(elements: ValuesElements) -> Tensor:
        found.append(elements.stop - elements.start)
        return read(elements)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ValuesElements, "read", spied)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    optimizer.close()
    return found


def test_the_first_step_compares_frozen_weights_without_a_copy(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(copied, str(tmp_path)) == [[]]


@pytest.mark.parametrize("dtype", with_further((torch.bfloat16, torch.float32), (torch.bfloat16,)))
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", with_further((0, 3), (0,)))
def test_frozen_weights_on_disk_train_to_the_same_bits(
    world: int, dtype: torch.dtype, devices: int, ranks: Ranks, tmp_path: Path
) -> None:
    wanted, found = (ranks(world).run(run, on_disk, dtype, str(tmp_path), devices)[0] for on_disk in (False, True))
    assert found["norms"] == wanted["norms"]
    assert same_tensors(wanted["state"], found["state"])


def saved(folder: str) -> list[dict[str, Tensor]]:
    """(rank) What a checkpoint of frozen weights on disk gives back, also to a plan without a disk."""
    states = []
    for on_disk, path in ((True, None), (False, f"{folder}/saved"), (True, f"{folder}/saved")):
        torch.manual_seed(1 if path is None else 2)
        model, optimizer = build()
        plan = em.Plan.offload(chunk_numel=2048, disk=folder, disk_chunks=99) if on_disk else em.Plan.ddp()
        model, optimizer = em.wrap(model, optimizer, plan=plan)
        if path is None:
            em.save(f"{folder}/saved", model, optimizer, asynchronous=True).result()
        else:
            em.load(path, model, optimizer)
        states.append(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
    return states


def test_a_checkpoint_has_the_frozen_weights(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, *loaded in ranks(2).run(saved, str(tmp_path)):
        for state in loaded:
            assert same_tensors(wanted, state)


def failing(folder: str) -> tuple[str, list[float]]:
    """(rank) What a read that fails says, and the losses of a training that goes on after it."""
    losses, said, move = [], "", ValuesFile.move
    for fails in (False, True):
        torch.manual_seed(1)
        model, optimizer = build()
        plan = em.Plan.offload(chunk_numel=WIDTH * WIDTH + WIDTH, rcache_blocks=4, disk=folder, disk_chunks=99)
        model, optimizer = em.wrap(model, optimizer, plan=plan)
        reads = 0

        def once(file: ValuesFile, offset: int, memory: Tensor, *, write: bool) -> None:
            nonlocal reads
            reads += 1
            if reads == 3:
                raise em.DiskError("the disk is gone for a moment")
            move(file, offset, memory, write=write)

        for step in range(3):
            rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            with pytest.MonkeyPatch.context() as patch:
                if fails and step == 1:
                    patch.setattr(ValuesFile, "move", once)
                    try:
                        model(rows).square().mean().backward()
                    except em.DiskError as error:
                        said = str(error)
                    optimizer.zero_grad()
                loss = model(rows).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
    return said, losses


def test_a_read_that_fails_is_told_and_the_step_can_be_repeated(ranks: Ranks, tmp_path: Path) -> None:
    ((said, losses),) = ranks(1).run(failing, str(tmp_path))
    assert "gone for a moment" in said
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("values_on_disk", [False, True])
def test_a_model_that_is_frozen_as_a_whole_may_have_any_optimizer(values_on_disk: bool, tmp_path: Path) -> None:
    """A teacher, say: nothing is updated on disk."""
    em.init_mesh(device_type="cpu")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).requires_grad_(False)
    rows = torch.randn(3, 16)
    wanted = model(rows)
    plan = em.Plan.offload(disk=str(tmp_path), disk_chunks=9, values_on_disk=values_on_disk, chunk_numel=300)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan)
    assert torch.equal(model(rows), wanted)
    optimizer.close()
