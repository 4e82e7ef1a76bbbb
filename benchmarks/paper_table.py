"""The measured steps of Elixir v2, Table 8, and the planner's predictions of them: ``make paper-table``.

Prints each row, its error and the mean; then the errors of rows that were held out: the rows of each model, number of
GPUs or batch, predicted with constants that were fitted to all other rows. ``--fit`` fits the four constants of the
hardware file again: the same for all rows, by the sum of the mean and a tenth of the largest error, over plans made
with the previous constants.
"""

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from elixir_moe.chunks.plan import Tier
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Fitted, Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import PlanCandidate, Task, solve
from elixir_moe.planner.trace import trace
from elixir_moe.wrapping.tiling import tile_for
from elixir_tools.fit.tasks import pretended_ranks
from elixir_tools.models.presets import named_model
from elixir_tools.models.shapes import is_mixture

TABLE = Path(__file__).with_name("elixir_v2_table8_a100_80g.csv")
MACHINE = "a100-80g-pcie-x4"
SEQ = 1024
"""Tokens of a sequence: GPT-2's."""


def rows() -> list[tuple[str, int, int, float]]:
    """(model, GPUs, batch of a GPU, measured TFLOPS of a GPU), of the rows that can be read."""
    with TABLE.open() as file:
        return [
            (r["model"], int(r["gpus"]), int(r["batch_per_gpu"]), float(r["elixir"]))
            for r in csv.DictReader(file)
            if r["elixir"]
        ]


@cache
def profile_of(model: str, gpus: int, batch: int, layers: int | None = None, tiles: int | None = None) -> Profile:
    """The step of one GPU, traced once for each model and batch; `layers` is another depth, `tiles` are their bytes."""
    if gpus > 1 and not is_mixture(model):  # each rank runs the step of a single one
        single = profile_of(model, 1, batch, layers, tiles)
        spread = {"ranks": tuple(range(gpus)), "divisor": gpus}
        return replace(single, params=tuple(replace(p, key=replace(p.key, **spread)) for p in single.params))
    with pretended_ranks(gpus) as mesh:
        given = named_model(model, batch=batch, seq=SEQ, mesh=mesh, layers=layers)
        if tiles is not None:
            tile_for(given.model, tiles, torch.bfloat16.itemsize)
        return trace(
            given.model,
            given.step,
            given.sample,
            world=gpus,
            compute_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,  # as it was measured
            tokens=batch * SEQ,
        )


def task_of(
    model: str, gpus: int, batch: int, hardware: Hardware, layers: int | None = None, tiles: int | None = None
) -> Task:
    """The planning problem of one row."""
    return Task(
        profile=profile_of(model, gpus, batch, layers, tiles),
        hardware=hardware,
        gpus=gpus,
        capacity_bytes=hardware.gpu_bytes,
        host_bytes=hardware.host_bytes_per_rank(gpus),
        overlaps_updates=False,  # as it was measured
    )


def planned(model: str, gpus: int, batch: int, hardware: Hardware) -> tuple[Task, PlanCandidate]:
    """The plan for one row."""
    task = task_of(model, gpus, batch, hardware)
    return task, solve(task)


@cache
def of_row(model: str, gpus: int, batch: int) -> tuple[Task, PlanCandidate]:
    """The plan for one row on the paper's machine, made once."""
    return planned(model, gpus, batch, Hardware.named(MACHINE))


def predicted(task: Task, choice: PlanCandidate, fitted: Fitted) -> float:
    """TFLOPS of a GPU if the machine's constants were `fitted`."""
    hardware = replace(task.hardware, fitted=fitted)
    step = cost.seconds(task.profile, choice.moved, hardware, task.gpus).step
    return cost.tflops_per_gpu(task.profile, step)


class Priced:
    """The seconds of a step as a function of the four constants, of which `cost.seconds` is called twice only."""

    def __init__(self, task: Task, choice: PlanCandidate) -> None:
        ones = Fitted(
            device_efficiency=1.0, exposed_collectives=0.0, host_update_slowdown=1.0, overhead_ns_per_parameter=0.0
        )
        self._found, more = (
            cost.seconds(task.profile, choice.moved, replace(task.hardware, fitted=fitted), task.gpus)
            for fitted in (ones, replace(ones, overhead_ns_per_parameter=1.0))
        )
        self._overhead = more.compute - self._found.compute

    def step(self, fitted: Fitted) -> float:
        """Seconds of a step if the machine's constants were `fitted`."""
        found = self._found
        compute = found.compute / fitted.device_efficiency + self._overhead * fitted.overhead_ns_per_parameter
        overlapped = max(compute + found.units, found.fetch, found.offload)
        hiding = max(compute, found.fetch, found.offload)
        exposed = max(fitted.exposed_collectives * found.collectives, found.collectives - hiding)
        return overlapped + exposed + found.device_update + fitted.host_update_slowdown * found.host_update


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of the table with its plan."""

    model: str
    gpus: int
    batch: int
    measured: float
    """TFLOPS of a GPU, as `predicted`."""
    task: Task
    choice: PlanCandidate
    priced: Priced

    def error(self, fitted: Fitted) -> float:
        """Relative error of the prediction if the machine's constants were `fitted`."""
        return cost.tflops_per_gpu(self.task.profile, self.priced.step(fitted)) / self.measured - 1


