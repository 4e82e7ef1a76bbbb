"""Chunks used where they are at home: which they are, that nothing is copied, and that what users do stays exact."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.ledger import footprint
from elixir_moe.chunks.packing import build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Plan
from tests.support.every import same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D = 8


def test_only_what_is_whole_at_home_on_the_device_is_used_in_place() -> None:
    keys = [
        ChunkGroupKey(ranks=ranks, dtype=torch.bfloat16, trainable=True, divisor=2) for ranks in ((0, 1), (0,), (0,))
    ]
    params = [ParamSpec(name="p", shape=(64,), key=key) for key in keys]
    for plan, wanted in (
        (Plan.zero2(), [False, True, True]),
        (Plan.ddp(), [True, True, True]),
        (Plan.offload(rcache_blocks=2), [False, False, False]),
        (Plan.offload(rcache_blocks=2, device_chunks=1), [False, False, True]),
        (Plan(scatter=False, offloaded=True, rcache_blocks=1), [False, False, False]),
    ):
        layout = plan.place(build_layout(params, 64, scatter=plan.scatter))
        assert [chunk.residence.in_shard for chunk in layout.chunks] == wanted
        assert len(layout.cached) == 3 - sum(wanted)
        size = footprint(plan, layout, over_gloo=False)
        assert size.rcache_bytes == plan.blocks(layout) * 128
        assert size.resident_bytes == 0


class Net(nn.Module):
    """Two layers; the second weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.two(F.gelu(self.one(x))))


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, Any, nn.Module, Any]]:
    """The wrapped model and its optimizer, and plain ones."""
    em.init_mesh(device_type="cpu")
    model = Net()
    oracle = copy.deepcopy(model)
    model, optimizer = em.wrap(model, adamw(model), plan=Plan.zero3(rcache_blocks=1, chunk_numel=1024))
    yield model, optimizer, oracle, adamw(oracle)
    optimizer.close()


def both(pair: Any, act: Callable[[nn.Module, Any], Any]) -> tuple[Any, Any]:
    model, optimizer, oracle, plain = pair
    return act(model, optimizer), act(oracle, plain)


def assert_equal(pair: Any) -> None:
    for name, value in pair[2].state_dict().items():
        # torch's fused kernel may be an ulp off in its square root
        torch.testing.assert_close(em.full_state_dict(pair[0], all_ranks=True)[name], value, rtol=1e-6, atol=1e-7)


def test_no_weight_is_copied_in_one_process(pair: Any) -> None:
    model, *_ = pair
    size = em.inspect(model).footprint
    assert size.rcache_bytes == size.resident_bytes == 0
    (chunk,) = model._elixir.scheduler.chunks
    assert size.shard_bytes["device"] == 4 * chunk.spec.nbytes, "weights, moments and gradients"
    assert em.inspect(model).held_bytes == {"device": size.device_bytes, "host": 0, "disk": 0}
    for step in range(2):
        both(pair, lambda m, _, step=step: m(rows(step)).square().mean().backward())
        assert chunk.shard.gradient().data_ptr() == chunk.shard.sum_memory.data_ptr(), "summed where they are copied"
        both(pair, lambda _, o: (o.step(), o.zero_grad()))
        assert_equal(pair)
    assert em.inspect(model).statistics.bytes_fetched == {}
    with em.unsharded(model):
        base = chunk.shard.master.data_ptr()
        places = [p.data_ptr() - base for p in chunk.parameters]
    assert places == [4 * slot.start for slot in chunk.spec.slots], "parameters are the shard"


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_accumulation_clipping_and_a_graph_of_the_gradient(pair: Any) -> None:
    def backwards(model: nn.Module, _: Any) -> float:
        loss = model(rows(1)).square().mean()
        loss.backward(create_graph=True)  # first: the gradients that are kept have a graph
        loss.backward(retain_graph=True)
        model(rows(2)).square().mean().backward()
        return loss.item()

    for _ in range(2):
        mine, theirs = both(pair, backwards)
        assert mine == pytest.approx(theirs, rel=1e-6)
        norm = pair[1].clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pair[2].parameters(), 0.1))
        both(pair, lambda _, o: (o.step(), o.zero_grad()))
        assert_equal(pair)
        gc.collect()


