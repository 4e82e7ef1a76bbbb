"""The steps of the proof, in the order of their worth.

Owns the list. Imports only the standard library.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.proof.bound import bound
from benchmarks.proof.steps import Journal, Step

ONE_PASS = "ours-one-pass"
MUON = "ours-muon"
"""Muon for the matrices of layers, AdamW for the rest."""
OFFLOADING_PEERS = ("fsdp2-offload", "deepspeed-zero3-offload")
MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2-5.5b": (78, (MUON, *OFFLOADING_PEERS)),
    "qwen3-30b-a3b-lora": (40, OFFLOADING_PEERS),
    "gpt2-4b": (40, OFFLOADING_PEERS),
    "pr-moe-6b": (78, OFFLOADING_PEERS),
}
"""Device memory in GiB, and the peers. The state of 4, 5.5 and 6 B parameters is 56, 81 and 91 GiB. DeepSpeed holds the
smallest of them in 128 GiB of host memory."""
IN_LITTLE: dict[str, tuple[int, tuple[str, ...]]] = {
    "qwen3-30b-a3b-lora-24g": (24, (ONE_PASS, "fsdp2-offload")),
    "gpt2-5.5b-24g": (24, (ONE_PASS, "fsdp2-offload")),
}
"""Models for a card of little memory: steps of `MANY` micro-batches, in one pass and by the plain loop."""
MANY = 8
ROWS = {accumulation: MODELS for accumulation in (1, 4)} | {MANY: IN_LITTLE}
"""{micro-batches of a step: {model: (GiB, other contenders than ours)}}."""
WANTED_OF_PEER, WANTED_OF_BOUND = 1.5, 0.85
"""The targets for ours: a multiple of the best offloading peer's tokens a second, and a fraction of the bound."""

SECONDS = 150
"""The limit of a case."""
MORE_SECONDS = {
    "deepspeed-zero3-offload": 300,
    "qwen3-30b-a3b-lora": 240,
    "qwen3-30b-a3b-lora-24g": 240,
    "gpt2-5.5b-24g": 240,
}
"""Limits of some: DeepSpeed compiles its kernels at their first use, 57 GiB of weights take a while to make, and eight
micro-batches a while to train under FSDP2."""

_PYTHON = sys.executable


def build_step(site: Path, wheels: Path | None) -> Step:
    """Makes the library importable and looks at the machine; the other steps need its figures."""
    command = (_PYTHON, "-m", "benchmarks.proof.build", str(site), *([str(wheels)] if wheels else []))
    return Step(name="build", command=command, seconds=180)


def steps(out: Path, machine: dict[str, Any], environment: dict[str, str]) -> list[Step]:
    """All other steps; those of traces come last, and `trace_wanted` says which of them are to be run.

    Args:
        out: folder of the results.
        machine: the figures of the build.
        environment: variables with which the library is found.
    """
    on_gpu = machine["device"] is not None
    pytest = (_PYTHON, *_PYTEST, "-m", "gpu" if on_gpu else "not gpu and not slow")
    together = () if "xdist" in machine["lacks"] or not on_gpu else ("-n", str(_PROCESSES))
    sanitized = {"TORCH_CUDA_SANITIZER": "1"} if on_gpu else {}
    first, second, *others = MODELS
    found = [
        Step(
            name="first parity",
            command=(*pytest, *together, "tests/gpu/test_parity.py", "-k", _FIRST_PARITY),
            seconds=90,
        ),
        *(_case(first, contender, 1) for contender in _QUICK),
        _module("rates", seconds=60),
        *(_case(second, contender, 1) for contender in _QUICK),
        Step(name="tests", command=(*pytest, *together, "tests/gpu", *_OTHER_TESTS * on_gpu), seconds=240),
        replace(_module("tests.support.gpu_cases", seconds=90), name="sanitizer", environment=sanitized),
        _module("decoding", seconds=60),
        *(_module("plain", model, seconds=60) for model in MODELS),
        *(_case(model, contender, MANY) for contender in (ONE_PASS, *_QUICK) for model in IN_LITTLE),
        *(_module("plain", model, seconds=60) for model in IN_LITTLE),
        *(_case(model, contender, 1) for model in others for contender in ("ours", *MODELS[model][1])),
        *(_case(model, contender, 4) for model in MODELS for contender in ("ours", *MODELS[model][1])),
        *(_case(model, peer, 1) for model in (first, second) for peer in MODELS[model][1] if peer not in _QUICK),
        *(_case(model, "ours", 1, trace=out / f"trace-{model}.json.gz") for model in MODELS),
    ]
    return [
        replace(step, environment=environment | step.environment, left_out=_lacking(step, machine["lacks"]))
        for step in found
    ]


