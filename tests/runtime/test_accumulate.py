"""Micro-batches that pass each layer together: as exact as the plain loop, and as cheap to move as one batch."""

import contextlib
import copy
import gc
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import elixir_moe as em
from tests.runtime.test_interrupts import Interrupt, restore_torch
from tests.runtime.test_parity import config_of
from tests.support.cases import every_pair, placed, rounds_asked
from tests.support.every import every
from tests.support.parity import compare, plain, wrapped
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
VOCAB, D = 48, 16
CHUNK = 1600
PLANS = {
    "zero3": em.Plan.zero3(rcache_blocks=3, chunk_numel=CHUNK),
    "offload": em.Plan.offload(rcache_blocks=3, chunk_numel=CHUNK),
    "disk": em.Plan.offload(rcache_blocks=3, chunk_numel=CHUNK, disk_chunks=2),
    "values on disk": em.Plan.offload(rcache_blocks=3, chunk_numel=CHUNK, disk_chunks=2, values_on_disk=True),
    "all gathered": em.Plan.zero2(chunk_numel=CHUNK),
}
KINDS = ("none", "reentrant", "non-reentrant", "by hand")


class Block(nn.Module):
    """Two products, a norm and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + hidden


class Tied(nn.Module):
    """Blocks, in checkpoints of a kind or in none, and an embedding that is also the head."""

    def __init__(self, kind: str = "none", dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.kind = kind

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.kind == "none":
                x = block(x)
            elif self.kind == "by hand":
                x = checkpoint(lambda x, block=block: block.down(torch.tanh(block.up(x))), x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return F.linear(x, self.embedding.weight)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def batches_of(count: int, seed: int = 0) -> list[Tensor]:
    """Batches of different shapes."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (1 + n % 2, 6 + n % 3), generator=draw) for n in range(count)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose updates differ by no more than the gradients do."""
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, weight_decay=0.0)


