"""Several ranks that share one GPU over gloo, since NCCL refuses that; on a GPU each, over NCCL."""

from typing import Any

import pytest
import torch

from tests.support import gpu_cases
from tests.support.cases import with_further


@pytest.mark.parametrize(("world", "plan"), with_further([(2, "zero3"), (2, "offload"), (4, "zero3")], [(2, "zero3")]))
def test_ranks_on_one_device_train_as_plain_torch(world: int, plan: str, device: str, run_on: Any) -> None:
    run_on(device, world)(gpu_cases.trains_as_plain_torch, "mixture", plan, torch.float32, device)
