"""Checkpoints of models that `parallelize_module` cut: another tensor-parallel degree goes on with what one left."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

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
