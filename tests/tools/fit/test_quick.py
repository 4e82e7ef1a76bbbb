"""`plan --quick` and the comparison of three ways to train: formulas that are near what a trace and a search find."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elixir_tools.cli.main import main
from elixir_tools.finetune.defaults import SFT
from elixir_tools.fit.figures import USUAL_ERROR, Figures, recommended
from elixir_tools.models.known import names
from tests.support.every import every
from tests.tools.fit.test_will_it_fit import MIXTURE

DOCS = Path(__file__).parents[3] / "docs"


def test_formulas_are_near_what_a_trace_and_a_search_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location("quick_error", DOCS / "quick_error.py")
    assert spec is not None and spec.loader is not None
    command: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    kept = json.loads((DOCS / "speed_of_light.json").read_text())["predictions"]
    few = {"RTX 3090", "A100 80 GB", "2 × RTX 4090", "GB10"}
    some = {
        model: {way: {m: found for m, found in ways[way].items() if m in few} for way in ("full", "QLoRA")}
        for model, ways in kept.items()
        if model in ("Llama-3.1-8B", "Qwen3-30B-A3B")
    }
    compared = list(command.cells({"predictions": some}))
    assert len(compared) > 10
    for name, rough, exact in compared:
        assert rough.fits == exact["fits"], name
        assert rough.seconds.step == pytest.approx(exact["seconds"], rel=USUAL_ERROR + 0.03), name
    sys.modules.pop("speed_of_light", None)


MANY_EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
WIDE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


APART = ["--batches-per-pass", "1"]
ON_DISK = ["--ram", "6 GiB", "--budget", "6 GiB", "--disk-size", "1 TB", "--full", "--seq", "2048"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MANY_EXPERTS, ["--ram", "32 GiB", "--budget", "1600 MiB", "--qlora", "--seq", "512", *APART]),
        (WIDE, [*ON_DISK, *APART]),
        (WIDE, ON_DISK),
    ],
    ids=["packed experts", "values and sums on disk", "in passes"],
)
def test_many_micro_batches_take_what_a_search_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, object], words: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["plan", str(tmp_path), "--gpu", "rtx-4090", *words, "--batch", "1", "--accumulation", "16", "--json"]
    found = []
    for more in (["--quick"], []):
        assert main([*asked, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["predicted"])
    quick, exact = found
    assert quick["step_seconds"] == pytest.approx(exact["step_seconds"], rel=USUAL_ERROR)


def test_every_model_that_ships_has_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    for name in names():
        code = main(["plan", name, "--gpu", "h100", "--gpus", "8", "--ram", "2 TiB", "--qlora", "--quick", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert code == 0 and found["predicted"]["step_seconds"] > 0 and not found["predicted"]["exact"], name


def no_trace(*_: object, **__: object) -> None:
    raise AssertionError("traced")


def test_without_a_way_three_are_compared_and_one_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "config.json", "--gpu", "rtx-4090", "--gpus", "2", "--ram", "2 GiB"]
    assert main([*asked, "--json"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in exact["ways"]] == ["full", "LoRA", "QLoRA"]
    assert [row["exact"] for row in exact["ways"]] == [False, True, False]
    assert exact["ways"][1]["step_seconds"] == exact["predicted"]["step_seconds"]
    assert any(" --use_peft " in sentence and "--quantize" not in sentence for sentence in exact["answer"])
    monkeypatch.setattr("elixir_tools.fit.tasks.trace", no_trace)
    assert main([*asked, "--quick"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("elixir-moe plan finds out whether config.json fits on 2 x rtx-4090; loads PyTorch first ...")
    first, *_, last = out.splitlines()
    assert every(len(line) <= 80 for line in out.splitlines())
    assert first.startswith(f"Assumed: no disk (--disk-size), {SFT['per_device_train_batch_size']} rows of each GPU")
    assert f"mostly within {USUAL_ERROR:.0%} of the exact answer" in last
    assert [line.split()[1] for line in out.splitlines() if line.startswith("*")] == ["LoRA", "recommended."]
    assert "--use_peft --max_length 1024 --per_device_train_batch_size 8" in " ".join(out.replace("\\\n", "").split())


def test_a_way_that_the_model_refuses_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"hidden_size": 96}))
    words = ["plan", str(tmp_path), "--gpu", "rtx-4090", "--ram", "2 GiB", "--quick", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [row["way"] for row in json.loads(out)["ways"]] == ["full", "LoRA"]
    assert "QLoRA is left out: quantize: parameter" in err
    (tmp_path / "config.json").unlink()
    assert main(words) == 1
    assert "expected the config.json of a model" in capsys.readouterr().err


def test_where_nothing_fits_nothing_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek-ai/DeepSeek-V3", "--gpu", "rtx-4090", "--ram", "16 GiB", "--quick"]) == 2
    assert "* lacks least." in capsys.readouterr().out
    assert main(["plan", "qwen3-8b", "--gpu", "rtx-4090", "--ram", "0", "--quick"]) == 2
    assert "--ram: expected more than 0 B" in capsys.readouterr().err


def test_what_has_no_formulas_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["opt-13b"], ["llama-3.1-8b", "--checkpointing", "none"]):
        assert main(["plan", *words, "--gpu", "h100", "--quick"]) == 2
        assert "--quick has formulas for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({"full": 90, "LoRA": 100, "QLoRA": 140}, "LoRA"),
        ({"full": 90, "LoRA": 100, "QLoRA": 160}, "QLoRA"),
        ({"full": 90, "LoRA": None, "QLoRA": 60}, "QLoRA"),
        ({"full": 90, "LoRA": None, "QLoRA": None}, "full"),
    ],
)
def test_adapters_on_weights_in_16_bits_are_recommended_unless_slow(speeds: dict[str, float | None], best: str) -> None:
    class Way(Figures):
        def __init__(self, speed: float | None) -> None:
            object.__setattr__(self, "missing", {} if speed else {"host": 1})
            object.__setattr__(self, "speed", speed)

        tokens_per_second: Callable[[Any], Any] = property(lambda self: self.speed)  # type: ignore[assignment]

    assert recommended({way: Way(speed) for way, speed in speeds.items()}) == best
