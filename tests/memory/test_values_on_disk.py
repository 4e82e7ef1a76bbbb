"""Trainable chunks wholly on disk: the record against arrays in memory, and training beside values in host memory."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.chunks.ledger import GRADIENT, PAGE_BYTES, SUMS_IN_FLIGHT, VALUES_BUFFERS, footprint
from elixir_moe.chunks.param_spec import Precision
from elixir_moe.chunks.plan import Plan
from elixir_moe.distributed.collectives import Work
from elixir_moe.memory.disk import DiskFile, DiskStore
from elixir_moe.memory.disk_values import FullDiskShard, ValuesElements, ValuesFile, ValuesPlace
from tests.chunks.test_plan import tiny_layout
from tests.memory.test_gate import Ended
from tests.support.cases import with_further
from tests.support.every import same_tensors
from tests.support.parity import trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
SLICE = PAGE_BYTES // 2
NUMELS = [3 * SLICE + 17, 5, SLICE]
FP32, BF16 = torch.float32, torch.bfloat16


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[BF16, FP32], ids=["bf16", "fp32"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., list[FullDiskShard]]]:
    """Makes the two files of a rank, with slices so short that a chunk has several."""
    files: list[DiskFile] = []

    def make(**options: Any) -> list[FullDiskShard]:
        spill = DiskStore(str(tmp_path), [(n, (*Precision().arrays(2), GRADIENT)) for n in NUMELS], **options)
        sizes = [numel * request.param.itemsize for numel in NUMELS]
        values = ValuesFile(str(tmp_path), sizes, torch.device("cpu"), **options)
        files.extend((spill, values))
        slice_bytes = spill.slice_numel * request.param.itemsize
        places = [values.allocate(nbytes, chunk, slice_bytes) for chunk, nbytes in enumerate(sizes)]
        return [
            FullDiskShard(spill, numel, chunk, ValuesElements(place, request.param, 0, numel))
            for chunk, (numel, place) in enumerate(zip(NUMELS, places, strict=True))
        ]

    with mock.patch("elixir_moe.chunks.ledger._SPILL_SLICE_NUMEL", SLICE):
        yield make
    for file in files:
        file.close()


def read_ahead(spilled: FullDiskShard) -> Tensor:
    """The values, as a gather gets them."""
    place = spilled._values.place
    reading = place.begin()
    assert reading is not None
    found = reading.values().view(spilled._values.dtype).clone()
    place.give_back(Work())
    return found


@pytest.mark.parametrize("checked", [True, False])
def test_a_change_reads_the_gradient_and_writes_the_values(
    checked: bool, opened: Callable[..., list[FullDiskShard]]
) -> None:
    chunks = opened(checked=checked)
    terms = [[noise(numel, 10 * numel + i).to(BF16) for i in range(3)] for numel in NUMELS]
    for spilled, numel, (one, two, three) in zip(chunks, NUMELS, terms, strict=True):
        spilled.write(0, 0, noise(numel, numel))
        spilled.add_gradient(torch.full((numel,), torch.nan), first=True)  # a sum that is thrown away
        spilled.add_gradient(one, first=True)
        spilled.add_gradient(two, first=False)
        squares = spilled.add_gradient(three, first=False)
        assert squares == pytest.approx((one.float() + two + three).double().square().sum().item(), rel=1e-6)

    def update(start: int, arrays: list[Tensor]) -> None:
        master, first, second, gradient = arrays
        first.copy_(gradient)
        second.copy_(torch.arange(start, start + master.numel()))
        master.sub_(gradient)

    for change in [part for spilled in chunks for part in spilled.change(update)]:
        change.result()
    for spilled, numel, (one, two, three) in zip(chunks, NUMELS, terms, strict=True):
        total = one.float() + two + three
        master = noise(numel, numel) - total
        assert torch.equal(spilled.read(0, 0, numel), master)
        assert torch.equal(spilled.read(1, 0, numel), total)
        assert torch.equal(spilled.read(2, 0, numel), torch.arange(numel).float())
        assert torch.equal(read_ahead(spilled), master.to(spilled._values.dtype))
        assert torch.equal(spilled.read(spilled.gradient, 0, numel), total), "a change leaves it"
        half = numel // 2
        squares = spilled.change_gradient([(0, half)], lambda part: part.clamp_(-0.25, 0.25))
        clamped = torch.cat([total[:half].clamp(-0.25, 0.25), total[half:]])
        assert torch.equal(spilled.read(spilled.gradient, 0, numel), clamped)
        assert squares == pytest.approx(clamped.double().square().sum().item(), rel=1e-6)


@pytest.mark.fault(9)
def test_a_flipped_bit_of_a_gradient_or_a_value_is_noticed(opened: Callable[..., list[FullDiskShard]]) -> None:
    spilled = opened(checked=True)[0]
    spilled.add_gradient(noise(NUMELS[0], 1), first=True)
    for part in spilled.change(lambda *_: None):
        part.result()
    page = torch.full((PAGE_BYTES // 4,), 3.0)
    spilled._file.move(spilled._place(1, spilled.gradient), page, write=True)
    with pytest.raises(em.DiskError, match=f"chunk 0, gradient, elements {SLICE} to {2 * SLICE} of its shard"):
        spilled.add_gradient(noise(NUMELS[0], 2), first=False)
    place = spilled._values.place
    place._file.move(place._offset, page, write=True)
    with pytest.raises(em.DiskError, match="values of chunk 0, bytes 0 to"):
        read_ahead(spilled)


# ------------------------------------------------------------------------------------------------------------- training

WIDTH = 32


class Block(nn.Module):
    """A layer of its own weights, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x -> x + mlp(x)."""
        out: Tensor = checkpoint(lambda x: x + self.down(self.up(self.norm(x)).tanh()), x, use_reentrant=False)
        return out


class Net(nn.Module):
    """Recomputed layers, a mixture with experts of single ranks, a frozen layer, and one that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        experts = em.expert_mesh(em.init_mesh(device_type="cpu"), dist.get_world_size())
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mixture = em.MoE(d_model=WIDTH, d_hidden=WIDTH, num_experts=4, top_k=2, mesh=experts)
        self.frozen, self.sometimes = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
        self.used = True
        em.annotate(
            self,
            {
                "mixture.experts.*": em.Pattern(experts, replicate=("edp",), shard={"ep": 0}),
                "*": em.Pattern(em.init_mesh(device_type="cpu"), replicate=("dp",)),
            },
        )

    def forward(self, x: Tensor) -> Tensor:
        """All of it, with the mixture's auxiliary loss in the result."""
        for block in self.blocks:
            x = block(x)
        out, aux = self.mixture(x)
        x = self.frozen(x + out)
        return (self.sometimes(x) if self.used else x) + aux.to(x.dtype)


