"""The planning problem that the arguments of `plan` describe."""

import json
import re

import pytest

from elixir_moe.ext.hardware import Hardware
from elixir_tools.cli.arguments import parser_of
from elixir_tools.cli.main import main
from elixir_tools.fit.tasks import model_of, task_of
from tests.support.every import every

MACHINE = "a100-80g-pcie-x4"


@pytest.mark.parametrize("early", [False, True])
def test_updates_begin_in_backward_where_the_user_says_so(early: bool) -> None:
    words = ["plan", "gpt2-4b", "--hardware", MACHINE, "--batch", "1", "--seq", "8", *["--update-in-backward"] * early]
    known = parser_of(None).parse_args(words)
    task = task_of(known, Hardware.named(MACHINE), model_of(known, None, layers=1), 1, 8)
    assert task.updates_in_backward is early and task.overlaps_updates


def test_muon_has_the_matrices_of_layers_and_costs_its_bytes_and_its_step() -> None:
    found = {}
    for optimizer in ("adamw", "muon"):
        words = ["plan", "gpt2-4b", "--hardware", MACHINE, "--batch", "1", "--seq", "8", "--optimizer", optimizer]
        known = parser_of(None).parse_args(words)
        task = task_of(known, Hardware.named(MACHINE), model_of(known, None, layers=2), 1, 8)
        by = {param.name: param.key.optimizer for param in task.profile.params}
        assert set(by.values()) == ({""} if optimizer == "adamw" else {"", "Muon"})
        assert task.disk_bytes is not None, "a disk would be of use"
        found[optimizer] = by, task.profile.orthogonalized_flops, task.overlaps_updates
    by, flops, overlaps = found["muon"]
    matrices = {name for name, which in by.items() if which}
    assert len(matrices) == 2 * 4 and every(name.endswith("weight") for name in matrices)
    assert not [name for name in matrices if "emb" in name or "head" in name or "ln" in name]
    assert flops > 0 == found["adamw"][1]
    assert not overlaps and found["adamw"][2]


def test_a_plan_for_muon_is_smaller_slower_and_written_with_both_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for optimizer in ("adamw", "muon"):
        words = ["plan", "gpt2-4b", "--hardware", MACHINE, "--batch", "1", "--seq", "8", "--optimizer", optimizer]
        assert main([*words, "--json"]) == 0
        found[optimizer] = json.loads(capsys.readouterr().out)
    muon, adamw = (found[name]["predicted"] for name in ("muon", "adamw"))
    assert muon["device_peak_bytes"] < 0.8 * adamw["device_peak_bytes"]
    assert muon["step_seconds"] > adamw["step_seconds"]
    assert "em.wrap(model, (muon, adamw), plan=" in " ".join(found["muon"]["answer"])
    assert main(["plan", "gpt2-4b", "--hardware", MACHINE, "--optimizer", "muon", "--quick"]) == 2


def test_lengths_and_sums_that_the_user_chooses_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2-4b", "--hardware", MACHINE, "--batch", "1", "--seq", "8", "--gpus", "4", "--json"]
    found = {}
    for given in ("", "--chunk-numel 400M", "--chunk-numel 256M 300M", "--reduce-dtype bf16"):
        assert main([*words, *given.split()]) == 0
        found[given] = json.loads(capsys.readouterr().out)
    free, one, some, narrow = (each["plan"] for each in found.values())
    assert one["chunk_numel"] == 400_000_000 and 256_000_000 <= some["chunk_numel"] <= 300_000_000
    assert not 256_000_000 <= free["chunk_numel"] <= 300_000_000
    assert free["reduce_dtype"] is None and narrow["reduce_dtype"] == "bfloat16"
    assert "reduce_dtype=torch.bfloat16" in " ".join(found["--reduce-dtype bf16"]["answer"])
    reduced = [found[given]["predicted"]["reduced_bytes"] for given in ("", "--reduce-dtype bf16")]
    assert reduced[1] < 0.6 * reduced[0]


def test_inputs_of_layers_in_host_memory_are_of_all_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2-20b", "--gpu", "rtx-3090", "--gpus", "8", "--batch", "8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    held, there = (float(text) for text in re.findall(r"^  RAM +([\d.]+) of +([\d.]+)", said, re.MULTILINE)[0])
    assert "host_checkpoints=" in said and held <= there
    assert main([*words, "--batch", "1"]) == 0
    assert f" of {there} " in capsys.readouterr().out, "whatever is kept"
