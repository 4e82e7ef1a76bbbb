"""Models by the names that people know: shapes that ship, other names on the hub, folders."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch

from elixir_moe.errors import ConfigError
from elixir_tools.models import known

PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-4": 14_659_507_200,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,  # the hub counts the routers' biases, which are buffers
}
"""Parameters as the hub shows them for the weights of each model."""


@pytest.mark.parametrize("name", known.names())
def test_a_shape_that_ships_has_the_models_parameters(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    found = known.find(name)
    config = AutoConfig.from_pretrained(found.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert found.name == name and sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("QWEN/qwen3-30b-a3b-base", "Qwen/Qwen3-30B-A3B-Base"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("opt-13b", "opt-13b"),
    ],
)
def test_a_name_is_found_as_people_write_it(asked: str, name: str) -> None:
    found = known.find(asked)
    assert found.name == name and (found.config is None) == (name == "opt-13b")


def test_other_names_come_from_the_hub_and_folders_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/gone":
            raise OSError("404 not found\nmore")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    in_file = str(tmp_path / "config.json")
    assert known.find("owner/model") == known.Known("owner/model", in_file)
    assert known.find(str(tmp_path)) == known.find(in_file) == known.Known(str(tmp_path), in_file)
    assert asked == [("owner/model", ["config.json", "tokenizer_config.json"])], "no weights"
    with pytest.raises(ConfigError, match=r"'owner/gone' is not among .* The hub says: 404 not found\. Give a folder"):
        known.find("owner/gone")


def test_a_near_miss_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("no")))
    for asked, meant in {
        "qwen3-30b-a3": "Qwen/Qwen3-30B-A3B",
        "gpt-oss": "openai/gpt-oss-20b",
        "Qwen/Qwen3-30B-A4B": "Qwen/Qwen3-30B-A3B",
        "op-13b": "opt-13b",
    }.items():
        with pytest.raises(ConfigError, match=rf"{asked}'.*did you mean '{meant}'\?"):
            known.find(asked)
