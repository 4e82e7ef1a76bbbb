"""Asynchronous copies of a few numbers from the device to the host.

Owns the waits of the mixture layer, and of the optimizer for the norm of the previous step. Decides nothing, and is
never used for numbers that the host knows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elixir_moe.accelerator import is_accelerator, recorded_event


def copy_to_host_async(numbers: Tensor) -> Callable[[], list[Any]]:
    """Starts copying `numbers` to the host; the returned function waits for the copy and returns them as lists.

    On a GPU it waits for the copy only, not for work issued after the call.
    """
    if not is_accelerator(numbers.device):
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = recorded_event(numbers.device)

    def end() -> list[Any]:
        copied.synchronize()
        return copy.tolist()

    return end
