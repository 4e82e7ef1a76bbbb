"""Helpers on torch's modules and autograd: hooks, the tensors in a module's outputs, and whether backward runs.

Owns `Hook`, which torch.compile does not trace and which cannot be copied, and `unrecorded`, in which nothing records.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, NoReturn

import torch

from elixir_moe.runtime.param_access import refuse_copy
from elixir_moe.torch_private import (
    SELECTIVE_CHECKPOINT_MODES,
    dispatch_depth,
    dispatch_modes,
    graph_task_id,
    without_last_dispatch_mode,
)


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


def in_function() -> bool:
    """Whether the caller runs inside the forward of an autograd function.

    Torch passes ``Function.apply`` to no tensor subclass and to no mode, and newer versions run it without a frame. So
    this looks for a frame that runs the `forward` of a subclass of `torch.autograd.Function`.
    """
    forwards = {getattr(function.forward, "__code__", None) for function in _subclasses(torch.autograd.Function)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


def _subclasses(kind: Any) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def in_backward() -> bool:
    """Whether the caller runs inside a backward."""
    return graph_task_id() != -1


_HERE = nullcontext()


def unrecorded() -> AbstractContextManager[object]:
    """A context in which nothing records the library's operators: autograd, inference mode, a selective checkpoint.

    A backward is one already, where this costs nothing.
    """
    if torch.is_inference_mode_enabled() or dispatch_depth():
        return _outside_of_modes()
    return torch.no_grad() if torch.is_grad_enabled() else _HERE


@contextmanager
def _outside_of_modes() -> Iterator[None]:
    modes = dispatch_modes()
    selective = [i for i, mode in enumerate(modes) if isinstance(mode, SELECTIVE_CHECKPOINT_MODES)]
    with ExitStack() as stack:
        for _ in modes[selective[0] :] if selective else ():  # the last ones, with what runs inside the region
            stack.enter_context(without_last_dispatch_mode())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


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
