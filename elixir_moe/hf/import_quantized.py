"""Imports layers that other libraries have quantized: their bytes become frozen parameters here, unchanged.

Owns the knowledge of quantized layers of bitsandbytes and transformers. Imports neither: classes are known by name.

    layer                                     becomes   its codes                     its scales
    bitsandbytes.nn.Linear4bit, quant_type    nf4       weight, (out * in / 2, 1)     absmax; decoded once where they
    "nf4" in blocks of 64                                                             are quantized too
    bitsandbytes.nn.Linear8bitLt without      int8      weight                        SCB / 127
    has_fp16_weights, threshold 0
    transformers' FP8Linear and FP8Experts    fp8       weight, gate_up_proj, …       weight_scale_inv, … as fp32
    in blocks of 128 x 128, dynamic

Codes are never decoded here. Later products multiply the unrounded input by the decoded weight; a library that also
rounds the input to 8 bits adds one more error.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elixir_moe.errors import ConfigError
from elixir_moe.parallel.rules import attach, pattern_of
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.modules import STACKS, become_quantized
from elixir_moe.quantized.packed import SCALES, Packed, as_bytes, packed_in

_FP8_BLOCK = SCHEMES["fp8"].block
_BY_EM = "load the model in bf16, freeze it, and call em.quantize"


class _Layer(NamedTuple):
    """One kind of quantized layer of another library."""

    weights: Callable[[Any], list[str]]
    """The names of a layer's weights."""
    problem: Callable[[Any, str], str | None]
    """Why a weight cannot be imported, and what to do; None if it can."""
    read: Callable[[Any, str], tuple[Packed, Tensor, Tensor]]
    """The description of a weight, its codes and its scales."""
    replaced: Callable[[str], list[str]]
    """Attributes of the layer that go when a weight is imported, such as its scales."""


def check_layers(model: nn.Module) -> None:
    """Raises ConfigError naming each layer of another library whose bytes cannot be imported."""
    problems = []
    held = set()
    for name, module, kind, layer in _layers(model):
        for own in layer.weights(module):
            held.add(id(getattr(module, own)))
            if (problem := layer.problem(module, own) or _in_the_way(model, module, own, kind)) is not None:
                problems.append(f"{f'{name}.{own}'.lstrip('.')!r} ({type(module).__name__}) {problem}")
    for name, parameter in model.named_parameters():
        packed = next((kind.__name__ for kind in type(parameter).__mro__ if kind.__name__ in _PACKED), None)
        if packed is not None and id(parameter) not in held:
            problems.append(
                f"{name!r} is a {packed}, packed by bitsandbytes in a layer that is not known here: "
                f"{_BY_EM}(model, 'nf4') or (model, 'int8')"
            )
    for name, module in model.named_modules():
        if (advice := _REFUSED.get(type(module).__name__)) is not None:
            problems.append(f"{name!r} is a {type(module).__name__}: {advice}")
    if problems:
        raise ConfigError("quantized layers of another library cannot be imported:\n  " + "\n  ".join(problems))


