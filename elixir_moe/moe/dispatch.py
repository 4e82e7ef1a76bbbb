"""The way of tokens to the ranks of their experts and back.

Owns the permutations and the all-to-all. Decides nothing about routing, multiplies nothing.

The steps with k = 1 and two ranks of two experts each; ``3a`` is token a, bound for expert 3::

    rank 0   3a 0b 2c 0d  --sort-->  0b 0d | 2c 3a  --all-to-all-->  0b 0d | 0f 1e  --regroup-->  0b 0d 0f | 1e
    rank 1   1e 0f 3g 3h  --sort-->  0f 1e | 3g 3h  --all-to-all-->  2c 3a | 3g 3h  --regroup-->  2c | 3a 3g 3h

and the same steps backwards for the experts' outputs. Every split is computed from the gathered statistics, so sizes
need no exchange of their own, and the host waits for the device once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from elixir_moe.distributed.waits import Wait
from elixir_moe.parallel.dataless import even_counts, has_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """The destinations of one rank's rows in one forward."""

    order: Tensor
    """(n,) int64: the number of each sent row among the k·T choices; choice c of token t has number ``c * T + t``."""
    send: list[int]
    """Rows for each rank of the expert-parallel process group."""
    receive: list[int]
    """Rows from each rank of it."""
    regroup: Tensor | None
    """(m,) int64: the received row at each place once rows are grouped by expert; None if they already are."""
    counts: Tensor
    """(L,) int64: rows of each expert of this rank."""
    host_counts: list[int]
    """`counts` on the host."""


def plan_dispatch(
    experts: Tensor, counts: Tensor, kept: Tensor, *, batch_rank: int, ep: int, dropless: bool
) -> Dispatch:
    """The dispatch of one rank.

    Args:
        experts: (T, k) int64, the choices of this rank's tokens.
        counts: (R, k, E) int64, the choices of all ranks.
        kept: (R, k, E) int64, how many of them are admitted.
        batch_rank: this rank's place among the R ranks; ranks that share experts are next to each other.
        ep: number of ranks that share the experts.
        dropless: nothing is dropped: `kept` equals `counts`.
    """
    row = batch_rank % ep
    sources = kept[batch_rank - row : batch_rank - row + ep].sum(dim=1)  # (ep, E): rows from each rank to each expert
    table = _to_host(sources, choices=experts.numel())
    local = len(table[0]) // ep
    here = slice(row * local, (row + 1) * local)
    incoming = sources[:, here]
    send = [sum(table[row][i * local : (i + 1) * local]) for i in range(ep)]
    received = [source[here] for source in table]
    receive = [sum(source) for source in received]
    order = experts.t().flatten().argsort(stable=True)
    if not dropless:
        order = _admitted(order, experts, counts[batch_rank], kept[batch_rank], sum(send))
    return Dispatch(
        order=order,
        send=send,
        receive=receive,
        regroup=None if ep == 1 else _regroup(incoming, sum(receive)),
        counts=incoming.sum(dim=0),
        host_counts=[sum(column) for column in zip(*received, strict=True)],
    )


def permute(tokens: Tensor, dispatch: Dispatch) -> Tensor:
    """(T, d) tokens -> (n, d) rows, sorted by expert."""
    return tokens.index_select(0, dispatch.order % max(len(tokens), 1))


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """(n, d) rows and (T, k) weights -> (T, d): the weighted sum of each token's rows, in the weights' fp32.

    A dropped choice adds zero. Rows are placed, not added, so the order of the additions is always that of the choices.
    """
    T, k = weights.shape
    placed = rows.new_zeros(k * T, rows.shape[1]).index_copy(0, dispatch.order, rows)
    return (placed.view(k, T, rows.shape[1]) * weights.t().unsqueeze(-1)).sum(dim=0)


class Exchange:
    """An uneven all-to-all of rows, from `begin` to `end`: the computation between them waits for no other rank.

    Backward goes the other way: gradients are sent where forward ended the exchange and awaited where forward began it,
    with the backward of the computation in between.
    """

    def __init__(self, send: list[int], receive: list[int], process_group: dist.ProcessGroup) -> None:
        self.send, self.receive = send, receive
        self._process_group = process_group
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def begin(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Sends `rows`; returns the tensor that holds the received rows once `end` has returned."""
        arriving, work = rows.new_empty(sum(receive), *rows.shape[1:]), None
        rows = rows.contiguous()
        if has_data(rows):
            group = self._process_group
            work = dist.all_to_all_single(arriving, rows, receive, send, group=group, async_op=True)
        self._under_way = work, rows, arriving
        return arriving

    def end(self) -> Tensor:
        """Waits until all rows have come; returns the tensor of `begin`."""
        assert self._under_way is not None, "no rows are under way"
        work, _, arrived = self._under_way
        if work is not None:
            with Wait("an exchange of tokens with the experts", dist.get_process_group_ranks(self._process_group)):
                work.wait()
        self._under_way = None  # not before: an interrupted wait must not free the memory
        return arrived


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(rows, exchange.send, exchange.receive)
        return rows  # `_End` has a gradient of its shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange, (gradient,) = ctx.exchange, grads
        exchange.begin(gradient, exchange.receive, exchange.send)
        stand_in = gradient.new_zeros(()).expand(sum(exchange.send), *gradient.shape[1:])
        return stand_in, None  # `_Begin` ignores it; the arriving rows must not be read yet


def begin_all_to_all(
    rows: Tensor, send: list[int], receive: list[int], process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Exchange | None]:
    """Sends (sum of `send`, d) rows, rank 0's first; returns the arguments of `end_all_to_all`."""
    if process_group is None:
        return rows, None
    exchange = Exchange(send, receive, process_group)
    return _Begin.apply(rows, exchange), exchange


def end_all_to_all(rows: Tensor, exchange: Exchange | None) -> Tensor:
    """The received rows, (sum of `receive`, d); without a process group the rows given to `begin_all_to_all`."""
    return rows if exchange is None else _End.apply(rows, exchange)


def _admitted(order: Tensor, experts: Tensor, counts: Tensor, kept: Tensor, total: int) -> Tensor:
    """The `total` admitted choices in `order` (k·T,), which is sorted by expert, then choice, then token."""
    k = experts.shape[1]
    queue = experts.t().flatten()[order] * k + order // max(len(experts), 1)  # (expert, choice): one queue each
    length = counts.t().flatten()
    start = length.cumsum(0) - length
    place = torch.arange(len(order), device=order.device) - start[queue]
    dropped = place >= kept.t().flatten()[queue]
    return order[dropped.to(torch.uint8).argsort(stable=True)[:total]]


def _regroup(incoming: Tensor, total: int) -> Tensor:
    """The permutation (total,) of rows from order (source, expert), `incoming` (ep, L) each, to (expert, source)."""
    ep, local = incoming.shape
    experts = torch.arange(local, device=incoming.device).repeat(ep)
    return experts.repeat_interleave(incoming.flatten(), output_size=total).argsort(stable=True)


def _to_host(sources: Tensor, choices: int) -> list[list[int]]:
    """`sources` on the host, the one wait for the device; without data, every rank routes its `choices` evenly."""
    if not has_data(sources):
        return [even_counts(choices, sources.shape[1]) for _ in range(sources.shape[0])]
    return sources.tolist()
