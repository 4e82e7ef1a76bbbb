"""Models that `parallelize_module` cut: every plan on tensor-parallel ranks against the same model in one process."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import elixir_moe as em
from elixir_moe.parallel.rules import annotate_dtensors
from elixir_moe.planner.trace import trace
from tests.support.cases import with_further
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, SEQ, D, VOCAB = 5, 8, 4, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def parallelize(model: Model, tp: DeviceMesh, sequence_parallel: bool) -> None:
    tokens = Shard(1) if sequence_parallel else Replicate()
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            "head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=tokens)}
        if sequence_parallel:
            styles |= {
                "norm": SequenceParallel(),
                "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            }
            parallelize_module(block, tp, styles)
            styles = {"up": ColwiseParallel()}
        parallelize_module(block, tp, styles)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))


def plain() -> dict[str, Any]:
    torch.manual_seed(2)
    model = Model()
    optimizer = adamw(model)
    norms = []
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "state": model.state_dict()}


def wrapped(tp: int, sequence_parallel: bool, plans: dict[str, em.Plan]) -> dict[str, dict[str, Any]]:
    mesh = em.init_mesh(tp=tp, device_type="cpu")
    rank, ranks = mesh.get_local_rank("dp"), mesh["dp"].size()
    results = {}
    for name, plan in plans.items():
        torch.manual_seed(2)
        model = Model()
        parallelize(model, mesh["tp"], sequence_parallel)
        model, optimizer = em.wrap(model, adamw(model), plan=plan)
        norms = []
        for step in range(STEPS):
            loss_of(model, batch(step)[rank * ROWS // ranks :][: ROWS // ranks]).backward()
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        results[name] = {"norms": norms, "state": em.full_state_dict(model, all_ranks=True)}
        optimizer.close()
        del model, optimizer
    gc.collect()
    return results


def counted() -> tuple[int, int, int]:
    """Parameters of the whole model: as one process has them, and traced before and after patterns are attached."""
    mesh = em.init_mesh(tp=2, device_type="cpu")
    model = Model()
    whole = sum(p.numel() for p in model.parameters())
    parallelize(model, mesh["tp"], False)
    before = trace(model, loss_of, batch(0), world=dist.get_world_size(), rank=dist.get_rank()).parameters
    annotate_dtensors(model)
    after = trace(model, loss_of, batch(0), world=dist.get_world_size(), rank=dist.get_rank()).parameters
    return whole, before, after


def test_the_planner_counts_each_element_once(ranks: Ranks) -> None:
    for whole, before, after in ranks(2).run(counted):
        assert before == after == whole


PLANS = {
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(rcache_blocks=3, chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=3, chunk_numel=600),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world", "tp"), with_further([(2, 2), (4, 2)], [(2, 2)]))
def test_tensor_parallel_modules(world: int, tp: int, sequence_parallel: bool, ranks: Ranks) -> None:
    wanted = plain()
    for found in ranks(world).run(wrapped, tp, sequence_parallel, PLANS):
        for case, result in found.items():
            assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-5), case
            for key, value in wanted["state"].items():
                torch.testing.assert_close(
                    result["state"][key], value, rtol=0, atol=2e-5, msg=lambda m, c=case, k=key: f"{c} {k}: {m}"
                )


def half_precision() -> None:
    mesh = em.init_mesh(tp=2, device_type="cpu")
    torch.manual_seed(2)
    model = Model()
    parallelize(model, mesh["tp"], False)
    before = {name: p.full_tensor().detach().clone() for name, p in model.blocks.named_parameters() if "up" in name}
    model, optimizer = em.wrap(model, adamw(model), plan=em.Plan.zero2(), compute_dtype=torch.bfloat16)
    after = em.full_state_dict(model, all_ranks=True)
    for name, value in before.items():
        assert torch.equal(after[f"blocks.{name}"], value), "masters are as fine as the weights were"
    loss = loss_of(model, batch(0))
    assert loss.dtype == torch.bfloat16
    loss.backward()
    optimizer.step()
    assert loss_of(model, batch(0)) < loss
    optimizer.close()


def test_half_precision_keeps_fine_masters(ranks: Ranks) -> None:
    ranks(2).run(half_precision)


def refusal(parameter: nn.Parameter) -> str:
    """How `wrap` refuses a module with that parameter."""
    model = nn.Module()
    model.weight = parameter
    with pytest.raises(em.LayoutError) as caught:
        em.wrap(model, torch.optim.SGD(model.parameters()), plan=em.Plan.zero2())
    return str(caught.value)


def refuse() -> dict[str, str]:
    """{what is wrong: the message}, on four ranks."""
    both, said = em.init_mesh(tp=2, device_type="cpu"), {}
    for what, size, placements in (
        ("uneven", 5, [Shard(0)]),
        ("uneven groups", 6, [_StridedShard(0, split_factor=2)]),
        ("uneven together", 2, [Shard(0), Shard(0)]),
        ("groups and a cut", 8, [Shard(1), _StridedShard(0, split_factor=2)]),
    ):
        mesh = both["tp"] if len(placements) == 1 else both
        weight = distribute_tensor(torch.zeros(size, 4), mesh, placements, src_data_rank=None)
        said[what] = refusal(nn.Parameter(weight))
    return said


def test_cuts_that_no_pattern_has_are_refused(ranks: Ranks) -> None:
    expected = {
        "uneven": "'weight' of shape (5, 4): dim 0 is not divisible by the 2 parts of S(0) on axis 'tp'",
        "uneven groups": "'weight' of shape (6, 4): dim 0 is not divisible by the 4 parts of _S(0, 2) on axis 'tp'",
        "uneven together": "'weight' of shape (2, 4): dim 0 is not divisible by the 4 parts of S(0) on axis 'tp'",
        "groups and a cut": "shard the parameter on one axis",
    }
    for said in ranks(4).run(refuse):
        assert set(said) == set(expected)
        for what, text in expected.items():
            assert text in said[what], what
