"""Gradients torn on their way home: by an interrupt, a running update, the end of the process groups."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_moe as em
from elixir_moe.distributed import collectives
from elixir_moe.runtime.phase import BROKEN, READY, REDUCED, State
from elixir_moe.runtime.reductions import Reductions
from tests.memory.test_shards import NUMEL, shard_of
from tests.runtime.test_habits import D, Net, adamw, mean_square
from tests.support.every import same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLANS = {
    "zero3": em.Plan.zero3(rcache_blocks=6, chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=6, device_chunks=1, chunk_numel=600),
}


def batch(step: int) -> Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(step))


def wrapped(plan: em.Plan, dtype: torch.dtype) -> tuple[Any, em.ShardedOptimizer]:
    torch.manual_seed(0)
    model: Any = Net()
    return em.wrap(model, adamw(model), plan=plan, compute_dtype=dtype)


def torn(plan: str, dtype: torch.dtype, at: int | None) -> dict[str, Tensor]:
    """(rank) The weights after three steps, in the second of which sum number `at` is torn after a half of it."""
    model, optimizer = wrapped(PLANS[plan], dtype)
    whole, sums = collectives.add_and_square, 0

    def half(total: Tensor, term: Tensor) -> float | None:
        nonlocal sums
        sums += 1
        if sums != at:
            return whole(total, term)
        total[: total.numel() // 2].add_(term[: total.numel() // 2])
        raise KeyboardInterrupt

    for step in range(3):
        if step == 1 and at is not None:
            with mock.patch.object(collectives, "add_and_square", half), pytest.raises(KeyboardInterrupt):
                mean_square(model, batch(step).to(dtype)).backward()
                optimizer.clip_grad_norm_(1.0)
            with pytest.raises(em.UsageError, match=r"a part of its gradients is gone: call zero_grad"):
                optimizer.step()
            optimizer.zero_grad()
        mean_square(model, batch(step).to(dtype)).backward()
        optimizer.step()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_that_is_interrupted_is_never_taken_for_weights_or_for_a_gradient(
    plan: str, dtype: torch.dtype, ranks: Ranks
) -> None:
    wanted = ranks(2).run(torn, plan, dtype, None)
    for at in (1, 2, 5):
        for found, there in zip(ranks(2).run(torn, plan, dtype, at), wanted, strict=True):
            assert same_tensors(found, there), f"torn in sum {at}"


def run_without_groups() -> None:
    """(rank) Out of memory after the second backward of a step, or in a reduction: what is at home can be saved."""
    for at in (None, "reduce_scatter"):
        model, _ = wrapped(PLANS["zero3"], torch.float32)
        mean_square(model, batch(0)).backward()
        loss = mean_square(model, batch(0))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError) if at else nullcontext():
            if at is not None:
                patch.setattr(collectives.Communicator, at, mock.Mock(side_effect=MemoryError))
            loss.backward()
        leave_groups(model, REDUCED if at is None else BROKEN)


def leave_groups(model: Any, state: State) -> None:
    assert model._elixir.phase.now is state
    assert any(chunk.shard.has_gradient for chunk in model._elixir.scheduler.chunks)
    control = model._elixir.groups.control
    model._elixir.kept.drop_process_groups(lambda: control)
    assert model._elixir.phase.now is READY
    assert not any(chunk.shard.has_gradient for chunk in model._elixir.scheduler.chunks)


def test_no_gradient_outlives_the_process_groups(ranks: Ranks) -> None:
    ranks(2).run(run_without_groups)


def step_after_a_failed_end(error: type[BaseException]) -> str:
    """(rank) What `step` says if the end of a reduction has failed where an evaluation has waited for it."""
    model, optimizer = wrapped(em.Plan.zero3(rcache_blocks=6, chunk_numel=600), torch.float32)
    mean_square(model, batch(0)).backward()
    optimizer.step()
    mean_square(model, batch(1)).backward()
    assert optimizer._scheduler.reductions._in_flight, "their ends are still to come"
    with mock.patch.object(Reductions, "_add_reduced", side_effect=error), pytest.raises(error), torch.no_grad():
        model(batch(2))
        model(batch(2))
    with pytest.raises(em.UsageError) as said:
        optimizer.step()
    optimizer.zero_grad()
    mean_square(model, batch(1)).backward()
    optimizer.step()
    optimizer.close()
    return str(said.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_reduction_that_fails_wherever_it_ends_is_not_updated_without(
    error: type[BaseException], ranks: Ranks
) -> None:
    for said in ranks(2).run(step_after_a_failed_end, error):
        assert "call zero_grad()" in said


def leave_a_peer_that_waits() -> str:
    """(rank) The error of the first rank, which waits in a backward for the second one, which has left."""
    model, _ = wrapped(em.Plan.ddp(), torch.float32)
    loss = mean_square(model, batch(0))
    if dist.get_rank() == 0:
        with pytest.raises(em.ElixirError) as found:
            loss.backward()
        return str(found.value)
    control = model._elixir.groups.control
    groups = [group for group in collectives.process_groups() if group not in (dist.group.WORLD, control)]
    model._elixir.kept.drop_process_groups(lambda: control)
    collectives.drop_groups(groups)
    return ""


def test_a_peer_that_waits_for_a_rank_that_has_left_need_not_wait_for_the_time_limit(ranks: Ranks) -> None:
    """gloo closes a connection when nothing references its process group any more."""
    said = ranks(2).run(leave_a_peer_that_waits)[0]
    assert "the agreement on a backward failed" in said and "Timed out" not in said, said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_gradient_is_added_beside_a_running_update(dtype: torch.dtype) -> None:
    """The update reads the gradient before it; a head that this rank has left out has nobody who has waited."""
    shard = shard_of(dtype)
    update: Future[Any] = Future()
    update.set_exception(em.TierError("the update was waited for"))
    shard.update_async(update)
    for add in (shard.place_for_gradient, lambda: shard.add_gradient(torch.ones(NUMEL))):
        with pytest.raises(em.TierError, match="was waited for"):
            add()


class Frozen(nn.Module):
    """A weight that is not a number, and one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((4,), float("nan")), requires_grad=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table.isnan()