def wrap(model: nn.Module, plan: em.Plan, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
    """The model under a plan whose schedule a traced step gives; without an optimizer, a step subtracts gradients."""
    options = {"step": loss_of, "sample": batches_of(1)[0], **options}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return em.wrap(model, optimizer, plan=placed(plan), **options)


@pytest.fixture
def alone() -> None:
    em.init_mesh(device_type="cpu")


def trained(model: nn.Module, plan: em.Plan | None, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Two steps: of three batches, and of two calls with two batches and weights each.

    Without a plan, plain torch has the batches of all ranks.
    """
    ranks = range(world) if plan is None else [rank]
    mine = [[batches_of(n, seed=10 * r + n) for n in (3, 2, 2)] for r in ranks]
    weights: list[Any] = [None, [0.25, 0.75], torch.tensor([0.5, 0.125])]
    found: dict[str, Any] = {"losses": [], "norms": []}
    if plan is None:
        optimizer: Any = adam(model)
    else:
        model, optimizer = wrap(model, plan, adam(model))
    for calls in ([0], [1, 2]):
        for call in calls:
            if plan is not None:
                found["losses"] += em.accumulate(model, loss_of, mine[0][call], weights=weights[call])
                continue
            for batches in mine:
                of_call = [1 / len(batches[call])] * len(batches[call]) if weights[call] is None else weights[call]
                for batch, weight in zip(batches[call], of_call, strict=True):
                    loss = loss_of(model, batch)
                    (loss * weight / world).backward()
                    found["losses"].append(loss.detach())
        if plan is None:
            found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        else:
            found["norms"].append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    if plan is None:
        return found | {"state": copy.deepcopy(model.state_dict())}
    found["state"] = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    del model, optimizer
    gc.collect()
    return found


def trained_here(kind: str, name: str) -> dict[str, Any]:
    """`trained` under a plan on this rank."""
    mesh = em.init_mesh(device_type="cpu")
    return trained(Tied(kind), PLANS[name], mesh.get_local_rank("dp"), mesh.size(0))


@cache
def trained_plainly(kind: str, world: int) -> dict[str, Any]:
    """`trained` by plain torch, for all plans."""
    return trained(Tied(kind), None, world=world)


FOUR_RANKS = [pytest.param(kind, name, 4, marks=pytest.mark.slow) for kind in KINDS for name in PLANS]


@pytest.mark.parametrize(("kind", "name", "world"), [*every_pair(KINDS, PLANS, (1, 2)), *FOUR_RANKS])
def test_every_plan_and_checkpoint_as_plain_torch(kind: str, name: str, world: int, ranks: Ranks) -> None:
    """fp32: a sum of at most six gradients of up to 1 in another order differs by some ulps of 6e-8."""
    wanted = trained_plainly(kind, world)
    for rank, found in enumerate(ranks(world).run(trained_here, kind, name)):
        first = slice(3 * rank, 3 * rank + 3)
        if world == 1:
            assert every(map(torch.equal, found["losses"][:3], wanted["losses"][first]))
        torch.testing.assert_close(found["norms"], wanted["norms"], rtol=1e-5, atol=0)
        for key, value in wanted["state"].items():
            assert (found["state"][key] - value).abs().max() < 2e-6, key


@pytest.mark.parametrize(
    ("world", "tp", "ep"),
    [
        (1, 1, (1, 1, 1, 1)),
        (2, 1, (1, 2, 2, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2, (1, 1, 1, 1)), (4, 1, (1, 1, 2, 4)), (4, 1, (1, 4, 4, 4)), (4, 2, (1, 2, 2, 2)))
        ),
    ],
)
def test_experts_over_ranks(world: int, tp: int, ep: tuple[int, ...], ranks: Ranks) -> None:
    config = config_of(ep)
    wanted = plain(config_of((1, 1, 1, 1)), 3, 0.5)
    for plan in (em.Plan.zero3(chunk_numel=2048), em.Plan.offload(chunk_numel=2048)):
        for found in ranks(world).run(wrapped, config, plan, 3, 0.5, tp, at_once=True):
            compare(found, wanted, str(plan))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_those_predicted(kind: str) -> None:
    model, optimizer = wrap(Tied(kind), PLANS["offload"])
    record = model._elixir
    for count in (1, 2, 3, 8, 2):
        with rounds_asked() as rounds:
            em.accumulate(model, loss_of, batches_of(count))
        assert rounds == [record.spec.step_order.schedule(record.layout, count).entries], count
        optimizer.step()
        optimizer.zero_grad()
    assert em.inspect(model).statistics.as_dict()["off_schedule"] == 0
    assert em.inspect(model).statistics.blocks_replaced == 0
    optimizer.close()


def loss_of_views(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a batch and of another view of it: two forwards, then one backward."""
    return loss_of(model, ids) + loss_of(model, ids.flip(1))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
def test_backward_through_two_forwards_holds_the_layers_of_one(kind: str) -> None:
    layers, most = 12, {}
    for step in (loss_of, loss_of_views):
        blocks = (
            18 if kind == "reentrant" else 8
        )  # whose gradients come by themselves, and wait for the first forward's
        plan = em.Plan.offload(rcache_blocks=blocks, chunk_numel=CHUNK)
        model, optimizer = wrap(Tied(kind, layers=layers), plan, step=step)
        record = model._elixir
        for count in (1, 2)[: 1 + (kind != "reentrant")]:
            with rounds_asked() as rounds:
                if count == 1:
                    step(model, batches_of(1)[0]).backward()
                else:
                    em.accumulate(model, step, batches_of(count))
            schedule = record.spec.step_order.schedule(record.layout, count)
            assert rounds == [schedule.entries], count
            most[step, count] = schedule.most_weights()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    assert len(set(most.values())) == 1
    assert max(most.values()) <= 2


def moved(name: str, count: int, dtype: torch.dtype, *, at_once: bool) -> dict[str, int]:
    """Bytes that a step moves, by tier and kind of collective, and bytes held before and after it."""
    model = Tied()
    model, optimizer = wrap(model, PLANS[name], adam(model), compute_dtype=dtype)
    before: dict[str, int] = {}
    for step in range(3):
        if step == 2:
            before = bytes_of(em.inspect(model).statistics)
        if at_once:
            em.accumulate(model, loss_of, batches_of(count))
        else:
            for batch in batches_of(count):
                (loss_of(model, batch) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = bytes_of(em.inspect(model).statistics)
    held = {f"held {tier}": nbytes for tier, nbytes in model._elixir.held_bytes().items()}
    optimizer.close()
    return {key: value - before[key] for key, value in found.items()} | held


def bytes_of(statistics: Any) -> dict[str, int]:
    return {
        **{f"fetched {tier}": n for tier, n in statistics.bytes_fetched.items()},
        **{f"offloaded {tier}": n for tier, n in statistics.bytes_offloaded.items()},
        **{f"{kind} {ranks}": n for (ranks, kind), n in statistics.collective_bytes.items()},
    }


def all_moved(name: str, dtype: torch.dtype) -> list[dict[str, int]]:
    em.init_mesh(device_type="cpu")
    one, eight = (moved(name, count, dtype, at_once=True) for count in (1, 8))
    return [one, eight, moved(name, 8, dtype, at_once=False)]


def loss_by_layers(model: nn.Module, ids: Tensor) -> Tensor:
    """`loss_of`, by a call of each layer: each is outermost then, and a step of many batches has hundreds."""
    x = model.embedding(ids[:, :-1])
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return F.cross_entropy(F.linear(x, model.embedding.weight).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.usefixtures("alone")
def test_a_step_that_calls_each_layer() -> None:
    """Its layers are frozen, so no gradient says when a layer is done."""
    batches = batches_of(5)
    oracle, model = Tied(layers=60), Tied(layers=60)
    oracle.blocks.requires_grad_(False)
    model.blocks.requires_grad_(False)
    for batch in batches:
        (loss_of(oracle, batch) / len(batches)).backward()
    model, optimizer = wrap(model, PLANS["offload"], step=loss_by_layers)
    record, before = model._elixir, em.full_state_dict(model)
    with rounds_asked() as rounds:
        em.accumulate(model, loss_by_layers, batches)
    assert rounds == [record.spec.step_order.schedule(record.layout, len(batches)).entries]
    optimizer.step()
    after = em.full_state_dict(model)
    name, wanted = "embedding.weight", oracle.embedding.weight.grad
    torch.testing.assert_close(before[name] - after[name], wanted, rtol=1e-4, atol=1e-6)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_compiled_blocks() -> None:
    batches = batches_of(4)
    oracle, model = Tied(layers=10), Tied(layers=10)
    for batch in batches:
        (loss_of(oracle, batch) / len(batches)).backward()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    model, optimizer = wrap(model, em.Plan.offload(rcache_blocks=4, chunk_numel=CHUNK))
    before = em.full_state_dict(model)
    em.accumulate(model, loss_of, batches)
    assert model._elixir.passed_together
    optimizer.step()
    after = em.full_state_dict(model)
    for name, p in oracle.named_parameters():
        torch.testing.assert_close(before[name] - after[name], p.grad, rtol=1e-4, atol=1e-6)
    optimizer.close()


@pytest.mark.parametrize(("name", "world"), [("zero3", 2), ("offload", 1), ("values on disk", 1)])
def test_eight_batches_move_and_hold_what_one_does(name: str, world: int, ranks: Ranks) -> None:
    for one, eight, loop in ranks(world).run(all_moved, name, torch.bfloat16):
        assert eight == one, "each byte once, and no sum in fp32"
        crossing = [key for key in one if not key.startswith("held")]
        assert sum(loop[key] for key in crossing) > 5 * sum(one[key] for key in crossing)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_bf16_are_summed_in_fp32(kind: str) -> None:
    """Eight gradients of up to 1 in bf16 have a sum in fp32 with an error of some 1e-6; in bf16, of 1e-2."""
    batches, model = batches_of(8), Tied(kind).bfloat16()
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for batch in batches:
        loss_of(model, batch).backward()
        for name, p in model.named_parameters():
            sums[name] += 0 if p.grad is None else p.grad.double()
            p.grad = None
    model, optimizer = wrap(model, PLANS["offload"])
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():

        def note(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()

        p.register_post_accumulate_grad_hook(note)
    em.accumulate(model, loss_of, batches, weights=[1.0] * 8)
    for name, total in sums.items():
        if name in found:
            assert found[name].dtype is torch.float32
            both_uses = name == "embedding.weight"  # plain torch adds them in bf16
            torch.testing.assert_close(found[name].double(), total, rtol=0, atol=2e-2 if both_uses else 3e-6)
    assert len(found) == (len(sums) if kind != "by hand" else 1 + 4 * 4)
    optimizer.zero_grad()
    assert every(p.grad_dtype == p.dtype and p.grad is None for p in model.parameters())
    optimizer.close()


@pytest.mark.usefixtures("alone")
def test_each_batch_draws_its_own_dropout_under_every_plan() -> None:
    losses = []
    for name in ("offload", "zero3", "all gathered"):
        model, optimizer = wrap(Tied("non-reentrant", dropout=0.5), PLANS[name])
        torch.manual_seed(7)
        found = em.accumulate(model, loss_of, [batches_of(1)[0]] * 4)
        losses.append([loss.item() for loss in found] + [torch.rand(()).item()])
        optimizer.close()
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0])) == 5


@pytest.mark.usefixtures("alone")
def test_modes_of_the_thread_go_along() -> None:
    model, optimizer = wrap(Tied(), PLANS["offload"])
    seen, packed = [], []

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.empty(()).device.type))
        return loss_of(model, ids)

    def pack(tensor: Tensor) -> Tensor:
        packed.append(threading.current_thread())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.float16), torch.device("cpu"), hooks:
        em.accumulate(model, step, batches_of(2))
    assert seen == [(True, torch.float16, "cpu")] * 2
    assert len(set(packed)) == 2
    optimizer.close()


