"""The largest that fits, against trying every size by `solve` and `price` themselves, and the command that says it."""

import json
import random
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import zero_infinity
from elixir_moe.chunks.plan import Plan
from elixir_moe.errors import PlanError
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.solve import Task, device_bytes_for, price, shortage, solve
from elixir_moe.planner.trace import trace
from elixir_tools.cli.main import main
from elixir_tools.fit import strategies
from elixir_tools.fit.largest import Sizes, largest, largest_each
from elixir_tools.fit.search import tile_bytes
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import lm_loss
from elixir_tools.models.presets import of_config
from tests.planner.test_exhaustive import drawn
from tests.support.cases import with_further
from tests.support.every import every

MOST = 32
DISK = {"disk_read": 2.0, "disk_write": 1.0}


def small(layers: int, *, gpus: int = 2, batch: int = 1, checkpoint: Any = "non_reentrant") -> Task:
    """A model of a few layers on a machine so small that each strategy ends at a depth of its own."""
    config = GPTConfig(vocab_size=64, seq_len=16, n_layers=layers, d_model=32, n_heads=2, checkpoint=checkpoint)
    given = of_config("small", config, batch=batch, seq=16)
    return Task(
        profile=trace(given.model, lm_loss, given.sample, world=gpus, compute_dtype=torch.bfloat16),
        hardware=replace(Hardware.named("a100-80g-pcie-x4"), **DISK),
        gpus=gpus,
        capacity_bytes=500_000,
        host_bytes=1_000_000,
        disk_bytes=300_000,
    )


def fits(task: Task, strategy: str) -> bool:
    """Whether a strategy fits, by the search or by the price of the plan that stands for it."""
    name = strategies.LADDER[strategy]
    if name is None:
        try:
            solve(replace(task, disk_bytes=task.disk_bytes if strategy == strategies.OURS_DISK else None))
        except PlanError:
            return False
        return True
    if name == "zero-1":
        whole = sum(2 * p.numel for p in task.profile.params)
        return price(task, Plan.zero2()).size.device_bytes + whole <= task.allowed_bytes
    plan = {"ddp": Plan.ddp(), "zero-2": Plan.zero2(), "zero-2-offload": Plan.offload(rcache_blocks="all")}.get(name)
    tried = [plan] if plan else [Plan.zero3(rcache_blocks=blocks) for blocks in range(1, 6)]
    return any(runs(task, each) for each in tried)


def runs(task: Task, plan: Plan) -> bool:
    try:
        return not shortage(task, price(task, plan).size)
    except PlanError:  # fewer blocks than a step needs
        return False


@pytest.mark.slow
def test_the_deepest_model_fits_and_one_layer_more_does_not() -> None:
    sizes = Sizes(small)
    found = {row.strategy: row for row in largest_each(sizes, 4, MOST, disk=True)}
    for strategy, row in found.items():
        assert row.size and row.size < MOST and not row.more
        assert fits(sizes.at(row.size), strategy) and not fits(sizes.at(row.size + 1), strategy)
        assert row.parameters == sizes.at(row.size).profile.parameters
    depths = [row.size or 0 for row in found.values()]
    assert depths[:4] == sorted(depths[:4]) and max(depths[:5]) < depths[5] < depths[6], "the last hold the most"


@pytest.mark.slow
def test_the_deepest_model_is_the_one_that_trying_all_depths_finds() -> None:
    sizes = Sizes(small)
    tasks = [sizes.at(layers) for layers in range(1, MOST + 1)]
    for row in largest_each(sizes, 4, MOST, disk=True):
        by_hand = [fits(task, row.strategy) for task in tasks]
        size = row.size or 0
        assert every(by_hand[:size]) and not by_hand[size], row.strategy
        # Strategies with one chunk length may waste more space at one depth than at the next.
        beyond = sum(by_hand[size:])
        assert beyond <= 1 and (not beyond or strategies.LADDER[row.strategy]), row.strategy


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["non_reentrant", "none"])
def test_the_largest_batch_is_the_one_that_trying_all_finds(checkpoint: str) -> None:
    at = partial(small, 4, checkpoint=checkpoint)
    sizes = Sizes(lambda batch: at(batch=batch))
    for row in largest_each(sizes, 3, 40, disk=False):
        if row.strategy == strategies.OURS_DISK:
            assert row.size is None, "there is no disk"
            continue
        assert row.size is not None and not fits(at(batch=row.size + 1), row.strategy)
        assert not row.size or fits(at(batch=row.size), row.strategy)


