"""`elixir-moe export`: what it writes is read by plain transformers and peft, which are the oracle."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_tools.cli.main import main
from elixir_tools.finetune import export as exporting
from elixir_tools.finetune.export import export
from tests.support.every import same_tensors
from tests.support.ranks import RankPool
from tests.tools.finetune.test_finetune import LORA, by_command, folder_of, in_words

Ranks = Callable[[int], RankPool]
TOKENS = torch.arange(12)[None]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tuned(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on attention and fused experts of a mixture that was trained in 4 bits, and a checkpoint of them."""
    path = tmp_path_factory.mktemp("tuned")
    words = [*folder_of(path, "sft", "Qwen3Moe"), *in_words(2, save_strategy="steps", save_steps=2, max_steps=3)]
    words += ["--use_peft", "--lora_target_modules", "q_proj", "experts", "--quantize", "nf4", "--plan", "offload"]
    ranks(2).run(by_command, "sft", words, path / "out")
    return path


def plain(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS).logits.float()
    return found


def by_peft(base: Path, adapters: Path) -> Tensor:
    return logits_of(peft.PeftModel.from_pretrained(plain(base), adapters).eval())


def test_a_base_that_was_quantized_is_merged_in_full_precision(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(tuned / "out"), "--what", "merged", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = by_peft(tuned / "model", tuned / "out")
    assert (wanted - logits_of(plain(tuned / "model"))).abs().max() > 1e-3, "the adapters count"
    torch.testing.assert_close(logits_of(plain(out)), wanted, rtol=1e-5, atol=1e-6)
    assert told["difference"] <= 1e-5 * told["largest"] and told["base"] == str(tuned / "model")
    assert load_file(out / "model.safetensors").keys() == load_file(tuned / "model/model.safetensors").keys()
    assert transformers.AutoTokenizer.from_pretrained(out).vocab_size


def test_adapters_are_written_from_sharded_state_alone(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    shutil.copytree(tuned / "out/checkpoint-2/elixir_moe", tmp_path / "checkpoint-2/elixir_moe")
    shutil.copy(tuned / "out/adapter_config.json", tmp_path)
    told = export(tmp_path, tmp_path / "adapter")
    assert told.source == str(tmp_path / "checkpoint-2"), "the last checkpoint of a run that was stopped"
    found, wanted = load_file(tmp_path / "adapter" / WEIGHTS), load_file(tuned / "out/checkpoint-2" / WEIGHTS)
    assert same_tensors(found, wanted)
    assert torch.equal(
        by_peft(tuned / "model", tmp_path / "adapter"), by_peft(tuned / "model", tuned / "out/checkpoint-2")
    )


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.bfloat16, {"target_modules": "all-linear"}),
        (torch.float32, {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["lm_head"]}),
    ],
    ids=["bf16", "dora and a head"],
)
def test_adapters_of_any_kind_are_merged(dtype: torch.dtype, words: dict[str, Any], tmp_path: Path) -> None:
    base = Path(folder_of(tmp_path, "sft")[1])
    transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(base)
    said = {"eos_token_id": [1, 3], "do_sample": False, "temperature": 0.3}  # transformers does not write this itself
    (base / "generation_config.json").write_text(json.dumps(said))
    adapted = peft.get_peft_model(plain(base), peft.LoraConfig(r=4, **words))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapters")
    told = export(tmp_path / "adapters", what="merged")
    assert told.out == str(tmp_path / "adapters/export/merged") and plain(Path(told.out)).dtype is dtype
    assert json.loads((Path(told.out) / "generation_config.json").read_text()) == said
    if dtype is torch.float32:
        wanted = by_peft(base, tmp_path / "adapters")
        torch.testing.assert_close(logits_of(plain(Path(told.out))), wanted, rtol=1e-5, atol=1e-6)
    assert 0 < told.difference < told.change / 10


def from_hub(words: list[str], folder: Path, out: Path) -> None:
    """(rank) As `by_command`, of a name on a hub that has the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("elixir_tools.finetune.run.snapshot_download", lambda *_, **__: str(folder))
        by_command("sft", words, out)


@pytest.mark.parametrize("name", ["some/model", "a relative path"])
def test_adapters_name_their_base_by_its_hub_name_or_absolute_path(name: str, ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "sft"), *in_words(1, max_steps=1), "--use_peft", "--plan", "zero3"]
    words[1] = name if name == "some/model" else os.path.relpath(tmp_path / "model")
    ranks(1).run(from_hub, words, tmp_path / "model", tmp_path / "out")
    found = json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"]
    assert found == (name if name == "some/model" else str(tmp_path / "model"))


def test_a_folder_with_other_logits_is_not_kept(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = exporting._merged

    def spoilt(*given: Any) -> Any:
        for number, (placeholder, value) in enumerate(merged(*given)):
            yield placeholder, value + 0.05 * (number == 0)

    monkeypatch.setattr(exporting, "_merged", spoilt)
    with pytest.raises(CheckpointError, match="has other logits than base and adapters"):
        export(tuned / "out", tmp_path / "merged", "merged")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["adapter", "merged"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sharded"])
def test_the_head_of_a_reward_is_not_left_out(what: str, whole: bool, ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "reward"), *in_words(1, max_steps=1, save_strategy="steps", save_steps=1), *LORA]
    words += ["--plan", "zero3", "--lora_task_type", "SEQ_CLS"]
    ranks(1).run(by_command, "reward", words, tmp_path / "out")
    if not whole:
        (tmp_path / "out" / WEIGHTS).unlink()
        (tmp_path / "out/checkpoint-1" / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"have weights of 'score', which .* lacks: .*\.merge_and_unload\(\)"):
        export(tmp_path / "out", what=what)


def test_what_cannot_be_exported_is_told(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither adapter_model\.safetensors nor a checkpoint"):
        export(tuned / "model")
    with pytest.raises(ConfigError, match="exists: name another folder"):
        export(tuned / "out", tmp_path)
    shutil.copytree(tuned / "out", tmp_path / "out", ignore=shutil.ignore_patterns("checkpoint-*", "export"))
    config = json.loads((tuned / "out/adapter_config.json").read_text())
    for base, said in ((None, "names no base"), (str(tmp_path / "gone"), "is not a causal language model here")):
        (tmp_path / "out/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ConfigError, match=said):
            export(tmp_path / "out")
    assert not list((tmp_path / "out/export").iterdir())
