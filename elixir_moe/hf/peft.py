"""Questions about models and layers with peft's adapters. Does not import peft.

    call                                              result
    peft.get_peft_model(model, config)                a `PeftModel` around the model
    model.add_adapter(config), of transformers        the same model; its layers have adapters
    peft.inject_adapter_in_model(config, model)       the same, for any model

Each result has a `peft_config`.
"""

from torch import nn


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