@pytest.mark.parametrize("seed", range(20))
def test_any_falling_function_is_searched_with_few_tries(seed: int) -> None:
    rng = random.Random(seed)
    most, start = rng.randint(1, 3000), rng.randint(1, 64)
    steps = [rng.choice([0, 1, 1000]) for _ in range(most)]
    begin = rng.randint(-5, sum(steps) + 5)
    values = [begin - sum(steps[:size]) for size in range(1, most + 1)]
    tried: list[int] = []

    def spare(size: int) -> int:
        tried.append(size)
        return values[size - 1]

    assert largest(spare, start, most) == sum(value >= 0 for value in values)
    assert len(tried) <= 12 + 3 * most.bit_length() and len(tried) == len({*tried})


def test_a_straight_line_takes_three_more_tries_than_the_doubling() -> None:
    tried: list[int] = []

    def spare(size: int) -> int:
        tried.append(size)
        return 70_000 - 100 * size

    assert largest(spare, 16, 2**20) == 700
    assert len(tried) <= 7 + 3


@pytest.mark.parametrize("seed", with_further(range(60), range(8)))
def test_the_least_device_memory_says_when_the_search_succeeds(seed: int) -> None:
    task = drawn(random.Random(seed))
    assert solvable(task) is (device_bytes_for(task) <= task.allowed_bytes)


@pytest.mark.parametrize("seed", [3, 7])
def test_tiles_are_tried_where_a_step_waits_for_fetches(seed: int) -> None:
    task = drawn(random.Random(seed))
    found = solve(task)
    assert found.plan.offloaded and not found.seconds.stall
    assert tile_bytes(task, found) is None, "blocks leave enough memory for state"
    waiting = replace(found, seconds=replace(found.seconds, stall=0.06 * found.seconds.step))
    assert tile_bytes(task, waiting) is not None


def solvable(task: Task) -> bool:
    try:
        solve(task)
    except PlanError:
        return False
    return True


TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
MACHINE = ["--hardware", "dgx-2-v100-32g-x16", "--gpus", "16"]


@pytest.mark.parametrize(
    ("largest", "kept", "budget"),
    [
        pytest.param("model", ["--batch", "1", "--seq", "16"], "2MiB", marks=pytest.mark.slow),
        pytest.param("batch", ["--seq", "16"], "8MiB", marks=pytest.mark.slow),
        pytest.param("seq", ["--batch", "1"], "8MiB", marks=pytest.mark.slow),
    ],
)
def test_the_command_answers_and_draws(
    largest: str, kept: list[str], budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shipped = resources.files("elixir_moe.planner").joinpath("machines", "dgx-2-v100-32g-x16.json").read_text()
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({**json.loads(shipped), "cpu_bytes": 16 * 150_000, "disk_bytes": 16 * 100_000}))
    picture = tmp_path / "largest.png"
    arguments = [str(tmp_path), "--largest", largest, *kept, "--budget", budget, "--gpus", "16"]
    assert main(["plan", "--hardware", str(machine), *arguments, "--picture", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    rows = {row["strategy"]: row["size"] for row in found["rows"]}
    assert [*rows] == [*strategies.LADDER] and 0 < rows["ddp"] <= rows["zero-2"] <= rows["ours, host"] <= rows[
        "ours, disk"
    ]
    if largest == "seq":
        assert rows["ours, host"] > 64, "positions grow with the sequence"


@pytest.mark.slow
def test_the_document_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "fit.md").read_text()
    command = "plan opt-13b --hardware dgx-2-v100-32g-x16 --gpus 16 --largest model --batch 1 --seq 1024"
    assert main(command.split()) == 0
    *shown, _searched = capsys.readouterr().out.splitlines()
    assert "\n    ".join([f"    $ elixir-moe {command}", *shown]) in text
    billions = {line[:14].strip(): int(line[24:43].replace(",", "")) / 1e9 for line in shown[2:]}
    paper = {row["strategy"]: float(row["billions"]) for row in zero_infinity.printed("figure-6a")}
    for strategy in ("ddp", "zero-2", "zero-offload"):  # at other widths than the paper's
        assert billions[strategy] == pytest.approx(paper[strategy], rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opt-13b", "--largest", "batch", "--batch", "1", "--seq", "8"], "--largest batch finds it"),
        (["opt-13b", "--largest", "model", "--quick"], "opt-13b is not one"),
        (["qwen3-8b", "--largest", "model", "--quick"], "leave out --quick, or --largest model"),
        (["moe-1t", "--largest", "model", "--batch", "1", "--seq", "8"], "layers of several kinds"),
        (["opt-13b", "--largest", "model", "--batch", "1", "--seq", "8", "--compare"], "leave one of them"),
        (["opt-13b", "--batch", "1", "--seq", "8", "--picture", "a.png"], "--picture draws what --largest"),
        (["opt-13b", "--largest", "width", "--batch", "1", "--seq", "8"], "invalid choice: 'width'"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *MACHINE, *arguments, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1 and "ConfigError" in err
