"""`python -m benchmarks.proof.decoding`: how fast quantized weights are decoded on this device.

Owns this measurement: for each scheme, the packed bytes read and the bf16 bytes written in a second, by the kernel that
the library chooses here and by torch's operators. All on random data.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.proof.rates import seconds_of
from benchmarks.proof.steps import tell
from elixir_moe.kernels import cpu_features
from elixir_moe.quantized import decoders
from elixir_moe.quantized.formats import SCHEMES

LAUNCHES = 20


def main() -> int:
    """Measures and tells."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    shape = (16384, 16384) if cuda else (256, 256)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    by = "Triton" if decoders._in_triton(out) else "torch" if cuda else cpu_features()
    found: dict[str, Any] = {}
    for name, scheme in SCHEMES.items():
        codes, scales = scheme.encode(torch.randn(shape, device=device))
        decode = partial(scheme.decode_into, codes, scales, out)
        seconds = _seconds(decode)
        with mock.patch.multiple(decoders, _native=None, _in_triton=lambda out: None):
            by_torch = _seconds(decode)
        nbytes = scheme.nbytes(shape) + out.nbytes
        found[name] = {"bytes_per_second": nbytes / seconds, "by_torch_bytes_per_second": nbytes / by_torch}
    tell({"by": by, "schemes": found})
    return 0


def _seconds(decode: Callable[[], Any]) -> float:
    """Seconds of one of `LAUNCHES`, so that the host's time to launch them is hidden."""

    def launched() -> None:
        for _ in range(LAUNCHES):
            decode()

    return seconds_of(launched) / LAUNCHES


if __name__ == "__main__":
    sys.exit(main())
