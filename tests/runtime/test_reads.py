"""Weights read outside their own modules: what is counted before a step is what the step asks for."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.chunks.events import READ
from elixir_moe.planner.repeat import cuts_of
from elixir_moe.planner.trace import trace
from tests.runtime.test_habits import D, Guests, Layer, Net, ReadElsewhere, mean_square, with_penalty
from tests.support.cases import least_said, rounds_asked
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
Loss = Callable[[nn.Module, Tensor], Tensor]


class Scaled(nn.Module):
    """A root with a parameter beside layers whose attention reads the weight of its own part."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.enc(x)


class Checkpointed(Scaled):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # without it a reentrant checkpoint has no backward
        for layer in self.enc.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=self.reentrant)
        return self.scale * x

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.gelu(layer(x))  # which backward comes to first: it runs the block again


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class ReadTied(nn.Module):
    """Its head is its embedding, by a function in the place of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, D)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x[:, 0].abs().mul(5).long().clamp(max=23))
        for layer in self.layers[:2]:
            h = layer(h)
        return self.head(h)[:, :D]

    def head(self, h: Tensor) -> Tensor:
        return F.linear(self.layers[2](h), self.embedding.weight)


class ReadTiedBehind(ReadTied):
    reentrant = False

    def head(self, h: Tensor) -> Tensor:
        logits: Tensor = checkpoint(super().head, h, use_reentrant=self.reentrant)
        return logits


class ReadTiedBehindReentrant(ReadTiedBehind):
    reentrant = True


class ReadsTwo(Net):
    """Reads the weights of two other modules in one function, inside a checkpoint."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(checkpoint(self.mixed, x, use_reentrant=False))

    def mixed(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (D,), self.layers[3].norm.weight, self.layers[1].down.bias)
        return F.linear(x, self.last.weight)


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, int]] = {
    "attention": (Scaled, mean_square, 1024),
    "attention, checkpointed": (Checkpointed, mean_square, 1024),
    "attention, reentrant": (CheckpointedReentrant, mean_square, 1024),
    "tied": (ReadTied, mean_square, 600),
    "tied, behind a checkpoint": (ReadTiedBehind, mean_square, 600),
    "tied, behind a reentrant one": (ReadTiedBehindReentrant, mean_square, 600),
    "two in one function": (ReadsTwo, mean_square, 600),
    "elsewhere": (ReadElsewhere, mean_square, 600),
    "guests": (Guests, mean_square, 600),
    "penalty": (Net, with_penalty, 600),
}


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    em.init_mesh(device_type="cpu")


def rows_for(model: nn.Module) -> Tensor:
    return torch.randn((2, 4, D) if isinstance(model, Scaled) else (8, D), generator=torch.Generator().manual_seed(1))


def wrapped(model: nn.Module, blocks: int, numel: int, step: Loss | None) -> Any:
    """In one process only what is offloaded goes through the rCache."""
    plan = em.Plan.offload(rcache_blocks=blocks, chunk_numel=numel)
    given = {} if step is None else {"step": step, "sample": rows_for(model)}
    return em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), plan=plan, **given)


@pytest.mark.parametrize("name", CASES)
def test_the_least_rcache_is_what_a_step_asks_for(name: str) -> None:
    """One block less is refused in `wrap`; with as many as it says, every step asks for what was expected of the first,
    and weights are those of plain torch."""
    make, loss, numel = CASES[name]
    torch.manual_seed(0)
    model = make()
    with pytest.raises(em.PlanError) as error:
        wrapped(model, 1, numel, loss)
    least = least_said(error.value)
    with pytest.raises(em.PlanError, match=f"at least {least}"):
        wrapped(model, least - 1, numel, loss)
    plain, sample = copy.deepcopy(model), rows_for(model)
    profile = trace(model, loss, sample)
    model, optimizer = wrapped(model, least, numel, loss)
    reference = torch.optim.SGD(plain.parameters(), lr=0.01)
    with rounds_asked() as rounds:
        for _ in range(3):
            for one, its in ((model, optimizer), (plain, reference)):
                loss(one, sample).backward()
                its.step()
                its.zero_grad()
    schedule, statistics = em.inspect(model).schedule, em.inspect(model).statistics.as_dict()
    assert schedule.least_blocks() == least
    assert rounds == [profile.schedule(em.inspect(model).layout).entries] * 3
    assert (statistics["off_schedule"], statistics["blocks_replaced"]) == (0, 0)
    for key, value in em.full_state_dict(model, all_ranks=True).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-5, atol=1e-6)
    optimizer.close()