def build() -> tuple[nn.Module, Any]:
    """The net, and an optimizer with two groups."""
    model = Net()
    groups = [{"params": [*model.blocks.parameters(), *model.mixture.parameters()]}]
    groups.append({"params": model.sometimes.parameters(), "lr": 3e-3})
    return model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4)


def rows(step: int, micro: int, dtype: torch.dtype) -> Tensor:
    """This rank's rows of a micro-batch."""
    whole = noise(8 * WIDTH, 10 * step + micro).view(8, WIDTH).to(dtype)
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def plan_of(folder: str, whole: bool, devices: int = 0) -> Plan:
    """All chunks in host memory, or wholly on disk, but for `devices` on the device."""
    plan = em.Plan.offload(rcache_blocks=8, chunk_numel=4 * WIDTH * WIDTH, device_chunks=devices)
    return replace(plan, disk_chunks=99, disk=folder, values_on_disk=True, verify=True) if whole else plan


def run(folder: str, whole: bool, dtype: torch.dtype, accumulation: int, devices: int) -> dict[str, Any]:
    """(rank) Four steps, with evaluation between backwards, a backward that is thrown away, writes, and clipping."""

    def backward(model: Any, step: int) -> None:
        model.used = step % 2 == 0
        for micro in range(accumulation):
            if step == 2 and micro == 0:
                model(rows(9, 9, dtype)).float().square().mean().backward()
                model._elixir.optimizer.zero_grad()
            with torch.no_grad():
                model(rows(step, 7, dtype))
            model(rows(step, micro, dtype)).float().square().mean().backward()
            if step == 1 and micro == 0:
                with torch.no_grad():
                    model.blocks[1].up.weight[3:].mul_(0.5)
                    model.frozen.weight.mul_(2)

    def after(model: nn.Module) -> nn.Module:
        found = em.inspect(model)
        assert found.held_bytes["disk"] == found.footprint.disk_bytes
        assert found.footprint.shard_bytes["host"] == 0 or not whole
        assert found.held_bytes["host"] == found.footprint.host_bytes
        assert found.footprint.accumulator_bytes["host"] == 0 or not whole
        return model

    return trained(build, backward, plan_of(folder, whole, devices), 4, after=after, compute_dtype=dtype)


