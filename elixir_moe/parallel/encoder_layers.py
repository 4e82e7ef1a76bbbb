"""torch's encoder layers, which in evaluation read the weights of their Linear layers and do not call them.

Owns the way to have them called: where such a layer has no plain weight any more, the fast path of torch fails.
"""

from collections.abc import Callable

from torch import nn


def call_linear_layers(model: nn.Module, changed: Callable[[nn.Module], bool]) -> None:
    """Turns torch's fast path off in each encoder layer one of whose Linear layers has `changed`."""
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            inside = (module for own in (layer.linear1, layer.linear2) for module in own.modules())
            if any(map(changed, inside)):
                layer.activation_relu_or_gelu = 0  # no activation that the fast path has; what is computed stays
