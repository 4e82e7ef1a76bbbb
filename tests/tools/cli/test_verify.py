"""`elixir-moe verify`: a sound model passes, and a fault is named. tests/museum has those that others have shipped."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import elixir_moe as em
from elixir_moe.ext.models import SCHEMES, packed_parameters
from elixir_tools.cli.main import main
from elixir_tools.models.lora import Lora
from elixir_tools.names import PLANS
from elixir_tools.verify.cases import huggingface
from elixir_tools.verify.plans import asked
from elixir_tools.verify.shrink import changes, shrunk, without_noise
from elixir_tools.verify.training import labels_counted
from tests.support.every import every

CASES = "tests.support.verify_cases"
QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify", "--json", "--steps", "2", *arguments])
    out, err = capsys.readouterr()
    assert out, err
    return code, json.loads(out)


def failed(answer: dict[str, Any]) -> dict[str, Any]:
    """The first check that failed."""
    first: dict[str, Any] = next(check for check in answer["checks"] if not check["ok"])
    assert answer["first"] == first["where"]
    return first


def test_every_name_that_is_offered_has_a_meaning(tmp_path: Path) -> None:
    assert every(asked(plan, tmp_path) for plan in PLANS)


def test_a_sound_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = verified(capsys, "--module", f"{CASES}:sound")
    assert (code, answer["ok"], answer["first"]) == (0, True, None)
    names = [check["name"] for check in answer["checks"]]
    assert names[:3] == ["weights after wrap", "outputs of modules in step 1", "loss of step 1"]
    assert names[3] == "gradients of routers in step 1"
    assert {"moments when saved", "weights after the load", "weights of step 4 after the load"} < set(names)
    assert names[-2:] == ["exported weights", "outputs after the export"]
    assert answer["versions"]["torch"]


SMALL = em.Plan.offload(chunk_numel=256, rcache_blocks=3).to_json()


@pytest.mark.parametrize("module", ["in_turn", pytest.param("unused", marks=pytest.mark.slow)])
def test_micro_batches_in_one_pass(capsys: pytest.CaptureFixture[str], module: str) -> None:
    given = ("--plan", SMALL, "--accumulation", "5", "--batches-per-pass", "3", "--resume-ranks", "1")
    code, answer = verified(capsys, "--module", f"{CASES}:{module}", *given)
    assert code == 0, answer["first"]


def test_a_fault_in_one_pass_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--plan", SMALL, "--accumulation", "3", "--batches-per-pass", "3")
    code, answer = verified(capsys, "--module", f"{CASES}:scaled", *given)
    assert (code, failed(answer)["name"]) == (1, "loss of step 1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--plan", "offload"),
        pytest.param(("--plan", "ddp", "--accumulation", "2"), marks=pytest.mark.slow),
        pytest.param(("--plan", "zero3", "--ranks", "4"), marks=pytest.mark.slow),
        pytest.param(("--plan", "disk"), marks=pytest.mark.slow),
        pytest.param(("--plan", "zero2", "--ranks", "1"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_parameters_that_steps_do_not_use(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    """Plain AdamW has no moments for them, and a checkpoint has zeros."""
    code, answer = verified(capsys, "--module", f"{CASES}:unused", *arguments)
    assert code == 0, answer["first"]


@pytest.mark.parametrize("plan", ["zero3", pytest.param("disk", marks=pytest.mark.slow)])
def test_muon_and_adamw_train_as_in_plain_torch(capsys: pytest.CaptureFixture[str], plan: str) -> None:
    code, answer = verified(capsys, "--module", f"{CASES}:with_both", "--plan", plan)
    assert code == 0, answer["first"]


def test_a_fault_is_named_and_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = verified(capsys, "--module", f"{CASES}:scaled", "--plan", "offload")
    first = failed(answer)
    assert (code, first["name"]) == (1, "loss of step 1")
    assert "as if multiplied by the 2 ranks" in first["where"]
    assert not first["difference"] <= first["tolerance"]


def test_two_rows_a_rank_in_a_batch_normalization(capsys: pytest.CaptureFixture[str]) -> None:
    """It divides by the difference of two rows: bounds are what errors of rounding become in it."""
    code, answer = verified(capsys, "--module", f"{CASES}:normalized", "--steps", "3")
    assert code == 0, answer["first"]


def test_a_global_norm_of_its_own_gradients_blames_no_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = verified(capsys, "--module", f"{CASES}:scaled_unused", "--steps", "1")
    norm = next(check for check in answer["checks"] if check["name"] == "gradient norm of step 1")
    assert (code, norm["ok"]) == (1, False)
    assert "as if the squares" not in norm["where"]


def test_json_is_all_that_stdout_has() -> None:
    command = ("verify", "--json", "--module", f"{CASES}:talking", "--ranks", "1", "--steps", "1", "--plan", "ddp")
    ran = subprocess.run([sys.executable, "-m", "elixir_moe", *command], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["ok"]
    assert {"building", "a step"} <= set(ran.stderr.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--module", f"{CASES}:sound", "--plan", "ddp", "--accumulation", "1"),
        ("--module", f"{CASES}:sound", "--plan", "zero2", "--resume-ranks", "1"),
        ("--module", f"{CASES}:sound", "--lora", "r=2,targets=first,last,parameters=experts.weight"),
        ("--module", f"{CASES}:sound", "--plan", "auto", "--ranks", "1", "--resume-ranks", "2"),
        ("--module", f"{CASES}:sound", "--plan", "disk", "--ranks", "1"),
        ("--module", f"{CASES}:sound", "--plan", '{"scatter": true, "offloaded": true, "rcache_blocks": null}'),
        ("--module", f"{CASES}:in_bf16", "--compute-dtype", "bf16", "--accumulation", "2"),
        ("--model", "pr-moe-16b", "--plan", "offload"),
        ("--model", "opt-2.7b", "--checkpointing"),
    ],
    ids=" ".join,
)
def test_plans_and_named_models(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, answer = verified(capsys, *arguments)
    assert code == 0, answer["first"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--checkpointing", "--compute-dtype", "bf16", "--accumulation", "2"),
        ("--lora", "r=4,targets=q_proj,v_proj,experts", "--plan", "offload"),
        ("--lora", "r=4,targets=q_proj,v_proj,experts", "--quantize", "int8"),
    ],
    ids=" ".join,
)
def test_a_hugging_face_config(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    code, answer = verified(capsys, "--hf", str(tmp_path), *arguments)
    assert code == 0, answer["first"]
    assert "num_hidden_layers 48 -> 2" in answer["shrunk"]


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_labels_are_counted_with_adapters_too(task: str | None) -> None:
    """peft calls the model with the adapters or, without a task, the model below it."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_key_value_heads=1, **shape))
    model, rows = (
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task)),
        list[int](),
    )
    words = torch.arange(10).view(2, 5)
    with labels_counted(model, rows, counted=True):
        model(input_ids=words, labels=words).loss.backward()
    assert rows == [2, 2, 2, 2, 0], "the last position has no label"


