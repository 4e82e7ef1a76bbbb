"""Updates that begin in backward: the bits of updates in `step`, and what may not happen in between."""

import math
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.chunks.plan import Tier
from elixir_moe.optim.early import EarlyUpdates, _Begun
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.runtime.phase import Phase
from tests.memory.test_gate import Ended
from tests.memory.test_shards import gradient, shard_of
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D, STEPS = 16, 4
CHUNK = 2 * D * D + 2 * D
DISK = tempfile.gettempdir()
PLANS = {
    "offload": em.Plan.offload(chunk_numel=CHUNK),
    "half": em.Plan.offload(chunk_numel=CHUNK, device_chunks=2),
    "disk": em.Plan.offload(chunk_numel=CHUNK, disk=DISK, disk_chunks=3, verify=True),
    "values on disk": em.Plan.offload(
        chunk_numel=CHUNK, disk=DISK, disk_chunks=99, values_on_disk=True, verify=True, rcache_blocks=6
    ),
    "zero3": em.Plan.zero3(chunk_numel=CHUNK),
}


class Net(nn.Module):
    """Tied, frozen and unused weights, and a mixture whose experts belong to one rank each."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        own = em.expert_mesh(mesh, dist.get_world_size())
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.frozen, self.unused = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)
        self.mixture = em.MoE(d_model=D, d_hidden=D // 2, num_experts=4, top_k=2, mesh=own)
        em.annotate(
            self, {"mixture.experts.*": em.Pattern(own, replicate=("edp",), shard={"ep": 0})} | {"*": whole(mesh)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x))
        for layer in self.layers:
            x = x + layer(x).tanh()
        out, aux = self.mixture(x)
        return self.last(x + out).float().square().mean() + aux


def whole(mesh: Any) -> em.Pattern:
    return em.Pattern(mesh, replicate=("dp",))


def wrapped(plan: str, *, half: bool = False, device: str = "cpu") -> tuple[Net, ShardedOptimizer]:
    torch.manual_seed(3)
    model = Net(em.init_mesh(device_type=device))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-3},
    ]
    dtype = torch.bfloat16 if half else None
    return em.wrap(model, torch.optim.AdamW(groups, 1e-2), plan=PLANS[plan], compute_dtype=dtype, device=device)


def backward(model: Net, seed: int, *, half: bool = False, factor: float = 1.0) -> None:
    inputs = torch.randn(8, D, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    inputs = inputs.to(model.first.weight.device)
    (factor * model(inputs.bfloat16() if half else inputs)).backward()


def begun(optimizer: ShardedOptimizer) -> set[int]:
    """The chunks updated in backward, once all that were given to the thread are."""
    given = {} if optimizer._early is None else optimizer._early._begun
    wait([one.done for one in given.values()])
    return {index for index, one in given.items() if one.prepared.result() is not None}


def train(
    plan: str, early: bool, half: bool, accumulation: int, ready: bool, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """(rank) Norms, weights and moments; and the chunks updated in backward, of those that may be."""
    model, optimizer = wrapped(plan, half=half, device=device)
    seen: dict[str, Tensor] = {}
    counts = []
    for step in range(STEPS):
        for micro in range(accumulation):
            last = early and micro == accumulation - 1
            with optimizer.update_in_backward() if last else nullcontext():
                backward(model, 10 * step + micro, half=half)
        if ready:
            away = [c for c in optimizer._chunks if c.shard.tier is not Tier.DEVICE]
            counts.append((begun(optimizer), {c.spec.index for c in away if "unused.weight" not in c.names}))
        seen[f"norm {step}"] = optimizer.clip_grad_norm_(math.inf)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
    seen |= em.full_state_dict(model, all_ranks=True)
    for parameter in model.parameters():
        if parameter.requires_grad and model._elixir.kept.piece_of(parameter) is not None:
            state = model._elixir.kept.of(parameter)
            name = optimizer._hooks.name_of(parameter)
            seen |= {f"{name} {kind}": state[kind].read().clone() for kind in ("exp_avg", "exp_avg_sq")}
    optimizer.close()
    return seen, counts


def compare(plan: str, half: bool, accumulation: int, device: str = "cpu") -> list[str]:
    """(rank) Names of what differs between updates in `step`, in backward, and wherever the thread is in time."""
    expected, _ = train(plan, False, half, accumulation, True, device)
    found, counts = train(plan, True, half, accumulation, True, device)
    anyhow, _ = train(plan, True, half, accumulation, False, device)
    assert bool(counts[0][0]) == (accumulation > 1 and plan != "zero3"), "the first backward looks for writes"
    for some, allowed in counts[1:]:
        assert some <= allowed
        assert bool(some) == (plan != "zero3")
        if dist.get_world_size() == 1:
            assert some == allowed, "one rank has every gradient reduced in backward"
    return [n for n, value in expected.items() for other in (found, anyhow) if not torch.equal(value, other[n])]


QUICK = {("offload", True, 2, 2), ("half", False, 1, 1), ("values on disk", True, 1, 1), ("disk", True, 2, 1)}


@pytest.mark.parametrize(
    ("plan", "half", "accumulation", "world"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in (
            (plan, half, accumulation, world)
            for plan in PLANS
            for half in (False, True)
            for accumulation in (1, 2)
            for world in (1, 2, 4)
        )
    ],
)
def test_the_bits_of_updates_in_step(plan: str, half: bool, accumulation: int, world: int, ranks: Ranks) -> None:
    assert ranks(world).run(compare, plan, half, accumulation) == [[]] * world


def raised(call: Callable[[], Any], *words: str) -> str:
    """The message of the error that `call` raises, which must have these words."""
    with pytest.raises(em.ElixirError) as caught:
        call()
    assert every(word in str(caught.value) for word in words), str(caught.value)
    return str(caught.value)


def in_context(model: Net, optimizer: ShardedOptimizer, seed: int, **how: Any) -> None:
    with optimizer.update_in_backward():
        backward(model, seed, **how)


def refuse(folder: str) -> list[str]:
    """(rank) Tries what is refused between backward and `step`, then goes on; what differs from a quiet run."""
    states = []
    for disturbed in (False, True):
        model, optimizer = wrapped("half")
        for step in range(3):
            in_context(model, optimizer, step)
            if disturbed and step:
                assert begun(optimizer)
                _try_what_is_refused(model, optimizer, folder)
            optimizer.step()
        em.save(f"{folder}/{disturbed}", model, optimizer)
        states.append(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


def _try_what_is_refused(model: Net, optimizer: ShardedOptimizer, folder: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "clip_grad_value_": lambda: optimizer.clip_grad_value_(1.0),
        "grad_norms": optimizer.grad_norms,
        "zero_grad": model.zero_grad,
        "update_in_backward": lambda: in_context(model, optimizer, 9),
        "drop_process_groups": lambda: model._elixir.kept.drop_process_groups(lambda: pytest.fail("groups are gone")),
        "full_state_dict": lambda: em.full_state_dict(model),
        "is to be gathered": lambda: backward(model, 9),
    }
    for name, call in calls.items():
        raised(call, name, "between a backward in optimizer.update_in_backward() and optimizer.step()")
    raised(lambda: em.save(folder, model, optimizer), "gradients wait for a step")
    optimizer.param_groups[1]["lr"] = 1.0
    raised(optimizer.step, "param_groups[1]", "lr", "[0.003]", "[1.0]")
    optimizer.param_groups[1]["lr"] = 3e-3


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_refused_before_the_step_leaves_it_as_it_is(world: int, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(world).run(refuse, str(tmp_path)) == [[]] * world


def keep_all_blocks() -> None:
    """(rank) All weights stay in blocks, so nothing need be gathered."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    em.annotate(model, {"*": whole(em.init_mesh(device_type="cpu"))})
    plan = em.Plan.offload(chunk_numel=D * D + D, rcache_blocks=6)
    optimizer: Any
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), 1e-2), plan=plan)
    inputs = torch.ones(2, D)
    model(inputs).sum().backward()
    optimizer.step()
    before = model[0](inputs)
    with optimizer.update_in_backward():
        model(inputs).sum().backward()
    assert begun(optimizer)
    again = model[0](inputs)
    assert torch.equal(before, again), "weights in blocks are the old ones"
    raised(again.sum().backward, "a second backward between a backward in optimizer.update_in_backward()")
    with torch.no_grad():
        raised(lambda: model[0].weight.mul_(2.0), "a write to parameter '0.weight', which is lost")
    optimizer.step()
    assert not torch.equal(before, model[0](inputs))
    optimizer.close()


