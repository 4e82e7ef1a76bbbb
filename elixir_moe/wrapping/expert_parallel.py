"""`spread_experts`: each rank keeps some of the experts of Hugging Face's mixtures.

Owns the cut of the stacks and of peft's adapters on them, and their patterns. Which rank has an expert is `MoE`'s
order: rank i of ``ep`` has the experts from ``i · E / ep`` on. `fused` runs them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import ConfigError, LayoutError, UsageError
from elixir_moe.hf.fused_experts import (
    STACKS,
    adapted_parameter,
    adapted_stacks,
    become_fused,
    is_fused_experts,
    is_spread,
    run_adapters_unmerged,
)
from elixir_moe.moe.layer import LayerRanks
from elixir_moe.parallel.dtensor import is_dtensor
from elixir_moe.parallel.pattern import EXPERT_AXIS, Pattern
from elixir_moe.parallel.rules import attach, pattern_of
from elixir_moe.wrapping.deferred_init import record_of

M = TypeVar("M", bound=nn.Module)


def spread_experts(model: M, mesh: DeviceMesh) -> M:
    """Spreads the fused experts of a Hugging Face mixture over the ranks of ``ep``, in place; returns the model.

    Each rank keeps ``E / ep`` experts of every mixture layer, annotated with their pattern, and tokens cross to the
    ranks of their experts and back as in `MoE`. Routers, their losses and all other parameters stay as they are: they
    are replicated over the world unless they are annotated. Names stay too, and `full_state_dict`, `save` and
    `save_pretrained` have the experts of all ranks. Adapters of peft on stacks of experts (`target_parameters`) are cut
    with them. Every rank must run the layers the same number of times, whatever its tokens are.

    To be called on every rank with the same model, before `tile`, before the optimizer is built and before `wrap`;
    after peft, and before or after `quantize`. Parameters may be on meta.

    Args:
        model: a model of transformers, or one that contains such a model.
        mesh: an expert mesh ("edp", "ep", "tp") from `expert_mesh`.

    Raises:
        ConfigError: the model has no fused experts, or has them in tiles.
        LayoutError: ``ep`` does not divide the experts of a layer; experts have a pattern or are cut already, or are
            drawn by a `sharded_init` that has ended; `mesh` has other axes.
        UsageError: the model is wrapped.
    """
    if getattr(model, "_elixir", None) is not None:
        raise UsageError("spread_experts() of a wrapped model: call em.spread_experts before em.wrap")
    ranks = LayerRanks.on(mesh)
    experts = check_spreadable(model, ranks.ep)
    pattern = Pattern(mesh, replicate=("edp", "tp"), shard={EXPERT_AXIS: 0})
    first = ranks.batch_rank % ranks.ep
    for wrapper in adapted_stacks(model):
        _cut_adapters(wrapper, pattern, first, ranks.ep)
    for module in experts:
        _cut_experts(module, pattern, first, ranks)
    run_adapters_unmerged(model)
    return model


def check_spreadable(model: nn.Module, ep: int) -> list[nn.Module]:
    """The fused experts of a model. Raises LayoutError or ConfigError if `ep` ranks cannot share them."""
    experts = {name: module for name, module in model.named_modules() if is_fused_experts(module)}
    users = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    wrappers: Any = [m for m in model.modules() if adapted_parameter(m) not in (None, *STACKS)]
    uncut = {wrapper.get_base_layer(): wrapper.parameter_name for wrapper in reversed(wrappers)}
    problems = [
        f"module {name!r} {why}"
        for name, module in experts.items()
        if (why := _refusal(module, ep, users, uncut.get(module)))
    ]
    if not experts:
        problems = [
            f"{type(model).__name__} has no fused experts of transformers, or has them in tiles: spread them before "
            f"em.tile"
        ]
    if problems:
        raise (LayoutError if experts else ConfigError)("spread_experts: " + "\n  ".join(problems))
    return list(experts.values())


def _refusal(module: Any, ep: int, users: Mapping[nn.Parameter, int], adapted: str | None) -> str | None:
    """Why the experts of a module cannot be spread; None if they can.

    `users` counts the names of each parameter in the model. `adapted` is a parameter with adapters that is not a stack.
    """
    if module.num_experts % ep:
        degrees = [n for n in range(1, module.num_experts + 1) if module.num_experts % n == 0]
        return f"has {module.num_experts} experts, which ep={ep} ranks cannot share equally: choose ep among {degrees}"
    if getattr(module, "_is_expert_parallel", False) or any(is_dtensor(p) for p in module.parameters()):
        return "is cut already: leave transformers' own expert or tensor parallelism out"
    if is_spread(module):
        return "is spread already: call em.spread_experts once"
    stacks = list(_stacks(module))
    if not stacks:
        return "has no parameter with a row for each expert"
    if any(pattern_of(p) is not None for _, p in stacks):
        return "has patterns already: leave its experts out of em.annotate, since em.spread_experts annotates them"
    if shared := [name for name, p in stacks if users[p] > 1]:
        return f"has {shared[0]!r}, which other modules share"
    if heard := [
        name for name, p in stacks if p._backward_hooks or p._post_accumulate_grad_hooks or p.grad is not None
    ]:
        return f"has {heard[0]!r} with hooks or a gradient, which a part of it would lose"
    if adapted is not None:
        return f"has adapters on {adapted!r}, which cannot be cut: adapt only its weights ({', '.join(STACKS)})"
    if lost := [name for name, p in stacks if record_of(p) is not None and record_of(p.detach()[:1].clone()) is None]:
        return f"has {lost[0]!r}, which em.wrap draws: call em.spread_experts inside em.sharded_init()"
    return None


def _stacks(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of fused experts with a row for each."""
    for name, parameter in module.named_parameters(recurse=False):
        if len(parameter) == module.num_experts:
            yield name, parameter