def test_shrinking_keeps_the_kind() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = {
        "model_type": "any", "hidden_size": 4096, "head_dim": 128, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 8192, "num_hidden_layers": 30, "layer_types": kinds * 10, "mlp_only_layers": [0, 5],
        "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "vocab_size": 100_000,
        "eos_token_id": 99_999, "attention_dropout": 0.1, "rope_theta": 1e4, "max_position_embeddings": 4096,
    }  # fmt: skip
    small = without_noise(shrunk(config))
    assert small["layer_types"] == kinds
    assert (small["num_hidden_layers"], small["mlp_only_layers"]) == (3, [0])
    assert small["num_attention_heads"] / small["num_key_value_heads"] == 8
    assert small["intermediate_size"] / small["hidden_size"] == 2
    assert (small["n_routed_experts"], small["num_experts_per_tok"], small["n_group"], small["topk_group"]) == (
        8,
        4,
        2,
        1,
    )
    assert small["eos_token_id"] < small["vocab_size"] == 128
    assert (small["attention_dropout"], small["max_position_embeddings"]) == (0.0, 4096)
    assert "num_hidden_layers 30 -> 3" in list(changes(config, small))
    assert list(changes(small, without_noise(shrunk(small)))) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"intermediate_size": 14336, "num_key_value_heads": 8}),
        ("qwen3_moe", {"head_dim": 128, "moe_intermediate_size": 768, "intermediate_size": 6144}),
        ("deepseek_v3", {"num_attention_heads": 128}),
    ],
)
def test_a_shrunk_model_can_be_quantized(kind: str, config: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    config = {"hidden_size": 4096, "num_attention_heads": 32, **config}
    transformers.AutoConfig.for_model(kind, **config).save_pretrained(tmp_path)
    lora = Lora.parse("r=4,targets=o_proj")
    source = huggingface(str(tmp_path), shrink=True, quantized=scheme, lora=lora, rows=2, length=8)
    with torch.device("meta"):
        model = source.prepared(source.base(), under_plan=True)
    assert any("o_proj" in name for name, *_ in packed_parameters(model))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--module", "tests.support.no_such:f"), "there is no module 'tests.support.no_such'"),
        (("--module", f"{CASES}:sond"), "did you mean 'sound'?"),
        (("--module", "nothing"), "expected package.module:function"),
        (("--module", f"{CASES}:sound", "--ranks", "8"), "--rows 4 for --ranks 8: expected a multiple"),
        (("--module", f"{CASES}:sound", "--plan", "zero4"), "did you mean 'zero"),
        (("--module", f"{CASES}:sound", "--lora", "r=0"), "r must be one number of at least 1"),
        (("--module", f"{CASES}:sound", "--lora", "rank=8"), "'rank=8' is not known"),
        (("--model", "opt-2.7b", "--lora", "r=8,experts"), "--lora needs --hf or --module"),
        (("--module", f"{CASES}:sound", "--resume-ranks", "3"), "--rows 4 for --resume-ranks 3: expected a multiple"),
        (("--module", f"{CASES}:sound", "--quantize", "nf4"), "--quantize needs --hf, and --lora"),
        (("--module", f"{CASES}:sound", "--quantize", "nf5"), "nf5"),
        (("--hf", "/no/such/folder"), "expected a config.json or its folder"),
    ],
)
def test_bad_input_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("elixir_tools.cli.verify.on_ranks", None)
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ({"model_type": "new", "auto_map": {"AutoConfig": "c.C"}}, (), "needs code from a hub"),
        ({"model_type": "qwen3_mo"}, (), "did you mean 'qwen3_moe'?"),
        (QWEN | {"architectures": ["Qwen9ForCausalLM"]}, (), "has no architecture 'Qwen9ForCausalLM'"),
        (QWEN, ("--lora", "parameters=experts.up_proj"), "experts.up_proj matches nothing"),
        (QWEN, ("--lora", "targets=q_prj"), "did you mean 'q_proj'?"),
        ({"model_type": "llama"}, ("--lora", "experts"), "experts matches nothing"),
    ],
)
def test_bad_configs_start_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, Any],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("elixir_tools.cli.verify.on_ranks", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["verify", "--hf", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "said"),
    [("three_rows", "3 rows for 2 ranks"), ("no_step", "returned a tuple of"), ("no_model", "returned a int")],
)
def test_what_a_function_returns_is_checked(capsys: pytest.CaptureFixture[str], case: str, said: str) -> None:
    assert main(["verify", "--module", f"{CASES}:{case}"]) == 2
    assert said in capsys.readouterr().err
