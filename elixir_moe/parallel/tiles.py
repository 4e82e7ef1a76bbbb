"""Parameters that are tiles of a larger one: consecutive rows of it, each tile a parameter of its own.

Owns the record of a tile and its names. `wrapping.tiling` makes tiles; `state` saves and loads them as the parameter
that they are part of.
"""

import re
from dataclasses import dataclass

import torch

_ATTRIBUTE = "_elixir_tile"
_CHILD = re.compile(r"(?<![^.])tile_\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Rows `start` .. `stop` of a parameter of `rows` rows: of this rank's slice, where the parameter is cut."""

    start: int
    stop: int
    rows: int


def mark(parameter: torch.Tensor, tile: Tile) -> None:
    """Makes `parameter` a tile."""
    setattr(parameter, _ATTRIBUTE, tile)


def tile_of(tensor: torch.Tensor) -> Tile | None:
    """The tile that a parameter is; None for a whole one."""
    return getattr(tensor, _ATTRIBUTE, None)


def child_name(index: int) -> str:
    """The name of the module with tile `index`."""
    return f"tile_{index}"


def whole_name(name: str, tensor: torch.Tensor) -> str:
    """The name of the parameter of which `tensor`, called `name` in the model, is a tile; `name` for any other."""
    return name if tile_of(tensor) is None else _CHILD.sub("", name)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of this rank's slice of the parameter, all tiles together."""
    tile = tile_of(tensor)
    return tuple(tensor.shape) if tile is None else (tile.rows, *tensor.shape[1:])
