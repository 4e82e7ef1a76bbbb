"""The router, and the statistics of the routing on all ranks.

Owns the router's weight, the order of the choices, the statistics of a batch that is sharded over ranks, the auxiliary
losses and the queues of a limited capacity. Never moves a token: the one collective here gathers a few numbers.
Sources: Switch Transformer, eq. 4 (load balance); ST-MoE, eq. 5 (z-loss); GShard, algorithm 1 (capacity).

Shape letters, here and in `dispatch`, `experts` and `layer`: T tokens of this rank, k choices per token, E experts of
the layer, L of them on this rank, q queues per expert, R ranks that share the batch, d width of the model, h width of
an expert.

With a capacity each expert has k queues, since it admits first choices before second choices. Without one it has a
single queue, which holds the choices in the order of the tokens.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe.distributed.collectives import gather_into
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import LayoutError
from elixir_moe.parallel.meta_tensors import has_data
from elixir_moe.torch_private import never_twice, softmax_backward


class Routing(NamedTuple):
    """The router's result for the tokens of this rank; everything but `experts` carries gradients."""

    experts: Tensor
    """(T, k) int64: the chosen experts, the most probable first."""
    weights: Tensor
    """(T, k) fp32: the factor on each expert's output."""
    probability: Tensor
    """(E,) float64: the sum of each expert's probability over the tokens."""
    squared_log_normalizer: Tensor | None
    """() float64: the sum of the squared logsumexp of the logits over the tokens; None without a z-loss."""


class TopKRouter(nn.Module):
    """A linear map to one logit per expert, softmax, and the k most probable experts of each token.

    Computes in fp32 for any dtype of weight and tokens: bf16 logits tie, and ties route at random.

    Args:
        d_model: width of a token.
        num_experts: experts to choose among.
        top_k: experts a token is sent to.
        normalize: divide the chosen probabilities by their sum; needs ``top_k > 1``, since a single weight divided by
            itself is 1 and gives the router no gradient.

    Raises:
        LayoutError: `top_k` is not in 1..num_experts, or `normalize` with ``top_k=1``.
    """

    def __init__(self, *, d_model: int, num_experts: int, top_k: int = 1, normalize: bool = False) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise LayoutError(f"top_k={top_k} of {num_experts} experts: choose top_k in 1..{num_experts}")
        if normalize and top_k == 1:
            raise LayoutError("normalize=True with top_k=1 makes every weight 1 and leaves the router without gradient")
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from the global RNG."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor, z_loss: bool = True) -> Routing:
        """(T, d) -> Routing; `z_loss` adds the statistic that the z-loss needs."""
        # Autocast would compute this product in bf16; meta tensors have no autocast.
        with nullcontext() if tokens.is_meta else torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
        experts, weights, probability, squared = _Route.apply(logits, self.top_k, z_loss)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(experts, weights, probability, squared)


class _Route(torch.autograd.Function):
    """(T, E) fp32 logits -> the fields of `Routing`; one backward for the softmax and all that depends on it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, z_loss: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        probabilities = logits.softmax(dim=-1)
        weights, experts = probabilities.topk(top_k, dim=-1)
        log_normalizer = logits.logsumexp(dim=-1) if z_loss else None
        ctx.save_for_backward(probabilities, experts, log_normalizer)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        squared = None if log_normalizer is None else log_normalizer.square().sum(dtype=torch.float64)
        return experts, weights, probabilities.sum(dim=0, dtype=torch.float64), squared

    @staticmethod
    @never_twice
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        probabilities, experts, log_normalizer = ctx.saved_tensors
        _, of_weights, of_probability, of_squared = grads
        grad = torch.zeros_like(probabilities)
        if of_weights is not None:
            grad.scatter_(1, experts, of_weights)  # a token's experts are distinct: nothing is written twice
        if of_probability is not None:
            grad.add_(of_probability.float())
        grad = softmax_backward(grad, probabilities, -1, torch.float32)
        if of_squared is not None:
            grad.addcmul_(probabilities, (log_normalizer * of_squared).unsqueeze(-1), value=2)
        return grad, None, None


class Choices(NamedTuple):
    """The choices of this rank's tokens, sorted by queue and then by token."""

    order: Tensor
    """(k·T,) int64: the number of each choice; choice c of token t has number ``t * k + c``."""
    queue: Tensor
    """(k·T,) int64, ascending: the queue of each choice; queue c of expert e has number ``e * q + c``."""
    starts: Tensor
    """(E·q + 1,) int32: the place of each queue's first choice; the last is k·T."""
    numbers: Tensor
    """(E·q + 1,) int64: 0, 1, 2, ..."""


def sort_choices(experts: Tensor, num_experts: int, queues: int) -> Choices:
    """Sorts the choices (T, k) into `queues` queues per expert, 1 or k."""
    numbers = torch.arange(num_experts * queues + 1, device=experts.device)
    if queues > 1:
        experts = torch.add(numbers[:queues], experts, alpha=queues)
    queue, order = experts.flatten().sort(stable=True)
    return Choices(order, queue, torch.searchsorted(queue, numbers, out_int32=True), numbers)


class RoutingStatistics(NamedTuple):
    """Statistics of the routing of the global batch, known on every rank after one gather."""

    counts: Tensor
    """(R, E, q) float64, whole numbers: the choices of rank r in each queue, before drops."""
    totals: Tensor
    """(E·q + 1 + E + z,) float64, sums over all ranks: the counts, k·T, and the sums in `Routing`; z is 0 or 1."""


