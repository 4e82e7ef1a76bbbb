"""Fine-tuning by command: `elixir-moe sft` and its like train as TRL's own scripts do with the same words.

The oracle is TRL's script in the same process, which reads the same words and files.
"""

import importlib
import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elixir_moe.errors import ConfigError
from elixir_tools.cli.main import main
from elixir_tools.watch.control import Signals
from tests.hf.test_other_trainers import column
from tests.hf.test_other_trainers import tokenizer as words_tokenizer
from tests.hf.test_trainer import launched
from tests.support.every import every, same_tensors
from tests.support.hf_cases import forget_accelerate
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
LORA = ["--use_peft", "--lora_r", "4", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "v_proj"]
SETTINGS: dict[str, Any] = {
    "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "save_strategy": "no", "gradient_checkpointing": False,
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"text": column(0, 12)},
    "dpo": {"prompt": column(0, 4), "chosen": column(100, 5), "rejected": column(200, 5)},
    "kto": {"prompt": column(0, 4), "completion": column(100, 5), "label": [row % 2 == 0 for row in range(16)]},
    "reward": {"chosen": column(100, 5), "rejected": column(200, 5)},
    "grpo": {"prompt": column(0, 4)},
}
MORE: dict[str, list[str]] = {
    "reward": ["--lora_task_type", "SEQ_CLS"],
    "grpo": ["--reward_funcs", "tests.tools.finetune.test_finetune.ones", "--num_generations", "4", "--beta", "0.1"],
}


def ones(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many 1 a completion has."""
    return [float(completion.count("1")) for completion in completions]


def folder_of(path: Path, kind: str, model: str = "Llama") -> list[str]:
    """Writes a model and rows; returns the words that name them."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
    }  # fmt: skip
    if model == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    config = getattr(transformers, f"{model}Config")(**sizes)
    getattr(transformers, f"{model}ForCausalLM")(config).save_pretrained(path / "model")
    words_tokenizer().save_pretrained(path / "model")
    (path / "data").mkdir()
    rows = [dict(zip(ROWS[kind], values, strict=True)) for values in zip(*ROWS[kind].values(), strict=True)]
    (path / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model_name_or_path", str(path / "model"), "--dataset_name", str(path / "data")]


def in_words(world: int, **changes: Any) -> list[str]:
    settings = SETTINGS | {"per_device_train_batch_size": 4 // world} | changes
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def by_command(kind: str, words: Sequence[str], out: Path) -> list[float]:
    """(rank) Does what `elixir-moe KIND ...` does on a rank; returns the losses."""
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.run import callbacks_of, finetune

    with launched():
        given = parse(kind, [*words, "--output_dir", str(out)])
        trainer = finetune(given, callbacks_of(given, Signals(lambda: None, tells=False)))
        trainer.model._elixir.optimizer.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_trl(kind: str, words: Sequence[str], out: Path) -> None:
    """(rank) TRL's script, which would end the world of the pool with its trainer."""
    from transformers import Trainer

    script = importlib.import_module(f"trl.scripts.{kind}")
    with launched(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "end", lambda _: None)
        script.main(*script.make_parser().parse_args_and_config([*words, "--output_dir", str(out)]))


def saved(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


ADAPTERS: dict[str, list[str]] = {
    "dora": [*LORA, "--use_dora", "true"],
    "the head": [*LORA, "--lora_modules_to_save", "lm_head"],
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_need_the_base_train_as_by_trls_script(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    words = [*folder_of(tmp_path, "sft"), *in_words(1), *ADAPTERS[kind]]
    ranks(1).run(by_trl, "sft", words, tmp_path / "theirs")
    ranks(1).run(by_command, "sft", [*words, "--plan", "zero3"], tmp_path / "ours")
    theirs, ours = saved(tmp_path / "theirs"), saved(tmp_path / "ours")
    assert theirs.keys() == ours.keys() and theirs
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_reference_is_computed_in_each_step_and_saved_nowhere(ranks: Ranks, tmp_path: Path) -> None:
    from elixir_tools.finetune.arguments import parse

    words = [*folder_of(tmp_path, "dpo"), *in_words(1), *LORA, "--plan", "zero3"]
    losses = ranks(1).run(by_command, "dpo", words, tmp_path / "out")[0]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5) and losses[-1] < losses[0]
    assert not (tmp_path / "out/ref").exists()
    with pytest.raises(ConfigError, match="--precompute_ref_log_probs"):
        parse("dpo", [*words, "--precompute_ref_log_probs", "true", "--output_dir", "out"])


def test_adapters_of_a_reward_have_its_head_by_default(ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "reward"), *in_words(1), *LORA, "--plan", "zero3"]
    ranks(1).run(by_command, "reward", words, tmp_path / "default")
    ranks(1).run(by_command, "reward", [*words, *MORE["reward"]], tmp_path / "said")
    found, wanted = saved(tmp_path / "default"), saved(tmp_path / "said")
    assert any(name.endswith(".score.weight") for name in found) and same_tensors(found, wanted)


CASES = [("sft", False, 1), ("sft", True, 2), *((kind, True, 1) for kind in ("dpo", "kto", "reward", "grpo"))]


@pytest.mark.parametrize(("kind", "lora", "world"), CASES)
def test_a_command_trains_as_trls_script(ranks: Ranks, tmp_path: Path, kind: str, lora: bool, world: int) -> None:
    words = [*folder_of(tmp_path, kind), *in_words(world), *(LORA if lora else ()), *MORE.get(kind, ())]
    ranks(world).run(by_trl, kind, words, tmp_path / "theirs")
    ranks(world).run(by_command, kind, [*words, "--plan", "offload"], tmp_path / "ours")
    theirs, ours = saved(tmp_path / "theirs"), saved(tmp_path / "ours")
    assert theirs.keys() == ours.keys() and len(theirs) > 3
    before = {} if lora else saved(tmp_path / "model")
    for name, expected in theirs.items():
        # Rows are summed in another order on two ranks, and Adam divides by the size of a gradient.
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5 if world > 1 else 1e-6, msg=name)
        assert name not in before or not torch.equal(before[name], expected)


def test_words_come_from_a_file_too(ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "sft"), *in_words(1)]
    ranks(1).run(by_command, "sft", [*words, *LORA, "--plan", "zero3"], tmp_path / "words")
    settings = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"plan": "zero3", **settings}))
    ranks(1).run(by_command, "sft", ["--config", str(tmp_path / "recipe.yaml"), *words], tmp_path / "file")
    first, second = saved(tmp_path / "words"), saved(tmp_path / "file")
    assert same_tensors(first, second)


