"""The router, and the statistics of the routing on all ranks.

Owns the router's weight, the statistics of a batch that is spread over ranks, the auxiliary losses and the queue of a
limited capacity. Moves no token: the one collective here gathers a few numbers.
Sources: Switch Transformer, eq. 4 (load balance); ST-MoE, eq. 5 (z-loss); GShard, algorithm 1 (capacity).

Shape letters, here and in `dispatch`, `experts` and `layer`: T tokens of this rank, k choices a token, E experts of the
layer, L of them on this rank, R ranks that share the batch, d width of the model, h of an expert.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import LayoutError
from elixir_moe.parallel.dataless import has_data


class Routing(NamedTuple):
    """The router's result for the tokens of this rank; everything but `experts` carries gradients."""

    experts: Tensor
    """(T, k) int64: the chosen experts, the most probable first."""
    weights: Tensor
    """(T, k) fp32: the factor on each expert's output."""
    probabilities: Tensor
    """(T, E) fp32: the softmax over all experts."""
    log_normaliser: Tensor
    """(T,) fp32: logsumexp of the logits."""


class TopKRouter(nn.Module):
    """A linear map to one logit an expert, softmax, and the k most probable experts of each token.

    Computes in fp32 whatever the dtype of the weight and of the tokens: bf16 logits tie, and ties route at random.

    Args:
        d_model: width of a token.
        num_experts: experts to choose among.
        top_k: experts a token is sent to.
        normalise: divide the chosen probabilities by their sum; needs ``top_k > 1``, since one weight divided by itself
            is 1 and gives the router no gradient.

    Raises:
        LayoutError: `top_k` is not in 1..num_experts, or `normalise` with ``top_k=1``.
    """

    def __init__(self, *, d_model: int, num_experts: int, top_k: int = 1, normalise: bool = False) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise LayoutError(f"top_k={top_k} of {num_experts} experts: choose top_k in 1..{num_experts}")
        if normalise and top_k == 1:
            raise LayoutError("normalise=True with top_k=1 makes every weight 1 and leaves the router without gradient")
        self.top_k, self.normalise = top_k, normalise
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from the global RNG."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Routing:
        """(T, d) -> Routing."""
        # Meta tensors know no autocast; on every other device it would make this product bf16 again.
        with nullcontext() if tokens.is_meta else torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
        probabilities = logits.softmax(dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(experts, weights, probabilities, logits.logsumexp(dim=-1))


class RoutingStatistics(NamedTuple):
    """Statistics of the routing of the global batch, known on every rank after one gather."""

    counts: Tensor
    """(R, k, E) int64: how many tokens rank r sends to expert e as their c-th choice, before any is dropped."""
    tokens: Tensor
    """() float64: T of all ranks together."""
    probability: Tensor
    """(E,) fp32: mean probability of each expert over the global batch; carries this rank's gradient."""
    squared_log_normaliser: Tensor
    """() fp32: mean square of the log normaliser over the global batch; carries this rank's gradient."""


def gather_statistics(routing: Routing, process_group: dist.ProcessGroup | None) -> RoutingStatistics:
    """Adds up the routing of all ranks that share the batch: one all-gather of k·E + E + 2 numbers, none in backward.

    The gradient. Let s_r be a sum over the tokens of rank r and M = 1/T · sum_r s_r the global mean, with T tokens and
    R ranks in all. Every rank has the same M in its loss, so the wanted gradient is f'(M) · 1/T · sum_r ds_r/dw, while
    the average of the ranks' gradients g_r is 1/R · sum_r g_r. The two are equal if g_r = f'(M) · R/T · ds_r/dw: the
    value is the global M, the gradient is that of s_r · R/T. With equal numbers of tokens R/T is 1/T_r, and backward is
    the identity with respect to the local mean; with unequal numbers the same formula stays exact.

    Args:
        routing: the routing of this rank's tokens.
        process_group: the ranks that share the batch, in the order of the global batch; None for one process.
    """
    T, k = routing.experts.shape
    E = routing.probabilities.shape[1]
    sums = torch.cat([routing.probabilities.sum(dim=0), routing.log_normaliser.square().sum().view(1)])  # (E + 1,)
    counts = _count(routing.experts, E)
    ranks = 1 if process_group is None else process_group.size()
    if process_group is None:
        counts, tokens, total = counts.unsqueeze(0), sums.new_full((), T, dtype=torch.float64), sums.detach()
    else:
        # float64 holds counts up to 2^53 exactly, so one message carries both kinds of numbers.
        numbers = sums.new_full((1,), T, dtype=torch.float64)
        mine = torch.cat([counts.flatten().double(), sums.detach().double(), numbers])
        table = mine.new_empty(ranks, mine.numel())
        if has_data(mine):
            with Wait("the all-gather of the router's statistics", dist.get_process_group_ranks(process_group)):
                dist.all_gather(list(table), mine, group=process_group)
        gathered, others, numbers = table.split([k * E, E + 1, 1], dim=1)
        counts, tokens, total = gathered.long().view(ranks, k, E), numbers.sum(), others.sum(dim=0)
    local = sums * (ranks / tokens).float()
    mean = (total / tokens).float() + (local - local.detach())  # value of the first, gradient of the second
    return RoutingStatistics(counts, tokens, mean[:E], mean[E])


def load_balance_loss(statistics: RoutingStatistics) -> Tensor:
    """E · sum_e f_e · P_e: f_e is the fraction of all choices that fell on e, P_e its mean probability; () fp32.

    1 if routing is uniform, whatever k. Choices that the capacity drops count too, so that the router learns from them.
    """
    counts = statistics.counts.sum(dim=(0, 1))
    fraction = (counts / (statistics.tokens * statistics.counts.shape[1])).float()
    return counts.numel() * (fraction * statistics.probability).sum()


def kept_counts(counts: Tensor, capacity_factor: float | None) -> Tensor:
    """How many of `counts` (R, k, E) each expert's capacity admits, same shape.

    An expert takes ``ceil(capacity_factor · k · T / E)`` tokens, with T of all ranks. It admits first choices before
    second choices, and each of them in the order of the global batch (rank by rank, each rank's tokens in order). So
    the number kept on a rank follows from the number ahead of them.
    """
    if capacity_factor is None:
        return counts
    R, k, E = counts.shape
    tokens = counts[:, 0].sum()
    capacity = torch.ceil(capacity_factor * k * tokens.double() / E).long()
    queue = counts.transpose(0, 1).reshape(k * R, E)
    ahead = queue.cumsum(dim=0) - queue
    return (capacity - ahead).clamp(min=0).minimum(queue).view(k, R, E).transpose(0, 1)


def _count(experts: Tensor, num_experts: int) -> Tensor:
    """(T, k) choices -> (k, E) counts; integer additions, so their order does not matter."""
    k = experts.shape[1]
    slots = (experts + num_experts * torch.arange(k, device=experts.device)).flatten()
    counts = torch.zeros(k * num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, slots, torch.ones_like(slots)).view(k, num_experts)
