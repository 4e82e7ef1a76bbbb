"""Supervision, control.yaml, signals and records, through both doors: `train` and TRL's trainers under a plan."""

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elixir_moe.errors import ConfigError
from elixir_moe.planner import cost
from elixir_tools.cli.main import main
from elixir_tools.finetune.smaller import Step, command_with, smaller, that_fits
from tests.support.doors import DOORS, LR, STEPS, by_sft
from tests.support.every import every, same_tensors
from tests.support.ranks import RankPool
from tests.tools.finetune.test_finetune import LORA, saved

Ranks = Callable[[int], RankPool]
RESUME = {"train": [], "sft": ["--resume_from_checkpoint", "true"]}
LAST = {"train": 0.1, "sft": 1 / STEPS}
"""Share of the rate that the schedule has in the last step."""
both_doors = pytest.mark.parametrize("door", DOORS)


@pytest.mark.fault(13)
@both_doors
def test_a_nan_on_one_rank_stops_all_with_a_name_and_the_state_apart(door: str, ranks: Ranks, tmp_path: Path) -> None:
    found = DOORS[door](ranks(2), tmp_path, {4: "poison"}, 1, 2, {})
    assert found.exit_code == 3 and "step 5: the loss of rank" in found.reason and "is not finite" in found.reason
    assert found.status["state"] == "failed" and found.status["step"] == 4 + (door == "train")
    assert found.checkpoints == [2, 4] and len(found.apart) == 1
    assert found.events[-1][0] == "stopped" and "apart" in found.events[-1][1]


@pytest.mark.fault(13, 14)
@both_doors
@pytest.mark.parametrize("policy", ["skip", "back"])
def test_a_nan_may_be_skipped_or_gone_back_from(door: str, policy: str, ranks: Ranks, tmp_path: Path) -> None:
    found = DOORS[door](ranks(2), tmp_path, {3: "poison"}, 0, 2, {"on_nan": policy})
    assert found.exit_code == 0 and [line["step"] for line in found.metrics] == [*range(1, STEPS + 1)]
    kind, text = found.events[0]
    if policy == "skip":
        assert kind == "skipped" and "the loss of rank" in text and found.metrics[3]["loss"] is None
        return
    assert kind == "went back" and "back to step 2, at 0.5 of the learning rate, without the batches [4]" in text
    whole = DOORS[door](ranks(2), tmp_path / "whole", {}, 0, 100, {}).metrics
    assert [line["lr"] for line in found.metrics[2:]] == pytest.approx([line["lr"] / 2 for line in whole[2:]])
    assert [line["loss"] for line in found.metrics[:2]] == [line["loss"] for line in whole[:2]]


@pytest.mark.fault(14)
@both_doors
def test_losses_that_stay_high_stop_the_run_with_its_state_apart(door: str, ranks: Ranks, tmp_path: Path) -> None:
    found = DOORS[door](
        ranks(2), tmp_path, {3: "burst"}, 0, 2, {"window": "3", "patience": "2", "straggler_score": "1e6"}
    )
    assert found.exit_code == 3 and "the run diverges since step 4; step 5: the loss is" in found.reason
    assert [kind for kind, _ in found.events] == ["loss", "loss", "stopped"]
    assert found.checkpoints == [2, 4] and len(found.apart) == 1 and found.status["state"] == "failed"


def test_a_fine_tuning_whose_updates_begin_in_backward_goes_back(ranks: Ranks, tmp_path: Path) -> None:
    watch = {"on_nan": "back", "on_divergence": "note", "scales_every": "null"}
    found = by_sft(ranks(2), tmp_path, {3: "poison"}, 0, 2, watch, "--max_grad_norm", "0")
    assert found.exit_code == 0 and [kind for kind, _ in found.events] == ["went back"]
    assert "the gradient of" in found.events[0][1], "weights cannot be looked at any more"
    assert [line["step"] for line in found.metrics] == [*range(1, STEPS + 1)]


def test_tokens_of_experts_are_counted_for_the_records(ranks: Ranks, tmp_path: Path) -> None:
    found = by_sft(ranks(2), tmp_path, {}, 0, 100, {"window": "2"}, "--max_steps", "2", model="Qwen3Moe")
    for line in found.metrics:
        tokens = line["tokens_per_second"] * line["step_seconds"]
        assert len(line["tokens_per_expert"]) == 2
        assert every(sum(counts) == pytest.approx(2 * tokens) for counts in line["tokens_per_expert"].values())


@both_doors
def test_a_slow_rank_is_named_with_its_host(door: str, ranks: Ranks, tmp_path: Path) -> None:
    found = DOORS[door](ranks(2), tmp_path, {}, 0, 100, {"window": "2", "straggler_score": "1.0000001"})
    texts = [text for kind, text in found.events if kind == "straggler"]
    assert texts and every(f" ({socket.gethostname()}, CPU) is slow: " in text for text in texts), found.events


