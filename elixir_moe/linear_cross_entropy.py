"""The cross-entropy of a linear head without its logits.

Owns `linear_cross_entropy`: the head's products and their gradients, a chunk of tokens at a time. Never knows ranks,
chunks of parameters or plans: a sharded weight is gathered because these are functions that read it.

    whole head      one product for the logits; their gradient is immediately turned into those of tokens and weight, so
                    that backward only scales them and does not need the weight
    recomputed      the logits are computed again in backward, so that no gradient of the weight waits for it
    tiled head      recomputed too: each tile computes its part of the sum of exponentials, so that one tile is gathered
                    at a time
    quantized head  whole or tiled; some rows of the weight are decoded at a time, in the dtype of the product

Shape letters: N tokens with a label, d width, V vocabulary. Source: Cut Your Losses (2411.09009) for the idea.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from elixir_moe.accelerator import has_wide_products
from elixir_moe.errors import ConfigError
from elixir_moe.parallel.dtensor import is_dtensor
from elixir_moe.parallel.meta_tensors import cut, has_data, pieces
from elixir_moe.parallel.regather import RegatherLinear
from elixir_moe.parallel.tiles import tile_of
from elixir_moe.quantized.modules import QuantizedLinear
from elixir_moe.quantized.packed import Packed, packed_in
from elixir_moe.quantized.products import computed_in
from elixir_moe.torch_private import keeps_graph, never_twice

_CHUNK_BYTES = 64 * 2**20
_CHUNK_BYTES_OF_ACCELERATOR = 512 * 2**20
"""Each chunk reads the whole head, and reads and writes its gradient. With a vocabulary of 152k, 512 MiB are the logits
of 883 tokens: enough products for a byte read that an H100 or a 4090 computes most of the time. 64 MiB are 110 tokens.
"""
_CACHED_BYTES = 4 * 2**20
"""Bytes of a weight that a CPU widens or decodes at a time: the product then finds them in the cache."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_bytes: int | None = None,
    recompute: bool = False,
) -> Tensor:
    """Computes ``F.cross_entropy(hidden @ weight.T + bias, labels)`` without storing all logits; () fp32.

    Labels are not shifted. Tokens whose label is `ignore_index` cost no product. Logits are in fp32, and so are their
    sums and that of the weight's gradient, which waits for backward in the weight's dtype (fp32 for fp16). Operands of
    products are in the weight's dtype. For a head that scales its logits, pass ``hidden * scale``. Without a single
    label, the mean is nan and gradients are zero, as in torch.

    The weight may belong to a wrapped model, under any plan: it is gathered for the call, and for backward only with
    `recompute` or in tiles. If `em.quantize` has quantized the head, at most `chunk_bytes` of weights are decoded at a
    time.

    Args:
        hidden: (..., d), the input of the head.
        weight: (V, d); or the head itself, a Linear or an Embedding, tiled by `em.tile` or not. A quantized head must
            be passed itself.
        labels: (...) integers from 0 to V - 1, or `ignore_index`.
        bias: (V,); leave it out with a head, whose own bias is used.
        ignore_index: the label of tokens that do not count.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        softcap: logits become ``softcap * tanh(logits / softcap)``, as in Gemma's heads.
        reduction: the mean over tokens that count, or their sum.
        chunk_bytes: most bytes of logits at once. Two such buffers exist. By default 64 MiB on a CPU, 512 MiB on a GPU.
        recompute: compute the logits again in backward, and the gradients of hidden and weight only there: a third more
            products, for calls of which several await their backward, as those of micro-batches that pass each layer
            together (`em.accumulate`). They would keep a gradient of the weight each. Tiles always recompute.

    Raises:
        ConfigError: a shape, dtype or setting is wrong; a label is outside of the vocabulary; `weight` is a DTensor, or
            a module that does more than a product (for example one with adapters).
    """
    tiles = [_as_computed(tile, hidden) for tile in _tiles_of(weight, bias)]
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES_OF_ACCELERATOR if _on_accelerator(hidden) else _CHUNK_BYTES
    head = _Head(label_smoothing=label_smoothing, softcap=softcap, chunk_bytes=chunk_bytes)
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"linear_cross_entropy: reduction={reduction!r}: expected 'mean' or 'sum'")
    vocabulary = sum(len(tile.weight) for tile in tiles)
    _check_shapes(hidden, labels, tiles)
    rows, kept = _with_labels(hidden.reshape(-1, hidden.shape[-1]), labels.flatten(), vocabulary, ignore_index)
    if recompute or len(tiles) > 1:
        total = _recomputed(rows, tiles, kept, head)
    else:
        total = _computed(_Whole, rows, tiles[0], kept, head)
    if reduction == "sum":
        return total
    return total / len(kept) if len(kept) else total + torch.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """The settings of the loss."""

    label_smoothing: float
    softcap: float | None
    chunk_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"linear_cross_entropy: label_smoothing={self.label_smoothing}: expected 0 to 1")
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"linear_cross_entropy: softcap={self.softcap}: expected a number above 0, or None")
        if self.chunk_bytes < 1:
            raise ConfigError(f"linear_cross_entropy: chunk_bytes={self.chunk_bytes}: expected at least 1")


