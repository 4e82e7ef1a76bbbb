"""The printed results of Elixir v1, and the planner's predictions of them: part of ``make paper-table``.

The machine is known but for two figures, which are ours: sequences are of 1024 tokens, as in v2, and the 21B GPT has
v2's width of 8192 and 25 layers, which are 20.6 billion parameters. The constants were fitted to v2's table, not here.
Elixir v1 has no search and no chunks on the device: with its O_FLAG, all chunks are in host memory. Where a model does
not fit so, it is cut into tiles, which are ours. DeepSpeed is ZeRO-3 with offload, for mixtures ZeRO-2 with offload, as
`paper_baselines` has them. Figures 6 to 9 are pictures: only what the text says of them is compared. Of Figure 6 it
says where throughput rises and falls, and names no model or batch: two models of v2 on its machine stand in.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.paper_baselines import PEERS
from benchmarks.paper_table import MACHINE, task_of
from elixir_moe.chunks.plan import size_text
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.solve import PlanCandidate, price
from elixir_tools.fit import strategies
from elixir_tools.models.shapes import is_mixture

RESULTS = Path(__file__).with_name("elixir_v1.json")
LIMIT_BYTES = 40 * 10**9
"""Device memory that the paper allows itself on its 80 GB GPUs."""
HOST_BYTES = 500 * 10**9
TILE_BYTES = 512 * 2**20
"""The tiles that `elixir-moe plan` chooses on a GPU of 40 GB."""
GPT_21B = ("gpt2-20b", 25)
"""(named model, layers)."""
SCALING_MACHINE = "aws-p4de-a100-80g-x8"
"""The machine of Figure 6."""
SMALL, LARGE = "gpt2-4b", "gpt2-15b"
FEWER, MORE = 4, 8
"""Batches of a GPU."""
_Slower = Callable[[float], Hardware]
"""A machine whose GPUs or nodes are joined with so many 1e9 bytes per second."""


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


def found(model: str, gpus: int, batch: int, hardware: Hardware) -> tuple[PlanCandidate | None, int | None]:
    """(the plan of v1 for a run, the bytes of tiles); None where none fits, or no tiles are needed."""
    named, layers = shape(model)
    for tiles in (None, TILE_BYTES):
        task = task_of(named, gpus, batch, hardware, layers, tiles)
        choice = price(task, strategies.plans(task)["zero-3-offload"][0])
        device, host = task.held_bytes(choice.size)
        if device <= task.allowed_bytes and host <= task.host_bytes:
            return choice, tiles
    return None, None


def tflops(choice: PlanCandidate) -> float:
    """Predicted relative TFLOPS, the paper's equation 1."""
    return cost.tflops_per_gpu(choice.task.profile, choice.seconds.step)


def unslowed(choice: PlanCandidate) -> PlanCandidate:
    """The plan if Adam in host memory had the rate of v2's Table 4 within a step, too."""
    found = choice.seconds
    host = found.host_update / choice.task.hardware.fitted.host_update_slowdown
    return replace(choice, seconds=replace(found, host_update=host))


def compared(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Each run of Table II with its prediction, and what was measured where the paper prints it."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    measured, its_measured = (
        {row["gpus"]: row["tflops"] for row in results["table-1"] if row["framework"] == framework}
        for framework in ("Elixir", "DeepSpeed")
    )
    limited = replace(hardware, gpu_bytes=LIMIT_BYTES, cpu_bytes=HOST_BYTES)
    for row in results["table-2"]:
        for gpus, batch in runs(row):
            choice, tiles = found(row["model"], gpus, batch, limited)
            its: dict[str, Any] = {"model": row["model"], "gpus": gpus, "batch": batch, "fits": choice is not None}
            its |= {"predicted": None, "measured": None, "tiles": tiles}
            if choice is not None:
                its |= {"predicted": tflops(choice), "unslowed": tflops(unslowed(choice))}
                its |= {"blocks": choice.plan.blocks(choice.layout), "chunks": len(choice.layout.chunks)}
            rival = batch_of_deepspeed(row, gpus)
            its["deepspeed_batch"] = rival
            its["deepspeed"] = None if rival is None else deepspeed(row["model"], gpus, rival, limited)
            its["deepspeed_measured"] = its_measured[gpus] if row["model"] == "gpt-21b" else None
            its["times"] = its["predicted"] / its["deepspeed"] if its["predicted"] and its["deepspeed"] else None
            if row["model"] == "gpt-21b":
                its["measured"] = measured[gpus]
            yield its


