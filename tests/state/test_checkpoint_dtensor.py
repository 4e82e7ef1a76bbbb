"""Checkpoints of models that `parallelize_module` cut: another tensor-parallel degree goes on with what one left."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed.tensor_parallel import PackedColwiseParallel

import elixir_moe as em
from tests.parallel.test_dtensor import Model, adamw, batch, loss_of, parallelize
from tests.support.checkpoint_cases import assert_same, everything
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLAN = em.Plan.zero3(rcache_blocks=4, chunk_numel=1024)
TOLERANCE = 2e-5
"""Absolute, of weights two steps on. Another degree sums rows in other parts, in fp32: gradients below 1 differ by some
1e-7, and Adam (rate 1e-2, eps 1e-4) passes on at most 1e-2 / 1e-4 of it a step."""


def train(tp: int, first: int, last: int, source: Path | None = None, target: Path | None = None) -> dict[str, Tensor]:
    """Takes steps `first` .. `last` with so many tensor-parallel ranks; loads before them, saves before and behind."""
    mesh = em.init_mesh(tp=tp, device_type="cpu")
    rank, ranks = mesh.get_local_rank("dp"), mesh["dp"].size()
    torch.manual_seed(2 if source is None else 3)
    model = Model()
    if tp > 1:
        parallelize(model, mesh["tp"], sequence_parallel=False)
    model, optimizer = em.wrap(model, adamw(model), plan=PLAN)
    if source is not None:
        em.load(source, model, optimizer)
        em.save(source.with_name("loaded"), model, optimizer)
    for step in range(first, last):
        loss_of(model, batch(step).chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if target is not None:
        em.save(target, model, optimizer)
    weights = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return weights


@pytest.mark.fault(11)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_degree_goes_on(before: int, after: int, ranks: Ranks, tmp_path: Path) -> None:
    """Weights and moments are equal to the bit; what follows is what the first degree does, to rounding."""
    ranks(2).run(train, before, 0, 2, target=tmp_path / "saved")
    resumed = ranks(2).run(train, after, 2, 4, source=tmp_path / "saved")[0]
    assert_same(everything(tmp_path / "saved"), everything(tmp_path / "loaded"), f"tp {before} to {after}")
    unbroken = ranks(2).run(train, before, 0, 4)[0]
    for name, value in unbroken.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=TOLERANCE)


# ------------------------------------------------------------------------------------------------------- gate and up


class Fused(nn.Module):
    """Gate and up of two experts as one weight, whose gradient is `Fused.factor`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.factor, weight = torch.randn(2, 2, 8, 4, generator=generator)
        self.gate_up_proj = nn.Parameter(weight)

    def forward(self) -> Tensor:
        weight, factor = self.gate_up_proj, self.factor
        if isinstance(weight, DTensor):
            factor = distribute_tensor(factor, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
            weight = weight.to_local()
        return (weight * factor).sum()


def train_fused(tp: int, source: Path | None, target: Path, rules: dict[str, dict[str, int]] | None = None) -> Tensor:
    """Loads, or else takes two steps, and saves. `rules` are cuts by hand, in the place of those of the placements.

    Returns the whole weight, which torch joins of what the ranks hold.
    """
    mesh = em.init_mesh(tp=tp, device_type="cpu")
    model = Fused()
    if tp > 1:
        PackedColwiseParallel().shard_param(model, "gate_up_proj", mesh["tp"])
    if rules is not None:
        em.annotate(model, {name: em.Pattern(mesh, replicate="dp", shard=cut) for name, cut in rules.items()})
    model, optimizer = em.wrap(model, adamw(model), plan=PLAN)
    try:
        if source is not None:
            em.load(source, model, optimizer)
        for _ in range(0 if source is not None else 2):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        em.save(target, model, optimizer)
        weight: Tensor = em.full_state_dict(model, all_ranks=True)["gate_up_proj"]
    finally:
        optimizer.close()
    return weight


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_gate_and_up_keep_their_rows(before: int, after: int, ranks: Ranks, tmp_path: Path) -> None:
    """Weights and moments are equal to the bit to those of a model that was never cut."""
    wanted = ranks(2).run(train_fused, 1, None, tmp_path / "uncut")[0]
    ranks(2).run(train_fused, before, None, tmp_path / "saved")
    for weight in ranks(2).run(train_fused, after, tmp_path / "saved", tmp_path / "loaded"):
        assert torch.equal(weight, wanted)
    for name in ("saved", "loaded"):
        assert_same(everything(tmp_path / name), everything(tmp_path / "uncut"), f"{name}, tp {before} to {after}")


def load_another_cut(source: Path, target: Path) -> str:
    with pytest.raises(em.CheckpointError) as caught:
        train_fused(2, source, target)
    return str(caught.value)


def test_rows_that_were_saved_as_one_cut_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """So says a checkpoint in which the slices of gate and up stand as if they were one behind another."""
    ranks(2).run(train_fused, 2, None, tmp_path / "saved", {"gate_up_proj": {"tp": 1}})
    for message in ranks(2).run(load_another_cut, tmp_path / "saved", tmp_path / "loaded"):
        assert "'gate_up_proj' is cut as (2, 8, 4) in the checkpoint, as (2, 2, 4, 4) in the model" in message
