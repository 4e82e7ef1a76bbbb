"""The parameters of a quantised weight: its codes and its scales, each as bytes.

Owns the record that a module has of each of its quantised weights, and the views of bytes. Whoever packs, gathers,
saves and loads parameters sees two frozen parameters of dtype uint8: the compute dtype of a plan and `Module.to` leave
them alone, and codes and scales of one weight lie in one chunk, side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elixir_moe.parallel.rules import logical_numel
from elixir_moe.quantized.formats import scheme_called

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

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """The weight in `dtype`, (..., out, in), from bytes; `shape` is that of some experts or rows of it."""
        form = scheme_called(self.scheme)
        return form.decode(codes.view(form.codes_dtype), scales.view(form.scales_dtype), shape or self.shape, dtype)

    def decode_rows(self, codes: Tensor, scales: Tensor, part: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of a weight (out, in); `part` begins where a block of `row_block` rows does."""
        codes, block = codes[part], self.row_block
        scales = scales[part.start // block : -(-part.stop // block)]
        return self.decode(codes, scales, dtype, (len(codes), self.shape[-1]))

    @property
    def row_block(self) -> int:
        """Rows that share scales."""
        return scheme_called(self.scheme).block[0]


def as_bytes(part: Tensor) -> Tensor:
    """Codes or scales as bytes: a view, whose last dim is as many times longer as an element has bytes."""
    return part.view(torch.uint8)


def packed_in(module: nn.Module) -> dict[str, Packed]:
    """The weights that the module itself has as bytes, by their names in it."""
    found: dict[str, Packed] = module.__dict__.get(_ATTRIBUTE, {})
    return found


def packed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Packed]]:
    """Yields (name of the weight in the model, its module, its name there, what it is) of all quantised weights."""
    for name, module in model.named_modules():
        for own, packed in packed_in(module).items():
            yield f"{name}.{own}".lstrip("."), module, own, packed


def weights_behind(model: nn.Module) -> dict[nn.Parameter, int]:
    """{a parameter of bytes: the weights that its codes are; none for scales}, for whoever counts a model's size."""
    found: dict[nn.Parameter, int] = {}
    for _, module, own, packed in packed_parameters(model):
        codes, scales = getattr(module, own), getattr(module, own + SCALES)
        found |= {codes: logical_numel(codes) * scheme_called(packed.scheme).codes_a_byte, scales: 0}  # a tile's own
    return found
