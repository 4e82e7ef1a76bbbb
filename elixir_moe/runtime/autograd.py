"""Helpers on torch's modules and autograd: hooks, the tensors in a module's outputs, and whether backward runs.

Owns `Hook`, which torch.compile does not trace and which cannot be copied.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, NoReturn

import torch

from elixir_moe.runtime.access import refuse_copy
from elixir_moe.torch_private import graph_task_id


class Hook:
    """A hook that torch.compile does not trace, and that raises UsageError when it is copied or pickled."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._hidden = torch.compiler.disable(run)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._hidden(*args)
        else:
            self._run(*args)  # the call through `torch.compiler.disable` costs time

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


_APPLY = vars(torch.autograd.Function)["apply"].__func__.__code__


def in_function() -> bool:
    """Whether the caller runs inside the forward of an autograd function.

    Torch hands ``Function.apply`` to no tensor subclass and to no mode: only its frame tells.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


def in_backward() -> bool:
    """Whether the caller runs inside a backward."""
    return graph_task_id() != -1


def hook_outputs(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Makes backward call `hook` with the gradient of each tensor in a module's `output`."""
    for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(hook)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