def check_head(head: nn.Module) -> None:
    """Raises ConfigError unless `head` is a Linear or an Embedding, tiled or not."""
    _tiles_of(head, None)


class _Part(NamedTuple):
    """Consecutive rows of the head's weight, and of its bias."""

    weight: Tensor
    """(rows, d), or the codes of a quantized weight."""
    bias: Tensor | None
    scales: Tensor | None = None
    """The scales of a quantized weight."""
    packed: Packed | None = None
    """The format of a quantized weight."""
    dtype: torch.dtype | None = None
    """The dtype of the operands of products, once the tokens are known."""

    def values(self) -> "_Weight":
        """The weight itself, or one that decodes its bytes."""
        if self.packed is None or self.scales is None:
            return self.weight
        assert self.dtype is not None
        return _Decoded(self.weight, self.scales, self.packed, self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (decoded) weight."""
        return tuple(self.weight.shape) if self.packed is None else (len(self.weight), self.packed.shape[-1])


def _tiles_of(weight: Tensor | nn.Module, bias: Tensor | None) -> list[_Part]:
    """Returns the parts of a head, in order."""
    if isinstance(weight, nn.Module):
        if bias is not None:
            raise ConfigError("linear_cross_entropy: a head has its own bias: leave bias= out, or pass head.weight")
        parts = [child for child in weight.children() if any(map(tile_of, child.parameters(recurse=False)))] or [weight]
        if any(type(part) not in (nn.Linear, RegatherLinear, QuantizedLinear, nn.Embedding) for part in parts):
            raise ConfigError(
                f"linear_cross_entropy of a head of class {type(weight).__name__}: expected a Linear or an Embedding, "
                f"tiled or not; a module with adapters or another forward computes its own logits"
            )
        found = [_part_of(part) for part in parts]
    else:
        found = [_Part(weight, bias)]
    if any(is_dtensor(part.weight) for part in found):
        raise ConfigError(
            "linear_cross_entropy of a head that is a DTensor: pass the local tensor of a head that is not sharded"
        )
    if any(part.packed is None and not part.weight.is_floating_point() for part in found):
        raise ConfigError(
            f"linear_cross_entropy: weight is {found[0].weight.dtype}: expected a floating dtype; if the head is "
            f"quantized, pass the head itself"
        )
    return found


def _part_of(module: Any) -> _Part:
    packed = packed_in(module).get("weight")
    scales = None if packed is None else module.weight_scales
    return _Part(module.weight, getattr(module, "bias", None), scales, packed)


def _as_computed(part: _Part, hidden: Tensor) -> _Part:
    return part._replace(dtype=part.weight.dtype if part.packed is None else computed_in(hidden, part.packed))


def _check_shapes(hidden: Tensor, labels: Tensor, tiles: Sequence[_Part]) -> None:
    if hidden.dim() < 1 or hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)}: expected (..., d) "
            f"and (...)"
        )
    if labels.dtype not in _INTEGERS:
        raise ConfigError(f"linear_cross_entropy: labels are {labels.dtype}: expected integers")
    for part in tiles:
        if len(part.shape) != 2 or part.shape[1] != hidden.shape[-1]:
            raise ConfigError(
                f"linear_cross_entropy: weight {part.shape}: expected (vocabulary, {hidden.shape[-1]}), as hidden is "
                f"{tuple(hidden.shape)}"
            )
        if part.bias is not None and part.bias.shape != part.shape[:1]:
            raise ConfigError(f"linear_cross_entropy: bias {tuple(part.bias.shape)}: expected ({part.shape[0]},)")


def _with_labels(hidden: Tensor, labels: Tensor, vocabulary: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Selects the (N, d) tokens and (N,) int64 labels that count. The host waits for the device. Raises ConfigError."""
    labels = labels.to(hidden.device, torch.int64)
    if not (has_data(labels) and has_data(hidden)):
        return hidden, labels
    places = (labels != ignore_index).nonzero().squeeze(1)
    kept = labels if len(places) == len(labels) else labels[places]
    wrong = ((kept < 0) | (kept >= vocabulary)).nonzero()
    if len(wrong):
        place = int(places[wrong[0, 0]])
        raise ConfigError(
            f"linear_cross_entropy: label {int(labels[place])} of token {place} ({len(wrong)} such labels): expected 0 "
            f"to {vocabulary - 1}, the head's rows, or ignore_index={ignore_index}"
        )
    return (hidden if kept is labels else hidden.index_select(0, places)), kept


def _computed(function: type[torch.autograd.Function], rows: Tensor, part: _Part, labels: Tensor, head: _Head) -> Any:
    """Applies `_Whole` or `_Tile`; a parameter of a wrapped model is gathered first, through ``__torch_function__``."""
    given = part.weight, part.bias, part.scales
    if has_torch_function(given):
        return handle_torch_function(_computed, given, function, rows, part, labels, head)
    return function.apply(rows, *part, labels, head, torch.is_grad_enabled())


# --------------------------------------------------------------------------------------------------------- whole head


class _Whole(torch.autograd.Function):
    """Returns the sum of all losses, (). Computes gradients in forward, where the logits are."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *given: Any) -> Tensor:
        whole, (labels, head, with_grad) = _Part(*given[:-3]), given[-3:]
        losses, sums = _summed(rows, whole, labels, head, [with_grad and need for need in ctx.needs_input_grad[:3]])
        if sums.weight is not None and whole.weight.dtype is not torch.float16:  # might overflow before it is unscaled
            sums.weight = sums.weight.to(whole.weight.dtype)
        ctx.save_for_backward(sums.rows, sums.weight, sums.bias)
        ctx.dtypes = [None if t is None else t.dtype for t in (rows, *whole[:2])]
        return losses.sum()

    @staticmethod
    @never_twice
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reused = keeps_graph()  # another backward may need the same sums
        scaled: list[Tensor | None] = []
        for sums, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if sums is None:
                scaled.append(None)
            else:
                scaled.append((sums * grads[0] if reused else sums.mul_(grads[0])).to(dtype))
        return *scaled, *(None,) * 6


def _summed(
    rows: Tensor, whole: _Part, labels: Tensor, head: _Head, needs: Sequence[bool]
) -> tuple[Tensor, "_Gradients"]:
    """Returns the (N,) losses, and the gradients of their sum."""
    weight = whole.values()
    sums = _Gradients.of(rows, weight, needs)
    losses = rows.new_empty(len(rows), dtype=sums.dtype)
    smooth = head.label_smoothing
    of_picked, of_total = (losses.new_full((1,), value) for value in (smooth - 1, -smooth / len(weight)))
    with torch.autocast(rows.device.type, enabled=False):
        for part, chunk in _chunks(rows, weight, whole.bias, labels, head):
            sum_of_exp, picked, total = chunk.statistics()
            losses[part] = sum_of_exp - (1 - smooth) * picked
            if smooth:
                losses[part] -= total * (smooth / len(weight))
            if any(needs):
                chunk.to_gradient(sum_of_exp, None, of_picked, of_total)
                sums.add(chunk, part, weight)
    return losses, sums


# --------------------------------------------------------------------------------------------------------- recomputed


def _recomputed(rows: Tensor, tiles: Sequence[_Part], labels: Tensor, head: _Head) -> Tensor:
    """Returns the sum of all losses, combined from the sums of exponentials of all tiles."""
    first, found = 0, []
    if len(tiles) > 1:
        rows = rows.to(_wide(rows))  # the gradients of tokens are summed over tiles
    for tile in tiles:
        found.append(_computed(_Tile, rows, tile, labels - first, head))
        first += len(tile.weight)
    sums, picked, totals = (torch.stack(parts) for parts in zip(*found, strict=True))
    losses = sums.logsumexp(0) - (1 - head.label_smoothing) * picked.sum(0)
    if head.label_smoothing:
        losses = losses - totals.sum(0) * (head.label_smoothing / first)
    return losses.sum()


class _Tile(torch.autograd.Function):
    """Computes `_Chunk.statistics` for all tokens. Computes the logits again in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *given: Any) -> tuple[Tensor, ...]:
        tile, (labels, head, _) = _Part(*given[:-3]), given[-3:]
        weight = tile.values()
        found = rows.new_empty(3, len(rows), dtype=_wide(weight))
        with torch.autocast(rows.device.type, enabled=False):
            for part, chunk in _chunks(rows, weight, tile.bias, labels, head):
                for row, values in zip(found, chunk.statistics(), strict=True):
                    row[part] = values
        sums, picked, totals = found
        ctx.save_for_backward(rows, *tile[:3], labels, sums)
        ctx.head, ctx.of_bytes = head, tile[3:]
        return sums.clone(), picked.clone(), totals.clone()  # views of one tensor would be one output to autograd

    @staticmethod
    @never_twice
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, given, bias, scales, labels, sums = ctx.saved_tensors
        weight = _Part(given, bias, scales, *ctx.of_bytes).values()
        found = _Gradients.of(rows, weight, ctx.needs_input_grad[:3])
        for part, chunk in _chunks(rows, weight, bias, labels, ctx.head):
            chunk.to_gradient(sums[part], *(grad[part] for grad in grads))
            found.add(chunk, part, weight)
        of_rows = None if found.rows is None else found.rows.to(rows.dtype)
        return of_rows, found.weight, found.bias, *(None,) * 6  # autograd sums those of the head in fp32, where it may


