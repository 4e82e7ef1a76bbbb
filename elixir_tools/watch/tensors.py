"""Weights, gradients and outputs of a model after a fault: their sizes, and where they are not finite.

Owns both answers for a wrapped model. Knows neither its loop nor its loss: the caller runs the forward again.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.ext.models import Wrapped, held_pieces, share_of, sum_of_squares
from elixir_moe.ext.ranks import gathered

_MOST_NAMED = 8


def scales(wrapped: Wrapped) -> dict[str, float]:
    """Root mean square of every trainable parameter, from the masters. Collective."""
    rows = {held.name: [0.0, 0.0] for held in held_pieces(wrapped) if held.chunk.spec.key.trainable}
    for held in held_pieces(wrapped):
        if held.name in rows:
            part = held.cut(*share_of(held.chunk)).values.read()
            squares, numel = rows[held.name]  # of other tiles
            rows[held.name] = [squares + float(sum_of_squares(part)), numel + part.numel()]
    table = torch.tensor(list(rows.values()), dtype=torch.float64).view(-1, 2)
    dist.all_reduce(table, group=wrapped.groups.control)
    return dict(zip(rows, (table[:, 0] / table[:, 1].clamp(min=1)).sqrt().tolist(), strict=True))


def name_not_finite(
    model: nn.Module,
    wrapped: Wrapped,
    forward: Callable[[], object],
    drop: Callable[[], object] | None,
) -> str:
    """Names the origin of values that are not finite: weights, a module's output, or the gradient nearest the loss.

    Collective. Needs the gradients of the step. `forward` runs its forward passes again, and `drop` drops the
    gradients; None where updates may have begun, so that only gradients can be looked at.
    """
    gradients = _union(wrapped, wrapped.kept.decision.not_finite())
    if drop is not None:
        drop()
        weights = [name for name, scale in scales(wrapped).items() if not math.isfinite(scale)]
        if weights:
            return f"; weights that are not finite: {', '.join(weights[:_MOST_NAMED])}"
        modules = _union(wrapped, _first_not_finite(model, forward))
        if modules:
            return f"; the first output that is not finite is that of module {', '.join(modules[:_MOST_NAMED])}"
    if gradients:
        last = [name for name, _ in model.named_parameters() if name in gradients][-1]
        return f"; the gradient of {last!r} is not finite, and those of {len(gradients) - 1} parameters before it"
    return ""


@torch.no_grad()
def _first_not_finite(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """The first module whose output is not finite in another forward of the batch; empty if there is none."""
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and not found and not bool(torch.isfinite(tensor).all()):
                found.append(name)

    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: look(name, output))
        for name, module in model.named_modules()
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _union(wrapped: Wrapped, names: list[str]) -> list[str]:
    everyone = gathered(names, wrapped.groups.control)
    return list(dict.fromkeys(name for theirs in everyone for name in theirs))