def test_a_base_in_four_bits_and_adapters_on_experts_spread_over_ranks(ranks: Ranks, tmp_path: Path) -> None:
    words = folder_of(tmp_path, "sft", "Qwen3Moe")
    experts = ["--use_peft", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "experts", "--plan", "offload"]
    losses = {}
    for name, more in {
        "one": ["--load_in_4bit", *in_words(1)],
        "same": ["--quantize", "nf4", *in_words(1)],
        "spread": ["--quantize", "nf4", "--spread_experts", "2", *in_words(2)],
    }.items():
        world = 2 if name == "spread" else 1
        losses[name] = ranks(world).run(by_command, "sft", [*words, *experts, *more], tmp_path / name)[0]
    one, same, spread = (saved(tmp_path / name) for name in ("one", "same", "spread"))
    assert one.keys() == same.keys() == spread.keys() and any("experts" in name for name in one)
    assert same_tensors(same, one)
    # Two ranks add gradients in another order, and Adam moves even the smallest one by the whole rate.
    assert losses["spread"] == pytest.approx(losses["one"], rel=1e-5) and len(losses["one"]) == 3
    assert every((spread[name] - expected).abs().mean() < 1e-5 for name, expected in one.items())


def test_tiles_train_as_whole_layers_and_a_head_in_tiles_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "sft", "Qwen3Moe"), *in_words(1), "--plan", "zero3"]
    (whole,), (tiled,) = (
        ranks(1).run(by_command, "sft", [*words, *more], tmp_path / name)
        for name, more in {"whole": [], "tiled": ["--tile", "64 KiB"]}.items()
    )
    assert tiled == pytest.approx(whole, rel=1e-4)
    shapes = [{name: t.shape for name, t in saved(tmp_path / name).items()} for name in ("whole", "tiled")]
    assert shapes[0] == shapes[1]
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.run import _model

    given = parse(
        "sft", [*folder_of(tmp_path / "dense", "sft"), *in_words(1), "--tile", "8 KiB", "--output_dir", "out"]
    )
    with pytest.raises(ConfigError, match="--tile 8192 bytes cuts the head of"):
        _model(given, str(tmp_path / "dense/model"))


