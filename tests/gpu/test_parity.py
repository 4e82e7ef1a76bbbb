"""One process, every plan, on the CPU and on a GPU: the steps of plain torch on the same device."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import gpu_cases
from tests.support.cases import with_further
from tests.support.gpu_cases import MODELS, PLANS

FP32, BF16 = torch.float32, torch.bfloat16
EVERY = list(itertools.product(MODELS, PLANS, (FP32, BF16)))
EVERY += list(itertools.product(("adapted",), ("zero3", "offload, all on disk"), (FP32, BF16)))
PASSES = [case for case in EVERY if case[1] not in ("ddp", "zero2")]
QUICK = [
    ("mixture", "offload, some on disk", FP32),
    ("dense", "zero3", BF16),
    ("adapted", "offload, all on disk", BF16),
]
"""On the CPU, where other files test the same; on a GPU all are run."""


@pytest.mark.parametrize(("model", "plan", "dtype"), with_further(EVERY, QUICK))
def test_every_plan_trains_as_plain_torch(model: str, plan: str, dtype: torch.dtype, device: str, run_on: Any) -> None:
    run_on(device, 1)(gpu_cases.trains_as_plain_torch, model, plan, dtype, device)


@pytest.mark.parametrize(("model", "plan", "dtype"), with_further(PASSES, QUICK))
def test_one_pass_trains_as_plain_torch(model: str, plan: str, dtype: torch.dtype, device: str, run_on: Any) -> None:
    run_on(device, 1)(
        gpu_cases.trains_as_plain_torch, model, plan, dtype, device, loops=gpu_cases.PASSES, one_pass=True
    )


@pytest.mark.parametrize(("plan", "other"), [("offload, some on disk", "zero3")])
def test_what_is_saved_is_loaded_under_another_plan(
    plan: str, other: str, device: str, run_on: Any, tmp_path: Path
) -> None:
    pytest.importorskip("blake3", reason="checkpoints need it; --wheels brings it")
    run_on(device, 1)(gpu_cases.saves_and_loads, plan, other, device, str(tmp_path / "saved"))
