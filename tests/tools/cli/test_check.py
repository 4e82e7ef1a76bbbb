"""`elixir-moe check`: one run of it on CPU ranks, planted differences, and machines that it refuses by name."""

import getpass
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.planner.hardware import Hardware
from elixir_tools.cli import check
from elixir_tools.cli.main import main
from elixir_tools.verify import self_check
from tests.support.verify_cases import Louder, rank_1_sleeps


def test_a_sound_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One run: nothing differs, every speed is there, nothing is left behind, and nobody is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check, "PLANS", ("disk",))  # `tests/tools/cli/test_verify.py` has the others
    (tmp_path / "disk").mkdir()
    assert main(["check", "--disk", str(tmp_path / "disk")]) == 0
    out, err = capsys.readouterr()
    exact, speed, trains, *_ = lines = out.splitlines()
    assert exact.startswith("exact   disk equal plain PyTorch: loss, gradient norm, weights; on 2 CPU ranks")
    assert "no link to a GPU; Adam in RAM" in speed
    assert trains.startswith("trains  by formulas, 2048 tokens a GPU: full ") and "; QLoRA " in trains
    assert {line.partition(" ")[0] for line in lines} == {"exact", "speed", "trains", "to"}
    assert err.splitlines()[0].startswith("elixir-moe check: ")
    report = json.loads((tmp_path / "cache/elixir-moe/check.json").read_text())
    assert (report["exact"], report["first_difference"], report["gpus"]) == (True, None, [])
    found = {check["name"]: check["ok"] for check in report["checks"]["disk"]}
    assert found["loss of step 1"] and found["gradient norm of step 2"] and found["weights of step 4 after the load"]
    assert report["speed"]["host_adam_parameters_per_second"] > 0 and report["speed"]["disk_read_gb_per_second"] > 0
    Hardware.parse(json.dumps(report["hardware"]), "measured")
    assert list((tmp_path / "disk").iterdir()) == []
    text = json.dumps(report)
    assert [word for word in (str(tmp_path), str(Path.home()), socket.gethostname(), os.getcwd()) if word in text] == []
    assert f"/{getpass.getuser()}/" not in text


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of a machine that ships, in the place of those measured here."""
    monkeypatch.setattr(self_check.Machine, "speeds", lambda *_: (Hardware.named("a100-80g-pcie-x4"), True))
    monkeypatch.setattr(check, "PLANS", ("offload",))


@pytest.mark.usefixtures("measured")
def test_a_planted_difference_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "Named", Louder)
    assert main(["check", "--json"]) == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not report["exact"]
    assert report["first_difference"].startswith("under offload, loss of step 1: ")


def test_a_rank_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_AT_MOST", 0.5)
    with pytest.raises(ElixirError, match=r"of 2 ranks, these have not answered within 0\.5 s: 0, 1"):
        self_check.Machine(2, gpus=False).run(2, rank_1_sleeps)


def test_exhausted_memory_is_answered_in_a_sentence() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.\nProcess 7 has 20 GiB")

    with pytest.raises(ElixirError, match=r"memory is exhausted: CUDA out of memory.*MiB\.; end other programs"):
        self_check._named_errors(work)


@pytest.mark.parametrize(
    ("kernel", "free", "said"),
    [
        (
            "CUDA error: no kernel image is available",
            2**34,
            r"GPU 0 \(P100\) of compute capability 6\.0 runs no kernel",
        ),
        ("", 2**29, r"GPU 0 \(P100\): 512\.00 MiB of 16\.00 GiB are free, and the check needs 1\.00 GiB: end other"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_named(kernel: str, free: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: Any, **__: Any) -> torch.Tensor:
        if kernel:
            raise RuntimeError(kernel)
        return torch.zeros(8)

    found = SimpleNamespace(name="P100", major=6, minor=0, total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(self_check, "device_left", lambda _: ("P100", free))
    with pytest.raises(ConfigError, match=said):
        self_check._device(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--disk", "{folder}/none"], "nothing can be written to"),
        (["--disk", "{folder}/file"], "nothing can be written to"),
        (["--dsk", "x"], "did you mean '--disk'?"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["check", "-q", *(word.format(folder=tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_disk_without_room_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "disk_bytes_left", lambda _: 1 << 20)
    assert main(["check", "-q", "--disk", str(tmp_path)]) == 2
    assert "1.00 MiB are left in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
