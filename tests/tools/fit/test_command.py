"""`elixir-moe plan` and `elixir-moe estimate`: what they print, and what they say of bad input."""

import json
import math
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from elixir_tools.cli.main import main

PLAN = ["plan", "--hardware", "a100-80g-pcie-x4", "--seq", "1024"]
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_strategies_are_compared_where_all_is_used_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU that holds everything needs no block; without it offloading needs some."""
    found = said(capsys, *PLAN, "gpt2-4b", "--gpus", "1", "--batch", "1", "--compare")
    seconds = {row["strategy"]: row["step_seconds"] for row in found["compare"]}
    assert seconds["zero-3"] == seconds["zero-2"] < seconds["zero-2-offload"] < seconds["zero-3-offload"]


def test_a_plan_and_what_others_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, *PLAN, "gpt2-10b", "--gpus", "2", "--batch", "4", "--compare")
    assert found["feasible"] and found["chunks"] == found["device_chunks"] + found["host_chunks"]
    assert found["predicted"]["device_peak_bytes"] < 80e9
    rows = {row["strategy"]: row for row in found["compare"]}
    fitting = [row["step_seconds"] for row in rows.values() if row["feasible"]]
    assert found["predicted"]["step_seconds"] <= min(fitting)


def test_a_budget_moves_chunks_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAN, "gpt2-4b", "--gpus", "2", "--batch", "2"]
    roomy, tight = said(capsys, *arguments), said(capsys, *arguments, "--budget", "24GiB")
    assert roomy["host_chunks"] == 0 < tight["host_chunks"]
    assert tight["predicted"]["step_seconds"] > roomy["predicted"]["step_seconds"]


def test_rows_of_one_group_tell_resident_chunks_from_those_that_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAN, "gpt2-4b", "--gpus", "2", "--batch", "2"]  # whose embedding is tied
    rows = said(capsys, *arguments)["groups"]
    assert len({row["chunk_group"] for row in rows}) == 1 and {row["resident"] for row in rows} == {False, True}
    assert main([*arguments, "--details"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ranks ")]
    assert [line.endswith("  resident") for line in printed] == [row["resident"] for row in rows]


@pytest.mark.slow
def test_what_cannot_fit_is_an_answer_and_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAN, "opt-175b", "--gpus", "4", "--batch", "1"]
    found = said(capsys, *arguments, code=2)
    assert not found["feasible"]
    said_so = re.search(
        r"([\d.]+) GiB too little host memory; give each rank [\d.]+ GiB more host memory, "
        r"or ([\d.]+) GiB more on a disk for shards, or give the device ([\d.]+) GiB more",
        found["reason"],
    )
    assert said_so is not None, found["reason"]
    assert 400 < float(said_so[1]) < float(said_so[2]) < float(said_so[3]) < 466, "the smallest change first"
    assert found["parameters"] == 174_604_468_224  # OPTForCausalLM has as many
    assert main(arguments) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"lacks {said_so[1]} GiB of host memory Smallest change: give each rank {said_so[1]} GiB more host memory. Or"
        in shown
    )
    assert f"Or {said_so[2]} GiB more on a disk for shards. Or give the device {said_so[3]} GiB more." in shown


def test_a_hugging_face_config_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    found = said(capsys, *PLAN, str(path), "--full", "--gpus", "2", "--batch", "1")
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert found["parameters"] == 6 * layer + 2 * 128 * 64 + 64 and found["host_chunks"] == 0


def test_the_sizes_of_a_small_model_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    arguments = [*PLAN, str(tmp_path), "--gpus", "2", "--batch", "1", "--compare"]
    assert main([*arguments, "--budget", "0.1GiB", "--details"]) == 0
    fitting = capsys.readouterr().out
    assert "on 2 x" in fitting and not re.search(r"\b0\.00 ([KMG]iB|B|buffers|there)", fitting)
    assert re.search(r"^ranks .* [\d.]+ [KM]iB", fitting, re.MULTILINE)
    assert re.search(r"A step takes about [1-9][\d.]* (ms|µs), ", fitting)
    assert re.search(r"^zero-3 +[1-9][\d.]* (ms|µs) +[\d.]+ TFLOPS  fits$", fitting, re.MULTILINE)
    assert main([*arguments, "--budget", "0.001GiB"]) == 2
    assert re.search(r"^zero-3 .* short of [\d.]+ [KM]iB of device memory$", capsys.readouterr().out, re.MULTILINE)
    assert main(["estimate", "--parameters", "1000"]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[-1] == "memory" and [row[-2:] for row in rows[:2]] == [["7.81", "KiB"], ["7.81", "KiB"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opt-17b"], "did you mean 'opt-175b'"),
        (["opt-13b", "--gpus", "9"], "lacks by_gpus.9"),
        (["gpt2-4b", "--seq", "4096"], "gpt2-4b has 1024 positions"),
        (["gpt2-4b", "--batch", "0"], "--batch: expected at least 1"),
        (["gpt2-4b", "--budget", "nan"], "--budget='nan': expected bytes"),
        (["gpt2-4b", "--batches-per-pass", "x"], "expected a number of micro-batches or auto, got 'x'"),
        (["gpt2-4b", "--batches-per-pass", "0"], "--batches-per-pass: expected at least 1"),
        (["gpt2-4b", "--imbalance", "inf"], "--imbalance: expected a finite number of at least 1"),
        (["pr-moe-16b", "--imbalance", "1e308"], "--imbalance: expected a finite number of at least 1"),
        (["gpt2-4b", "--batch", "1" + 30 * "0"], "--batch, --seq: expected at most"),
        ([""], "no model is called ''"),
        (["/no/such"], "no such file"),
        (["qwen3-30b-a3"], "did you mean 'Qwen/Qwen3-30B-A3B'?"),
        (["gpt-oss"], "did you mean 'openai/gpt-oss-20b'?"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--gpus", "4", "--batch", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parameters", "1" + 400 * "0"],
        ["--adapters", "-1", "--parameters", "1"],
        ["--parameters", "1.5"],
        ["--parameters", "7 billions"],
    ],
)
def test_an_estimate_of_no_number_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and f"{arguments[0]}: expected" in err


def test_an_estimate_reads_a_number_as_people_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    exact = said(capsys, "estimate", "--parameters", "7000000000")
    assert exact["rows"] and exact == said(capsys, "estimate", "--parameters", "7e9")
    assert exact == said(capsys, "estimate", "--parameters", "7B")


@pytest.mark.parametrize(("scheme", "each"), [(None, 2.0), ("nf4", 0.5625), ("fp8", 1 + 4 / 128**2)])
def test_a_frozen_model_costs_its_bytes_and_adapters_their_state(
    scheme: str | None, each: float, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen, trained = 7_000_000_000, 40_000_000
    arguments = ["--parameters", str(frozen), "--adapters", str(trained), "--adamw"]
    rows = said(capsys, "estimate", *arguments, *(["--quantize", scheme] if scheme else []))["rows"]
    plain, ddp = (next(r for r in rows if r["ddp"] == ddp and not r["amp"] and not r["accumulate"]) for ddp in (0, 1))
    assert plain["gib"] * 2**30 == pytest.approx(each * frozen + 16 * trained)  # weight, gradient and two moments
    assert ddp["gib"] * 2**30 == pytest.approx(each * frozen + 20 * trained)  # and a bucket
    assert plain["bytes_per_parameter"] == pytest.approx(plain["gib"] * 2**30 / (frozen + trained))


def test_an_estimate_quantizes_what_is_frozen_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--parameters", "1000", "--quantize", "nf4"]) == 2
    assert "give the number of trained ones by --adapters" in capsys.readouterr().err


CLUSTER = {"node_bandwidth": 200, "gpus_per_node": 8, "cpu_bytes": 2**40}
"""Eight GPUs a node, each with a network of 25e9 bytes a second."""


@pytest.mark.slow
def test_a_trillion_parameters_on_512_gpus(tmp_path: Path) -> None:
    shipped = resources.files("elixir_moe.planner").joinpath("machines", "a100-80g-pcie-x4.json").read_text()
    data = {**json.loads(shipped), **CLUSTER}
    data["by_gpus"]["8"] = {"b_g2g": 1600, "b_c2g": 150, "b_g2c": 120, "v_g": 400, "v_c": 10}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    arguments = ["moe-1t", "--gpus", "512", "--batch", "1", "--seq", "2048", "--json", "--hardware"]
    done = subprocess.run(
        [sys.executable, "-m", "elixir_moe", "plan", *arguments, str(path)],
        capture_output=True,
        check=True,
        timeout=400,
    )
    found = json.loads(done.stdout)
    assert found["feasible"] and 0.95e12 < found["parameters"] < 1.05e12
    groups = found["groups"]
    held = sum(row["shard_bytes"] for row in groups if row["tier"] == "device")
    assert held < found["predicted"]["device_peak_bytes"] <= 80e9
    # 14 bytes a parameter over 512 ranks: the dense part is scattered over all, experts over 512 / 64 of them each.
    dense = sum(row["numel"] for row in groups if "0-511" in row["chunk_group"])
    experts = sum(row["numel"] for row in groups if "step 64" in row["chunk_group"])
    assert dense + 64 * experts == found["parameters"]
    assert sum(row["shard_bytes"] for row in groups) == pytest.approx(14 * (dense / 512 + experts / 8), rel=1e-3)


APART = """
import sys, elixir_tools.cli.main, elixir_tools.cli.plan
if __name__ == "__main__":
    heavy = ["rich", "yaml", "torch._dynamo", "elixir_tools.train.trainer"]
    heavy += ["torch.distributed.elastic.multiprocessing"]
    print([name for name in heavy if name in sys.modules])
    for arguments in {commands}:
        assert elixir_tools.cli.main.main(arguments) == 0
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Commands that pretend to be a cluster or start ranks, in a process that is no rank: its folder and its lines."""
    folder = tmp_path_factory.mktemp("apart")
    (folder / "config.json").write_text(json.dumps(SMALL))
    mixture = [*PLAN, "pr-moe-16b", "--gpus", "4", "--batch", "1", "--imbalance", "1.2", "--json"]
    here = [
        "plan",
        "--hardware",
        "here",
        str(folder / "config.json"),
        "--full",
        "--gpus",
        "2",
        "--batch",
        "1",
    ]
    script = folder / "script.py"
    script.write_text(APART.format(commands=[mixture, [*here, "--seq", "16", "--json"]]))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        check=True,
        timeout=400,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
    )
    return folder, done.stdout.splitlines()


def test_the_command_line_imports_no_training(apart: tuple[Path, list[str]]) -> None:
    """What it does import is most of the time that a plan takes."""
    assert apart[1][0] == "[]"


def test_experts_are_spread_over_ranks_that_do_not_exist(apart: tuple[Path, list[str]]) -> None:
    found = json.loads(apart[1][1])
    assert found["feasible"] and 15.5e9 < found["parameters"] < 17e9


def test_figures_of_the_machine_we_are_on(apart: tuple[Path, list[str]]) -> None:
    folder, lines = apart
    found = json.loads(lines[2])
    assert len(lines) == 3 and found["feasible"] and found["predicted"]["step_seconds"] > 0
    (kept,) = (folder / "elixir-moe").iterdir()
    assert json.loads(kept.read_text())["machine"]["ranks"] == 2


DAMAGED = {
    "nan": ({"gpu_bytes": math.nan}, "gpu_bytes: expected int, got nan"),
    "too large": ({"gpu_bytes": 10**400}, "gpu_bytes: expected bytes (64 GiB are 68719476736), got 1000"),
    "half a GPU": ({"gpus_per_node": 1.5}, "gpus_per_node: expected int, got 1.5"),
    "text": ({"peak_tflops": "many"}, "peak_tflops: expected float, got 'many'"),
    "misspelt": ({"node_bandwith": 10}, "unknown figure 'node_bandwith'; did you mean 'node_bandwidth'?"),
    "no object": ({"fitted": 3}, "fitted: expected a section with keys, got 3"),
    "disk": ({"disk_bytes": 10**12}, "disk_read and disk_write are missing"),
    "wires": ({"wires": "x"}, "wires: expected tuple["),
    "none": ({"fitted": {}}, "fitted.device_efficiency is missing"),
}


@pytest.mark.parametrize("damage", [*DAMAGED, "bytes"])
def test_a_hardware_file_that_is_wrong_says_where(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    changes, message = DAMAGED.get(damage, ({}, "cannot be read"))
    shipped = resources.files("elixir_moe.planner").joinpath("machines", "a100-80g-pcie-x4.json").read_text()
    path.write_text(json.dumps({**json.loads(shipped), **changes}))
    if damage == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    arguments = ["--hardware", str(path), "--seq", "8", "--gpus", "4", "--batch", "1", "opt-2.7b"]
    assert main(["plan", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and "ConfigError" in err and message in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 65}, "is not the config of a causal language model"),
        ({"model_type": "vit"}, "is not the config of a causal language model"),
        ({"max_position_embeddings": 512}, "has 512 positions, give at most that many (--seq 512)"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_says_how(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **change}))
    assert main([*PLAN, str(tmp_path), "--full", "--gpus", "2", "--batch", "1"]) == 2
    assert message in capsys.readouterr().err
