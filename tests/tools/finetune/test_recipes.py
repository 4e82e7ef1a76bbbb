"""The recipes: each trains a small model of its family by its own words, and says what the planner says of it.

A recipe is parsed and trained as `elixir-moe VERB --config FILE` would. Only names, lengths and steps are others.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_tools.verify.shrink import shrunk
from tests.state.test_shipped import shipped
from tests.support.every import every
from tests.support.hf_folders import WORDS, tokenizer, write_rows
from tests.support.ranks import RankPool
from tests.tools.finetune.test_finetune import by_command, saved

Ranks = Callable[[int], RankPool]
ANSWERS = runpy.run_path(str(Path(__file__).parents[3] / "recipes" / "answers.py"))
RECIPES: list[Path] = ANSWERS["RECIPES"]
QUICK = {"qwen3_30b_a3b_qlora_24gib", "gpt_oss_20b_lora_12gib", "llama_3_1_8b_full_2x24gib", "qwen3_8b_dpo_24gib"}
"""One of each kind; the other recipes differ in sizes."""
HERE: dict[str, Any] = {
    "use_cpu": True, "max_length": 24, "max_steps": 2, "gradient_accumulation_steps": 1, "warmup_steps": 0,
    "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def rows(kind: str) -> list[dict[str, Any]]:
    """Rows in the columns of the data set that the recipes of a command name."""
    found: list[dict[str, Any]] = []
    for number in range(8):
        asked, good, bad = said(f"say {'abcdefgh'[number]}?"), said("yes.", "assistant"), said("no.", "assistant")
        found.append(
            {
                "sft": {"messages": [asked, good]},
                "dpo": {"chosen": [asked, good], "rejected": [asked, bad]},
                "kto": {"prompt": [asked], "completion": [good], "label": number % 2 == 0},
            }[kind]
        )
    return found


def written(folder: Path, config: dict[str, Any], kind: str) -> list[str]:
    """A small model of the config's family with a tokenizer, and rows; returns the words that name them."""
    import transformers

    (folder / "model").mkdir()
    if config["model_type"] == "gpt_oss":
        shipped("mxfp4", folder / "model")
    else:
        small = shrunk(transformers.AutoConfig.for_model(**config).to_dict())
        small |= {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
        small |= {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}  # nf4 has blocks of 64
        small |= {"moe_intermediate_size": 64} if "moe_intermediate_size" in small else {}
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(**small)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    data = write_rows(folder / "rows.jsonl", rows(kind))
    return ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(data)]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(file, marks=[] if file.stem in QUICK else pytest.mark.slow, id=file.stem) for file in RECIPES],
)
def test_a_recipe_trains_a_small_model_of_its_family(ranks: Ranks, tmp_path: Path, recipe: Path) -> None:
    read = ANSWERS["read"](recipe)
    words = ["--config", str(recipe), *written(tmp_path, read.config, read.verb)]
    words += [word for name, value in HERE.items() for word in (f"--{name}", str(value))]
    if "plan_disk" in read.settings:
        (tmp_path / "disk").mkdir()
        words += ["--plan_disk", str(tmp_path / "disk")]
    world = read.settings.get("spread_experts", 1)
    losses = ranks(world).run(by_command, read.verb, words, tmp_path / "out")[0]
    assert len(losses) == 2 and every(0 < loss < 10 for loss in losses)
    names = saved(tmp_path / "out").keys()
    adapted = read.settings.get("use_peft", False)
    assert every(("lora" in name) == adapted for name in names) and names
    experts = "experts" in read.settings.get("lora_target_modules", ())
    assert not experts or any("experts" in name for name in names)


def test_the_head_of_each_recipe_answers_its_own_settings() -> None:
    assert len(RECIPES) >= 12
    for recipe in RECIPES:
        asked, date = ANSWERS["head"](recipe)
        expected = ANSWERS["asked"](ANSWERS["read"](recipe))
        assert asked.removesuffix(ANSWERS["QUICK"]) == expected and date >= "2026", "run: python recipes/answers.py"
        assert f"recipes/{recipe.name}" in recipe.read_text().partition("\n\n")[0]


@pytest.mark.slow
def test_an_answer_is_that_of_the_planner() -> None:
    recipe = next(file for file in RECIPES if file.stem == "gpt_oss_20b_lora_12gib")
    question, _ = ANSWERS["head"](recipe)
    assert ANSWERS["answer"](ANSWERS["read"](recipe), question) in recipe.read_text(), "run: python recipes/answers.py"
