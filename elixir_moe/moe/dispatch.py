"""The movement of tokens to the ranks of their experts and back.

Owns the permutations and the all-to-all. Never routes a token or multiplies it.

The steps with k = 1 and two ranks of two experts each; ``3a`` is token a, bound for expert 3::

    rank 0   3a 0b 2c 0d  --sort-->  0b 0d | 2c 3a  --all-to-all-->  0b 0d | 0f 1e  --regroup-->  0b 0d 0f | 1e
    rank 1   1e 0f 3g 3h  --sort-->  0f 1e | 3g 3h  --all-to-all-->  2c 3a | 3g 3h  --regroup-->  2c | 3a 3g 3h

and the same steps in reverse for the experts' outputs. Every split is computed from the gathered statistics, so sizes
are not exchanged separately. The host waits for the device once; not at all if it knows the sizes, with all experts on
this rank and without a capacity.

Rows are never added by index (no index_add): they are placed, and then summed over the choices of their token. So the
order of additions is always that of the choices, in forward and in backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from elixir_moe.distributed.async_copy import copy_to_host_async
from elixir_moe.distributed.collectives import next_exchange
from elixir_moe.distributed.waits import Turn, Wait
from elixir_moe.moe.experts import Groups
from elixir_moe.moe.router import Choices
from elixir_moe.parallel.meta_tensors import even_counts, has_data

_EXCHANGE = "an exchange of tokens with the experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """The destinations of one rank's rows in one forward."""

    order: Tensor
    """(n,) int64: the number of each sent row among the k·T choices (see `Choices`)."""
    send: list[int]
    """Number of rows for each rank of the expert-parallel process group."""
    receive: list[int]
    """Number of rows from each rank of the expert-parallel process group."""
    regroup: Tensor | None
    """(m,) int64: the received row at each place once rows are grouped by expert; None if they already are."""
    groups: Groups
    """The grouped rows of each expert of this rank."""


def dispatch_tokens(
    tokens: Tensor, choices: Choices, kept: Tensor | None, *, batch_rank: int, ep: int, dropless: bool
) -> tuple[Tensor, Dispatch]:
    """Returns the rows to send, (n, d), sorted by expert, and their destinations; `tokens` are (T, d).

    `kept`, (R, E, q) whole numbers, has the admitted choices of all R ranks. It may be None if `dropless`, with all
    experts on this rank. `batch_rank` is this rank's place among the R; the `ep` ranks that share experts are next to
    each other.
    """
    total = len(choices.order)
    if dropless and ep == 1:
        groups = Groups(experts=choices.queue, bounds=choices.starts)
        way = Dispatch(order=choices.order, send=[total], receive=[total], regroup=None, groups=groups)
        return permute(tokens, choices.order, total), way
    assert kept is not None, "other ranks or a capacity: their choices are known"
    _, num_experts, queues = kept.shape
    row = batch_rank % ep
    sources = kept[batch_rank - row : batch_rank - row + ep]
    sources = sources.squeeze(2) if queues == 1 else sources.sum(dim=2)  # (ep, E): rows from each rank to each expert
    sizes = copy_to_host_async(sources) if has_data(sources) else lambda: [even_counts(total, num_experts)] * ep
    if dropless:  # a GPU does this while the host waits
        rows = permute(tokens, choices.order, total)
    table = [[int(count) for count in source] for source in sizes()]
    local = num_experts // ep
    here = slice(row * local, (row + 1) * local)
    send = [sum(table[row][i * local : (i + 1) * local]) for i in range(ep)]
    receive = [sum(source[here]) for source in table]
    order, experts, regroup = choices.order, choices.queue, None
    if not dropless:
        admitted = _admitted(choices, kept[batch_rank], sum(send))
        order, experts = order[admitted], experts[admitted] // queues
        rows = permute(tokens, order, total)
    if ep > 1:
        experts, regroup = _regroup(sources[:, here], sum(receive))
    bounds = torch.searchsorted(experts, choices.numbers[: local + 1], out_int32=True)
    groups = Groups(experts=experts, bounds=bounds, counts=[sum(column) for column in zip(*table, strict=True)][here])
    return rows, Dispatch(order=order, send=send, receive=receive, regroup=regroup, groups=groups)


def permute(tokens: Tensor, order: Tensor, total: int) -> Tensor:
    """Selects the token of each choice in `order`, out of `total` = k·T choices: (T, d) -> (n, d)."""
    return _Permute.apply(tokens, order, total)