# ------------------------------------------------------------------------------------------------------------- chunks


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A quantized weight that decodes the rows it is indexed with."""

    codes: Tensor
    scales: Tensor
    packed: Packed
    dtype: torch.dtype
    """The dtype of decoded rows."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, d)."""
        return len(self.codes), self.packed.shape[-1]

    def __getitem__(self, part: slice) -> Tensor:
        return self.packed.decode_rows(self.codes, self.scales, part, self.dtype)


_Weight = Tensor | _Decoded


def _on_accelerator(tensor: Tensor) -> bool:
    """Whether products are those of an accelerator, as a trace assumes for tensors without data."""
    return has_wide_products(tensor.device) or not has_data(tensor)


def _wide(tensor: _Weight) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclass(slots=True)
class _Chunk:
    """The logits of some tokens."""

    rows: Tensor
    """(n, d), the tokens in the weight's dtype."""
    logits: Tensor
    """(n, V) fp32."""
    spare: Tensor
    """Scratch memory of the size of the logits."""
    columns: Tensor
    """(n, 1): the column of each label; 0 where it is not in this part of the head."""
    inside: Tensor
    """(n,): whether the label is in this part of the head."""
    head: _Head

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three (n,): log of the sum of exponentials, logit of the label or 0 if not here, sum of logits."""
        most = self.logits.amax(1, keepdim=True)
        torch.sub(self.logits, most, out=self.spare).exp_()
        sums = self.spare.sum(1).log_().add_(most.squeeze(1))
        picked = self.logits.gather(1, self.columns).squeeze(1).where(self.inside, 0.0)
        return sums, picked, self.logits.sum(1) if self.head.label_smoothing else torch.zeros_like(sums)

    def to_gradient(self, sums: Tensor, of_sums: Tensor | None, of_picked: Tensor, of_totals: Tensor) -> None:
        """Turns logits into their gradient, given `sums` of `statistics` and the gradients of what it returned.

        None stands for ones. The scratch memory is free afterwards.
        """
        if self.head.softcap is not None:  # the derivative of the cap, before its logits are overwritten
            torch.div(self.logits, self.head.softcap, out=self.spare).square_().neg_().add_(1.0)
        grad = self.logits.sub_(sums.unsqueeze(1)).exp_()
        if of_sums is not None:
            grad.mul_(of_sums.unsqueeze(1))
        grad.scatter_add_(1, self.columns, torch.where(self.inside, of_picked, 0.0).unsqueeze(1))
        if self.head.label_smoothing:
            grad.add_(of_totals.unsqueeze(1))
        if self.head.softcap is not None:
            grad.mul_(self.spare)

    def operand(self, dtype: torch.dtype) -> Tensor:
        """Returns the logits, or their gradient, for products with a weight of `dtype`.

        On an accelerator both operands need one dtype; the scratch memory holds the narrower copy.
        """
        if dtype == self.logits.dtype or not _on_accelerator(self.logits):
            return self.logits
        narrow = self.spare.view(-1).view(dtype)[: self.logits.numel()].view_as(self.logits)
        return narrow.copy_(self.logits)


def _chunks(
    rows: Tensor, weight: _Weight, bias: Tensor | None, labels: Tensor, head: _Head
) -> Iterator[tuple[slice, _Chunk]]:
    """Yields the slice of tokens and the logits of each chunk, all in the same memory."""
    size = max(1, head.chunk_bytes // max(1, len(weight) * _wide(weight).itemsize))
    memory = [rows.new_empty(min(size, len(rows)), len(weight), dtype=_wide(weight)) for _ in range(2)]
    inside = (labels >= 0) & (labels < len(weight))
    columns = labels.where(inside, 0).unsqueeze(1)
    for _, part in pieces(cut(len(rows), size), rows):
        logits, spare = (half[: part.stop - part.start] for half in memory)
        operand = rows[part].to(weight.dtype)
        _to_logits(operand, weight, logits, head.chunk_bytes)
        if bias is not None:
            logits.add_(bias)
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        yield part, _Chunk(operand, logits, spare, columns[part], inside[part], head)


@dataclass(slots=True)
class _Gradients:
    """Sums of gradients; None for tensors that need no gradient."""

    dtype: torch.dtype
    rows: Tensor | None
    """(N, d), in the tokens' dtype; fp32 for fp16, which might overflow before it is unscaled."""
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, rows: Tensor, weight: _Weight, needs: Sequence[bool]) -> "_Gradients":
        wide = _wide(weight)
        of_rows = wide if rows.dtype is torch.float16 else rows.dtype
        return cls(
            wide,
            torch.empty_like(rows, dtype=of_rows) if needs[0] else None,
            rows.new_zeros(weight.shape, dtype=wide) if needs[1] else None,
            rows.new_zeros(len(weight), dtype=wide) if needs[2] else None,
        )

    def add(self, chunk: _Chunk, part: slice, weight: _Weight) -> None:
        """Adds the gradients that follow from the gradient of the logits of the tokens at `part`."""
        if self.bias is not None:
            self.bias += chunk.logits.sum(0)
        grad = chunk.operand(weight.dtype)
        if self.rows is not None:
            _to_tokens(grad, weight, self.rows[part], chunk.head.chunk_bytes)
        if self.weight is not None:
            _multiply(grad.t(), chunk.rows, self.weight, add=True)


