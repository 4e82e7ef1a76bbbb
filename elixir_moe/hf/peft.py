"""Questions about models and layers with peft's adapters. Does not import peft.

    call                                              result
    peft.get_peft_model(model, config)                a `PeftModel` around the model
    model.add_adapter(config), of transformers        the same model; its layers have adapters
    peft.inject_adapter_in_model(config, model)       the same, for any model

Each result has a `peft_config`. Owns the lists of adapters that read the weight of their base layer, in each forward or
when they are created: it must then be whole and not quantized. Most adapters call their base layer and add to its
output.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

_OF_WEIGHTS = {"frod", "glora", "hira", "hra", "loha", "lokr", "peanut", "shira", "supertuning", "trainable_tokens"}
_OF_BIASES = {"adamss", "boft", "deft"}
_BEGIN_WITH_WEIGHTS = {"DEFT": "DEFT", "TINYLORA": "TinyLoRA", "UNILORA": "UniLoRA"}
_PACKAGE = "peft.tuners."


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel` around another one."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def has_own_adapters(model: nn.Module) -> bool:
    """Whether a model of transformers has adapters by its own `add_adapter` or `load_adapter`."""
    return hasattr(model, "get_adapter_state_dict") and bool(model._hf_peft_config_loaded)


def base_of(model: nn.Module) -> nn.Module:
    """The model inside a `PeftModel`; any other model itself, and a `PeftMixedModel`, which hides its base."""
    if not is_peft_model(model) or not hasattr(model, "get_base_model"):
        return model
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    return base


def adapters_of_layers(model: nn.Module) -> dict[nn.Module, set[str]]:
    """{base layer: the names of its adapters} of all layers that peft has wrapped."""
    wrappers = [module for module in model.modules() if hasattr(module, "get_base_layer")]
    return {wrapper.get_base_layer(): wrapper._get_available_adapters() for wrapper in wrappers}  # type: ignore[operator]


def adapters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of the adapters that peft has put into layers."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()) if hasattr(module, "get_base_layer") else ():
            of_kind: Any = getattr(module, name, None)
            yield from of_kind.parameters() if isinstance(of_kind, nn.Module) else ()


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