def _cut_experts(module: Any, pattern: Pattern, first: int, ranks: LayerRanks) -> None:
    local = module.num_experts // ranks.ep
    for name, parameter in list(_stacks(module)):
        _replace(module, name, parameter.detach()[first * local : (first + 1) * local], pattern)
    for name, packed in vars(module).get("packed", {}).items():
        module.packed[name] = replace(packed, shape=(local, *packed.shape[1:]))
    become_fused(module)
    module.num_experts, module.ranks = local, ranks


def _cut_adapters(wrapper: Any, pattern: Pattern, first: int, ep: int) -> None:
    """Cuts peft's factors: A has the expert as its slowest dim, (E · r, in), and B as its fastest, (out, r · E)."""
    local = wrapper.num_experts // ep
    for adapter in wrapper.lora_A:
        a, b = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
        rows, (out, columns) = len(a.weight) // ep, b.weight.shape
        _replace(a, "weight", a.weight.detach()[first * rows : (first + 1) * rows], pattern)
        stacked = b.weight.detach().view(out, columns // wrapper.num_experts, wrapper.num_experts)
        mine = stacked[..., first * local : (first + 1) * local]
        by_expert = replace(pattern, shard=((EXPERT_AXIS, 2),), view=tuple(mine.shape), grows=1)
        _replace(b, "weight", mine.reshape(out, -1), by_expert)
        a.out_features, b.in_features = rows, columns // ep
    wrapper.num_experts = local


def _replace(module: nn.Module, name: str, part: Tensor, pattern: Pattern) -> None:
    """Puts a copy of `part` in the place of the parameter, whose memory is then free."""
    trained = getattr(module, name).requires_grad
    parameter = nn.Parameter(part.clone(), requires_grad=trained)
    attach(parameter, pattern)
    module._parameters[name] = parameter


def check_spread(model: nn.Module) -> None:
    """Raises LayoutError for whole experts with the pattern of spread ones, and for adapters that are not spread."""
    for name, module in model.named_modules():
        if not is_fused_experts(module) or is_spread(module):
            continue
        for own, parameter in _stacks(module):
            pattern = pattern_of(parameter)
            if pattern is not None and EXPERT_AXIS in dict(pattern.shard) and pattern.mesh.size(EXPERT_AXIS) > 1:
                raise LayoutError(
                    f"{name}.{own} has a pattern that is sharded over {EXPERT_AXIS!r}, and each rank has all "
                    f"{len(parameter)} experts: leave these experts out of em.annotate, and call "
                    f"em.spread_experts(model, mesh), which cuts them, annotates them and sends tokens to their ranks"
                )
    for wrapper in adapted_stacks(model):
        experts: Any = wrapper.get_base_layer()  # type: ignore[operator]
        factors = [p for name, p in wrapper.named_parameters() if ".lora_" in f".{name}" and "base_layer" not in name]
        if is_spread(experts) and any(pattern_of(p) is None for p in factors):
            raise LayoutError(
                f"parameter {wrapper.parameter_name!r} of experts that are spread over ranks has adapters that each "
                f"rank has drawn for its own experts: add the adapters before em.spread_experts, which cuts them too"
            )