def test_adapters_of_a_mamba_are_on_what_peft_adapts_there(ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "sft", "Mamba"), *in_words(1), "--use_peft", "--plan", "zero3"]
    ranks(1).run(by_command, "sft", words, tmp_path / "out")
    layers = {name.split(".mixer.")[1].partition(".")[0] for name in saved(tmp_path / "out")}
    assert layers == {"in_proj", "x_proj", "dt_proj"}


def trained_bytes(words: list[str], out: Path) -> str:
    """(rank) What is said."""
    with pytest.raises(ConfigError) as error:
        by_command("sft", words, out)
    return str(error.value)


def test_modules_that_are_trained_whole_are_no_bytes(ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "sft", "Qwen3Moe"), *in_words(1), *LORA, "--lora_modules_to_save", "experts"]
    (said,) = ranks(1).run(trained_bytes, [*words, "--quantize", "nf4"], tmp_path / "out")
    assert said.startswith("--lora_modules_to_save experts with --quantize: 'model.layers.0.mlp.experts.")


def test_a_plan_that_is_searched_trains(ranks: Ranks, tmp_path: Path) -> None:
    words = [*folder_of(tmp_path, "dpo"), *in_words(1), *LORA]
    ranks(1).run(by_command, "dpo", [*words, "--plan", "zero3"], tmp_path / "zero3")
    ranks(1).run(by_command, "dpo", words, tmp_path / "auto")
    expected, found = saved(tmp_path / "zero3"), saved(tmp_path / "auto")
    assert expected.keys() == found.keys() and expected
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--lora_rr", "4"], ["--lora_rr", "--lora_r"]),
        (["--plann", "zero3"], ["--plann", "--plan"]),
        (["--learning_rat", "1"], ["--learning_rat", "--learning_rate"]),
        (["--plan", "zero4"], ["zero4", "offload"]),
        (["--plan", "zero3", "--plan_disk", "x"], ["--plan_disk", "--plan=zero3"]),
        (["--quantize", "nf4"], ["--quantize nf4", "--use_peft"]),
        (["--use_peft", "--quantize", "fp8", "--load_in_4bit"], ["--quantize fp8", "--load_in_4bit"]),
        (["--use_peft", "--load_in_4bit", "--bnb_4bit_quant_type", "fp4"], ["fp4", "nf4"]),
        (["--use_peft", "--use_dora", "true", "--quantize", "nf4"], ["--use_dora", "--quantize nf4"]),
        (["--bf16", "maybe"], ["bf16", "maybe"]),
        (["--config", "nowhere.yaml"], ["--config nowhere.yaml", "no such file"]),
        (["--config"], ["--config", "no such file"]),
        (["--bf16", "true", "--use_cpu", "false", "--lora_rr", "4"], ["--lora_rr", "--lora_r"]),
        (["--chat_template_path", "other/model"], ["--chat_template_path", ".jinja"]),
        (["--model_init_kwargs", '{"dtype": "bfloat16"}'], ["--model_init_kwargs", "--dtype"]),
        (["--use_bnb_nested_quant", "true"], ["--use_bnb_nested_quant"]),
        (["text"], ["'text'"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_wrong_word_is_answered(words: list[str], named: list[str]) -> None:
    from elixir_tools.finetune.arguments import parse

    with pytest.raises(ConfigError) as caught:
        parse("sft", ["--use_cpu", "true", "--bf16", "false", "--output_dir", "out", *words])
    assert every(name in str(caught.value) for name in named), caught.value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"--model_name_or_path": "no/such-model"}, ["no/such-model"]),
        ({"--model_name_or_path": None}, ["--model_name_or_path"]),
        ({"--dataset_name": None}, ["--dataset_name", "neither"]),
        ({"--dataset_name": "no/such-data"}, ["no/such-data"]),
        ({"--dataset_train_split": "training"}, ["'training'", "train"]),
        ({"--eval_strategy": "steps"}, ["'test'", "train"]),
        ({"--dataset_name": "no-such-rows.jsonl"}, ["no-such-rows.jsonl", "no such file"]),
        ({"--dataset_name": "empty.jsonl"}, ["empty.jsonl", "empty, or no data set"]),
        ({"--dataset_name": "bad.jsonl"}, ["bad.jsonl", "JSON parse error"]),
        ({"--dataset_name": "columns.jsonl"}, ["columns foo", "text or messages", "--dataset_text_field"]),
        ({"--assistant_only_loss": "true"}, ["--assistant_only_loss", "no chat template", "--chat_template_path"]),
    ],
    ids=lambda changes: " ".join(changes) if isinstance(changes, dict) else "",
)
def test_a_missing_model_or_data_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], named: list[str]
) -> None:
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.run import finetune

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for name, text in {"empty": "", "bad": "no JSON", "columns": '{"foo": 1}'}.items():
        Path(f"{name}.jsonl").write_text(text)
    forget_accelerate()
    words = folder_of(tmp_path, "sft")
    given = dict(zip(words[::2], words[1::2], strict=True)) | changes
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    with pytest.raises(ConfigError) as caught:
        finetune(parse("sft", [*words, *in_words(1), "--output_dir", str(tmp_path / "out")]))
    assert every(name in str(caught.value) for name in named), caught.value


