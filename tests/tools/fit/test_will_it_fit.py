"""`elixir-moe plan` as the answer to "will it fit": GPUs by name, hosts in words, adapters, accumulation, clusters."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.plan import seconds_text
from elixir_moe.errors import ConfigError
from elixir_moe.optim.accepted import moments_of
from elixir_moe.optim.joined import join
from elixir_moe.planner.hardware import ORIGINS, Hardware, Links
from elixir_tools.cli.main import main
from elixir_tools.fit import gpus
from elixir_tools.models.adapters import freeze
from elixir_tools.models.lora import Lora
from elixir_tools.names import OPTIMIZERS
from tests.support.every import every
from tests.support.ranks import RankPool

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


def in_full(*arguments: str) -> list[str]:
    """The arguments, with one row and all weights where they say nothing else."""
    way = [] if {"--lora", "--qlora", "--freeze"} & {*arguments} else ["--full"]
    return [*arguments, *way, *(["--batch", "1"] if "--batch" not in arguments else [])]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int | None = 0) -> dict[str, Any]:
    """The answer as JSON; `code` None takes one that fits and one that does not."""
    exit_code = main(["plan", *in_full(*arguments), "--json"])
    assert exit_code in (0, 2) if code is None else exit_code == code
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


def test_more_than_two_gpus_of_a_desktop_are_in_a_server() -> None:
    two, eight = (gpus.machine("rtx-4090", n) for n in (2, 8))
    assert eight.cpu_bytes == 4 * two.cpu_bytes and eight.links(8).v_c > 2 * two.links(2).v_c
    (link, desktop), (same, server) = (gpus.peaks("rtx-4090", n) for n in (2, 8))
    assert link == same and (desktop, server) == (89.6, 204.8)
    assert gpus.peaks("gb10", 1) == (None, 273)


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
        (["--gpu", "l40s", "--ram", "many"], "--ram='many': expected bytes"),
        (["--gpu", "l40s", "--ram", "64"], "--ram='64' has no unit: write '64 GiB'"),
        (["--gpu", "l40s", "--ram", "64 B"], "--ram='64 B': expected at least 1.00 MiB"),
        (["--gpu", "l40s", "--ram", "128000000000"], "128000000000' has no unit"),
        (["--gpu", "l40s", "--ram-reserve", "6"], "--ram-reserve='6' has no unit: write '6 GiB'"),
        (["--gpu", "rtx-4090", "--budget", "80 GiB"], "a GPU of rtx-4090 has 22.35 GiB; choose at most that"),
        (["--gpu", "l40s", "--budget", "0.5"], "--budget='0.5' has no unit: write '0.5 GiB'"),
        (["--gpu", "l40s", "--disk-size", "2"], "--disk-size='2' has no unit"),
        (
            ["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6/s"],
            "--disk-speed='6' has no unit",
        ),
        (
            ["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6 B/s"],
            "--disk-speed='6 B': expected at least 1.00 MiB",
        ),
        (["--gpu", "l40s", "--disk-size", "1 TB", "--disk-speed", "6"], "expected a rate such as '6 GB/s'"),
        (["--gpu", "l40s", "--ram", "8 GiB", "--ram-reserve", "9 GiB"], "leave nothing of 8.00 GiB"),
        (["--gpu", "l40s", "--lora", "r=0"], "r must be one number of at least 1"),
        (["--gpu", "l40s", "--lora", "rank=3"], "'rank=3' is not known"),
        (["--gpu", "l40s", "--lora", "r=2,targets=all-linear,q_proj"], "has all modules already"),
        (["--gpu", "l40s", "--lora", "r=2,targets=nothing"], "nothing matches nothing"),
        (["--gpu", "l40s", "--freeze", "*.layer.0.*"], "matches no parameter; names are as model.embed_tokens.weight"),
        (["--gpu", "l40s", "--freeze", "*"], "leaves no parameter to train"),
        (["--gpu", "l40s", "--accumulation", "0"], "--accumulation: expected at least 1"),
        (["--gpu", "l40s", "--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--gpu", "l40s", "--optimizer", "muon", "--quick"], "leave out --quick, or --optimizer muon"),
        (["--gpu", "l40s", "--optimizer", "muon", "--moments", "bf16"], "are for adam and adamw, not for"),
        (["--gpu", "l40s", "--lora", "--optimizer", "muon"], "--optimizer muon: none of the trained parameters is"),
        (
            ["--gpu", "l40s", "--full", "--chunk-numel", "2M", "1M"],
            "--chunk-numel 2000000 1000000: expected one length",
        ),
        (["--gpu", "l40s", "--full", "--chunk-numel", "9"], "chunk_numel=9: parameter"),
        (["--gpu", "l40s", "--chunk-numel", "1M", "--quick"], "leave out --quick, or --chunk-numel"),
        (
            ["--gpu", "l40s", "--reduce-dtype", "fp16"],
            "--reduce-dtype fp16: gradients are summed in fp32, or in the bf16",
        ),
        (["--hardware", "a100-80g-pcie-x4", "--gpus", "512"], "more nodes need node_bandwidth, which --gpu has"),
    ],
)
def test_mistakes_are_named(
    mixture: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", mixture, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_adapters_are_those_of_peft(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    import peft
    import transformers

    found = said(capsys, mixture, "--gpu", "rtx-4090", "--lora", "r=4,targets=all-linear,experts")
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
    few = said(capsys, mixture, "--gpu", "l40s", "--lora", "r=4,targets=q_proj")
    assert line(few, "Asked").startswith(f"Asked: {6 * 4 * (256 + 4 * 64):,} of ")
    part = said(capsys, mixture, "--gpu", "l40s", "--freeze", "*.experts.*,lm_head.*")
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
        "muon": join([em.Muon([torch.nn.Parameter(torch.zeros(2, 2))]), torch.optim.AdamW(weight)]),
    }
    assert {name: moments_of(optimizer) for name, optimizer in real.items()} == OPTIMIZERS


def test_the_plan_can_be_pasted(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [mixture, "--gpu", "rtx-4090", "--budget", "40 MiB", "--seq", "64"]
    found = said(capsys, *arguments, "--ram", "40 MiB", "--ram-reserve", "0", "--disk-size", "1 TB")
    pasted = re.search(r"plan=(em\.Plan\(.*?\)), step=", line(found, "To paste"))
    assert pasted is not None and found["disk_chunks"] > 0
    plan = eval(pasted[1], {"em": em})
    told = em.Plan.from_json(json.dumps(found["plan"] | {"disk": "FOLDER"}))
    assert plan == told


@pytest.mark.slow
def test_accumulation_updates_once_and_is_proposed_where_updates_are_slow(
    mixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [mixture, "--gpu", "rtx-3090", "--budget", "60 MiB", "--seq", "256"]
    found = said(capsys, *slow, "--thorough")
    proposed = re.search(
        r"Updates take (\d+)% of a step, .*--accumulation (\d+) amortises them, with ([\d,]+) tokens a second "
        r"instead of ([\d,]+)\.",
        line(found, "Updates take"),
    )
    assert proposed is not None
    backwards, faster, before = (int(figure.replace(",", "")) for figure in proposed.groups()[1:])
    accumulated = said(capsys, *slow, "--accumulation", str(backwards))
    one, many = found["predicted"], accumulated["predicted"]
    apart = said(capsys, *slow, "--accumulation", str(backwards), "--batches-per-pass", "1")["predicted"]
    assert round(apart["tokens_per_second"]) == faster, "micro-batches one by one, as in the proposal"
    assert many["step_seconds"] < backwards * one["step_seconds"] / 3, "one update, not many"
    # where micro-batches may pass together, the products of a loss without logits are run again
    assert many["tokens_per_second"] == pytest.approx(faster, rel=0.005) and round(one["tokens_per_second"]) == before
    assert many["tokens_per_second"] == pytest.approx(backwards * 256 / many["step_seconds"])


@pytest.mark.slow
def test_how_far_it_reaches_is_where_it_stops_fitting(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [mixture, "--gpu", "rtx-3090", "--budget", "60 MiB", "--seq", "256"]
    found = said(capsys, *asked, "--thorough")
    reached = re.search(
        r"sequences of ([\d,]+) tokens at batch 1, or a batch of ([\d,]+) at", line(found, "It reaches")
    )
    assert reached is not None
    seq, batch = (int(figure.replace(",", "")) for figure in reached.groups())
    assert found["tile"] is None and "in tiles it may reach further" in line(found, "It reaches")
    for length, sequences in ((seq, 1), (256, batch)):
        said(capsys, *asked[:-2], "--seq", str(length), "--batch", str(sequences))
    for length, sequences in ((seq + 128, 1), (256, batch + 1)):
        beyond = said(capsys, *asked[:-2], "--seq", str(length), "--batch", str(sequences), code=None)
        assert not beyond["feasible"] or beyond["tile"] is not None


@pytest.mark.slow
def test_one_more_stick_is_what_the_search_finds_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"hidden_size": 1024, "moe_intermediate_size": 512}))
    asked = [str(tmp_path), "--gpu", "rtx-4090", "--budget", "600 MiB", "--ram-reserve", "0"]
    short = said(capsys, *asked, "--ram", "1 GiB", "--thorough", code=2)
    assert re.search(
        r"It does not fit: .* [GM]iB too little device memory; give the device", line(short, "It does not")
    )
    longer = said(capsys, *asked, "--ram", "33 GiB")
    told = re.fullmatch(
        r"One more stick of 32\.00 GiB of host memory makes it fit: about (.+) a step\.",
        line(short, "One more stick"),
    )
    assert told is not None
    number, unit = told[1].split()
    without = float(number) * {"s": 1, "ms": 1e-3}[unit]
    assert 0.8 * without < longer["predicted"]["step_seconds"] <= without, "tiles are tried with the stick"


@pytest.mark.slow
def test_a_reserve_of_the_host_is_not_planned_for(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [mixture, "--gpu", "l40s", "--ram", "128 GiB"]
    assert "of a rank's 119.00 GiB of host memory" in line(said(capsys, *asked), "It fits")
    assert "of a rank's 127.00 GiB" in line(said(capsys, *asked, "--ram-reserve", "1 GiB"), "It fits")
    assert "of a rank's 56.50 GiB" in line(said(capsys, *asked, "--gpus", "2", "--ram-reserve", "15 GiB"), "It fits")


def test_the_error_of_the_model_is_that_of_the_paper_table(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = Hardware.named(gpus.REFERENCE)
    assert hardware.mean_error is not None
    plain = [mixture, "--hardware", gpus.REFERENCE]
    assert f"{hardware.mean_error:.1%} off in the mean on the steps" in line(said(capsys, *plain), "Error")
    guess = line(said(capsys, mixture, "--gpu", "rtx-4090", "--gpus", "2"), "Error")
    links = gpus.machine("rtx-4090", 2).links(2)
    assert guess.startswith("Error: unknown") and f"{links.b_c2g:g} GB/s from host to GPU" in guess


@pytest.mark.parametrize("name", ["gb10", "strix-halo"])
def test_where_gpu_and_host_have_one_memory_its_bytes_are_counted_once_and_only_a_disk_holds_more(
    name: str, mixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = gpus.machine(name, 1)
    assert machine.one_memory and machine.gpu_bytes == machine.cpu_bytes
    assert machine.origins["peak_tflops"] == "assumed" and machine.origins["memory_bandwidth"] == "data sheet"
    asked = [mixture, "--gpu", name, "--ram-reserve", "1 MiB"]
    homes = set()
    for memory in (80, 120, 4000):
        found = said(capsys, *asked, "--ram", f"{memory + 1} MiB", "--disk-size", "1 GB")
        assert found["host_chunks"] == 0, "host memory is no other memory"
        predicted = found["predicted"]
        assert predicted["device_peak_bytes"] + predicted["host_bytes_per_rank"] <= memory << 20
        assert "that GPU and host have together" in line(found, "It fits") and "goes to disk" in line(found, "It fits")
        homes.add((found["device_chunks"] > 0, found["disk_chunks"] > 0))
    assert len(homes) > 1, "some chunks are on disk, and none where all fit"
    found = said(capsys, *asked, "--ram", "81 MiB", "--thorough", code=2)
    assert "too little memory of device and host" in found["reason"] and "more on a disk" in found["reason"]
    assert not any(sentence.startswith("One more stick") for sentence in found["answer"])


def test_a_gh200_has_two_memories() -> None:
    machine = gpus.machine("gh200", 1)
    assert not machine.one_memory and machine.cpu_bytes > machine.gpu_bytes


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
        assert every(f"_{key}" in part for key in part if not key.startswith("_") and not key.isdecimal())
    assert found.by_gpus[2] == gpus.machine("rtx-4090", 2).by_gpus[2]


def test_words_of_adapters() -> None:
    assert Lora.parse("r=16,targets=all-linear,experts") == Lora(r=16, targets=("all-linear", "experts"))
    assert Lora.parse("r=8") == Lora(r=8) and Lora.parse("") == Lora()
    assert Lora.parse("targets=q_proj,v_proj, r=8") == Lora(r=8, targets=("q_proj", "v_proj"))
    assert Lora.parse("experts, alpha=32, lm_head") == Lora(alpha=32, targets=("experts", "lm_head"))
    assert Lora.parse("parameters=a.weight,b.weight") == Lora(parameters=("a.weight", "b.weight"))
    with pytest.raises(ConfigError, match="leaves no parameter"):
        freeze(nn.Linear(2, 2), ["weight", "bias"])


@pytest.mark.slow
def test_qwen3_30b_with_lora_on_one_rtx_4090(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 bytes of 30.5 billion frozen weights, and 14 of a billion of adapters."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    asked = [str(tmp_path), "--gpu", "rtx-4090", "--ram", "128 GiB"]
    found = said(capsys, *asked, "--lora", "r=16,targets=all-linear,experts")
    frozen = sum(row["numel"] for row in found["groups"] if row["chunk_group"].endswith(" frozen"))
    assert found["feasible"] and frozen == 30_532_122_624
    held = sum(row["shard_bytes"] for row in found["groups"])
    assert 2 * frozen < held < 2 * frozen + 20 * (found["parameters"] - frozen)
    full = said(capsys, *asked, code=2)
    assert "too little host memory" in full["reason"]


@pytest.mark.slow
def test_qwen3_30b_with_six_bytes_a_parameter_on_one_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All weights are trained on a card of 32 GB with 192 GiB of host memory, which 14 bytes a parameter exceed."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    asked = [str(tmp_path), "--gpu", "rtx-5090", "--ram", "192 GiB"]
    found = said(capsys, *asked, "--master", "bf16", "--moments", "int8")
    held = sum(row["shard_bytes"] for row in found["groups"])
    narrow = sum(row["numel"] for row in found["groups"] if row["chunk_group"].endswith("bf16+int8"))
    assert found["feasible"] and found["plan"]["master"] == "bf16" and found["plan"]["moments"] == "int8"
    assert narrow > 0.97 * found["parameters"]
    assert held == pytest.approx(6.0079 * narrow + 14 * (found["parameters"] - narrow), rel=1e-3)
    assert "too little host memory" in said(capsys, *asked, code=2)["reason"]


def test_narrow_state_is_planned_and_pasted(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [mixture, "--gpu", "rtx-4090", "--seq", "64"]
    found = said(capsys, *asked, "--master", "bf16", "--moments", "int8")
    plan = em.Plan.from_json(json.dumps(found["plan"]))
    assert (plan.master, plan.moments) == ("bf16", "int8")
    assert "master='bf16', moments='int8'" in line(found, "To paste")
    rows = {row["chunk_group"].endswith("bf16+int8"): row for row in found["groups"]}
    assert rows[True]["numel"] > rows[False]["numel"]
    with_disk = said(capsys, *asked, "--moments", "int8", "--disk-size", "1 TB")
    assert with_disk["feasible"] and with_disk["plan"]["moments"] == "int8"
    assert main(["plan", *in_full(*asked), "--moments", "int8", "--optimizer", "sgd"]) == 2
    assert "--moments" in capsys.readouterr().err


def test_the_answer_for_people_has_80_columns(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", *in_full(mixture, "--gpu", "rtx-4090", "--seq", "64")]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert every(
        len(line) <= 80 for line in told.splitlines() if mixture not in line and str(Path(mixture).parent) not in line
    )
    found = said(capsys, *asked[1:])
    command = line(found, "By command: elixir-moe sft --model_name_or_path").removeprefix("By command: ")
    predicted = found["predicted"]
    ram = gpus.machine("rtx-4090", 1).cpu_bytes / 2**30
    for part in (
        f"Assumed: {ram:.0f} GiB of RAM (--ram), no disk",
        "fits on 1 x rtx-4090",
        f"step {seconds_text(predicted['step_seconds'])}, {predicted['tokens_per_second']:,.0f} tokens/s in all",
        f"VRAM {predicted['device_peak_bytes'] / 2**30:.1f} of",
        f"RAM {predicted['host_bytes_per_rank'] / 2**30:.1f} of",
        f"Run: {command}",
    ):
        assert part in " ".join(told.replace("\\\n", " ").split()), part
    more = said(capsys, *asked[1:], "--optimizer", "muon", "--reduce-dtype", "bf16", "--chunk-numel", "2M", "9M")
    words = line(more, "By command: ")
    assert every(
        part in words for part in ("--optim muon", "--plan_reduce_dtype bf16", "--plan_chunk_numel 2000000,9000")
    )
    for other in (["--optimizer", "sgd"], ["--freeze", "*norm*"]):
        found_without = said(capsys, *asked[1:], *other)
        assert not any("elixir-moe sft" in one for one in found_without["answer"]), "sft has no such setting"
    assert main([*asked, "--details"]) == 0
    details = capsys.readouterr().out
    assert every(sentence in details for sentence in found["answer"])
    assert re.search(r"^rCache ", details, re.MULTILINE) and re.search(r"^ranks ", details, re.MULTILINE)


def test_a_disk_that_makes_it_fit_is_named(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [mixture, "--gpu", "rtx-4090", "--seq", "64", "--budget", "40 MiB", "--ram-reserve", "0"]
    short = said(capsys, *asked, "--ram", "40 MiB", "--thorough", code=2)
    told = re.fullmatch(
        r'A disk makes it fit: --disk-size "(\d+ GB)" for each host, about (.+) a step '
        r"at 3 GB/s from it and 3 GB/s to it\.",
        line(short, "A disk"),
    )
    assert told is not None and not any("No sequence length" in sentence for sentence in short["answer"])
    found = said(capsys, *asked, "--ram", "40 MiB", "--disk-size", told[1])
    assert seconds_text(found["predicted"]["step_seconds"]) == told[2]
    assert main(["plan", *in_full(*asked), "--ram", "40 MiB"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in shown and told[0] in shown
    without = said(capsys, *asked, "--ram", "40 MiB", "--optimizer", "adamw-amsgrad", code=2)
    assert not any("A disk makes" in sentence for sentence in without["answer"]), "Adam's state alone can be there"


@pytest.fixture
def wide(tmp_path: Path) -> str:
    """A mixture whose stacked experts are much of a small device."""
    (tmp_path / "wide.json").write_text(json.dumps(MIXTURE | {"num_experts": 256, "num_hidden_layers": 2}))
    return str(tmp_path / "wide.json")


SMALL_DEVICE = (
    "--gpu",
    "rtx-4090",
    "--ram",
    "2 GiB",
    "--seq",
    "64",
    "--budget",
    "20 MiB",
    "--checkpointing",
    "none",
)


def test_experts_are_tiled_where_blocks_are_in_the_way(
    wide: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [wide, *SMALL_DEVICE, "--lora", "r=4,targets=q_proj"]
    found = said(capsys, *asked)
    assert found["tile"] == "256 KiB"
    assert 'em.tile(model, at_most="256 KiB")  # before the optimizer; then: em.wrap(' in line(found, "To paste")
    assert "since large parameters are cut into tiles of at most 256 KiB" in line(found, "The plan")
    roomy = said(capsys, *asked, "--budget", "1 GiB")
    assert roomy["tile"] is None and "em.tile" not in line(roomy, "To paste")
    monkeypatch.setattr("elixir_tools.fit.search.tile_bytes", lambda *_: None)
    assert "too little device memory" in said(capsys, *asked, code=2)["reason"], "without tiles"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("pr-moe-25b", ("--gpu", "a100-40gb", "--ram", "1 TB")),
        ("pr-moe-29b", ("--gpu", "a100-40gb", "--ram", "1 TB")),
        ("moe-1t", ("--hardware", "dgx-2-v100-32g-x16", "--gpus", "16", "--dtype", "fp16")),  # an expert: 450 MiB
    ],
)
def test_what_the_papers_train_fits_in_tiles(
    model: str, machine: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Elixir v1, table II, and ZeRO-Infinity, figure 6a: layers in checkpointed regions larger than the device."""
    assert said(capsys, model, *machine)["tile"] == "512 MiB"


