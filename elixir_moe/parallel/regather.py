"""Products that save no weight for backward, which reads (and so regathers) the parameter again.

Owns the mark of modules that have only such products, and the product of a Linear layer. Never gathers by itself:
reading a parameter does. Inside a checkpointed region whose backward runs, weights that autograd has saved stay
gathered until they are used; weights that are read again need not.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe.torch_private import interpreter

_MARK = "_elixir_saves_no_weights"


def mark_saves_no_weights(module: nn.Module, marked: bool = True) -> None:
    """Records whether autograd saves none of the module's own parameters."""
    setattr(module, _MARK, marked)


def saves_no_weights(module: nn.Module) -> bool:
    """Whether autograd saves none of the module's own parameters.

    False under torch.compile, whose graph decides what to save, and in transforms of torch.func, which need plain
    operators.
    """
    marked: bool = getattr(module, _MARK, False)
    return marked and not torch.compiler.is_compiling() and interpreter() is None


class RegatheredParameter:
    """A parameter that an autograd function reads in forward, and again in backward."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._version = parameter, parameter._version

    def values(self) -> Tensor:
        """Returns the parameter. Raises torch's error for a saved tensor if it was written since."""
        now = self._parameter._version
        if now != self._version:
            refuse_written(now, self._version, self._parameter.shape)
        return self._parameter


def refuse_written(now: int, then: int, shape: torch.Size) -> NoReturn:
    """Raises torch's own error for a tensor that backward needs and that was written since."""
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {list(shape)} is at version {now}; expected version {then} instead"
    )


class RegatherLinear(nn.Linear):
    """A Linear layer that saves no weight for backward if it is marked."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not saves_no_weights(self):
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = RegatheredParameter(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,) = ctx.saved_tensors, grads
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ ctx.weight.values().to(grad.dtype) if of_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