def planned_rows() -> list[Row]:
    """All rows that can be read, with their plans on the paper's machine."""
    return [
        Row(
            model=model,
            gpus=gpus,
            batch=batch,
            measured=measured,
            task=task,
            choice=choice,
            priced=Priced(task, choice),
        )
        for model, gpus, batch, measured in rows()
        for task, choice in [of_row(model, gpus, batch)]
    ]


def fit_rows(table: Sequence[Row], *starts: Fitted) -> Fitted:
    """The constants with the least sum of the mean and a tenth of the largest error, of all that fits from `starts`."""

    def loss(fitted: Fitted) -> float:
        sizes = [abs(row.error(fitted)) for row in table]
        return sum(sizes) / len(sizes) + 0.1 * max(sizes)

    return min((fit(loss, start) for start in starts), key=loss)


HELD_OUT: dict[str, Callable[[Row], object]] = {
    "model": lambda row: row.model,
    "number of GPUs": lambda row: row.gpus,
    "batch": lambda row: row.batch,
}
"""The property that rows held out together share, by its name in the output."""
UNFITTED = [
    Fitted(
        device_efficiency=0.5, exposed_collectives=exposed, host_update_slowdown=slowdown, overhead_ns_per_parameter=0.1
    )
    for exposed in (0.1, 0.5)
    for slowdown in (1.0, 4.0)
]
"""Where a fit begins that must not know the table."""


def held_out(table: Sequence[Row], alike: Callable[[Row], object]) -> list[tuple[Row, float]]:
    """Each row with its error by constants that were fitted to the rows that are not `alike`."""
    found = list[tuple[Row, float]]()
    for one in dict.fromkeys(map(alike, table)):
        fitted = fit_rows([row for row in table if alike(row) != one], *UNFITTED)
        found += [(row, row.error(fitted)) for row in table if alike(row) == one]
    return found


def fit(loss: Callable[[Fitted], float], start: Fitted) -> Fitted:
    """Coordinate descent with shrinking steps: four constants need no more."""
    best, step = start, 0.2
    while step > 0.001:
        tried = [
            replace(best, **{name: value * factor})
            for name, value in asdict(best).items()
            for factor in (1 - step, 1 + step)
        ]
        winner = min(tried, key=loss)
        best, step = (winner, step) if loss(winner) < loss(best) else (best, step / 2)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the four constants again")
    known = parser.parse_args(arguments)
    hardware = Hardware.named(MACHINE)
    table = planned_rows()
    fitted = fit_rows(table, hardware.fitted) if known.fit else hardware.fitted
    print(f"{'model':10} {'GPUs':>4} {'batch':>5} {'measured':>9} {'predicted':>9} {'error':>7}  plan")
    off = [row.error(fitted) for row in table]
    for row, error in zip(table, off, strict=True):
        choice = row.choice
        blocks, chunks = choice.plan.blocks(choice.layout), len(choice.layout.chunks)
        plan = f"{blocks} blocks, {choice.chunks_in(Tier.DEVICE)} of {chunks} chunks on the device"
        figures = f"{row.measured:9.1f} {row.measured * (1 + error):9.1f} {error:+7.1%}"
        print(f"{row.model:10} {row.gpus:4} {row.batch:5} {figures}  {plan}")
    print(
        f"mean error {sum(map(abs, off)) / len(off):.1%}, largest {max(map(abs, off)):.1%}, {len(off)} rows; {fitted}"
    )
    for name, alike in HELD_OUT.items():
        errors = held_out(table, alike)
        row, worst = max(errors, key=lambda found: abs(found[1]))
        mean = sum(abs(error) for _, error in errors) / len(errors)
        print(
            f"held out by {name}: mean error {mean:.1%}, largest {abs(worst):.1%}, {row.model} on {row.gpus} GPUs at "
            f"batch {row.batch}"
        )


if __name__ == "__main__":
    main()
