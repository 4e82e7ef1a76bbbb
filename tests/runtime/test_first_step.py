"""The requests that are foreseen are those that come, from the first step on, for models drawn at random."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from tests.support.cases import least_said, rounds_asked
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]

WIDTH = 16
KINDS = ("mlp", "norm", "attention", "tied", "reused", "reads", "frozen", "mixture", "unused", "half trained", "tiled")
STEPS = 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(self.norm(x)).tanh())


class Attention(nn.Module):
    """Queries, keys and values by one product of three parameters that are joined for it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, torch.cat([self.q, self.k, self.v])).view(1, -1, 2, 3 * 8).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x).tanh())


class Reads(nn.Module):
    """Uses weights of other modules, each by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.one.weight + 1).tanh()
        return F.linear(self.other(x), self.other.weight, self.one.bias)


class Model(nn.Module):
    """Parts of several kinds, some of them in checkpointed regions of one or two parts."""

    def __init__(self, draw: random.Random, mesh: Any) -> None:
        super().__init__()
        self.in_tiles = draw.random() < 0.5
        self.kinds = [draw.choice(KINDS) for _ in range(draw.randint(2, 6))]
        self.parts = nn.ModuleList(self._part(kind, mesh) for kind in self.kinds)
        self.regions: list[tuple[list[int], bool | None]] = []
        todo = list(range(len(self.kinds)))
        while todo:
            size = draw.randint(1, 2)
            mixes = any(self.kinds[i] == "mixture" for i in todo[:size])
            self.regions.append((todo[:size], None if mixes else draw.choice([None, None, False, True])))
            todo = todo[size:]
        self.penalty = draw.random() < 0.2
        self.embed = nn.Embedding(24, WIDTH)
        self.head = nn.Linear(WIDTH, 24, bias=False)

    def _part(self, kind: str, mesh: Any) -> nn.Module:
        if kind == "mixture":
            degree = torch.distributed.get_world_size()
            own = em.expert_mesh(mesh, ep=degree)
            mixture = em.MoE(d_model=WIDTH, d_hidden=8, num_experts=4, top_k=2, mesh=own)
            return em.tile(mixture, at_most=WIDTH * 8 * 4 * (4 // degree // (1 + self.in_tiles)))
        part = {"norm": nn.LayerNorm(WIDTH), "attention": Attention(), "tied": Tied(), "reads": Reads()}.get(
            kind, Mlp()
        )
        if kind == "half trained":
            part.inner.requires_grad_(False)  # type: ignore[operator, union-attr]
        if kind == "tiled":
            em.tile(part, at_most=512)
        return part.requires_grad_(False) if kind == "frozen" else part

    def _run(self, x: Tensor, numbers: list[int]) -> Tensor:
        for number in numbers:
            kind, part = self.kinds[number], self.parts[number]
            if kind == "mixture":
                x = x + part(x)[0]
            elif kind != "unused":
                x = part(x)
            if kind == "reused":
                x = part(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for numbers, reentrant in self.regions:
            if reentrant is None:
                x = self._run(x, numbers)
            else:
                x = checkpoint(self._run, x, numbers, use_reentrant=reentrant)
        return self.head(x)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return loss + 1e-3 * sum(p.square().sum() for p in model.parameters()) if model.penalty else loss


def asks_as_foreseen(seed: int) -> bool:
    """Whether the first steps of a drawn model under a drawn plan ask for what was foreseen, and no more."""
    draw, mesh = random.Random(seed), em.init_mesh()
    numel = draw.choice([600, 1200, 2400])
    plan = draw.choice([em.Plan.zero3(chunk_numel=numel), em.Plan.offload(chunk_numel=numel)])
    plan = replace(plan, device_chunks=draw.choice([0, 2])) if plan.offloaded else plan
    more, accumulation, which = draw.choice([0, 1, 4]), draw.choice([1, 2]), draw.random()

    def wrapped(plan: em.Plan) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = Model(random.Random(which), mesh)
        options = {"step": loss_of, "sample": torch.randint(0, 24, (2, 8))}
        return em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan, **options)  # type: ignore[arg-type]

    try:
        wrapped(replace(plan, rcache_blocks=1))[1].close()
        least = 1
    except em.PlanError as error:
        least = least_said(error)
    model, optimizer = wrapped(replace(plan, rcache_blocks=least + more))
    layout, foreseen = em.inspect(model).layout, em.inspect(model).schedule
    assert foreseen is not None
    with rounds_asked() as rounds:
        for _ in range(STEPS):
            for _ in range(accumulation):
                loss_of(model, torch.randint(0, 24, (2, 8))).backward()
            optimizer.step()
    found = em.inspect(model).statistics
    optimizer.close()
    assert (found.cache.off_schedule, found.blocks_replaced) == (0, 0)
    assert any(foreseen.entries) == bool(layout.cached)
    return rounds == [foreseen.entries] * (STEPS * accumulation)


@pytest.mark.parametrize(("world", "seeds"), [(1, range(1, 6, 2)), (2, range(0, 6, 2))])
def test_the_first_step_follows_the_schedule(world: int, seeds: range, ranks: Ranks) -> None:
    """Further models, and these on the other number of ranks, are slow."""
    for seed in seeds:
        assert ranks(world).run(asks_as_foreseen, seed) == [True] * world, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("start", range(0, 240, 24))
def test_the_first_step_of_many_models_follows_the_schedule(world: int, start: int, ranks: Ranks) -> None:
    for seed in range(start, start + 24):
        assert ranks(world).run(asks_as_foreseen, seed) == [True] * world, f"seed {seed}"


def distilled(model: nn.Module, x: Tensor, *, first: bool) -> Tensor:
    """A loss with the outputs of an evaluation, which runs before the trained forward or after it."""
    trained = None if first else model(x)
    with torch.no_grad():
        target: Tensor = model(x)
    if trained is None:
        trained = model(x)
    return (trained - 0.3 * target).square().mean()


def evaluated_in_steps(first: bool) -> None:
    """Compares the requests of steps, and their gradients, with those foreseen, and those of plain torch."""
    em.init_mesh(device_type="cpu")
    torch.manual_seed(0)
    plain = nn.Sequential(*(Mlp() for _ in range(4)))
    model, batches = copy.deepcopy(plain), [torch.randn(2, WIDTH) for _ in range(3)]
    step = partial(distilled, first=first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = em.Plan.offload(chunk_numel=1600, rcache_blocks=3)
    model, optimizer = em.wrap(model, optimizer, plan=plan, step=step, sample=batches[0])
    record = model._elixir
    with rounds_asked() as rounds:
        step(model, batches[0]).backward()
        optimizer.step()
        em.accumulate(model, step, batches, weights=[1.0, 1.0, 1.0])
        optimizer.step()
    assert rounds == [record.spec.step_order.schedule(record.layout, count).entries for count in (1, 3)]
    for count in (1, 3):
        gradients = torch.autograd.grad(sum(step(plain, x) for x in batches[:count]), list(plain.parameters()))
        for p, gradient in zip(plain.parameters(), gradients, strict=True):
            p.data -= gradient
    torch.testing.assert_close(em.full_state_dict(model), dict(plain.state_dict()))
    optimizer.close()


@pytest.mark.parametrize("first", [True, False])
def test_a_step_with_an_evaluation_follows_the_schedule(first: bool, ranks: Ranks) -> None:
    ranks(1).run(evaluated_in_steps, first)
