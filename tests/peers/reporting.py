"""A pytest plugin for the tests of every peer: it runs the listed tests alone and writes down what each one did.

Owns a line of JSON in the file PEERS_OUTCOMES for each test that ran: its name, whether it passed, and what it said.
The file PEERS_WANTED has the names of the tests to run.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the listed tests."""
    names = set(Path(os.environ["PEERS_WANTED"]).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = [item for item in items if item.nodeid in names]


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