def _blocks(weight: _Weight, most_bytes: int, *, on: Tensor) -> Iterator[slice]:
    """Yields slices of the weight's rows, of which products need a decoded or widened copy: most often all rows.

    A copy has at most `most_bytes` in the dtype of sums, and fewer on a CPU. Fake tensors count as those of an
    accelerator: a trace would spend its time on the small blocks of a CPU.
    """
    if isinstance(weight, Tensor) and (weight.dtype == _wide(weight) or _on_accelerator(on)):
        yield slice(0, len(weight))
        return
    if not _on_accelerator(on):
        most_bytes = min(most_bytes, _CACHED_BYTES)
    size = max(1, most_bytes // max(1, weight.shape[1] * _wide(weight).itemsize))
    if isinstance(weight, _Decoded):  # whole blocks of rows
        size = -(-size // weight.packed.row_block) * weight.packed.row_block
    for _, block in pieces(cut(len(weight), size), on):
        yield block


def _to_logits(rows: Tensor, weight: _Weight, out: Tensor, most_bytes: int) -> None:
    """Writes the (n, V) product of tokens and weight to `out`."""
    for block in _blocks(weight, most_bytes, on=rows):
        _multiply(rows, weight[block].t(), out[:, block])


def _to_tokens(grad: Tensor, weight: _Weight, out: Tensor, most_bytes: int) -> None:
    """Writes the (n, d) product of the gradient of logits and the weight to `out`."""
    if isinstance(weight, Tensor) and weight.dtype == out.dtype == grad.dtype:
        torch.mm(grad, weight, out=out)
        return
    sums = out.new_zeros(out.shape, dtype=_wide(weight))
    for block in _blocks(weight, most_bytes, on=grad):
        _multiply(grad[:, block], weight[block], sums, add=True)
    out.copy_(sums)


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Writes the product of two matrices to `out`, whose dtype may be wider than theirs; or adds it.

    A CPU has no product of 16-bit operands in fp32, so the operands are widened there.
    """
    if not _on_accelerator(out):
        left, right = left.to(out.dtype), right.to(out.dtype)
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif not has_data(out):  # fake tensors lack these products; this one has their cost
        torch.mm(left, right, out=out.view(left.dtype)[:, : out.shape[1]])
    elif add:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
