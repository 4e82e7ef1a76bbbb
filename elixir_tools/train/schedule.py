"""The learning rate over a run: linear warm-up, then cosine decay, or any scheduler of torch given as a string.

Owns the string form of schedulers, such as ``StepLR(step_size=30, gamma=0.1)``, their checks, and the factor on the
peak rate at each step, which only depends on the step: a run that resumes or goes back needs no state of a scheduler.
Knows no run.
"""

import ast
import importlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elixir_moe.errors import ConfigError
from elixir_tools.names import COSINE

_MODULE = "torch.optim.lr_scheduler"
_OF_A_RATE = ("lr", "initial_lr", "max_lr", "min_lr", "params")
"""Entries of a parameter group that a scheduler may write."""


def cosine(step: int, steps: int, final: float) -> float:
    """The factor at `step` of `steps`, both counted from the end of the warm-up: cosine decay from 1 to `final`."""
    done = min(1.0, step / max(1, steps - 1))
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


@lru_cache(maxsize=8)
def factors(schedule: str, lr: float, steps: int) -> Sequence[float]:
    """Returns the factors on `lr` of the first `steps` steps of a scheduler.

    Raises:
        ConfigError: no scheduler, wrong arguments, or a scheduler that does not fit so many steps.
    """
    kind, arguments = _parsed(schedule)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    group = optimizer.param_groups[0]
    before = {name: value for name, value in group.items() if name not in _OF_A_RATE}
    found = []
    try:
        scheduler = kind(optimizer, **arguments)
        for step in range(steps):
            if step:
                optimizer.step()
                scheduler.step()
            found.append(float(group["lr"]) / lr)
    except Exception as error:  # of a class that may be the user's own
        raise ConfigError(
            f"schedule {schedule!r}: step {len(found)} of {steps} fails: {type(error).__name__}: {error}; give "
            f"another, in optimizer.schedule, or in control.yaml to a run that has begun"
        ) from error
    if changed := [name for name in before if group[name] != before[name]]:
        off = ": give cycle_momentum=False" if "cycl" in schedule.lower() else ""
        raise ConfigError(f"schedule {schedule!r} changes {changed[0]}, and only learning rates are scheduled{off}")
    if wrong := [step for step, factor in enumerate(found) if not 0 <= factor < math.inf]:
        raise ConfigError(f"schedule {schedule!r}: the learning rate of step {wrong[0]} is {found[wrong[0]] * lr:g}")
    return tuple(found)


def _parsed(schedule: str) -> tuple[type[LRScheduler], dict[str, Any]]:
    """The class that a string names, and the arguments for it."""
    try:
        call = ast.parse(schedule.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("no call with named arguments")
        path = ast.unparse(call.func)
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if len(arguments) < len(call.keywords):
            raise ValueError("an argument is given twice")
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"schedule {schedule!r}: expected {COSINE}, or a scheduler with named arguments, such as "
            f"StepLR(step_size=30, gamma=0.1): {error}"
        ) from error
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module or _MODULE), name)
    except Exception as error:  # of a module that may be the user's own
        raise ConfigError(
            f"schedule {schedule!r}: there is no {path} in what is installed or on PYTHONPATH: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        raise ConfigError(f"schedule {schedule!r}: {path} is not a scheduler: name a subclass of {_MODULE}.LRScheduler")
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigError(f"schedule {schedule!r} needs a metric, which no step has: lower lr in control.yaml instead")
    return kind, arguments