def claims(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The claims of the text about Figures 7 and 9, with our figures: the least and the most, and `unslowed`.

    OPT 30B is compared with OPT 6.7B, which reaches the baseline by the text of Figure 7. A mixture is compared with
    the dense model of its size on as many GPUs.
    """
    by_run = {(row["model"], row["gpus"]): row for row in rows}

    def over(name: str, dense: str, gpus: int, rate: str) -> float:
        return float(by_run[name, gpus][rate] / by_run[dense, gpus][rate])

    for claim in (row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["text"]):
        found = dict[str, list[float]]()
        for rate in ("predicted", "unslowed"):
            if claim["claim"] == "baseline":
                found[rate] = [over("opt-30b", "opt-6.7b", 1, rate)]
            elif claim["claim"] == "mixture over dense":
                pairs = [("pr-moe-16b", "opt-13b", n) for n in (1, 4)] + [
                    ("pr-moe-29b", "opt-30b", n) for n in (1, 2, 4)
                ]
                found[rate] = [over(*pair, rate) for pair in pairs]
            else:
                kind = "opt" if claim["claim"] == "DeepSpeed" else "pr-moe"
                alike = [
                    r for r in rows if r["model"].startswith(kind) and r["times"] and (kind != "opt" or r["gpus"] == 1)
                ]
                found[rate] = [row["times"] * row[rate] / row["predicted"] for row in alike]
        ours, fast = found["predicted"], found["unslowed"]
        yield claim | {"ours": [min(ours), max(ours)], "unslowed": [min(fast), max(fast)], "runs": len(ours)}


def scaling(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """The text's claims about Figure 6, and the factor on a GPU's throughput for the smaller and the larger model."""

    @cache
    def reached(model: str, gpus: int, batch: int) -> float:
        choice, _ = found(model, gpus, batch, hardware)
        assert choice is not None, "the machine holds both models"
        return tflops(choice)

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


def _rate(factor: Callable[[float], float], wanted: float) -> float:
    """The rate at which a factor that grows with it is as `wanted`, by bisection."""
    low, high = 0.01, 1000.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if factor(middle) > wanted else (middle, high)
    return high


def network(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """The rates between GPUs or instances with which a GPU's throughput falls as the text about Figure 6 says."""

    def between_gpus(rate: float) -> Hardware:
        return replace(hardware, by_gpus=hardware.by_gpus | {2: replace(hardware.links(2), b_g2g=rate)})

    def between_nodes(rate: float) -> Hardware:
        return replace(hardware, node_bandwidth=rate)

    for says, before, after, slower, wanted in (
        ("two GPUs are as fast as one each", 1, 2, between_gpus, 1.0),
        ("two instances are as fast as one each", 8, 16, between_nodes, 1.0),
        ("two instances are half as fast each", 8, 16, between_nodes, 0.5),
    ):
        ours = list[float]()
        for model in (SMALL, LARGE):
            (one, _), (two, _) = (found(model, gpus, MORE, hardware) for gpus in (before, after))
            assert one is not None and two is not None, "the machine holds both models"
            few, many = one.seconds.step, two

            def factor(rate: float, few: float = few, many: PlanCandidate = many, slower: _Slower = slower) -> float:
                there = replace(many.task, hardware=slower(rate)).seconds(many.moved)
                return few / replace(there, stall=many.seconds.stall).step

            ours.append(_rate(factor, wanted))
        yield {"says": says, "ours": ours}


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
    networks = list(network(Hardware.named(SCALING_MACHINE)))
    if known.json:
        facts = {"rows": rows, "mean_error": mean, "compared": len(errors), "rivals": rivals}
        print(json.dumps({**facts, "claims": said, "scaling": scaled, "networks": networks}))
        return
    print("Elixir v1, Tables I and II: relative TFLOPS of a GPU; ?: the text does not tell the batch, or out of memory")
    titles = ("measured", "predicted", "error")
    print(f"{'model':10} {'GPUs':>4} {'batch':>5} {_columns(titles)}  {'batch':>5} {_columns(titles)} times  plan")
    for row in rows:
        its = _columns(_compared(row["measured"], row["predicted"]))
        theirs = _columns(_compared(row["deepspeed_measured"], row["deepspeed"]))
        plan = f"{row['blocks']} blocks, {row['chunks']} chunks in host memory" if row["fits"] else "does not fit"
        plan += "" if row["tiles"] is None else f", tiles of {size_text(row['tiles'])}"
        print(
            f"{row['model']:10} {row['gpus']:4} {row['batch']:5} {its}"
            f"  {row['deepspeed_batch'] or '?':>5} {theirs} {_shown(row['times']):>5}  {plan}"
        )
    print(f"Elixir: mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}, of {len(errors)} measured figures")
    off = [abs(error) for error in rivals]
    print(f"DeepSpeed: mean error {sum(off) / len(off):.1%}, largest {max(off):.1%}, of {len(off)} measured figures")
    for claim in said:
        paper, ours, fast = (_range(claim[key]) for key in ("times", "ours", "unslowed"))
        print(
            f"{claim['where']}: {claim['says']} {paper}; by the plan {ours}, of {claim['runs']} runs; unslowed {fast}"
        )
    fast = ", ".join(f"{row['unslowed']:.1f}" for row in rows if row["measured"])
    print(f"unslowed, with Adam in a step as fast as by itself (v2, Table 4), the 21B GPT would reach {fast}")
    fit = sum(row["fits"] for row in rows)
    print(f"{fit} of {len(rows)} runs that the paper made fit by the plan")
    ran = [row["deepspeed"] is not None for row in rows if row["deepspeed_batch"]]
    print(f"{sum(ran)} of {len(ran)} runs that DeepSpeed made fit by its plan")
    print(f"Figure 6: throughput of a GPU, {SMALL} and {LARGE} on {SCALING_MACHINE}")
    for row in scaled:
        print(f"{row['says']}: {row['paper']}; by the plan {', '.join(f'{factor - 1:+.1%}' for factor in row['ours'])}")
    for row in networks:
        print(f"{row['says']} with {', '.join(f'{rate:.1f}' for rate in row['ours'])} GB/s between them")
    print("Figures 6, 8 and 9 are pictures; the text has no throughput of them, nor the shapes and batches of Figure 6")


def _range(values: Sequence[float]) -> str:
    return "-".join(dict.fromkeys(f"{value:.2f}" for value in values))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _compared(measured: float | None, predicted: float | None) -> tuple[str, str, str]:
    error = f"{predicted / measured - 1:+.1%}" if measured and predicted else "-"
    return _shown(measured), _shown(predicted), error


def _columns(texts: tuple[str, str, str]) -> str:
    return f"{texts[0]:>9} {texts[1]:>9} {texts[2]:>7}"


if __name__ == "__main__":
    main()
