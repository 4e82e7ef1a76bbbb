"""The command line: one clear message and exit code 2 for every mistake, and JSON alone where JSON was asked for."""

import fcntl
import gc
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe import records
from elixir_moe.torch_private import NEWEST, OLDEST
from elixir_tools.cli.main import main
from elixir_tools.garbage import uncollected
from elixir_tools.report import history
from elixir_tools.train import launch
from elixir_tools.train.config import TrainConfig
from tests.support.every import every

SETTINGS = """
model: {seq_len: 16, n_layers: 2, d_model: 16, n_heads: 2, experts: [0, 2], ep: [1, 2]}
plan: {kind: offload, rcache_blocks: 4}
run: {out: OUT, steps: 2, global_batch: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.replace("OUT", str(tmp_path / "out")))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run.stepz", "3"], "unknown setting 'run.stepz'; did you mean 'run.steps'?"),
        (["--steps", "3"], "unknown setting 'steps'; did you mean 'run.steps'?"),
        (["--modle.n_layers", "3"], "unknown setting 'modle.n_layers'; did you mean 'model.n_layers'?"),
        (["--run.step", "3"], "unknown setting 'run.step'; did you mean 'run.steps'?"),
        (["--run", "{steps: 3}"], "unknown setting 'run'; did you mean 'run"),
        (["--model", "other.yaml"], "unknown setting 'model'; did you mean 'model"),
        (["--run.steps", "many"], "run.steps: expected int, got 'many'"),
        (["--run.steps", "1.5"], "run.steps: expected int, got '1.5'"),
        (["--run.overwrite", "perhaps"], "run.overwrite: expected bool, got 'perhaps'"),
        (["--optimizer.lr", "nan"], "optimizer.lr: expected a finite number, got 'nan'"),
        (["--optimizer.lr", "1e999"], "optimizer.lr: expected a finite number, got '1e999'"),
        (["--optimizer.betas", "0.9,.nan"], "optimizer.betas[1]: expected float, got '.nan'"),
        (["--optimizer.clip_norm", "much"], "optimizer.clip_norm: expected float | None, got 'much'"),
        (["--optimizer.lr", "-1"], "optimizer.lr: expected a finite number above 0, got -1.0"),
        (["--optimizer.betas", "0.9"], "optimizer.betas: expected tuple[float, float], got '0.9'"),
        (["--watch.on_nan", "halt"], "watch.on_nan: expected 'skip' | 'back' | 'stop', got 'halt'"),
        (["--plan.kind", "ddp"], "plan.rcache_blocks has no effect for plan.kind=ddp"),
        (["--plan.rcache_blocks", "0"], "plan: rcache_blocks=0: expected a whole number of at least 1"),
        (["--model.vocab_size", "99"], "model.vocab_size=99: tokens are bytes; give at least 256"),
        (["--model.n_heads", "3"], "d_model=16 is not a multiple of n_heads=3"),
        (["--model.ep", "1,3"], "layer 1: ep=3 does not divide 2 experts, choose among [1, 2]"),
        (["--nproc", "3"], "model.ep[1]=2 does not divide the 3 ranks of this run: choose one of [1, 3]"),
        (["--run.global_batch", "3"], "run.global_batch=3 is not a multiple of 2 ranks x run.accumulation=1"),
        (["--plan.device", "20"], "plan: device=20 has no unit: write '20 GiB'"),
        (["--plan.rcache_blocks", "null", "--plan.rcache", "4"], "plan: rcache=4 has no unit: write '4 GiB'"),
        (["--data.paths", "/no/such.txt"], "cannot read '/no/such.txt': No such file or directory"),
        (["--run.global_bath", "4"], "unknown setting 'run.global_bath'; did you mean 'run.global_batch'?"),
        (["--model_name_or_path", "a"], "--model_name_or_path is an argument of `elixir-moe sft`"),
        (["--data.bigram", "3"], "unknown setting 'data.bigram'\n"),
        (["--run.steps"], "--run.steps has no value: give one, as --run.steps VALUE"),
        (["stray"], "unexpected argument 'stray'"),
        (["--nproc", "0"], "--nproc: expected at least 1, got 0"),
        (["--nproc", "two"], "argument --nproc: invalid int value: 'two'"),
    ],
)
@pytest.mark.fault(33)
def test_a_mistake_is_told_once_and_nothing_starts(
    arguments: list[str], said: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--nproc", "2", "--config", config, *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and "Traceback" not in err and out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: [1, 2]", "run: expected a section with keys, got [1, 2]"),
        ("- 1", "must hold sections with keys, got [1]"),
        ("run: {out: x, out: y}", "key 'out' stands twice"),
        ("run: {", "is not valid YAML"),
        ("run: {steps: 3}", "run.out is missing: name the directory"),
        ("run: {out: x, steps: true}", "run.steps: expected int, got True"),
        ("run: {out: x, steps: null}", "run.steps: expected int, got None"),
        ("run: {out: x, steps: 1.0}", "run.steps: expected int, got 1.0"),
        ("run: other.yaml", "run: expected a section with keys, got 'other.yaml'"),
        ("run:", "run: expected a section with keys, got None"),
        ("run.steps: 3", "unknown setting 'run.steps'"),
        ("planner: {}", "unknown setting 'planner'; did you mean 'plan'?"),
        ("optimizer: {lr: .inf}\nrun: {out: x}", "optimizer.lr: expected a finite number, got inf"),
        (f"optimizer: {{lr: 1{'0' * 400}}}\nrun: {{out: x}}", "optimizer.lr: expected float, got 1000"),
        ("run: {out: x, steps: {class_path: antigravity.fly}}", "run.steps: expected int, got {'class_path'"),
        ("run: {global_bath: 4}", "unknown setting 'run.global_bath'; did you mean 'run.global_batch'?"),
        ("model: {class_path: antigravity.fly}", "unknown setting 'model.class_path'"),
        ("run: {out: 2024-02-30}", "is not valid YAML"),
        ("run: {out: \x00}", "is not valid YAML"),
        ("run: {out: 3}", "run.out: expected str, got 3"),
        ("run: !!python/object/apply:os.system [true]", "is not valid YAML"),
        ("model: {experts: 4}\nrun: {out: x}", "model.experts: expected tuple[int, ...], got 4"),
    ],
)
def test_a_mistake_in_the_file_is_told(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["train", "--config", str(tmp_path / "bad.yaml")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {out: x\nplan: {}", "line 2, column 5: while parsing a flow mapping: expected ',' or '}', but got ':'"),
        ("run:\n  out: x\n\tsteps: 3", "line 3, column 1: while scanning for the next token: found character '\\t'"),
        ("run:\n  out: 'x", "line 2, column 10: while scanning a quoted scalar: found unexpected end of stream"),
        ("run:\n  out: \x00", "line 2, column 8: unacceptable character #x0000"),
        ("run:\n  out: x\n  out: y", "line 2, column 3: key 'out' stands twice"),
        ("run:\n  steps: 3\n  out: 2024-02-30", "line 3, column 8: '2024-02-30' is not a valid timestamp"),
        ("run:\n  overwrite: !!bool perhaps", "line 2, column 14: 'perhaps' is not a valid bool"),
        (f"run:\n  seed: {'1' * 5000}", f"line 2, column 9: {'1' * 80!r} is not a valid int"),
        ("run:\n  out: !!python/none x", "line 2, column 8: could not determine a constructor for the tag"),
        ("run: &all\n  - *any", "line 2, column 5: found undefined alias 'any'"),
        ("{" * 100_000, "it is nested too deep"),
    ],
)
def test_text_that_is_no_yaml_is_told_by_its_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["train", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"the settings file {str(path)!r} is not valid YAML: {said}" in err and err.count("\n") == 1
    assert main(["report", str(tmp_path)]) == 2, "no run's"
    (tmp_path / "config.yaml").write_text(text)
    assert main(["report", str(tmp_path)]) == 2 and capsys.readouterr().err.count("\n") == 2


def test_an_empty_text_and_a_missing_settings_file(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    arguments = ["train", "--nproc", "2", "--config", config]
    assert main([*arguments, "--data.paths", str(tmp_path / "empty.txt")]) == 2
    assert f"'{tmp_path}/empty.txt' is empty" in capsys.readouterr().err
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the settings file" in capsys.readouterr().err


def test_a_directory_in_use_is_refused(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert main(["train", "--nproc", "2", "--config", config]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_a_traceback_comes_only_if_asked_for(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--traceback", "--config", config, "--run.stepz", "3"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (em.ConfigError, 2),
        (em.LayoutError, 2),
        (em.PlanError, 2),
        (em.TierError, 2),
        (em.DiskError, 1),
        (em.CheckpointError, 1),
        (em.ElixirError, 1),
        (RuntimeError, 1),
    ],
)
def test_the_exit_code_says_whether_the_same_command_can_do_better(
    error: type[Exception], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_directory: Path) -> None:
        raise error("so it is")

    monkeypatch.setattr(history, "account", fail)
    assert main(["report", str(tmp_path)]) == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "--plan.kind=auto --plan.rcache_blocks=null --plan.hardware=a100-80g-pcie-x4 --plan.budget=1kB",
            "PlanError: no plan fits",
        ),
        ("--plan.disk_chunks=1 --plan.disk=/no/such", "TierError: the folder disk='/no/such' does not exist"),
    ],
)
@pytest.mark.fault(18)
def test_a_plan_that_does_not_fit_is_a_setting(
    arguments: str, said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is only found when the model is there."""
    try:
        assert main(["train", "--config", config, "--model.ep", "1,1", *arguments.split()]) == 2
    finally:
        dist.destroy_process_group()
    err = capsys.readouterr().err
    assert re.search(said, err) and "Traceback" not in err