def test_a_weight_that_is_no_number_is_not_taken_for_a_write() -> None:
    model = Frozen()
    model, optimizer = em.wrap(model, adamw(model), plan=em.Plan.offload(rcache_blocks=6, chunk_numel=32))
    mean_square(model, torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.close()


def test_a_detached_copy_may_ask_for_gradients() -> None:
    model, optimizer = wrapped(PLANS["zero3"], torch.float32)
    leaf = next(model.parameters()).detach().requires_grad_()
    leaf.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach())
    optimizer.close()


def save_a_stage(directory: str) -> None:
    """(rank) Each rank has a pipeline stage of its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    stage = nn.Linear(4, 4)
    em.annotate(stage, {"*": em.Pattern(mesh, replicate=("dp",))})
    stage, optimizer = em.wrap(stage, adamw(stage), plan=em.Plan.ddp())
    with pytest.raises(em.CheckpointError, match=r"a pipeline stage of ranks .*full_state_dict"):
        em.save(directory, stage, optimizer)
    assert em.full_state_dict(stage, all_ranks=True).keys() == {"weight", "bias"}
    optimizer.close()


def test_a_pipeline_stage_is_no_whole_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_a_stage, str(tmp_path / "stage"))
    assert not list(tmp_path.iterdir())


class Empty(nn.Module):
    """Parameters without elements, each right before one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.narrow, self.wide = nn.Linear(4, 0), nn.Linear(0, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x)) + torch.cat([x, self.none]) * self.one


@pytest.mark.parametrize("plan", [em.Plan.ddp(), em.Plan.offload(rcache_blocks=4, chunk_numel=32)], ids=["ddp", "host"])
def test_a_parameter_without_elements_takes_no_gradient_from_its_neighbor(plan: em.Plan) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            mean_square(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain, model = Empty(), Empty()
    model.load_state_dict(plain.state_dict())
    trained(plain, adamw(plain))
    model, optimizer = em.wrap(model, adamw(model), plan=plan)
    trained(model, optimizer)
    for name, found in em.full_state_dict(model, all_ranks=True).items():
        torch.testing.assert_close(found, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    optimizer.close()


def test_transforms_that_differentiate_are_refused_and_leave_the_model_as_it_was() -> None:
    model, optimizer = wrapped(PLANS["zero3"], torch.float32)
    x = batch(0)
    for transform in (
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.grad(lambda rows: mean_square(model, rows))(x),
    ):
        with pytest.raises(em.UsageError, match=r"torch\.func\.grad, jvp .*use backward"):
            transform()
    mean_square(model, x).backward()
    optimizer.step()
    optimizer.close()


def after_three_backwards(plan: str | None) -> dict[str, Tensor]:
    """(rank) The weights after a step on three batches; each rank has a part of them, plain torch all rows."""
    plans = {"ddp": em.Plan.ddp(), "zero2": em.Plan.zero2(), "zero3": em.Plan.zero3(), "offload": em.Plan.offload()}
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if plan is not None:
        model, optimizer = em.wrap(model, optimizer, plan=plans[plan])
    for micro in range(3):
        rows = batch(micro)
        if plan is not None:
            rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
        mean_square(model, rows).backward()
    optimizer.step()
    if plan is None:
        return model.state_dict()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3", "offload"])
def test_each_rank_adds_a_sum_of_all_ranks_once(plan: str, ranks: Ranks) -> None:
    """Sums of three terms in another order: a few ulps of weights below 1."""
    wanted = after_three_backwards(None)
    for found in ranks(2).run(after_three_backwards, plan):
        torch.testing.assert_close(found, dict(wanted), rtol=0, atol=1e-6)
