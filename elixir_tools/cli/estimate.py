"""The command `estimate`: the memory of plain strategies, and the tables of ZeRO-Infinity.

Owns its output. Decides nothing: `fit.estimate` and `fit.zero_infinity` have the formulas.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from elixir_moe.errors import ConfigError, nothing_called
from elixir_moe.ext.models import SCHEMES
from elixir_moe.ext.plans import size_text
from elixir_tools.fit import estimate, zero_infinity

_MOST_FIGURE = 1e60
"""Largest figure of an estimate, so that products of a few stay finite."""
_TYPICAL = (4096, 4096)
"""A weight, for the share of scales in the bytes of quantized ones."""


def run(known: argparse.Namespace) -> int:
    """Prints one of the papers' estimates."""
    if known.picture is not None and known.zero_infinity != "figure-3":
        raise ConfigError("--picture draws figure-3 alone: add --zero-infinity figure-3")
    if known.efficiency:
        ait, bandwidth, peak = known.efficiency
        if not all(0 < figure < _MOST_FIGURE for figure in known.efficiency):
            raise ConfigError(f"--efficiency: expected three numbers above 0 and below {_MOST_FIGURE:g}")
        rows: list[dict[str, Any]] = [{"efficiency": zero_infinity.efficiency(ait, bandwidth * 1e9, peak * 1e12)}]
    elif known.zero_infinity is not None:
        if known.zero_infinity not in zero_infinity.TABLES:
            raise nothing_called("table of ZeRO-Infinity", known.zero_infinity, list(zero_infinity.TABLES))
        rows = zero_infinity.rows_of(known.zero_infinity)
    else:
        rows = list(_plain_rows(known))
    if known.picture is not None:
        from elixir_tools.cli.pictures import draw_efficiency  # matplotlib takes a second to load

        draw_efficiency(known.picture)
    print(json.dumps({"rows": rows}) if known.json else "\n".join(_table(rows)))
    return 0


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows under their column names, which are repeated where they change. Printed figures are in brackets, with a
    star if they are not what the formula gives; the reasons follow."""
    reasons = dict[str, str]()
    block: list[list[str]] = []
    for i, row in enumerate(rows):
        stars, printed = row.get("departs", {}), row.get("printed", {})
        shown = {name: value for name, value in row.items() if name not in ("departs", "printed")}
        if "gib" in shown:
            shown["memory"] = size_text(shown.pop("gib") * 2**30)
        reasons |= {f"{name} {printed[name]}": why for name, why in stars.items()}
        cells = [_cell(value, printed.get(name), starred=name in stars) for name, value in shown.items()]
        block = block or [[*shown]]
        block.append(cells)
        if i + 1 == len(rows) or rows[i + 1].keys() != row.keys():
            widths = [max(map(len, column)) for column in zip(*block, strict=True)]
            yield from ("  ".join(map(str.rjust, line, widths)).rstrip() for line in block)
            block = []
    yield from (f"* {what}: {why}" for what, why in reasons.items())


def _plain_rows(known: argparse.Namespace) -> Iterator[dict[str, Any]]:
    models = dict(estimate.BLOG_MODELS)
    if known.parameters is not None:
        if not 1 <= known.parameters < _MOST_FIGURE:
            raise ConfigError(f"--parameters: expected at least 1 and below {_MOST_FIGURE:g}, got {known.parameters}")
        models = {"model": known.parameters}
    elif known.model:
        models = {known.model: models[known.model]}
    if known.quantize is not None and known.adapters is None:
        raise ConfigError("--quantize is for frozen parameters: give the number of trained ones by --adapters")
    if known.adapters is not None and not 0 <= known.adapters < _MOST_FIGURE:
        raise ConfigError(f"--adapters: expected at least 0 and below {_MOST_FIGURE:g}, got {known.adapters}")
    frozen_bytes = 2.0 if known.quantize is None else SCHEMES[known.quantize].nbytes(_TYPICAL) / math.prod(_TYPICAL)
    for name, parameters in models.items():
        # adapters come on top of the model
        trained, frozen = (parameters, 0) if known.adapters is None else (known.adapters, parameters)
        for ddp in (False, True):
            for amp in (False, True):
                for accumulate in (False, True):
                    strategy = estimate.PlainStrategy(
                        amp=amp, ddp=ddp, accumulate=accumulate, bucket_view=known.bucket_view, adamw=known.adamw
                    )
                    peak = strategy.peak_bytes(trained=trained, frozen=frozen, frozen_bytes=frozen_bytes)
                    yield {
                        "model": name,
                        "ddp": ddp,
                        "amp": amp,
                        "accumulate": accumulate,
                        "bytes_per_parameter": peak / (trained + frozen),
                        "gib": peak / 2**30,
                    }


def _cell(value: Any, printed: str | None, *, starred: bool) -> str:
    """A value, with as many digits as the paper prints; halves are rounded up, as in the papers."""
    if not isinstance(value, float):
        return str(value)
    digits = 2 if printed is None else len(printed.partition(".")[2])
    text = f"{value + 1e-9:.{digits}f}"
    return text if printed is None else f"{text} ({printed}{'*' * starred})"
