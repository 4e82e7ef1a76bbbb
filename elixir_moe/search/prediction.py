"""What a plan was expected to take, beside what its steps take.

Owns the comparison after the first real steps, and what follows from it. All ranks measure the same steps and agree on
the slowest rank's median, at the end of one and the same step, so whatever follows is the same everywhere.
"""

import statistics
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.search.auto import Forecast
from elixir_moe.search.cost import Seconds
from elixir_moe.search.hardware import Fitted
from elixir_moe.search.measure import remember_fit
from elixir_moe.search.solve import Task
from elixir_moe.state.wrapped import Wrapped

WARM_UP = 2
"""Steps that are not measured: the first records its schedule and allocates, the second is the first to follow it."""
MEASURED = 5
"""Steps that are; their median counts, so an evaluation between two of them does not."""
TOLERANCE = 0.2
"""Part of the prediction by which the measurement may be off before it is remembered."""


class Prediction:
    """What `em.inspect(model).prediction` is for a plan that was searched for."""

    def __init__(self, forecast: Forecast, task: Task | None, machine: dict[str, Any] | None) -> None:
        self.forecast = forecast
        self.step_seconds = forecast.seconds.step
        """Predicted seconds of a step."""
        self.measured_seconds: float | None = None
        """Measured: of the slowest rank, the median of the steps that were measured; None before they are done."""
        self.device_bytes = forecast.device_bytes
        """Predicted bytes the library holds on the device."""
        self.host_bytes = forecast.host_bytes
        self.disk_bytes = forecast.disk_bytes
        self.held_bytes: dict[str, int] = {}
        """By tier: what it holds at the end of a step; empty before the first."""
        self._task, self._machine = task, machine
        self._ends: list[float] = []

    def observe(self, wrapped: Wrapped) -> None:
        """At the end of each step. Collective when enough were measured."""
        if self.measured_seconds is not None:
            return
        self.held_bytes = wrapped.held_bytes()
        device = wrapped.model.parameters[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._ends.append(time.perf_counter())
        if len(self._ends) < WARM_UP + MEASURED:
            return
        ends = self._ends[WARM_UP - 1 :]  # a step takes from the end of the one before to its own
        mine = torch.tensor(statistics.median(b - a for a, b in pairwise(ends)), device="cpu")
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=wrapped.optimizer.kept.groups.control)
        self.measured_seconds = mine.item()
        if abs(self.measured_seconds / self.step_seconds - 1) > TOLERANCE:
            self._learn(self.measured_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "predicted_step_seconds": self.step_seconds,
            "measured_step_seconds": self.measured_seconds,
            "predicted_device_bytes": self.device_bytes,
            "held_device_bytes": self.held_bytes.get("device"),
            "predicted_host_bytes": self.host_bytes,
            "held_host_bytes": self.held_bytes.get("host"),
            "predicted_disk_bytes": self.disk_bytes,
            "held_disk_bytes": self.held_bytes.get("disk"),
        }

    def _learn(self, measured: float) -> None:
        """Keeps, on the rank that searched, what the next start is to plan with."""
        if self._task is None or self._machine is None:
            return
        fitted = corrected(self._task.hardware.fitted, self.forecast.seconds, measured)
        remember_fit(self._machine, self._task.profile.key, fitted)
        warnings.warn(
            f"a step takes {measured:.3f} s, {self.step_seconds:.3f} s were expected: the next start plans with what "
            f"was measured",
            stacklevel=2,
        )


def corrected(fitted: Fitted, expected: Seconds, measured: float) -> Fitted:
    """The constants with which the step would have been predicted as it was measured, as far as compute explains it.

    Transfers, collectives and updates are taken at their word, since they were measured alone; what is left of the
    measured step is compute, at the least what hides the transfers.
    """
    left = measured - (expected.step - max(expected.compute, expected.fetch, expected.offload))
    compute = max(left, expected.fetch, expected.offload, expected.compute / 100)
    return replace(fitted, device_efficiency=fitted.device_efficiency * expected.compute / compute)
