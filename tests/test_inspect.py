"""`em.inspect`, and what else the package says of itself."""

from importlib.metadata import version

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_tools.cli.main import main


def test_a_wrapped_model_says_what_it_is_made_of_and_what_it_has_moved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    plan = em.Plan.offload(rcache_blocks=3, chunk_numel=80)
    with pytest.raises(
        em.UsageError, match=r"inspect needs a model that went through wrap: call em.wrap first.*on_train_begin"
    ):
        em.inspect(model)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    found = em.inspect(model)
    before = found.statistics
    assert found.plan == plan and found.schedule is None and found.prediction is None
    assert [len(chunk.slots) for chunk in found.layout.chunks] == [2] * 4
    assert found.held_bytes["host"] == sum(row["shard_bytes"] for row in found.rows) > 0
    assert str(found).splitlines()[0] == "Plan(scatter=True, offloaded=True, rcache_blocks=3, chunk_numel=80)"
    assert str(found).splitlines()[1].startswith("device: ") and " host " in str(found).splitlines()[3]
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert found.schedule is not None
    assert (found.statistics - before).as_dict()["bytes_fetched"]["host"] > 0
    assert not [name for name in vars(model) if not name.startswith("_") and name not in ("training", "zero_grad")]
    optimizer.close()


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert em.__version__ == version("elixir-moe")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"elixir-moe {em.__version__}\n"
