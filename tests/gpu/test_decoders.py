"""The decoders of a device, its kernels and torch's operators, write the bits of torch's operators on a CPU."""

import warnings

import pytest
import torch
from torch import Tensor

from elixir_moe.quantized import decoders
from elixir_moe.torch_private import has_triton
from tests.support.decoder_cases import CASES, DTYPES, EVERY, SHAPES, assert_same

LARGE = [(scheme, (1100, 2048)) for scheme in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "shape"), [*EVERY, *LARGE])
def test_all_decoders_agree(
    scheme: str, shape: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, codes, scales = CASES[scheme](dtype, shape)

    def decoded(on: str) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=on)
        decode(codes.to(on), scales.to(on), out)
        return out.cpu()

    found = decoded(device)
    monkeypatch.setattr(decoders, "_native", None)
    monkeypatch.setattr(decoders, "_in_triton", lambda out: None)
    wanted = decoded("cpu")
    assert_same(found, wanted)
    assert_same(decoded(device), wanted)


def test_triton_decodes_where_it_is(device: str) -> None:
    if device == "cpu":
        assert decoders._in_triton(torch.empty(1)) is None
        return
    with warnings.catch_warnings(record=True, action="always") as said:
        found = decoders._triton_on.__wrapped__(torch.device(device))
    assert (found is None) == (bool(said) or not has_triton()), "where it is and its first kernel runs"
