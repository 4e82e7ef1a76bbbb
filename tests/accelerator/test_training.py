"""Training on the accelerator of threads: every plan takes the steps of plain torch, whichever stream is late.

The cases are those of `tests.gpu`. ``make test-accelerator SEEDS=n`` runs all of them, each with n seeds of delays.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_tools.models.gpt import lm_loss
from tests.accelerator.device import NAME, delayed, limited
from tests.gpu.test_quantized import CASES as QUANTIZED
from tests.gpu.test_quantized import adapts_as_plain_torch
from tests.support import gpu_cases
from tests.support.cases import with_further
from tests.support.gpu_cases import LOOPS, MODELS, PLANS

FP32, BF16 = torch.float32, torch.bfloat16
LATE = {"compute": (500, 0), "others": (0, 1500), "random": (500, 500)}
"""Microseconds by which the default stream is late at most, and by which all others are."""
SEEDS = range(int(os.environ.get("ACCELERATOR_SEEDS", "1")))
MIB = 1 << 20
QUICK_LOOPS = [(2, "non_reentrant")]

CASES = [*itertools.product(MODELS, PLANS, (FP32, BF16))]
CASES += itertools.product(("adapted",), ("zero3", "offload, all on disk"), (FP32, BF16))
QUICK = [
    ("dense", "zero3", BF16, "compute"),
    ("mixture", "offload, some on disk", FP32, "random"),
    ("mixture", "offload, values on disk", BF16, "compute"),
    ("mixture", "zero3, inputs on the host", FP32, "compute"),
    ("adapted", "offload, all on disk", BF16, "others"),
]


def every(cases: Any) -> list[Any]:
    """Each case with each mode of delay."""
    return [(*case, late) for case in cases for late in LATE]


def late_in(late: str, seed: int, body: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """(rank) Runs `body` on the accelerator while streams are late."""
    with delayed(*LATE[late], seed):
        body(*arguments, **options)
    torch.accelerator.empty_cache()


def trains_on_two_streams(plan: str) -> None:
    """(rank) The second micro-batch of a step runs on a stream of its own, and nobody waits for it."""
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
        optimizer.zero_grad()
    result: dict[str, Any] = {"losses": [loss.item() for loss in losses], "norms": [norm.item() for norm in norms]}
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    gpu_cases.compare(result, gpu_cases.plain(config, FP32, len(streams), "cpu"), FP32, f"{plan}, two streams")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("plan", "late"), with_further(every([("zero3",), ("offload",)]), [("offload", "random")]))
def test_a_model_computes_on_two_streams(threads: Any, plan: str, late: str, seed: int) -> None:
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
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("model", "plan", "dtype", "late"), every(CASES))
def test_every_plan_trains_as_plain_torch(
    threads: Any, model: str, plan: str, dtype: torch.dtype, late: str, seed: int
) -> None:
    body = gpu_cases.trains_as_plain_torch
    threads(1).run(late_in, late, seed, body, model, plan, dtype, NAME, oracle="cpu", loops=LOOPS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("plan", "late"), with_further(every([("zero3",), ("offload",)]), [("zero3", "random")]))
def test_two_ranks_train_as_plain_torch(threads: Any, plan: str, late: str, seed: int) -> None:
    body = gpu_cases.trains_as_plain_torch
    threads(2).run(late_in, late, seed, body, "mixture", plan, FP32, NAME, oracle="cpu", loops=QUICK_LOOPS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", with_further(LATE, ["random"]))
def test_what_is_saved_is_loaded_under_another_plan(threads: Any, late: str, seed: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    threads(1).run(late_in, late, seed, gpu_cases.saves_and_loads, "offload, some on disk", "zero3", NAME, folder)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("family", "scheme", "plan", "late"), with_further(every(QUANTIZED), [("qwen3-moe", "nf4", "disk", "compute")])
)
def test_adapters_of_quantized_weights_train_as_in_plain_torch(
    threads: Any, family: str, scheme: str, plan: str, late: str, seed: int
) -> None:
    threads(1).run(late_in, late, seed, adapts_as_plain_torch, family, scheme, plan, NAME)