def reading_values(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x) * (1.0 if x.sum().item() < 1e9 else 2.0)


def test_a_step_that_reads_values_tells_of_its_reads_too() -> None:
    """It cannot run without data, so it runs on the model, which is given back as it was."""

    model = Scaled()
    with pytest.raises(em.PlanError) as error:
        wrapped(model, 4, 1024, reading_values)
    assert least_said(error.value) == 5
    assert every(type(p) is nn.Parameter for p in model.parameters())
    model, optimizer = wrapped(model, 5, 1024, reading_values)
    reading_values(model, rows_for(model)).backward()
    optimizer.step()
    optimizer.close()


def least_of_a_stage() -> tuple[int, bool]:
    """(rank) The least rCache of one of two pipeline stages, of which the second reads values, and whether its schedule
    is known before a step.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    stage = Scaled()
    em.annotate(stage, {"*": em.Pattern(mesh, replicate=("dp",))})
    step = (mean_square, reading_values)[dist.get_rank()]
    with pytest.raises(em.PlanError) as error:
        wrapped(stage, 4, 1024, step)
    stage, optimizer = wrapped(stage, 5, 1024, step)
    known = em.inspect(stage).schedule is not None
    optimizer.close()
    return least_said(error.value), known


def test_one_stage_is_traced_where_another_reads_values(ranks: Ranks) -> None:
    assert ranks(2).run(least_of_a_stage) == [(5, True), (5, False)]


def test_reads_nobody_knew_of_are_refused_with_the_same_advice() -> None:
    model, optimizer = wrapped(ReadsTwo(), 4, 600, None)
    with pytest.raises(em.PlanError, match="blocks of the rCache are in use at once") as error:
        mean_square(model, rows_for(model)).backward()
    assert least_said(error.value) == 5
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("loss", [mean_square, with_penalty])
def test_reads_in_layers_traced_once_are_those_of_all(loss: Loss) -> None:
    model = Scaled(layers=6)
    assert cuts_of(model)
    sample = rows_for(model)
    found = trace(model, loss, sample)
    assert found == trace(model, loss, sample, whole=True)
    read = {found.params[p].name for event in found.events if event.kind is READ for p in event.params}
    assert {f"enc.layers.{i}.self_attn.out_proj.weight" for i in range(6)} <= read
    assert ("enc.layers.3.linear1.weight" in read) == (loss is with_penalty)


def searched() -> tuple[int, dict[str, Tensor]]:
    """(rank) Blocks of the plan that fits the least memory any does, and the weights after some steps under it."""
    model = Scaled(64)
    sample = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(2)).chunk(2)[dist.get_rank()]
    for budget in range(100_000, 2_000_000, 25_000):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            plan = em.Plan.auto(mean_square, sample, hardware="a100-80g-pcie-x4", budget=budget)
            model, optimizer = em.wrap(model, optimizer, plan=plan)
            break
        except em.PlanError as error:
            assert "no plan fits" in str(error)
    for _ in range(3):
        mean_square(model, sample).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert em.inspect(model).statistics.as_dict()["off_schedule"] == 0
    blocks, state = em.inspect(model).plan.rcache_blocks, em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return blocks, state


def test_a_searched_plan_trains_a_model_whose_attention_reads_a_parts_weight(ranks: Ranks) -> None:
    plain = Scaled(64)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    sample = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        mean_square(plain, sample).backward()
        optimizer.step()
        optimizer.zero_grad()
    for blocks, state in ranks(2).run(searched):
        assert blocks is not None, "the tightest plan holds a part of the model"
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
