"""Frozen weights once per host: bits, bytes through process groups, memory of all ranks together, and refusals."""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.memory.host_mapping import HostMapping, SharedFile
from tests.support.adapter_cases import WIDTH, Adapted, build
from tests.support.cases import with_further
from tests.support.every import every, same_tensors
from tests.support.parity import assert_alike, trained
from tests.support.ranks import RankPool
from tests.support.shared_memory import holders, named

Ranks = Callable[[int], RankPool]
CPU = torch.device("cpu")
CHUNK = WIDTH * WIDTH + WIDTH
MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*memfd:elixir-moe")


# ------------------------------------------------------------------------------------------------------------- memory


def test_who_opens_the_memory_sees_it_and_it_has_no_name() -> None:
    file = SharedFile(3 * WIDTH)
    mine, other = (HostMapping.of(os.getpid(), file.descriptor, file.token, file.nbytes, CPU) for _ in range(2))
    assert not named(file.token.hex())
    file.clear_token()
    file.close()
    assert not mine.memory.any()
    mine.memory[5:9] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert torch.equal(other.memory[4:10], torch.tensor([0, 1, 2, 3, 4, 0], dtype=torch.uint8))
    assert mapped() == 2
    del mine, other
    gc.collect()
    assert mapped() == 0


def test_other_memory_under_the_same_numbers_is_refused() -> None:
    file, other = SharedFile(64), SharedFile(64)
    for descriptor, token, error in (
        (file.descriptor, other.token, "another one"),
        (1 << 20, file.token, "No such file"),
    ):
        with pytest.raises(OSError, match=error):
            HostMapping.of(os.getpid(), descriptor, token, file.nbytes, CPU)
    file.close()
    other.close()


def mapped() -> int:
    """Mappings of shared chunks that this process has."""
    return sum(bool(MAPPED.match(line)) for line in Path("/proc/self/smaps").read_text().splitlines())


def shared_pages() -> tuple[int, int]:
    """(bytes of them that count for this process, where each page is divided among all that map it; bytes mapped)."""
    share = size = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = bool(MAPPED.match(line))
        elif inside and line.startswith(("Pss:", "Size:")):
            kind, number, _ = line.split()
            share, size = (share + 1024 * int(number), size) if kind == "Pss:" else (share, size + 1024 * int(number))
    return share, size


# ------------------------------------------------------------------------------------------------------------ training


def quantized() -> tuple[nn.Module, Any]:
    """The same with packed weights."""
    model, optimizer = build()
    em.quantize(model, "int8")
    return model, optimizer