@pytest.mark.parametrize(
    ("kind", "column"), [("dpo", "chosen"), ("kto", "label"), ("reward", "chosen"), ("grpo", "prompt")]
)
def test_columns_that_a_trainer_cannot_read_are_named(tmp_path: Path, kind: str, column: str) -> None:
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.run import finetune

    forget_accelerate()
    words = [*folder_of(tmp_path, "sft"), "--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=f"columns text, and {kind} reads .*{column}"):
        finetune(parse(kind, words))


def test_a_model_is_not_saved_beside_adapters(tmp_path: Path) -> None:
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.run import finetune

    forget_accelerate()
    words = folder_of(tmp_path, "sft")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the adapters of another run"):
        finetune(parse("sft", [*words, *in_words(1), "--output_dir", str(tmp_path)]))
    with pytest.raises(ConfigError, match=r"adapter_config\.json is a file: name another folder"):
        finetune(parse("sft", [*words, *in_words(1), "--output_dir", str(tmp_path / "adapter_config.json/out")]))


def test_adapters_have_a_learning_rate_of_their_own() -> None:
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.defaults import LEARNING_RATE

    common = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "out"]
    assert parse("sft", common).training.learning_rate == LEARNING_RATE["full"]
    assert parse("sft", [*common, "--use_peft"]).training.learning_rate == LEARNING_RATE["adapters"]
    assert parse("sft", [*common, "--use_peft", "--learning_rate", "3e-3"]).training.learning_rate == 3e-3


def test_adapters_on_experts_have_no_dropout_by_default() -> None:
    from elixir_tools.finetune.arguments import LORA_DROPOUT, parse

    common = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "out", "--use_peft"]
    experts = [*common, "--lora_target_modules", "all-linear", "experts"]
    assert parse("dpo", common).model.lora_dropout == LORA_DROPOUT > 0
    assert parse("dpo", experts).model.lora_dropout == 0
    assert parse("dpo", [*experts, "--lora_dropout", "0.1"]).model.lora_dropout == 0.1