@pytest.mark.parametrize(
    ("world", "dtype", "accumulation", "devices"),
    with_further(product([1, 2, 4], [FP32, BF16], [1, 3], [0, 2]), [(1, FP32, 3, 0), (2, BF16, 1, 2), (2, BF16, 3, 0)]),
)
def test_not_a_bit_differs_from_values_in_host_memory(
    world: int, dtype: torch.dtype, accumulation: int, devices: int, ranks: Ranks, tmp_path: Path
) -> None:
    found, wanted = (
        ranks(world).run(run, str(tmp_path), whole, dtype, accumulation, devices) for whole in (True, False)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["norms"] == theirs["norms"]
        assert same_tensors(ours["state"], theirs["state"])
    assert not list(tmp_path.iterdir())


def saved(folder: str) -> list[list[Any]]:
    """(rank) The weights and the norms of two further steps, each after a load into another plan."""
    plans = (plan_of(folder, True), plan_of(folder, False), em.Plan.zero3(rcache_blocks=9), plan_of(folder, True, 1))
    results: list[list[Any]] = []
    for number, plan in enumerate(plans):
        torch.manual_seed(number)
        model, optimizer = em.wrap(*build(), plan=plan)
        if number:
            em.load(f"{folder}/saved", model, optimizer)
        found: list[Any] = []
        for step in range(3):
            if number or step == 0:
                model(rows(step if number == 0 else 7 + step, 0, FP32)).square().mean().backward()
                found.append(optimizer.clip_grad_norm_(1.0).item())
                optimizer.step()
        if not number:
            em.save(f"{folder}/saved", model, optimizer, asynchronous=True).result()
        else:
            results.append([*found, *em.full_state_dict(model, all_ranks=True).values()])
        optimizer.close()
    return results


def test_a_checkpoint_goes_on_to_the_same_bits_in_other_tiers(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, *others in ranks(2).run(saved, str(tmp_path)):
        assert len(wanted) > 10
        for found in others:
            for ours, theirs in zip(found, wanted, strict=True):
                if isinstance(theirs, Tensor):
                    assert torch.equal(ours, theirs)
                else:  # the norm is rounded to fp32 once, and each tier cuts the sum of squares in its own way
                    assert ours == pytest.approx(theirs, rel=2**-22)


def limited(folder: str) -> list[list[Any]]:
    """(rank) Steps with gradients clamped, their norms asked for, and an overflow that is skipped; in both plans."""
    results = []
    for whole in (False, True):
        torch.manual_seed(1)
        model, optimizer = em.wrap(*build(), plan=plan_of(folder, whole), compute_dtype=torch.float16)
        optimizer.loss_scale.scale = 2.0**10
        found: list[Any] = []
        for step in range(4):
            for micro in range(2):
                loss = model(rows(step, micro, torch.float16)).float().square().mean()
                optimizer.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            if step != 1:
                model._elixir.scheduler.reductions.drain()
                squares = [chunk.shard.squares for chunk in model._elixir.scheduler.chunks if chunk.shard.has_gradient]
                assert squares and (not whole or None not in squares), "the norm reads no gradient"
                optimizer.clip_grad_value_(1e-3)
                found += [*optimizer.grad_norms().values(), optimizer.clip_grad_norm_(math.inf).item()]
            optimizer.step()
        results.append([*found, *em.full_state_dict(model, all_ranks=True).values(), optimizer.loss_scale.scale])
        optimizer.close()
    return results


def test_clamping_and_an_overflow_give_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, found in ranks(2).run(limited, str(tmp_path)):
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def failing(folder: str, what: str) -> tuple[str, list[float]]:
    """(rank) What a disk that fails in the second step says, and the losses of a training without and with that."""
    losses, said, move = [], "", DiskFile.move
    kinds: dict[str, Callable[[DiskFile, bool], bool]] = {
        "gradient": lambda file, write: isinstance(file, DiskStore) and write,
        "sum": lambda file, write: isinstance(file, DiskStore) and not write,
        "values": lambda file, write: isinstance(file, ValuesFile) and not write,
    }
    for fails in (False, True):
        torch.manual_seed(1)
        model, optimizer = em.wrap(*build(), plan=plan_of(folder, True), compute_dtype=BF16)
        broken = False

        def once(file: DiskFile, offset: int, memory: Tensor, *, write: bool) -> None:
            nonlocal broken
            if not broken and kinds[what](file, write):
                broken = True
                raise em.DiskError("the disk is gone for a moment")
            move(file, offset, memory, write=write)

        for step in range(3):
            with pytest.MonkeyPatch.context() as patch:
                if fails and step == 1:
                    for chunk in model._elixir.scheduler.chunks:
                        chunk.shard.finish_update()
                    patch.setattr(DiskFile, "move", once)
                    with pytest.raises(em.DiskError) as error:
                        for micro in range(2):
                            model(rows(step, micro, BF16)).float().square().mean().backward()
                    said = str(error.value)
                    if what != "values":  # those fail in forward, before there is a gradient
                        with pytest.raises(em.UsageError, match="call zero_grad"):
                            optimizer.step()
                    optimizer.zero_grad()
                for micro in range(2):
                    loss = model(rows(step, micro, BF16)).float().square().mean()
                    loss.backward()
                    losses.append(loss.item())
            optimizer.step()
        optimizer.close()
    return said, losses


@pytest.mark.parametrize("what", ["gradient", "sum", "values"])
def test_a_disk_that_fails_is_told_and_the_step_can_be_repeated(what: str, ranks: Ranks, tmp_path: Path) -> None:
    ((said, losses),) = ranks(1).run(failing, str(tmp_path), what)
    assert "gone for a moment" in said
    assert losses[:6] == losses[6:]


def broken_update(folder: str) -> tuple[str, bool]:
    """(rank) What a write of values says that fails in an update, and whether the last checkpoint is as it was."""
    torch.manual_seed(1)
    model, optimizer = em.wrap(*build(), plan=plan_of(folder, True))
    em.save(f"{folder}/saved", model, optimizer)
    committed = em.full_state_dict(model, all_ranks=True)
    model(rows(0, 0, FP32)).square().mean().backward()

    def fails(place: Any, start: int, request: Tensor) -> None:
        raise em.DiskError("the disk is gone for good")

    with mock.patch.object(ValuesPlace, "overwrite", fails), pytest.raises(em.DiskError) as error:
        optimizer.step()
        for chunk in model._elixir.scheduler.chunks:
            chunk.shard._gate.wait_for_update()
    with pytest.raises(em.DiskError, match="gone for good"):
        em.full_state_dict(model, all_ranks=True)
    with pytest.raises(em.DiskError, match="gone for good"):
        optimizer.close()
    torch.manual_seed(2)
    model, optimizer = em.wrap(*build(), plan=plan_of(folder, True))
    em.load(f"{folder}/saved", model, optimizer)
    found = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return str(error.value), all(torch.equal(found[name], value) for name, value in committed.items())


def test_values_that_cannot_be_written_stop_the_run_and_no_checkpoint_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(broken_update, str(tmp_path)) == [("the disk is gone for good", True)]


def test_buffers_are_counted() -> None:
    layout, plan = tiny_layout(), em.Plan.offload(rcache_blocks=2, disk_chunks=99)
    whole = replace(plan, values_on_disk=True)
    for arriving in (0, SUMS_IN_FLIGHT * 64):  # without and with a GPU
        less, more = (footprint(p, layout, over_gloo=True, async_sums=arriving > 0) for p in (whole, plan))
        assert less.shard_bytes["host"] == less.accumulator_bytes["host"] == 0 < more.shard_bytes["host"]
        updates = more.spill_buffer_bytes * 4 // 3
        values = (VALUES_BUFFERS + 1) * PAGE_BYTES
        assert less.spill_buffer_bytes == less.host_bytes == updates + values + arriving


def test_a_plan_without_chunks_on_disk_is_refused() -> None:
    with pytest.raises(em.PlanError, match=r"values_on_disk=True.*disk_chunks=0"):
        em.Plan.offload(values_on_disk=True)
    with pytest.raises(em.PlanError, match=r"values_on_disk=1: expected True or False"):
        em.Plan.offload(disk="/tmp", values_on_disk=1)  # type: ignore[arg-type]
    plan = em.Plan.offload(disk="/tmp", values_on_disk=True)
    assert em.Plan.from_json(plan.to_json()) == plan


def test_a_reading_that_an_interrupt_cut_short_ends_before_the_next_one(tmp_path: Path) -> None:
    """Its requests would fill the buffer when others have it."""
    numel = 4 * PAGE_BYTES
    values = ValuesFile(str(tmp_path), [numel], torch.device("cpu"))
    place = values.allocate(numel, 0, PAGE_BYTES)
    given: list[Any] = []

    def give(*task: Any) -> None:
        if given:
            raise KeyboardInterrupt
        given.append(task)

    with mock.patch.object(values.threads, "submit", give), pytest.raises(KeyboardInterrupt):
        place.begin()
    cut = given[0][1]
    assert not cut.done()
    place.begin()
    assert cut.cancelled()
    values.close()


def test_a_change_of_a_gradient_ends_when_no_slice_is_read_any_more() -> None:
    slices = [Ended(error=OSError("full")), Ended(1.0)]
    shard = mock.Mock(_slices=range(2))
    shard._file.threads.submit.side_effect = slices
    with pytest.raises(OSError, match="full"):
        FullDiskShard._change_gradient(shard, lambda *_: None, replace=True)
    assert slices[1].waits == 1