def _lacking(step: Step, lacks: list[str]) -> str | None:
    for package, part in (("deepspeed", "deepspeed"), ("transformers", "qwen3")):
        if package in lacks and part in step.name:
            return f"{package} is not installed"
    return None


_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--import-mode=append")
"""Appended, for the library comes from PYTHONPATH, wherever the tests are."""
_PROCESSES = 8
"""Processes that test side by side on one GPU, where pytest-xdist is."""
_FIRST_PARITY = "every_plan and (dense or mixture) and (zero3 or auto)"
_QUICK = ("ours", "fsdp2-offload")
"""The contenders that are measured first: a ratio says more than a figure."""
_OTHER_TESTS = ("tests/moe/test_moe.py",)


def _module(name: str, *arguments: str, seconds: float) -> Step:
    module = name if "." in name else f"benchmarks.proof.{name}"
    return Step(name=" ".join((name, *arguments)), command=(_PYTHON, "-m", module, *arguments), seconds=seconds)


def _case(model: str, contender: str, accumulation: int, *, trace: Path | None = None) -> Step:
    case = {
        "contender": contender,
        "model": model,
        "accumulation": accumulation,
        "limit_gib": (MODELS | IN_LITTLE)[model][0],
    }
    command = [_PYTHON, "-m", "benchmarks.proof.case", json.dumps(case)]
    name = bench_name(model, contender, accumulation) if trace is None else trace_name(model)
    seconds = max(MORE_SECONDS.get(part, SECONDS) for part in (model, contender))
    return Step(name=name, command=(*command, *(["--trace", str(trace)] if trace else [])), seconds=seconds)


def bench_name(model: str, contender: str, accumulation: int) -> str:
    """The name of the step of a case."""
    return f"bench {model} {contender} x{accumulation}"


def trace_name(model: str) -> str:
    """The name of the step that traces ours."""
    return f"trace {model}"


def compared(journal: Journal, model: str, contender: str, accumulation: int) -> dict[str, Any] | None:
    """The figures of a case, with those that compare it: with ours (``loss_gap``, the largest relative difference of
    the losses of all steps; ``of_ours``, of tokens a second) and with the bound. None if it has no good result.
    """
    row, rates = journal.figures(bench_name(model, contender, accumulation)), journal.figures("rates")
    if row is None:
        return None
    ours = journal.figures(bench_name(model, "ours", accumulation))
    if ours is not None:
        gaps = [abs(a / b - 1) for a, b in zip(row["losses"], ours["losses"], strict=True)]
        row |= {"loss_gap": max(gaps), "of_ours": row["tokens_per_second"] / ours["tokens_per_second"]}
    if rates is not None:
        seconds, what = bound(rates, (ours or {"activation_bytes": 0}) | row, journal.figures(f"plain {model}"))
        row |= {"bound_seconds": seconds, "limited_by": what, "of_bound": seconds / row["seconds"]}
    return row


def trace_wanted(journal: Journal, model: str) -> bool:
    """Whether ours misses what it should reach."""
    ours = compared(journal, model, "ours", 1)
    if ours is None or "of_bound" not in ours:
        return False
    peers = [compared(journal, model, peer, 1) for peer in OFFLOADING_PEERS]
    best = max((peer["tokens_per_second"] for peer in peers if peer), default=0.0)
    return ours["tokens_per_second"] < WANTED_OF_PEER * best or ours["of_bound"] < WANTED_OF_BOUND
