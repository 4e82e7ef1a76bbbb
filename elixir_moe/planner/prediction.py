"""Compares the predicted time of a step with the measured time.

Owns the comparison after the first real steps, and the correction that follows. Never changes the plan of the running
training. All ranks measure the same steps and agree on the slowest rank's median at the end of the same step, so all
draw the same conclusion.
"""

import logging
import statistics
import time
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.accelerator import api, is_accelerator
from elixir_moe.chunks.plan import seconds_text
from elixir_moe.planner.auto import Forecast
from elixir_moe.planner.cost import Seconds
from elixir_moe.planner.hardware import Fitted
from elixir_moe.planner.measure import remember_fit
from elixir_moe.planner.solve import Task
from elixir_moe.state.wrapped import Wrapped, require_wrapped

_LOG = logging.getLogger(__name__)
WARM_UP = 2
"""Steps before the measured ones: they allocate memory and fill caches."""
MEASURED = 5
"""Measured steps; the median is used, so an evaluation between two steps does not count."""
TOLERANCE = 0.2
"""Relative error of the prediction above which the measurement is remembered."""


class Prediction:
    """The value of `em.inspect(model).prediction` for a plan that was searched for."""

    def __init__(self, forecast: Forecast, task: Task | None, machine: dict[str, Any] | None) -> None:
        self.forecast = forecast
        self.step_seconds = forecast.seconds.step
        """Predicted seconds of a step."""
        self.measured_seconds: float | None = None
        """Median seconds of the measured steps on the slowest rank; None until they are done."""
        self.device_bytes = forecast.device_bytes
        """Predicted bytes the library holds on the device."""
        self.host_bytes = forecast.host_bytes
        self.disk_bytes = forecast.disk_bytes
        self.held_bytes: dict[str, int] = {}
        """Bytes held at the end of a step, by tier; empty before the first step."""
        self._task, self._machine = task, machine
        self._ends: list[float] = []

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Calls `observe` at the end of each step. Holds only a weak reference to the model."""
        there = weakref.ref(model)

        def observe(*_: object) -> None:
            if (model := there()) is not None:
                self.observe(require_wrapped(model, "step"))

        optimizer.register_step_post_hook(observe)

    def observe(self, wrapped: Wrapped) -> None:
        """Called at the end of each step. Collective in the step that completes the measurement."""
        if self.measured_seconds is not None:
            return
        self.held_bytes = wrapped.held_bytes()
        device = wrapped.spec.parameters[0].device
        if is_accelerator(device):
            api(device).synchronize(device)
        self._ends.append(time.perf_counter())
        if len(self._ends) < WARM_UP + MEASURED:
            return
        ends = self._ends[WARM_UP - 1 :]  # a step lasts from the end of the one before to its own end
        mine = torch.tensor(statistics.median(b - a for a, b in pairwise(ends)), device="cpu")
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=wrapped.groups.control)
        self.measured_seconds = mine.item()
        if self.is_off:
            self._learn(self.measured_seconds)

    @property
    def is_off(self) -> bool:
        """Whether the prediction is so far off that the next start plans with the measured time."""
        return self.measured_seconds is not None and abs(self.measured_seconds / self.step_seconds - 1) > TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
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
        """Stores the corrected constants for the next start, on the rank that searched."""
        if self._task is None or self._machine is None:
            return
        fitted = corrected(self._task.hardware.fitted, self.forecast.seconds, measured)
        remember_fit(self._machine, self._task.profile.key, fitted)
        _LOG.debug(
            "a step takes %s, %s were predicted: the next start plans with the measured time",
            seconds_text(measured),
            seconds_text(self.step_seconds),
        )


def corrected(fitted: Fitted, expected: Seconds, measured: float) -> Fitted:
    """Returns the constants with which the prediction would equal the measurement, as far as compute explains it.

    The predicted times of transfers, collectives, units and updates are kept, since these were measured separately, and
    so is the stall. The rest of the measured step is compute; together with the units, it is at least as long as the
    transfers it hides.
    """
    exposed = fitted.exposed_collectives * expected.collectives  # more, if compute is too short for it
    left = measured - (expected.step - expected.overlapped - expected.exposed) - exposed
    compute = max(max(left, expected.transfers) - expected.units, expected.compute / 100)
    return replace(fitted, device_efficiency=fitted.device_efficiency * expected.compute / compute)