def forward_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("micro-batch")}


@pytest.mark.usefixtures("alone")
def test_threads_live_as_long_as_the_model() -> None:
    before = forward_threads()
    model, optimizer = wrap(Tied(), PLANS["offload"])
    em.accumulate(model, loss_of, batches_of(3))
    mine = forward_threads() - before
    for count in (3, 2, 3):
        em.accumulate(model, loss_of, batches_of(count))
        assert forward_threads() - before == mine
    assert len(mine) == 3
    optimizer.close()
    del model, optimizer
    gc.collect()
    for thread in mine:
        thread.join()


class FailsError(Exception):
    """A forward that fails."""


@pytest.mark.usefixtures("alone")
def test_threads_of_a_pass_that_fails_end_without_the_garbage_collector() -> None:
    before = forward_threads()
    model, optimizer = wrap(Tied(), PLANS["offload"])
    mine: set[threading.Thread] = set()

    def fails(model: nn.Module, ids: Tensor) -> Tensor:
        mine.update(forward_threads() - before)
        model(ids)
        raise FailsError

    gc.disable()
    try:
        with pytest.raises(FailsError) as kept:
            em.accumulate(model, fails, batches_of(3))
        assert len(mine) == 3
        for thread in mine:
            thread.join(60)
        assert not forward_threads() & mine
    finally:
        gc.enable()
    assert isinstance(kept.value, FailsError)
    optimizer.zero_grad()
    em.accumulate(model, loss_of, batches_of(3))
    optimizer.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_fails_ends_the_others(kind: str) -> None:
    model, optimizer = wrap(Tied(kind), PLANS["offload"])
    batches = batches_of(3)
    before = em.full_state_dict(model)
    handles: list[Any] = []
    for layer, error in enumerate([FailsError, torch.OutOfMemoryError] * 2):
        for number in range(3):
            calls = []

            def fail(*_: Any, number: int = number, calls: list[None] = calls, error: Any = error) -> None:
                calls.append(None)
                if len(calls) == number + 1:
                    raise error

            handle = model.blocks[layer].up.register_forward_hook(fail)
            with pytest.raises(error):
                em.accumulate(model, loss_of, batches)
            handle.remove()
            assert not any(model._elixir.scheduler.cache.holds(c.index) for c in model._elixir.layout.cached)
            optimizer.zero_grad()
    em.accumulate(model, loss_of, batches)
    optimizer.step()
    assert not torch.equal(em.full_state_dict(model)["blocks.0.up.weight"], before["blocks.0.up.weight"])
    reference = Tied(kind)
    for batch in batches:
        (loss_of(reference, batch) / 3).backward()
    for name, p in reference.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(em.full_state_dict(model)[name], p.detach() - p.grad, rtol=0, atol=2e-6)
    del handles
    optimizer.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("points", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_an_interrupt_anywhere_is_given_up(points: int) -> None:
    model, optimizer = wrap(Tied("non-reentrant", layers=2), PLANS["offload"])
    batches = batches_of(3)
    counted = Interrupt(None)
    em.accumulate(model, loss_of, batches)
    optimizer.zero_grad()
    with counted:
        em.accumulate(model, loss_of, batches)
    wanted = optimizer.clip_grad_norm_(float("inf")).item()
    optimizer.zero_grad()
    draw = random.Random(0)
    for _ in range(points):
        with Interrupt(draw.randrange(1, counted.places)) as interrupt, contextlib.suppress(KeyboardInterrupt):
            em.accumulate(model, loss_of, batches)
        restore_torch()
        optimizer.zero_grad()
        em.accumulate(model, loss_of, batches)
        assert optimizer.clip_grad_norm_(float("inf")).item() == wanted, interrupt.where
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.usefixtures("alone")
def test_forwards_that_an_interrupt_has_left_end_before_their_step_is_given_up() -> None:
    _, optimizer = wrap(Tied("non-reentrant", layers=2), PLANS["offload"])
    optimizer._hooks._turns = turns = Mock()
    optimizer._hooks.reset()
    turns.end.assert_called_once()
    optimizer.close()


class Keeps(Tied):
    """Keeps a tensor of its batch on the module: with a graph or without, as an attribute or a buffer."""

    def __init__(self, *, graph: bool, buffer: bool, clears: bool) -> None:
        super().__init__()
        self.graph, self.clears = graph, clears
        if buffer:
            self.register_buffer("kept", None, persistent=False)
        else:
            self.kept: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        self.kept = self.embedding(ids) if self.graph else ids.float()
        result = super().forward(ids) * self.kept.mean()
        if self.clears:
            self.kept = None
        return result


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_a_module_that_keeps_a_tensor_is_refused(graph: bool, buffer: bool, clears: bool) -> None:
    model, optimizer = wrap(Keeps(graph=graph, buffer=buffer, clears=clears), PLANS["offload"])
    for _ in range(2):
        with pytest.raises(em.UsageError, match="the step changes 'kept' of module '' while another batch"):
            em.accumulate(model, loss_of, batches_of(2))
        optimizer.zero_grad()
    optimizer.close()


class Switched(Keeps):
    """Keeps a tensor of its batch where the step says so."""

    def forward(self, ids: Tensor, keep: bool = False) -> Tensor:
        return super().forward(ids) if keep else Tied.forward(self, ids)


def switched(model: nn.Module, ids: Tensor, keep: bool) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1], keep).flatten(0, 1), ids[:, 1:].flatten())


