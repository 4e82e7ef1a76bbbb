"""Settings there and back, the schedule, and a whole short training on two ranks with everything it leaves behind."""

import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from elixir_moe.errors import ConfigError
from elixir_tools import settings
from elixir_tools.cli.arguments import parser_of
from elixir_tools.cli.main import main
from elixir_tools.models.gpt import GPT
from elixir_tools.report.directory import Claim
from elixir_tools.report.picture import draw_losses
from elixir_tools.train import config as configs
from elixir_tools.train import directory
from elixir_tools.train.activations import figures
from elixir_tools.train.bigram import Bigram
from elixir_tools.train.config import OptimizerConfig, PlanConfig, RunConfig, TrainConfig
from elixir_tools.train.data import load_text
from elixir_tools.train.directory import claim_directory
from elixir_tools.train.launch import program
from elixir_tools.train.trainer import check_alike, lr_factor
from tests.state.test_checkpoint_files import write_small
from tests.support.every import every
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TINY = """
model: {seq_len: 32, n_layers: 2, d_model: 32, n_heads: 2, experts: [2, 4], ep: [1, 2], residual: true}
plan: {kind: offload, rcache_blocks: 4}
optimizer: {lr: 3e-3, warmup_steps: 2}
run: {steps: 6, global_batch: 8, accumulation: 2, eval_every: 3, eval_batches: 2, sample_bytes: 20, out: OUT,
      activations: true}
"""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_settings_survive_the_way_to_yaml_and_back(path: Path) -> None:
    config = configs.load(path)
    assert settings.build(TrainConfig, yaml.safe_load(settings.to_yaml(config))) == config


def test_text_that_looks_like_something_else_survives_too() -> None:
    values = {
        "model": {},
        "data": {"paths": ["*.txt", "2024", "a,b", "null", "[1"]},
        "plan": {"kind": "auto", "hardware": "3"},
        "optimizer": {"lr": "1e-7", "betas": [0, 1e-30], "clip_norm": None},
        "run": {"out": "1e3", "resume": "{x: y}"},
    }
    config = settings.build(TrainConfig, values)
    assert config.data.paths == ("*.txt", "2024", "a,b", "null", "[1")
    assert (config.plan.hardware, config.run.out, config.run.resume) == ("3", "1e3", "{x: y}")
    assert config.optimizer == OptimizerConfig(lr=1e-7, betas=(0.0, 1e-30), clip_norm=None)
    assert settings.build(TrainConfig, yaml.safe_load(settings.to_yaml(config))) == config


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16"])
def test_a_dtype_may_have_the_name_that_torch_has_for_it(name: str) -> None:
    keys = ("run.dtype", "plan.master", "plan.moments")
    config = settings.build(TrainConfig, {"run": {"out": "x"}}, [(key, name) for key in keys])
    assert (config.run.dtype, config.plan.master, config.plan.moments) == ("bf16", "bf16", "bf16")
    plan = parser_of(None).parse_args(["plan", "gpt2-4b", "--gpu", "h100", "--dtype", name])
    assert plan.dtype == "bf16"


@pytest.mark.parametrize("name", ["bfloat16", "bf16"])
def test_gradients_are_summed_in_a_dtype_by_either_name(name: str) -> None:
    config = settings.build(TrainConfig, {"run": {"out": "x", "dtype": "bf16"}}, [("plan.reduce_dtype", name)])
    assert config.plan.reduce_dtype == "bfloat16"


def test_overrides_win_over_the_file_and_are_read_by_their_settings_type() -> None:
    pairs = [
        ("run.steps", "7"),
        ("run.steps", "9"),
        ("run.out", "2024"),
        ("optimizer.lr", "1e-3"),
        ("optimizer.clip_norm", "null"),
        ("optimizer.betas", "0.8,0.99"),
        ("model.ep", "[1, 1, 1, 2]"),
        ("run.overwrite", "false"),
        ("data.paths", "[ab].txt, part-[0-9].txt"),
    ]
    config = configs.load(ROOT / "examples" / "pr_moe_small.yaml", pairs)
    assert (config.run.steps, config.run.out, config.run.overwrite) == (9, "2024", False)
    assert config.optimizer == OptimizerConfig(lr=1e-3, clip_norm=None, betas=(0.8, 0.99), warmup_steps=60)
    assert config.model.ep == (1, 1, 1, 2) and config.data.paths == ("[ab].txt", "part-[0-9].txt")


