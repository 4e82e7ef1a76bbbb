"""Parameters that are tiles of a larger one: consecutive rows, each tile a separate parameter.

Owns the record of a tile and its names. Never cuts a parameter: `wrapping.tiling` does, and `state` saves and loads
tiles as the whole parameter.
"""

import re
from dataclasses import dataclass

import torch

_ATTRIBUTE = "_elixir_tile"
_CHILD = re.compile(r"(?<![^.])tile_\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Rows `start` .. `stop` of a parameter with `rows` rows; if the parameter is sharded, of this rank's slice."""

    start: int
    stop: int
    rows: int


def mark(parameter: torch.Tensor, tile: Tile) -> None:
    """Makes `parameter` a tile."""
    setattr(parameter, _ATTRIBUTE, tile)


def tile_of(tensor: torch.Tensor) -> Tile | None:
    """Returns the record of a tile; None for a whole parameter."""
    return getattr(tensor, _ATTRIBUTE, None)


def child_name(index: int) -> str:
    """Returns the name of the module with tile `index`."""
    return f"tile_{index}"


def whole_name(name: str, tensor: torch.Tensor) -> str:
    """Returns the name of the whole parameter for the tile `tensor`, called `name` in the model; else `name`."""
    return name if tile_of(tensor) is None else _CHILD.sub("", name)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of this rank's slice of the whole parameter."""
    tile = tile_of(tensor)
    return tuple(tensor.shape) if tile is None else (tile.rows, *tensor.shape[1:])
