"""`quantize` and `dequantize`: frozen weights become bytes, in place, and weights again.

Owns the choice of weights and the messages. Never changes a weight before all of them have been checked.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from elixir_moe.errors import ConfigError, UsageError, did_you_mean
from elixir_moe.hf.fused_experts import is_spread, run_adapters_unmerged
from elixir_moe.hf.peft import adapters_of_layers
from elixir_moe.parallel.dtensor import is_dtensor
from elixir_moe.parallel.rules import attach, pattern_of
from elixir_moe.parallel.te_fastpath import call_linear_layers
from elixir_moe.parallel.tiles import mark as mark_tile
from elixir_moe.parallel.tiles import tile_of
from elixir_moe.quantized.formats import Scheme, check_finite, scheme_named
from elixir_moe.quantized.modules import become_plain, become_quantized, weights_of
from elixir_moe.quantized.packed import (
    SCALES,
    Packed,
    as_bytes,
    cut_alike,
    packed_in,
    packed_parameters,
    tile_problem,
)

M = TypeVar("M", bound=nn.Module)

_CASTS_TO = ("*.DenseReluDense.wo", "*.mlp.wo", "*.expert_*.wo", "*.indexer.weights_proj")
"""Layers whose inputs the model casts to the dtype of their weight: in T5 and similar models, and in the indexers of
sparse attention."""
_SMALL = ("*lm_head*", "*embed*", "*router*", "*.gate", "*.gate.*", "*.shared_expert_gate", "*lora_*")
_NEVER = (*_SMALL, "*.dt_proj", *_CASTS_TO)
"""Modules that are quantized only if `targets` names them: they are small or sensitive. Mamba's mixers read the weight
of `dt_proj` themselves, and would read bytes as numbers."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight that can be quantized."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    name: str
    """Name in the model."""

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether a pattern matches the parameter's or its module's name, with or without peft's ``base_layer``."""
        parameters = (self.name, self.name.replace(".base_layer.", "."))
        names = (*parameters, *(name.rpartition(".")[0] for name in parameters))
        return any(fnmatchcase(name, p) for p in patterns for name in names)


