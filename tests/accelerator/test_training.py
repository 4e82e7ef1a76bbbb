"""Training on the accelerator of threads: every plan takes the steps of plain torch, whichever stream is late.

The cases are those of `tests.gpu`. ``make test-accelerator SEEDS=n`` runs all of them: each model, plan and dtype takes
n steps, in runs of three, and each other test has n runs, dealt out over its cases. Each run has a seed of its own.
"""

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import lm_loss
from tests.accelerator.device import NAME, delayed, limited
from tests.gpu.test_quantized import CASES as QUANTIZED
from tests.gpu.test_quantized import adapts_as_plain_torch
from tests.support import gpu_cases
from tests.support.cases import with_further
from tests.support.gpu_cases import LOOPS, MODELS, NEAR, PLANS, STEPS
from tests.support.ranks import RankPool

FP32, BF16 = torch.float32, torch.bfloat16
LATE = {"compute": (1000, 0), "others": (0, 1500), "random": (1000, 500)}
"""Microseconds by which the default stream is late at most, and by which all others are."""
SEEDS = int(os.environ.get("ACCELERATOR_SEEDS", "1"))
MIB = 1 << 20
QUICK_LOOPS = [(2, "non_reentrant")]

CASES = [*itertools.product(MODELS, PLANS, (FP32, BF16))]
CASES += itertools.product(("adapted",), ("zero3", "offload, all on disk"), (FP32, BF16))
QUICK = [
    ("dense", "zero3", BF16, "compute"),
    ("mixture", "offload, some on disk", FP32, "random"),
    ("mixture", "offload, values on disk", BF16, "compute"),
    ("mixture", "zero3, inputs on the host", FP32, "compute"),
    ("dense", NEAR, BF16, "compute"),
    ("adapted", "offload, all on disk", BF16, "others"),
]


def with_each_delay(cases: Any) -> list[Any]:
    """Each case with each mode of delay."""
    return [(*case, late) for case in cases for late in LATE]


def seeds(cases: int) -> range:
    """The seeds of one of so many cases, which share them."""
    return range(max(1, math.ceil(SEEDS / cases)))


@functools.cache
def plain(config: GPTConfig, dtype: torch.dtype, accumulation: int) -> dict[str, Any]:
    """(rank) What plain torch makes of the steps on the CPU."""
    return gpu_cases.plain(config, dtype, accumulation, "cpu")