def test_help_has_our_words_and_trls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--help"]) == 0
    shown = capsys.readouterr().out
    assert every(word in shown for word in ("--nproc", "--plan_disk", "--quantize", "--num_train_epochs", "--lora_r"))


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        pytest.param(
            ["--full", "--batch", "2", "--checkpointing", "none", "--dtype", "fp32"],
            {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 2},
            marks=pytest.mark.slow,
        ),
        (
            ["--accumulation", "2", "--lora", "r=2,targets=q_proj,v_proj", "--quantize", "int8", "--gpus", "2"],
            {"gradient_accumulation_steps": 2, "scheme": "int8", "lora_r": 2, "lora_alpha": 32},
        ),
        (
            ["--full", "--budget", "1 MiB", "--ram", "1 MiB", "--ram-reserve", "0", "--disk-size", "1 TB"],
            {"budget": "1 MiB"},
        ),
        (["--full", "--moments", "int8", "--master", "bf16"], {"moments": "int8", "master": "bf16"}),
    ],
    ids=["kept activations", "adapters", "disk", "narrow state"],
)
def test_the_command_that_plan_prints_trains_what_was_priced(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], wanted: dict[str, Any]
) -> None:
    from elixir_tools.finetune.arguments import parse

    (_, model, _, data) = folder_of(tmp_path, "sft")
    assert main(["plan", model, "--gpu", "rtx-4090", "--seq", "32", *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    _, _, *words = shlex.split(next(line for line in found["answer"] if line.startswith("By command: "))[12:])
    world = 2 if "--nproc" in words else 1
    words = words[: words.index("--nproc")] if world > 1 else words
    placed = {"DATA": data, "OUT": str(tmp_path / "out"), "DISK": str(tmp_path / "disk")}
    (tmp_path / "disk").mkdir()
    assert ("DISK" in words) == bool(found["disk_chunks"])
    words = [*(placed.get(word, word) for word in words), "--use_cpu", "true", "--max_steps", "1"]
    words += ["--save_strategy", "no", "--logging_steps", "1"]
    given = parse("sft", words)
    parts = given.training, given.model, given.plan, given
    for name, value in ({"max_length": 32, "kind": "auto", "bf16": True} | wanted).items():
        owner = next(part for part in parts if hasattr(part, name) and not (part is given and name == "kind"))
        assert getattr(owner, name) == value, name
    assert len(ranks(world).run(by_command, "sft", words, tmp_path / "out")[0]) == 1


def test_muon_trains_the_matrices_of_layers(ranks: Ranks, tmp_path: Path) -> None:
    """Without a rate of its own they stay as they are, and the rest is trained."""
    words = [*folder_of(tmp_path, "sft", "Qwen3Moe"), *in_words(1), "--plan", "zero3", "--optim", "muon"]
    ranks(1).run(by_command, "sft", [*words, "--optim_args", "lr=0,ns_dtype=fp32"], tmp_path / "still")
    ranks(1).run(by_command, "sft", words, tmp_path / "moved")
    before, still, moved = saved(tmp_path / "model"), saved(tmp_path / "still"), saved(tmp_path / "moved")
    assert before.keys() == still.keys() == moved.keys()
    for name, value in before.items():
        matrix = "proj" in name
        assert torch.equal(still[name], value) is matrix, name
        assert not torch.equal(moved[name], value), name
        if matrix:  # of a step of match_rms_adamw, 0.2 of the rate for each element; three steps, of a falling rate
            change = (moved[name] - value).square().mean().sqrt() / SETTINGS["learning_rate"]
            assert 0.1 < change < 0.5, name


def test_words_about_muon() -> None:
    from elixir_tools.finetune.arguments import parse

    def words(*more: str) -> list[str]:
        return ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false", *more]

    options = "momentum=0.9, nesterov=false, eps=1e-7, ns_dtype=fp32"
    given = parse("sft", words("--optim", "muon", "--optim_args", options))
    assert given.muon == {"momentum": 0.9, "nesterov": False, "eps": 1e-7, "ns_dtype": "fp32"}
    assert given.training.optim == parse("sft", words()).training.optim and given.training.optim_args is None
    assert parse("sft", words("--optim", "sgd", "--optim_args", "a=b")).muon is None
    for wrong, message in {
        ("--use_peft",): "which --use_peft freezes: leave one of them out",
        ("--optim_args", "momentum"): "--optim_args momentum: expected NAME=VALUE",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse("sft", words("--optim", "muon", *wrong))


def test_a_router_that_peft_takes_for_a_linear_layer_is_refused() -> None:
    """peft would add its product to the tuple that such a router returns: a raw error in the first step."""
    import transformers
    from peft import LoraConfig

    from elixir_tools.finetune.run import _adapted

    small = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.PhimoeConfig(**small, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.router' as a linear layer.*such as q_proj,k_proj,v_proj"):
        _adapted(model, LoraConfig(r=2, target_modules="all-linear"))


ON_H100 = ["--gpu", "h100", "--gpus", "1", "--seq", "8", "--batch", "1"]


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "FOLDER", *ON_H100],
        ["plan", "FOLDER/config.json", *ON_H100],
        ["sft", "--model_name_or_path", "FOLDER", "--dataset_name", "FOLDER/rows.jsonl", "--use_cpu"],
    ],
    ids=["plan", "plan a file", "sft"],
)
def test_code_of_a_folder_is_not_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where transformers would ask whether to run it, the answer may be a key that somebody has pressed too early."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    (folder / "model.safetensors").touch()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("FOLDER", str(folder)) for word in words]) == 2
    err = capsys.readouterr().err
    assert f"'auto_map' in {folder / 'config.json'} " in err and "trust_remote_code" in err
    assert not (folder / "ran").exists()
