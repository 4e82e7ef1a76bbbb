"""What the library decides, in its log: nothing by itself, all of it with --verbose, on stderr."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_tools.cli.main import main
from tests.support.every import every


def test_decisions_are_logged_by_room(caplog: pytest.LogCaptureFixture) -> None:
    """The plan, the home tiers and the schedule that the rCache learns in its first step."""
    em.init_mesh(device_type="cpu")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with caplog.at_level(logging.DEBUG, "elixir_moe"):
        model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload())
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    dist.destroy_process_group()
    said = {(record.name, record.getMessage().split(":")[0].split(" of ")[0]) for record in caplog.records}
    assert {("elixir_moe.wrapping.resolve_plan", text) for text in ("the plan", "tiers")} <= said
    learned = "the rCache follows a schedule learned in the last step"
    assert ("elixir_moe.runtime.gathers", learned) in said
    assert every(record.levelno == logging.DEBUG for record in caplog.records)


def test_verbose_alone_shows_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def account(_directory: Path) -> None:
        logging.getLogger("elixir_tools.report.history").debug("looked")
        raise em.ConfigError("enough")

    monkeypatch.setattr("elixir_tools.report.history.account", account)
    for options, shown in (([], False), (["-v"], True), (["--verbose"], True), ([], False)):
        assert main(["report", str(tmp_path), *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and ("elixir_tools.report.history: looked" in err) == shown
    assert not logging.getLogger("elixir_moe").handlers
