"""Lets Megatron-core models run on fake tensors: replaces their global state, and routes tokens evenly.

Owns the replacement of Megatron's global state during a trace, and the substitute for its token dispatchers. A real
dispatcher selects rows by the router's values; the substitute moves as many rows as balanced routing would, through the
same copies and Megatron's own collectives. Never imports a Megatron module that the model has not imported.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elixir_moe.parallel.meta_tensors import even_counts

_MOE = "megatron.core.transformer.moe"


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Replaces Megatron's global buffers and routes the model's mixtures evenly while open."""
    core: Any = sys.modules.get("megatron.core.parallel_state")
    utils: Any = sys.modules.get(f"{_MOE}.moe_utils")
    logging: Any = sys.modules.get(f"{_MOE}.moe_logging")
    buffers = getattr(core, "_GLOBAL_MEMORY_BUFFER", None)
    with ExitStack() as stack:
        if buffers is not None:
            stack.enter_context(_replaced(core, "_GLOBAL_MEMORY_BUFFER", type(buffers)()))
        if hasattr(utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
            stack.enter_context(_replaced(utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}))
        if hasattr(logging, "_MOE_METRICS_TRACKER"):
            stack.enter_context(_replaced(logging, "_MOE_METRICS_TRACKER", None))
        if hasattr(utils, "MoEAuxLossAutoScaler"):
            stack.enter_context(_replaced(utils.MoEAuxLossAutoScaler, "main_loss_backward_scale", None))
        for module in model.modules():
            if is_mixture(module):
                stack.enter_context(_replaced(module, "token_dispatcher", EvenDispatcher(module.token_dispatcher)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces the attribute `name` of `owner` while open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def is_mixture(module: nn.Module) -> bool:
    """Whether `module` is a mixture layer of Megatron-core."""
    return any(kind.__module__ == f"{_MOE}.moe_layer" for kind in type(module).__mro__)


class EvenDispatcher:
    """Replaces the methods of a token dispatcher that move rows, listed in the order in which `MoELayer` calls them.

    Other attributes, which differ between Megatron's versions, come from the real dispatcher.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self._gathers = "AllGather" in type(real).__name__
        self._mappings: Any = sys.modules["megatron.core.tensor_parallel.mappings"]
        self._shape = torch.Size()
        self._shared: Tensor | None = None
        self._picked: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def dispatch_preprocess(self, hidden: Tensor, _routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Turns (tokens, width) and (tokens, experts) into the rows to send."""
        self._shape = hidden.shape
        self._shared = None if self._real.shared_experts is None else self._real.shared_experts(hidden)
        rows = hidden.view(-1, hidden.shape[-1])
        return (rows, probs) if self._gathers else self._permuted(rows, probs, self._choices(len(rows)))

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Turns sent rows into received rows."""
        if not self._gathers:
            return self._exchanged(hidden), self._exchanged(probs)
        gather = self._mappings.gather_from_sequence_parallel_region
        group = self._real.tp_ep_group
        return (gather(hidden, group=group), gather(probs, group=group)) if group.size() > 1 else (hidden, probs)

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Turns received rows into the rows of this rank's experts, expert by expert, and their number per expert."""
        experts = self._real.num_local_experts
        if self._gathers:
            rows = self._choices(len(hidden)) // self._real.ep_size
            hidden, probs = self._permuted(hidden, probs[:, :experts].contiguous(), rows)
        else:
            if self._real.tp_size > 1:
                gather = self._mappings.gather_from_sequence_parallel_region
                hidden, probs = (gather(t, group=self._real.tp_group) for t in (hidden, probs))
            if experts > 1:
                hidden, probs = hidden.clone(), probs.clone()  # sorted by expert
        return hidden, np.array(even_counts(len(hidden), experts)), probs

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        """Restores the order in which rows were received."""
        if self._gathers:
            return self._unpermuted(hidden, self._tokens() * self._real.tp_ep_group.size())
        if self._real.num_local_experts > 1:
            hidden = hidden.clone()
        if self._real.tp_size > 1:
            return self._summed(hidden, self._real.tp_group)
        return hidden

    def token_combine(self, hidden: Tensor) -> Tensor:
        """Returns rows to the ranks that sent them."""
        if not self._gathers:
            return self._exchanged(hidden)
        group = self._real.tp_ep_group
        return self._summed(hidden, group) if group.size() > 1 else hidden

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Restores one row per token, in the original shape."""
        output = (hidden if self._gathers else self._unpermuted(hidden, self._tokens())).view(self._shape)
        return output if self._shared is None else output + self._shared

    def _tokens(self) -> int:
        return self._shape.numel() // self._shape[-1]

    def _choices(self, tokens: int) -> int:
        """Number of rows for `tokens` tokens under top-k routing, limited by the experts' capacity."""
        config = self._real.config
        chosen: int = tokens * config.moe_router_topk
        factor = config.moe_expert_capacity_factor
        capacity = -(-int(chosen * factor) // config.num_moe_experts) * config.num_moe_experts if factor else chosen
        return capacity if config.moe_pad_expert_input_to_capacity else min(chosen, capacity)

    def _permuted(self, hidden: Tensor, probs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        self._picked = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
        return hidden.index_select(0, self._picked), probs.t().contiguous().view(-1).index_select(0, self._picked)

    def _unpermuted(self, hidden: Tensor, tokens: int) -> Tensor:
        assert self._picked is not None
        return hidden.new_zeros(tokens, hidden.shape[-1]).index_add(0, self._picked, hidden)

    def _exchanged(self, rows: Tensor) -> Tensor:
        ranks = self._real.ep_size
        counts = even_counts(len(rows), ranks)
        out: Tensor = self._mappings.all_to_all(self._real.ep_group, rows, counts, counts) if ranks > 1 else rows
        return out

    def _summed(self, rows: Tensor, group: Any) -> Tensor:
        out: Tensor = self._mappings.reduce_scatter_to_sequence_parallel_region(rows, group=group)
        return out