def test_why_there_are_no_tiles_is_said(wide: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [wide, *SMALL_DEVICE, "--lora"]
    assert said(capsys, *asked, "r=1,targets=experts")["tile"] == "256 KiB"
    found = said(capsys, *asked, "r=4,targets=q_proj,experts", code=2)
    assert found["tile"] is None
    assert "is a factor of adapters, which peft reads whole" in line(found, "Tiles would need less device memory")


def tiled_run(path: str, told: str) -> tuple[int, int, list[str]]:
    """(rank) What the answer says to run: bytes held, the largest parameter's, and names of what is trained."""
    import peft
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(**json.loads(Path(path).read_text()))
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    first, second = re.search(r"(em\.tile\(.*?\))  # .*(em\.wrap\(.*\))$", told).groups()  # type: ignore[union-attr]
    eval(first, {"em": em, "model": model})
    names = {
        "em": em,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        "loss_fn": lambda model, rows: model(input_ids=rows, labels=rows).loss,
        "batch": torch.randint(0, 512, (1, 64)),
    }
    largest = max(p.nbytes for p in model.parameters())
    model, optimizer = eval(second, names)
    names["loss_fn"](model, names["batch"]).backward()  # type: ignore[operator]
    optimizer.step()
    held, replaced = em.inspect(model).held_bytes["device"], em.inspect(model).statistics.blocks_replaced
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    optimizer.close()
    assert replaced == 0
    return held, largest, trained


@pytest.mark.slow
def test_what_the_answer_says_to_run_with_tiles_runs(
    wide: str, capsys: pytest.CaptureFixture[str], ranks: Callable[[int], RankPool]
) -> None:
    found = said(capsys, wide, *SMALL_DEVICE, "--lora", "r=4,targets=q_proj")
    ((held, largest, trained),) = ranks(1).run(tiled_run, wide, line(found, "To paste"))
    assert largest <= 256 * 1024 and trained and every("lora" in name for name in trained)
    assert held <= found["predicted"]["device_peak_bytes"]