def test_old_weights_stay_in_their_blocks_and_a_second_backward_is_refused(ranks: Ranks) -> None:
    ranks(1).run(keep_all_blocks)


def part_before_any_update() -> str:
    """(rank) The message if rates part in a backward that begins no update; all can then take the step."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    em.annotate(model, {"*": whole(em.init_mesh(device_type="cpu"))})
    optimizer: Any
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), 1e-2), plan=em.Plan.offload())
    for used in (model, model, model[0]):
        if used is not model and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.1
        with optimizer.update_in_backward():
            used(torch.ones(2, D)).sum().backward()
        if used is model:
            optimizer.step()
    assert not begun(optimizer), "half of the one chunk has no gradient"
    with pytest.raises(em.UsageError) as error:
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    optimizer.close()
    return str(error.value)


def test_rates_that_part_before_any_update_can_be_set_alike(ranks: Ranks) -> None:
    for said in ranks(2).run(part_before_any_update):
        assert "is 0.01 on rank 0, 0.1 on rank 1" in said


def tie_reentrant() -> None:
    """(rank) A reentrant checkpoint and a layer before it share a weight, whose gradient comes twice in a backward."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D))
    model[2].weight = model[0].weight
    optimizer: Any
    model, optimizer = em.wrap(
        model, torch.optim.AdamW(model.parameters(), 1e-2), plan=em.Plan.offload(chunk_numel=D * D)
    )

    def loss() -> Tensor:
        x: Tensor = checkpoint(model[2], model[1](model[0](torch.ones(2, D))), use_reentrant=True)
        return x.sum()

    loss().backward()
    optimizer.step()
    with optimizer.update_in_backward():
        raised(loss().backward, "a second gradient of '0.weight'", "train without update_in_backward")
    optimizer.close()


