"""A pytest plugin that puts `ElixirAccelerator` in the place of Accelerate's `Accelerator`.

Owns that exchange, and a line of JSON in the file PEERS_OUTCOMES for each test that ran: its name, whether it passed,
and what it said. Tests find the class by its name in the package, so the name is exchanged before any is imported.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import accelerate
import accelerate.accelerator
import pytest
import torch.distributed as dist

from elixir_moe.integrations.accelerate import ElixirAccelerator

for module in (accelerate, accelerate.accelerator):
    setattr(module, "Accelerator", ElixirAccelerator)  # noqa: B010


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Tests that fork ranks want a process without process groups, as the plain class leaves it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """Writes the outcome of each test."""
    report = yield
    if report.failed or (report.when == "call" and report.passed):
        said = "\n".join([report.longreprtext, *(text for _, text in report.sections)])
        with open(os.environ["PEERS_OUTCOMES"], "a") as file:
            print(json.dumps([report.nodeid, report.passed, said]), file=file)
    return report