@both_doors
def test_control_yaml_changes_saves_and_stops(door: str, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "control.yaml").write_text("lr: 0.001\nstop: true\n")
    at = {2: "control: {lrr: 1}", 3: "control: {save: true, clip_norm: 0.5}", 4: "control: {stop: true}"}
    found = DOORS[door](ranks(2), tmp_path, at, 0, 100, {})
    assert found.exit_code == 0 and "stopped" in found.reason and found.status["state"] == "stopped"
    texts = [text for _, text in found.events]
    assert texts[0] == f"lr is 0.001 from step 1 on, it was {LR:g}" and "did you mean 'lr'" in texts[1]
    assert texts[2] == "clip_norm is 0.5 from step 5 on, it was 1.0"
    assert found.checkpoints == [4, 5] and [line["step"] for line in found.metrics] == [1, 2, 3, 4, 5]
    assert found.metrics[0]["lr"] == pytest.approx(0.001)
    (tmp_path / "out" / "control.yaml").unlink()
    again = DOORS[door](ranks(2), tmp_path, {}, 0, 100, {}, *RESUME[door])
    assert again.exit_code == 0 and again.metrics[-1]["lr"] == pytest.approx(0.001 * LAST[door]), "the rate is kept"


@both_doors
def test_what_control_yaml_has_changed_holds_after_going_back(door: str, ranks: Ranks, tmp_path: Path) -> None:
    at = {4: "control: {lr: 0.001, clip_norm: 0.5}", 5: "poison"}
    found = DOORS[door](ranks(2), tmp_path, at, 0, 4, {"on_nan": "back"})
    assert [kind for kind, _ in found.events] == ["control", "control", "went back"], found.events
    assert found.metrics[-1]["lr"] == pytest.approx(0.001 * LAST[door] / 2)


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
@both_doors
def test_a_signal_saves_and_ends_all_ranks(door: str, number: str, code: int, ranks: Ranks, tmp_path: Path) -> None:
    found = DOORS[door](ranks(2), tmp_path, {3: number}, 1, 100, {})
    assert found.exit_code == code and found.status["state"] == "stopped" and found.checkpoints == [4]


def test_a_stopped_fine_tuning_resumes_with_the_same_bits_and_records(ranks: Ranks, tmp_path: Path) -> None:
    unbroken = by_sft(ranks(2), tmp_path, {}, 0, 100, {}, *LORA)
    weights = saved(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "unbroken")
    stopped = by_sft(ranks(2), tmp_path, {2: "SIGTERM"}, 0, 100, {}, *LORA)
    assert stopped.checkpoints == [3] and not list((tmp_path / "out").glob("*.safetensors"))
    resumed = by_sft(ranks(2), tmp_path, {}, 0, 100, {}, *LORA, "--resume_from_checkpoint", "true")
    again = saved(tmp_path / "out")
    assert same_tensors(weights, again)
    assert [kind for kind, _ in resumed.events] == ["stopped", "resumed"] and resumed.status["state"] == "done"
    for name in ("step", "loss", "grad_norm", "lr"):
        assert [line[name] for line in resumed.metrics] == [line[name] for line in unbroken.metrics], name


def test_a_run_of_trl_has_the_records_of_a_report(ranks: Ranks, tmp_path: Path) -> None:
    from elixir_tools.report import history, page

    evaluated = ["--eval_strategy", "steps", "--eval_steps", "3", "--dataset_test_split", "train"]
    found = by_sft(ranks(2), tmp_path, {}, 0, 100, {"window": "2"}, *LORA, *evaluated, "--profile_step", "2")
    account = history.account(tmp_path / "out")
    assert account["state"] == "done" and account["step"] == STEPS and account["bytes_fetched"] > 0
    assert [line["step"] for line in found.metrics if line["val_loss"] is not None] == [3, 6]
    assert account["val_loss"] == found.metrics[-1]["val_loss"] and account["tokens_per_second"] > 0
    story = history.story(tmp_path / "out")
    assert story.planned_bytes["host"]["shards"] > 0 and story.profiled_step == 2 and story.spans
    whole = {tier: sum(kinds.values()) for tier, kinds in story.planned_bytes.items()}
    assert every(line["planned_bytes"] == whole and line["held_bytes"].keys() == whole.keys() for line in found.metrics)
    page.write(tmp_path / "page.html", [story])


@pytest.mark.fault(14)
def test_a_divergence_of_preferences_is_noted_and_that_of_sft_stops(tmp_path: Path) -> None:
    from elixir_tools.finetune.arguments import parse

    common = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "out"]
    watched = {kind: parse(kind, common).watch for kind in ("sft", "dpo", "grpo")}
    assert {kind: watch and watch.on_divergence for kind, watch in watched.items()} == {
        "sft": "stop", "dpo": "note", "grpo": "note"
    }  # fmt: skip
    assert parse("sft", [*common, "--supervise", "false"]).watch is None
    for words, named in (
        (["--supervise_on_nan", "halt"], "--supervise_on_nan"),
        (["--supervise", "false", "--supervise_window", "9"], "--supervise_window"),
    ):
        with pytest.raises(ConfigError, match=named):
            parse("sft", [*common, *words])