def test_a_second_gradient_behind_an_update_says_how_to_train_without_it(ranks: Ranks) -> None:
    ranks(1).run(tie_reentrant)


class Fails(torch.autograd.Function):
    """Lets a backward fail in the middle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError("failed in the middle")


def give_up(folder: str, how: str) -> list[str]:
    """(rank) A step that ends badly after updates have begun; then a load, and the step again. What differs."""
    model, optimizer = wrapped("offload")
    states = []
    for step in range(2):
        in_context(model, optimizer, step)
        optimizer.step()
    em.save(folder, model, optimizer)
    for last in (False, True):
        if not last:
            _end_badly(how, model, optimizer)
            raised(optimizer.zero_grad, "optimizer.zero_grad()", "em.load")
            em.load(folder, model, optimizer)
        in_context(model, optimizer, 2)
        optimizer.step()
        states.append(em.full_state_dict(model, all_ranks=True))
        em.load(folder, model, optimizer)
    optimizer.close()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


def _end_badly(how: str, model: Net, optimizer: ShardedOptimizer) -> None:
    hook: Any
    if how == "rates":
        optimizer.param_groups[1]["lr"] = 0.1 * (1 + dist.get_rank())
        in_context(model, optimizer, 7)
        begun(optimizer)
        said = "param_groups[1]['lr'] is 0.1 on rank 0, 0.2 on rank 1"
        raised(optimizer.step, said, "updated in backward already", "checkpoint (em.load)")
        optimizer.param_groups[1]["lr"] = 0.1
        raised(optimizer.step, "em.load a checkpoint")
        return
    if how == "fails":
        hook = model.layers[0].register_forward_pre_hook(lambda _, args: Fails.apply(*args))  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="failed in the middle"):
            in_context(model, optimizer, 7)
        assert begun(optimizer)
        raised(optimizer.step, "a backward failed", "checkpoint (em.load)")
    else:  # the gradient of one rank alone, and of the first layer alone, is not finite
        hook = model.first.register_forward_pre_hook(lambda _, args: _spoilt(*args))
        in_context(model, optimizer, 7)
        begun(optimizer)
        raised(optimizer.step, "norm is nan", "updated in backward already", "checkpoint (em.load)")
    hook.remove()


def _spoilt(x: Tensor) -> Tensor:
    return x * math.nan if dist.get_rank() == dist.get_world_size() - 1 else x


@pytest.mark.parametrize(("how", "world"), [("fails", 1), ("nan", 2), ("rates", 2)])
def test_a_step_that_ends_badly_goes_on_from_a_checkpoint(how: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(world).run(give_up, str(tmp_path / "saved"), how) == [[]] * world


def all_nan() -> list[str]:
    """(rank) Where no gradient is finite no update begins, and the step may be given up; what differs after it."""
    states = []
    for factors in ((1.0, 1.0, 1.0), (1.0, 1.0, math.nan, 1.0)):
        model, optimizer = wrapped("offload")
        for seed, factor in enumerate(factors):
            in_context(model, optimizer, 5, factor=factor)
            if factor != factor:
                assert not begun(optimizer) and seed
                raised(optimizer.step, "zero_grad()")
                optimizer.zero_grad()
            else:
                optimizer.step()
        states.append(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


def test_a_step_without_a_finite_gradient_changes_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(all_nan) == [[]] * 2


def refuse_at_once() -> None:
    """(rank) What is refused before the backward begins."""
    model, optimizer = wrapped("offload")
    backward(model, 1)
    optimizer.clip_grad_norm_(1.0)
    backward(model, 2)
    raised(lambda: in_context(model, optimizer, 3), "backward ran after clip_grad_norm_")
    optimizer.zero_grad()
    own: Any = model.layers[0].bias
    own.grad = torch.zeros(D)
    raised(lambda: in_context(model, optimizer, 3), "parameter.grad was set by hand")
    optimizer.close()
    plain = nn.Linear(D, D)
    em.annotate(plain, {"*": whole(em.init_mesh(device_type="cpu"))})
    optimizer = em.wrap(
        plain, torch.optim.AdamW(plain.parameters()), plan=em.Plan.offload(), compute_dtype=torch.float16
    )[1]
    raised(lambda: optimizer.update_in_backward().__enter__(), "update_in_backward() with a loss scale", "bf16")
    optimizer.close()


def test_what_is_refused_before_the_backward(ranks: Ranks) -> None:
    ranks(1).run(refuse_at_once)


def test_an_update_is_withdrawn_when_nobody_reads_its_gradient_any_more() -> None:
    phase, prepared, done = Phase(), Ended(), Future[Any]()
    scheduler = cast(Any, SimpleNamespace(phase=phase))
    updates = EarlyUpdates(scheduler, cast(Any, None), {}, [], cast(Any, None))
    shard = cast(Any, SimpleNamespace(withdraw_update=lambda: None))
    phase.early[0] = _Begun(shard=shard, prepared=prepared, done=done)
    assert updates.withdraw() == 0
    assert done.cancelled()
    assert prepared.waits == 1


def test_an_update_that_has_begun_keeps_readers_out() -> None:
    shard, phase = shard_of(torch.float32), Phase()
    shard.add_gradient(gradient(torch.float32, 0), 1.0)
    scheduler = cast(Any, SimpleNamespace(phase=phase, reductions=SimpleNamespace(used={(0, 0)})))
    thread = cast(Any, SimpleNamespace(submit=lambda *_: Future()))
    updates = EarlyUpdates(scheduler, cast(Any, None), {}, [], thread)
    chunk = cast(Any, SimpleNamespace(spec=shard.spec, shard=shard, parameters=[None], squares=None))
    updates._begin(chunk, lambda: None, 1.0)
    assert list(phase.early) == [0]
    assert shard._gate.has_update