def of_factory(keep: bool) -> Callable[..., Tensor]:
    return lambda model, ids: switched(model, ids, keep)


class Step:
    """A step that is an object."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        return switched(model, ids, self.keep)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", [lambda keep: partial(switched, keep=keep), of_factory, Step])
def test_each_step_is_looked_at_once(make: Callable[[bool], Callable[..., Tensor]]) -> None:
    model, optimizer = wrap(Switched(graph=True, buffer=False, clears=False), PLANS["offload"], step=make(False))
    em.accumulate(model, make(False), batches_of(2))
    with pytest.raises(em.UsageError, match="the step changes 'kept'"):
        em.accumulate(model, make(True), batches_of(2))
    optimizer.zero_grad()
    optimizer.close()


class KeepsElsewhere(Tied):
    """Keeps a tensor of its batch in an object or in a list."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.namespace, self.series = place, SimpleNamespace(kept=None), list[Tensor]()

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        if self.place == "namespace":
            self.namespace.kept = embedded
            return super().forward(ids) * self.namespace.kept.mean()
        self.series.append(embedded)
        return super().forward(ids) * self.series[-1].mean()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("place", ["namespace", "series"])
def test_an_object_that_keeps_a_tensor_is_refused(place: str) -> None:
    model, optimizer = wrap(KeepsElsewhere(place), PLANS["offload"])
    with pytest.raises(em.UsageError, match=f"the step changes .* of module '{place}' while another batch"):
        em.accumulate(model, loss_of, batches_of(2))
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.usefixtures("alone")
def test_a_layer_that_keeps_the_generator_of_its_recomputation_is_refused() -> None:
    model = Tied()
    for block in model.blocks:
        composable_checkpoint(block)
    model, optimizer = wrap(model, PLANS["offload"])
    with pytest.raises(em.UsageError, match=r"the step changes '_ac_generator' of module .* while another batch"):
        em.accumulate(model, loss_of, batches_of(2))
    optimizer.zero_grad()
    optimizer.close()


