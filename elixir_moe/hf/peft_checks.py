"""Which of peft's adapters compute with the weight of their base layer, in each forward or when they are created.

Owns the lists. Most adapters call their base layer and add to its output. Those listed here read its weight, which must
then be whole and not quantized. Does not import peft.
"""

from typing import Any

from torch import nn

_OF_WEIGHTS = {"frod", "glora", "hira", "hra", "loha", "lokr", "peanut", "shira", "supertuning", "trainable_tokens"}
_OF_BIASES = {"adamss", "boft", "deft"}
_BEGIN_WITH_WEIGHTS = {"DEFT": "DEFT", "TINYLORA": "TinyLoRA", "UNILORA": "UniLoRA"}
_PACKAGE = "peft.tuners."


def reads_weight(layer: nn.Module, *, or_bias: bool = False) -> str | None:
    """Names the adapters of a layer if they read the base layer's weight, or its bias; None if they do not."""
    if not hasattr(layer, "get_base_layer"):
        return None
    modules = [kind.__module__ for kind in type(layer).__mro__ if kind.__module__.startswith(_PACKAGE)]
    kinds = {module.removeprefix(_PACKAGE).partition(".")[0] for module in modules}
    if found := kinds & (_OF_WEIGHTS | _OF_BIASES if or_bias else _OF_WEIGHTS):
        return f"adapters of {found.pop().upper()}"
    if "lora" in kinds and any(getattr(layer, "use_dora", {}).values()):
        return "adapters with use_dora=True"
    if "miss" in kinds and getattr(layer, "miss_fn", None) == "bat":
        return 'adapters with init_weights="bat"'
    if "ia3" in kinds and getattr(layer, "is_feedforward", False):
        return "adapters of IA3 for feedforward_modules"
    return None


def begins_with_weight(config: Any) -> str | None:
    """Names adapters whose initial values come from the base weight, or take its dtype; None for all others.

    peft would take quantized bytes for numbers there. It refuses them itself for most such kinds, such as PiSSA.
    """
    if config.peft_type == "LORA" and config.init_lora_weights == "loftq":
        return "LoftQ"
    if getattr(config, "kasa_config", None) is not None:
        return "KaSA"
    return _BEGIN_WITH_WEIGHTS.get(config.peft_type)
