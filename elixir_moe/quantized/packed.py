"""The parameters of a quantized weight: its codes and its scales, each as bytes.

Owns the record that a module has of each of its quantized weights, the views of bytes, and the cut of bytes where the
weight is cut. Whoever packs, gathers, saves and loads parameters sees two frozen parameters of dtype uint8: the compute
dtype of a plan and `Module.to` leave them alone, and codes and scales of one weight lie in one chunk, side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elixir_moe.parallel.rules import attach, logical_numel, pattern_of
from elixir_moe.parallel.tiles import Tile, mark, tile_of
from elixir_moe.quantized.formats import Scheme, scheme_named

SCALES = "_scales"
"""What the name of a weight gets for that of its scales; the codes have the name of the weight."""
_ATTRIBUTE = "packed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One weight that a module has as bytes."""

    scheme: str
    """The format's name."""
    shape: tuple[int, ...]
    """Of the weight: (..., outputs, inputs)."""
    dtype: torch.dtype
    """Of the weight before."""
    transposed: bool = False
    """Whether the weight was (..., inputs, outputs)."""
    computed_in: torch.dtype | None = None
    """The dtype that products of a linear layer are computed in; by default the input's, or autocast's."""
    adapters: frozenset[str] = frozenset()
    """peft's adapters that were on the weight before it was bytes."""

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """The weight in `dtype`, (..., out, in), from bytes; `shape` is that of some experts or rows of it."""
        form = scheme_named(self.scheme)
        return form.decode(codes.view(form.codes_dtype), scales.view(form.scales_dtype), shape or self.shape, dtype)

    def decode_rows(self, codes: Tensor, scales: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of a weight (out, in); `part` begins where a block of `row_block` rows does."""
        codes, block = codes[part], self.row_block
        scales = scales[part.start // block : -(-part.stop // block)]
        return self.decode(codes, scales, dtype, (len(codes), self.shape[-1]))

    @property
    def row_block(self) -> int:
        """Rows that share scales."""
        return scheme_named(self.scheme).block[0]


def as_bytes(part: Tensor) -> Tensor:
    """Codes or scales as bytes: a view, whose last dim is as many times longer as an element has bytes."""
    return part.view(torch.uint8)


def tile_problem(weight: Tensor, form: Scheme) -> str | None:
    """Why a tile of a weight cannot have the format; None if it can, or is no tile. Tiles of experts cut no block."""
    tile, block = tile_of(weight), form.block[0]
    if weight.dim() > 2 or tile is None or not (tile.start % block or (tile.stop % block and tile.stop != tile.rows)):
        return None
    least = block * weight[:1].numel() * weight.itemsize
    return (
        f"has rows {tile.start} to {tile.stop} of {tile.rows}, which cuts blocks of {block} rows: freeze it before "
        f"em.tile, with at_most={least} or more"
    )


def cut_alike(weight: Tensor, form: Scheme, codes: Tensor, scales: Tensor) -> None:
    """Gives codes and scales the pattern of their weight, and makes them tiles if it is one."""
    if (tile := tile_of(weight)) is not None:
        block = form.block[0] if weight.dim() == 2 else 1
        start, stop, rows = (-(-number // block) for number in (tile.start, tile.stop, tile.rows))
        mark(codes, tile)
        mark(scales, Tile(start=start, stop=stop, rows=rows))
    if (pattern := pattern_of(weight)) is not None:
        attach(codes, pattern)
        attach(scales, pattern)


def packed_in(module: nn.Module) -> dict[str, Packed]:
    """The weights that the module itself has as bytes, by their names in it."""
    found: dict[str, Packed] = module.__dict__.get(_ATTRIBUTE, {})
    return found


def packed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Packed]]:
    """Yields (name of the weight in the model, its module, its name there, what it is) of all quantized weights."""
    for name, module in model.named_modules():
        for own, packed in packed_in(module).items():
            yield f"{name}.{own}".lstrip("."), module, own, packed


def weights_behind(model: nn.Module) -> dict[nn.Parameter, int]:
    """{a parameter of bytes: the weights that its codes are; none for scales}, for whoever counts a model's size."""
    found: dict[nn.Parameter, int] = {}
    for _, module, own, packed in packed_parameters(model):
        codes, scales = getattr(module, own), getattr(module, own + SCALES)
        found |= {codes: logical_numel(codes) * scheme_named(packed.scheme).codes_a_byte, scales: 0}  # a tile's own
    return found
