"""State in host memory and values on the device: `Plan.values_on_device`.

The oracle is plain torch, and, to the bit, the same plan with values in host memory: only their place differs.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.chunks.ledger import footprint, values_bytes
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import CACHED
from elixir_tools.models.gpt import lm_loss
from tests.chunks.test_plan import tiny_layout
from tests.support import gpu_cases, parity
from tests.support.cases import placed, with_further
from tests.support.every import same_tensors
from tests.support.gpu_cases import CHUNK, DENSE
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
FP32, BF16 = torch.float32, torch.bfloat16

HOST = em.Plan.offload(chunk_numel=CHUNK, rcache_blocks=6, values_on_device=True)
PLANS = {
    "in host memory": HOST,
    "some on the device": replace(HOST, device_chunks=2),
    "some on disk": replace(HOST, device_chunks=1, disk_chunks=3),
    "all gathered": replace(HOST, rcache_blocks="all"),
}
LOOPS = [*product((1, 3), (None, 0.5), (False,)), (3, 0.5, True)]
"""(accumulation, clipping, whether in one pass)."""


@pytest.mark.parametrize(
    ("world", "plan"), with_further([*product((1, 2), PLANS)], [(2, "in host memory"), (1, "some on disk")])
)
def test_a_run_is_that_of_plain_torch(world: int, plan: str, ranks: Ranks) -> None:
    for accumulation, clip, at_once in LOOPS:
        wanted = parity.plain(DENSE, accumulation, clip)
        for rank, found in enumerate(
            ranks(world).run(parity.wrapped, DENSE, PLANS[plan], accumulation, clip, at_once=at_once)
        ):
            parity.compare(found, wanted, f"world {world} {plan} {accumulation} {clip} {at_once} rank {rank}")
            assert found["statistics"]["off_schedule"] == 0


def bits(plan: em.Plan, accumulation: int, state: dict[str, str]) -> dict[str, Any]:
    """(rank) Steps in bf16."""
    return gpu_cases.wrapped(DENSE, replace(plan, **state), BF16, accumulation, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [{}, {"master": "bf16", "moments": "int8"}], ids=["wide", "narrow"])
@pytest.mark.parametrize("plan", with_further(PLANS, ["some on the device"]))
def test_a_run_in_bf16_has_the_bits_of_values_in_host_memory(plan: str, state: dict[str, str], ranks: Ranks) -> None:
    for world, accumulation in product((1, 2), (1, 3)):
        first, *_ = ranks(world).run(bits, PLANS[plan], accumulation, state)
        other, *_ = ranks(world).run(bits, replace(PLANS[plan], values_on_device=False), accumulation, state)
        assert (first["losses"], first["norms"]) == (other["losses"], other["norms"])
        assert same_tensors(first["state"], other["state"])
        if not state:
            gpu_cases.compare(first, gpu_cases.plain(DENSE, BF16, accumulation, "cpu"), BF16, f"{plan} {world}")


def moved(plan: em.Plan, accumulation: int) -> tuple[dict[str, int], dict[str, int], dict[str, Any], dict[str, Any]]:
    """(rank) The bytes that a step has moved, those that were predicted, and the bytes held and planned."""
    model, optimizer = gpu_cases.wrap(DENSE, plan, BF16, "cpu")
    gpu_cases.train(model, optimizer, range(2), accumulation, "cpu")
    seen = em.inspect(model)
    before = seen.statistics.as_dict()
    gpu_cases.train(model, optimizer, range(2, 3), accumulation, "cpu")
    after = seen.statistics.as_dict()
    counted = {
        way: sum(n - before[f"bytes_{way}"].get(t, 0) for t, n in after[f"bytes_{way}"].items() if t != Tier.DEVICE)
        for way in ("fetched", "offloaded")
    }
    predicted = {way: n for way, n in seen.step_bytes().items() if way in counted} if accumulation == 1 else {}
    planned = {tier: sum(kinds.values()) for tier, kinds in seen.facts(accumulation)["planned_bytes"].items()}
    held = seen.held_bytes
    shards = {
        "values": sum(values_bytes(c) for c in seen.layout.chunks if seen.plan.tier_of(seen.layout, c) is Tier.HOST),
        "cached": sum(c.residence is CACHED for c in seen.layout.chunks),
    }
    gpu_cases.close(optimizer)
    return counted, predicted, {"held": held, "planned": planned}, shards


@pytest.mark.parametrize("accumulation", [1, 3])
def test_values_come_up_once_a_step_however_often_they_are_gathered(accumulation: int, ranks: Ranks) -> None:
    for counted, predicted, memory, shards in ranks(2).run(moved, HOST, accumulation):
        assert counted["fetched"] == shards["values"] > 0
        assert counted["offloaded"] == accumulation * shards["values"]
        assert predicted == (counted if accumulation == 1 else {})
        assert memory["held"] == memory["planned"]
    fewer, *_ = ranks(2).run(moved, replace(HOST, values_on_device=False), accumulation)
    assert fewer[0]["fetched"] > counted["fetched"], "the oracle gathers some chunks twice"


def test_the_ledger_counts_them_on_the_device() -> None:
    layout, plan = tiny_layout(), em.Plan.offload(rcache_blocks=2, device_chunks=1)
    without, there = (footprint(replace(plan, values_on_device=on), layout, over_gloo=True) for on in (False, True))
    values = sum(values_bytes(c) for c in layout.chunks if plan.tier_of(layout, c) is Tier.HOST and c.key.trainable)
    assert there.device_bytes - without.device_bytes == values > 0
    assert there.host_bytes == without.host_bytes


def rewritten() -> None:
    """(rank) Writes of user code, evaluation and a load reach the values on the device."""
    model, optimizer = gpu_cases.wrap(DENSE, HOST, BF16, "cpu")
    batch = gpu_cases.tokens(0, 0, "cpu")
    gpu_cases.train(model, optimizer, range(1), 1, "cpu")
    with torch.no_grad():
        first = lm_loss(model, batch).item()
    weights = {name: value.clone() for name, value in em.full_state_dict(model, all_ranks=True).items()}
    with em.unsharded(model, write=True), torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with torch.no_grad():
        assert lm_loss(model, batch).item() == pytest.approx(torch.tensor(64.0).log().item(), rel=1e-2)
    with em.unsharded(model, write=True), torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    with torch.no_grad():
        assert lm_loss(model, batch).item() == first
    lm_loss(model, batch).backward()  # gradients are in the values' place in host memory
    with torch.no_grad():
        assert lm_loss(model, batch).item() == first
    optimizer.zero_grad()
    with torch.no_grad():
        assert lm_loss(model, batch).item() == first, "the values on the device are as good as before"
    gpu_cases.close(optimizer)


@pytest.mark.parametrize("world", [1, 2])
def test_writes_and_dropped_gradients(world: int, ranks: Ranks) -> None:
    ranks(world).run(rewritten)


def third_step(model: Any, optimizer: Any) -> dict[str, Any]:
    """(rank) The result of a third step, with the state it leaves."""
    result = gpu_cases.train(model, optimizer, range(2, 3), 1, "cpu")
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    return result


def saved(folder: str, plan: em.Plan) -> dict[str, Any]:
    """(rank) Saves after two steps, and takes a third."""
    model, optimizer = gpu_cases.wrap(DENSE, plan, BF16, "cpu")
    gpu_cases.train(model, optimizer, range(2), 1, "cpu")
    em.save(folder, model, optimizer)
    return third_step(model, optimizer)


def loaded(folder: str, plan: em.Plan) -> dict[str, Any]:
    """(rank) Trains first, so that a load replaces values that were gathered."""
    model, optimizer = gpu_cases.wrap(DENSE, plan, BF16, "cpu")
    gpu_cases.train(model, optimizer, range(1), 1, "cpu")
    em.load(folder, model, optimizer)
    return third_step(model, optimizer)


def test_checkpoints_load_under_other_plans_and_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    wanted = ranks(2).run(saved, folder, HOST)[0]
    for world, plan in ((1, HOST), (2, HOST), (2, em.Plan.zero3(chunk_numel=CHUNK)), (1, PLANS["some on disk"])):
        plan = placed(plan)
        gpu_cases.compare(ranks(world).run(loaded, folder, plan)[0], wanted, BF16, f"{world} {plan}")
    zero2 = str(tmp_path / "zero2")
    other = ranks(1).run(saved, zero2, em.Plan.zero2(chunk_numel=CHUNK))[0]
    gpu_cases.compare(ranks(2).run(loaded, zero2, HOST)[0], other, BF16, "from zero2")


def test_what_it_cannot_be_combined_with() -> None:
    with pytest.raises(em.PlanError, match=r"values_on_device=True needs offloaded=True"):
        em.Plan(scatter=True, offloaded=False, rcache_blocks=2, values_on_device=True)
    with pytest.raises(em.PlanError, match=r"values_on_device=True and values_on_disk=True: give one of them"):
        em.Plan.offload(disk="/tmp", disk_chunks=1, values_on_disk=True, values_on_device=True)
    assert em.Plan.from_json(HOST.to_json()) == HOST