def import_quantized(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Converts layers that other libraries have quantized to layers of this library, with the same bytes, in place.

    Call `check_layers` first. The imported weights, which are frozen, are removed from the `optimizer`.
    """
    replaced: set[int] = set()
    for _, module, _, layer in list(_layers(model)):
        for own in layer.weights(module):
            packed, codes, scales = layer.read(module, own)
            old = getattr(module, own)
            pattern = pattern_of(old)
            for attribute in layer.replaced(own):
                if isinstance(part := getattr(module, attribute), nn.Parameter):
                    replaced.add(id(part))
                delattr(module, attribute)
            replaced.add(id(old))
            delattr(module, own)
            for name, part in ((own, codes), (own + SCALES, scales)):
                parameter = nn.Parameter(as_bytes(part.contiguous()), requires_grad=False)
                module.register_parameter(name, parameter)
                if pattern is not None:
                    attach(parameter, pattern)
            become_quantized(module, own, packed)
    for group in optimizer.param_groups if replaced else ():
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in replaced]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, type, _Layer]]:
    """Yields (name, module, its known class, its kind) of each layer that another library has quantized."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            layer = _LAYERS.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
            if layer is not None and layer.weights(module) and not packed_in(module):
                yield name, module, kind, layer
                break


def _in_the_way(model: nn.Module, module: nn.Module, own: str, kind: Any) -> str | None:
    """Why a weight cannot be imported, apart from its format; None if it can."""
    parameter = getattr(module, own)
    if parameter.requires_grad:
        return "is trained, and bytes have no gradient: freeze it with requires_grad_(False)"
    users = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
    if len(users) > 1:
        return f"is shared ({', '.join(map(repr, users))}): {_BY_EM} with skip"
    if "forward" in vars(module) or type(module).forward is not kind.forward:
        return f"has a forward that is not {kind.__name__}'s: {_BY_EM}"
    if (pattern := pattern_of(parameter)) is not None and pattern.shard:
        return "has a pattern that shards it: leave it replicated, since its bytes are in another shape"
    return None


# --------------------------------------------------------------------------------------------- bitsandbytes


def _weight(module: Any) -> list[str]:
    return ["weight"]


def _problem_4bit(module: Any, own: str) -> str | None:
    state = getattr(module.weight, "quant_state", None) or module.quant_state
    if state is None:
        return "has not been quantized yet: move the model to its device first, as in model.to('cuda')"
    if getattr(state, "packing_format_for_cpu", False):
        return (
            "was evaluated on a CPU, for which bitsandbytes rounds scales: wrap the model before its first evaluation"
        )
    if state.quant_type != "nf4":
        return (
            f"is of {state.quant_type}: load it with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'), "
            f"or {_BY_EM}(model, 'nf4')"
        )
    if state.blocksize != SCHEMES["nf4"].block[1]:
        return f"has blocks of {state.blocksize} weights, expected 64: {_BY_EM}(model, 'nf4')"
    if state.shape[-1] % SCHEMES["nf4"].block[1]:
        return f"has {state.shape[-1]} inputs, so that its blocks cross rows: {_BY_EM}(model, 'int8')"
    return None


def _read_4bit(module: Any, own: str) -> tuple[Packed, Tensor, Tensor]:
    state = getattr(module.weight, "quant_state", None) or module.quant_state
    shape, form = tuple(state.shape), SCHEMES["nf4"]
    packed = Packed(scheme="nf4", shape=shape, dtype=state.dtype, computed_in=module.compute_dtype)
    codes = module.weight.data.view(torch.uint8).view(form.codes_shape(shape))
    return packed, codes, _absmax(state).view(form.scales_shape(shape))


def _absmax(state: Any) -> Tensor:
    """Returns the scales in fp32; under double quantization, they are decoded from the blocks of `state2`."""
    if not state.nested:
        scales: Tensor = state.absmax.float()
        return scales
    inner = state.state2
    factors = inner.absmax.repeat_interleave(inner.blocksize)[: state.absmax.numel()]
    found: Tensor = inner.code[state.absmax.long().flatten()] * factors + state.offset
    return found


def _problem_8bit(module: Any, own: str) -> str | None:
    state, weight = module.state, module.weight
    if state.has_fp16_weights:
        return "keeps 16-bit weights (has_fp16_weights=True): make it an nn.Linear"
    if weight.data.dtype != torch.int8:
        return "has not been quantized yet: move the model to its device first, as in model.to('cuda')"
    if state.threshold:
        return (
            f"multiplies inputs above {state.threshold} separately, which is not supported here: load it with "
            f"BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), which has the same bytes"
        )
    return None


def _read_8bit(module: Any, own: str) -> tuple[Packed, Tensor, Tensor]:
    codes = module.weight.data
    largest = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    packed = Packed(scheme="int8", shape=tuple(codes.shape), dtype=torch.float16)
    return packed, codes, (largest.float() * (1.0 / 127.0)).unsqueeze(1)


# --------------------------------------------------------------------------------------------- transformers


def _fp8_weights(module: Any) -> list[str]:
    """The names of the weights that are bytes: FP8Linear may also hold a plain weight."""
    found = ((name, module._parameters.get(name)) for name in ("weight", *STACKS))
    return [name for name, weight in found if weight is not None and weight.element_size() == 1]


def _problem_fp8(module: Any, own: str) -> str | None:
    weight, scales = getattr(module, own), getattr(module, f"{own}_scale_inv")
    if weight.dtype != torch.float8_e4m3fn or module.activation_scheme != "dynamic":
        return f"is of {weight.dtype} with {module.activation_scheme} inputs: {_BY_EM}(model, 'fp8')"
    expected = SCHEMES["fp8"].scales_shape(tuple(weight.shape))
    if tuple(module.block_size or ()) != _FP8_BLOCK or tuple(scales.shape) != expected:
        return (
            f"has scales of shape {tuple(scales.shape)} for blocks of {module.block_size}, expected {expected} for "
            f"blocks of {list(_FP8_BLOCK)}: {_BY_EM}(model, 'fp8')"
        )
    return None


def _read_fp8(module: Any, own: str) -> tuple[Packed, Tensor, Tensor]:
    codes: Tensor = getattr(module, own).data
    packed = Packed(scheme="fp8", shape=tuple(codes.shape), dtype=torch.bfloat16)
    return packed, codes, getattr(module, f"{own}_scale_inv").data.float()


_FP8 = _Layer(_fp8_weights, _problem_fp8, _read_fp8, lambda own: [f"{own}_scale_inv"])
_LAYERS: Mapping[str, _Layer] = {
    "bitsandbytes.Linear4bit": _Layer(_weight, _problem_4bit, _read_4bit, lambda _: ["quant_state"]),
    "bitsandbytes.Linear8bitLt": _Layer(_weight, _problem_8bit, _read_8bit, lambda _: ["state"]),
    "transformers.FP8Linear": _FP8,
    "transformers.FP8Experts": _FP8,
}
_PACKED = {"Params4bit", "Int8Params"}
"""Parameters of bitsandbytes, whose elements are not the model's weights."""
_REFUSED: Mapping[str, str] = {
    "Mxfp4GptOssExperts": (
        "its kernels reorder the bytes. Build the model in em.sharded_init() and give the folder "
        "to em.wrap(..., weights=folder), which keeps the bytes as shipped; or load it with "
        "Mxfp4Config(dequantize=True), freeze it, and call em.quantize(model, 'mxfp4')"
    ),
}
"""Layers of transformers that cannot be imported, by class, and what to do instead."""
