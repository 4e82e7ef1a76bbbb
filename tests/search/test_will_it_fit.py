"""`elixir-moe plan` as the answer to "will it fit": GPUs by name, hosts in words, adapters, accumulation, clusters."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.cli.main import main
from elixir_moe.cli.tasks import OPTIMIZERS
from elixir_moe.errors import ConfigError
from elixir_moe.models.adapters import Lora, freeze
from elixir_moe.optim.accepted import moments_of
from elixir_moe.search import gpus
from elixir_moe.search.hardware import ORIGINS, Hardware, Links

MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
QWEN = MIXTURE | {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
"""Qwen3-30B-A3B."""
GIB = 2**30


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTURE))
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def line(found: dict[str, Any], start: str) -> str:
    (one,) = [sentence for sentence in found["answer"] if sentence.startswith(start)]
    return str(one)


@pytest.mark.parametrize("name", gpus.names())
def test_every_gpu_makes_machines_whose_figures_have_an_origin(name: str) -> None:
    node = gpus.sheet(name).get("node_gpus", 8)
    assert gpus.sheet(name)["source"]
    counts = [1, node, *[2] * (node > 1), *[3 * node] * ("network" in gpus.sheet(name))]
    for count in counts:
        found = gpus.machine(name, count)
        assert Hardware.parse(found.to_json(), name) == found, "a file could have it"
        links = found.links(count)
        assert links.b_c2g > 0 and set(found.origins.values()) <= {*ORIGINS}
        present = {key for key in Links.__dataclass_fields__ if getattr(found.by_gpus[max(found.by_gpus)], key)}
        assert found.origins.keys() >= present | {"gpu_bytes", "cpu_bytes", "peak_tflops", "memory_bandwidth", "fitted"}
        assert (found.node_bandwidth is not None) == (count > node)


def test_a_host_of_few_gpus_has_what_belongs_to_them() -> None:
    """A rack of 72 has a processor and its memory for every two GPUs."""
    one, four, rack = (gpus.machine("gb200", n) for n in (1, 4, 72))
    assert 36 * one.cpu_bytes == 18 * four.cpu_bytes / 2 * 2 == rack.cpu_bytes == 36 * 480 * 10**9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "rtx-4900"], "did you mean 'rtx-4090'"),
        (["--gpu", "rtx-4090", "--gpus", "9"], "up to 8 in one host"),
        (["--gpu", "h100", "--gpus", "12"], "whole nodes, multiples of 8"),
        (["--gpu", "h100", "--hardware", "here"], "not allowed with argument"),
        ([], "one of the arguments --hardware --gpu"),
        (["--gpu", "l40s", "--disk-speed", "6 GB/s"], "there is no disk, give --disk-size too"),
        (["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6 GB"], "expected a rate such as '6 GB/s'"),
        (["--gpu", "l40s", "--host-memory", "many"], "--host-memory='many': expected bytes, or a text"),
        (["--gpu", "l40s", "--host-memory", "64"], "--host-memory='64': 64 what? 64 GiB is written '64 GiB'"),
        (["--gpu", "l40s", "--host-memory", "64 B"], "--host-memory='64 B': expected at least 1.00 MiB"),
        (["--gpu", "l40s", "--host-memory", "128000000000"], "128000000000 what?"),
        (["--gpu", "l40s", "--host-reserve", "6"], "--host-reserve='6': 6 what? 6 GiB"),
        (["--gpu", "l40s", "--budget", "0.5"], "--budget='0.5': 0.5 what? 0.5 GiB"),
        (["--gpu", "l40s", "--disk-size", "2"], "--disk-size='2': 2 what?"),
        (["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6/s"], "--disk-speed='6': 6 what? 6 GiB"),
        (
            ["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6 B/s"],
            "--disk-speed='6 B': expected at least 1.00 MiB",
        ),
        (["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6"], "expected a rate such as '6 GB/s'"),
        (["--gpu", "l40s", "--host-memory", "8 GiB", "--host-reserve", "9 GiB"], "leave nothing of 8.00 GiB"),
        (["--gpu", "l40s", "--lora", "r=0"], "r must be one number of at least 1"),
        (["--gpu", "l40s", "--lora", "rank=3"], "'rank=3' means nothing"),
        (["--gpu", "l40s", "--lora", "r=2,targets=all-linear,q_proj"], "has all modules already"),
        (["--gpu", "l40s", "--lora", "r=2,targets=nothing"], "nothing matches nothing"),
        (["--gpu", "l40s", "--freeze", "*.layer.0.*"], "matches no parameter; names are as model.embed_tokens.weight"),
        (["--gpu", "l40s", "--freeze", "*"], "leaves no parameter to train"),
        (["--gpu", "l40s", "--accumulation", "0"], "--accumulation: expected at least 1"),
        (["--gpu", "l40s", "--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--hardware", "a100-80g-pcie-x4", "--gpus", "512"], "more nodes need node_bandwidth, which --gpu has"),
    ],
)
def test_mistakes_are_named(
    mixture: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--hf", mixture, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_adapters_are_those_of_peft(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    import peft
    import transformers

    found = said(capsys, "--hf", mixture, "--gpu", "rtx-4090", "--quick", "--lora", "r=4,targets=all-linear,experts")
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MIXTURE))
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=4, target_modules="all-linear", target_parameters=targets)
        trained, whole = peft.get_peft_model(model, config).get_nb_trainable_parameters()
    assert found["parameters"] == whole
    assert line(found, "Asked").startswith(
        f"Asked: {trained:,} of {whole:,} parameters are trained (LoRA r=4 on all-linear, experts) with adamw in bf16"
    )
    frozen = sum(row["numel"] for row in found["groups"] if row["chunk_group"].endswith(" frozen"))
    assert frozen == whole - trained
    held = sum(row["shard_bytes"] for row in found["groups"])
    assert 2 * frozen + 14 * trained <= held < 2.1 * frozen + 15 * trained, "only adapters have masters and moments"


def test_one_kind_of_target_and_frozen_parts(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = said(capsys, "--hf", mixture, "--gpu", "l40s", "--quick", "--lora", "r=4,targets=q_proj")
    assert line(few, "Asked").startswith(f"Asked: {6 * 4 * (256 + 4 * 64):,} of ")
    part = said(capsys, "--hf", mixture, "--gpu", "l40s", "--quick", "--freeze", "*.experts.*,lm_head.*")
    frozen = sum(row["numel"] for row in part["groups"] if row["chunk_group"].endswith(" frozen"))
    assert frozen == 6 * 16 * 3 * 256 * 64 + 512 * 256


def test_moments_are_those_of_the_optimizers() -> None:
    weight = [nn.Parameter(torch.zeros(1))]
    real = {
        "adamw": torch.optim.AdamW(weight),
        "adam": torch.optim.Adam(weight),
        "adamw-amsgrad": torch.optim.AdamW(weight, amsgrad=True),
        "sgd": torch.optim.SGD(weight, lr=1),
        "sgd-momentum": torch.optim.SGD(weight, lr=1, momentum=0.9),
        "adagrad": torch.optim.Adagrad(weight),
        "rmsprop": torch.optim.RMSprop(weight),
    }
    assert {name: moments_of(optimizer) for name, optimizer in real.items()} == OPTIMIZERS


def test_the_plan_can_be_pasted(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hf", mixture, "--gpu", "rtx-4090", "--quick", "--budget", "40 MiB", "--seq", "64"]
    found = said(capsys, *arguments, "--host-memory", "40 MiB", "--host-reserve", "0", "--disk-size", "1 TB")
    pasted = re.search(r"plan=(em\.Plan\(.*?\)), step=", line(found, "To paste"))
    assert pasted is not None and found["disk_chunks"] > 0
    plan = eval(pasted[1], {"em": em})
    told = em.Plan.from_json(json.dumps(found["plan"] | {"disk": "FOLDER"}))
    assert plan == told


@pytest.mark.slow
def test_accumulation_updates_once_and_is_proposed_where_updates_are_slow(
    mixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ["--hf", mixture, "--gpu", "rtx-3090", "--budget", "60 MiB", "--seq", "256"]
    found = said(capsys, *slow)
    proposed = re.search(
        r"Updates take (\d+)% of a step, .*--accumulation (\d+) amortises them, with ([\d,]+) tokens a second "
        r"instead of ([\d,]+)\.",
        line(found, "Updates take"),
    )
    assert proposed is not None
    backwards, faster, before = (int(figure.replace(",", "")) for figure in proposed.groups()[1:])
    accumulated = said(capsys, *slow, "--quick", "--accumulation", str(backwards))
    one, many = found["predicted"], accumulated["predicted"]
    assert many["step_seconds"] < backwards * one["step_seconds"] / 3, "one update, not many"
    assert round(many["tokens_per_second"]) == faster and round(one["tokens_per_second"]) == before
    assert many["tokens_per_second"] == pytest.approx(backwards * 256 / many["step_seconds"])


@pytest.mark.slow
def test_how_far_it_reaches_is_where_it_stops_fitting(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--hf", mixture, "--gpu", "rtx-3090", "--budget", "60 MiB", "--seq", "256"]
    found = said(capsys, *asked)
    reached = re.search(
        r"sequences of ([\d,]+) tokens at batch 1, or a batch of ([\d,]+) at", line(found, "It reaches")
    )
    assert reached is not None
    seq, batch = (int(figure.replace(",", "")) for figure in reached.groups())
    for fits, length, sequences in ((0, seq, 1), (2, seq + 128, 1), (0, 256, batch), (2, 256, batch + 1)):
        said(capsys, *asked[:-2], "--quick", "--seq", str(length), "--batch", str(sequences), code=fits)


@pytest.mark.slow
def test_one_more_stick_is_what_the_search_finds_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"hidden_size": 1024, "moe_intermediate_size": 512}))
    asked = ["--hf", str(tmp_path), "--gpu", "rtx-4090", "--budget", "600 MiB", "--host-reserve", "0"]
    short = said(capsys, *asked, "--host-memory", "1 GiB", code=2)
    assert re.search(
        r"It does not fit: .* [GM]iB too little device memory; give the device", line(short, "It does not")
    )
    longer = said(capsys, *asked, "--host-memory", "33 GiB", "--quick")
    told = f"makes it fit: {longer['predicted']['step_seconds']:.3g} s a step."
    assert line(short, "One more stick") == f"One more stick of 32.00 GiB of host memory {told}"


@pytest.mark.slow
def test_a_reserve_of_the_host_is_not_planned_for(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--hf", mixture, "--gpu", "l40s", "--quick", "--host-memory", "128 GiB"]
    assert "of a rank's 119.00 GiB of host memory" in line(said(capsys, *asked), "It fits")
    assert "of a rank's 127.00 GiB" in line(said(capsys, *asked, "--host-reserve", "1 GiB"), "It fits")
    assert "of a rank's 56.50 GiB" in line(said(capsys, *asked, "--gpus", "2", "--host-reserve", "15 GiB"), "It fits")


def test_the_error_of_the_model_is_that_of_the_paper_table(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = Hardware.named(gpus.REFERENCE)
    assert hardware.mean_error is not None
    plain = ["--hf", mixture, "--quick", "--hardware", gpus.REFERENCE]
    assert f"{hardware.mean_error:.1%} off in the mean on the steps" in line(said(capsys, *plain), "Error")
    guess = line(said(capsys, "--hf", mixture, "--quick", "--gpu", "rtx-4090", "--gpus", "2"), "Error")
    links = gpus.machine("rtx-4090", 2).links(2)
    assert guess.startswith("Error: unknown") and f"{links.b_c2g:g} GB/s from host to GPU" in guess


def test_a_template_is_a_hardware_file_with_every_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--hardware-template"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    found = Hardware.parse(text, "mine")
    keys = {*Hardware.__dataclass_fields__} - {"name", "wires", "mean_error"}
    data = json.loads(text)
    assert keys == {key for key in data if not key.startswith("_")}
    for part in (data, data["fitted"], *data["by_gpus"].values()):
        assert all(f"_{key}" in part for key in part if not key.startswith("_") and not key.isdecimal())
    assert found.by_gpus[2] == gpus.machine("rtx-4090", 2).by_gpus[2]


def test_words_of_adapters() -> None:
    assert Lora.parse("r=16,targets=all-linear,experts") == Lora(r=16, targets=("all-linear", "experts"))
    assert Lora.parse("r=8") == Lora(r=8, targets=("all-linear",))
    assert Lora.parse("targets=q_proj,v_proj, r=8") == Lora(r=8, targets=("q_proj", "v_proj"))
    assert Lora.parse("experts, alpha=32, lm_head") == Lora(alpha=32, targets=("experts", "lm_head"))
    assert Lora.parse("parameters=a.weight,b.weight") == Lora(parameters=("a.weight", "b.weight"))
    with pytest.raises(ConfigError, match="leaves no parameter"):
        freeze(nn.Linear(2, 2), ["weight", "bias"])


@pytest.mark.slow
def test_qwen3_30b_with_lora_on_one_rtx_4090(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 bytes of 30.5 billion frozen weights, and 14 of a billion of adapters."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    asked = ["--hf", str(tmp_path), "--gpu", "rtx-4090", "--host-memory", "128 GiB", "--quick"]
    found = said(capsys, *asked, "--lora", "r=16,targets=all-linear,experts")
    frozen = sum(row["numel"] for row in found["groups"] if row["chunk_group"].endswith(" frozen"))
    assert found["feasible"] and frozen == 30_532_122_624
    held = sum(row["shard_bytes"] for row in found["groups"])
    assert 2 * frozen < held < 2 * frozen + 20 * (found["parameters"] - frozen)
    full = said(capsys, *asked, code=2)
    assert "too little host memory" in full["reason"]