def test_keys_that_are_merged_may_be_overridden() -> None:
    text = "a: &a {every: 5, keep: 2}\nsave: {<<: *a, every: 7}\nboth: {<<: [*a, {more: 1}], keep: 3}"
    found = settings.parse_yaml(text, Path("x.yaml"))
    assert found["save"] == {"every": 7, "keep": 2} and found["both"] == {"every": 5, "keep": 3, "more": 1}
    with pytest.raises(ConfigError, match="key 'every' stands twice"):
        settings.parse_yaml("save: {<<: {every: 5}, every: 7, every: 8}", Path("x.yaml"))


def test_paths_may_begin_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run is written is where it is looked for."""
    monkeypatch.setenv("HOME", "/home/me")
    run, data = RunConfig(out="~/runs/x", resume="~/step-1"), configs.DataConfig(paths=("~/a.txt", "b.txt"))
    assert (run.out, run.resume, data.paths) == ("/home/me/runs/x", "/home/me/step-1", ("/home/me/a.txt", "b.txt"))


def compare_with_others(name: str, out: str) -> None:
    """(rank) Ranks of which the second has another text, or other steps."""
    config, mine = config_of(Path(out), steps=3), load_text((), 0.1, 128)
    if dist.get_rank() == 1:
        config = config_of(Path(out), steps=3 + (name == "steps"))
        mine = replace(mine, train=mine.train[: -1 if name == "text" else None])
    check_alike(config, mine)


@pytest.mark.parametrize("name", ["steps", "text", "neither"])
def test_ranks_that_have_read_other_files_are_told_at_once(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Node-local copies of which one is stale."""
    key = {"steps": "run.steps is 3 on rank 0, 4 on rank 1", "text": "data.text is", "neither": ""}[name]
    with pytest.raises(RankError, match=key) if key else nullcontext():
        ranks(2).run(compare_with_others, name, str(tmp_path))


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (lambda: OptimizerConfig(lr=math.nan), "optimizer.lr"),
        (lambda: OptimizerConfig(weight_decay=math.inf), "optimizer.weight_decay"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), r"optimizer.betas\[1\]"),
        (lambda: RunConfig(out=" "), "run.out"),
        (lambda: RunConfig(out="x", steps=0), "run.steps"),
        (lambda: PlanConfig(kind="zero3", rcache_blocks=0), "plan: rcache_blocks=0: expected a whole number"),
        (lambda: PlanConfig(kind="zero2", device_chunks=2), "plan.device_chunks"),
    ],
)
def test_sections_check_themselves_without_a_file(section: object, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        section()  # type: ignore[operator]


def test_the_learning_rate_rises_and_then_falls_to_its_last_value() -> None:
    config = OptimizerConfig(warmup_steps=10, final_lr=0.25)
    factors = [lr_factor(step, 100, config) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0 and factors[99] == pytest.approx(0.25)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
    # halfway down the cosine: (1 + 0.25) / 2, between steps 54 and 55
    assert (factors[54] + factors[55]) / 2 == pytest.approx(0.625)


def config_of(out: Path, **run: object) -> TrainConfig:
    return settings.build(TrainConfig, {"model": {}, "plan": {}, "run": {"out": str(out), **run}})


def test_a_run_that_goes_back_from_its_end_has_no_results_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has it ended, for a launcher that starts it again. An earlier version saved fewer settings."""
    monkeypatch.setattr(directory, "extra_of", lambda _: {"settings": {}, "progress": {"step": 50}})
    source, text = tmp_path / "checkpoints" / "step-00000050", load_text((), 0.1, 128)
    source.mkdir(parents=True)
    Claim(tmp_path, None).release()
    (tmp_path / "config.yaml").write_text(f"model: {{}}\nrun: {{out: {tmp_path}}}")
    for name in ("metrics.jsonl", "summary.json", "weights.safetensors", "sample.txt", "loss.png"):
        (tmp_path / name).write_text('{"steps": 100}')
    claim_directory(config_of(tmp_path, overwrite=True, resume=str(source), steps=100), text).release()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "checkpoints", "config.yaml", "metrics.jsonl"]


@pytest.mark.fault(34)
def test_a_directory_is_claimed_once_and_only_our_own_files_are_removed(tmp_path: Path) -> None:
    """Two runs at once, an unfinished one, one of somebody else."""
    out, text = tmp_path / "runs" / "x", load_text((), 0.1, 128)
    claim = claim_directory(config_of(out), text)
    with pytest.raises(ConfigError, match="another process trains in"):
        claim_directory(config_of(out), text)
    claim.release()
    (out / "metrics.jsonl").write_text("of a run that came to no checkpoint")
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        claim_directory(config_of(out, resume="never"), text)
    claim_directory(config_of(out), text).release()
    assert sorted(p.name for p in out.iterdir()) == [".lock", "config.yaml", "notes.txt"]
    (out / "summary.json").write_text('{"steps": 100}')
    with pytest.raises(ConfigError, match="has ended at step 100"):
        claim_directory(config_of(out), text)
    claim_directory(config_of(out, overwrite=True), text).release()
    assert sorted(p.name for p in out.iterdir()) == [".lock", "config.yaml", "notes.txt"]
    for content in ("mine: 1", "run: [out]", "a: b: c", None):
        if content is None:
            (out / "config.yaml").unlink()
        else:
            (out / "config.yaml").write_text(content)
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match="is not empty and holds no run: choose another"):
                claim_directory(config_of(out, overwrite=overwrite), text)
    with pytest.raises(ConfigError, match=r"notes.txt'.*choose another directory"):
        claim_directory(config_of(out / "notes.txt", overwrite=True), text)
    with pytest.raises(ConfigError, match=r"run\.resume: .*nowhere: no such checkpoint"):
        claim_directory(config_of(tmp_path / "new", resume=str(tmp_path / "nowhere")), text)


@pytest.mark.fault(35)
def test_a_run_that_is_replaced_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """Folders that others made; and everything, in a directory without a mark."""
    out, text = tmp_path / "out", load_text((), 0.1, 128)
    claim_directory(config_of(out), text).release()
    own, foreign = [out / "loss.png"], [out / ".site.partial" / "manifest.json"]
    foreign += [out / "checkpoints" / name / "manifest.json" for name in ("site", ".app.partial", "step-00000003")]
    for path in (*own, *foreign):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"name": "my app"}')
    for name in ("step-00000001", "step-00000002"):
        write_small(out / "checkpoints" / name, 1)
    manifest = out / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])  # damaged, but this library's
    claim_directory(config_of(out, overwrite=True), text).release()
    assert not any(path.exists() for path in own) and every(path.exists() for path in foreign)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [".app.partial", "site", "step-00000003"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.yaml").touch()
    (mine / "metrics.jsonl").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"'.*mine' has the files of a run, but its \.lock has no mark"):
            claim_directory(config_of(mine, overwrite=overwrite), text)
    (mine / ".lock").write_text("mine")
    (mine / "metrics.jsonl").unlink(), (mine / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"\.lock' is not a file of a run: choose another directory"):
        claim_directory(config_of(mine), text)
    assert (mine / ".lock").read_text() == "mine"


@pytest.mark.parametrize("left", ["nothing", "a dangling link", "a file"])
@pytest.mark.parametrize("told_by", ["status.json", "summary.json"])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_over_its_results(
    left: str, told_by: str, tmp_path: Path
) -> None:
    out, text = tmp_path / "out", load_text((), 0.1, 128)
    claim_directory(config_of(out), text).release()
    (out / told_by).write_text(json.dumps({"state": "done", "checkpoint": "step-00000004", "steps": 4}))
    (out / "weights.safetensors").write_text("trained")
    said = "no whole checkpoint is left in '.*/out/checkpoints' to continue from: put the checkpoints back"
    if left == "a dangling link":
        (out / "checkpoints").symlink_to(tmp_path / "not-mounted")
        said = "checkpoints' is a link to '.*/not-mounted', which is not there"
    if left == "a file":
        (out / "checkpoints").touch()
        said = "checkpoints' is no folder"
    for resume in ("auto", "fall_back"):
        with pytest.raises(ConfigError, match=said):
            claim_directory(config_of(out, steps=100, resume=resume), text)
    assert (out / "weights.safetensors").read_text() == "trained"
    if left != "nothing":
        with pytest.raises(ConfigError, match=said):
            claim_directory(config_of(out, steps=100, overwrite=True), text)
        (out / "checkpoints").unlink()
    claim_directory(config_of(out, steps=100, overwrite=True), text).release()
    assert not (out / "weights.safetensors").exists()


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw_losses(tmp_path / "loss.png", "a run in $a^$\udcff", [(1, 5.0)], [(1, 4.9)], bigram=2.4)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A training of six steps on two ranks, started by the short form."""
    directory = tmp_path_factory.mktemp("train")
    (directory / "run.yaml").write_text(TINY.replace("OUT", str(directory / "out")))
    done = launch("-m", "elixir_moe", "train", "--json", "--nproc", "2", "--config", str(directory / "run.yaml"))
    assert done.returncode == 0, done.stderr
    return directory / "out", done


def test_a_run_leaves_all_its_files(tiny_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = tiny_run
    names = [
        ".lock",
        "about.json",
        "checkpoints",
        "config.yaml",
        "layout.json",
        "loss.png",
        "metrics.jsonl",
        "plan.json",
        "sample.txt",
        "status.json",
        "summary.json",
        "weights.safetensors",
    ]
    assert sorted(p.name for p in out.iterdir()) == names
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())
    assert json.loads((out / "plan.json").read_text())["rcache_blocks"] == 4
    assert configs.load(out / "config.yaml").model.experts == (2, 4)
    prompt = load_text((), 0.1, 32).validation[:32]
    assert (out / "sample.txt").read_text().startswith(bytes(prompt.tolist()).decode())


def test_metrics_have_a_line_a_step(tiny_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    lines = [json.loads(line) for line in (tiny_run[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["val_loss"] is not None for line in lines] == [False, False, True, False, False, True]
    for line in lines:
        assert {"loss", "grad_norm", "lr", "step_seconds", "tokens_per_second"} <= line.keys()
        assert {"hits", "misses", "evictions", "bytes_fetched", "collective_bytes"} <= line["statistics"].keys()
        assert line["statistics"]["bytes_fetched"]["host"] > 0
        # a micro-batch is 4 samples of 32 bytes over both ranks, and each byte chooses one expert
        assert {name: sum(counts) for name, counts in line["tokens_per_expert"].items()} == {
            "blocks.0.mlp": 128,
            "blocks.1.mlp": 128,
        }
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_report_tells_what_the_files_hold(
    tiny_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, done = tiny_run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary, counted = json.loads(done.stdout), [line["statistics"] for line in lines[1:]]
    picture = tmp_path / "losses.png"
    assert main(["report", "--json", str(out), "--picture", str(picture)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert (told["state"], told["step"], told["events"], told["reason"]) == ("done", 6, [], None)
    assert told["train_loss"] == summary["train_loss"] and told["bigram_loss"] == summary["bigram_loss"]
    assert (told["val_loss"], told["plan"]["rcache_blocks"]) == (summary["val_loss"], 4)
    assert told["best_val_loss"] == min(lines[2]["val_loss"], lines[5]["val_loss"])
    for key in ("step_seconds", "tokens_per_second", "grad_norm"):
        assert told[key] == sorted(line[key] for line in lines[1:])[2]
    asked = sum(s["hits"] + s["misses"] for s in counted)
    assert told["hit_rate"] == sum(s["hits"] for s in counted) / asked
    assert told["bytes_fetched"] == sorted(sum(s["bytes_fetched"].values()) for s in counted)[2]
    moved = [sum(sum(bytes_of.values()) for bytes_of in s["collective_bytes"].values()) for s in counted]
    assert told["collective_bytes"] == sorted(moved)[2] > 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert main(["report", str(out), str(out)]) == 0
    shown = capsys.readouterr().out
    assert "steps taken" in shown and f"{summary['bigram_loss']:.4g}" in shown


def test_the_summary_is_about_the_same_bytes(tiny_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    summary = json.loads(tiny_run[1].stdout)
    text = load_text((), 0.1, 32)
    seen = text.validation[: 2 * 4 * 32 + 1]  # 2 batches of 4 samples of 32 bytes
    assert summary["bigram_loss"] == pytest.approx(Bigram.fit(text.train).loss(seen), rel=1e-12)
    config = configs.load(tiny_run[0] / "config.yaml")
    assert summary["parameters"] == sum(p.numel() for p in GPT(config.model).parameters())
    assert (summary["steps"], summary["ranks"]) == (6, 2)


def test_the_weights_give_the_same_loss_in_one_plain_process(
    tiny_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = tiny_run
    config = configs.load(out / "config.yaml")
    model = GPT(config.model).eval()
    model.load_state_dict(load_file(out / "weights.safetensors"))
    windows = load_text((), 0.1, 32).validation[:257].unfold(0, 33, 32).long()
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    # fp32 sums in another order (experts in one batch, losses in four parts): some tens of roundings of 6e-8 relative
    assert loss == pytest.approx(json.loads(done.stdout)["val_loss"], rel=1e-5)


def test_distributions_of_outputs_are_those_of_a_plain_forward(
    tiny_run: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = tiny_run
    model = GPT(configs.load(out / "config.yaml").model).eval()
    model.load_state_dict(load_file(out / "weights.safetensors"))
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs[name] = output if isinstance(output, torch.Tensor) else output[0]

    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
    windows = load_text((), 0.1, 32).validation[:257].unfold(0, 33, 32).long()
    with torch.no_grad():
        model(windows[:2, :-1])  # rank 0's rows of the first of two batches of 4
    assert main(["report", "--json", str(out), "--activations"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert [one["step"] for one in told["activations"]] == [3, 6]
    last = told["activations"][-1]["modules"]
    parts = ("norm_1", "attention", "norm_2", "mlp")
    layers = [name for i in range(2) for name in (f"blocks.{i}", *(f"blocks.{i}.{part}" for part in parts))]
    assert sorted(last) == sorted([*layers, "tokens", "positions", "norm", "head"])
    for name, row in last.items():
        values = outputs[name].flatten()
        cuts = torch.quantile(values, torch.tensor([0.01, 0.5, 0.99])).tolist()
        plain = [4 * len(values), values.pow(2).mean().sqrt().item(), values.min().item(), *cuts, values.max().item()]
        assert list(row) == ["bytes", "rms", "least", "1%", "median", "99%", "most"]
        # fp32 sums in another order, as above; a value near 0 is off by roundings of the largest
        assert list(row.values()) == pytest.approx(plain, rel=1e-4, abs=1e-5 * values.abs().max().item()), name
    assert main(["report", str(out), "--activations"]) == 0
    assert "blocks.1.attention" in capsys.readouterr().out


def test_quantiles_of_many_values_are_those_of_a_sample() -> None:
    values = torch.linspace(-1.0, 3.0, 300_000).view(100, 3000)
    found = figures(values)
    assert (found["bytes"], found["least"], found["most"]) == (1_200_000, -1.0, 3.0)
    assert found["rms"] == pytest.approx(values.pow(2).mean().sqrt().item(), rel=1e-5)
    assert [found[cut] for cut in ("1%", "median", "99%")] == pytest.approx([-0.96, 1.0, 2.96], abs=1e-3)


@pytest.mark.slow
def test_torchrun_without_the_short_form_repeats_the_run_bit_for_bit(
    tiny_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "elixir_moe", "train")
    done = launch(*torchrun, "--config", str(tiny_run[0] / "config.yaml"), "--run.out", str(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    steps = len((tiny_run[0] / "metrics.jsonl").read_text().splitlines())
    assert said[0].startswith(f"Trains a GPT from random weights: {steps} steps on 2 CPU ranks. ")
    out = tmp_path / "again"
    assert f"  {program()} report {out}  # its losses, speed and memory; --html FILE makes a page" in said
    assert said[-1] == f"  the same command, with --run.steps {2 * steps}  # trains on"
    assert "bigram" in done.stdout and "chunk group" not in done.stdout
    first, again = ((p / "metrics.jsonl").read_text().splitlines() for p in (tiny_run[0], tmp_path / "again"))
    same = ("loss", "grad_norm", "lr", "val_loss", "tokens_per_expert")
    for a, b in zip(map(json.loads, first), map(json.loads, again), strict=True):
        assert {key: a[key] for key in same} == {key: b[key] for key in same}


def run_quickstart() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    return out.getvalue()


@pytest.mark.parametrize("world", [1, 2])
def test_the_quickstart_runs_and_learns(world: int, ranks: Callable[[int], RankPool]) -> None:
    for rank, text in enumerate(ranks(world).run(run_quickstart)):
        losses = [float(loss) for loss in re.findall(rf"rank {rank} step \d: loss ([\d.]+)", text)]
        assert len(losses) == 10 and losses[-1] < losses[0]


def test_the_page_of_patterns_shows_the_quickstart_as_it_is() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "patterns.md").read_text(), re.DOTALL)
    assert block and block[1] == (ROOT / "examples" / "quickstart.py").read_text()
