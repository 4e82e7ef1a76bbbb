"""The printed results of Elixir v1, and the planner's predictions of them: part of ``make paper-table``.

The machine is known but for two figures, which are ours: sequences are of 1024 tokens, as in v2, and the 21B GPT has
v2's width of 8192 and 25 layers, which are 20.6 billion parameters. The constants were fitted to v2's table, not here.
DeepSpeed is ZeRO-3 with offload, for mixtures ZeRO-2 with offload, as `paper_baselines` has them. Figures 6 to 9 are
pictures: only what the text says of them is compared. Of Figure 6 it says where throughput rises and falls, and names
no model or batch: two models of v2 on its machine stand in.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.paper_baselines import PEERS
from benchmarks.paper_table import MACHINE, task_of
from elixir_moe.chunks.plan import Plan, Tier
from elixir_moe.errors import PlanError
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.solve import PlanCandidate, Task, price, solve
from elixir_tools.fit import strategies
from elixir_tools.models.shapes import is_mixture

RESULTS = Path(__file__).with_name("elixir_v1.json")
LIMIT_BYTES = 40 * 10**9
"""Device memory that the paper allows itself on its 80 GB GPUs."""
HOST_BYTES = 500 * 10**9
GPT_21B = ("gpt2-20b", 25)
"""(named model, layers)."""
BASELINE = ("opt-2.7b", 36)
"""(model, batch) of PyTorch on the whole 80 GB; the batch is Table II's."""
SCALING_MACHINE = "aws-p4de-a100-80g-x8"
"""The machine of Figure 6."""
SMALL, LARGE = "gpt2-4b", "gpt2-15b"
FEWER, MORE = 4, 8
"""Batches of a GPU."""


def shape(model: str) -> tuple[str, int | None]:
    """(named model, layers if other than its own) of a model of the paper."""
    return GPT_21B if model == "gpt-21b" else (model, None)


