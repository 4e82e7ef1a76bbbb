"""Flat elements of a shard that outlive a step, in memory or on disk: what checkpoints read and write.

Owns one way to read and write them for weights and moments alike. Elements on disk without an update are
`disk_values.ValuesElements`. Reads and writes block until a running update has ended.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from elixir_moe.kernels import CODE_BLOCK, decode, encode
from elixir_moe.memory.disk import DiskShard
from elixir_moe.memory.gate import Gate


class Elements(Protocol):
    """Flat elements of a shard."""

    @property
    def dtype(self) -> torch.dtype:
        """The elements' dtype."""
        ...

    def read(self) -> torch.Tensor:
        """The elements themselves if they are in memory, else a copy."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Writes new values; in memory, the result of `read`, changed in place, is not copied again."""
        ...

    def __getitem__(self, part: slice) -> "Elements":
        """Some of the elements."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Elements in memory."""

    tensor: torch.Tensor
    gate: Gate

    @property
    def dtype(self) -> torch.dtype:
        """Implements `Elements.dtype`."""
        return self.tensor.dtype

    def read(self) -> torch.Tensor:
        """Implements `Elements.read`."""
        self.gate.wait_for_update()
        return self.tensor

    def write(self, values: torch.Tensor) -> None:
        """Implements `Elements.write`."""
        self.gate.wait_for_update()
        if values is not self.tensor:
            self.tensor.copy_(values)

    def __getitem__(self, part: slice) -> "InMemory":
        return replace(self, tensor=self.tensor[part])


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes of a moment, read and written as the values that they stand for.

    The `dtype` holds each of them exactly, and a value that was read is written as the same code: so a checkpoint has
    no blocks, and fits every layout.
    """

    codes: Elements
    exponents: Elements
    """Exponents of the blocks with these codes."""
    numel: int
    """Number of codes."""
    signed: bool
    """Whether this is a first moment."""
    first: int = 0
    """The place of the first code in its block."""

    @property
    def dtype(self) -> torch.dtype:
        """Implements `Elements.dtype`."""
        return torch.bfloat16 if self.signed else torch.float32

    def read(self) -> torch.Tensor:
        """Implements `Elements.read`; a copy."""
        return decode(self.codes.read(), self.exponents.read(), signed=self.signed, first=self.first)

    def write(self, values: torch.Tensor) -> None:
        """Implements `Elements.write`; other values are rounded to the nearest."""
        assert not self.first, "blocks of codes are written as a whole"
        codes, exponents = self.codes.read(), self.exponents.read()
        encode(values.to(codes.device), codes, exponents, signed=self.signed)
        self.codes.write(codes)
        self.exponents.write(exponents)

    def __getitem__(self, part: slice) -> "Coded":
        start, stop, _ = part.indices(self.numel)
        stop = max(start, stop)
        low, high = self.first + start, self.first + stop
        exponents = self.exponents[low // CODE_BLOCK : -(-high // CODE_BLOCK)]
        return replace(
            self, codes=self.codes[start:stop], exponents=exponents, numel=stop - start, first=low % CODE_BLOCK
        )


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Elements of an array on disk."""

    disk: DiskShard
    array: int
    start: int
    stop: int
    gate: Gate

    @property
    def dtype(self) -> torch.dtype:
        """Implements `Elements.dtype`."""
        return self.disk.arrays[self.array].dtype

    def read(self) -> torch.Tensor:
        """Implements `Elements.read`."""
        self.gate.wait_for_update()
        return self.disk.read(self.array, self.start, self.stop)

    def write(self, values: torch.Tensor) -> None:
        """Implements `Elements.write`."""
        self.gate.wait_for_update()
        self.disk.write(self.array, self.start, values.cpu())

    def __getitem__(self, part: slice) -> "OnDisk":
        start, stop, _ = part.indices(self.stop - self.start)
        return replace(self, start=self.start + start, stop=self.start + max(start, stop))
