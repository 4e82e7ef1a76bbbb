"""The dtype in which gradients are summed over ranks: fp32 unless the plan or the pattern says otherwise.

Communicators take the way of NCCL, over gloo's own collectives.
"""

import gc
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.ledger import footprint
from elixir_moe.distributed.collectives import Communicator, build_communicators
from elixir_tools.train.config import PlanConfig
from tests.runtime.test_precision import STEPS, by_hand, loss_of, make_model, make_optimizer
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
BF16 = torch.bfloat16
CPU = torch.device("cpu")
PLANS = {"ddp": em.Plan.ddp, "zero2": em.Plan.zero2, "offload": em.Plan.offload}


def like_nccl(patch: pytest.MonkeyPatch) -> None:
    """Communicators issue as on NCCL."""
    made = Communicator.__init__

    def make(communicator: Communicator, *args: Any) -> None:
        made(communicator, *args)
        communicator.over_gloo = False

    patch.setattr(Communicator, "__init__", make)
    patch.setattr(import_module("elixir_moe.wrapping.resolve_plan"), "goes_over_gloo", lambda *_: False)


def sums(wide: bool) -> dict[str, Any]:
    """The sum of 256 on rank 0 and 1 on each other rank: reduced and scattered on both backends, and all-reduced."""
    rank, world = dist.get_rank(), dist.get_world_size()
    (communicator,) = build_communicators([tuple(range(world))], CPU).values()
    staging = torch.empty(8 * world) if wide else None
    found: dict[str, Any] = {}

    def term() -> torch.Tensor:
        return torch.full((8 * world,), 256.0 if rank == 0 else 1.0, dtype=BF16)

    def keep(name: str) -> Any:
        return lambda total, *_: found.update({name: total.clone()})

    communicator.reduce_scatter(term(), torch.empty(8 * world, dtype=BF16), keep("gloo")).wait()
    communicator.all_reduce(term(), keep("all-reduced"), staging).wait()
    communicator.over_gloo = False
    communicator.reduce_scatter(term(), staging, keep("nccl")).wait()
    communicator.close()
    return found


def test_a_sum_in_fp32_is_rounded_once(ranks: Ranks) -> None:
    """256 + 1 + 1 + 1 is 259, a tie that rounds to the even 260; in bf16 the first of these sums is 256 again."""
    for found in ranks(4).run(sums, True):
        assert every(total.dtype == BF16 and (total == 260).all() for total in found.values()), found


def trained(plan: em.Plan, patterned: torch.dtype | None, accumulation: int) -> dict[str, Any]:
    """A run in bf16 as on NCCL: its weights, the bytes its reductions have sent in a step, and what it holds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        like_nccl(patch)
        model: Any = make_model()
        if patterned is not None:
            pattern = em.Pattern(em.init_mesh(device_type="cpu"), replicate=("dp",), reduce_dtype=patterned)
            em.annotate(model, {"*": pattern})
        model, optimizer = em.wrap(
            model, make_optimizer(model.parameters()), plan=plan, compute_dtype=BF16, device="cpu"
        )
        for step in range(STEPS):
            for micro in range(accumulation):
                loss_of(model, step, micro, BF16, slice(rank * 8 // world, (rank + 1) * 8 // world)).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = em.inspect(model)
        size = footprint(seen.plan, seen.layout, over_gloo=False)
        result = {
            "state": em.full_state_dict(model, all_ranks=True),
            "sent": sum(n for (_, what), n in seen.statistics.collective_bytes.items() if what != "all_gather"),
            "numel": sum(chunk.numel for chunk in seen.layout.chunks),
            "staging": (
                size.staging_bytes,
                optimizer._scheduler.buffer_bytes - size.rcache_bytes - size.resident_bytes,
            ),
            "largest": max(chunk.numel for chunk in seen.layout.chunks),
        }
        optimizer.close()
    del model, optimizer
    gc.collect()
    return result


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("reduce_dtype", [None, "float32", "bfloat16"])
def test_both_dtypes_follow_torch_and_are_counted(kind: str, reduce_dtype: str | None, ranks: Ranks) -> None:
    """The tolerance is that of `test_masters_follow_the_paper`: each rank's own rounding, which weighs more."""
    _, state = by_hand(BF16, 2, 1.0)
    width = 2 if reduce_dtype == "bfloat16" else 4
    for found in ranks(2).run(trained, PLANS[kind](reduce_dtype=reduce_dtype), None, 2):
        for name, value in state.items():
            torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-2)
        assert found["sent"] == 2 * STEPS * width * found["numel"] * (2 if kind == "ddp" else 1)
        assert found["staging"] == ((0, 0) if width == 2 else (4 * found["largest"],) * 2)


def test_a_pattern_decides_before_the_plan(ranks: Ranks) -> None:
    wide, narrow = (
        ranks(2).run(trained, em.Plan.zero2(reduce_dtype=plans), patterned, 1)[0]["sent"]
        for plans, patterned in ((BF16, torch.float32), (None, BF16))
    )
    assert wide == 2 * narrow


def test_a_plan_keeps_it() -> None:
    plan = em.Plan.zero3(reduce_dtype=BF16)
    assert plan.reduce_dtype is BF16
    assert em.Plan.from_json(plan.to_json()) == plan == em.Plan.zero3(reduce_dtype="bfloat16")
    assert PlanConfig(kind="zero3", reduce_dtype="bfloat16").plan(lambda *_: None, (), 1) == plan
    auto = em.Plan.auto(lambda *_: None, (), reduce_dtype="bfloat16")
    assert auto.reduce_dtype is BF16


@pytest.mark.parametrize("wrong", ["bf16", torch.float64, torch.int32, 16])
def test_what_is_no_dtype_of_a_sum_is_refused(wrong: Any) -> None:
    mesh = em.parallel.pattern.RankMesh.world(2, 0)
    for make in (
        lambda: em.Plan.zero2(reduce_dtype=wrong),
        lambda: em.Plan.auto(lambda *_: None, (), reduce_dtype=wrong),
        lambda: em.Pattern(mesh, replicate=("dp",), reduce_dtype=wrong),
        lambda: PlanConfig(kind="zero2", reduce_dtype=wrong),
    ):
        with pytest.raises(em.ConfigError, match="reduce_dtype="):
            make()


@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_plan_that_sums_in_a_dtype_that_nothing_has_is_refused(dtype: torch.dtype | None) -> None:
    model: Any = nn.Linear(4, 4)
    plan = em.Plan.zero2(reduce_dtype=torch.float16)
    em.init_mesh(device_type="cpu")
    with pytest.raises(em.ConfigError, match=r"reduce_dtype=torch.float16, and trainable .* in torch"):
        em.wrap(model, make_optimizer(model.parameters()), plan=plan, compute_dtype=dtype, device="cpu")
    dist.destroy_process_group()


def of_another_dtype() -> str:
    model: Any = nn.Linear(4, 4)
    pattern = em.Pattern(em.init_mesh(device_type="cpu"), replicate=("dp",), reduce_dtype=torch.float16)
    em.annotate(model, {"*": pattern})
    with pytest.raises(em.ConfigError) as found:
        em.wrap(model, make_optimizer(model.parameters()), plan=em.Plan.zero2(), compute_dtype=BF16, device="cpu")
    return str(found.value)


def test_a_pattern_that_sums_in_a_third_dtype_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(of_another_dtype):
        assert "'weight'" in text and "torch.float16" in text and "torch.bfloat16" in text
