"""The numbers of a run for services beside its files: TensorBoard here, others by the same two methods.

Owns the names of the values and the interface. Computes nothing that `metrics.jsonl` does not have. Rank 0 writes. The
package `tensorboard` is imported when it is asked for.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from elixir_moe.errors import ConfigError

EVENTS = ".elixir_moe"
"""The end of the names of TensorBoard's files that a run writes."""


class Writer(Protocol):
    """Where numbers go: each value has a name, as in ``loss/train``."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of a step."""

    def close(self) -> None:
        """Ends the run."""


class TensorBoard:
    """A folder of TensorBoard's events."""

    def __init__(self, folder: Path, done: int) -> None:
        """`done`: steps of the run so far; what an earlier start wrote about later ones is dropped.

        Raises:
            ConfigError: the package is missing.
        """
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(folder), purge_step=done + 1, filename_suffix=EVENTS)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """As `Writer` says."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """As `Writer` says."""
        self._events.close()


def check_tensorboard() -> None:
    """Raises ConfigError if TensorBoard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("run.tensorboard writes by the package tensorboard: pip install tensorboard")


def values_of(record: Mapping[str, Any], prediction: Mapping[str, Any] | None) -> dict[str, float]:
    """The values of a step, those that are there and finite.

    Args:
        record: a line of ``metrics.jsonl``.
        prediction: predicted and measured cost of a step, as in ``summary.json``; None without a search.
    """
    return {name: float(value) for name, value in _named(record, prediction or {}) if value is not None}


def _named(record: Mapping[str, Any], prediction: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield "loss/train", record["loss"]
    yield "loss/validation", record["val_loss"]
    yield "step/gradient norm", record["grad_norm"]
    yield "step/learning rate", record["lr"]
    yield "step/seconds", record["step_seconds"]
    yield "step/tokens a second", record["tokens_per_second"]
    for tier, held in record["held_bytes"].items():
        yield f"bytes held/{tier}", held
        yield f"bytes held/{tier}, predicted", prediction.get(f"predicted_{tier}_bytes")
    for tier, used in record["process_bytes"].items():
        yield f"bytes of the process/{tier}", used
    counted = record["statistics"]
    for tier in counted["bytes_fetched"]:
        yield f"bytes moved/fetched from {tier}", counted["bytes_fetched"][tier]
    for tier in counted["bytes_offloaded"]:
        yield f"bytes moved/offloaded to {tier}", counted["bytes_offloaded"][tier]
    yield "stalls/gathers on demand", counted["misses"] - counted["prefetched"]
    yield "stalls/requests off schedule", counted["off_schedule"]
    for layer, tokens in record["tokens_per_expert"].items():
        yield f"busiest expert/{layer}", max(tokens) * len(tokens) / max(1, sum(tokens))
    yield "step/seconds, predicted", prediction.get("predicted_step_seconds")
