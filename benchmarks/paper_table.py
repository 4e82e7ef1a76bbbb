"""The measured steps of Elixir v2, Table 8, and the planner's predictions of them: ``make paper-table``.

Prints each row, its error and the mean. ``--fit`` fits the four constants of the hardware file again: the same for all
rows, by the sum of the mean and a tenth of the largest error, over plans made with the previous constants.
"""

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch

from elixir_moe.chunks.plan import Tier
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Fitted, Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import PlanCandidate, Task, solve
from elixir_moe.planner.trace import trace
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
def profile_of(model: str, gpus: int, batch: int, layers: int | None = None) -> Profile:
    """The step of one GPU, traced once for each model and batch; `layers` is another depth of the model."""
    if gpus > 1 and not is_mixture(model):  # each rank runs the step of a single one
        single = profile_of(model, 1, batch, layers)
        spread = {"ranks": tuple(range(gpus)), "divisor": gpus}
        return replace(single, params=tuple(replace(p, key=replace(p.key, **spread)) for p in single.params))
    with pretended_ranks(gpus) as mesh:
        given = named_model(model, batch=batch, seq=SEQ, mesh=mesh, layers=layers)
        return trace(
            given.model,
            given.step,
            given.sample,
            world=gpus,
            compute_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,  # as it was measured
            tokens=batch * SEQ,
        )


def task_of(model: str, gpus: int, batch: int, hardware: Hardware, layers: int | None = None) -> Task:
    """The planning problem of one row."""
    return Task(
        profile=profile_of(model, gpus, batch, layers),
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
    table = rows()
    found = [of_row(model, gpus, batch) for model, gpus, batch, _ in table]
    measured = [tflops for *_, tflops in table]

    def errors(fitted: Fitted) -> list[float]:
        return [predicted(t, c, fitted) / m - 1 for (t, c), m in zip(found, measured, strict=True)]

    def loss(fitted: Fitted) -> float:
        sizes = [abs(e) for e in errors(fitted)]
        return sum(sizes) / len(sizes) + 0.1 * max(sizes)

    fitted = fit(loss, hardware.fitted) if known.fit else hardware.fitted
    print(f"{'model':10} {'GPUs':>4} {'batch':>5} {'measured':>9} {'predicted':>9} {'error':>7}  plan")
    off = errors(fitted)
    for (model, gpus, batch, tflops), (_, choice), error in zip(table, found, off, strict=True):
        blocks, chunks = choice.plan.blocks(choice.layout), len(choice.layout.chunks)
        plan = f"{blocks} blocks, {choice.chunks_in(Tier.DEVICE)} of {chunks} chunks on the device"
        print(f"{model:10} {gpus:4} {batch:5} {tflops:9.1f} {tflops * (1 + error):9.1f} {error:+7.1%}  {plan}")
    print(
        f"mean error {sum(map(abs, off)) / len(off):.1%}, largest {max(map(abs, off)):.1%}, {len(off)} rows; {fitted}"
    )


if __name__ == "__main__":
    main()
