"""The fast path of torch's Transformer encoder layers, which reads the weights of Linear layers without calling them.

Owns turning it off: in evaluation, the fast path fails if such a layer no longer has a plain weight. Never changes what
a layer computes.
"""

from collections.abc import Callable

from torch import nn


def call_linear_layers(model: nn.Module, changed: Callable[[nn.Module], bool]) -> None:
    """Turns the fast path off in encoder layers, and stacks of them, whose Linear layers satisfy `changed`."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = (part for own in (module.linear1, module.linear2) for part in own.modules())
            if any(map(changed, inside)):
                module.activation_relu_or_gelu = 0  # not an activation of the fast path; forward ignores it
        elif isinstance(module, nn.TransformerEncoder) and any(map(changed, module.modules())):
            module.use_nested_tensor = False
