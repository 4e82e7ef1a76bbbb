"""`plan` prices what `sft` runs: one table of defaults, and a printed command whose step is the one that was priced."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_moe.chunks.events import StepEvent
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.trace import trace
from elixir_moe.wrapping.tiling import tile_for
from elixir_tools.cli.arguments import add_plan
from elixir_tools.cli.main import main
from elixir_tools.finetune.defaults import LEARNING_RATE, SFT
from elixir_tools.fit.tasks import choose_way, model_of
from tests.tools.fit.test_will_it_fit import MIXTURE

DENSE = {key: value for key, value in MIXTURE.items() if "expert" not in key and key != "moe_intermediate_size"}
IN_TILES = [
    "--lora",
    "r=4,targets=q_proj",
    "--batch",
    "1",
    "--seq",
    "64",
    "--budget",
    "20 MiB",
    "--checkpointing",
    "none",
]
CONFIGS: dict[str, dict[str, Any]] = {
    "mixture": MIXTURE,
    "wide": MIXTURE | {"num_experts": 256, "num_hidden_layers": 2},
    "dense": DENSE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
SCHEDULE = ["--use_cpu", "true"]


def test_defaults_of_sft_are_those_of_the_table() -> None:
    from elixir_tools.finetune.arguments import parse

    given = parse("sft", ["--output_dir", "out", *SCHEDULE])
    found: dict[str, Any] = {"plan": given.plan.kind, "quantize": given.scheme, "tile": given.tile}
    for name in SFT.keys() - found:
        owner, field = (given.plan, name.removeprefix("plan_")) if name.startswith("plan_") else (given.training, name)
        found[name] = getattr(owner if hasattr(owner, field) else given.model, field)
    assert found == SFT
    assert given.training.learning_rate == LEARNING_RATE["full"]
    adapted = parse("sft", ["--output_dir", "out", *SCHEDULE, "--use_peft"])
    assert adapted.training.learning_rate == LEARNING_RATE["adapters"]


def step_of_sft(words: list[str]) -> Profile:
    """The step that `sft` would train, traced."""
    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.run import _model, _plan

    given = parse("sft", [*words, *SCHEDULE])
    model = _model(given, given.model.model_name_or_path)
    if given.training.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    asked = _plan(given, model.train())
    return trace(model, asked.step, asked.sample, compute_dtype=torch.bfloat16 if given.training.bf16 else None)


def step_of_plan(words: list[str], tile: int | None) -> Profile:
    """The step that `plan` prices."""
    parser = argparse.ArgumentParser()
    add_plan(parser)
    known = parser.parse_args(words)
    choose_way(known)
    known.batch = known.batch or SFT["per_device_train_batch_size"]
    known.seq = known.seq or SFT["max_length"]
    given = model_of(known, None)
    if tile is not None:
        tile_for(given.model, tile, 2)
    return trace(given.model, given.step, given.sample, compute_dtype=torch.bfloat16)


def moments(step: Profile) -> list[StepEvent]:
    """What happens to parameters; the wrappers of peft have none."""
    return [event for event in step.events if event.params or step.parts[event.module].params]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("mixture", ["--full"]),
        ("mixture", ["--qlora"]),
        ("wide", IN_TILES),
        ("dense", ["--lora"]),
        ("dense", ["--qlora", "r=4", "--checkpointing", "none"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_printed_command_has_the_step_that_was_priced(
    name: str, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    words = [str(tmp_path), "--gpu", "rtx-4090", "--ram", "2 GiB", *asked]
    assert main(["plan", *words, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    _, verb, *told = shlex.split(next(line for line in found["answer"] if line.startswith("By command: "))[12:])
    assert verb == "sft" and ("--tile" in told) == (name == "wide")
    size = None if found["tile"] is None else int(found["tile"].split()[0]) * 1024
    priced, trained = step_of_plan(words, size), step_of_sft(told)
    for field in ("params", "tokens", "flops", "traffic_bytes", "activation_bytes", "kept", "kept_peaks"):
        assert getattr(trained, field) == getattr(priced, field), field
    assert moments(trained) == moments(priced)
