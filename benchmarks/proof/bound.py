"""The time below which no step can be, on the machine as it was measured.

Owns the arithmetic; measures nothing (`rates`). Imports only the standard library.

Three things that can overlap each take a least time, and the longest of them is the bound:

- compute: what plain torch takes for the micro-batches with nothing away (`plain`). Where that is not measured, the
  matrix products at the rate of a large one, for M parameters that a token meets and D tokens: 2 M D in forward, 2 M D
  again where activations are recomputed, 2 M D for the gradients of activations, and 2 M D for those of trained weights
  (8 M D of a model trained whole; Elixir v2, section 6);
- PCIe: parameters whose state cannot be on the device go up twice (2 B each), for forward and for backward, with each
  micro-batch, or with each pass of several. The gradients of those that are trained come down meanwhile, and are fewer
  bytes. Device memory for the activations of a micro-batch cannot hold state: all contenders recompute layers, and hold
  as many;
- host Adam: trained parameters whose state is not on the device are updated by the CPU.
"""

from typing import Any

COMPUTE_BYTES, STATE_BYTES = 2, 16
"""Bytes of a parameter: as it is multiplied, and with gradient, fp32 master and two moments."""


def bound(rates: dict[str, float], row: dict[str, Any], plain: dict[str, Any] | None = None) -> tuple[float, str]:
    """(seconds, what limits) of the step that `row` describes, with the figures of `plain` for its model."""
    frozen = row["parameters"] - row["trained"]
    trained_bytes, frozen_bytes = STATE_BYTES * row["trained"], COMPUTE_BYTES * frozen
    away = max(0, trained_bytes + frozen_bytes - (row["device_bytes"] - row["activation_bytes"]))
    frozen_away = min(away, frozen_bytes) // COMPUTE_BYTES  # these cost least to have away
    trained_away = max(0, away - frozen_bytes) / STATE_BYTES
    products = 2 * row["active"] * row["tokens"] * (2 + row["recomputes"]) + 2 * row["active_trained"] * row["tokens"]
    computing = products / rates["matmul_flops"]
    if plain is not None:
        layers = row["layers"] - plain["layers"]
        computing = row["micro_batches"] * (plain["seconds"] + layers * plain["layer_seconds"])
    passes = row.get("passes", row["micro_batches"])
    seconds = {
        "compute": computing,
        "PCIe": 2 * passes * COMPUTE_BYTES * (frozen_away + trained_away) / rates["up_bytes_per_second"],
        "host Adam": trained_away / rates["host_adam_parameters_per_second"],
    }
    what = max(seconds, key=lambda name: seconds[name])
    return seconds[what], what