def quantize(model: M, scheme: str, *, targets: str | Sequence[str] | None = None, skip: str | Sequence[str] = ()) -> M:
    """Turns frozen weights into packed bytes and scales, in place; returns the model.

    Call it before `wrap`, and after peft has added its adapters, since some of them are initialized from the weight;
    LoRA may be added later too. Layers of class `nn.Linear` and Hugging Face's fused experts can be quantized. Each
    product decodes its weight, in the dtype of its input, and its backward decodes it again. Gradients flow to the
    inputs. From then on the weight is two frozen parameters of dtype uint8: the codes under the weight's own name, and
    the scales under that name with ``_scales``. For a model of `sharded_init` or on meta, `wrap` makes the bytes when
    it makes the weights.

    ::

        scheme   weights that share a scale   bytes per weight
        nf4      64 inputs of an output       0.5625
        mxfp4    32 inputs of an output       0.53125
        fp8      128 outputs x 128 inputs     1.0002
        int8     all inputs of an output      1 + 4 / inputs

    Args:
        model: a model that is not wrapped.
        scheme: "nf4", "mxfp4", "fp8" or "int8".
        targets: shell patterns for names of weights or of their modules. By default all frozen weights of linear layers
            and fused experts inside lists of blocks, except embeddings, routers and ``lm_head``; norms are never
            quantized.
        skip: patterns of weights not to quantize.

    Raises:
        ConfigError: the scheme is unknown; a pattern matches nothing; a chosen weight is trained, shared by modules,
            annotated, not finite, or of a shape that is not a multiple of the block; stacked experts belong to a
            module that cannot be quantized. The message names the parameters, and the model is unchanged.
        UsageError: the model is wrapped.
    """
    _refuse_wrapped(model, "quantize")
    form = scheme_named(scheme)
    chosen = list(_chosen(model, _listed(targets), _listed(skip)))
    users = defaultdict[nn.Parameter, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users[parameter].append(name)
    problems = [f"parameter {w.name!r} {problem}" for w in chosen if (problem := _problem(w, form, users[w.parameter]))]
    modules, names = {weight.module for weight in chosen}, {weight.name for weight in chosen}
    for left in (w for w in _weights(model) if w.module in modules and w.name not in names):
        problems.append(f"parameter {left.name!r} was not chosen: quantize all stacks of its module, or none")
    if problems:
        raise ConfigError("quantize: " + "\n  ".join(problems))
    for weight in chosen:
        check_finite(weight.name, weight.parameter)
    adapters = adapters_of_layers(model)
    while chosen:  # each weight is freed before the next one is read
        weight = chosen.pop(0)
        _pack(weight, form, frozenset(adapters.get(weight.module, ())))
    call_linear_layers(model, lambda module: bool(packed_in(module)))
    run_adapters_unmerged(model)
    return model


def dequantize(model: M, dtype: torch.dtype | None = None) -> M:
    """Turns quantized weights into frozen weights of a floating dtype, in place; returns the model.

    The weights are the ones that products used, so merging adapters that were trained on them adds no error. Quantizing
    the merged weights again loses up to half a step of the format in each weight, which may exceed the change made by
    the adapters.

    Args:
        model: a model that is not wrapped.
        dtype: by default each weight's dtype before `quantize`.

    Raises:
        ConfigError: `dtype` is not a floating dtype.
        UsageError: the model is wrapped.
    """
    _refuse_wrapped(model, "dequantize")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dequantize: dtype={dtype}: expected a floating dtype, such as torch.bfloat16")
    for _, module, name, packed in list(packed_parameters(model)):
        codes, scales = getattr(module, name), getattr(module, name + SCALES)
        weight = packed.decode(codes, scales, dtype or packed.dtype)
        weight = weight.transpose(-1, -2).contiguous() if packed.transposed else weight
        delattr(module, name + SCALES)
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
        if (tile := tile_of(codes)) is not None:
            mark_tile(getattr(module, name), tile)
        if (pattern := pattern_of(codes)) is not None:
            attach(getattr(module, name), pattern)
    for module in model.modules():
        if packed_in(module):
            become_plain(module)
    return model


def _refuse_wrapped(model: nn.Module, verb: str) -> None:
    if getattr(model, "_elixir", None) is not None:
        raise UsageError(
            f"{verb}() of a wrapped model: call em.{verb}(model) before em.wrap, and build the optimizer after it"
        )


def _listed(patterns: str | Sequence[str] | None) -> list[str] | None:
    if patterns is None:
        return None
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _weights(model: nn.Module) -> Iterator[_Weight]:
    for name, module in model.named_modules():
        for attribute, parameter in weights_of(module).items():
            if attribute not in packed_in(module):
                yield _Weight(module, attribute, parameter, f"{name}.{attribute}".lstrip("."))


def _chosen(model: nn.Module, targets: list[str] | None, skip: list[str] | None) -> Iterator[_Weight]:
    """Yields the weights to quantize. Raises ConfigError for a pattern that matches none, and if none is left."""
    skip = skip or []
    weights = list(_weights(model))
    for pattern in (*(targets or ()), *skip):
        if not any(weight.matches([pattern]) for weight in weights):
            hint = did_you_mean(pattern.strip("*."), {part for weight in weights for part in weight.name.split(".")})
            raise ConfigError(
                f"quantize: {pattern!r} matches no weight of a linear layer or of fused experts; "
                f"{f'{hint} ' if hint else ''}some names are {[weight.name for weight in weights[:3]]}"
            )
    if targets is None:
        _refuse_unknown_experts(model, skip)
    found = 0
    for weight in weights:
        by_default = _in_blocks(weight.name) and not weight.matches(_NEVER) and not weight.parameter.requires_grad
        if (by_default if targets is None else weight.matches(targets)) and not weight.matches(skip):
            found += 1
            yield weight
    if not found:
        raise ConfigError(
            f"quantize: {type(model).__name__} has no frozen weight to quantize: freeze the base first, for example "
            f"by model.requires_grad_(False), or name weights with targets"
        )


_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
"""Modules, such as Mamba's, whose weight has three dims but is not a stack of experts."""


def _in_blocks(name: str) -> bool:
    """Whether a parameter belongs to a module in a list of modules."""
    return any(part.isdecimal() for part in name.split("."))


def _refuse_unknown_experts(model: nn.Module, skip: list[str]) -> None:
    """Raises ConfigError for stacks of frozen weights that would silently not be quantized."""
    for name, module in model.named_modules():
        if weights_of(module) or isinstance(module, _CONVOLUTIONS):
            continue
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            plain = parameter.dim() == 3 and parameter.is_floating_point() and not parameter.requires_grad
            if plain and _in_blocks(own) and not any(fnmatchcase(n, p) for p in skip for n in (own, name)):
                raise ConfigError(
                    f"quantize: parameter {own!r} is a stack of weights in a {type(module).__name__}, which is not one "
                    f"of transformers' fused experts that are supported: name the weights to quantize with targets"
                )


def _problem(weight: _Weight, form: Scheme, users: Sequence[str]) -> str | None:
    """Returns why a chosen weight cannot be quantized; None if it can. `users` are the names of its parameter."""
    parameter = weight.parameter
    if parameter.requires_grad:
        return "is trained, and bytes have no gradient: freeze it with requires_grad_(False), or skip it"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}: expected a floating dtype"
    if is_dtensor(parameter) or not (pattern_of(parameter) is None or is_spread(weight.module)):
        return "has a pattern already: quantize the model before em.annotate and before it is cut"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "has hooks, which expect the weight: remove them"
    if len(users) > 1:
        return f"is shared ({', '.join(map(repr, users))}): skip it"
    if "forward" in vars(weight.module):
        return "is in a module whose forward was replaced, and reads the weight: skip it"
    if (problem := form.problem(_logical(weight))) is not None:
        return problem
    problem = tile_problem(parameter, form)
    return None if problem is None else f"{problem}, or choose another scheme"


def _logical(weight: _Weight) -> tuple[int, ...]:
    """Returns the shape (..., outputs, inputs)."""
    shape = tuple(weight.parameter.shape)
    return (*shape[:-2], shape[-1], shape[-2]) if _is_transposed(weight) else shape


def _is_transposed(weight: _Weight) -> bool:
    return bool(getattr(weight.module, "is_transposed", False))


def _pack(weight: _Weight, form: Scheme, adapters: frozenset[str]) -> None:
    """Replaces the weight by its codes and scales."""
    module, transposed = weight.module, _is_transposed(weight)
    values = weight.parameter.detach()
    values = values.transpose(-1, -2).contiguous() if transposed else values
    packed = Packed(
        scheme=form.name, shape=tuple(values.shape), dtype=values.dtype, transposed=transposed, adapters=adapters
    )
    pair = [nn.Parameter(as_bytes(part), False) for part in form.encode(values, name=weight.name)]
    cut_alike(weight.parameter, form, *pair)
    # peft reads this attribute, made for parameters that DeepSpeed shards, if a parameter's shape is not its weight's.
    pair[0].ds_shape = tuple(weight.parameter.shape)  # type: ignore[attr-defined]
    delattr(module, weight.attribute)
    module.register_parameter(weight.attribute, pair[0])
    module.register_parameter(weight.attribute + SCALES, pair[1])  # directly after its codes, and so in their chunk
    become_quantized(module, weight.attribute, packed)