def evaluated_first(model: nn.Module, ids: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        target = loss_of(model, ids)
    model.train()
    return loss_of(model, ids) - target


def frozen_afterwards(model: nn.Module, ids: Tensor) -> Tensor:
    loss = loss_of(model, ids)
    model.blocks[0].requires_grad_(False)  # type: ignore[operator, index, union-attr]
    with torch.no_grad():
        target = loss_of(model, ids)
    model.blocks[0].requires_grad_(True)  # type: ignore[operator, index, union-attr]
    return loss - target


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("step", "what"), [(evaluated_first, "training"), (frozen_afterwards, "requires_grad")])
def test_a_step_that_switches_modules_between_forwards_is_refused(step: Any, what: str) -> None:
    model, optimizer = wrap(Tied(), PLANS["offload"])
    for _ in range(2):
        with pytest.raises(em.UsageError, match=f"the step changes '.*{what}' of module"):
            em.accumulate(model, step, batches_of(2))
        model.requires_grad_(True).train()
        optimizer.zero_grad()
    em.accumulate(model, loss_of, batches_of(2))
    optimizer.step()
    optimizer.close()


def in_a_thread(model: nn.Module, ids: Tensor) -> Tensor:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(loss_of(model, ids))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("alone")
def test_what_cannot_pass_side_by_side_is_refused(tmp_path: Path) -> None:
    batches = batches_of(2)
    with pytest.raises(em.UsageError, match="accumulate needs a model that went through wrap"):
        em.accumulate(Tied(), loss_of, batches)
    model, optimizer = wrap(Tied(), PLANS["offload"])

    def twice(model: nn.Module, ids: Tensor) -> Tensor:
        loss_of(model, ids).backward()
        return loss_of(model, ids)

    def drops(model: nn.Module, ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        return loss_of(model, ids)

    def updates(model: nn.Module, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        optimizer.step()
        return loss

    def clips(model: nn.Module, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        optimizer.clip_grad_norm_(1.0)
        return loss

    def saves(model: nn.Module, ids: Tensor) -> Tensor:
        em.save(tmp_path / "inside", model, optimizer)
        return loss_of(model, ids)

    def reads_all(model: nn.Module, ids: Tensor) -> Tensor:
        em.full_state_dict(model)
        return loss_of(model, ids)

    def nested(model: nn.Module, ids: Tensor) -> Tensor:
        return sum(em.accumulate(model, loss_of, [ids, ids]))  # type: ignore[return-value]

    for step, message in {
        clips: r"optimizer.clip_grad_norm_\(\) inside em.accumulate",
        reads_all: r"em.full_state_dict\(\) inside em.accumulate",
        nested: "em.accumulate inside em.accumulate",
        twice: "a backward inside em.accumulate",
        drops: "inside em.accumulate",
        updates: "inside em.accumulate",
        in_a_thread: "two threads run a wrapped model at once",
        lambda model, ids: model(ids): r"returned a tensor of shape \(1, 6, 48\)",
        lambda model, ids: loss_of(model, ids).item(): "returned a float",
    }.items():
        with pytest.raises(em.UsageError, match=message):
            em.accumulate(model, step, batches)  # type: ignore[arg-type]
        optimizer.zero_grad()
    with pytest.raises(em.CheckpointError, match=r"em.save\(\) inside em.accumulate"):
        em.accumulate(model, saves, batches)
    optimizer.zero_grad()
    with pytest.raises(em.UsageError, match="got 2 batches and 1 weights"):
        em.accumulate(model, loss_of, batches, weights=[1.0])
    for weight in ("x", float("nan"), torch.tensor(float("inf")), torch.ones(2)):
        with pytest.raises(em.UsageError, match="got the weight"):
            em.accumulate(model, loss_of, batches, weights=[1.0, weight])  # type: ignore[list-item]
    with pytest.raises(em.UsageError, match="got one dict as batches: pass a list"):
        em.accumulate(model, loss_of, {"input_ids": batches[0]})
    with pytest.raises(em.UsageError, match="got no batches"):
        em.accumulate(model, loss_of, [])
    em.accumulate(model, loss_of, batches)
    optimizer.step()
    optimizer.close()


def differing() -> list[str]:
    """(rank) The errors where ranks have other numbers of batches, other weights, or a mode of torch on one of them."""
    rank = em.init_mesh(device_type="cpu").get_local_rank("dp")
    model, optimizer = wrap(Tied(), PLANS["zero3"])
    messages = []
    for count, weight, mode in ((2 + rank, 1.0, False), (2, [float("nan"), 1.0][rank], False), (2, 1.0, rank == 0)):
        with pytest.raises(em.UsageError) as caught, FlopCounterMode(display=False) if mode else nullcontext():
            em.accumulate(model, loss_of, batches_of(count), weights=[weight] * count)
        messages.append(str(caught.value))
    optimizer.close()
    return messages


def test_ranks_that_call_it_otherwise_are_refused(ranks: Ranks) -> None:
    for count, weight, mode in ranks(2).run(differing):
        assert "ranks disagree about em.accumulate: number of batches is 2 on rank 0, 3 on rank 1" in count
        assert "number of weights that are finite is 0 on rank 0, 2 on rank 1" in weight
        assert "number of batches that pass each layer together is 1 on rank 0, 2 on rank 1" in mode


def gpt2() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    return of_family(
        "GPT2LMHeadModel",
        hf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    )


def qwen3_moe() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The router's logits of all layers are part of the loss."""
    config = hf.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return of_family("Qwen3MoeForCausalLM", config)


def gpt2_with_adapters() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, batches = gpt2()
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(model, config), batches  # type: ignore[arg-type]


def of_family(name: str, config: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    return getattr(hf, name)(config), [{"input_ids": ids, "labels": ids} for ids in batches_of(3)]


@pytest.mark.usefixtures("alone")
def test_adapters_switched_off_between_forwards_are_refused() -> None:
    model, batches = gpt2_with_adapters()
    trainable = [p for p in model.parameters() if p.requires_grad]
    plan = em.Plan.offload(chunk_numel=8000, rcache_blocks=5)
    model, optimizer = em.wrap(model, torch.optim.SGD(trainable, lr=1.0), plan=plan)

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            reference = own_loss(model, batch)
        return own_loss(model, batch) - reference

    for only in (False, True):

        def of_some(model: Any, batch: dict[str, Tensor], only: bool = only) -> Tensor:
            return own_loss(model, batch) if only and batch is batches[1] else step(model, batch)

        with pytest.raises(em.UsageError, match=r"the step changes .*requires_grad"):
            em.accumulate(model, of_some, batches[:2])
        optimizer.zero_grad()
    optimizer.close()


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("build", [gpt2, qwen3_moe, gpt2_with_adapters])
def test_models_of_hugging_face(build: Any, reentrant: bool | None) -> None:
    model, batches = build()
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if build is gpt2_with_adapters:
            model.enable_input_require_grads()
    plain = copy.deepcopy(model)
    losses = []
    for batch in batches:
        losses.append(own_loss(plain, batch))
        (losses[-1] / 3).backward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = em.wrap(
        model,
        torch.optim.SGD(trainable, lr=1.0),
        plan=em.Plan.offload(chunk_numel=8000, rcache_blocks=5),
        step=own_loss,
        sample=batches[0],
    )
    record = model._elixir  # type: ignore[union-attr]
    with rounds_asked() as rounds:
        found = em.accumulate(model, own_loss, batches)
    predicted = record.spec.step_order.schedule(record.layout, 3).entries
    last = 2 if build is gpt2_with_adapters and reentrant else 0  # two releases whose order one batch misses too
    assert [entries[: len(entries) - last] for entries in rounds] == [predicted[: len(predicted) - last]]
    assert every(map(torch.equal, found, losses))
    optimizer.step()
    after = em.full_state_dict(model)
    for name, p in plain.named_parameters():
        wanted = p.detach() - (0 if p.grad is None else p.grad)
        assert (after[name] - wanted).abs().max() < 3e-6, name
    optimizer.close()
