"""The checksum by which the first step finds writes without a trace."""

import pytest
import torch

from elixir_moe.runtime.writes import _checksum

LENGTHS = (1, 7, 4095, 4096, 4099, 3 * 4 * 4096 + 5)
"""Less than a table has columns, and tables with and without words behind them."""


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_changed_bit_and_swapped_elements_change_it(dtype: torch.dtype, length: int, first: int) -> None:
    generator = torch.Generator().manual_seed(length)
    bits = torch.randint(0, 256, ((first + length) * dtype.itemsize,), generator=generator).to(torch.uint8)
    values = bits.view(dtype)[first:]
    found = _checksum(values)
    assert found == _checksum(values.clone()), "alike in all memory"
    mine = bits[first * dtype.itemsize :]
    for place in {0, len(mine) // 3, len(mine) // 2, len(mine) - 1}:
        mine[place] ^= 64
        assert _checksum(values) != found
        mine[place] ^= 64
    for a, b in ((0, length - 1), (length // 2, length // 3)):
        if a != b:
            swapped = values.clone()
            swapped[a], swapped[b] = values[b], values[a]
            assert _checksum(swapped) != found
    assert _checksum(values) == found
