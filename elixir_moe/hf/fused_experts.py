"""Hugging Face's fused experts on this library's grouped products: whole or tiled, with adapters, spread over ranks.

Owns their forward. A module is converted in place by changing its class: it stays an instance of its former class, and
keeps its parameters, their names and its hooks. Routers stay the model's own. One class serves all forms of the
weights, since layers of one model, which share a config, may be tiled, adapted or quantized or none of these.

    gate_up_proj (E, 2h, d), or up_proj (E, h, d)    gate_up_proj_bias (E, 2h)
    down_proj (E, d, h)                              down_proj_bias (E, d)          or (E, d, 2h), (E, h, d): transposed

The steps are those of `MoE`: rows are sorted by expert once, sent to the ranks of their experts and back, and summed
over the choices of their token, in the order of transformers' `grouped_mm`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.distributed.collectives import gather_into
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import ConfigError, UsageError
from elixir_moe.moe.dispatch import combine, end_all_to_all
from elixir_moe.moe.experts import Groups, grouped_linear
from elixir_moe.moe.joined_class import Joined, joined
from elixir_moe.moe.layer import LayerRanks, send_through
from elixir_moe.moe.router import Choices, sort_choices
from elixir_moe.parallel.meta_tensors import has_data
from elixir_moe.parallel.regather import saves_no_weights

M = TypeVar("M", bound=nn.Module)

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of fused experts."""
_SETTINGS = ("has_gate", "has_bias", "is_transposed")
"""Attributes that transformers sets on each module of fused experts that its own implementations can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter of one stack of weights; it adds ``scale · (x @ a.T) @ b.T`` to the product with the weight."""

    a: Tensor
    """(E, r, in)."""
    b: Tensor
    """(E, out, r)."""
    scale: float

    def of_rows(self, rows: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        """(n, in) rows sorted by expert -> (n, out)."""
        thin = grouped_linear(rows.to(dtype), self.a.to(dtype), None, groups, outputs_first=True)
        return grouped_linear(thin * self.scale, self.b.to(dtype), None, groups, outputs_first=True)

    def of(self, start: int, stop: int) -> "Adapter":
        """Returns the adapter of the experts from `start` to `stop`."""
        return Adapter(a=self.a[start:stop], b=self.b[start:stop], scale=self.scale)


Adapters = Mapping[str, Sequence[Adapter]]
"""{name of the weight: its adapters}."""


class FusedExperts(Joined, nn.Module):
    """Tokens (T, d), experts (T, k), weights (T, k) -> (T, d), as transformers calls its fused experts."""

    num_experts: int
    """The number of experts on this rank."""
    ranks: LayerRanks = LayerRanks()
    """The ranks over which the experts are spread."""
    adapters: Adapters = MappingProxyType({})
    """The adapters that are active in this forward."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, d), (T, k), (T, k) -> (T, d).

        All ranks over which the experts are spread must call it, even those without tokens. Without a fused kernel,
        the host waits for the number of rows of each expert.
        """
        if getattr(self, "_is_expert_parallel", False):
            raise UsageError(
                "these experts are spread by transformers' own expert parallelism, which grouped products do not "
                "support: leave it out, and spread them with em.spread_experts(model, mesh)"
            )
        ranks, adapters = self.ranks, self.adapters
        choices = sort_choices(top_k_index, self.num_experts * ranks.ep, 1)
        rows, exchange, dispatch = send_through(
            hidden_states,
            choices,
            _counts(choices, ranks),
            ranks.within_experts(),
            lambda rows, groups: self.of_rows(rows, groups, adapters),
            dropless=True,
        )
        return combine(end_all_to_all(rows, exchange), top_k_weights, dispatch).to(hidden_states.dtype)

    def of_rows(self, rows: Tensor, groups: Groups, adapters: Adapters) -> Tensor:
        """(n, d) rows sorted by expert -> (n, d), before the weights of the choices."""
        this: Any = self
        hidden = self._adapted("gate_up_proj" if this.has_gate else "up_proj", rows, groups, adapters)
        hidden = this._apply_gate(hidden) if this.has_gate else this.act_fn(hidden)
        out = self._adapted("down_proj", hidden, groups, adapters)
        return this.post_expert_norm(out) if getattr(this, "has_post_expert_norm", False) else out

    def _adapted(self, name: str, rows: Tensor, groups: Groups, adapters: Adapters) -> Tensor:
        out = self.product(name, rows, groups)
        for adapter in adapters.get(name, ()):
            out = out.add_(adapter.of_rows(rows, groups, out.dtype))
        return out

    def product(self, name: str, rows: Tensor, groups: Groups) -> Tensor:
        """(n, in) rows sorted by expert -> (n, out): each row times the weight called `name` of its expert."""
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        outputs_first = not self.is_transposed
        rows = rows.to(weight.dtype)
        return grouped_linear(rows, weight, bias, groups, outputs_first=outputs_first, saves=not saves_no_weights(self))


class FusedTile(FusedExperts):
    """One tile of a layer, with some of its experts: (n, d) rows sorted by expert -> (n, d)."""

    def forward(self, rows: Tensor, groups: Groups, adapters: Adapters) -> Tensor:  # type: ignore[override]
        """(n, d) -> (n, d), before the weights of the choices."""
        return self.of_rows(rows, groups, adapters)


def _counts(choices: Choices, ranks: LayerRanks) -> Tensor | None:
    """Returns (ep, E, 1) int64: how many rows each rank sends to each expert. One all-gather over the `ep` ranks.

    Returns None if all experts are on this rank.
    """
    if ranks.ep_group is None:
        return None
    mine = choices.starts.diff().long()
    table = mine.new_empty(ranks.ep, len(mine))
    if has_data(mine):
        with Wait("the all-gather of the experts' rows", dist.get_process_group_ranks(ranks.ep_group)):
            gather_into(table.view(-1), mine, ranks.ep_group)
    return table.unsqueeze(2)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether a module holds fused experts that transformers' own implementations can run."""
    return hasattr(module, "num_experts") and all(hasattr(module, name) for name in _SETTINGS)


def is_spread(module: nn.Module) -> TypeGuard[FusedExperts]:
    """Whether a module has some experts of a layer, and other ranks have the rest."""
    return isinstance(module, FusedExperts) and "ranks" in vars(module)


def become_fused(module: nn.Module, kind: type[FusedExperts] = FusedExperts) -> None:
    """Gives fused experts of transformers the forward of `FusedExperts`, or of a subclass `kind`."""
    if not isinstance(module, kind):
        plain = type(module)
        module.__class__ = joined(f"{kind.__name__}Of{plain.__name__}", kind, plain)  # type: ignore[assignment]


class UnmergedAdapters(Joined):
    """peft's wrapper of one stack of weights; the adapter's product is computed separately from the stack's.

    peft builds ``W + B A``, a tensor as large as the stack, in each forward. Parameters, their names and saved files
    stay peft's. A parameter that is not a stack of `FusedExperts` is adapted as before.
    """

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        this: Any = self
        experts, name = this.get_base_layer(), this.parameter_name
        if not isinstance(experts, FusedExperts) or name not in STACKS:
            with super()._activate_lora(active_adapters):  # type: ignore[misc]
                yield
            return
        before = vars(experts).get("adapters")
        mine = [self._adapter(adapter) for adapter in active_adapters if adapter in this.lora_A]
        experts.adapters = {**experts.adapters, name: mine}
        try:
            yield
        finally:
            del experts.adapters
            if before is not None:
                experts.adapters = before

    def _adapter(self, adapter: str) -> Adapter:
        """Unpacks peft's factors: A has the expert as its slowest dim, (E · r, in), B as its fastest, (out, r · E)."""
        this: Any = self
        a, b = this.lora_A[adapter].weight, this.lora_B[adapter].weight
        stacked_a = a.reshape(this.num_experts, -1, a.shape[1])
        stacked_b = b.reshape(b.shape[0], -1, this.num_experts).permute(2, 0, 1)
        return Adapter(a=stacked_a, b=stacked_b, scale=this.scaling[adapter])

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Merges the adapters as peft does. Raises ConfigError if the weights are spread, tiled or quantized."""
        this: Any = self
        weight = getattr(experts := this.get_base_layer(), this.parameter_name, None)
        if is_spread(experts):
            raise ConfigError(
                f"merge: the experts of {this.parameter_name!r} are spread over ranks: save the adapters with "
                f"em.save_pretrained, and merge them into a model that is whole"
            )
        if weight is None:
            raise ConfigError(f"merge: the weight {this.parameter_name!r} is in tiles: merge a model that is not tiled")
        if not weight.is_floating_point():
            raise ConfigError(
                f"merge: the weight {this.parameter_name!r} is quantized, and adapters cannot be added to bytes: call "
                f"em.dequantize(model) first; its docstring explains what a second quantization would lose"
            )
        super().merge(*args, **kwargs)  # type: ignore[misc]


def group_experts(model: M) -> M:
    """Gives Hugging Face's fused experts the grouped products of this library, in place; returns the model.

    `wrap`, `tile` and `quantize` call it where they need it: for experts that have peft's adapters
    (`target_parameters`), are tiled, quantized or spread over ranks. Others keep transformers' products unless this is
    called. Results differ from transformers' at most by the order of sums. For experts with adapters it computes
    ``x @ W + s (x @ A) @ B`` where peft computes ``x @ (W + s A B)``: no tensor as large as the stack is made, and the
    weight may be quantized.

    Args:
        model: a model that is not wrapped, with or without adapters.

    Raises:
        ConfigError: the model has no fused experts that transformers' own implementations can run.
        UsageError: the model is wrapped.
    """
    if getattr(model, "_elixir", None) is not None:
        raise UsageError("group_experts() of a wrapped model: call em.group_experts(model) before em.wrap")
    experts = [module for module in model.modules() if is_fused_experts(module) or isinstance(module, FusedExperts)]
    if not experts:
        raise ConfigError(
            f"group_experts: {type(model).__name__} has no fused experts of transformers: modules with stacks such as "
            f"gate_up_proj and down_proj, as its mixtures have since version 5"
        )
    for module in experts:
        become_fused(module)
    run_adapters_unmerged(model)
    return model


def run_adapters_unmerged(model: nn.Module) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Makes peft's adapters of fused experts compute their products separately from the weights', in place.

    Returns the modules that it changed, each with its former class.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    for wrapper in list(adapted_stacks(model)):
        for module, become in ((wrapper.get_base_layer(), become_fused), (wrapper, _become_unmerged)):  # type: ignore[operator]
            before = type(module)
            become(module)
            if type(module) is not before:
                changed.append((module, before))
    return changed


def restore_classes(changed: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Undoes `run_adapters_unmerged`, given its result; adapters of tiled or quantized weights stay unmerged."""
    for module, before in changed:
        unmerged: Any = module if isinstance(module, UnmergedAdapters) else None
        if unmerged is None or not isinstance(unmerged.get_base_layer(), FusedExperts):
            module.__class__ = before  # type: ignore[assignment]


def adapted_parameter(module: nn.Module) -> str | None:
    """The name of the parameter that peft's wrapper of a parameter adapts; None if the module is not such a wrapper."""
    name = getattr(module, "parameter_name", None)
    return name if isinstance(name, str) and hasattr(module, "get_base_layer") else None


def adapted_stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields peft's wrappers of single stacks of fused experts."""
    for module in model.modules():
        if adapted_parameter(module) in STACKS and hasattr(module, "_activate_lora"):
            experts: Any = module.get_base_layer()  # type: ignore[operator]
            if is_fused_experts(experts) or isinstance(experts, FusedExperts):
                yield module


def _become_unmerged(wrapper: nn.Module) -> None:
    """Makes a wrapper of peft an `UnmergedAdapters`; the class keeps its name, by which peft recognizes it."""
    if not isinstance(wrapper, UnmergedAdapters):
        wrapper.__class__ = joined(type(wrapper).__name__, UnmergedAdapters, type(wrapper))  # type: ignore[assignment]
