"""What Elixir v1 prints of its results, beside what the planner predicts: part of ``make paper-table``.

The machine is known but for two figures, which are ours: sequences are of 1024 tokens, as in v2, and the 21B GPT has
v2's width of 8192 and 25 layers, which are 20.6 billion parameters. The constants were fitted to v2's table, not here.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper_table import MACHINE, task_of
from elixir_moe.chunks.plan import Plan, Tier
from elixir_moe.errors import PlanError
from elixir_moe.search import cost
from elixir_moe.search.hardware import Hardware
from elixir_moe.search.solve import Choice, Task, price, solve

RESULTS = Path(__file__).with_name("elixir_v1.json")
LIMIT_BYTES = 40 * 10**9
"""Device memory that the paper allows itself on its 80 GB GPUs."""
HOST_BYTES = 500 * 10**9
GPT_21B = ("gpt2-20b", 25)
"""(named model, layers)."""
BASELINE = ("opt-2.7b", 36)
"""(model, batch) of PyTorch on the whole 80 GB; the batch is Table II's."""


def shape(model: str) -> tuple[str, int | None]:
    """(named model, layers if other than its own) of a model of the paper."""
    return GPT_21B if model == "gpt-21b" else (model, None)


def runs(row: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """(GPUs, batch) of Elixir's runs in a row of Table II, as far as the text tells which batch is whose."""
    batches = row["Elixir"]
    gpus = (1, 2, 4) if len(batches) == 1 else (1, 4)
    for count in gpus:
        yield count, batches[-1] if count == 4 else batches[0]


def found(model: str, gpus: int, batch: int, hardware: Hardware) -> tuple[Task, Choice | None]:
    """The planning problem of a run, and its plan if one fits."""
    named, layers = shape(model)
    task = task_of(named, gpus, batch, hardware, layers)
    try:
        return task, solve(task)
    except PlanError:
        return task, None


def tflops(task: Task, choice: Choice) -> float:
    """Predicted relative TFLOPS, the paper's equation 1."""
    return cost.tflops_per_gpu(task.profile, choice.seconds.step)


def compared(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Each run of Table II with its prediction, and what was measured where the paper prints it."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    measured = {row["gpus"]: row["tflops"] for row in results["table-1"] if row["framework"] == "Elixir"}
    limited = replace(hardware, gpu_bytes=LIMIT_BYTES, cpu_bytes=HOST_BYTES)
    (ratio,) = (row["ratio"] for row in results["text"] if "ratio" in row)
    name, batch = BASELINE
    whole = task_of(name, 1, batch, hardware)
    baseline = tflops(whole, price(whole, Plan.ddp()))
    for row in results["table-2"]:
        for gpus, batch in runs(row):
            task, choice = found(row["model"], gpus, batch, limited)
            mine = {"model": row["model"], "gpus": gpus, "batch": batch, "fits": choice is not None}
            its = mine | {"predicted": None if choice is None else tflops(task, choice), "measured": None}
            if choice is not None:
                its["device_chunks"], its["chunks"] = choice.chunks_in(Tier.DEVICE), len(choice.layout.chunks)
            if row["model"] == "gpt-21b":
                its["measured"] = measured[gpus]
            if (row["model"], gpus) == ("opt-30b", 1):
                its |= {
                    "measured": ratio,
                    "of": "the baseline",
                    "predicted": its["predicted"] and its["predicted"] / baseline,
                }
            yield its


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    known = parser.parse_args(arguments)
    rows = list(compared(Hardware.named(MACHINE)))
    errors = [row["predicted"] / row["measured"] - 1 for row in rows if row["measured"] and row["predicted"]]
    mean = sum(map(abs, errors)) / len(errors)
    if known.json:
        print(json.dumps({"rows": rows, "mean_error": mean, "compared": len(errors)}))
        return
    print(f"{'model':10} {'GPUs':>4} {'batch':>5} {'fits':>5} {'measured':>9} {'predicted':>9} {'error':>7}")
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        both = measured is not None and predicted is not None
        shown = [f"{value:9.2f}" if value is not None else " " * 8 + "-" for value in (measured, predicted)]
        error = f"{predicted / measured - 1:+7.1%}" if both else f"{'-':>7}"
        note = f"  of {row['of']}" if "of" in row else ""
        print(f"{row['model']:10} {row['gpus']:4} {row['batch']:5} {row['fits']!s:>5} {' '.join(shown)} {error}{note}")
    fit = sum(row["fits"] for row in rows)
    print(f"mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}, of {len(errors)} measured figures")
    print(f"{fit} of {len(rows)} runs that the paper made fit by the plan")


if __name__ == "__main__":
    main()