def test_an_output_directory_with_files_of_others_is_left_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("mine: true\n")
    found = by_sft(ranks(2), tmp_path, {}, 0, 100, {})
    assert found.exit_code == 1 and "config.yaml" in found.reason and "--output_dir" in found.reason
    assert (tmp_path / "out" / "config.yaml").read_text() == "mine: true\n"


def test_out_of_memory_ends_with_the_command_of_a_smaller_step(ranks: Ranks, tmp_path: Path) -> None:
    found = by_sft(ranks(1), tmp_path, {3: "hunger"}, 0, 2, {}, "--max_length", "32")
    assert found.exit_code == 1 and "out of memory in step 4 on rank 0: CUDA out of memory" in found.reason
    assert found.status["state"] == "failed" and found.events[-1][0] == "out of memory"
    assert found.changes == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2"),
    }
    words = [word for name, value in found.changes.items() for word in (f"--{name}", str(value))]
    again = by_sft(ranks(1), tmp_path, {3: "hunger"}, 0, 2, {}, "--max_length", "32", *words)
    assert again.exit_code == 0 and again.metrics[-1]["step"] == STEPS
    whole = by_sft(ranks(1), tmp_path / "whole", {}, 0, 2, {}, "--max_length", "32")
    assert [line["loss"] for line in again.metrics] == pytest.approx([line["loss"] for line in whole.metrics], rel=1e-5)


def test_a_smaller_step_is_the_first_whose_activations_fit() -> None:
    """A step needs 4 bytes a token, and the sums of several micro-batches 10 bytes more."""
    step = Step(rows=6, accumulation=1, length=512)
    assert [(each.rows, each.accumulation, each.length) for each in smaller(step)] == [
        (3, 2, 512), (1, 6, 512), (1, 6, 256), (1, 6, 128)
    ]  # fmt: skip

    def profiled(each: Step) -> Any:
        return SimpleNamespace(activation_bytes=4000 * each.rows * each.length, buffer_bytes=0, exchanges=())

    def held(each: Step) -> int:
        return 1000 if each.accumulation == 1 else 2000

    def fits(each: Step, capacity: int) -> bool:
        return cost.allowed_bytes(profiled(each), capacity) >= held(each)

    for capacity in range(10**5, 3 * 10**7, 10**5):
        found = that_fits(step, profiled, held, capacity)
        if fits(step, capacity):  # it was said to fit, and did not
            assert found is not None and found.rows == 3
        else:
            assert found == next((each for each in smaller(step) if fits(each, capacity)), None), capacity


def test_a_command_takes_other_values_however_they_were_given() -> None:
    words = ["sft", "--max_length=64", "--per-device-train-batch-size", "4", "--bf16", "true"]
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 32}
    assert shlex.join(command_with(words, changes)) == (
        "sft --bf16 true --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_length 32"
    )


def test_inputs_of_a_step_are_kept_no_longer_than_the_step() -> None:
    from elixir_moe.hf.steps import Steps

    steps = Steps(None, torch.device("cpu"))
    for step in (0, 0, 1, 1):  # nobody asks for the facts
        steps.begin(step)
        steps.record_inputs(
            {"input_ids": torch.full((2, 3), step), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
        )
        steps.end(torch.tensor(1.0))
    assert [int(inputs["input_ids"][0, 0]) for inputs in steps.inputs] == [1, 1]
    assert [int(count) for count in steps._tokens] == [5, 5]


def test_a_command_says_why_a_run_ended_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from elixir_tools.finetune.callbacks import DivergedError
    from elixir_tools.finetune.run import OutOfMemory

    words = ["sft", "--use_cpu", "true", "--bf16", "false", "--output_dir", "out"]
    given = [*words, "--per_device_train_batch_size=8"]
    for error, code, said in (
        (DivergedError("step 5: the loss of rank 0 is nan"), 3, "elixir-moe: step 5: the loss of rank 0 is nan"),
        (OutOfMemory("out of memory in step 4", {"per_device_train_batch_size": 4}), 1,
         f"{shlex.join(words)} --per_device_train_batch_size 4"),
    ):  # fmt: skip

        def ended(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("elixir_tools.finetune.run.finetune", ended)
        assert main(given) == code
        assert capsys.readouterr().err.splitlines()[-1].strip().endswith(said)


def test_the_losses_of_an_evaluation_are_those_of_its_data_sets() -> None:
    from elixir_tools.finetune.callbacks import _evaluated

    metrics = {
        "eval_loss": 3.9,
        "eval_aux_loss": 2.0,
        "eval_runtime": 1.0,
        "eval_new_loss": 4.0,
        "eval_new_runtime": 1.0,
    }
    assert _evaluated(metrics) == ["eval", "eval_new"]
