"""How the values that modules put out are distributed, and their bytes.

Owns the choice of the modules and the figures of an output. Sends nothing, so one rank may look by itself. Source: the
monitoring of HTMS (3.2.1): scales of tensors, and distributions of feature values and of output vectors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

QUANTILES = {"1%": 0.01, "median": 0.5, "99%": 0.99}
_SAMPLE = 1 << 16
"""Most values, evenly spaced, that quantiles are taken of."""


@contextmanager
def distributions(model: nn.Module | None) -> Iterator[dict[str, dict[str, float]]]:
    """While open, fills the dict with the figures of each module's first output; with None it stays empty.

    The modules are the layers, the parts of each, and what has parameters outside of layers, such as the head.
    """
    found: dict[str, dict[str, float]] = {}
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: _look(found, name, output))
        for name, module in (() if model is None else model.named_modules())
        if _is_shown(name, module)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def figures(values: Tensor) -> dict[str, float]:
    """Bytes, root mean square, extremes and quantiles; the last of a sample."""
    flat = values.detach().flatten()
    least, most = flat.aminmax()
    sample = flat[:: -(-len(flat) // _SAMPLE)].float()
    scale = torch.linalg.vector_norm(flat, dtype=torch.float32) / len(flat) ** 0.5
    cuts = torch.quantile(sample, sample.new_tensor(list(QUANTILES.values())))
    row = torch.stack([scale, least.float(), *cuts, most.float()]).tolist()  # one wait for the device
    return {"bytes": float(values.nbytes), **dict(zip(("rms", "least", *QUANTILES, "most"), row, strict=True))}


def _is_shown(name: str, module: nn.Module) -> bool:
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if next(module.parameters(), None) is None:
        return False
    return len(parts) - layer <= 2 if layer is not None else next(module.children(), None) is None


def _look(found: dict[str, dict[str, float]], name: str, output: Any) -> None:
    tensors = output if isinstance(output, tuple) else (output,)
    values = next((t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()), None)
    if values is not None and name not in found:
        found[name] = figures(values)
