"""Modules whose weights are quantized: linear layers, and Hugging Face's fused experts.

Owns their forwards. Never encodes a weight. A module becomes quantized in place, by changing its class to a subclass:
it keeps its hooks, its other parameters and its place in the model.

    Linear     weight (out, in)            weight, weight_scales
    experts    gate_up_proj (E, 2h, d)     gate_up_proj, gate_up_proj_scales    also up_proj, without a gate
               down_proj (E, d, h)         down_proj, down_proj_scales
"""

from torch import Tensor, nn

from elixir_moe.errors import UsageError
from elixir_moe.hf.fused_experts import STACKS, FusedExperts, become_fused, is_fused_experts, is_spread
from elixir_moe.moe.experts import Groups
from elixir_moe.moe.joined_class import joined, plain_class
from elixir_moe.parallel.regather import RegatherLinear, saves_no_weights
from elixir_moe.quantized.packed import SCALES, Packed
from elixir_moe.quantized.products import grouped_linear, linear


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen quantized weight: (..., in) -> (..., out).

    ``weight`` has the codes and ``weight_scales`` the scales; ``em.dequantize`` restores the weight.
    """

    weight_scales: nn.Parameter
    packed: dict[str, Packed]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of `x`."""
        return linear(
            x, self.weight, self.weight_scales, self.bias, self.packed["weight"], again=saves_no_weights(self)
        )

    def extra_repr(self) -> str:
        """Returns the text that `print` shows."""
        return f"{super().extra_repr()}, {self.packed['weight'].scheme}"


class QuantizedExperts(FusedExperts):
    """Fused experts with frozen quantized weights, which are decoded for each product."""

    packed: dict[str, Packed]

    def product(self, name: str, rows: Tensor, groups: Groups) -> Tensor:
        """(n, in) rows sorted by expert -> (n, out)."""
        codes, scales, bias = getattr(self, name), getattr(self, name + SCALES), getattr(self, f"{name}_bias", None)
        if not isinstance(codes, nn.Parameter):
            raise UsageError(
                f"peft adds adapters to {name!r}, which is quantized: call em.wrap or em.group_experts(model), which "
                f"multiply adapters separately"
            )
        out = grouped_linear(rows, codes, scales, groups, self.packed[name], again=saves_no_weights(self))
        return out if bias is None else out + bias[groups.experts]


def is_linear(module: nn.Module) -> bool:
    """Whether only `nn.Linear`'s own forward reads the weight of a module."""
    return isinstance(module, nn.Linear) and type(module) in (nn.Linear, RegatherLinear, QuantizedLinear)


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of a module that can be quantized, by their names in it; empty for other modules."""
    if is_linear(module):
        names: tuple[str, ...] = ("weight",)
    elif is_fused_experts(module):
        names = STACKS
    else:
        return {}
    found = {name: module._parameters.get(name) for name in names}
    return {name: weight for name, weight in found.items() if weight is not None}


def become_quantized(module: nn.Module, name: str, packed: Packed) -> None:
    """Gives a module the forward of quantized weights; its weight `name` is now in the format `packed`."""
    module.__dict__.setdefault("packed", {})[name] = packed
    if isinstance(module, nn.Linear):
        module.__class__ = QuantizedLinear
    elif not isinstance(module, QuantizedExperts):
        plain = type(module)
        module.__class__ = joined(f"Quantized{plain.__name__}", QuantizedExperts, plain)  # type: ignore[assignment]


def become_plain(module: nn.Module) -> None:
    """Undoes `become_quantized`; experts that were sharded since stay sharded."""
    spread = is_spread(module)
    del module.packed
    if isinstance(module, nn.Linear):
        module.__class__ = RegatherLinear if saves_no_weights(module) else nn.Linear
    else:
        module.__class__ = plain_class(module)
        if spread:
            become_fused(module)
