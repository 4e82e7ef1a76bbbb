"""Modules whose weights are quantised: linear layers, and Hugging Face's fused experts.

Owns their forwards. A module becomes one in place, by its class: it stays an instance of the class it was, with its
hooks, its other parameters and its place in the model.

    Linear     weight (out, in)            weight, weight_scales
    experts    gate_up_proj (E, 2h, d)     gate_up_proj, gate_up_proj_scales    also up_proj, without a gate
               down_proj (E, d, h)         down_proj, down_proj_scales
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from elixir_moe.distributed.to_host import begin_to_host
from elixir_moe.errors import UsageError
from elixir_moe.parallel.dataless import even_counts, has_data
from elixir_moe.parallel.read_again import LinearReadAgain, mark_saving_none, saves_none
from elixir_moe.quantized.packed import SCALES, Packed
from elixir_moe.quantized.products import grouped_linear, linear

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of fused experts."""
_SETTINGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
"""What transformers sets on each module of fused experts that its own implementations can run."""


class QuantizedLinear(nn.Linear):
    """(..., in) -> (..., out): a linear layer with a frozen weight of bytes.

    ``weight`` has the codes and ``weight_scales`` the scales; ``em.dequantize`` gives the weight back.
    """

    weight_scales: nn.Parameter
    packed: dict[str, Packed]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of `x`."""
        return linear(x, self.weight, self.weight_scales, self.bias, self.packed["weight"], again=saves_none(self))

    def extra_repr(self) -> str:
        """The text that `print` shows."""
        return f"{super().extra_repr()}, {self.packed['weight'].scheme}"


class QuantizedExperts(nn.Module):
    """Tokens (T, d), experts (T, k), weights (T, k) -> (T, d): fused experts with frozen weights of bytes.

    The order of operations is that of transformers' `grouped_mm`, with one expert's weight decoded at a time.
    """

    num_experts: int
    packed: dict[str, Packed]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, d), (T, k), (T, k) -> (T, d). The host waits for the number of rows of each expert."""
        this: Any = self
        if this._is_expert_parallel:
            raise UsageError("quantised experts are whole on each rank: leave transformers' expert parallelism out")
        tokens, top_k = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        rows = hidden_states[order // top_k]
        counts = self._counts(experts)
        hidden = self._product("gate_up_proj" if this.has_gate else "up_proj", rows, experts, counts)
        hidden = this._apply_gate(hidden) if this.has_gate else this.act_fn(hidden)
        out = self._product("down_proj", hidden, experts, counts)
        if this.has_post_expert_norm:
            out = this.post_expert_norm(out)
        out = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return out[place].view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)

    def _product(self, name: str, rows: Tensor, experts: Tensor, counts: list[int]) -> Tensor:
        pair = getattr(self, name), getattr(self, name + SCALES)
        out = grouped_linear(rows, *pair, counts, self.packed[name], again=saves_none(self))
        bias = getattr(self, f"{name}_bias", None)
        return out if bias is None else out + bias[experts]

    def _counts(self, experts: Tensor) -> list[int]:
        """The rows of each expert, from the sorted experts of all rows."""
        if not has_data(experts):
            return even_counts(len(experts), self.num_experts)
        bounds = torch.arange(self.num_experts + 1, device=experts.device)
        return [stop - start for start, stop in pairwise(begin_to_host(torch.searchsorted(experts, bounds))())]


def is_linear(module: nn.Module) -> bool:
    """Whether the weight of a module is read by `nn.Linear`'s own forward alone."""
    return isinstance(module, nn.Linear) and type(module) in (nn.Linear, LinearReadAgain, QuantizedLinear)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds fused experts as transformers' implementations know them."""
    return hasattr(module, "num_experts") and all(hasattr(module, name) for name in _SETTINGS)


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that can be quantised, by their names in it; none for other modules."""
    if is_linear(module):
        names: tuple[str, ...] = ("weight",)
    elif is_fused_experts(module):
        names = STACKS
    else:
        return {}
    found = {name: module._parameters.get(name) for name in names}
    return {name: weight for name, weight in found.items() if weight is not None}


def become_quantized(module: nn.Module, name: str, packed: Packed) -> None:
    """Gives a module the forward of quantised weights, of which its `name` is one."""
    module.__dict__.setdefault("packed", {})[name] = packed
    if isinstance(module, nn.Linear):
        module.__class__ = QuantizedLinear
    elif not isinstance(module, QuantizedExperts):
        module.__class__ = _quantized(type(module))  # type: ignore[arg-type]  # a class can be hashed


def become_plain(module: nn.Module) -> None:
    """Undoes `become_quantized`."""
    del module.packed
    if isinstance(module, nn.Linear):
        module.__class__ = LinearReadAgain if saves_none(module) else nn.Linear
    else:
        module.__class__ = type(module).__mro__[2]
        mark_saving_none(module, False)


@cache
def _quantized(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of experts that were of class `kind`: one for all of them, so that their layers compare."""
    return type(f"Quantized{kind.__name__}", (QuantizedExperts, kind), {"__module__": __name__})