def test_views_and_copies_are_what_they_were_taken_for(pair: Any) -> None:
    """A view shows the weights of after the step, as with plain torch; a copy stays, also where data are replaced."""
    with em.unsharded(pair[0].one):
        view = pair[0].one.bias.data
    copy = pair[0].one.bias.data
    views, old = (view, pair[2].one.bias.data), copy.clone()
    both(pair, lambda m, _: m(rows(1)).square().mean().backward())
    both(pair, lambda _, o: (o.step(), o.zero_grad()))
    torch.testing.assert_close(*views, rtol=1e-6, atol=1e-7)
    both(pair, lambda m, _: setattr(m.one.bias, "data", torch.ones(D)))
    assert_equal(pair)
    both(pair, lambda m, _: m(rows(2)).square().mean().backward())
    both(pair, lambda _, o: (o.step(), o.zero_grad()))
    assert_equal(pair)
    assert torch.equal(copy, old) and not torch.equal(copy, view)


def test_a_failed_backward_and_a_skipped_step_leave_nothing(pair: Any) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ValueError("no gradient")

    model, optimizer, *_ = pair
    with pytest.raises(ValueError, match="no gradient"):
        model.two(Fails.apply(model.one(rows(0)))).sum().backward()
    optimizer.zero_grad()
    model(rows(5)).sum().backward()
    optimizer.zero_grad()  # skipped
    both(pair, lambda m, _: m(rows(1)).square().mean().backward())
    both(pair, lambda _, o: (o.step(), o.zero_grad()))
    assert_equal(pair)


def test_bf16_readers_and_writers_in_place() -> None:
    """The gradient takes the place of the values, but not of values that somebody still reads."""
    em.init_mesh(device_type="cpu")
    model = Net()
    model, optimizer = em.wrap(model, adamw(model), plan=Plan.zero2(), compute_dtype=torch.bfloat16)
    before = em.full_state_dict(model, all_ranks=True)
    kept = model.two.weight.detach()
    values = kept.clone()
    with torch.no_grad():
        model.one.bias[3] = 5.0
    after = em.full_state_dict(model, all_ranks=True)
    assert after["one.bias"][3] == 5.0
    before["one.bias"][3] = 5.0
    assert same_tensors(before, after), "masters as fine as before"
    model(rows(1).bfloat16()).float().square().mean().backward()
    assert torch.equal(kept, values), "not the gradient"
    optimizer.zero_grad()
    assert same_tensors(before, em.full_state_dict(model, all_ranks=True))
    assert torch.equal(model.two.weight.detach(), values), "cast anew from the master"
    optimizer.close()


def replicated(accumulation: int) -> dict[str, torch.Tensor]:
    """(rank) Two steps of `Plan.ddp` on this rank's half of the rows; one layer only in the last micro-batch."""
    model = Net()
    unused = model.three = nn.Linear(D, D)
    model, optimizer = em.wrap(model, adamw(model), plan=Plan.ddp())
    rank = dist.get_rank()
    for step in range(2):
        for micro in range(accumulation):
            x = rows(10 * step + micro)[2 * rank : 2 * rank + 2]
            out = model(x)
            out = out + unused(x) if micro == accumulation - 1 else out
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return result


@pytest.mark.parametrize("accumulation", [1, 3])
def test_replicas_sum_in_place(accumulation: int, ranks: Ranks) -> None:
    """What earlier micro-batches left is a sum over the ranks already, and is not summed again."""
    model = Net()
    model.three = nn.Linear(D, D)
    optimizer = adamw(model)
    for step in range(2):
        for micro in range(accumulation):
            x = rows(10 * step + micro)
            out = model(x)
            if micro == accumulation - 1:
                out = out + model.three(x)
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in ranks(2).run(replicated, accumulation):
        for name, value in model.state_dict().items():
            # sums over ranks and micro-batches in another order: 1e-7 in a gradient, 1e-2 * 1e-7 / 1e-3 in a step
            torch.testing.assert_close(result[name], value, rtol=0, atol=4e-6)
