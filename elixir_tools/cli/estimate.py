"""The command `estimate`: what a model takes in plain PyTorch.

Owns its output. Decides nothing: `fit.estimate` has the formulas.
"""

import argparse
import json
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from elixir_moe.errors import ConfigError
from elixir_moe.ext.models import SCHEMES
from elixir_moe.ext.plans import size_text
from elixir_tools.fit.estimate import PlainStrategy

_MOST = 1e60
"""Largest number of parameters, so that products of a few stay finite."""
_TYPICAL = (4096, 4096)
"""A weight, for the share of scales in the bytes of quantized ones."""


def run(known: argparse.Namespace) -> int:
    """Prints a row for each way to train. Raises ConfigError."""
    rows = list(_rows(known))
    if known.json:
        print(json.dumps({"rows": rows}))
    else:
        print("  ddp    amp  accumulate  bytes_per_parameter      memory")
        for row in rows:
            ddp, amp, accumulate = (str(row[name]) for name in ("ddp", "amp", "accumulate"))
            memory = size_text(row["gib"] * 2**30)
            print(f"{ddp:>5}  {amp:>5}  {accumulate:>10}  {row['bytes_per_parameter']:19.2f}  {memory:>10}")
    return 0


def _rows(known: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if not 1 <= known.parameters < _MOST:
        raise ConfigError(f"--parameters: expected at least 1 and below {_MOST:g}, got {known.parameters}")
    if known.quantize is not None and known.adapters is None:
        raise ConfigError("--quantize is for frozen parameters: give the number of trained ones by --adapters")
    if known.adapters is not None and not 0 <= known.adapters < _MOST:
        raise ConfigError(f"--adapters: expected at least 0 and below {_MOST:g}, got {known.adapters}")
    frozen_bytes = 2.0 if known.quantize is None else SCHEMES[known.quantize].nbytes(_TYPICAL) / math.prod(_TYPICAL)
    # adapters come on top of the model
    trained, frozen = (known.parameters, 0) if known.adapters is None else (known.adapters, known.parameters)
    for ddp, amp, accumulate in product((False, True), repeat=3):
        strategy = PlainStrategy(
            amp=amp, ddp=ddp, accumulate=accumulate, bucket_view=known.bucket_view, adamw=known.adamw
        )
        peak = strategy.peak_bytes(trained=trained, frozen=frozen, frozen_bytes=frozen_bytes)
        per_parameter = peak / (trained + frozen)
        yield {
            "ddp": ddp,
            "amp": amp,
            "accumulate": accumulate,
            "bytes_per_parameter": per_parameter,
            "gib": peak / 2**30,
        }
