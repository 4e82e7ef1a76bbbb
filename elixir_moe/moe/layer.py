"""The mixture-of-experts layer, in one process or with its experts sharded over ranks.

Owns the order of the steps and the process groups they use; never knows chunks or memory. The mathematics of a token
does not depend on the layout: with ``mesh=None`` the same code runs without communication, and every layout must agree
with it.

    router -> gather the statistics -> dispatch -> experts -> combine (-> mix with the residual MLP)

Sources: Switch Transformer; GShard; PR-MoE's residual branch, DeepSpeed-MoE, section 4.1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import LayoutError
from elixir_moe.moe.dispatch import (
    Dispatch,
    Exchange,
    begin_all_to_all,
    combine,
    dispatch_tokens,
    end_all_to_all,
    permute,
    place,
)
from elixir_moe.moe.experts import MLP, GroupedExperts, Groups
from elixir_moe.moe.router import (
    Choices,
    TopKRouter,
    auxiliary_loss,
    gather_statistics,
    kept_counts,
    sort_choices,
    tokens_per_expert,
)
from elixir_moe.torch_private import flattened

EXPERT_MESH_AXES = ("edp", "ep", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRanks:
    """A rank's place among the ranks that share a layer; copies of a layer share it, like the process groups."""

    ep: int = 1
    """Ranks that share the experts."""
    batch_rank: int = 0
    """This rank's place in the global batch: ``edp`` major, ``ep`` minor, in the order of the ranks."""
    ep_group: dist.ProcessGroup | None = None
    """The ranks that share the experts; None for a single rank."""
    batch_group: dist.ProcessGroup | None = None
    """The ranks that share the batch, in the order of the global batch; None for a single rank."""

    @classmethod
    def on(cls, mesh: DeviceMesh | None) -> Self:
        """Returns this rank's place on an expert mesh. Collective the first time unless ``edp`` or ``ep`` is 1."""
        if mesh is None:
            return cls()
        if mesh.mesh_dim_names != EXPERT_MESH_AXES:
            raise LayoutError(
                f"MoE needs a mesh with axes {EXPERT_MESH_AXES}, got {mesh.mesh_dim_names}: use em.expert_mesh()"
            )
        edp, ep, _ = mesh.mesh.shape
        batch_rank = mesh.get_local_rank("edp") * ep + mesh.get_local_rank("ep")
        ep_group = mesh.get_group("ep") if ep > 1 else None
        if ep == 1:
            batch_group = mesh.get_group("edp") if edp > 1 else None
        else:
            # One flattened mesh per expert mesh: torch returns the same one to every layer.
            batch_group = ep_group if edp == 1 else flattened(mesh["edp", "ep"], "edp_ep").get_group()
        return cls(ep=ep, batch_rank=batch_rank, ep_group=ep_group, batch_group=batch_group)

    def within_experts(self) -> Self:
        """Returns this rank's place among only the ranks that share the experts."""
        return replace(self, batch_rank=self.batch_rank % self.ep, batch_group=self.ep_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class MoE(nn.Module):
    """Top-k mixture of experts: each token's output is the weighted sum of its k experts' outputs.

    ``forward`` returns the output and the auxiliary loss. Every rank must call it equally often, with any number of
    tokens: a forward runs one all-gather of a few numbers over (edp, ep) and two all-to-alls over ep, a backward two
    all-to-alls. Gradients are those of this rank; `Pattern` defines their reduction: ``*.experts.*`` are sharded on dim
    0 over ``ep``, the rest is replicated.

    Args:
        d_model: width of a token.
        d_hidden: inner width of each expert (and of the residual MLP).
        num_experts: experts of the layer, on all ranks together.
        top_k: experts a token is sent to.
        mesh: an expert mesh ("edp", "ep", "tp") from `expert_mesh`; None puts all experts in this process. Experts are
            not sharded over ``tp``: its ranks have the same tokens and do the same work, so annotate every parameter of
            the layer as replicated over ``tp``.
        capacity_factor: each expert accepts ``ceil(capacity_factor · top_k · tokens / num_experts)`` of the global
            batch's tokens, first choices first, then in the order of the batch; further choices are dropped and
            contribute zero. None drops nothing.
        residual: add a dense MLP parallel to the experts; a linear map of the token and a softmax mix the two (PR-MoE).
        normalize: divide a token's top-k probabilities by their sum.
        aux_coefficient: weight of the load-balancing loss.
        z_coefficient: weight of the router's z-loss.
        bias: whether experts and MLP have biases.

    Raises:
        LayoutError: `num_experts` is not a multiple of the mesh's ``ep``; `top_k` not in 1..num_experts;
            `capacity_factor` not positive; a mesh with other axes.
    """

    tokens_per_expert: Tensor
    """(E,) int64, detached: the choices of each expert in the last forward, over all ranks, before drops."""

    def __init__(
        self,
        *,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        top_k: int = 1,
        mesh: DeviceMesh | None = None,
        capacity_factor: float | None = None,
        residual: bool = False,
        normalize: bool = False,
        aux_coefficient: float = 0.01,
        z_coefficient: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and capacity_factor <= 0:
            raise LayoutError(f"capacity_factor={capacity_factor} admits no token: choose one above 0, or None")
        self.place = LayerRanks.on(mesh)
        local = _local_experts(num_experts, self.place.ep)
        self.num_experts, self.capacity_factor = num_experts, capacity_factor
        self.aux_coefficient, self.z_coefficient = aux_coefficient, z_coefficient
        self.router = TopKRouter(d_model=d_model, num_experts=num_experts, top_k=top_k, normalize=normalize)
        self.experts = GroupedExperts(
            d_model=d_model,
            d_hidden=d_hidden,
            num_local=local,
            first_expert=self.place.batch_rank % self.place.ep * local,
            bias=bias,
        )
        self.mlp = MLP(d_model=d_model, d_hidden=d_hidden, bias=bias) if residual else None
        self.coefficient = nn.Linear(d_model, 2) if residual else None
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., d) -> (..., d) of the same dtype, and the auxiliary loss, () fp32, multiplied by its coefficients.

        The auxiliary loss is that of the global batch on every rank; its gradient is this rank's part, correct once
        gradients are averaged over the ranks that share the batch (see `auxiliary_loss`).
        """
        tokens, ranks, top_k, capacity = x.reshape(-1, x.shape[-1]), self.place, self.router.top_k, self.capacity_factor
        routing = self.router(tokens, self.z_coefficient != 0)
        choices = sort_choices(routing.experts, self.num_experts, 1 if capacity is None else top_k)
        statistics = gather_statistics(routing, choices, ranks.batch_group)
        kept = statistics.counts if capacity is None else kept_counts(statistics.counts, capacity)
        rows, exchange, dispatch = send_through(tokens, choices, kept, ranks, self.experts, dropless=capacity is None)
        overlapped = None  # the dense branch needs no other rank: it runs while rows are on their way
        if self.mlp is not None and self.coefficient is not None:
            overlapped = self.coefficient(x).softmax(dim=-1, dtype=torch.float32).to(x.dtype), self.mlp(x)
        out = combine(end_all_to_all(rows, exchange), routing.weights, dispatch).to(x.dtype).view_as(x)
        if overlapped is not None:
            share, dense = overlapped
            out = share[..., 0:1] * out + share[..., 1:2] * dense
        self.tokens_per_expert = tokens_per_expert(statistics)
        aux_loss = auxiliary_loss(
            routing, statistics, load_balance=self.aux_coefficient, z=self.z_coefficient, top_k=top_k
        )
        return out, aux_loss

    def extra_repr(self) -> str:
        """Returns the text that `print` shows in addition to the submodules."""
        return f"num_experts={self.num_experts}, ep={self.place.ep}, capacity_factor={self.capacity_factor}"


def _local_experts(num_experts: int, ep: int) -> int:
    if num_experts < 1 or num_experts % ep:
        degrees = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise LayoutError(f"{num_experts} experts cannot be shared equally by ep={ep} ranks: choose ep among {degrees}")
    return num_experts // ep


def send_through(
    tokens: Tensor,
    choices: Choices,
    kept: Tensor | None,
    ranks: LayerRanks,
    experts: Callable[[Tensor, Groups], Tensor],
    *,
    dropless: bool,
) -> tuple[Tensor, Exchange | None, Dispatch]:
    """Sends (T, d) tokens through their experts; returns the rows on their way back, and their places.

    `experts` maps (n, d) rows sorted by expert, and their groups, to (n, d). The rest is as for `dispatch_tokens`, and
    the rows are for `end_all_to_all`.
    """
    rows, dispatch = dispatch_tokens(tokens, choices, kept, batch_rank=ranks.batch_rank, ep=ranks.ep, dropless=dropless)
    rows, exchange = begin_all_to_all(rows, dispatch.send, dispatch.receive, ranks.ep_group)
    rows, regroup = end_all_to_all(rows, exchange), dispatch.regroup
    if regroup is None:
        outputs = experts(rows, dispatch.groups)
    else:
        outputs = experts(permute(rows, regroup, len(rows)), dispatch.groups)
        # The outputs reuse the memory of the received rows, which are not read again.
        outputs = place(outputs, regroup, rows.detach() if rows.dtype == outputs.dtype else torch.empty_like(outputs))
    return *begin_all_to_all(outputs, dispatch.receive, dispatch.send, ranks.ep_group), dispatch