def trains(model: str, plan: str, dtype: torch.dtype, run: int) -> str:
    """(rank) Takes the steps of plain torch, each run with other delays; returns a hash of all that came out."""
    accumulation, checkpoint = LOOPS[run % len(LOOPS)]
    config = gpu_cases.config_of(model, dtype, checkpoint)
    late = [*LATE.values()][run // len(LOOPS) % len(LATE)]
    if plan == "auto":  # measures the machine, unless an earlier run did, while no stream is late
        gpu_cases.close(gpu_cases.wrap(config, PLANS[plan](), dtype, NAME)[1])
    with delayed(*late, seed=run):
        result = gpu_cases.wrapped(config, PLANS[plan](), dtype, accumulation, NAME)
    torch.accelerator.empty_cache()
    case = f"{model}, {plan}, {dtype}, {accumulation} micro-batches, {checkpoint}, run {run}"
    gpu_cases.compare(result, plain(config, dtype, accumulation), dtype, case)
    return hashed(result)


def hashed(result: dict[str, Any]) -> str:
    """A hash of losses, norms and parameters to the bit."""
    found = hashlib.sha256(repr((result["losses"], result["norms"])).encode())
    for _, value in sorted(result["state"].items()):
        found.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def late_in(late: str, seed: int, body: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """(rank) Runs `body` on the accelerator while streams are late."""
    with delayed(*LATE[late], seed):
        body(*arguments, **options)
    torch.accelerator.empty_cache()


def trains_on_two_streams(plan: str) -> None:
    """(rank) The second micro-batch of a step runs on a stream of its own, and nobody waits for it.

    It waits for the step before, as in plain torch: weights at home on the device are read where the step writes them.
    """
    streams = torch.accelerator.current_stream(), torch.Stream(device=NAME)
    config = gpu_cases.config_of("dense", FP32)
    model, optimizer = gpu_cases.wrap(config, PLANS[plan](), FP32, NAME)
    batches = [[gpu_cases.tokens(step, micro, NAME) for micro in range(2)] for step in range(gpu_cases.STEPS)]
    losses, norms = [], []
    for batch in batches:
        for micro, stream in zip(batch, streams, strict=True):
            with stream:
                losses.append(lm_loss(model, micro) / len(streams))
                losses[-1].backward()
        norms.append(optimizer.clip_grad_norm_(gpu_cases.CLIP))
        optimizer.step()
        streams[1].wait_stream(streams[0])
        optimizer.zero_grad()
    result: dict[str, Any] = {"losses": [loss.item() for loss in losses], "norms": [norm.item() for norm in norms]}
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    gpu_cases.compare(result, gpu_cases.plain(config, FP32, len(streams), "cpu"), FP32, f"{plan}, two streams")


@pytest.mark.parametrize(
    ("plan", "late"), with_further(with_each_delay([("zero3",), ("offload",)]), [("offload", "random")])
)
def test_a_model_computes_on_two_streams(threads: Any, plan: str, late: str) -> None:
    for seed in seeds(2 * len(LATE)):
        threads(1).run(late_in, late, seed, trains_on_two_streams, plan)


def trains_on_after_out_of_memory(plan: str) -> None:
    """(rank) A batch that does not fit between two steps changes nothing."""
    config = gpu_cases.config_of("mixture", FP32)
    model, optimizer = gpu_cases.wrap(config, PLANS[plan](), FP32, NAME)
    result = gpu_cases.train(model, optimizer, range(1), 1, NAME)
    large = gpu_cases.tokens(0, 0, NAME).repeat(64, 1)
    torch.accelerator.empty_cache()
    with limited(torch.accelerator.memory_reserved() + MIB), pytest.raises(RuntimeError) as raised:
        lm_loss(model, large).backward()
    assert is_out_of_memory(raised.value), raised.value
    optimizer.zero_grad()
    rest = gpu_cases.train(model, optimizer, range(1, gpu_cases.STEPS), 1, NAME)
    result = {name: [*values, *rest[name]] for name, values in result.items()}
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    gpu_cases.compare(result, gpu_cases.plain(config, FP32, 1, "cpu"), FP32, f"{plan}, out of memory")


def wraps_what_does_not_fit(plan: str) -> None:
    """(rank) Wrapping says what the device lacks."""
    torch.accelerator.empty_cache()
    with limited(torch.accelerator.memory_reserved() + MIB // 8), pytest.raises(em.TierError, match="device memory"):
        gpu_cases.wrap(gpu_cases.config_of("mixture", FP32), PLANS[plan](), FP32, NAME)


@pytest.mark.parametrize("body", [trains_on_after_out_of_memory, wraps_what_does_not_fit])
@pytest.mark.parametrize("plan", with_further(["zero3", "offload"], ["zero3"]))
def test_the_device_is_out_of_memory(threads: Any, body: Callable[[str], None], plan: str) -> None:
    threads(1).run(late_in, "random", 0, body, plan)


@pytest.mark.parametrize(("model", "plan", "dtype", "late"), QUICK)
def test_plans_train_as_plain_torch(threads: Any, model: str, plan: str, dtype: torch.dtype, late: str) -> None:
    body = gpu_cases.trains_as_plain_torch
    threads(1).run(late_in, late, 0, body, model, plan, dtype, NAME, oracle="cpu", loops=QUICK_LOOPS)


@pytest.mark.slow  # a further case: all plans, loops and delays
@pytest.mark.parametrize(("model", "plan", "dtype"), CASES)
def test_every_plan_trains_as_plain_torch(threads: Any, model: str, plan: str, dtype: torch.dtype) -> None:
    trains_alike(threads(1), model, plan, dtype)


@pytest.mark.slow  # a further case: more delays
@pytest.mark.parametrize("plan", ["zero3", "offload", NEAR])
def test_every_run_of_two_ranks_trains_as_plain_torch(threads: Any, plan: str) -> None:
    trains_alike(threads(2), "mixture", plan, FP32)


def trains_alike(pool: RankPool, model: str, plan: str, dtype: torch.dtype) -> None:
    """Runs of the same loop differ in no bit, whatever is late."""
    hashes: dict[int, list[str]] = {}
    for run in range(max(len(LOOPS) * len(LATE), math.ceil(SEEDS / STEPS))):
        found = pool.run(trains, model, plan, dtype, run)
        assert found == hashes.setdefault(run % len(LOOPS), found), run


@pytest.mark.parametrize("plan", ["zero3", NEAR])
def test_two_ranks_train_as_plain_torch(threads: Any, plan: str) -> None:
    body = gpu_cases.trains_as_plain_torch
    threads(2).run(late_in, "random", 0, body, "mixture", plan, FP32, NAME, oracle="cpu", loops=QUICK_LOOPS)


@pytest.mark.parametrize("late", with_further(LATE, ["random"]))
def test_what_is_saved_is_loaded_under_another_plan(threads: Any, late: str, tmp_path: Path) -> None:
    for seed in seeds(len(LATE)):
        folder = str(tmp_path / f"saved-{seed}")
        threads(1).run(late_in, late, seed, gpu_cases.saves_and_loads, gpu_cases.DISK, "zero3", NAME, folder)


@pytest.mark.parametrize(
    ("family", "scheme", "plan", "late"),
    with_further(with_each_delay(QUANTIZED), [("qwen3-moe", "nf4", "disk", "compute")]),
)
def test_adapters_of_quantized_weights_train_as_in_plain_torch(
    threads: Any, family: str, scheme: str, plan: str, late: str
) -> None:
    for seed in seeds(len(QUANTIZED) * len(LATE)):
        threads(1).run(late_in, late, seed, adapts_as_plain_torch, family, scheme, plan, NAME)


def trains_in_one_pass() -> None:
    """(rank) The two micro-batches of a step pass each layer together."""
    config = gpu_cases.config_of("dense", FP32)
    model, optimizer = gpu_cases.wrap(config, PLANS["offload"](), FP32, NAME)
    layout = em.inspect(model).layout
    assert em.inspect(model).plan.blocks(layout) < layout.most_blocks, "weights leave the device"
    losses, norms = [], []
    for step in range(gpu_cases.STEPS):
        batches = [gpu_cases.tokens(step, micro, NAME) for micro in range(2)]
        losses += [loss / 2 for loss in em.accumulate(model, lm_loss, batches)]
        norms.append(optimizer.clip_grad_norm_(gpu_cases.CLIP))
        optimizer.step()
        optimizer.zero_grad()
    result: dict[str, Any] = {"losses": [loss.item() for loss in losses], "norms": [norm.item() for norm in norms]}
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    gpu_cases.compare(result, gpu_cases.plain(config, FP32, 2, "cpu"), FP32, "one pass")


@pytest.mark.parametrize("late", with_further(LATE, ["random"]))
def test_micro_batches_pass_each_layer_together(threads: Any, late: str) -> None:
    for seed in seeds(len(LATE)):
        threads(1).run(late_in, late, seed, trains_in_one_pass)