def runs(row: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """(GPUs, batch) of Elixir's runs in a row of Table II, as far as the text tells which batch is whose."""
    batches = row["Elixir"]
    gpus = (1, 2, 4) if len(batches) == 1 else (1, 4)
    for count in gpus:
        yield count, batches[-1] if count == 4 else batches[0]


def batch_of_deepspeed(row: dict[str, Any], gpus: int) -> int | None:
    """DeepSpeed's batch in a row of Table II; None if out of memory, or if the text does not tell."""
    batches: list[int | None] = row["DeepSpeed"]
    by_gpus = {1: dict.fromkeys((1, 2, 4), batches[0]), 2: dict(zip((1, 4), batches, strict=False))}
    return by_gpus.get(len(batches), dict(zip((1, 2, 4), batches, strict=False))).get(gpus)


def deepspeed(model: str, gpus: int, batch: int, hardware: Hardware) -> float | None:
    """Predicted relative TFLOPS of DeepSpeed; None if it does not fit."""
    named, layers = shape(model)
    task = task_of(named, gpus, batch, hardware, layers)
    peer = PEERS["ds_z2_o" if is_mixture(named) else "ds_z3_o"]
    plan = price(task, strategies.plans(task)[peer.strategy][0])
    numel = task.profile.parameters // gpus
    if not peer.fits(task, plan.size, numel):
        return None
    return cost.tflops_per_gpu(task.profile, peer.step(plan.seconds, numel))


def found(model: str, gpus: int, batch: int, hardware: Hardware) -> tuple[Task, PlanCandidate | None]:
    """The planning problem of a run, and its plan if one fits."""
    named, layers = shape(model)
    task = task_of(named, gpus, batch, hardware, layers)
    try:
        return task, solve(task)
    except PlanError:
        return task, None


def tflops(task: Task, choice: PlanCandidate) -> float:
    """Predicted relative TFLOPS, the paper's equation 1."""
    return cost.tflops_per_gpu(task.profile, choice.seconds.step)


def compared(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Each run of Table II with its prediction, and what was measured where the paper prints it."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    measured, its_measured = (
        {row["gpus"]: row["tflops"] for row in results["table-1"] if row["framework"] == framework}
        for framework in ("Elixir", "DeepSpeed")
    )
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
            rival = batch_of_deepspeed(row, gpus)
            its["deepspeed_batch"] = rival
            its["deepspeed"] = None if rival is None else deepspeed(row["model"], gpus, rival, limited)
            its["deepspeed_measured"] = its_measured[gpus] if row["model"] == "gpt-21b" else None
            its["times"] = its["predicted"] / its["deepspeed"] if its["predicted"] and its["deepspeed"] else None
            if row["model"] == "gpt-21b":
                its["measured"] = measured[gpus]
            if (row["model"], gpus) == ("opt-30b", 1):
                its |= {
                    "measured": ratio,
                    "of": "the baseline",
                    "predicted": its["predicted"] and its["predicted"] / baseline,
                }
            yield its


def claims(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The claims of the text about Figures 7 and 9, with our figures: the least and the most."""
    texts = [row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["text"] if "times" in row]
    by_run = {(row["model"], row["gpus"]): row for row in rows}
    dense = [row["times"] for row in rows if row["model"].startswith("opt") and row["gpus"] == 1 and row["times"]]
    mixtures = [row["times"] for row in rows if row["model"].startswith("pr-moe") and row["times"]]
    sizes = [by_run["pr-moe-16b", gpus]["predicted"] / by_run["opt-13b", gpus]["predicted"] for gpus in (1, 4)]
    for claim, ours in zip(texts, (dense, mixtures, sizes), strict=True):
        yield claim | {"ours": [min(ours), max(ours)], "runs": len(ours)}


def scaling(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """The text's claims about Figure 6, and the factor on a GPU's throughput for the smaller and the larger model."""

    @cache
    def reached(model: str, gpus: int, batch: int) -> float:
        task, choice = found(model, gpus, batch, hardware)
        assert choice is not None, "the machine holds both models"
        return tflops(task, choice)

    for says, paper, before, after in (
        ("two GPUs instead of one", "falls", (1, MORE), (2, MORE)),
        ("eight GPUs instead of two", "rises", (2, MORE), (8, MORE)),
        ("two instances instead of one", "falls seriously", (8, MORE), (16, MORE)),
        (
            f"a batch of {MORE} instead of {FEWER}, on one GPU",
            "gains more, the larger the model",
            (1, FEWER),
            (1, MORE),
        ),
    ):
        ours = [reached(model, *after) / reached(model, *before) for model in (SMALL, LARGE)]
        yield {"says": says, "paper": paper, "ours": ours}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    known = parser.parse_args(arguments)
    rows = list(compared(Hardware.named(MACHINE)))
    errors = [row["predicted"] / row["measured"] - 1 for row in rows if row["measured"] and row["predicted"]]
    mean = sum(map(abs, errors)) / len(errors)
    rivals = [r["deepspeed"] / r["deepspeed_measured"] - 1 for r in rows if r["deepspeed"] and r["deepspeed_measured"]]
    said = list(claims(rows))
    scaled = list(scaling(Hardware.named(SCALING_MACHINE)))
    if known.json:
        facts = {"rows": rows, "mean_error": mean, "compared": len(errors), "rivals": rivals}
        print(json.dumps({**facts, "claims": said, "scaling": scaled}))
        return
    print("Elixir v1, Tables I and II: relative TFLOPS of a GPU; ?: the text does not tell the batch, or out of memory")
    titles = ("measured", "predicted", "error")
    print(
        f"{'model':10} {'GPUs':>4} {'batch':>5} {'fits':>5} {_columns(titles)}  {'batch':>5} {_columns(titles)} times"
    )
    for row in rows:
        its = _columns(_compared(row["measured"], row["predicted"]))
        theirs = _columns(_compared(row["deepspeed_measured"], row["deepspeed"]))
        note = f"  of {row['of']}" if "of" in row else ""
        print(
            f"{row['model']:10} {row['gpus']:4} {row['batch']:5} {row['fits']!s:>5} {its}"
            f"  {row['deepspeed_batch'] or '?':>5} {theirs} {_shown(row['times']):>5}{note}"
        )
    print(f"Elixir: mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}, of {len(errors)} measured figures")
    off = [abs(error) for error in rivals]
    print(f"DeepSpeed: mean error {sum(off) / len(off):.1%}, largest {max(off):.1%}, of {len(off)} measured figures")
    for claim in said:
        paper, ours = ("-".join(f"{value:.1f}" for value in dict.fromkeys(claim[key])) for key in ("times", "ours"))
        print(f"{claim['where']}: {claim['says']} {paper}; by the plan {ours}, of {claim['runs']} runs")
    fit = sum(row["fits"] for row in rows)
    print(f"{fit} of {len(rows)} runs that the paper made fit by the plan")
    ran = [row["deepspeed"] is not None for row in rows if row["deepspeed_batch"]]
    print(f"{sum(ran)} of {len(ran)} runs that DeepSpeed made fit by its plan")
    print(f"Figure 6: throughput of a GPU, {SMALL} and {LARGE} on {SCALING_MACHINE}")
    for row in scaled:
        print(f"{row['says']}: {row['paper']}; by the plan {', '.join(f'{factor - 1:+.1%}' for factor in row['ours'])}")
    print("Figures 6, 8 and 9 are pictures; the text has no throughput of them, nor the shapes and batches of Figure 6")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _compared(measured: float | None, predicted: float | None) -> tuple[str, str, str]:
    error = f"{predicted / measured - 1:+.1%}" if measured and predicted else "-"
    return _shown(measured), _shown(predicted), error


def _columns(texts: tuple[str, str, str]) -> str:
    return f"{texts[0]:>9} {texts[1]:>9} {texts[2]:>7}"


if __name__ == "__main__":
    main()