def test_no_verb_and_a_wrong_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["trian"]) == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--json env", "-v train --run.out x", "--trace check --quiet"])
def test_an_option_before_the_verb_is_told_its_place(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    option, verb, *_ = arguments.split()
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"elixir-moe: ConfigError: {option} stands before {verb}: write options")


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--run.steps STEPS Optimizer steps. (type: int, default: 100)" in shown
    assert (
        "(required, type: str)" in shown and "one number a layer, or empty: all dense. (type: tuple[int, ...]" in shown
    )
    known = list(records.keys(TrainConfig))
    assert {"run.steps", "model.d_model", "data.paths"} <= {*known}
    assert every(f" --{key} " in shown for key in known)


def test_env_prints_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] and facts["cpus"] >= 1 and facts["torch_tested"] == f"{OLDEST} to {NEWEST}"
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("9.9.1"))
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"torch 9.9.1 is newer than {NEWEST}" in shown
    assert main(["env", "--json"]) == 0
    assert "torch" in capsys.readouterr().out
    assert main(["env", "--nonsense"]) == 2


def test_a_report_of_what_never_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a run: its process was killed, a line is cut short, another is no JSON, most files are missing."""
    step = {"step": 1, "loss": 3.0, "val_loss": None, "grad_norm": None, "step_seconds": 0.5}
    (tmp_path / "config.yaml").touch()
    status = {"state": "running", "step": 2, "checkpoint": None, "reason": ""}
    (tmp_path / "status.json").write_text(json.dumps(status))
    wrong = {**step, "loss": [1], "statistics": {"hits": "many", "bytes_fetched": {"host": None}}}
    second = {**step, "step": 2, "loss": 2.0, "statistics": wrong["statistics"]}
    lines = [json.dumps(step), "not JSON", json.dumps(wrong), json.dumps(second), '{"step": 3, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    event = {"step": 1, "time": None, "kind": "saved", "text": "checkpoints/step-00000001"}
    (tmp_path / "events.jsonl").write_text(json.dumps({**event, "time": math.nan}) + "\n{" + "[" * 200_000)
    assert main(["report", "--json", str(tmp_path), "--picture", str(tmp_path / "half.png")]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["state"] == "ended without a word; the same command continues it"
    assert (told["step"], told["train_loss"], told["val_loss"], told["hit_rate"]) == (2, 2.0, None, None)
    assert (told["step_seconds"], told["events"]) == (0.5, [event])
    assert (tmp_path / "half.png").read_bytes().startswith(b"\x89PNG\r\n")
    held = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert main(["report", str(tmp_path)]) == 0
    finally:
        os.close(held)
    shown = capsys.readouterr().out
    assert "running" in shown and "step 1: saved: checkpoints/step-00000001" in shown


def test_a_report_counts_what_leaves_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards at home on the device are copied into blocks, and gradients back, without leaving it."""
    (tmp_path / "config.yaml").touch()
    moved = [{"device": 1000, "host": 7}, {"device": 1000}, {"device": 1000, "host": 3}]
    records = [
        {"step": step, "loss": 3.0, "val_loss": None, "statistics": {"bytes_fetched": by, "bytes_offloaded": by}}
        for step, by in enumerate([moved[0], *moved], 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["report", "--json", str(tmp_path)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert (told["bytes_fetched"], told["bytes_offloaded"]) == (3, 3), "the medians of 7, 0 and 3"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["here/none"], "'here/none' is not the directory of a run"),
        (["RUN", "RUN", "--picture", "a.png"], "--picture draws one run, got 2"),
        (["RUN", "--picture", "a.png"], "has no losses yet"),
        (["RUN/mine"], "is not the directory of a run"),
        (
            ["RUN", "--pictur", "a.png"],
            "unknown arguments --pictur a.png; did you mean '--picture'?; see elixir-moe report",
        ),
        (["RUN", "--stepz", "1"], "unknown arguments --stepz 1; see elixir-moe report --help"),
        ([], "the following arguments are required: directory"),
    ],
)
def test_a_report_that_cannot_be_given(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("mine: 1")
    assert main(["report", *(argument.replace("RUN", str(tmp_path)) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "; did you mean 'train'?"),
        (["ckpt", "verif"], "; did you mean 'verify'?"),
        (["plan", "--loss", "fussed"], "; did you mean 'fused'?"),
        (["frobnicate"], ""),
    ],
)
def test_a_misspelled_choice_has_the_nearest(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert re.search(rf"invalid choice: '{arguments[-1]}' \(choose from .*\){re.escape(hint)}; see ", told), told


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--run.stepz", "3"], "unknown setting 'run.stepz'; did you mean 'run.steps'?"),
        pytest.param(["--plan.chunk_numel", "1"], "PlanError: ", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_one_rank_speaks(wrong: list[str], said: str, config: str) -> None:
    """All ranks meet the same wrong setting, before they start or in it; rank 0's process tells it, no other does."""
    arguments = ["-m", "elixir_moe", "train", "--config", config, *wrong]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode != 0
    assert done.stderr.count(said) == 1 and re.search(r"exitcode +: 2 ", done.stderr)


def test_an_error_of_the_ranks_reaches_the_user_once(
    config: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Chunks too short for the model's parameters: found on every rank, once the model is there, and yet a setting."""
    for name in ("ELIXIR_LAUNCHED", "OMP_NUM_THREADS"):  # what the launcher sets in this process
        monkeypatch.setenv(name, "1")
    assert main(["train", "--nproc", "2", "--config", config, "--plan.chunk_numel", "1"]) == 2
    said = capfd.readouterr().err
    assert said.count("PlanError") == 1
    assert re.search(r"^elixir-moe: \[rank [01]\] PlanError: ", said, re.MULTILINE)


def ended(code: int, at: float, **own: Any) -> Any:
    """What the agent tells of a rank."""
    data = {"elixir": {"seconds": at, **own}} if own else {}
    return SimpleNamespace(exitcode=code, timestamp=at, message="killed", error_file_data=data)


@pytest.mark.parametrize(
    ("failures", "exit_code", "text"),
    [
        ({0: ended(75, 2.0, text="asked to", exit_code=75), 1: ended(-15, 1.0)}, 75, r"\[rank 0\] asked to"),
        ({0: ended(1, 2.0), 1: ended(-15, 1.0)}, 1, r"\[rank 0\] exit code 1, without a message"),
        ({0: ended(1, 1.0, text="wrong", exit_code=1), 1: ended(-9, 2.0)}, 1, r"\[rank 1\] killed"),
        ({0: ended(1, 2.0, text="stuck", exit_code=1, stopped=[1]), 1: ended(-9, 1.0)}, 1, r"\[rank 0\] stuck"),
        ({1: ended(-15, 1.0)}, 75, "ended by SIGTERM before the first step"),
        ({1: ended(-2, 1.0)}, 130, "ended by Ctrl-C before the first step"),
    ],
)
def test_the_failure_that_others_follow_from_is_told(failures: dict[int, Any], exit_code: int, text: str) -> None:
    """The launcher ends the other ranks with SIGTERM, which one that is just starting dies of."""
    found = launch._first_failure(failures, asked=False)
    assert found is not None and found.exit_code == exit_code
    assert re.match(text, str(found))


def test_nothing_is_kept_from_the_collector_with_triton() -> None:
    """Its bindings report what is alive at the interpreter's exit."""
    before = gc.get_freeze_count()
    with mock.patch.dict(sys.modules, {"triton": ModuleType("triton")}), uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == before