def backward(model: Any, step: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    rows = rows.to(model[0].down.weight.dtype)
    with torch.no_grad():
        model(rows)
    for _ in range(2):
        model(rows).float().pow(2).mean().backward()


def sent(model: nn.Module) -> dict[str, dict[str, int]]:
    """{chunk group: {collective: bytes}} since wrap."""
    found: dict[str, dict[str, int]] = em.inspect(model).statistics.as_dict()["collective_bytes"]
    return found


def run(shared: bool, dtype: torch.dtype, packed: bool, blocks: int) -> dict[str, Any]:
    """(rank) Training and evaluation; what process groups have sent, and whether the ledger holds."""
    plan = em.Plan.offload(rcache_blocks=blocks, chunk_numel=CHUNK, shared_frozen=shared)
    facts: dict[str, Any] = {}

    def after(model: nn.Module) -> nn.Module:
        seen = em.inspect(model)
        assert seen.held_bytes["host"] == seen.footprint.host_bytes, "predicted and held"
        frozen = [chunk for chunk in seen.facts()["chunks"] if "frozen" in chunk["chunk_group"]]
        facts["shared"] = [chunk["shared"] for chunk in frozen]
        facts["said"] = str(seen)
        return model

    def between(model: nn.Module) -> float:
        facts["sent"] = sent(model)
        return 0.0

    made = quantized if packed else build
    found = trained(made, backward, plan, 3, after=after, between=between, compute_dtype=dtype)
    return {**found, **facts}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", with_further((torch.bfloat16, torch.float32), (torch.bfloat16,)))
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_weights_train_to_the_same_bits_without_a_gather(
    world: int, dtype: torch.dtype, packed: bool, ranks: Ranks
) -> None:
    wanted, found = (ranks(world).run(run, shared, dtype, packed, 5) for shared in (False, True))
    for scattered, one in zip(wanted, found, strict=True):
        assert one["norms"] == scattered["norms"]
        assert same_tensors(scattered["state"], one["state"])
        assert every(one["shared"]) == (world > 1), "one rank shares with nobody"
        assert not any("frozen" in group for group in one["sent"]), "adapters alone go through process groups"
        assert one["sent"] == {group: n for group, n in scattered["sent"].items() if "frozen" not in group}
        assert any("frozen" in group for group in scattered["sent"]) == (world > 1)
        assert f"once in this host's memory, gathered without a collective: {sum(one['shared'])}" in one["said"]


def test_shared_weights_train_as_plain_torch_does(ranks: Ranks) -> None:
    plain = ranks(1).run(plainly)[0]
    found = ranks(2).run(run, True, torch.float32, False, 5)[0]
    found["norms"] = found["norms"][1::2]  # without those of `between`
    # fp32: the mean of two halves of a batch, and Adam's division, round at other places; three steps of 1e-2.
    assert_alike(found, plain, "two ranks", 1e-5, rel=1e-5)


def plainly() -> dict[str, Any]:
    return trained(build, backward, None, 3)


def resident(shared: bool) -> tuple[int, int, int]:
    """(rank) Bytes of the host's copies that count for this rank while all have read all, of frozen chunks, mapped."""
    gc.collect()
    model = nn.Sequential(*[Adapted(512) for _ in range(8)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.offload(shared_frozen=shared))
    model(torch.ones(2, 512)).sum().backward()
    dist.barrier()
    share, size = shared_pages()
    dist.barrier()
    frozen = sum(chunk.nbytes for chunk in em.inspect(model).layout.chunks if not chunk.key.trainable)
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert mapped() == 0, "nothing stays mapped"
    return share, frozen, size


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_ranks_of_a_host_hold_one_copy(world: int, ranks: Ranks) -> None:
    found = ranks(world).run(resident, True)
    shares, frozen, sizes = zip(*found, strict=True)
    assert min(sizes) >= frozen[0], "each rank maps all of it"
    assert sum(shares) == pytest.approx(frozen[0], rel=0.02)
    assert ranks(world).run(resident, False)[0][0] == 0


# ------------------------------------------------------------------------------------------------- writes, checkpoints


def writes() -> list[str]:
    """(rank) What writes to a shared weight say; the weight is as before, and training goes on."""
    torch.manual_seed(0)
    model, optimizer = build()
    before = model[1].base.weight.clone()
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.offload(chunk_numel=CHUNK, shared_frozen=True))
    said = []
    with pytest.raises(em.UsageError) as error, em.unsharded(model[1].base, write=True):
        raise AssertionError("the block must not begin")
    said.append(str(error.value))
    with torch.no_grad():
        model[1].base.weight.mul_(1)  # changes nothing, as when `register_parametrization` sets a weight to itself
    with pytest.raises(em.UsageError) as error, torch.no_grad():
        model[1].base.weight.mul_(2)
    said.append(str(error.value))
    backward(model, 0)
    optimizer.step()
    assert torch.equal(em.full_state_dict(model, all_ranks=True)["1.base.weight"], before)
    with em.unsharded(model[1].down, write=True):
        model[1].down.weight.data.zero_()
    assert not em.full_state_dict(model, all_ranks=True)["1.down.weight"].any()
    optimizer.close()
    return said


def test_writes_to_shared_weights_are_refused_by_name(ranks: Ranks) -> None:
    for said in ranks(2).run(writes):
        assert every("'1.base.weight'" in text and "shared_frozen=False" in text for text in said)


def saved(folder: str) -> list[dict[str, Tensor]]:
    """(rank) What checkpoints give back, from shared weights to scattered ones and the other way."""
    states = []
    for seed, shared, load in ((1, True, None), (2, False, "a"), (3, True, "b"), (4, True, "a")):
        torch.manual_seed(seed)
        model, optimizer = build()
        plan = em.Plan.offload(chunk_numel=CHUNK, shared_frozen=shared)
        model, optimizer = em.wrap(model, optimizer, plan=plan)
        if load is not None:
            model(torch.ones(1, WIDTH))
            em.load(f"{folder}/{load}", model, optimizer)
        if seed < 3:
            em.save(f"{folder}/{'ab'[seed - 1]}", model, optimizer)
        with torch.no_grad():
            states.append({**em.full_state_dict(model, all_ranks=True), "out": model(torch.ones(1, WIDTH))})
        optimizer.close()
    return states


def test_checkpoints_are_those_of_scattered_weights(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, *loaded in ranks(2).run(saved, str(tmp_path)):
        for state in loaded:
            assert same_tensors(wanted, state)
    files = [{f.name: f.stat().st_size for f in (tmp_path / name).glob("*.safetensors")} for name in "ab"]
    assert files[0] == files[1]


# -------------------------------------------------------------------------------------------------- refusals, and ends


def apart(kind: str) -> tuple[list[bool], str]:
    """(rank) Which chunks are shared where rank 1 cannot share, and what is said; the model trains."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "hosts":
            patch.setattr("elixir_moe.wrapping.shared_frozen._host", lambda: f"host {dist.get_rank()}")
        elif kind == "no memfd":
            patch.delattr(os, "memfd_create")
        elif dist.get_rank() == 1:
            patch.setattr(HostMapping, "of", refusing)
        model, optimizer = build()
        plan = em.Plan.offload(chunk_numel=CHUNK, shared_frozen=True)
        model, optimizer = em.wrap(model, optimizer, plan=plan)
    backward(model, 0)
    optimizer.step()
    shared, said = [chunk["shared"] for chunk in em.inspect(model).facts()["chunks"]], str(em.inspect(model))
    optimizer.close()
    gc.collect()
    assert mapped() == 0
    return shared, said


def refusing(*_: object) -> HostMapping:
    raise OSError("not allowed here")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("hosts", "they are on 2 hosts"),
        ("no memfd", "rank 0: this system has no memfd_create"),
        ("container", "rank 1: not allowed here"),
    ],
)
def test_where_ranks_cannot_share_all_of_them_scatter_and_say_why(kind: str, why: str, ranks: Ranks) -> None:
    for shared, said in ranks(2).run(apart, kind):
        assert not any(shared)
        assert f"are scattered, not shared: {why}" in said


def test_a_plan_that_cannot_share_is_refused() -> None:
    with pytest.raises(em.PlanError, match="shared_frozen=True needs offloaded=True"):
        em.Plan(scatter=True, offloaded=False, shared_frozen=True)
    plan = em.Plan.offload(shared_frozen=True)
    assert em.Plan.from_json(plan.to_json()) == plan


_HOLDS = """
import sys, os, torch
from elixir_moe.memory.host_mapping import HostMapping, SharedFile
file = SharedFile(1 << 20)
mine = HostMapping.of(os.getpid(), file.descriptor, file.token, file.nbytes, torch.device("cpu"))
print(os.getpid(), file.descriptor, file.token.hex(), file.nbytes, flush=True)
sys.stdin.read()
"""


def test_memory_outlives_its_maker_and_nothing_outlives_the_last_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, descriptor, token, nbytes = process.stdout.readline().split()
    mine = HostMapping.of(int(pid), int(descriptor), bytes.fromhex(token), int(nbytes), CPU)
    inode = Path(f"/proc/{pid}/fd/{descriptor}").stat().st_ino
    assert holders([inode]) == {int(pid), os.getpid()}
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    assert mine.memory[:16].numpy().tobytes().hex() == token
    assert holders([inode]) == {os.getpid()} and not named(token)
    del mine
    gc.collect()
    assert holders([inode]) == set()
