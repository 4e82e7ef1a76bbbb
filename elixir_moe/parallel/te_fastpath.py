"""torch's encoder layers, which in evaluation read the weights of their Linear layers and do not call them.

Owns the way to have them called: where such a layer has no plain weight any more, the fast path of torch fails.
"""

from collections.abc import Callable

from torch import nn


def call_linear_layers(model: nn.Module, changed: Callable[[nn.Module], bool]) -> None:
    """Turns torch's fast path off in encoder layers, and stacks of them, with a Linear layer that has `changed`."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = (part for own in (module.linear1, module.linear2) for part in own.modules())
            if any(map(changed, inside)):
                module.activation_relu_or_gelu = 0  # no activation that the fast path has; what is computed stays
        elif isinstance(module, nn.TransformerEncoder) and any(map(changed, module.modules())):
            module.use_nested_tensor = False
