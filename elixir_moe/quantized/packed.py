"""The parameters of a quantized weight: its codes and its scales, each as bytes.

Owns the record that a module has of each of its quantized weights, the views of bytes, and the split of bytes where the
weight is split. Never implements a format. The rest of the package packs, gathers, saves and loads two frozen
parameters of dtype uint8: the compute dtype of a plan and `Module.to` do not change them, and codes and scales of a
weight are next to each other in one chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elixir_moe.parallel.rules import attach, logical_numel, pattern_of
from elixir_moe.parallel.tiles import Tile, mark, tile_of
from elixir_moe.quantized.formats import Scheme, scheme_named

SCALES = "_scales"
"""Suffix of the name of the scales; the codes have the name of the weight."""
_ATTRIBUTE = "packed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A quantized weight of a module."""

    scheme: str
    """The format's name."""
    shape: tuple[int, ...]
    """Shape of the weight: (..., outputs, inputs)."""
    dtype: torch.dtype
    """Dtype of the weight before it was quantized."""
    transposed: bool = False
    """Whether the weight was (..., inputs, outputs)."""
    computed_in: torch.dtype | None = None
    """The dtype of a linear layer's products; by default the input's, or autocast's."""
    adapters: frozenset[str] = frozenset()
    """peft's adapters that were on the weight before it was quantized."""

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """Decodes bytes to a weight (..., out, in) in `dtype`; `shape` is given for some of its experts or rows."""
        form = scheme_named(self.scheme)
        return form.decode(codes.view(form.codes_dtype), scales.view(form.scales_dtype), shape or self.shape, dtype)

    def decode_rows(self, codes: Tensor, scales: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Decodes some rows of a weight (out, in); `part` begins at a multiple of `row_block`."""
        codes, block = codes[part], self.row_block
        scales = scales[part.start // block : -(-part.stop // block)]
        return self.decode(codes, scales, dtype, (len(codes), self.shape[-1]))

    @property
    def row_block(self) -> int:
        """Number of rows that share scales."""
        return scheme_named(self.scheme).block[0]


def as_bytes(part: Tensor) -> Tensor:
    """Views codes or scales as bytes: the last dim grows by the itemsize."""
    return part.view(torch.uint8)


def tile_problem(weight: Tensor, form: Scheme) -> str | None:
    """Returns why a tile cannot have the format; None if it can, or is not a tile. Tiles of experts split no block."""
    tile, block = tile_of(weight), form.block[0]
    if weight.dim() > 2 or tile is None or not (tile.start % block or (tile.stop % block and tile.stop != tile.rows)):
        return None
    least = block * weight[:1].numel() * weight.itemsize
    return (
        f"has rows {tile.start} to {tile.stop} of {tile.rows}, which cuts blocks of {block} rows: freeze it before "
        f"em.tile, with at_most={least} or more"
    )


def cut_alike(weight: Tensor, form: Scheme, codes: Tensor, scales: Tensor) -> None:
    """Gives codes and scales the pattern of their weight, and makes them tiles if the weight is one."""
    if (tile := tile_of(weight)) is not None:
        block = form.block[0] if weight.dim() == 2 else 1
        start, stop, rows = (-(-number // block) for number in (tile.start, tile.stop, tile.rows))
        mark(codes, tile)
        mark(scales, Tile(start=start, stop=stop, rows=rows))
    if (pattern := pattern_of(weight)) is not None:
        attach(codes, pattern)
        attach(scales, pattern)


def packed_in(module: nn.Module) -> dict[str, Packed]:
    """Returns the module's own quantized weights, by their names in it."""
    found: dict[str, Packed] = module.__dict__.get(_ATTRIBUTE, {})
    return found


def packed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Packed]]:
    """Yields (name in the model, module, name in the module, format) of all quantized weights."""
    for name, module in model.named_modules():
        for own, packed in packed_in(module).items():
            yield f"{name}.{own}".lstrip("."), module, own, packed


def weights_behind(model: nn.Module) -> dict[nn.Parameter, int]:
    """Returns {parameter of bytes: number of weights that it encodes, 0 for scales}, to count a model's parameters."""
    found: dict[nn.Parameter, int] = {}
    for _, module, own, packed in packed_parameters(model):
        codes, scales = getattr(module, own), getattr(module, own + SCALES)
        found |= {codes: logical_numel(codes) * scheme_named(packed.scheme).codes_a_byte, scales: 0}
    return found
