"""What torch's modules and autograd tell: whether backward runs, and what a module's outputs are.

Owns the hook that neither the compiler nor a copy of the model takes along.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch

from elixir_moe.runtime.access import refuse_copy


class Hook:
    """A hook that torch.compile does not look into, and that tells who would copy or pickle it that it cannot be."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._hidden = torch.compiler.disable(run)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._hidden(*args)
        else:
            self._run(*args)  # the way round the compiler is not free

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


def in_backward() -> bool:
    """Whether autograd runs the one who asks."""
    return torch._C._current_graph_task_id() != -1


def hook_outputs(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Has backward call `hook` with the gradient of each tensor in a module's `output`."""
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