def place(rows: Tensor, order: Tensor, into: Tensor) -> Tensor:
    """Writes each of the (n, d) rows at its number in `order` to `into`, which gets no gradient."""
    return _Place.apply(rows, order, into)


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """Sums each token's rows, (n, d), with their weights, (T, k), in the weights' fp32 -> (T, d).

    A dropped choice adds zero.
    """
    placed = place(rows, dispatch.order, _new_rows(rows, weights.numel()))
    weighted = placed.view(*weights.shape, rows.shape[1]) * weights.unsqueeze(2)
    return weighted.squeeze(1) if weights.shape[1] == 1 else weighted.sum(dim=1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape, ctx.total = tokens.shape, total
        top_k = total // max(len(tokens), 1)
        return tokens.index_select(0, order // top_k if top_k > 1 else order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,), (T, d) = ctx.saved_tensors, ctx.shape
        placed = _new_rows(grads[0], ctx.total).index_copy_(0, order, grads[0])
        return placed if ctx.total == T else placed.view(T, -1, d).sum(dim=1), None, None


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, into: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.mark_dirty(into)
        return into.index_copy_(0, order, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


def _new_rows(rows: Tensor, total: int) -> Tensor:
    """Allocates (total, d) in which to place `rows` (n, d); zeros if some rows were dropped."""
    size = total, rows.shape[1]
    return rows.new_empty(size) if len(rows) == total else rows.new_zeros(size)


class Exchange:
    """An uneven all-to-all of rows, from `begin` to `end`; computation between the two does not wait for other ranks.

    Backward mirrors it: gradients are sent where forward ended the exchange and awaited where forward began it, with
    the backward of the computation in between.
    """

    def __init__(self, send: list[int], receive: list[int], process_group: dist.ProcessGroup) -> None:
        self.send, self.receive = send, receive
        self._process_group = process_group
        self._in_flight: tuple[Any, Turn | None, Tensor, Tensor] | None = None

    def begin(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Sends `rows`; returns the tensor that holds the received rows once `end` has returned."""
        arriving, work, turn = rows.new_empty(sum(receive), *rows.shape[1:]), None, None
        rows = rows.contiguous()
        if has_data(rows):
            group = self._process_group
            turn = next_exchange(group)
            with Wait(_EXCHANGE, dist.get_process_group_ranks(group), turn):
                work = dist.all_to_all_single(arriving, rows, receive, send, group=group, async_op=True)
        self._in_flight = work, turn, rows, arriving
        return arriving

    def end(self) -> Tensor:
        """Waits until all rows have arrived; returns the tensor of `begin`."""
        assert self._in_flight is not None, "no exchange has begun"
        work, turn, _, arrived = self._in_flight
        if work is not None:
            ranks = dist.get_process_group_ranks(self._process_group)
            with Wait(_EXCHANGE, ranks, turn):
                work.wait()
        self._in_flight = None  # not before: an interrupted wait must not free the memory
        return arrived


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(rows, exchange.send, exchange.receive)
        return rows  # the gradient of `_End` has this shape

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
        return stand_in, None  # `_Begin` ignores the values; the arriving rows must not be read yet


def begin_all_to_all(
    rows: Tensor, send: list[int], receive: list[int], process_group: dist.ProcessGroup | None
) -> tuple[Tensor, Exchange | None]:
    """Sends (sum of `send`, d) rows, rank 0's first; returns the arguments of `end_all_to_all`."""
    if process_group is None:
        return rows, None
    exchange = Exchange(send, receive, process_group)
    return _Begin.apply(rows, exchange), exchange


def end_all_to_all(rows: Tensor, exchange: Exchange | None) -> Tensor:
    """Returns the received rows, (sum of `receive`, d); without a process group, the argument of `begin_all_to_all`."""
    return rows if exchange is None else _End.apply(rows, exchange)


def _admitted(choices: Choices, kept: Tensor, total: int) -> Tensor:
    """Returns the places of the `total` admitted choices: in each queue the first ``kept`` ones, (E, k)."""
    queue = choices.queue
    position = torch.arange(len(queue), device=queue.device) - choices.starts[queue]
    dropped = position >= kept.flatten()[queue]
    return dropped.to(torch.uint8).argsort(stable=True)[:total]


def _regroup(incoming: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Reorders rows from (source, expert), `incoming` (ep, L) rows each, to (expert, source).

    Returns the expert of each row in the new order, and the old place of each row, both (total,).
    """
    blocks = incoming.long().flatten()
    experts = torch.repeat_interleave(blocks, output_size=total) % incoming.shape[1]
    return experts.sort(stable=True)
