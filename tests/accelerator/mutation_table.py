"""Which mutations of `mutations` the accelerator of threads notices: ``make mutations``.

Writes a table with a line for each mutation. One is tried in the tests of single waits, and then in the runs of
`tests.support.order_cases`: what a run leaves with late streams must have the bits that it has without. The model of
streams in `tests/lanes` and other tests are not asked.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from tests.accelerator import test_library_streams
from tests.accelerator.build import build
from tests.accelerator.device import BACKENDS, start
from tests.accelerator.mutations import Mutation, applied, mutations
from tests.accelerator.order import differing, leaves
from tests.support.order_cases import TELLING, Case
from tests.support.ranks import RankError, RankPool

SECONDS = 240
"""The longest that a run may take before it counts as hanging."""
LATE = ("compute", "others")
CASES = [*TELLING, *((1, replace(TELLING[number][1], there=True)) for number in (2, 25))]
CASES = sorted(CASES, key=lambda one: one[0])
"""Those of one rank come first: there, streams are as late as events allow."""


def attempt(mutation: Mutation | None, case: Case, late: str, seed: int, wanted: dict[str, Any] | None) -> Any:
    """(rank) Runs a case with a mutation, and compares what it leaves."""
    signal.alarm(SECONDS)
    with applied(mutation):
        found = leaves(case, late, seed)
    torch.accelerator.empty_cache()
    signal.alarm(0)
    if wanted is not None:
        names = differing(found, wanted)
        assert not names, f"{len(names)} differ: {names[0]} in {case}"
    return found


def tries_waits(mutation: Mutation | None) -> None:
    """(rank) Runs the tests of single waits with a mutation."""
    signal.alarm(SECONDS)
    with applied(mutation):
        for name, test in vars(test_library_streams).items():
            if name.startswith("test_"):
                test.__wrapped__()
    torch.accelerator.synchronize()
    signal.alarm(0)


class Device:
    """Ranks on the accelerator of threads, which are kept until a run fails on them."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, world: int, body: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `body` on the first rank."""
        pool = self._pools.get(world)
        if pool is None:
            pool = self._pools[world] = RankPool(world, backend=BACKENDS, prepare=start)
        try:
            return pool.run(body, *arguments)[0]
        except RankError:
            pool.close()
            del self._pools[world]
            raise

    def close(self) -> None:
        """Ends the ranks."""
        for pool in self._pools.values():
            pool.close()


class Accelerator:
    """Tries mutations on the accelerator of threads."""

    def __init__(self, seeds: Sequence[int], devices: int) -> None:
        build()
        self._seeds = seeds
        self._devices: SimpleQueue[Device] = SimpleQueue()
        for _ in range(devices):
            self._devices.put(Device())
        self._wanted: list[dict[str, Any]] = []

    def prepare(self, executor: ThreadPoolExecutor) -> None:
        """Runs all cases without a mutation: with late streams, they leave the same bits."""
        self._wanted = list(executor.map(self._sound, CASES))

    def _sound(self, case: tuple[int, Case]) -> dict[str, Any]:
        device = self._devices.get()
        world, chosen = case
        wanted: dict[str, Any] = device.run(world, attempt, None, chosen, "", 0, None)
        for late in LATE:
            device.run(world, attempt, None, chosen, late, 0, wanted)
        self._devices.put(device)
        return wanted

    def notices(self, mutation: Mutation) -> str:
        """The run that notices a mutation, and how; empty if none does."""
        device = self._devices.get()
        try:
            try:
                device.run(1, tries_waits, mutation)
            except RankError as error:
                return f"a test of one wait: {_told(error)}"
            for seed in self._seeds:
                for number, ((world, case), wanted) in enumerate(zip(CASES, self._wanted, strict=True)):
                    for late in LATE:
                        try:
                            device.run(world, attempt, mutation, case, late, seed, wanted)
                        except RankError as error:
                            return f"run {number}, {late} late, seed {seed}: {_told(error)}"
            return ""
        finally:
            self._devices.put(device)

    def close(self) -> None:
        """Ends the ranks."""
        while not self._devices.empty():
            self._devices.get().close()


def _told(error: RankError) -> str:
    last = str(error).strip().splitlines()[-1]
    return f"{next(iter(error.types.values()))} {last[:60]}".replace("|", "/")


def main() -> int:
    """Writes the table of the mutations whose line contains one of the arguments, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="text in a line of --list, as streams.py:87")
    parser.add_argument("--list", action="store_true", help="show the mutations and try none")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the delays")
    parser.add_argument("--workers", type=int, default=2, help="mutations tried at once: most of a case is delay")
    arguments = parser.parse_args()
    chosen = [m for m in mutations() if not arguments.only or any(text in str(m) for text in arguments.only)]
    write = partial(print, flush=True)
    if arguments.list:
        write(*chosen, sep="\n")
        return 0
    accelerator = Accelerator(range(arguments.seeds), arguments.workers)
    try:
        with ThreadPoolExecutor(arguments.workers) as executor:
            accelerator.prepare(executor)
            write("| mutation | noticed by |\n|---|---|")
            for mutation, by in zip(chosen, executor.map(accelerator.notices, chosen), strict=True):
                write(f"| {mutation} | {by or 'nobody'} |")
    finally:
        accelerator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