def gather_statistics(routing: Routing, choices: Choices, process_group: dist.ProcessGroup | None) -> RoutingStatistics:
    """Sums the routing of all ranks that share the batch: one all-gather of the length of ``totals``, none in backward.

    The ranks of `process_group` are in the order of the global batch; None stands for one process.
    """
    num_experts = len(routing.probability)
    num_queues = len(choices.starts) - 1
    # One message carries both kinds of numbers: float64 holds counts up to 2^53 exactly.
    numbers = [choices.starts.diff(), choices.starts[-1:], routing.probability.detach()]
    if routing.squared_log_normalizer is not None:
        numbers.append(routing.squared_log_normalizer.detach().view(1))
    mine = torch.cat(numbers)
    if process_group is None:
        table, totals = mine.unsqueeze(0), mine
    else:
        table = mine.new_empty(process_group.size(), len(mine))
        if has_data(mine):
            with Wait("the all-gather of the router's statistics", dist.get_process_group_ranks(process_group)):
                gather_into(table.view(-1), mine, process_group)
        totals = table.sum(dim=0)
    return RoutingStatistics(table[:, :num_queues].unflatten(1, (num_experts, -1)), totals)


def tokens_per_expert(statistics: RoutingStatistics) -> Tensor:
    """Returns the choices of each expert over all ranks, before drops: (E,) int64."""
    _, num_experts, queues = statistics.counts.shape
    counts = statistics.totals[: num_experts * queues]
    return (counts if queues == 1 else counts.view(num_experts, queues).sum(dim=1)).long()


def auxiliary_loss(
    routing: Routing, statistics: RoutingStatistics, *, load_balance: float, z: float, top_k: int
) -> Tensor:
    """Returns the sum of load-balancing loss and z-loss of the global batch, each times its coefficient; () fp32.

    The load-balancing loss is E · sum_e f_e · P_e: f_e is the fraction of all choices for expert e, P_e its mean
    probability. It is 1 if routing is uniform, for any k. Choices that the capacity drops count too, so that the router
    learns from them. The z-loss is the mean square of the log normalizer.

    The gradient. Let s_r be a sum over the tokens of rank r and M = 1/T · sum_r s_r the global mean, with T tokens and
    R ranks in all. Every rank has the same M in its loss, so the wanted gradient is f'(M) · 1/T · sum_r ds_r/dw, while
    the average of the ranks' gradients g_r is 1/R · sum_r g_r. The two are equal if g_r = f'(M) · R/T · ds_r/dw: the
    value is the global M, the gradient is that of s_r · R/T. With equal numbers of tokens R/T is 1/T_r, and backward is
    the identity with respect to the local mean; with unequal numbers the same formula stays exact.

    Args:
        routing: the routing of this rank's tokens.
        statistics: the statistics of all ranks.
        load_balance: the coefficient of the load-balancing loss.
        z: the coefficient of the z-loss; 0 if the router was called without `z_loss`.
        top_k: choices per token.
    """
    return _AuxiliaryLoss.apply(
        routing.probability, routing.squared_log_normalizer, statistics, load_balance, z * top_k, top_k
    )


class _AuxiliaryLoss(torch.autograd.Function):
    """Computes the value from the totals of all ranks, and the gradient of this rank's sums (see `auxiliary_loss`)."""

    @staticmethod
    def forward(
        ctx: Any,
        probability: Tensor,
        squared: Tensor | None,
        statistics: RoutingStatistics,
        load_balance: float,
        z: float,
        top_k: int,
    ) -> Tensor:
        ranks, num_experts, queues = statistics.counts.shape
        choices = statistics.totals[num_experts * queues]  # k·T of all ranks
        shares = statistics.totals / choices
        fraction, mean = shares[: num_experts * queues], shares[num_experts * queues + 1 :][:num_experts]
        if queues > 1:
            fraction = fraction.view(num_experts, queues).sum(dim=1)
        ctx.save_for_backward(fraction, choices)
        weight = load_balance * num_experts * top_k  # `mean` is the sum over k·T, not T
        ctx.weights = weight * ranks, None if squared is None else z * ranks
        # Without a z-loss `shares[-1:]` is another number: a `beta` of 0 leaves it out.
        return torch.addmv(shares[-1:], mean.unsqueeze(0), fraction, beta=z, alpha=weight)[0].float()

    @staticmethod
    @never_twice
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        fraction, choices = ctx.saved_tensors
        of_probability, of_squared = ctx.weights
        grad = grads[0] / choices
        squared = None if of_squared is None else grad * of_squared
        return fraction * (grad * of_probability), squared, None, None, None, None


def kept_counts(counts: Tensor, capacity_factor: float) -> Tensor:
    """Returns how many of `counts` (R, E, k) each expert's capacity admits: same shape, int64.

    An expert accepts ``ceil(capacity_factor · k · T / E)`` tokens, with T over all ranks. It admits first choices
    before second choices, and each of them in the order of the global batch (rank by rank, each rank's tokens in
    order). So the number kept on a rank follows from the number ahead of them.
    """
    R, E, k = counts.shape
    tokens = counts[..., 0].sum()
    capacity = torch.ceil(capacity_factor * k * tokens / E).long()
    # int64, since torch treats a cumulative sum of floats on a GPU as nondeterministic, even for whole numbers.
    queue = counts.long().permute(2, 0, 1).reshape(k * R, E)
    ahead = queue.cumsum(dim=0) - queue
    return (capacity - ahead).clamp(min=0).minimum(queue).view(k, R, E).permute(1, 2, 0)
